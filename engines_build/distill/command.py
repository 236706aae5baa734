"""Distil a draft for a target: ``python -m engines_build.distill --target DIR --out DIR``, or make
``--family tiny`` from scratch.

With ``--head`` the draft is a small network on the target's own states (``make_head``).

Stages: generate (the target answers prompts, its logits kept), train, evaluate (held-out prompts),
export. Shards and checkpoints stay in ``--work``, where a second run continues and other drafts of
the same target find the shards. The exported folder is a Hugging Face Llama folder with two
additions: ``draft_vocab_size`` in config.json says that ``lm_head.weight`` [S, hidden] covers only
the tokens in the tensor ``lm_head.token_ids`` (int32 [S]), and ``vocabulary_sha256`` names the
vocabulary that the draft shares with its target.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from backend.engines.checkpoint import load
from backend.storage.manifest import check_pair, read_manifest, weights_sha256
from engines_build.distill.arguments import OF_A_HEAD, parse
from engines_build.distill.card import command_line, model_card, target_card
from engines_build.distill.data import (
    claim,
    first_tokens,
    generate,
    judged_by,
    refuse_overlap,
    unjudged,
)
from engines_build.distill.evaluation_sets import EvaluationError
from engines_build.distill.export import export, parameters, read_draft
from engines_build.distill.family import (
    DRAFTS,
    TARGET_NAME,
    VOCABULARY,
    Member,
    dialogues_of,
    family_texts,
    held_out_losses,
    pieces,
    train_tokenizer,
    untrained,
)
from engines_build.distill.generate import Shards, eos_token_ids, served_dtype
from engines_build.distill.make_head import distil_head
from engines_build.distill.overlap import (
    OverlapError,
    overlaps,
)
from engines_build.distill.train import (
    Budget,
    Sample,
    Shape,
    Trainer,
    build,
    choose_shortlist,
    evaluate,
    load_samples,
    plain_samples,
    run_name,
    shape_of,
)
from engines_build.distill.unlikelihood import Unlikelihood, greedy_repetition

_TARGET_BATCH, _TARGET_LEARNING_RATE = 8, 1.2e-3
_UNLIKELIHOOD_LEARNING_RATE = 8e-4


def distil(args: argparse.Namespace) -> dict[str, Any]:
    """Run all stages as ``parse`` says. Returns the report that the model card shows."""
    start = time.monotonic()
    claim(args.work, args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    config, weights = load(args.target, served_dtype(args.device), args.device)
    shards, held_out = generate(args, config, weights, tokenizer, start)
    samples = unjudged(
        args,
        [
            s
            for s in first_tokens(load_samples(shards), args.tokens)
            if s.workload in args.workloads
        ],
        tokenizer,
    )
    torch.manual_seed(args.seed)
    draft, shortlist, shape = _initial_draft(args, samples, config, weights, tokenizer)
    end = start + 60 * args.minutes
    run = args.work / run_name(shape, len(samples), args.train_tokens, args.seed)
    if args.start:
        run = run.with_name(f"{run.name}-start{weights_sha256(args.start)[:8]}")
    elif args.warm_up_tokens:
        plain = plain_samples(args.train.texts, tokenizer, args.warm_up_tokens, args.seed)
        budget = Budget(sum(len(s.tokens) for s in plain), args.batch, args.learning_rate, end)
        Trainer(
            draft, shortlist, plain, args.device, args.seed, run.with_name(run.name + "-warm-up")
        ).run(budget)
    budget = Budget(args.train_tokens, args.batch, args.learning_rate, end)
    line = Trainer(draft, shortlist, samples, args.device, args.seed, run).run(budget)
    report = {"training": line, "scores": scored(draft, shortlist, held_out, args.device)}
    report |= {
        "generated_tokens": sum(len(s.tokens) - s.prompt_tokens for s in samples),
        "sequences": len(samples),
    }
    report |= {
        "set_tokens": sum(len(s.tokens) for s in samples),
        "parameters": parameters(draft),
        "wall_s": time.monotonic() - start,
    }
    export(draft, shortlist, args.target / "tokenizer.json", args.out)
    (args.out / "README.md").write_text(
        model_card(args, shape, report, command_line(args)), encoding="utf-8"
    )
    return report


def _initial_draft(
    args: argparse.Namespace, samples: list[Sample], config: Any, weights: Any, tokenizer: Any
) -> tuple[LlamaForCausalLM, torch.Tensor, Shape]:
    """Return the draft that training begins with, its shortlist and its shape: that of ``--start``,
    or one made from the target's embedding.
    """
    if args.start:
        check_pair(read_manifest(args.target), read_manifest(args.start))
        draft, shortlist = read_draft(args.start)
        return draft, shortlist, shape_of(draft)
    shape = Shape(args.hidden, args.layers, args.head_dim, min(args.shortlist, config.vocab_size))
    shortlist = choose_shortlist(
        (s.own_laws for s in samples), shape.shortlist, config.vocab_size, eos_token_ids(tokenizer)
    )
    embedding, most_positions = weights["model.embed_tokens.weight"], config.max_position_embeddings
    return build(shape, embedding, shortlist, tokenizer, most_positions), shortlist, shape


def scored(
    draft: LlamaForCausalLM, shortlist: Tensor, held_out: Shards, device: str
) -> dict[str, dict[str, float]]:
    """Score the draft as it will be stored, showing every line."""
    draft.bfloat16().float()
    scores = evaluate(draft, shortlist, load_samples(held_out), device)
    for workload, score in scores.items():
        print(
            f"evaluate: {workload} " + " ".join(f"{k} {v:.3f}" for k, v in score.items()),
            flush=True,
        )
    return scores


def make_family(args: argparse.Namespace) -> None:
    """Train the family's target unless its folder is there, then distil its drafts."""
    target = args.out / TARGET_NAME
    if not (target / "config.json").is_file():
        make_target(args, target)
    for member in DRAFTS:
        make = distil if member.shape else distil_head
        make(draft_arguments(args, target, member))


