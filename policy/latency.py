"""How long a step takes: measured tables, monotone curves fitted to them, and what steps teach.

With P prefill tokens, B rows, k_i proposed tokens, K_d the longest chain of draft d's group and
n_dj its rows at depth j, a step takes, in seconds,

    T = T_verify(P + B + sum k_i, context, context of the proposed)
        + sum_d [ sum_{j<=K_d} t_d(n_dj) + catchup_d ] + T_overhead

A ``LatencyTable`` is a file, measured on the machine that serves; T_overhead is measured while
serving. A ``LatencyModel`` holds the curves fitted to the tables, a ``Correction`` what measured
steps say of them, and ``Times`` is both together: what planning asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from .loops import times as loops
from .loops.times import FIRST_DRAFT, LAST_PLACE, OCTAVES, Times
from .plan import BoolArray, FloatArray, IntArray

SCHEMA = 2
MAX_GRID_TOKENS = 1 << 16


class LatencyError(ValueError):
    """A table that is missing or cannot be used; the message names the field and the value."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The place where a table was measured: enough to tell whether it is valid here. ``date`` is
    ISO 8601.
    """

    machine: str
    device: str
    model: str
    model_hash: str
    dtype: str
    threads: int
    date: str
    torch_version: str
    busy: bool = False
    """Whether other programs took a part of the processor meanwhile."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), _KINDS.get(item.name, str)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise LatencyError(
                    f"provenance.{item.name} must be of type {kind.__name__}, got {value!r}"
                )


_KINDS = {"threads": int, "busy": bool}


