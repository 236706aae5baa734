"""The guard's estimates for a load (``policy.guard``): the level that is applied to it, and how
much better or worse the others are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .paired import Comparison, from_data

NO_LEVEL = -1
PLANNED, SHORT, NONE = range(3)
LEVELS = ("planned", "short", "none")
"""The levels that a step can be planned by: the policy, the policy with half its lengths, no
speculation.
"""
COST_SHARE, CLEAR_COST_SHARE, PROMISING_COST_SHARE = 0.005, 0.001, 0.02
"""The most goodput that experiments may cost, where the policy's plans are clearly better, and
until it is certain that another level is better, as it seems.
"""
SCHEMA = 1
_LEAST_LOSS = 0.02  # of an experiment's time
_UNKNOWN_LOSS, _UNKNOWN_STEPS = 0.3, 3.0  # the same before any, and the steps that this weighs
_COST_KEPT = 0.95  # of what experiments cost, with each of them
_UNKNOWN_PROMISE = 0.2  # of an alternative without samples
_LONGEST_WAIT = 3  # of an alternative, in experiments by others; twice where it is clearly worse
_OTHERS_FADE = 0.98  # of the evidence on one alternative, with a sample of another
_WINDOW_ROWS, _WINDOW_STEPS = 16, 4  # the least to be compared with
_WINDOW_KEPT = 1 - 1 / 48  # of a window, with each step
_FRESH_STEPS = 256  # since the last step of a window
_ODD = 2.0  # times the usual seconds, at which a step's time is cut
_LEAST_LENGTH = 1.5  # mean length from which half is less
_LENGTH_RATE = 0.05  # of the mean length, with each step
_MOST_BUCKETS = 32


class Seen(NamedTuple):
    """A step by the level that is applied."""

    rows: int
    tokens: int
    """Tokens that it emitted."""
    seconds: float
    length: float
    """The mean length of its proposals; 0: there are none."""


class Side(NamedTuple):
    """Fading sums of steps, one side of a pair."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    proposing: float = 0.0
    """The steps that had proposals."""
    at: int = 0
    """The step at which it was last added to."""

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def more(self, steps: list[Seen], at: int) -> Side:
        """Return the sums with more steps."""
        fade, count = _WINDOW_KEPT ** len(steps), len(steps)
        return Side(
            fade * self.tokens + sum([step.tokens for step in steps]),
            fade * self.seconds + sum([step.seconds for step in steps]),
            fade * self.steps + count,
            fade * self.proposing + sum([step.length > 0 for step in steps]),
            at,
        )

    def halve(self) -> Side:
        """Return the sums with less weight on the pairs so far."""
        return Side(self.tokens / 2, self.seconds / 2, self.steps / 2, self.proposing / 2, self.at)

    def is_enough(self, rows: int, now: int) -> bool:
        """Return whether there are enough steps, and recent ones, of this number of rows."""
        enough = self.steps >= _WINDOW_STEPS and self.steps * rows >= _WINDOW_ROWS
        return enough and now - self.at <= _FRESH_STEPS


class Cost(NamedTuple):
    """The cost of experiments by a level, until the engine works as before them; fading, in steps
    by the level that is applied.
    """

    loss: float = 0.0
    spent: float = 0.0
    """The experiments' own time."""

    @property
    def share(self) -> float:
        """The share of its time that an experiment is expected to lose."""
        loss = _UNKNOWN_LOSS * _UNKNOWN_STEPS + self.loss
        return max(loss / (_UNKNOWN_STEPS + self.spent), _LEAST_LOSS)

    def fade(self) -> Cost:
        """Return the cost before another experiment."""
        return Cost(_COST_KEPT * self.loss, _COST_KEPT * self.spent)


