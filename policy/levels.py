"""The guard's estimates for a load (``policy.guard``): the level that is applied to it, and how
much better or worse the other one is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .paired import Comparison, from_data

PLANNED, NONE = range(2)
LEVELS = ("planned", "none")
"""The levels that a step can be planned by: the policy, no speculation."""
ALL, PROPOSING = range(2)
"""Kinds of steps by the level that is applied: all, and those with proposals."""
COST_SHARE, CLEAR_COST_SHARE, PROMISING_COST_SHARE = 0.005, 0.001, 0.02
"""The most goodput that experiments may cost, where the policy's plans are clearly better, and
until it is certain that another level is better, as it seems.
"""
SCHEMA = 1
_LEAST_LOSS = 0.02  # of an experiment's time
_UNKNOWN_LOSS, _UNKNOWN_STEPS = 0.3, 3.0  # the same before any, and the steps that this weighs
_COST_KEPT = 0.95  # of what experiments cost, with each of them
_WINDOW_ROWS, _WINDOW_STEPS = 16, 4  # the least to be compared with
_WINDOW_KEPT = 1 - 1 / 48  # of a window, with each step
_FRESH_STEPS = 256  # since the last step of a window
_ODD = 2.0  # times the usual seconds, at which a step's time is cut
_MOST_BUCKETS = 32


class Seen(NamedTuple):
    """A step by the level that is applied."""

    rows: int
    tokens: int
    """Tokens that it emitted."""
    seconds: float
    proposes: bool


class Side(NamedTuple):
    """Fading sums of steps, one side of a pair."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    at: int = 0
    """The step at which it was last added to."""

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def more(self, steps: list[Seen], at: int) -> Side:
        """Return the sums with more steps."""
        kept, count = _WINDOW_KEPT ** len(steps), len(steps)
        return Side(
            kept * self.tokens + sum([step.tokens for step in steps]),
            kept * self.seconds + sum([step.seconds for step in steps]),
            kept * self.steps + count,
            at,
        )

    def halved(self) -> Side:
        """Return the sums with less weight on the pairs so far."""
        return Side(self.tokens / 2, self.seconds / 2, self.steps / 2, self.at)

    def is_enough(self, rows: int, now: int) -> bool:
        """Return whether there are enough steps, and recent ones, of this number of rows."""
        enough = self.steps >= _WINDOW_STEPS and self.steps * rows >= _WINDOW_ROWS
        return enough and now - self.at <= _FRESH_STEPS


class Cost(NamedTuple):
    """The cost of experiments, until the engine works as before them; fading, in steps
    by the level that is applied.
    """

    lost: float = 0.0
    spent: float = 0.0
    """The experiments' own time."""

    @property
    def share(self) -> float:
        """The share of its time that an experiment is expected to lose."""
        lost = _UNKNOWN_LOSS * _UNKNOWN_STEPS + self.lost
        return max(lost / (_UNKNOWN_STEPS + self.spent), _LEAST_LOSS)

    def faded(self) -> Cost:
        """Return the cost before another experiment."""
        return Cost(_COST_KEPT * self.lost, _COST_KEPT * self.spent)


