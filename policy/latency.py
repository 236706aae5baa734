"""How long a step takes: tables measured per engine, the monotone curves fitted to them, and their correction by what is measured.

The model of a step (seconds), with P prefill tokens, B rows, k_i proposed tokens, K_d the longest chain of draft d's group and n_dj its
rows at depth j:

    T = T_verify(P + B + sum k_i, context) + sum_d [ sum_{j<=K_d} t_d(n_dj) + catchup_d ] + T_overhead

A table is a file (``LatencyTable.to_dict``), written by the build tools on the machine that serves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from .nonnegative import nonnegative_least_squares
from .plan import FloatArray, IntArray

SCHEMA = 1
MAX_GRID_TOKENS = 1 << 16
VERIFY, OVERHEAD, FIRST_DRAFT = 0, 1, 2
"""Places in a correction array: the target, the overhead, then the drafts in order."""


class LatencyError(ValueError):
    """A latency table that is missing or cannot be used; the message names the field and the value."""


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
                raise LatencyError(f"provenance.{item.name} must be of type {kind.__name__}, got {value!r}")


SYNTHETIC = Provenance("none", "none", "none", "none", "none", 0, "1970-01-01", "none")
"""The provenance of tables that were made up, not measured."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Measured forwards of one engine, cell by cell: ``seconds[c]`` (a median) is the time of a forward of ``tokens[c]`` query tokens in
    all, spread over ``rows[c]`` sequences that hold ``context_tokens[c]`` cached tokens in all. Each is that of a turn of its own, of which
    ``turn_s`` are spent once however many forwards it has (queueing, what is computed again; 0 where turns are forwards).

    For a target measure verification: ``tokens`` over 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, ... up to a prefill chunk
    with a full batch. For a draft measure its steps (``tokens == rows``) and its catch-up (one row, many tokens). A row or context term
    is fitted only where cells of equal ``tokens`` differ in rows or context. Raises LatencyError on malformed values.
    """

    engine: str
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    provenance: Provenance = SYNTHETIC
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str) or not self.engine:
            raise LatencyError(f"engine must be a name, got {self.engine!r}")
        if not self.tokens:
            raise LatencyError(f"tokens of engine {self.engine!r} must have at least one cell, got none")
        if isinstance(self.turn_s, bool) or not isinstance(self.turn_s, (int, float)) or not 0 <= self.turn_s < float("inf"):
            raise LatencyError(f"turn_s of engine {self.engine!r} must be a finite number >= 0, got {self.turn_s!r}")
        for name, low, high in (("rows", 1, MAX_GRID_TOKENS), ("tokens", 1, MAX_GRID_TOKENS), ("context_tokens", 0, 1 << 40)):
            self._check_column(name, low, high)
        for c, value in enumerate(self.seconds):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise LatencyError(f"seconds[{c}] of engine {self.engine!r} must be a finite number > 0, got {value!r}")
        if len(self.seconds) != len(self.tokens):
            raise LatencyError(f"seconds of engine {self.engine!r} must have {len(self.tokens)} cells like tokens, got {len(self.seconds)}")
        for c, (rows, tokens) in enumerate(zip(self.rows, self.tokens, strict=True)):
            if rows > tokens:
                raise LatencyError(f"rows[{c}] of engine {self.engine!r} must be at most its tokens {tokens}, got {rows}")

    def _check_column(self, name: str, low: int, high: int) -> None:
        column = getattr(self, name)
        if len(column) != len(self.tokens):
            raise LatencyError(f"{name} of engine {self.engine!r} must have {len(self.tokens)} cells like tokens, got {len(column)}")
        for c, value in enumerate(column):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise LatencyError(f"{name}[{c}] of engine {self.engine!r} must be an integer in {low}..{high}, got {value!r}")

    @classmethod
    def synthetic(cls, engine: str, seconds: Mapping[int, float]) -> LatencyTable:
        """Return a table made up from total query tokens -> seconds, for tests, simulations and engines whose cost is known."""
        tokens = tuple(sorted(seconds))
        return cls(engine, (1,) * len(tokens), tokens, (0,) * len(tokens), tuple(seconds[t] for t in tokens))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able data, the inverse of ``from_dict``."""
        columns = {name: list(getattr(self, name)) for name in _COLUMNS}
        turn = {"turn_s": self.turn_s} if self.turn_s else {}
        return {"schema": SCHEMA, "engine": self.engine, "provenance": asdict(self.provenance), **columns, **turn}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyTable:
        """Rebuild a table. Raises LatencyError naming the missing, unknown or malformed field and its value."""
        if data.get("schema") != SCHEMA:
            raise LatencyError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
        _check_keys("table", {"turn_s": 0.0, **data}, {"schema", "engine", "provenance", "turn_s", *_COLUMNS})
        provenance = data["provenance"]
        if not isinstance(provenance, Mapping):
            raise LatencyError(f"provenance must be an object, got {provenance!r}")
        _check_keys("provenance", provenance, {item.name for item in fields(Provenance)})
        for name in _COLUMNS:
            if not isinstance(data[name], (list, tuple)):
                raise LatencyError(f"{name} must be a list, got {data[name]!r}")
        columns = {name: tuple(data[name]) for name in _COLUMNS}
        return cls(data["engine"], **columns, provenance=Provenance(**provenance), turn_s=data.get("turn_s", 0.0))


