"""Both together: tokens a second by length and number in flight, the table, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backend.advise.acceptance import ExpectedStep, StepTokens
from backend.advise.load import Cell
from backend.advise.times import FittedTimes, StepLoad
from policy.plan import FloatArray, IntArray

PLAIN = -1
"""The length of a server without speculation: not the same as length 0 with a draft loaded."""
DRAWS = 120
"""Refits for the intervals."""
CONFIDENCE = 0.90
WORTH = 0.005
"""The share of speed that one range of lengths fewer is worth."""


class LoadRange(NamedTuple):
    """Numbers in flight, both included, and the length for them."""

    first: int
    last: int
    length: int


class Interval(NamedTuple):
    """A ratio of speeds."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The finding, in words."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no difference shown"


@dataclass(frozen=True)
class Goodput:
    """The model of a server with requests of one mean size."""

    times: FittedTimes
    expected: list[ExpectedStep]
    prompt_tokens: float
    """Computed prompt tokens of a request."""
    output_tokens: float

    @classmethod
    def fit(
        cls,
        cells: Sequence[Cell],
        *,
        by_cpu: bool = False,
        rng: np.random.Generator | None = None,
        acceptance: StepTokens | None = None,
    ) -> Goodput:
        """Fit both parts; with ``rng`` one draw of the bootstrap."""
        acceptance = acceptance or StepTokens(cells)
        weights = None if rng is None else rng.exponential(size=len(cells))
        times = FittedTimes.fit(cells, by_cpu=by_cpu, weights=weights)
        replies = [reply for cell in cells for reply in cell.replies]
        firsts = sum(cell.firsts for cell in cells)
        output = [reply.output_tokens for reply in replies]
        mean = float(np.mean(output)) if any(output) else _output_tokens(cells)
        prompt = sum(cell.prompt_tokens for cell in cells) / max(firsts, 1.0)
        return cls(times, acceptance.expect(rng), prompt, mean)

    def steps(self, length: int, in_flight: IntArray) -> tuple[StepLoad, FloatArray]:
        """Return the steps with these requests in flight all the time, int64[flights], and the
        tokens that each step brings all of them.

        A request lives 1 + (output - 1) / emitted steps and is prefilled in the first; meanwhile
        so is each of the others, once.
        """
        expected = self.expected[max(length, 0)]
        n = in_flight.astype(float)
        life = 1 + max(self.output_tokens - 1, 0.0) / expected.emitted
        rows = n * (life - 1) / life
        full = np.ones_like(n)
        load = StepLoad(
            rows,
            rows * expected.drafted,
            float(max(length, 0)) * full,
            n * self.prompt_tokens / life,
            float(length != PLAIN) * full,
        )
        return load, n * self.output_tokens / life

    def tokens_per_s(self, length: int, in_flight: IntArray) -> FloatArray:
        """Return output tokens a second at a length, or ``PLAIN``, and ``in_flight[flights]``."""
        load, tokens = self.steps(length, in_flight)
        speed: FloatArray = tokens / self.times.seconds(load)
        return speed


def _output_tokens(cells: Sequence[Cell]) -> float:
    generated = sum(cell.window["generated"] for cell in cells)
    return max(generated / max(sum(cell.firsts for cell in cells), 1.0), 1.0)


def lengths_by_load(
    speed: Mapping[int, FloatArray],  # [flights] tokens a second by length
    flights: Sequence[int],
) -> list[LoadRange]:
    """Return the fewest ranges whose length is nowhere more than ``WORTH`` below the best. Among
    equal lengths it takes the shorter one, which loses less if acceptance falls.
    """
    lengths = sorted(speed)
    table = np.array([speed[length] for length in lengths])
    allowed = table >= (1 - WORTH) * table.max(0)
    ranges: list[LoadRange] = []
    start, common = 0, allowed[:, 0]
    for at in range(1, len(flights) + 1):
        both = common & allowed[:, at] if at < len(flights) else np.zeros_like(common)
        if both.any():
            common = both
            continue
        length = lengths[int(np.argmax(common))]
        last = flights[at] - 1 if at < len(flights) else flights[-1]
        ranges.append(LoadRange(flights[start], last, length))
        if at < len(flights):
            start, common = at, allowed[:, at]
    return ranges


def length_at(ranges: Sequence[LoadRange], in_flight: int) -> int:
    """Return the table's length; beyond its end the last one."""
    for one in ranges:
        if in_flight <= one.last:
            return one.length
    return ranges[-1].length


def flights_up_to(most: int) -> IntArray:
    """Return the numbers in flight that a table distinguishes: all up to 64, then by sixteenths."""
    numbers = [*range(1, min(most, 64) + 1)]
    while numbers[-1] < most:
        numbers.append(min(numbers[-1] + numbers[-1] // 16, most))
    return np.array(numbers)


def interval(ratios: FloatArray, ratio: float) -> Interval:
    """Return a ratio with the interval of its draws, ``ratios[draws]``."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail]).tolist()
    return Interval(ratio, min(low, ratio), max(high, ratio))
