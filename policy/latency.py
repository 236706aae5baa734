"""How long a step takes: measured tables, monotone curves fitted to them, and what steps teach.

With P prefill tokens, B rows, k_i proposed tokens, K_d the longest chain of draft d's group and
n_dj its rows at depth j, a step takes, in seconds,

    T = T_verify(P + B + sum k_i, context, context of the proposed)
        + sum_d [ sum_{j<=K_d} t_d(n_dj) + catchup_d ] + T_overhead

A ``LatencyTable`` is a file, measured on the machine that serves. A ``LatencyModel`` holds the
curves fitted to the tables, a ``Correction`` what measured steps say of them, and ``Times`` is both
together: what planning asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .plan import BoolArray, FloatArray, IntArray

SCHEMA = 2
MAX_GRID_TOKENS = 1 << 16
VERIFY, OVERHEAD, FIRST_DRAFT = 0, 1, 2
"""Places of a step's parts: the target, the overhead, then the drafts in order."""

MAX_CORRECTION = 8.0  # either way
MAX_SHAPE = math.log(2.0)  # either way
OCTAVES = 15
"""Places of a shape: 1, 2, 4, ... 16384 tokens."""

_RATE = 0.05  # of a step's surprise
_MAX_SURPRISE = 4.0  # of one step: a garbage collection is no trend
_IDLE_FACTOR, _IDLE_KEEP = 1.5, 0.9995  # a dearer draft that rests fades, or none would try it
_MAX_SHAPE_SURPRISE = 0.25  # of one step
_SHAPE_PRIOR = 2.0  # steps that the table is worth
_FADING = 0.998  # of the evidence by octave, in a step
_ENOUGH = 1.0  # evidence below which an octave is as its neighbours are
_EARLY = 32.0  # evidence of all octaves, before which none is missed
_APPLY_STEPS = 8  # from one curve to the next: making one takes as long as planning for a row
_LAST_PLACE = OCTAVES - 1 - 1e-9


class LatencyError(ValueError):
    """A table that is missing or cannot be used; the message names the field and the value."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a table was measured: enough to tell whether it is valid here. ``date`` is ISO 8601."""

    machine: str
    device: str
    model: str
    model_hash: str
    dtype: str
    threads: int
    date: str
    torch_version: str

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), int if item.name == "threads" else str
            if not isinstance(value, kind) or isinstance(value, bool):
                raise LatencyError(
                    f"provenance.{item.name} must be of type {kind.__name__}, got {value!r}"
                )