_COLUMNS = ("rows", "tokens", "context_tokens", "seconds")


def _check_keys(where: str, data: Mapping[str, Any], expected: set[str]) -> None:
    if missing := sorted(expected - set(data)):
        raise LatencyError(f"{where} lacks the field {missing[0]!r}")
    if unknown := sorted(set(data) - expected):
        raise LatencyError(f"{where} has the unknown field {unknown[0]!r}: {data[unknown[0]]!r}")


@dataclass(frozen=True, slots=True, eq=False)
class LatencyCurve:
    """Seconds of a forward = base(tokens) + row_s * rows + context_s * cached tokens; never negative, never falling in any of them.

    ``base_s[t]`` is dense over 0..largest measured tokens (base_s[0] = base_s[smallest measured]); beyond it the line ``slope_s`` goes on.
    """

    base_s: FloatArray
    slope_s: float
    row_s: float = 0.0
    context_s: float = 0.0

    @classmethod
    def fit(cls, table: LatencyTable) -> LatencyCurve:
        """Fit a table by non-negative least squares of the relative error.

        A non-decreasing base is a sum of non-negative steps at the measured token counts, so isotonic clean-up of noisy cells and the
        two coefficients (reading one more row, one more token of KV: memory traffic, hence linear) are one problem with one optimum.
        Between measured counts the base is linear; staircases survive where both their edges were measured.
        """
        tokens, seconds = np.array(table.tokens), np.array(table.seconds)
        knots = np.unique(tokens)
        columns = [(tokens[:, None] >= knots).astype(float)]
        terms = [np.array(term, float) for term in (table.rows, table.context_tokens)]
        columns += [(term if _varies(term, tokens) else np.zeros_like(term))[:, None] for term in terms]
        solution = nonnegative_least_squares(np.hstack(columns) / seconds[:, None], np.ones(len(seconds)))
        heights = np.cumsum(solution[:-2])
        base = np.interp(np.arange(knots[-1] + 1), knots, heights)
        return cls(base, _tail_slope(base, int(knots[0])), float(solution[-2]), float(solution[-1]))

    def base(self, tokens: IntArray) -> FloatArray:
        """Return base seconds for any shape of token counts >= 0."""
        last = len(self.base_s) - 1
        seconds: FloatArray = self.base_s[np.minimum(tokens, last)] + self.slope_s * np.maximum(tokens - last, 0)
        return seconds

    def run(self, first: int, count: int) -> FloatArray:
        """Return base seconds for ``count`` consecutive token counts from ``first`` on."""
        last = first + count
        return self.base_s[first:last] if last <= len(self.base_s) else self.base(np.arange(first, last))

    def at(self, tokens: int) -> float:
        """Return base seconds for one count."""
        beyond = tokens - len(self.base_s) + 1
        return self.base_s.item(tokens) if beyond <= 0 else self.base_s.item(-1) + self.slope_s * beyond

    def seconds(self, tokens: int, rows: int = 1, context_tokens: int = 0) -> float:
        """Return the seconds of one forward."""
        return self.at(tokens) + self.row_s * rows + self.context_s * context_tokens


def _varies(term: FloatArray, tokens: IntArray) -> bool:
    """Return whether cells of equal token count differ in ``term``, without which its coefficient cannot be told from the base."""
    return any(np.ptp(term[tokens == count]) > 0 for count in np.unique(tokens))


