"""Train a head for a target: ``python -m engines_build.distill --target DIR --out DIR``.

The target answers prompts, its states and logits kept; the head is trained on them, scored on
prompts of held-out documents and written. Shards and checkpoints stay in ``--work``, where a second
run continues and other heads of the same target find the shards.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoTokenizer

from backend.engines.checkpoint import load
from backend.engines.head.network import HeadNetwork
from backend.engines.head.network import load as load_network
from backend.storage.manifest import weights_sha256
from engines_build.distill.arguments import parse
from engines_build.distill.card import command_line, head_card
from engines_build.distill.data import claim, first_tokens, generate, unjudged
from engines_build.distill.evaluation_sets import EvaluationError
from engines_build.distill.first_head import first_head, taps_of
from engines_build.distill.generate import eos_token_ids, served_dtype
from engines_build.distill.head import (
    Unroller,
    evaluate_head,
    export_head,
    load_head_samples,
)
from engines_build.distill.overlap import OverlapError
from engines_build.distill.train import Budget, HeadTrainer


def distil_head(args: argparse.Namespace) -> dict[str, Any]:
    """Run all stages as ``parse`` says. Returns the report that the model card shows."""
    start = time.monotonic()
    claim(args.work, args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    config, weights = load(args.target, served_dtype("cpu"), "cpu")
    taps = taps_of(args.taps, config)
    shards, held_out = generate(args, config, weights, tokenizer, start, taps)
    embedding = weights["model.embed_tokens.weight"].float()
    rows = weights.get("lm_head.weight", embedding).float()
    weights.clear()
    samples = [s for s in load_head_samples(shards, len(taps)) if s.workload in set(args.workloads)]
    samples = unjudged(args, first_tokens(samples, args.tokens), tokenizer)
    torch.manual_seed(args.seed)
    network, shortlist = first_head(
        args.start, config, taps, samples, args.shortlist, eos_token_ids(tokenizer)
    )
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
        "parameters": sum(p.numel() for p in network.parameters()),
        "wall_s": time.monotonic() - start,
    }
    export_head(network, shortlist, args.target, args.out)
    card = head_card(args, network.config, report, command_line(args))
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return report


def _mix_in(start: HeadNetwork, share: float, network: HeadNetwork) -> None:
    """Move a network's weights by a share of the way back to those that its training began with, so
    that what these had learnt of other answers is not forgotten (arXiv 2109.01903).
    """
    before = dict(start.named_parameters())
    for name, weights in network.named_parameters():
        weights.data.lerp_(before[name].data, share)


def main() -> None:
    """Run what the command line says."""
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    try:
        distil_head(args)
    except (OverlapError, EvaluationError, ValueError) as error:
        sys.exit(f"error: {error}")