class Bucket(NamedTuple):
    """The estimates for a range of numbers of rows; its pairs have the same number exactly."""

    level: int = PLANNED
    other: Comparison = Comparison()
    """The goodput of the other level over that of the level that is applied."""
    windows: Mapping[tuple[int, int], Side] = {}
    """Steps by the level that is applied, by rows and kind."""
    cost: Cost = Cost()
    """The cost of experiments by the other level."""

    @property
    def share(self) -> float:
        """The share of all time that experiments may lose now."""
        if self.other.is_promising:
            return PROMISING_COST_SHARE
        # Without speculation the way back is looked for.
        clear = self.level == PLANNED and self.other.is_clearly_worse
        return CLEAR_COST_SHARE if clear else COST_SHARE

    @property
    def ratio(self) -> float:
        """Goodput as planned over that without speculation; nan: not measured."""
        if not self.other.weight:
            return math.nan
        return math.exp(-self.other.mean if self.level == PLANNED else self.other.mean)

    def usual_s(self, rows: int, seconds: float) -> float:
        """Return a step's seconds, cut where they are odd: a pause is no property of a level."""
        usual = self.windows.get((rows, ALL))
        if usual is None or usual.steps < _WINDOW_STEPS:
            return seconds
        return min(seconds, _ODD * usual.seconds / usual.steps)

    def against(self, rows: int, now: int) -> Side | None:
        """Return what steps by the other level are compared with; None: not enough yet."""
        side = self.windows.get((rows, PROPOSING if self.level == PLANNED else ALL))
        return side if side is not None and side.is_enough(rows, now) else None

    def billed(self, rows: int, tokens: int, seconds: float, *, experiment: bool) -> Bucket:
        """Return the bucket after a step of an experiment, or one that followed it. The latter is
        as any other, but for its time.
        """
        usual = self.windows.get((rows, ALL))
        if usual is None:
            return self
        usual_s, spent = usual.seconds / usual.steps, 0.0
        lost = seconds / usual_s - 1
        if experiment:
            spent = seconds / usual_s
            lost = spent - tokens / usual.tokens * usual.steps
        return self._replace(cost=Cost(self.cost.lost + lost, self.cost.spent + spent))

    def with_steps(self, steps: Sequence[Seen], at: int) -> Bucket:
        """Return the bucket with more steps by the level that is applied."""
        windows = dict(self.windows)
        kinds: dict[tuple[int, int], list[Seen]] = {}
        for step in steps:
            kinds.setdefault((step.rows, ALL), []).append(step)
            if step.proposes:
                kinds.setdefault((step.rows, PROPOSING), []).append(step)
        for key, group in kinds.items():
            windows[key] = windows.get(key, Side()).more(group, at)
        return self._replace(windows=windows)

    def sampled(self, goodput: float, against: Side) -> Bucket:
        """Return the bucket with a pair, the other level's goodput and other steps; at the level
        that the comparison now says.
        """
        windows = {key: side.halved() for key, side in self.windows.items()}
        other = self.other.learnt(math.log(goodput / against.goodput))
        if other.is_better:  # what is known counts half there, and costs are unknown
            return Bucket(1 - self.level, other.reversed())
        return self.tried()._replace(other=other, windows=windows)

    def tried(self) -> Bucket:
        """Return the bucket after an experiment."""
        return self._replace(cost=self.cost.faded())


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


def saved(buckets: Mapping[int, Bucket]) -> dict[str, Any]:
    """Return what outlasts a restart, JSON-able."""
    rows = {}
    for place, bucket in sorted(buckets.items()):
        other = {LEVELS[1 - bucket.level]: [*bucket.other]} if bucket.other.weight else {}
        rows[rows_of(place)] = {"level": LEVELS[bucket.level], "compared": other}
    return {"schema": SCHEMA, "rows": rows}


def restored(data: Any, share: float) -> dict[int, Bucket]:
    """Return the buckets of saved data, with a share of their evidence; a level that there is no
    more is the first. Raises GuardError.
    """
    schema = _mapping(data, "guard").get("schema")
    if schema != SCHEMA:
        raise GuardError(f"guard.schema must be {SCHEMA}, got {schema!r}")
    places = {rows_of(place): place for place in range(_MOST_BUCKETS)}
    buckets = {}
    for rows, entry in _mapping(data.get("rows"), "guard.rows").items():
        if rows not in places:
            raise GuardError(f"guard.rows must have ranges such as 9-16, got {rows!r}")
        where = f"guard.rows.{rows}"
        level = _mapping(entry, where).get("level")
        compared = _mapping(entry.get("compared"), f"{where}.compared")
        bucket = Bucket(LEVELS.index(level)) if level in LEVELS else Bucket()
        name = LEVELS[1 - bucket.level]
        if level in LEVELS and name in compared:
            try:
                bucket = bucket._replace(other=from_data(compared[name]).faded(share))
            except ValueError as error:
                raise GuardError(f"{where}.compared.{name} {error}") from None
        buckets[places[rows]] = bucket
    return buckets


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GuardError(f"{where} must be an object, got {value!r}")
    return value
