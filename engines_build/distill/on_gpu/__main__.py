"""Make a head on a GPU: ``python -m engines_build.distill.on_gpu prompts`` where the corpora are,
then ``train`` where the GPU is. ``train`` needs no network and no transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from backend.engines.head.folder import read_config, read_target_sha256
from backend.engines.models.llama import load_weights
from backend.engines.models.spec import PlainLlama
from backend.engines.weights import Weights
from backend.storage.manifest import weights_sha256
from engines_build.distill.arguments import LEARNING_RATE, SHORTLIST_TOKENS
from engines_build.distill.corpora import LICENCES
from engines_build.distill.evaluation_sets import JUDGED, EvaluationError
from engines_build.distill.first_head import first_head, taps_of
from engines_build.distill.generate import served_dtype
from engines_build.distill.head import (
    HeadSample,
    Unroller,
    evaluate_head,
    export_head,
)
from engines_build.distill.on_gpu.answers import GeneratedAnswers, texts_of
from engines_build.distill.on_gpu.batch_model import BatchModel
from engines_build.distill.on_gpu.prompts import (
    read_about,
    read_prompts,
    read_texts,
    write_prompts,
    write_texts,
)
from engines_build.distill.train import SINGLE_SHARE, Budget, HeadTrainer

_RATE_ON = 4e-3
"""Learning rate of a head that was trained before."""


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Answer, train, score; write ``--out``. Returns the report."""
    sha256 = weights_sha256(args.target)
    if args.start and read_target_sha256(args.start) not in ("", sha256):
        raise ValueError(f"--start: {args.start} is the head of another target than {args.target}")
    about = read_about(args.prompts)
    config = PlainLlama(**about["target"])
    weights = load_weights(args.target, config, served_dtype(args.device), args.device)
    taps = read_config(args.start).layers if args.start else taps_of((), config)
    torch.manual_seed(about["seed"])
    torch.set_float32_matmul_precision("high")
    report = {
        "target_sha256": sha256,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "seed": about["seed"],
        **{name: getattr(args, name) for name in ("batch", "sequences", "learning_rate")},
    }
    samples, held_out = _answer(args, sha256, about, config, weights, taps, report)
    embedding = weights["model.embed_tokens.weight"].float()
    rows = weights.get("lm_head.weight", embedding).float()
    weights.clear()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    network, shortlist = first_head(
        args.start, config, taps, samples, SHORTLIST_TOKENS, set(about["ends"])
    )
    network, shortlist = network.to(args.device), shortlist.to(args.device)
    unroller = Unroller(network, embedding, rows, shortlist)
    report["before"] = _scores(unroller, held_out)
    begun = monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = HeadTrainer(
            unroller,
            samples,
            about["seed"],
            Path(scratch) / "head",
            0.0 if args.start else SINGLE_SHARE,
        )
        deadline = begun + args.train_s
        trainer.run(Budget(args.train_tokens, args.sequences, args.learning_rate, deadline))
        curve = trainer.curve.read_text("utf-8") if trainer.curve.exists() else ""
        report["training"] = [json.loads(line) for line in curve.splitlines()]
    report["train_s"] = monotonic() - begun
    network.bfloat16().float()  # as it will be stored
    report["after"] = _scores(unroller, held_out)
    export_head(network, shortlist, args.target, args.out)
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report


def _answer(
    args: argparse.Namespace,
    sha256: str,
    about: dict[str, Any],
    config: PlainLlama,
    weights: Weights,
    taps: tuple[int, ...],
    report: dict[str, Any],
) -> tuple[list[HeadSample], list[HeadSample]]:
    """Return the answers to train on and the held-out ones; note in the report what they are.
    Raises ValueError where there are none.
    """
    old, first = [], 0
    for path in args.answers:
        first, texts = read_texts(path, sha256, "--answers")
        old += texts
    prompts = read_prompts(args.prompts / "prompts.npz", sha256)[first:]
    judging = read_prompts(args.prompts / "held_out.npz", sha256)
    model = BatchModel(config, weights, args.batch, taps, set(about["ends"]))
    held_out = []
    for at in range(0, len(judging), args.batch):
        batch = judging[at : at + args.batch]
        held_out += model.generate(batch, [0.0] * len(batch))
    held_out = [sample for sample in held_out if len(sample.features) > 1]
    answers = GeneratedAnswers(model, args.target, args.prompts, about["seed"])
    begun = monotonic()
    answers.read(old)
    again, samples_before, read_s = answers.tokens, len(answers.samples), monotonic() - begun
    count = answers.generate(prompts, args.generate_s, args.tokens)
    answers.close()
    report["answers"] = {
        "read_again_tokens": again,
        "read_again_s": read_s,
        "generated_tokens": answers.tokens - again,
        "generated_answers": len(answers.samples) - samples_before,
        "generate_s": monotonic() - begun - read_s,
        "left_out": answers.left_out,
        "held_out_answers": len(held_out),
    }
    if not (answers.samples and held_out):
        raise ValueError(f"--prompts: no answer of two tokens to those of {args.prompts}")
    new = texts_of(answers.samples[samples_before:])
    write_texts(args.out / "answers.npz", new, first + count, sha256)
    return answers.samples, held_out


