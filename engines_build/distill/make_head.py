"""Make a head for a target: generate with its states kept, train, score, write the folder."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from backend import machine
from backend.engines.checkpoint import LlamaConfig, load
from backend.engines.head.folder import HeadConfig
from backend.engines.head.network import HeadNetwork
from backend.engines.head.network import load as load_network
from backend.storage.manifest import weights_sha256
from engines_build.distill.card import command_line, head_card
from engines_build.distill.data import claim, first_tokens, generate, unjudged
from engines_build.distill.export import parameters
from engines_build.distill.generate import eos_token_ids
from engines_build.distill.head import (
    HeadTrainer,
    Unroller,
    evaluate_head,
    export_head,
    load_head_samples,
)
from engines_build.distill.train import Budget, choose_shortlist

_DEPTHS = (0.1, 0.5, 0.9, 1.0)
"""Where, from bottom to top, the layers lie that a head reads by default."""

_INNER_STEP = 64


def taps_of(args: argparse.Namespace, config: LlamaConfig) -> tuple[int, ...]:
    """Return the layers to read, counted from 1. Raises ValueError for one that is not there."""
    if not args.taps:
        return tuple(sorted({max(1, round(depth * config.num_layers)) for depth in _DEPTHS}))
    taps = tuple(sorted(set(args.taps)))
    if taps[0] < 1 or taps[-1] > config.num_layers:
        raise ValueError(f"--taps: must lie in 1..{config.num_layers}, got {list(taps)}")
    return taps


def distil_head(args: argparse.Namespace) -> dict[str, Any]:
    """Run all stages as ``parse`` says. Returns the report that the model card shows."""
    start = time.monotonic()
    claim(args.work, args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    config, weights = load(args.target, served_dtype(args.device), args.device)
    taps = taps_of(args, config)
    shards, held_out = generate(args, config, weights, tokenizer, start, taps)
    embedding = weights["model.embed_tokens.weight"].float()
    rows = weights.get("lm_head.weight", embedding).float()
    weights.clear()
    samples = [s for s in load_head_samples(shards, len(taps)) if s.workload in set(args.workloads)]
    samples = unjudged(args, first_tokens(samples, args.tokens), tokenizer)
    torch.manual_seed(args.seed)
    network, shortlist = _first(args, config, taps, samples, eos_token_ids(tokenizer))
    name = f"head-{'-'.join(map(str, taps))}-sequences{len(samples)}-tokens{args.train_tokens}"
    run = args.work / f"{name}-seed{args.seed}"
    if args.start:
        run = run.with_name(f"{run.name}-start{weights_sha256(args.start)[:8]}")
    budget = Budget(args.train_tokens, args.batch, args.learning_rate, start + 60 * args.minutes)
    trainer = HeadTrainer(network, embedding, rows, shortlist, samples, args.seed, run)
    line = trainer.run(budget)
    if args.start:
        _mix_in(load_network(args.start)[0], args.start_share, network)
    network.bfloat16().float()  # as it will be stored
    unroller = Unroller(network, embedding, rows, shortlist)
    scores = evaluate_head(unroller, load_head_samples(held_out, len(taps)))
    for workload, score in scores.items():
        figures = " ".join(f"{k} {v:.3f}" for k, v in score.items())
        print(f"evaluate: {workload} {figures}", flush=True)
    report = {
        "training": line,
        "scores": scores,
        "generated_tokens": sum(len(s.tokens) - s.prompt_tokens for s in samples),
        "sequences": len(samples),
        "set_tokens": sum(len(s.tokens) for s in samples),
        "parameters": parameters(network),
        "wall_s": time.monotonic() - start,
    }
    export_head(network, shortlist, args.target, args.out)
    card = head_card(args, network.config, report, command_line(args))
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return report


def served_dtype(device: str) -> str:
    """Return the dtype that the target has where it generates: that of serving (``auto``)."""
    return "bf16" if device != "cpu" or machine.multiplies_bf16() else "fp32"


def _mix_in(start: HeadNetwork, share: float, network: HeadNetwork) -> None:
    """Move a network's weights by a share of the way back to those that its training began with, so
    that what these had learnt of other answers is not forgotten (arXiv 2109.01903).
    """
    before = dict(start.named_parameters())
    for name, weights in network.named_parameters():
        weights.data.lerp_(before[name].data, share)


def _first(
    args: argparse.Namespace,
    config: LlamaConfig,
    taps: Sequence[int],
    samples: list[Any],
    always: set[int],
) -> tuple[HeadNetwork, Tensor]:
    """Return the network that training begins with, and its static tokens: those of ``--start``, or
    an untrained one and the tokens that the target says most.
    """
    if args.start:
        network, shortlist = load_network(args.start)
        if network.config.layers != tuple(taps):
            read = f"reads the layers {list(network.config.layers)}, not {list(taps)}"
            raise ValueError(f"--start: {args.start} {read}")
        return network.requires_grad_(), shortlist
    rows = min(args.shortlist, config.vocab_size)
    inner = -(-config.hidden_size * 4 // 3 // _INNER_STEP) * _INNER_STEP
    hidden, eps = config.hidden_size, config.rms_norm_eps
    made = HeadConfig(config.vocab_size, hidden, inner, tuple(taps), rows, eps)
    return HeadNetwork(made), choose_shortlist(samples, rows, config.vocab_size, always)
