"""The guard's estimates for a load (``policy.guard``): the level that is applied to it, and how
much better or worse the others are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .paired import Comparison, from_data

NO_LEVEL = -1
PLANNED, NONE = 0, 2  # 1 was the plan with half its lengths
LEVELS = {PLANNED: "planned", NONE: "none"}
"""The levels that a step can be planned by: the policy, or no speculation."""
COST_SHARE, CLEAR_COST_SHARE, PROMISING_COST_SHARE = 0.005, 0.001, 0.02
"""The most goodput that experiments may cost, where the policy's plans are clearly better, and
until it is certain that another level is better, as it seems.
"""
SCHEMA = 2
_LEAST_LOSS = 0.02  # of an experiment's time
_UNKNOWN_LOSS, _UNKNOWN_STEPS = 0.3, 3.0  # the same before any, and the steps that this weighs
_COST_KEPT = 0.95  # of what experiments cost, with each of them
_WINDOW_ROWS, _WINDOW_STEPS = 16, 4  # the least to be compared with
_WINDOW_KEPT = 1 - 1 / 48  # of a window, with each step
_FRESH_STEPS = 256  # since the last step of a window
_ODD = 2.0  # times the usual seconds, at which a step's time is cut
_MOST_BUCKETS = 32


class LevelStep(NamedTuple):
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
    proposing: float = 0.0
    """The steps that had proposals."""
    at: int = 0
    """The step at which it was last added to."""

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def more(self, steps: list[LevelStep], at: int) -> Side:
        """Return the sums with more steps."""
        fade, count = _WINDOW_KEPT ** len(steps), len(steps)
        return Side(
            fade * self.tokens + sum([step.tokens for step in steps]),
            fade * self.seconds + sum([step.seconds for step in steps]),
            fade * self.steps + count,
            fade * self.proposing + sum([step.proposes for step in steps]),
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
    """The cost of experiments, until the engine works as before them; fading, in steps by the level
    that is applied.
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
    other: Comparison = Comparison()
    """The goodput of the other level over that of the one that is applied."""
    windows: Mapping[int, Side] = {}
    """Steps by the level that is applied, by rows."""
    cost: Cost = Cost()

    @property
    def other_level(self) -> int:
        """The level that experiments try."""
        return NONE if self.level == PLANNED else PLANNED

    @property
    def ratio(self) -> float:
        """Goodput as planned over that without speculation; nan: not measured."""
        if not self.other.weight:
            return math.nan
        return math.exp(-self.other.mean if self.level == PLANNED else self.other.mean)

    @property
    def share(self) -> float:
        """The share of all time that experiments may lose now."""
        if self.other.is_promising:
            return PROMISING_COST_SHARE
        clear = self.level == PLANNED and self.other.is_clearly_worse
        return (
            CLEAR_COST_SHARE if clear else COST_SHARE
        )  # from no speculation, a way back is sought

    def usual_s(self, rows: int, seconds: float) -> float:
        """Return a step's seconds, cut where they are odd: a pause is no property of a level."""
        usual = self.windows.get(rows)
        if usual is None or usual.steps < _WINDOW_STEPS:
            return seconds
        return min(seconds, _ODD * usual.seconds / usual.steps)

    def against(self, rows: int, now: int) -> Side | None:
        """Return what steps by the other level are compared with; None: not enough yet, or the
        policy proposes nothing.
        """
        side = self.windows.get(rows)
        if side is None or not side.is_enough(rows, now):
            return None
        return side if self.level == NONE or side.proposing >= _WINDOW_STEPS else None

    def bill(
        self, rows: int, tokens: int, seconds: float, *, experiment: bool
    ) -> tuple[Bucket, float]:
        """Return the bucket after a step of an experiment, or one that followed it, and the seconds
        that this lost. The latter is as any other, but for its time.
        """
        usual = self.windows.get(rows)
        if usual is None:
            return self, 0.0
        usual_s, spent = usual.seconds / usual.steps, 0.0
        loss = seconds / usual_s - 1
        if experiment:
            spent = seconds / usual_s
            loss = spent - tokens / usual.tokens * usual.steps
        cost = Cost(self.cost.loss + loss, self.cost.spent + spent)
        return self._replace(cost=cost), loss * usual_s

    def with_steps(self, steps: Sequence[LevelStep], at: int) -> Bucket:
        """Return the bucket with more steps by the level that is applied."""
        windows = dict(self.windows)
        for rows in {step.rows for step in steps}:
            group = [step for step in steps if step.rows == rows]
            windows[rows] = windows.get(rows, Side()).more(group, at)
        return self._replace(windows=windows)

    def add_pair(self, goodput: float, against: Side) -> Bucket:
        """Return the bucket with a pair: the other level's goodput and other steps. It has the
        level that the comparison now says.
        """
        other = self.other.learnt(math.log(goodput / against.goodput))
        if other.is_better:  # costs are unknown there
            return Bucket(self.other_level, other.reverse())
        windows = {rows: side.halve() for rows, side in self.windows.items()}
        return self._replace(other=other, windows=windows, cost=self.cost.fade())


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
            **({"other": list(bucket.other)} if bucket.other.weight else {}),
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
    levels = {name: level for level, name in LEVELS.items()}
    buckets = {}
    for rows, entry in _mapping(data.get("rows"), "guard.rows").items():
        if rows not in places:
            raise GuardError(f"guard.rows must have ranges such as 9-16, got {rows!r}")
        name = _mapping(entry, f"guard.rows.{rows}").get("level")
        if name not in levels:
            raise GuardError(f"guard.rows.{rows}.level must be one of {[*levels]}, got {name!r}")
        other = Comparison()
        if "other" in entry:
            try:
                other = from_data(entry["other"]).fade(share)
            except ValueError as error:
                raise GuardError(f"guard.rows.{rows}.other {error}") from None
        buckets[places[rows]] = Bucket(levels[name], other)
    return buckets


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GuardError(f"{where} must be an object, got {value!r}")
    return value
