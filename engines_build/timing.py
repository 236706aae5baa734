"""Times single submissions of an engine on fabricated sequences: what ``measure`` builds latency
tables from.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol, runtime_checkable

from backend.engines.latency_cases import Case
from backend.engines.port import DeviceProposal, Engine, LooksAhead, Turn
from backend.request import SamplingParams
from backend.sequence import Proposal
from backend.sequence import Sequence as TokenSequence


@runtime_checkable
class MeasurableEngine(Engine, Protocol):
    """An engine whose cache can be declared filled, so that a long context costs nothing to set
    up.
    """

    def assume(self, sequence: TokenSequence, tokens: int) -> None:
        """Take the first ``tokens`` tokens as seen without running them."""
        ...


class Rig:
    """An engine and the sequences to run it on. All cases use the same KV blocks: the values there
    do not change the time.
    """

    def __init__(
        self,
        engine: MeasurableEngine,
        rng: random.Random,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.engine = engine
        self._rng = rng
        self._clock = clock
        self._ids = itertools.count()

    def time(self, case: Case) -> float:
        """Run one submission of a case and return its seconds. Raises RuntimeError when a turn
        fails.
        """
        sequences = [self._sequence(case, row) for row in range(case.rows)]
        for sequence in sequences:
            self.engine.assume(sequence, case.context)
            self.engine.unseen(sequence)  # compares the assumed tokens now, not within the time
        proposal = Proposal.chain("", self._tokens(case.length)) if case.length else None
        nodes = case.run if case.run > 1 else 0
        turns = [Turn(s, len(s.tokens), case.run, proposal, nodes=nodes) for s in sequences]
        started = self._clock()
        self._complete(turns)
        seconds = self._clock() - started
        if isinstance(self.engine, LooksAhead) and self.engine.limits.lookahead:
            seconds = self.engine.parts_s()["verify"]  # the device hides what the host does
        self.engine.cancel([sequence.id for sequence in sequences])
        return seconds

    def time_in_target(self, draft: MeasurableEngine, case: Case) -> float:
        """Run one submission of a case in which the engine proposes by a draft on its device;
        return the device's seconds for that. Raises RuntimeError when a turn fails.
        """
        sequences = [self._sequence(case, row) for row in range(case.rows)]
        for sequence in sequences:
            self.engine.assume(sequence, case.context)
            draft.assume(sequence, case.context)
        ask = DeviceProposal(draft, case.run, case.run)
        self._complete([Turn(s, len(s.tokens), 1, device_proposal=ask) for s in sequences])
        self.engine.cancel([sequence.id for sequence in sequences])
        assert isinstance(self.engine, LooksAhead)
        return self.engine.parts_s()[f"draft:{draft.name}"]

    def _sequence(self, case: Case, row: int) -> TokenSequence:
        tokens = self._tokens(case.context + case.new)
        first = row * case.blocks_per_row
        blocks = {self.engine.name: list(range(first, first + case.blocks_per_row))}
        prompt = len(tokens) if case.run == 0 else case.context
        return TokenSequence(next(self._ids), tokens, prompt, SamplingParams(), blocks)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self.engine.limits.vocab_size), k=count)

    def _complete(self, turns: list[Turn]) -> None:
        self.engine.submit(turns)
        done = 0
        while done < len(turns):
            for completion in self.engine.poll(timeout_s=1.0):
                if completion.error is not None:
                    raise RuntimeError(f"engine {self.engine.name!r}: {completion.error}")
                done += 1


def interleave(
    work: Sequence[Callable[[], float]],
    *,
    budget_s: float,
    rng: random.Random,
    report: Callable[[float, float], None],
    least: int = 3,
    most: int = 15,
    clock: Callable[[], float] = perf_counter,
) -> list[list[float]]:
    """Run every piece of work once per round, in a new order each round, until ``budget_s`` is
    spent; return what each returned, by round.

    Round 0 warms up and is dropped; then there are from ``least`` to ``most`` rounds. Interleaving
    turns a slow spell of the machine into noise that a quantile ignores, where one case after
    another would bend the curve.

    ``report`` gets after every piece of work the seconds that have passed and those that all of it
    will probably take.
    """
    samples: list[list[float]] = [[] for _ in work]
    order = list(range(len(work)))
    started, expected_s = clock(), budget_s
    for round_ in range(most + 1):
        elapsed_s = clock() - started
        if round_ > least and elapsed_s + elapsed_s / round_ > budget_s:
            break
        if round_:
            round_s = elapsed_s / round_
            expected_s = min(max(budget_s, (least + 1) * round_s), (most + 1) * round_s)
        rng.shuffle(order)
        for index in order:
            samples[index].append(work[index]())
            report(clock() - started, expected_s)
    return [seconds[1:] for seconds in samples]
