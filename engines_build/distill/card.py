"""The model cards of a distilled draft and of the family's target."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from backend.engines.head.folder import HeadConfig
from engines_build.distill.corpora import LICENCES
from engines_build.distill.generate import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    SAMPLED_TEMPERATURES,
    TOP_K,
)
from engines_build.distill.head import UNROLLED
from engines_build.distill.overlap import GRAM_WORDS
from engines_build.distill.train import POSITIONS, Shape
from engines_build.distill.unlikelihood import CONTINUATIONS, NEW_TOKENS


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


_CARD = _read("draft_card.md")


_TARGET_CARD = _read("target_card.md")


_HEAD_CARD = _read("head_card.md")

_UNLIKELIHOOD = (
    "Then {read} tokens were read while it unlearnt its greedy loops off SQL by unlikelihood of "
    "whole sequences\n(Welleck et al., 2019): up to {new} tokens of its own behind {texts} prompts "
    "a step. Below, before and after."
)


def command_line(args: argparse.Namespace) -> str:
    """Return the command that ``args`` were parsed from, folders by their last name."""
    return shlex.join(
        [
            "python",
            "-m",
            "engines_build.distill",
            *(Path(a).name if "/" in a else a for a in args.command),
        ]
    )


def model_card(args: argparse.Namespace, shape: Shape, report: dict[str, Any], command: str) -> str:
    """Write the README.md of a draft from the run's arguments and its report."""
    scores, line = report["scores"], report["training"]
    columns = (
        "agreement",
        "overlap",
        "tokens_per_step_2",
        "tokens_per_step_4",
        "tokens_per_step_8",
    )
    lines = [
        f"| {w} | {s['tokens']:.0f} | " + " | ".join(f"{s[c]:.2f}" for c in columns) + " |"
        for w, s in scores.items()
    ]
    positions = [
        f"| {w} | " + " | ".join(f"{s[f'accepted_{j}']:.2f}" for j in POSITIONS) + " |"
        for w, s in scores.items()
    ]
    return _CARD.format(
        name=args.out.name,
        target=args.target.name,
        layers=shape.layers,
        hidden=shape.hidden,
        head_dim=shape.head_dim,
        shortlist=shape.shortlist,
        millions=report["parameters"] / 1e6,
        licences=licences(args),
        generated=f"{report['generated_tokens']:,}",
        sequences=f"{report['sequences']:,}",
        workloads=", ".join(args.workloads),
        temperature="{} to {}".format(*SAMPLED_TEMPERATURES),
        top_k=TOP_K,
        prompt=MAX_PROMPT_TOKENS,
        new=MAX_NEW_TOKENS,
        beginning=_beginning(args, shape),
        read=f"{line['tokens']:,}",
        passes=line["tokens"] / report["set_tokens"],
        loss=line["loss"],
        agreement=line["agreement"],
        seed=args.seed,
        minutes=report["wall_s"] / 60,
        command=command,
        train_digest=args.train.digest,
        held_out_digest=args.held_out.digest,
        gram_words=GRAM_WORDS,
        judged=", ".join(args.judged),
        scores="\n".join(lines),
        positions="\n".join(positions),
        seen=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS,
        worst=min(scores, key=lambda w: scores[w]["agreement"]),
        lowest=min(s["agreement"] for s in scores.values()),
    )


def head_card(
    args: argparse.Namespace, config: HeadConfig, report: dict[str, Any], command: str
) -> str:
    """Write a head's README.md."""
    line = report["training"]
    columns = [f"accepted_{place}" for place in range(1, 5)]
    columns += ["tokens_per_step_4", "top_4", "coverage", "claimed", "held"]
    rows = [
        f"| {workload} | {score['tokens']:.0f} | "
        + " | ".join(f"{score[column]:.2f}" for column in columns)
        + " |"
        for workload, score in report["scores"].items()
    ]
    begun = (
        f"\nBegun with the weights of `{args.start.name}`, of which {args.start_share:g} is kept."
        if args.start
        else ""
    )
    return _HEAD_CARD.format(
        name=args.out.name,
        target=args.target.name,
        layers=", ".join(map(str, config.layers)),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        rows=f"{config.rows:,}",
        millions=report["parameters"] / 1e6,
        licences=licences(args),
        top_k=TOP_K,
        generated=f"{report['generated_tokens']:,}",
        sequences=f"{report['sequences']:,}",
        workloads=", ".join(args.workloads),
        temperature="{} to {}".format(*SAMPLED_TEMPERATURES),
        prompt=MAX_PROMPT_TOKENS,
        new=MAX_NEW_TOKENS,
        unrolled=UNROLLED,
        optimiser=f"Muon, {args.batch} answers a step, highest rate {args.learning_rate:g}",
        read=f"{line['tokens']:,}",
        passes=line["tokens"] / report["set_tokens"],
        loss=line["loss"],
        begun=begun,
        seed=args.seed,
        minutes=report["wall_s"] / 60,
        command=command,
        train_digest=args.train.digest,
        held_out_digest=args.held_out.digest,
        gram_words=GRAM_WORDS,
        judged=", ".join(args.judged),
        scores="\n".join(rows),
    )


def _beginning(args: argparse.Namespace, shape: Shape) -> str:
    """Return what comes before the target's answers."""
    if args.start:
        return (
            f"Begun with the weights and the shortlist of `{args.start.name}`, which was made "
            f"as its own card says."
        )
    return (
        f"Plain language modelling on {args.warm_up_tokens:,} tokens of the texts above, one "
        f"pass. The embedding\n"
        f"   starts as the target's, projected to {shape.hidden} dimensions."
    )


def target_card(
    args: argparse.Namespace, name: str, shape: Shape, report: dict[str, Any], command: str
) -> str:
    """Write the README.md of the family's target."""
    line = report["training"]
    return _TARGET_CARD.format(
        name=name,
        layers=shape.layers,
        hidden=shape.hidden,
        head_dim=shape.head_dim,
        vocabulary=shape.shortlist,
        millions=report["parameters"] / 1e6,
        licences=licences(args),
        dialogues=f"{report['dialogues']:,}",
        teacher=args.dialogue_tokenizer.name if args.dialogue_tokenizer else "none",
        read=f"{line['tokens']:,}",
        set_tokens=f"{report['set_tokens']:,}",
        texts=f"{report['texts']:,}",
        loss=line["loss"],
        seed=args.seed,
        minutes=report["wall_s"] / 60,
        command=command,
        train_digest=args.train.digest,
        held_out_digest=args.held_out.digest,
        gram_words=GRAM_WORDS,
        judged=", ".join(args.judged),
        unlikelihood=_unlearnt(report),
        losses=_rows(report, "losses"),
        repetition=_rows(report, "repetition"),
    )


def _unlearnt(report: dict[str, Any]) -> str:
    """Return what the card says of the phase against loops."""
    if "after" not in report:
        return "No training against loops."
    return _UNLIKELIHOOD.format(
        read=f"{report['unlikelihood']['tokens']:,}", new=NEW_TOKENS, texts=CONTINUATIONS
    )


def _rows(report: dict[str, Any], what: str) -> str:
    """Return a line for each source or workload: its value, and where there was a phase against
    loops those before and after it.
    """
    stages = [report[stage][what] for stage in ("before", "after") if stage in report]
    return "\n".join(
        f"| {name} | " + ", then ".join(f"{stage[name]:.2f}" for stage in stages) + " |"
        for name in stages[0]
    )


def licences(args: argparse.Namespace) -> str:
    """Return the sources with their licences, a line each."""
    return "\n".join(f"  - {LICENCES[s]}" for s in args.sources)