SYNTHETIC = Provenance("none", "none", "none", "none", "none", 0, "1970-01-01", "none")
"""The provenance of tables that were made up, not measured."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Measured forwards of one engine, cell by cell.

    ``seconds[c]`` (a median) is the time of a forward of ``tokens[c]`` query tokens in all, spread
    over ``rows[c]`` sequences that hold ``context_tokens[c]`` cached tokens in all; summed over
    proposed tokens, those that they follow are ``node_context_tokens[c]`` (left out: none). A
    target is measured in verification, a draft in steps (``tokens == rows``) and catch-up. Raises
    LatencyError on malformed values.
    """

    engine: str
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    provenance: Provenance = SYNTHETIC
    node_context_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "node_context_tokens", self.node_context_tokens or (0,) * len(self.tokens)
        )
        if not isinstance(self.engine, str) or not self.engine:
            raise LatencyError(f"engine must be a name, got {self.engine!r}")
        of = f"of engine {self.engine!r}"
        if not self.tokens:
            raise LatencyError(f"tokens {of} must have at least one cell, got none")
        for name, kind, low, high in _COLUMNS:
            column = getattr(self, name)
            if len(column) != len(self.tokens):
                raise LatencyError(
                    f"{name} {of} must have {len(self.tokens)} cells like tokens, got {len(column)}"
                )
            for c, value in enumerate(column):
                _check_number(f"{name}[{c}] {of}", value, kind, low, high)
        for c, (rows, tokens) in enumerate(zip(self.rows, self.tokens, strict=True)):
            _check_number(f"rows[{c}] {of}", rows, int, 1, tokens)

    @classmethod
    def synthetic(cls, engine: str, seconds: Mapping[int, float]) -> LatencyTable:
        """Return a made-up table from total query tokens -> seconds."""
        tokens = tuple(sorted(seconds))
        ones, zeros = (1,) * len(tokens), (0,) * len(tokens)
        return cls(engine, ones, tokens, zeros, tuple(seconds[t] for t in tokens))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able data, the inverse of ``from_dict``."""
        columns = {name: list(getattr(self, name)) for name, *_ in _COLUMNS}
        provenance = asdict(self.provenance)
        return {
            "schema": SCHEMA,
            "engine": self.engine,
            "provenance": provenance,
            **columns,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyTable:
        """Rebuild a table. Raises LatencyError naming the field that is missing or wrong."""
        if data.get("schema") != SCHEMA:
            raise LatencyError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
        names = {"schema", *(item.name for item in fields(cls))}
        _check_keys("table", data, names)
        provenance = data["provenance"]
        if not isinstance(provenance, Mapping):
            raise LatencyError(f"provenance must be an object, got {provenance!r}")
        _check_keys("provenance", provenance, {item.name for item in fields(Provenance)})
        columns = {name: data[name] for name, *_ in _COLUMNS}
        for name, column in columns.items():
            if not isinstance(column, (list, tuple)):
                raise LatencyError(f"{name} must be a list, got {column!r}")
            columns[name] = tuple(column)
        made = Provenance(**provenance)
        return cls(data["engine"], **columns, provenance=made)


_COLUMNS = (
    ("rows", int, 1, MAX_GRID_TOKENS),
    ("tokens", int, 1, MAX_GRID_TOKENS),
    ("context_tokens", int, 0, 1 << 40),
    ("node_context_tokens", int, 0, 1 << 40),
    ("seconds", float, 1e-300, math.inf),
)


def _check_number(where: str, value: Any, kind: type, low: float, high: float) -> None:
    """Raise LatencyError for a value that is no number of a kind in low..high."""
    right = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind is int and not (right and low <= value <= high):
        raise LatencyError(f"{where} must be an integer in {low}..{high}, got {value!r}")
    if kind is float and not (right and low <= value < math.inf):
        bound = "> 0" if low else ">= 0"
        raise LatencyError(f"{where} must be a finite number {bound}, got {value!r}")


def _check_keys(where: str, data: Mapping[str, Any], expected: set[str]) -> None:
    if missing := sorted(expected - set(data)):
        raise LatencyError(f"{where} lacks the field {missing[0]!r}")
    if unknown := sorted(set(data) - expected):
        raise LatencyError(f"{where} has the unknown field {unknown[0]!r}: {data[unknown[0]]!r}")


@dataclass(frozen=True, slots=True, eq=False)
class LatencyCurve:
    """Seconds of a forward: base(tokens) + row_s * rows + context_s * cached tokens
    + node_context_s * cached tokens before each proposed token.

    The last is what an engine takes that verifies every token by itself. Never negative, never
    falling. ``base_s[t]`` is dense over 0..largest measured tokens; beyond it the line ``slope_s``
    goes on.
    """

    base_s: FloatArray
    slope_s: float
    row_s: float = 0.0
    context_s: float = 0.0
    node_context_s: float = 0.0

    @classmethod
    def fit(cls, table: LatencyTable) -> LatencyCurve:
        """Fit a table by non-negative least squares of the relative error.

        A base that never falls is a sum of steps >= 0 at the measured counts, so that isotonic
        regression and the coefficients are one problem. Between counts the base is linear. A term
        that never varies at equal tokens cannot be separated from the base: it is 0.
        """
        tokens, seconds = np.array(table.tokens), np.array(table.seconds)
        knots = np.unique(tokens)
        columns = [(tokens[:, None] >= knots).astype(float)]
        for values in (table.rows, table.context_tokens, table.node_context_tokens):
            term = np.array(values, float)
            varies = any(np.ptp(term[tokens == count]) > 0 for count in knots)
            columns.append((term * varies)[:, None])
        matrix = np.hstack(columns) / seconds[:, None]
        solution = nonnegative_least_squares(matrix, np.ones(len(seconds)))
        base = np.interp(np.arange(knots[-1] + 1), knots, np.cumsum(solution[:-3]))
        last = len(base) - 1
        start = max(last // 2, int(knots[0]))  # the chord over the last octave averages stairs
        slope = float(base[last] - base[start]) / (last - start) if last > start else 0.0
        return cls(base, slope, *solution[-3:].tolist())

    def base(self, tokens: IntArray) -> FloatArray:
        """Return base seconds for any shape of token counts >= 0."""
        last = len(self.base_s) - 1
        beyond = np.maximum(tokens - last, 0)
        seconds: FloatArray = self.base_s[np.minimum(tokens, last)] + self.slope_s * beyond
        return seconds

    def run(self, first: int, count: int) -> FloatArray:
        """Return base seconds of ``count`` consecutive token counts from ``first`` on."""
        last = first + count
        inside = last <= len(self.base_s)
        return self.base_s[first:last] if inside else self.base(np.arange(first, last))

    def at(self, tokens: int) -> float:
        """Return base seconds of one count."""
        beyond = tokens - len(self.base_s) + 1
        if beyond <= 0:
            return self.base_s.item(tokens)
        return self.base_s.item(-1) + self.slope_s * beyond

    def seconds(
        self, tokens: int, rows: int = 1, context_tokens: int = 0, node_context_tokens: int = 0
    ) -> float:
        """Return the seconds of one forward."""
        context_s = self.context_s * context_tokens + self.node_context_s * node_context_tokens
        return self.at(tokens) + self.row_s * rows + context_s


def nonnegative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Return x >= 0 minimising |matrix @ x - target| (float64[columns]).

    The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23.
    Columns are scaled to unit length, so that counts of tokens and of rows weigh alike; a zero
    column gets 0.
    """
    scale = np.linalg.norm(matrix, axis=0)
    unit = np.divide(matrix, scale, out=np.zeros_like(matrix), where=scale > 0)
    x = np.zeros(unit.shape[1])
    free = np.zeros(unit.shape[1], np.bool_)
    for _ in range(10 * unit.shape[1]):
        gradient = np.where(free, -np.inf, unit.T @ (target - unit @ x))
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10 * np.linalg.norm(target):
            break
        free[entering] = True
        x = _solve_free(unit, target, x, free)
    result: FloatArray = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    return result