def _scores(unroller: Unroller, samples: list[HeadSample]) -> dict[str, Any]:
    """Return the scores by workload, and over all: ``places``, and the share where the first token
    holds.
    """
    by_workload = evaluate_head(unroller, samples)
    places = sum(score["tokens"] for score in by_workload.values())
    matched = sum(score["tokens"] * score["held"] for score in by_workload.values())
    print(
        f"evaluate: the first token is right at {matched / places:.3f} of {places:.0f}", flush=True
    )
    return {"places": places, "held": matched / places, "by_workload": by_workload}


def _positive(kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be a positive {kind.__name__}, got {text}")
        return value

    return number


def _with(*files: str) -> Callable[[str], Path]:
    """Return the type of a path that is a folder with these files, or with none named a file."""

    def path(text: str) -> Path:
        for file in files:
            if not (Path(text) / file).is_file():
                raise argparse.ArgumentTypeError(f"no {file} in {text}")
        if not files and not Path(text).is_file():
            raise argparse.ArgumentTypeError(f"no file {text}")
        return Path(text)

    return path


def _among(choices: Any) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in choices]:
            known_names = ", ".join(choices)
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; choose from {known_names}")
        return text.split(",")

    return names


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with a line that names its flag."""
    parser = argparse.ArgumentParser(
        prog="python -m engines_build.distill.on_gpu", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="write the input for train to a folder")
    trains = commands.add_parser("train", help="answer the prompts and train a head on the answers")
    for command in (prompts, trains):
        command.add_argument("--target", type=_with("tokenizer.json", "config.json"), required=True)
        command.add_argument("--out", type=Path, required=True, help="folder to write")

    def number(command: argparse.ArgumentParser, flag: str, default: float, text: str) -> None:
        kind = _positive(type(default))
        command.add_argument(flag, type=kind, default=default, metavar="N", help=text)

    prompts.add_argument("--corpora", type=Path, help="folder of distill.corpora --fetch")
    prompts.add_argument("--sources", type=_among(LICENCES), default=list(LICENCES))
    prompts.add_argument("--judged", type=_among(JUDGED), default=list(JUDGED))
    number(prompts, "--prompts", 90_000, "prompts to train on")
    number(prompts, "--judging", 900, "held-out prompts")
    prompts.add_argument("--seed", type=int, default=0)
    files = ("about.json", "prompts.npz", "held_out.npz", "judged.npy")
    trains.add_argument("--prompts", type=_with(*files), required=True, help="that folder")
    trains.add_argument("--start", type=_with("config.json"), help="head to train on")
    trains.add_argument(
        "--answers",
        type=_with(),
        nargs="+",
        default=[],
        metavar="FILE",
        help="answers from earlier runs to read again; those in the last file are for these "
        "prompts",
    )
    number(trains, "--generate-s", 110.0, "seconds to answer prompts for")
    number(trains, "--train-s", 120.0, "seconds to train for")
    number(trains, "--train-tokens", sys.maxsize, "limit on the tokens to read in training")
    number(trains, "--batch", 1024, "prompts answered at once")
    number(trains, "--sequences", 32, "answers per training step")
    number(trains, "--tokens", 10_000_000, "limit on the answered tokens (4.9 KB of memory each)")
    trains.add_argument("--learning-rate", type=_positive(float), metavar="N")
    trains.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    if args.command == "train":
        if args.device == "cuda" and not torch.cuda.is_available():
            trains.error("argument --device: cuda is not available here")
        default = _RATE_ON if args.start else LEARNING_RATE
        args.learning_rate = args.learning_rate or default
    return args


def main() -> None:
    """Run what the command line says."""
    args = parse(sys.argv[1:])
    try:
        (train if args.command == "train" else write_prompts)(args)
    except (ValueError, OSError, EvaluationError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
