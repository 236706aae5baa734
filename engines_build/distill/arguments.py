"""The command line of ``engines_build.distill``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from backend.machine import machine
from engines_build.distill.corpora import LICENCES, WORKLOADS, Corpus
from engines_build.distill.evaluation_sets import JUDGED

SHORTLIST_TOKENS = 4096
LEARNING_RATE = 6e-3
_POSITIVE = (
    *("shortlist", "tokens", "held_out_tokens", "train_tokens", "minutes", "batch"),
    *("learning_rate", "answers", "slots", "threads"),
)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with a line that names its flag."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.start and args.form != "recurrent":
        parser.error(f"--start: only with --form recurrent, got --form {args.form}")
    if args.start and not (args.start / "config.json").is_file():
        parser.error(f"--start: no config.json in {args.start}")
    _check_numbers(parser, args)
    if not (args.target / "tokenizer.json").is_file():
        parser.error(f"--target: no tokenizer.json in {args.target}")
    if missing := [file for file in args.answers_file if not file.is_file()]:
        parser.error(f"--answers-file: no file {missing[0]}")
    args.work = args.work or args.out.with_name(args.out.name + ".work")
    for name, choices in (("sources", LICENCES), ("workloads", WORKLOADS), ("judged", JUDGED)):
        values = getattr(args, name).split(",")
        setattr(args, name, values)
        if unknown := [value for value in values if value not in choices]:
            parser.error(
                f"--{name}: unknown value {unknown[0]!r}; choose from {', '.join(choices)}"
            )
    try:
        args.train, args.held_out = (
            Corpus(args.sources, args.corpora, side, args.seed) for side in (False, True)
        )
    except ValueError as error:
        parser.error(f"--{error}")
    args.command = argv
    return args


def _check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in _POSITIVE:
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be positive, got {getattr(args, name)}")
    if not 0 <= args.start_share < 1:
        parser.error(f"--start-share: must be from 0 to below 1, got {args.start_share}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engines_build.distill", description="Train a head for a target."
    )

    def folder(flag: str, text: str, *, required: bool = False) -> None:
        parser.add_argument(flag, type=Path, metavar="DIR", required=required, help=text)

    def number(flag: str, default: float, text: str) -> None:
        parser.add_argument(
            flag,
            type=type(default),
            default=default,
            metavar="N",
            help=f"{text} (default: {default:,})",
        )

    folder(
        "--target",
        "Hugging Face folder of the target (Llama family, with tokenizer)",
        required=True,
    )
    parser.add_argument(
        "--form",
        choices=("recurrent", "eagle"),
        default="recurrent",
        help="eagle: an EAGLE-3 head in SafeAILab's format, which reads layer 2, the middle layer "
        "and the last but 3 unless --taps names others (default: %(default)s, our own design)",
    )
    parser.add_argument(
        "--taps",
        type=lambda text: [int(layer) for layer in text.split(",")],
        default=[],
        metavar="N,N",
        help="layers that the head reads, counted from 1 (default: those at a tenth, half and "
        "nine tenths of the depth, and the last)",
    )
    folder("--out", "folder for the head", required=True)
    folder(
        "--start",
        "head for the same target to start from, to specialise it or train it further",
    )
    folder(
        "--work",
        "folder for shards and checkpoints, shared by the heads for one target (default: OUT with "
        ".work appended)",
    )
    parser.add_argument(
        "--answers-file",
        type=Path,
        metavar="FILE",
        nargs="+",
        default=[],
        help="files of this target's answers from --keep-answers, the last one with this seed; "
        "they are read before any answer is generated",
    )
    parser.add_argument(
        "--keep-answers",
        type=Path,
        metavar="FILE",
        help="file that keeps the answers for later runs, 1.3 bytes per token",
    )
    folder("--corpora", "folder filled by engines_build.distill.corpora --fetch")
    parser.add_argument(
        "--sources",
        default=",".join(LICENCES),
        help="sources for the prompts, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        help="workloads to generate and train on (default: %(default)s)",
    )
    parser.add_argument(
        "--judged",
        default=",".join(JUDGED),
        help="evaluation sets that training must not overlap (default: %(default)s)",
    )
    parser.add_argument(
        "--drop-overlap",
        action="store_true",
        help="omit overlapping sequences instead of failing",
    )
    number(
        "--shortlist",
        SHORTLIST_TOKENS,
        "number of tokens that it can propose in addition to those in the text",
    )
    number("--batch", 8, "answers per training step")
    number("--learning-rate", LEARNING_RATE, "highest learning rate")
    number(
        "--tokens",
        1_000_000,
        "number of the target's tokens to train on; missing ones are generated",
    )
    number("--held-out-tokens", 12_000, "number of tokens to generate for the evaluation")
    number(
        "--train-tokens",
        4_000_000,
        "number of tokens to read in training, including prompts; the set is repeated as needed",
    )
    number(
        "--minutes", math.inf, "time limit in minutes; a run that reaches it is not reproducible"
    )
    number("--start-share", 0.3, "share of --start's weights to keep in the result")
    number("--answers", 3, "number of answers to each prompt; all except the first are sampled")
    number("--slots", 64, "number of sequences that the target generates at once")
    number("--seed", 0, "seed of everything")
    number("--threads", machine.cores(), "threads")
    return parser
