"""Measures at start how long the passes of a host's target take, and those of a draft that runs a
model: a few steps of each shape, smallest first, until the time budget is spent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from time import perf_counter

from backend.engines.port import Engine, Turn
from backend.machine import machine
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from policy import LatencyTable
from policy.latency import SYNTHETIC

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 16, 512
SAMPLES = 3
"""Timed steps of a shape, after a first one, which may compile."""
_ROWS = (1, 2, 4, 8, 16, 32, 64)
PATIENCE_STEPS = 64
"""Steps in a row without room for a shape, after which it is left out."""
_DRAFT_RUN = 4
_CATCH_UPS = (4, 16, 64)

_Cells = defaultdict[tuple[int, int, int], list[float]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step to be measured, of made-up requests."""

    rows: int
    length: int
    """Tokens proposed for each."""
    prompt_tokens: int = PROMPT_TOKENS
    drafted: int = 0
    """Tokens that the host's own drafter proposes for each, in the same pass."""


def shapes(
    max_rows: int, k_max: int, max_prompt_tokens: int, *, drafter: bool = False
) -> Iterator[StepShape]:
    """Yield the shapes of a target's steps, and with a ``drafter`` of the host those that show its
    cost; long prompts, which show the cost of context, last.
    """
    lengths = sorted({0, 1, 2, 4, k_max} & {*range(k_max + 1)})
    for rows in _ROWS:
        if rows <= max_rows:
            yield from (StepShape(rows, length) for length in lengths)
            if drafter:
                yield StepShape(rows, 0, drafted=k_max)
    if max_prompt_tokens > LONG_PROMPT_TOKENS:
        for rows in (1, 4):
            if rows <= max_rows:
                yield from (StepShape(rows, length, LONG_PROMPT_TOKENS) for length in (0, k_max))


class StepCalibration:
    """Chooses the steps to measure and makes a table of their times. ``shape`` is the next one,
    None at the end.
    """

    def __init__(
        self,
        planned: Iterator[StepShape],
        budget_s: float,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._planned, self._budget_s, self._clock = planned, budget_s, clock
        self._started_s: float | None = None
        self._samples = self._others = 0
        self._seconds: _Cells = defaultdict(list)
        self._drafting: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._mixed: _Cells = defaultdict(
            list
        )  # of steps with prompts, used if there are no others
        self.shape: StepShape | None = next(planned, None)

    def ran(
        self, rows: int, tokens: int, context_tokens: int, seconds: float, prefill_tokens: int = 0
    ) -> None:
        """Note a step: all its rows and tokens, ``prefill_tokens`` included, the tokens that the
        decoding rows had before, and the seconds of the target's pass.
        """
        if self.shape is None:
            return
        if self._started_s is None:  # the first step may compile for longer than the budget
            self._started_s = self._clock()
        cell = rows, tokens, context_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if prefill_tokens or rows < self.shape.rows:
            self._mixed[cell].append(seconds)
            self._others += 1
        else:
            self._samples += 1
            if self._samples > 1 and self.shape.drafted:
                self._drafting[rows, self.shape.drafted].append(seconds)
            elif self._samples > 1:
                self._seconds[cell].append(seconds)
        if self._samples > SAMPLES or self._others > PATIENCE_STEPS:
            self._samples, self._others, self.shape = 0, 0, next(self._planned, None)
        if self._clock() - self._started_s > self._budget_s and (self._seconds or self._others):
            self.shape = None

    def drafter_s(self) -> dict[int, float]:
        """Return by rows the seconds that a token of all proposals takes the host's drafter."""
        plain: defaultdict[int, list[float]] = defaultdict(list)
        for (rows, tokens, _), seconds in self._seconds.items():
            if tokens == rows:
                plain[rows] += seconds
        return {
            rows: (median(seconds) - median(plain[rows])) / length
            for (rows, length), seconds in self._drafting.items()
            if rows in plain
        }

    def table(self, engine: str, device: str, model: str, dtype: str, version: str) -> LatencyTable:
        """Return the table of the measured steps. Raises LatencyError if there are none."""
        measured = self._seconds or self._mixed
        cells = sorted(measured)
        provenance = replace(
            SYNTHETIC,
            machine=machine.processor(),
            device=device,
            model=model,
            dtype=dtype,
            threads=machine.cores(),
            date=date.today().isoformat(),
            torch_version=version,
        )
        rows, tokens, contexts = zip(*cells, strict=True) if cells else ((), (), ())
        seconds = tuple(median(measured[cell]) for cell in cells)
        return LatencyTable(engine, rows, tokens, contexts, seconds, provenance)


def draft_table(draft: Engine, max_rows: int) -> LatencyTable:
    """Return the measured times of a draft that runs a model: its forwards by rows, its catch-ups
    by tokens.
    """
    cells: list[tuple[int, int, int, float]] = []
    blocks_each = -(-(PROMPT_TOKENS + max(_CATCH_UPS) + 2 * _DRAFT_RUN) // BLOCK_TOKENS)
    most = min(max_rows, draft.limits.kv_blocks // blocks_each)
    for rows in [rows for rows in _ROWS if rows <= most] or [1]:
        sequences = [_made_up(draft, number, blocks_each) for number in range(rows)]
        if rows == 1:
            for tokens in _CATCH_UPS:
                sequences[0].tokens += range(1, tokens + 1)
                read = len(sequences[0].tokens)
                cells.append((1, read, 0, _turns_s(draft, sequences, 1)))
                draft.cancel([sequences[0].id])
                sequences = [_made_up(draft, 0, blocks_each)]
        _turns_s(draft, sequences, _DRAFT_RUN)  # reads the prompts
        seconds = min(_turns_s(draft, sequences, _DRAFT_RUN) for _ in range(SAMPLES)) / _DRAFT_RUN
        cells.append((rows, rows, rows * PROMPT_TOKENS, seconds))
        draft.cancel([sequence.id for sequence in sequences])
    rows_of, tokens_of, contexts, seconds_of = zip(*sorted(cells), strict=True)
    return LatencyTable(draft.name, rows_of, tokens_of, contexts, seconds_of)


def _made_up(draft: Engine, number: int, blocks: int) -> Sequence:
    """Return a made-up request with its own KV blocks; its id is below those of real ones."""
    tokens = [1 + i % 7 for i in range(PROMPT_TOKENS)]
    table = {draft.name: [*range(number * blocks, (number + 1) * blocks)]}
    return Sequence(-number - 1, tokens, PROMPT_TOKENS, SamplingParams(), blocks=table)


def _turns_s(draft: Engine, sequences: list[Sequence], run: int) -> float:
    """Return the seconds of drafting ``run`` tokens for each."""
    started_s = perf_counter()
    draft.submit([Turn(s, len(s.tokens), run=run, nodes=run) for s in sequences])
    open_turns = len(sequences)
    while open_turns:
        completions = draft.poll(timeout_s=1.0)
        for completion in completions:
            if completion.error is not None:
                raise RuntimeError(f"draft {draft.name} cannot be measured: {completion.error}")
        open_turns -= len(completions)
    return perf_counter() - started_s
