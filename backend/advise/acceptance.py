"""Tokens that a step brings at each length, from steps that were measured at the longest one.

Replay: an accepted run is the same run wherever a proposal starts in it, so ordered steps at one
length give those of every shorter one on the same text. Averages by position say the same only if
a token's chance depends on its place in the proposal, not in the text. Real drafts lie between the
two; a measured length in between says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from backend.advise import AdviceError
from backend.advise.load import AnswerCounts, Cell
from policy.plan import FloatArray

Steps = Sequence[tuple[int, int]]
"""(Proposed, accepted) of each step of a text, in order."""
_DRAWN_STEPS = 4000
"""Steps of the text that stands for a server that reports averages only."""


@dataclass(frozen=True)
class ExpectedStep:
    """A decoding request's step on average: tokens that it brings and proposes."""

    emitted: float
    drafted: float
    fired: float
    """The share of steps with a proposal: below 1 for look-ups."""


def reaches(steps: Steps) -> tuple[list[int], list[bool]]:
    """Return for each place of a text how many proposed tokens are right there, and whether any
    are proposed.
    """
    starts, at = [], 0
    for _, accepted in steps:
        starts.append(at)
        at += accepted + 1
    reach, fires = [0] * (at + 1), [False] * (at + 1)
    for start, (proposed, accepted) in zip(reversed(starts), reversed(steps), strict=True):
        follows = reach[start + accepted + 1]
        goes_on = proposed > 0 and accepted == proposed and follows > 0
        for place in range(accepted + 1):
            reach[start + place] = accepted - place + (1 + follows if goes_on else 0)
            fires[start + place] = proposed > 0
    return reach, fires


def replay(steps: Steps, length: int) -> tuple[int, int, int, int]:
    """Return the tokens, steps, drafted tokens and proposals of a text at a length."""
    reach, fires = reaches(steps)
    end, at = len(reach) - 1, 0
    tokens = count = drafted = proposals = 0
    while at < end:
        fire = fires[at] and length > 0
        right = min(reach[at], length) if fire else 0
        drafted += length if fire else 0
        proposals += fire
        tokens += min(right + 1, end - at)
        at += right + 1
        count += 1
    return tokens, count, drafted, proposals


