"""The model card of a head."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from engines_build.distill.corpora import LICENCES
from engines_build.distill.forms import HeadSizes
from engines_build.distill.generate import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    SAMPLED_TEMPERATURES,
    TOP_K,
)
from engines_build.distill.overlap import GRAM_WORDS
from engines_build.distill.train import UNROLLED

_NETWORKS = {
    "recurrent": "A recurrent network without attention",
    "eagle": "An EAGLE-3 head, one decoder layer in SafeAILab's files",
}
_ROWS = {
    "recurrent": "{rows} static tokens (`token_ids`) and those of the request's own text",
    "eagle": "{rows} tokens (`d2t`)",
}
_HEAD_CARD = Path(__file__).with_name("head_card.md").read_text("utf-8")


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


def head_card(
    args: argparse.Namespace, head: HeadSizes, report: dict[str, Any], command: str
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
        f"\nBegun with the weights of `{args.start.name}`, {args.start_share:g} of them kept."
        if args.start
        else ""
    )
    return _HEAD_CARD.format(
        name=args.out.name,
        target=args.target.name,
        network=_NETWORKS[args.form],
        layers=", ".join(map(str, head.layers)),
        hidden=head.hidden_size,
        inner=head.intermediate_size,
        rows=_ROWS[args.form].format(rows=f"{head.rows:,}"),
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


def licences(args: argparse.Namespace) -> str:
    """Return the sources with their licences, a line each."""
    return "\n".join(f"  - {LICENCES[s]}" for s in args.sources)