def _tail_slope(base: FloatArray, first: int) -> float:
    """Return the slope beyond the grid: the chord over its last octave, which averages stairs and is flat only where all of it is."""
    last = len(base) - 1
    start = max(last // 2, first)
    return float(base[last] - base[start]) / (last - start) if last > start else 0.0


class CurveStack:
    """Several curves side by side, for one look-up instead of one by curve: ``row_s``, ``context_s`` float64[curves] and base seconds."""

    def __init__(self, curves: tuple[LatencyCurve, ...]) -> None:
        self._last = max((len(curve.base_s) for curve in curves), default=1) - 1
        self._base_s = np.array([curve.base(np.arange(self._last + 1)) for curve in curves]).reshape(len(curves), self._last + 1)
        self._slope_s = np.array([curve.slope_s for curve in curves])[:, None]
        self._beyond_s = self._base_s - self._base_s.take(np.minimum(np.arange(self._last + 1), 2), 1, mode="clip")
        self._start = (self._last + 1) * np.arange(len(curves))[:, None]
        self.row_s = np.array([curve.row_s for curve in curves])
        self.context_s = np.array([curve.context_s for curve in curves])

    def base(self, tokens: IntArray) -> FloatArray:
        """Return base seconds for token counts int64[curves, n]."""
        if not tokens.size or tokens.item(tokens.argmax()) <= self._last:
            return self._of(self._base_s, tokens)
        seconds = self._of(self._base_s, np.minimum(tokens, self._last))
        seconds += self._slope_s * np.maximum(tokens - self._last, 0)
        return seconds

    def beyond_two(self, tokens: IntArray) -> FloatArray:
        """Return by how much base seconds for token counts int64[curves, n] >= 1 exceed those for two, or for one if that is the count."""
        if not tokens.size or tokens.item(tokens.argmax()) <= self._last:
            return self._of(self._beyond_s, tokens)
        return self.base(tokens) - self.base(np.minimum(tokens, 2))

    def _of(self, table: FloatArray, tokens: IntArray) -> FloatArray:
        entries: FloatArray = table.take(tokens + self._start)
        return entries

    def run(self, count: int) -> FloatArray:
        """Return base seconds for 0 .. count - 1 tokens, float64[curves, count]."""
        return self._base_s[:, :count] if count <= self._last + 1 else self.base(np.arange(count)[None])


@dataclass(frozen=True, slots=True, eq=False)
class LatencyModel:
    """The target's and the drafts' curves; ``overhead_s`` is spent in every step, ``speculation_s`` more in one that speculates.

    ``turn_s``, in the target's curve, is what a turn takes beside its forwards, once however many tokens it runs.
    """

    target: LatencyCurve
    drafts: tuple[LatencyCurve, ...]
    overhead_s: float = 0.0
    speculation_s: float = 0.0
    turn_s: float = 0.0
    stack: CurveStack = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", CurveStack(self.drafts))

    @classmethod
    def from_tables(
        cls,
        target: LatencyTable | None,
        drafts: Mapping[str, LatencyTable | None],
        overhead_s: float = 0.0,
        speculation_s: float = 0.0,
    ) -> LatencyModel:
        """Fit the tables, drafts in the order of the mapping. Raises LatencyError naming the engines that have no table."""
        missing = [name for name, table in {"target": target, **drafts}.items() if table is None]
        if target is None or missing:
            raise LatencyError(f"no latency table for {', '.join(missing)}: measure it on this machine first")
        for name, value in (("overhead_s", overhead_s), ("speculation_s", speculation_s)):
            if not 0 <= value < float("inf"):
                raise LatencyError(f"{name} must be a finite number >= 0, got {value!r}")
        curves = tuple(LatencyCurve.fit(table) for table in drafts.values() if table is not None)
        return cls(LatencyCurve.fit(target), curves, overhead_s, speculation_s, target.turn_s)

    @classmethod
    def unit(cls, drafts: int, draft_s: float = 0.1, step_s: float = 1.0) -> LatencyModel:
        """Return a made-up model: any verification takes ``step_s``, any draft forward ``draft_s``. For tests and the fake engine."""
        return cls(LatencyCurve(np.full(2, step_s), 0.0), (LatencyCurve(np.full(2, draft_s), 0.0),) * drafts)

    def with_target(self, target: LatencyCurve) -> LatencyModel:
        """Return the model with another curve for the target."""
        model = copy.copy(self)  # not ``replace``, which would stack the drafts' curves again
        object.__setattr__(model, "target", target)
        return model

    def start(self) -> FloatArray:
        """Return the correction before anything was measured: all ones, float64[2 + drafts]."""
        return np.ones(FIRST_DRAFT + len(self.drafts))
