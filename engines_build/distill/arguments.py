"""The command line of ``engines_build.distill``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from backend import machine
from engines_build.distill.corpora import LICENCES, WORKLOADS, Corpus
from engines_build.distill.evaluation_sets import JUDGED

DEFAULTS = {"shortlist": 8192, "batch": 12, "learning_rate": 3e-3}
OF_A_HEAD = {"shortlist": 4096, "batch": 8, "learning_rate": 6e-3}
"""Where a head's differ."""
_DRAFT_SHAPE = {"hidden": 160, "layers": 3, "head_dim": 32}
_FAMILY_SHAPE = {"hidden": 256, "layers": 4, "head_dim": 64}
_POSITIVE = (
    "hidden",
    "layers",
    "head_dim",
    "shortlist",
    "tokens",
    "held_out_tokens",
    "train_tokens",
    "target_tokens",
    "minutes",
)
_POSITIVE += ("batch", "learning_rate", "answers", "slots", "threads")


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with a line that names its flag."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check_start(parser, args)
    shape = _FAMILY_SHAPE if args.family else _DRAFT_SHAPE
    for name, value in {**shape, **(OF_A_HEAD if args.head else DEFAULTS)}.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    _check_numbers(parser, args)
    if args.head and args.family:
        parser.error(f"--head: with --target, not with --family {args.family}")
    if args.hidden % args.head_dim or args.head_dim % 2:
        parser.error(
            f"--hidden, --head-dim: hidden must be a multiple of an even head_dim, got "
            f"{args.hidden} and {args.head_dim}"
        )
    if bool(args.target) == bool(args.family):
        parser.error(f"--target, --family: give one of them, got {args.target} and {args.family}")
    if args.target and not (args.target / "tokenizer.json").is_file():
        parser.error(f"--target: no tokenizer.json in {args.target}")
    if args.dialogues and not args.dialogue_tokenizer:
        parser.error(f"--dialogue-tokenizer: needed to read --dialogues {args.dialogues}")
    if missing := [file for file in args.answers_file if not file.is_file()]:
        parser.error(f"--answers-file: no file {missing[0]}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda is not available here")
    args.work = args.work or args.out.with_name(args.out.name + ".work")
    for name, known in (("sources", LICENCES), ("workloads", WORKLOADS), ("judged", JUDGED)):
        values = getattr(args, name).split(",")
        setattr(args, name, values)
        if unknown := [value for value in values if value not in known]:
            parser.error(f"--{name}: unknown value {unknown[0]!r}; choose from {', '.join(known)}")
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
    for name in ("warm_up_tokens", "unlikelihood_tokens"):
        if getattr(args, name) < 0:
            parser.error(
                f"--{name.replace('_', '-')}: must not be negative, got {getattr(args, name)}"
            )


def _check_start(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not args.start:
        return
    if given := [name for name in _DRAFT_SHAPE if getattr(args, name) is not None]:
        parser.error(
            f"--start: the draft {args.start} has its own shape, --{given[0].replace('_', '-')} "
            f"cannot be given"
        )
    if args.family:
        parser.error(f"--start: not with --family, got {args.start}")
    if not (args.start / "config.json").is_file():
        parser.error(f"--start: no config.json in {args.start}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engines_build.distill", description="Distil a draft for a target."
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

    folder("--target", "Hugging Face folder of the target (Llama family, with its tokenizer)")
    parser.add_argument(
        "--family",
        choices=("tiny",),
        help="make a tokenizer, a target and drafts from scratch, in folders of --out",
    )
    parser.add_argument(
        "--head",
        action="store_true",
        help="make a head on the target's own states instead of a small model: a token of it "
        "costs a tenth as much",
    )
    parser.add_argument(
        "--taps",
        type=lambda text: [int(layer) for layer in text.split(",")],
        default=[],
        metavar="N,N",
        help="--head: the layers that it reads, counted from 1 (default: a tenth, half and nine "
        "tenths of the way up, and the last)",
    )
    folder("--out", "folder to write the draft to", required=True)
    folder(
        "--start",
        "draft of the same target to begin with, instead of the target's embedding and plain "
        "text: to specialise or train on",
    )
    folder(
        "--work",
        "folder for shards and checkpoints, shared by the drafts of one target (default: OUT "
        "with .work behind its name)",
    )
    parser.add_argument(
        "--answers-file",
        type=Path,
        metavar="FILE",
        nargs="+",
        default=[],
        help="answers of this target that --keep-answers wrote, the last file those of this seed: "
        "read again before any is generated",
    )
    parser.add_argument(
        "--keep-answers",
        type=Path,
        metavar="FILE",
        help="file to keep the answers in, 1.3 bytes a token: what a later run need not generate",
    )
    folder("--corpora", "folder filled by engines_build.distill.corpora --fetch")
    parser.add_argument(
        "--sources",
        default=",".join(LICENCES),
        help="sources of the prompts, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        help="workloads to generate and to train on (default: %(default)s)",
    )
    parser.add_argument(
        "--judged",
        default=",".join(JUDGED),
        help="sets that training must not overlap (default: %(default)s)",
    )
    parser.add_argument(
        "--drop-overlap",
        action="store_true",
        help="leave sequences that overlap them out instead of failing",
    )
    for flag, names in (
        ("--hidden", "width"),
        ("--layers", "layers"),
        ("--head-dim", "width of a head"),
    ):
        draft, target = (
            shape[flag[2:].replace("-", "_")] for shape in (_DRAFT_SHAPE, _FAMILY_SHAPE)
        )
        parser.add_argument(
            flag,
            type=int,
            metavar="N",
            help=f"{names} (default: {draft}; of the target of a family: {target})",
        )
    for name, kind, text in (
        ("shortlist", int, "tokens that the draft can propose; a head also those of the text"),
        ("batch", int, "sequences per training step"),
        ("learning_rate", float, "highest learning rate"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar="N",
            help=f"{text} (default: {DEFAULTS[name]:,}; of a head {OF_A_HEAD[name]:,})",
        )
    number(
        "--tokens",
        1_000_000,
        "tokens of the target's to train on; what the work folder lacks is generated",
    )
    number("--held-out-tokens", 12_000, "tokens it generates for the evaluation")
    number("--warm-up-tokens", 1_000_000, "plain text trained on first; 0: none")
    number(
        "--train-tokens",
        4_000_000,
        "tokens read in training, prompts included; the set comes round as often as that needs",
    )
    number("--minutes", math.inf, "bound on the run; a run that it cuts is not reproducible")
    number("--start-share", 0.3, "--head: share of --start's weights that stays in those written")
    number("--answers", 3, "answers to each prompt; all but the first are sampled")
    number("--slots", 64, "sequences the target generates at once")
    folder(
        "--dialogues", "--family: shards of a larger model, whose answers the target learns from"
    )
    folder("--dialogue-tokenizer", "--family: the folder of that model's tokenizer")
    number("--target-tokens", 10_000_000, "--family: tokens that the target reads")
    number(
        "--unlikelihood-tokens",
        250_000,
        "--family: tokens it reads thereafter, while it unlearns its greedy loops; 0: none",
    )
    number("--seed", 0, "seed of everything")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to run (default: %(default)s)",
    )
    number("--threads", machine.cores(), "threads on a CPU: all it has unless told")
    return parser