def make_target(args: argparse.Namespace, out: Path) -> None:
    """Train the family's target on ``--target-tokens`` tokens of text and write its folder with a
    model card.
    """
    start = time.monotonic()
    texts, dialogues = _target_texts(args)
    if not (out / "tokenizer.json").is_file():
        train_tokenizer(texts, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    samples: list[Sample] = list(pieces(texts, tokenizer))
    print(
        f"target: {len(texts)} texts, {sum(len(s.tokens) for s in samples)} tokens in a pass",
        flush=True,
    )
    torch.manual_seed(args.seed)
    shape = Shape(args.hidden, args.layers, args.head_dim, VOCABULARY)
    model = untrained(shape)
    budget = Budget(
        args.target_tokens,
        _TARGET_BATCH,
        _TARGET_LEARNING_RATE,
        start + 60 * args.minutes,
        embedding_rate=1.0,
    )
    line = Trainer(
        model, torch.arange(VOCABULARY), samples, args.device, args.seed, args.work / TARGET_NAME
    ).run(budget)
    report: dict[str, Any] = {
        "training": line,
        "parameters": parameters(model),
        "before": held_out(args, model, tokenizer),
    }
    if args.unlikelihood_tokens:
        run = (
            args.work
            / f"{TARGET_NAME}-unlikelihood{args.unlikelihood_tokens}-after{line['tokens']}"
        )
        budget = replace(
            budget, tokens=args.unlikelihood_tokens, learning_rate=_UNLIKELIHOOD_LEARNING_RATE
        )
        report |= {
            "unlikelihood": Unlikelihood(model, samples, args, run, tokenizer).run(budget),
            "after": held_out(args, model, tokenizer),
        }
    model.bfloat16().float()
    report |= {
        "texts": len(texts),
        "dialogues": dialogues,
        "set_tokens": sum(len(s.tokens) for s in samples),
    }
    report["wall_s"] = time.monotonic() - start
    export(model, None, out / "tokenizer.json", out)
    (out / "README.md").write_text(
        target_card(args, out.name, shape, report, command_line(args)), encoding="utf-8"
    )


def _target_texts(args: argparse.Namespace) -> tuple[list[str], int]:
    """Return the texts that the family's target reads, and how many of ``--dialogues`` are there.
    Raises what ``refuse_overlap`` does.
    """
    dialogues: list[str] = []
    if args.dialogues:
        dialogues = dialogues_of(
            load_samples(Shards(args.dialogues)),
            AutoTokenizer.from_pretrained(args.dialogue_tokenizer),
        )
    texts = family_texts(args.train, dialogues)
    if args.drop_overlap:
        judged = judged_by(args)
        texts = [
            text for text in texts if not any(overlaps(text, runs) for runs in judged.values())
        ]
    refuse_overlap("texts", texts, judged_by(args))
    return texts, len(dialogues)


def held_out(
    args: argparse.Namespace, model: LlamaForCausalLM, tokenizer: Any
) -> dict[str, dict[str, float]]:
    """Score the family's target as it would be stored: loss by held-out source, repetition of its
    greedy answers by workload.
    """
    stored = copy.deepcopy(model).bfloat16().float()
    losses = held_out_losses(stored, args.held_out, tokenizer, args.device)
    return {
        "losses": losses,
        "repetition": greedy_repetition(stored, args.held_out, tokenizer, args.device),
    }


def draft_arguments(args: argparse.Namespace, target: Path, member: Member) -> argparse.Namespace:
    """Return the arguments that distil one draft of the family."""
    values = {"target": target, "out": args.out / member.name}
    values |= OF_A_HEAD if member.shape is None else asdict(member.shape)
    return argparse.Namespace(**vars(args) | values)


def main() -> None:
    """Run what the command line says."""
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    try:
        (distil_head if args.head else make_family if args.family else distil)(args)
    except (OverlapError, EvaluationError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