def _solve_free(unit: FloatArray, target: FloatArray, x: FloatArray, free: BoolArray) -> FloatArray:
    """Solve for the free columns, freezing (in ``free``) those that would turn negative."""
    while True:
        goal = np.zeros_like(x)
        goal[free] = np.linalg.lstsq(unit[:, free], target, rcond=None)[0]
        falling = free & (goal <= 0)
        if not falling.any():
            return goal
        step = float(np.min(x[falling] / (x[falling] - goal[falling] + 1e-300)))
        x = x + step * (goal - x)
        free &= ~(falling & (x <= 1e-14))
        x = np.where(free, x, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LatencyModel:
    """The target's and the drafts' curves, and what a step takes beside forwards: ``overhead_s``
    always, ``speculation_s`` more where it speculates.

    For one look-up instead of one by draft, their bases lie side by side: ``base_s`` and
    ``switch_s``, by how much it exceeds that of two tokens, float64[drafts, tokens].
    """

    target: LatencyCurve
    drafts: tuple[LatencyCurve, ...]
    overhead_s: float = 0.0
    speculation_s: float = 0.0
    base_s: FloatArray = field(init=False, repr=False)
    switch_s: FloatArray = field(init=False, repr=False)
    draft_row_s: FloatArray = field(init=False, repr=False)
    draft_context_s: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tokens = np.arange(max((len(curve.base_s) for curve in self.drafts), default=1))
        base_s = np.array([curve.base(tokens) for curve in self.drafts])
        base_s = base_s.reshape(len(self.drafts), len(tokens))
        two_s = base_s.take(np.minimum(tokens, 2), 1, mode="clip")
        for name, value in (
            ("base_s", base_s),
            ("switch_s", base_s - two_s),
            ("draft_row_s", np.array([curve.row_s for curve in self.drafts])),
            ("draft_context_s", np.array([curve.context_s for curve in self.drafts])),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def from_tables(
        cls,
        target: LatencyTable | None,
        drafts: Mapping[str, LatencyTable | None],
        overhead_s: float = 0.0,
        speculation_s: float = 0.0,
    ) -> LatencyModel:
        """Fit the tables, drafts in the order of the mapping.

        Raises LatencyError naming the engines that have no table.
        """
        missing = [name for name, table in {"target": target, **drafts}.items() if table is None]
        if target is None or missing:
            names = ", ".join(missing)
            raise LatencyError(f"no latency table for {names}: measure it on this machine first")
        for name, value in (("overhead_s", overhead_s), ("speculation_s", speculation_s)):
            if not 0 <= value < math.inf:
                raise LatencyError(f"{name} must be a finite number >= 0, got {value!r}")
        curves = tuple(LatencyCurve.fit(table) for table in drafts.values() if table is not None)
        return cls(LatencyCurve.fit(target), curves, overhead_s, speculation_s)

    @classmethod
    def unit(cls, drafts: int, draft_s: float = 0.1, step_s: float = 1.0) -> LatencyModel:
        """Return a made-up model: any verification takes ``step_s``, any forward ``draft_s``."""
        curve = LatencyCurve(np.full(2, draft_s), 0.0)
        return cls(LatencyCurve(np.full(2, step_s), 0.0), (curve,) * drafts)

    def forwards_s(self, tokens: IntArray) -> FloatArray:
        """Return base seconds of the drafts' forwards of so many tokens, int64[drafts, n]."""
        return self._look_up(self.base_s, tokens)

    def switches_s(self, tokens: IntArray) -> FloatArray:
        """Return how much longer reading int64[drafts, n] >= 1 tokens takes than reading two."""
        return self._look_up(self.switch_s, tokens)

    def _look_up(self, table: FloatArray, tokens: IntArray) -> FloatArray:
        drafts, count = table.shape
        start = np.arange(0, drafts * count, count)[:, None]
        if not tokens.size or tokens.item(tokens.argmax()) < count:
            seconds: FloatArray = table.take(tokens + start)
            return seconds
        slope_s = np.array([curve.slope_s for curve in self.drafts])[:, None]
        seconds = table.take(np.minimum(tokens, count - 1) + start)
        seconds += slope_s * np.maximum(tokens - (count - 1), 0)
        return seconds


class Times:
    """What a step takes as far as is known: the tables, each part times its measured factor.

    All seconds here are corrected. ``overhead_s`` of every step, ``speculation_s`` more of one that
    speculates; ``row_s`` and ``context_s`` by row and cached token of the target,
    ``node_context_s`` by cached token before each proposed one; ``draft_row_s`` and
    ``draft_context_s`` float64[drafts] by row and cached token of every forward of the drafts. The
    planner adds to these what verifying the nodes takes that a forward brings.
    """

    def __init__(
        self, model: LatencyModel, factor: FloatArray, target: LatencyCurve | None = None
    ) -> None:
        """Take the factors float64[2 + drafts], and the target's curve if not the model's."""
        self._model, self._target = model, target or model.target
        self._factor, overhead_factor = factor.item(VERIFY), factor.item(OVERHEAD)
        drafts_factor = factor[FIRST_DRAFT:]
        self._drafts_factor = drafts_factor[:, None]
        self.overhead_s = overhead_factor * model.overhead_s
        self.speculation_s = overhead_factor * model.speculation_s
        self.row_s = self._factor * self._target.row_s
        self.context_s = self._factor * self._target.context_s
        self.node_context_s = self._factor * self._target.node_context_s
        self.draft_row_s = drafts_factor * model.draft_row_s
        self.draft_context_s = drafts_factor * model.draft_context_s

    def verify_s(self, first: int, count: int) -> FloatArray:
        """Return the seconds of passes of first, first + 1, ... tokens, rows and context apart."""
        return self._factor * self._target.run(first, count)

    def verify_at(self, tokens: int) -> float:
        """Return the seconds of one pass of so many tokens, rows and context apart."""
        return self._factor * self._target.at(tokens)

    def forward_s(self, count: int) -> FloatArray:
        """Return the seconds of forwards of 0 .. count - 1 tokens of all drafts, rows and context
        apart, float64[drafts, count]; none take no time.
        """
        model = self._model
        inside = count <= model.base_s.shape[1]
        base_s = model.base_s[:, :count] if inside else model.forwards_s(np.arange(count)[None])
        seconds = self._drafts_factor * base_s
        seconds[:, 0] = 0.0
        return seconds

    def forwards_s(self, tokens: IntArray) -> FloatArray:
        """Return the seconds of forwards of so many tokens, int64[drafts, n]; none take no time."""
        return self._drafts_factor * self._model.forwards_s(tokens) * (tokens > 0)

    def switch_s(self, catchup: IntArray) -> FloatArray:
        """Return how much longer catching up takes, int64[drafts, n] >= 1 tokens, than with two."""
        return self._drafts_factor * self._model.switches_s(catchup)


class Predicted(NamedTuple):
    """What a step should have taken: ``parts`` float64[2 + drafts] seconds, places as ``VERIFY``.

    Of the target's, ``base_s`` are its curve's at so many ``tokens`` (0: it was not timed).
    """

    tokens: int
    base_s: float
    parts: FloatArray

    def longer(self, seconds: float) -> Predicted:
        """Return the same with a longer verification."""
        parts = self.parts.copy()
        parts[VERIFY] += seconds
        return self._replace(parts=parts)


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What measured steps say of the tables: a factor by part, and the shape of the target's curve.

    ``factor`` float64[2 + drafts] has the places of ``VERIFY``. By octave of tokens: ``log_factor``
    float64[OCTAVES] is how far the target's curve is off beside its factor, ``seen`` the fading
    number of steps behind it; ``applied`` is the shape that is planned with (None: the table's),
    the same as it was ``age`` steps ago.
    """

    factor: FloatArray
    log_factor: FloatArray = field(default_factory=lambda: np.zeros(OCTAVES))
    seen: FloatArray = field(default_factory=lambda: np.zeros(OCTAVES))
    applied: FloatArray | None = None
    age: int = 0

    @classmethod
    def start(cls, drafts: int) -> Correction:
        """Return the correction before anything was measured."""
        return cls(np.ones(FIRST_DRAFT + drafts))

    def times(self, model: LatencyModel) -> Times:
        """Return the corrected seconds of a step's parts."""
        if self.applied is None:
            return Times(model, self.factor)
        return Times(model, self.factor, _shaped(model.target, self.applied.tobytes()))

    def learnt(
        self, predicted: Predicted, measured_s: FloatArray, step_s: float = 0.0
    ) -> Correction:
        """Return the correction after a step of ``step_s``, its parts float64[2 + drafts] measured.

        ``predicted`` is by the tables alone. A part that is 0 is not known. Where none is known,
        all share the surprise of the whole, which shows no shape. Else the two octaves about the
        target's tokens share what surprises there; what all octaves have in common, by evidence,
        becomes the target's factor.
        """
        if not measured_s.any():
            expected_s = self.factor * predicted.parts
            whole_s = float(expected_s.sum())
            measured_s = expected_s * (step_s / whole_s if whole_s > 0 else 0.0)
            return replace(self, factor=self._factors(predicted.parts, measured_s))
        measured, base_s = measured_s.item(VERIFY), predicted.base_s
        if not (predicted.tokens and base_s > 0 and measured > 0):
            return replace(self, factor=self._factors(predicted.parts, measured_s))
        place = min(math.log2(predicted.tokens), _LAST_PLACE)
        low = int(place)
        share = place - low
        log_factor, seen = self.log_factor.copy(), _FADING * self.seen
        shape = (1 - share) * log_factor.item(low) + share * log_factor.item(low + 1)
        shaped = predicted.longer(base_s * (math.exp(shape) - 1)).parts
        surprise = math.log(measured / (shaped.item(VERIFY) * self.factor.item(VERIFY)))
        surprise = min(max(surprise, -_MAX_SHAPE_SURPRISE), _MAX_SHAPE_SURPRISE)
        for octave, part in ((low, 1 - share), (low + 1, share)):
            rate = part * max(_RATE, 1 / (_SHAPE_PRIOR + seen.item(octave)))
            moved = log_factor.item(octave) + rate * surprise
            log_factor[octave] = min(max(moved, -MAX_SHAPE), MAX_SHAPE)
            seen[octave] += part
        factor = self._factors(shaped, measured_s)
        if self.age + 1 < _APPLY_STEPS:
            return Correction(factor, log_factor, seen, self.applied, self.age + 1)
        known = (seen >= _ENOUGH).nonzero()[0]
        if not len(known):
            return Correction(factor, log_factor, seen)
        common = float(seen[known] @ log_factor[known] / seen[known].sum())
        factor[VERIFY] = _bounded(factor.item(VERIFY) * math.exp(common))
        log_factor = np.interp(np.arange(OCTAVES), known, log_factor[known] - common)
        log_factor = log_factor.clip(-MAX_SHAPE, MAX_SHAPE)
        return Correction(factor, log_factor, seen, log_factor)

    def evidence(self, tokens: int) -> float:
        """Return the evidence of the target's time for so many tokens, in steps; inf where there is
        little of any.
        """
        if self.seen.sum() < _EARLY:
            return math.inf
        place = min(math.log2(max(tokens, 1)), _LAST_PLACE)
        return float(np.interp(place, np.arange(OCTAVES), self.seen))

    def _factors(self, predicted_s: FloatArray, measured_s: FloatArray) -> FloatArray:
        """Return the factors after a step: a slow geometric average of clipped surprises.

        A draft that was slow once and is not used since would be believed to be as slow for good:
        nothing else would try it again.
        """
        factors = self.factor.tolist()
        parts = zip(predicted_s.tolist(), measured_s.tolist(), strict=True)
        for part, (predicted, measured) in enumerate(parts):
            if predicted > 0 and measured > 0:
                surprise = measured / (predicted * factors[part])
                surprise = min(max(surprise, 1 / _MAX_SURPRISE), _MAX_SURPRISE)
                factors[part] = _bounded(factors[part] * surprise**_RATE)
            elif part >= FIRST_DRAFT and not predicted and factors[part] > _IDLE_FACTOR:
                factors[part] = max(factors[part] * _IDLE_KEEP, _IDLE_FACTOR)
        return np.array(factors)


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / MAX_CORRECTION), MAX_CORRECTION)


@lru_cache(maxsize=8)
def _shaped(curve: LatencyCurve, log_factor: bytes) -> LatencyCurve:
    """Return a curve with its base corrected, linearly between octaves; it never falls."""
    at = np.exp(np.frombuffer(log_factor))
    place = np.log2(np.maximum(np.arange(len(curve.base_s)), 1)).clip(max=_LAST_PLACE)
    factor = np.interp(place, np.arange(OCTAVES), at)
    base_s = np.maximum.accumulate(curve.base_s * factor)
    return replace(curve, base_s=base_s, slope_s=curve.slope_s * factor.item(-1))
