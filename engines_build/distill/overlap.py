"""13-gram overlap between texts that a model is trained on and texts that it is judged by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

GRAM_WORDS = 13

Grams = frozenset[int]


class OverlapError(ValueError):
    """Texts to train on that share a run of words with a set that models are judged by."""


def grams(text: str) -> Iterator[int]:
    """Yield a hash of every run of ``GRAM_WORDS`` words (letters, digits and underscores, lower
    case) of ``text``: 64 bits, the same in every process.
    """
    words = re.findall(r"\w+", text.lower())
    for start in range(len(words) - GRAM_WORDS + 1):
        run = " ".join(words[start : start + GRAM_WORDS])
        yield int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "big")


def grams_of(texts: Iterable[str]) -> Grams:
    """Return the hashes of all runs in ``texts``."""
    return frozenset(gram for text in texts for gram in grams(text))


def overlaps(text: str, judged: Grams) -> bool:
    """Return whether ``text`` has a run of words that is in ``judged``."""
    return any(gram in judged for gram in grams(text))


def overlap_counts(texts: Iterable[str], judged: Mapping[str, Grams]) -> dict[str, int]:
    """Return how many of ``texts`` share a run of words with each set that models are judged by;
    sets without any are left out.
    """
    counts = dict.fromkeys(judged, 0)
    for text in texts:
        runs_of_text = frozenset(grams(text))
        for name, runs in judged.items():
            counts[name] += not runs_of_text.isdisjoint(runs)
    return {name: count for name, count in counts.items() if count}


def without_overlap(text: str, judged: Grams, between: str) -> str:
    """Return ``text`` without those parts (as cut by ``between``) that share a run of words with
    ``judged``, alone or after those kept.
    """
    rest: list[str] = []
    tail: list[str] = []
    for part in text.split(between):
        if not overlaps(" ".join([*tail, part]), judged):
            rest.append(part)
            tail = (tail + re.findall(r"\w+", part.lower()))[-(GRAM_WORDS - 1) :]
    return between.join(rest)
