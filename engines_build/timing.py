"""Times single submissions of an engine on fabricated sequences, through its port: what ``measure`` builds latency tables from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from backend.ports import BLOCK_TOKENS, Engine, Proposal, Turn
from backend.ports import Sequence as TokenSequence
from backend.request import SamplingParams

_GROWTH = 1.5
"""A sequence is given up, for a fresh one, when it has outgrown its nominal context by this factor."""
MOST_NEW_TOKENS = 512
"""Room for new, proposed and freely run tokens in the block table of a fabricated sequence."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of submission: ``rows`` sequences of about ``context`` tokens, in each of which ``new`` committed tokens are unseen.

    A target's turn verifies a proposal of ``length`` tokens and runs ``run`` (1; 0 for a prefill chunk) freely: (new + length) * rows query
    tokens in one pass. A draft's turn (``length`` 0) makes ``run`` passes, the first over the new tokens.
    """

    rows: int
    context: int
    new: int = 1
    length: int = 0
    run: int = 1
    keep_probs: bool = False

    def __post_init__(self) -> None:
        if self.new + self.length + self.run > MOST_NEW_TOKENS:
            raise ValueError(f"new + length + run must be at most {MOST_NEW_TOKENS} tokens, got {self}")

    @property
    def query_tokens(self) -> int:
        """Tokens of the (first) pass, summed over the rows."""
        return self.rows * (self.new + self.length)


@dataclass(slots=True)
class Samples:
    """What one case came to: seconds per submission, and the contexts (tokens, mean over rows) that they were taken at."""

    seconds: list[float] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return median(self.seconds)


class Rig:
    """An engine and sequences to run it on, made when a case first needs them and kept for the next."""

    def __init__(self, engine: Engine, rng: random.Random, clock: Callable[[], float] = perf_counter) -> None:
        self.engine = engine
        self._rng = rng
        self._clock = clock
        self._ids = itertools.count()
        self._blocks = itertools.count()
        self._free_tables: dict[int, list[list[int]]] = {}
        self._pools: dict[int, list[TokenSequence]] = {}

    def time(self, case: Case) -> tuple[float, float]:
        """Run one submission of a case; return (seconds, mean context in tokens). Raises RuntimeError when a turn fails."""
        sequences = [self._sequence(case, row) for row in range(case.rows)]
        turns = [Turn(s, len(s.tokens), case.run, self._proposal(case.length) if case.length else None, case.keep_probs) for s in sequences]
        started = self._clock()
        self._complete(turns)
        seconds = self._clock() - started
        return seconds, sum(len(s.tokens) for s in sequences) / case.rows

    def _sequence(self, case: Case, row: int) -> TokenSequence:
        """Return the pool's row-th sequence with exactly ``case.new`` tokens that the engine has not seen."""
        pool = self._pools.setdefault(case.context, [])
        if row < len(pool) and len(pool[row].tokens) > _GROWTH * case.context:
            self._replace(pool, row, case.context)
        if row == len(pool):
            pool.append(self._fresh(case.context))
        sequence = pool[row]
        if self.engine.unseen(sequence) > case.new:
            self._complete([Turn(sequence, len(sequence.tokens), run=0)])
        while self.engine.unseen(sequence) < case.new:
            sequence.tokens.append(self._token())
        return sequence

    def _fresh(self, context: int) -> TokenSequence:
        tokens = [self._token() for _ in range(context)]
        sequence = TokenSequence(next(self._ids), tokens, context, SamplingParams())
        tables = self._free_tables.setdefault(context, [])
        sequence.blocks[self.engine.name] = tables.pop() if tables else [next(self._blocks) for _ in range(blocks_of(context))]
        return sequence

    def _replace(self, pool: list[TokenSequence], row: int, context: int) -> None:
        self.engine.cancel([pool[row].id])
        self._free_tables.setdefault(context, []).append(pool[row].blocks[self.engine.name])
        pool[row] = self._fresh(context)

    def _proposal(self, length: int) -> Proposal:
        return Proposal("fabricated", [self._token() for _ in range(length)])

    def _token(self) -> int:
        return self._rng.randrange(self.engine.limits.vocab_size)

    def _complete(self, turns: list[Turn]) -> None:
        self.engine.submit(turns)
        done = 0
        while done < len(turns):
            for completion in self.engine.poll(timeout_s=1.0):
                if completion.error is not None:
                    raise RuntimeError(f"engine {self.engine.name!r}: {completion.error}")
                done += 1


def blocks_of(context: int) -> int:
    """Return how many KV blocks a fabricated sequence of this nominal context takes."""
    return -(-(int(_GROWTH * context) + MOST_NEW_TOKENS) // BLOCK_TOKENS)


def blocks_for(cases: Sequence[Case]) -> int:
    """Return how many KV blocks an engine needs so that all cases can keep their sequences."""
    rows: dict[int, int] = {}
    for case in cases:
        rows[case.context] = max(rows.get(case.context, 0), case.rows)
    return sum(blocks_of(context) * count for context, count in rows.items())


def interleave(
    work: Sequence[tuple[Rig, Case]],
    *,
    budget_s: float,
    rng: random.Random,
    least: int = 3,
    most: int = 15,
    report: Callable[[int], None],
    clock: Callable[[], float] = perf_counter,
) -> list[Samples]:
    """Time every case once per round, in a new order each round, until ``budget_s`` is spent; return the samples in the order of ``work``.

    Round 0 warms up (sequences are made, memory is touched) and is dropped; then there are from ``least`` to ``most`` rounds. Interleaving
    turns a slow spell of the machine into noise that the median ignores, where one case after another would turn it into a wrong curve.
    """
    samples = [Samples() for _ in work]
    order = list(range(len(work)))
    started = clock()
    for round_ in range(most + 1):
        elapsed_s = clock() - started
        if round_ > least and elapsed_s + elapsed_s / round_ > budget_s:
            break
        report(round_)
        rng.shuffle(order)
        for index in order:
            rig, case = work[index]
            seconds, context = rig.time(case)
            if round_ > 0:
                samples[index].seconds.append(seconds)
                samples[index].contexts.append(context)
    return samples