class Bucket(NamedTuple):
    """The estimates for a range of numbers of rows; its pairs have the same number exactly."""

    level: int = PLANNED
    compared: tuple[Comparison, ...] = (Comparison(),) * len(LEVELS)
    """By level, its goodput over that of the level that is applied."""
    length: float = 0.0
    """The mean length of planned proposals."""
    windows: Mapping[int, Side] = {}
    """Steps by the level that is applied, by rows."""
    waits: tuple[int, ...] = (0,) * len(LEVELS)
    """By level, the experiments since it was last tried."""
    next_level: int = NONE
    """That of the next experiment."""
    costs: tuple[Cost, ...] = (Cost(),) * len(LEVELS)
    """By level, the cost of experiments by it."""
    share: float = COST_SHARE
    """The share of all time that experiments may lose now."""

    @property
    def ratio(self) -> float:
        """Goodput as planned over that without speculation; nan: not measured."""
        planned, none = self.compared[PLANNED], self.compared[NONE]
        measured = all(
            comparison.weight or self.level == level
            for level, comparison in ((PLANNED, planned), (NONE, none))
        )
        return math.exp(planned.mean - none.mean) if measured else math.nan

    @property
    def loss(self) -> float:
        """The share of its time that the next experiment is expected to lose."""
        return self.costs[self.next_level].share

    @property
    def short_length(self) -> int:
        """The most tokens of a proposal at the level ``short``."""
        return max(1, int(self.length / 2))

    def usual_s(self, rows: int, seconds: float) -> float:
        """Return a step's seconds, cut where they are odd: a pause is no property of a level."""
        usual = self.windows.get(rows)
        if usual is None or usual.steps < _WINDOW_STEPS:
            return seconds
        return min(seconds, _ODD * usual.seconds / usual.steps)

    def against(self, level: int, rows: int, now: int) -> Side | None:
        """Return what steps by another level are compared with; None: not enough yet, or the policy
        proposes nothing.
        """
        side = self.windows.get(rows)
        if side is None or not side.is_enough(rows, now):
            return None
        return side if level != NONE or side.proposing >= _WINDOW_STEPS else None

    def bill(
        self, level: int, rows: int, tokens: int, seconds: float, *, experiment: bool
    ) -> tuple[Bucket, float]:
        """Return the bucket after a step of an experiment by a level, or one that followed it, and
        the seconds that this lost. The latter is as any other, but for its time.
        """
        usual = self.windows.get(rows)
        if usual is None:
            return self, 0.0
        usual_s, spent = usual.seconds / usual.steps, 0.0
        loss = seconds / usual_s - 1
        if experiment:
            spent = seconds / usual_s
            loss = spent - tokens / usual.tokens * usual.steps
        costs, cost = list(self.costs), self.costs[level]
        costs[level] = Cost(cost.loss + loss, cost.spent + spent)
        return self._replace(costs=tuple(costs)), loss * usual_s

    def with_steps(self, steps: Sequence[Seen], at: int) -> Bucket:
        """Return the bucket with more steps by the level that is applied."""
        windows, length = dict(self.windows), self.length
        for rows in {step.rows for step in steps}:
            group = [step for step in steps if step.rows == rows]
            windows[rows] = windows.get(rows, Side()).more(group, at)
        if self.level == PLANNED:
            for step in steps:
                if step.length:
                    length += _LENGTH_RATE * (step.length - length) if length else step.length
        return self._replace(windows=windows, length=length)

    def add_pair(self, level: int, goodput: float, against: Side) -> Bucket:
        """Return the bucket with a pair: a level's goodput and other steps. It has the level that
        the comparisons now say.
        """
        compared = [comparison.fade(_OTHERS_FADE) for comparison in self.compared]
        compared[level] = self.compared[level].learnt(math.log(goodput / against.goodput))
        windows = {rows: side.halve() for rows, side in self.windows.items()}
        after = self.note_trial(level)._replace(compared=tuple(compared), windows=windows)
        better = [other for other in after.alternatives() if compared[other].is_better]
        if better:
            after = after.move_to(max(better, key=lambda other: compared[other].mean))
        return after.prepare()

    def note_trial(self, level: int) -> Bucket:
        """Return the bucket after an experiment."""
        waits = [0 if other == level else count + 1 for other, count in enumerate(self.waits)]
        costs = list(self.costs)
        costs[level] = costs[level].fade()
        return self._replace(waits=tuple(waits), costs=tuple(costs))

    def alternatives(self) -> list[int]:
        """Return the levels that are tried at the bucket's own; half the lengths are where
        speculation has ended.
        """
        is_short = self.level == NONE and self.length >= _LEAST_LENGTH
        others = (PLANNED, SHORT, NONE) if is_short else (PLANNED, NONE)
        return [level for level in others if level != self.level]

    def move_to(self, level: int) -> Bucket:
        """Return the bucket at another level, with half the evidence; costs are unknown there."""
        won = self.compared[level]
        comparisons = [c.seen_from(won) if c.weight else c for c in self.compared]
        comparisons[level], comparisons[self.level] = Comparison(), won.reverse()
        costs = (Cost(),) * len(LEVELS)
        return self._replace(level=level, compared=tuple(comparisons), windows={}, costs=costs)

    def prepare(self) -> Bucket:
        """Return the bucket with the next experiment: the alternative that may be worth most, or
        one that has waited long.
        """
        compared, alternatives = self.compared, self.alternatives()
        level = max(alternatives, key=lambda other: _promise(compared[other]))
        longest = max(alternatives, key=self.waits.__getitem__)
        most = _LONGEST_WAIT * (2 if compared[longest].is_clearly_worse else 1)
        level = longest if self.waits[longest] >= most else level
        worse = all(compared[other].is_clearly_worse for other in alternatives)
        clear = worse and self.level == PLANNED  # elsewhere the way back is looked for
        share = CLEAR_COST_SHARE if clear else COST_SHARE
        if compared[level].is_promising:
            share = PROMISING_COST_SHARE
        return self._replace(next_level=level, share=share)