SYNTHETIC = Provenance("none", "none", "none", "none", "none", 0, "1970-01-01", "none")
"""The provenance of tables that were made up, not measured."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Measured forwards of one engine, cell by cell.

    A target is measured in verification, a draft in steps (``tokens == rows``) and catch-up. Raises
    LatencyError on malformed values.
    """

    engine: str
    rows: tuple[int, ...]
    """Sequences in a forward."""
    tokens: tuple[int, ...]
    """Query tokens of all of them."""
    context_tokens: tuple[int, ...]
    """Cached tokens of all of them."""
    seconds: tuple[float, ...]
    """Median time of a forward."""
    provenance: Provenance = SYNTHETIC
    node_context_tokens: tuple[int, ...] = ()
    """Summed over proposed tokens, the tokens that they follow; empty: none."""
    widths: tuple[int, ...] = ()
    """Counts of tokens that passes are padded to, as with CUDA graphs, rising; empty: to none."""

    def __post_init__(self) -> None:
        if list(self.widths) != sorted({*self.widths}) or any(w < 1 for w in self.widths):
            raise LatencyError(f"widths must be rising and positive, got {list(self.widths)}")
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

    def width_of(self, tokens: IntArray) -> IntArray:
        """Return the width at which passes of these counts, [cells] or of any shape, run; beyond
        the widest, the count.
        """
        if not self.widths:
            return tokens
        place = np.searchsorted(self.widths, tokens).clip(max=len(self.widths) - 1)
        return np.maximum(np.array(self.widths)[place], tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able data, the inverse of ``from_dict``."""
        columns = {name: list(getattr(self, name)) for name, *_ in _COLUMNS}
        provenance = asdict(self.provenance)
        return {
            "schema": SCHEMA,
            "engine": self.engine,
            "provenance": provenance,
            "widths": list(self.widths),
            **columns,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyTable:
        """Rebuild a table. Raises LatencyError naming the field that is missing or wrong."""
        if data.get("schema") != SCHEMA:
            raise LatencyError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
        names = {"schema", *(item.name for item in fields(cls))}
        data = {"widths": (), **data}  # tables of before 0.3 have none
        _check_keys("table", data, names)
        provenance = data["provenance"]
        if not isinstance(provenance, Mapping):
            raise LatencyError(f"provenance must be an object, got {provenance!r}")
        provenance = {"busy": False, **provenance}  # tables of before 0.4 do not say it
        _check_keys("provenance", provenance, {item.name for item in fields(Provenance)})
        columns = {name: data[name] for name, *_ in _COLUMNS}
        for name, column in columns.items():
            if not isinstance(column, (list, tuple)):
                raise LatencyError(f"{name} must be a list, got {column!r}")
            columns[name] = tuple(column)
        source = Provenance(**provenance)
        return cls(data["engine"], **columns, provenance=source, widths=tuple(data["widths"]))


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

    base_s: FloatArray  # [t]
    slope_s: float
    row_s: float = 0.0
    context_s: float = 0.0
    node_context_s: float = 0.0

    @classmethod
    def fit(cls, table: LatencyTable) -> LatencyCurve:
        """Fit a table by non-negative least squares of the relative error.

        A base that never falls is a sum of steps >= 0 at the measured counts, so that isotonic
        regression and the coefficients are one problem. Between counts the base is linear. A term
        that never varies at equal tokens cannot be separated from the base: it is 0. With widths a
        cell counts at the width it ran at, and any other count takes what its own width does.
        """
        tokens, seconds = table.width_of(np.array(table.tokens)), np.array(table.seconds)
        knots = np.unique(tokens)
        columns = [(tokens[:, None] >= knots).astype(float)]
        for values in (table.rows, table.context_tokens, table.node_context_tokens):
            term = np.array(values, float)
            varies = any(np.ptp(term[tokens == count]) > 0 for count in knots)
            columns.append((term * varies)[:, None])
        matrix = np.hstack(columns) / seconds[:, None]
        solution = nonnegative_least_squares(matrix, np.ones(len(seconds)))
        counts = table.width_of(np.arange(knots[-1] + 1))
        base = np.interp(counts, knots, np.cumsum(solution[:-3]))
        last = len(base) - 1
        start = max(last // 2, int(knots[0]))  # the chord over the last octave averages stairs
        slope = float(base[last] - base[start]) / (last - start) if last > start else 0.0
        return cls(base, slope, *solution[-3:].tolist())

    def base(self, tokens: IntArray) -> FloatArray:
        """Return base seconds of token counts >= 0, [n] or of any shape."""
        last = len(self.base_s) - 1
        beyond = np.maximum(tokens - last, 0)
        seconds: FloatArray = self.base_s[np.minimum(tokens, last)] + self.slope_s * beyond
        return seconds

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


def nonnegative_least_squares(
    matrix: FloatArray,  # [cells, columns]
    target: FloatArray,  # [cells]
) -> FloatArray:
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


def _solve_free(
    unit: FloatArray,  # [cells, columns]
    target: FloatArray,  # [cells]
    x: FloatArray,  # [columns]
    free: BoolArray,  # [columns]
) -> FloatArray:
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
    """Step times by the tables: the curves of target and drafts, and the rest of it."""

    target: LatencyCurve
    drafts: tuple[LatencyCurve, ...]
    overhead_s: float = 0.0
    """Every step, besides forwards."""
    speculation_s: float = 0.0
    """A step that speculates, in addition."""
    tables: Times = field(init=False, repr=False)
    """The same, as the loops take it, uncorrected."""

    def __post_init__(self) -> None:
        curves, drafts = self.drafts, len(self.drafts)
        tokens = np.arange(max((len(curve.base_s) for curve in curves), default=1))
        draft_s = np.array([curve.base(tokens) for curve in curves], np.float64)
        target_s, target_slope_s = _target(self.target, None)
        tables = Times(
            target_s=target_s,
            target_slope_s=target_slope_s,
            row_s=float(self.target.row_s),
            context_s=float(self.target.context_s),
            node_context_s=float(self.target.node_context_s),
            draft_s=draft_s.reshape(drafts, len(tokens)),
            draft_slope_s=np.array([curve.slope_s for curve in curves], np.float64),
            draft_row_s=np.array([curve.row_s for curve in curves], np.float64),
            draft_context_s=np.array([curve.context_s for curve in curves], np.float64),
            overhead_s=float(self.overhead_s),
            speculation_s=float(self.speculation_s),
            factor=np.ones(FIRST_DRAFT + drafts),
            change_s=-1.0,
            verifying=1.0,
        )
        object.__setattr__(self, "tables", tables)

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


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Corrections of the tables by measured steps: a factor by part, the target's shape, and the
    overhead, which no table has.
    """

    factor: FloatArray
    """[2 + drafts] measured over predicted time, places as ``VERIFY``; the overhead's is 1."""
    log_factor: FloatArray = field(default_factory=lambda: np.zeros(OCTAVES))
    """[OCTAVES] how far the target's curve is off, its factor apart, by octave of tokens."""
    octave_steps: FloatArray = field(default_factory=lambda: np.zeros(OCTAVES))
    """[OCTAVES] the fading number of steps that say so."""
    applied: FloatArray | None = None
    """[OCTAVES] the shape that is planned with (None: the table's)."""
    age: int = 0
    """Steps since it changed."""
    overhead_s: FloatArray = field(default_factory=lambda: np.zeros(2))
    """[2] seconds of a step besides forwards, of plain steps and of those that speculate; 0:
    unknown, and the model's are taken.
    """
    change: FloatArray = field(default_factory=lambda: np.zeros(2))
    """[2] seconds of a change of width, and the steps that showed it; 0 steps: unknown, and what
    the engine measured at its start is taken.
    """
    verifying: FloatArray = field(default_factory=lambda: np.zeros(2))
    """[2] logarithm of how much longer the decoding tokens of a pass take that verifies some, and
    the fading number of steps that say so.
    """

    @classmethod
    def start(cls, drafts: int) -> Correction:
        """Return the correction before anything was measured."""
        return cls(np.ones(FIRST_DRAFT + drafts))

    def times(self, model: LatencyModel) -> Times:
        """Return the corrected seconds of a step's parts."""
        applied, (_, _, *tables) = self.applied, model.tables
        target = _target(model.target, None if applied is None else applied.tobytes())
        plain_s, speculating_s = self.overhead_s.tolist()
        overhead_s = plain_s or model.overhead_s
        more_s = model.speculation_s
        if plain_s and speculating_s:
            more_s = max(speculating_s - plain_s, 0.0)
        change_s, changes = self.change.tolist()
        change_s = change_s if changes else -1.0
        rest = overhead_s, more_s, self.factor, change_s, math.exp(self.verifying[0])
        return Times._make((*target, *tables[:-5], *rest))

    def learnt(self, learn: Callable[..., int]) -> Correction:
        """Return the correction after a step: ``learn`` gets factor, shape, evidence, overhead,
        change of width and of verifying, which it changes in place, and the age, and returns that
        (``policy.loops.times.learn_step``).
        """
        columns = self.factor, self.log_factor, self.octave_steps, self.overhead_s, self.change
        factor, log_factor, octave_steps, *rest = (
            column.copy() for column in (*columns, self.verifying)
        )
        age = learn(factor, log_factor, octave_steps, *rest, self.age)
        applied = self.applied
        if age < 0 or (age == 0 and self.age > 0):
            applied, age = (log_factor if age == 0 else None), 0
        return Correction(factor, log_factor, octave_steps, applied, age, *rest)


@lru_cache(maxsize=8)
def _target(curve: LatencyCurve, shape: bytes | None) -> tuple[FloatArray, float]:
    """Return a curve's seconds by tokens and beyond, corrected by a shape."""
    base_s = np.ascontiguousarray(curve.base_s, np.float64)
    if shape is None:
        return base_s, float(curve.slope_s)
    shaped_s, log_factor = np.empty(len(base_s)), np.frombuffer(shape).copy()
    factor = loops.shape_curve(base_s, _places(len(base_s)), log_factor, shaped_s)
    return shaped_s, float(curve.slope_s * factor)


@lru_cache(maxsize=8)
def _places(count: int) -> FloatArray:
    """Return the octaves of 0 .. count - 1 tokens."""
    octaves: FloatArray = np.log2(np.maximum(np.arange(count), 1)).clip(max=LAST_PLACE)
    return octaves