class StepTokens:
    """Tokens of steps of each length, up to the longest that was measured."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        """Read cells. Raises AdviceError if none speculates."""
        cells = [cell for cell in cells if cell.length]
        self.longest = max((cell.length for cell in cells), default=0)
        if not self.longest:
            raise AdviceError("no measured cell speculates: acceptance is unknown")
        self._whole = [cell for cell in cells if cell.length == self.longest]
        counts = [_counts(cell, self.longest) for cell in self._whole]
        self._counts = np.array(counts)  # [cells, row steps, drafts, accepted by position]
        if not self._counts[:, 1].sum():
            raise AdviceError(
                f"nothing was proposed at length {self.longest}: the draft finds nothing in these "
                "requests, or the server does not count drafts (vllm:spec_decode_num_drafts)"
            )
        texts = [_steps(reply) for cell in self._whole for reply in cell.replies if reply.accepted]
        self.ordered = bool(texts)
        survival, fired = self._by_position(None)
        if not texts:
            texts = [_draw_steps(survival, fired, part) for part in range(8)]
        lengths = range(self.longest + 1)
        self._texts = np.array([[replay(text, k) for k in lengths] for text in texts], float)
        self._between = sorted({cell.length for cell in cells})
        self._measured = {
            length: np.array(
                [[c.emitted * c.row_steps, c.row_steps] for c in cells if c.length == length]
            )
            for length in self._between
        }
        self.cells, self.texts = len(self._whole), len(texts)
        self._placed = 1 + fired * float(survival.sum())

    def survival(self) -> tuple[list[float], float]:
        """Return the share of proposals that get as far as each position, and the share of steps
        that have one.
        """
        survival, fired = self._by_position(None)
        return survival.tolist(), fired

    def _by_position(
        self,
        weights: FloatArray | None,  # [cells]
    ) -> tuple[FloatArray, float]:
        sums = np.average(self._counts, 0, weights) + 1e-300
        return sums[2:] / sums[1], min(float(sums[1] / sums[0]), 1.0)

    def expect(self, rng: np.random.Generator | None = None) -> list[ExpectedStep]:
        """Return what each length from 0 on brings; with ``rng`` in one draw of the Bayesian
        bootstrap (Rubin 1981) over cells and texts.
        """
        cell_weights = text_weights = None
        if rng is not None:
            cell_weights = rng.exponential(size=self.cells)
            text_weights = rng.exponential(size=self.texts) if self.ordered else None
        survival, fired = self._by_position(cell_weights)
        sums = np.average(self._texts, 0, text_weights)
        replayed = sums[:, 0] / sums[:, 1]
        placed = 1 + fired * np.concatenate([[0.0], np.cumsum(survival)])
        if rng is not None and not self.ordered:
            replayed = 1 + (replayed - 1) * (placed[-1] - 1) / max(self._placed - 1, 1e-9)
        measured = {length: _mean(values, rng) for length, values in self._measured.items()}
        share = _share([(e, replayed[k], placed[k]) for k, e in measured.items()])
        emitted = (1 - share) * replayed + share * placed
        lengths_measured = sorted(measured)
        ratio = np.interp(
            np.arange(self.longest + 1),
            lengths_measured,
            [measured[k] / emitted[k] for k in lengths_measured],
        )
        emitted = np.maximum.accumulate(np.maximum(emitted * ratio, 1.0))
        emitted[0] = 1.0
        fires = (1 - share) * sums[:, 3] / sums[:, 1] + share * fired
        drafted = (1 - share) * sums[:, 2] / sums[:, 1] + share * fired * np.arange(len(fires))
        zero = ExpectedStep(1.0, 0.0, 0.0)
        longer = zip(emitted[1:], drafted[1:], fires[1:], strict=True)
        return [zero, *(ExpectedStep(float(e), float(d), float(f)) for e, d, f in longer)]


def _share(rows: Sequence[tuple[float, float, float]]) -> float:
    """Return the weight of averages by position, the rest being replay's, that explains measured
    tokens best; rows are (measured, replayed, by position).
    """
    measured, replayed, placed = np.array(rows).T
    gap = placed - replayed
    if np.abs(gap).max() < 0.01:
        return 0.0
    return float(np.clip(gap @ (measured - replayed) / (gap @ gap), 0.0, 1.0))


def _mean(
    values: FloatArray,  # [cells, 2] tokens and steps
    rng: np.random.Generator | None,
) -> float:
    weights = np.ones(len(values)) if rng is None else rng.exponential(size=len(values))
    tokens, steps = weights @ values
    return float(tokens / steps)


def _counts(cell: Cell, longest: int) -> list[float]:
    """Return row steps, drafts and accepted tokens by position, from the server's counters or
    else from its answers; from totals alone, acceptance falls by the same factor at each position.
    """
    window = cell.window
    histogram = [0.0] * (longest + 1)
    for reply in cell.replies:
        counts = reply.histogram or np.bincount(np.array(reply.accepted, int), minlength=1)
        for place, count in enumerate(counts[: longest + 1]):
            histogram[place] += float(count)
    at_least = [sum(histogram[place + 1 :]) for place in range(longest)]
    steps = cell.row_steps
    if sum(window.accepted[:longest]) and window["drafts"]:
        accepted = [*window.accepted[:longest], *[0.0] * (longest - len(window.accepted))]
        return [steps, window["drafts"], *accepted]
    if window["drafts"] or window["drafted"]:
        drafts = window["drafts"] or window["drafted"] / longest
        return [
            steps,
            drafts,
            *(drafts * s for s in geometric(window["accepted"] / drafts, longest)),
        ]
    replied = sum(max(reply.output_tokens - 1, 0) for reply in cell.replies)
    total = replied - sum(at_least)  # a step emits what is accepted and one token more
    return [max(total, sum(histogram), 1.0), sum(histogram), *at_least]


def geometric(accepted: float, length: int) -> list[float]:
    """Return the shares of proposals that reach each position, falling by one factor, whose sum
    is ``accepted``.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        factor = (low + high) / 2
        low, high = (factor, high) if _sum(factor, length) < accepted else (low, factor)
    return [high**place for place in range(1, length + 1)]


def _sum(factor: float, length: int) -> float:
    return sum(factor**place for place in range(1, length + 1))


def _steps(reply: AnswerCounts) -> Steps:
    """Return all steps of a reply. Those without a proposal are not reported: they bring a token
    each, which is what the text has beyond the others.
    """
    steps = list(zip(reply.proposed, reply.accepted, strict=True))
    silent = reply.output_tokens - 1 - sum(accepted + 1 for _, accepted in steps)
    return steps + [(0, 0)] * max(silent, 0)


def _draw_steps(survival: FloatArray, fired: float, seed: int) -> Steps:
    """Return steps drawn from averages by position, ``survival[length]``, for servers that do not
    report their order.
    """
    rng, length = np.random.default_rng(seed), len(survival)
    exactly = np.maximum(-np.diff([1.0, *survival, 0.0]), 0.0)
    accepted = rng.choice(length + 1, _DRAWN_STEPS // 8, p=exactly / exactly.sum())
    fires = rng.random(len(accepted)) < fired
    return [(length, int(a)) if f else (0, 0) for a, f in zip(accepted, fires, strict=True)]