def _promise(comparison: Comparison) -> float:
    """Return what an alternative may be worth."""
    if not comparison.weight:
        return _UNKNOWN_PROMISE
    return comparison.mean + 2 * comparison.error


def bucket_of(rows: int) -> int:
    """Return the bucket of a number of rows: 1, 2, 3-4, 5-8 and so on."""
    return (rows - 1).bit_length()


def rows_of(bucket: int) -> str:
    """Return the numbers of rows of a bucket, such as ``9-16``."""
    most = 1 << bucket
    return str(most) if most <= 2 else f"{most // 2 + 1}-{most}"


# -- as data


class GuardError(ValueError):
    """Saved data that do not fit; the message names the field and the value."""


def save_buckets(buckets: Mapping[int, Bucket]) -> dict[str, Any]:
    """Return what outlasts a restart, JSON-able."""
    rows = {
        rows_of(place): {
            "level": LEVELS[bucket.level],
            "length": bucket.length,
            "compared": {
                name: list(comparison)
                for name, comparison in zip(LEVELS, bucket.compared, strict=True)
                if comparison.weight
            },
        }
        for place, bucket in sorted(buckets.items())
    }
    return {"schema": SCHEMA, "rows": rows}


def restore_buckets(data: Any, share: float) -> dict[int, Bucket]:
    """Return the buckets of saved data, with a share of their evidence. Raises GuardError."""
    schema = _mapping(data, "guard").get("schema")
    if schema != SCHEMA:
        raise GuardError(f"guard.schema must be {SCHEMA}, got {schema!r}")
    places = {rows_of(place): place for place in range(_MOST_BUCKETS)}
    buckets = {}
    for rows, entry in _mapping(data.get("rows"), "guard.rows").items():
        if rows not in places:
            raise GuardError(f"guard.rows must have ranges such as 9-16, got {rows!r}")
        bucket = _restore_bucket(_mapping(entry, f"guard.rows.{rows}"), f"guard.rows.{rows}", share)
        buckets[places[rows]] = bucket.prepare()
    return buckets


def _restore_bucket(entry: dict[str, Any], where: str, share: float) -> Bucket:
    level, length = entry.get("level"), entry.get("length")
    if type(length) not in (int, float) or not 0 <= length < math.inf:  # type: ignore[operator]
        raise GuardError(f"{where}.length must be a number from 0, got {length!r}")
    compared = [Comparison()] * len(LEVELS)
    for name, values in _mapping(entry.get("compared"), f"{where}.compared").items():
        if name not in LEVELS:
            continue  # there is no such level any more
        try:
            compared[LEVELS.index(name)] = from_data(values).fade(share)
        except ValueError as error:
            raise GuardError(f"{where}.compared.{name} {error}") from None
    if level not in LEVELS:
        return Bucket(length=float(length))  # type: ignore[arg-type]
    return Bucket(LEVELS.index(level), tuple(compared), float(length))  # type: ignore[arg-type]


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GuardError(f"{where} must be an object, got {value!r}")
    return value
