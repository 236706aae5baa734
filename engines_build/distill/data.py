"""The target's answers that drafts are trained on and judged by: generated into a work folder, cut
to what was asked for, and kept apart from everything that judges.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from backend.storage.manifest import weights_sha256
from backend.tokenizer import load_tokenizer
from engines_build.distill.answer_files import keep, read_again
from engines_build.distill.corpora import WORKLOADS
from engines_build.distill.evaluation_sets import JUDGED
from engines_build.distill.generate import GREEDY_SHARE, Generator, Shards, Teacher
from engines_build.distill.head import HeadSample
from engines_build.distill.overlap import (
    GRAM_WORDS,
    Grams,
    OverlapError,
    grams_of,
    overlap_counts,
    overlaps,
)

HELD_OUT_SLOTS = 24
GENERATE_SHARE = 0.6
"""Share of ``--minutes`` after which generation gives way to training."""


def claim(work: Path, target: Path) -> None:
    """Note whose answers the work folder holds. Raises ValueError where they are another
    target's.
    """
    note, weights = work / "target.sha256", weights_sha256(target)
    if note.is_file() and note.read_text("utf-8").strip() != weights:
        raise ValueError(f"--work: {work} holds the answers of another target than {target}")
    work.mkdir(parents=True, exist_ok=True)
    note.write_text(weights + "\n", "utf-8")


def generate(
    args: argparse.Namespace,
    dtype: str,
    tokenizer: Any,
    start: float,
    taps: Sequence[int] = (),
) -> tuple[Shards, Shards]:
    """Bring training and held-out shards up to the tokens asked for, as far as the time goes;
    returns both. With the states after layers ``taps`` they lie in folders of their own.
    """
    suffix = "".join(f"-{layer}" for layer in taps)
    shards, held_out = (Shards(args.work / f"{side}{suffix}") for side in ("train", "held_out"))
    for corpus, store, tokens, slots in (
        (args.held_out, held_out, args.held_out_tokens, HELD_OUT_SLOTS),
        (args.train, shards, args.tokens, args.slots),
    ):
        if store.generated < tokens:
            teacher = Teacher(args.target, dtype, min(slots, args.slots), taps)
            if args.answers_file and not corpus.held_out:
                read_again(args.answers_file, weights_sha256(args.target), teacher, store)
                if store.generated >= tokens:
                    continue
            workloads = list(WORKLOADS) if corpus.held_out else args.workloads
            greedy_share, answers = (1.0, 1) if corpus.held_out else (GREEDY_SHARE, args.answers)
            generator = Generator(
                *(teacher, tokenizer, corpus, store, greedy_share, workloads, answers),
                ends=load_tokenizer(args.target).end_ids,
            )
            generator.run(tokens, start + 60 * GENERATE_SHARE * args.minutes)
    if args.keep_answers:
        keep(shards, weights_sha256(args.target), args.keep_answers)
    return shards, held_out


def first_tokens(samples: list[HeadSample], tokens: int) -> list[HeadSample]:
    """Return the first sequences that hold ``tokens`` generated tokens: what later runs add to the
    shards changes nothing.
    """
    ends = accumulate(len(s.tokens) - s.prompt_tokens for s in samples)
    return samples[: sum(1 for end in ends if end < tokens) + 1]


def judged_by(args: argparse.Namespace) -> dict[str, Grams]:
    """Return the runs of words of everything that models are judged by: the held-out documents and
    the sets of ``--judged``.
    """
    held_out = grams_of(d.text for d in args.held_out.documents(*args.held_out.sources))
    return {"held-out documents": held_out} | {
        name: grams_of(JUDGED[name]()) for name in args.judged
    }


def drop_judged(
    args: argparse.Namespace, samples: list[HeadSample], tokenizer: Any
) -> list[HeadSample]:
    """Return the sequences to train on. Raises OverlapError where they or the documents share a run
    of words with what judges.

    ``--drop-overlap`` leaves such sequences out instead, and says how many.
    """
    judged = judged_by(args)
    refuse_overlap("training documents", args.train.texts, judged)
    texts = [tokenizer.decode(s.tokens.tolist(), skip_special_tokens=True) for s in samples]
    if args.drop_overlap:
        unshared = [
            s
            for s, text in zip(samples, texts, strict=True)
            if not any(overlaps(text, runs) for runs in judged.values())
        ]
        print(
            f"overlap: {len(samples) - len(unshared)} of {len(samples)} sequences left out",
            flush=True,
        )
        samples = unshared
    else:
        refuse_overlap("sequences", texts, judged)
    if not samples:
        raise ValueError(
            f"--workloads: no sequence of {', '.join(args.workloads)} in {args.work / 'train'}; "
            f"generate some first"
        )
    return samples


def refuse_overlap(what: str, texts: list[str], judged: dict[str, Grams]) -> None:
    """Raise OverlapError, with the counts, where ``texts`` share a run of words with what models
    are judged by.
    """
    if counts := overlap_counts(texts, judged):
        overlaps = ", ".join(f"{count} with {name}" for name, count in counts.items())
        raise OverlapError(
            f"{what}: of {len(texts)}, these share a run of {GRAM_WORDS} words with an "
            f"evaluation set: {overlaps}"
        )
