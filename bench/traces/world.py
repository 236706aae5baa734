"""The traces as flat arrays: for every generated position what the head and the project's own
look-up would do there. Nothing here knows of policies.

The look-up is ``LookupEngine`` as configured by default, over the request's own text, cut to its
best chain as hosts that verify chains do; ``SuffixEngine`` that remembers no answers proposes the
same.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backend.engines import lookup
from backend.engines.lookup import LookupEngine
from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import Sequence
from bench.traces.reading import Trace, TraceFileError, files, traces
from policy import evidence
from policy.plan import FloatArray, IntArray

DEEPEST = 20
"""Tokens of a chain that are known."""
MOST_TOKENS = 1024
"""Longest answer; the few that are longer are loops, which would be a tenth of all positions."""
LEAST_TOKENS = 21
"""Shortest answer that is used."""

_EVERY_NODE = 1 << 20


@dataclass(frozen=True)
class World:
    """The requests by number, and flat arrays over all their generated positions."""

    source: str
    """A name for the files, and for how they are read."""
    sets: tuple[str, ...]
    of: IntArray
    """[requests] the set."""
    prompt: IntArray
    """[requests] tokens of the prompt."""
    size: IntArray
    """[requests] tokens of the answer."""
    at: IntArray
    """[requests] where its positions begin."""
    eagle: IntArray
    """[positions] tokens of the head's chain that are accepted, at most ``DEEPEST``."""
    suffix: IntArray
    """[positions] the same of the look-up."""
    evidence: IntArray
    """[positions] the bin of what the look-up shows (``policy.evidence``); 0: nothing matches, and
    it proposes nothing.
    """
    claims: FloatArray
    """[positions, DEEPEST] the look-up's confidence in each path of its chain."""

    @classmethod
    def read(cls, folder: Path, cache: Path | None = None) -> World:
        """Read the traces of a folder; what is computed of them is kept in ``cache``.

        Raises TraceFileError.
        """
        paths = files(folder)
        source = _digest(paths)
        if cache is None:
            return cls(source, tuple(paths), **_columns(paths))
        lookups = cache / f"lookups-{source}.npz"
        if not lookups.exists():
            cache.mkdir(parents=True, exist_ok=True)
            part = lookups.with_name(f"part-{os.getpid()}.npz")
            np.savez(part, **_columns(paths))
            part.replace(lookups)
        with np.load(lookups) as file:
            return cls(source, tuple(paths), **{name: file[name] for name in file.files})

    def halves(self, sets: tuple[str, ...] = (), seed: int = 7) -> tuple[IntArray, IntArray]:
        """Return two halves of the requests of some sets (none named: of all), set by set, in
        random order.
        """
        rng = np.random.default_rng(seed)
        parts: tuple[list[IntArray], list[IntArray]] = ([], [])
        for number, name in enumerate(self.sets):
            if not sets or name in sets:
                requests = rng.permutation(np.flatnonzero(self.of == number))
                for half in (0, 1):
                    parts[half].append(requests[half::2])
        first, second = (rng.permutation(np.concatenate(part)) for part in parts)
        return first, second


def _digest(paths: dict[str, Path]) -> str:
    """Return a name of all that the computed columns depend on."""
    limits = f"{DEEPEST} {MOST_TOKENS} {LEAST_TOKENS} {[*paths]}".encode()
    sources = [Path(module.__file__ or "") for module in (sys.modules[__name__], lookup, evidence)]
    contents = [limits, *(path.read_bytes() for path in (*paths.values(), *sources))]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def _columns(paths: dict[str, Path]) -> dict[str, Any]:
    of, prompts, sizes, columns = [], [], [], []
    for number, (name, path) in enumerate(paths.items()):
        usable = 0
        for trace in traces(path):
            size = min(len(trace.text), len(trace.emitted), MOST_TOKENS)
            if size < LEAST_TOKENS:
                continue
            usable += 1
            of.append(number)
            prompts.append(len(trace.prompt))
            sizes.append(size)
            eagle = np.minimum(np.array(trace.emitted[:size]) - 1, DEEPEST)
            columns.append((eagle, *_looked_up(trace, size)))
        if usable < 2:
            least = f"2 requests of at least {LEAST_TOKENS} tokens"
            raise TraceFileError(f"{path}: set {name!r} needs {least}, got {usable}")
    begin = np.array(sizes).cumsum() - sizes
    requests = {"of": np.array(of), "prompt": np.array(prompts), "size": np.array(sizes)}
    names = "eagle", "suffix", "evidence", "claims"
    flat = dict(zip(names, map(np.concatenate, zip(*columns, strict=True)), strict=True))
    return {**requests, "at": begin, **flat}


def _looked_up(trace: Trace, size: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Return what the look-up does before every token of a text: accepted, evidence, claims."""
    engine = LookupEngine("suffix", max_draft_tokens=DEEPEST)
    text = trace.text[:size]
    sequence = Sequence(0, list(trace.prompt), len(trace.prompt), SamplingParams())
    accepted, evidence = np.zeros((2, size), np.int64)
    claims = np.zeros((size, DEEPEST))
    for place, token in enumerate(text):
        engine.submit([Turn(sequence, len(sequence.tokens), run=DEEPEST, nodes=_EVERY_NODE)])
        (done,) = engine.poll(0)
        if done.proposal:
            chain = done.proposal.spine()
            claims[place, : len(chain)] = chain.confidence
            accepted[place] = len(chain.follow(text[place : place + DEEPEST]))
            evidence[place] = engine.evidence(sequence)
        sequence.tokens.append(token)
    return accepted, evidence, claims
