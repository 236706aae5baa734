"""From measured cells to an advice: a table of lengths or none, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend.advise import AdviceError
from backend.advise.acceptance import StepTokens
from backend.advise.goodput import (
    DRAWS,
    PLAIN,
    Goodput,
    Interval,
    LoadRange,
    flights_up_to,
    interval,
    length_at,
    lengths_by_load,
)
from backend.advise.load import Cell
from backend.advise.times import TERMS, StepLoad
from policy.plan import FloatArray

FAR = 0.10
"""The error of a cell that was left out from which on the model is not believed."""


@dataclass(frozen=True)
class HeldOut:
    """A measured cell against its prediction from the others."""

    length: int
    in_flight: int
    seconds: float
    """Predicted over measured seconds of a step."""
    tokens: float
    """Predicted over measured tokens a step."""

    @property
    def off(self) -> float:
        """The relative error of tokens a second."""
        return abs(self.tokens / self.seconds - 1)


@dataclass(frozen=True)
class TableRow:
    """The advice at one number in flight."""

    in_flight: int
    length: int
    tokens_per_s: float
    over_now: Interval
    over_none: Interval


@dataclass
class Advice:
    """An advice. ``now`` is the length that the server has today; ``over_none`` compares with the
    plain server, or with length 0 if none was measured.
    """

    table: list[LoadRange]
    speculate: bool
    now: int
    rows: list[TableRow]
    goodput: Goodput
    cells: Sequence[Cell]
    acceptance: StepTokens
    held_out: HeldOut | None
    has_plain: bool
    speed: dict[int, FloatArray]
    """By length, tokens a second at ``flights`` [flights]."""
    bands: dict[int, tuple[FloatArray, FloatArray]]
    """By length, the least and the most of it that are likely [flights]."""
    flights: list[int]
    table_if_speculating: list[LoadRange]
    """The table with a draft, also where none is advised."""
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The finding over the setting of today, all loads together."""
        verdicts = {row.over_now.verdict for row in self.rows}
        if verdicts == {"no difference shown"}:
            return "no difference shown"
        return "faster" if "slower" not in verdicts and "faster" in verdicts else "mixed"

    @property
    def best_fixed(self) -> int:
        """The best single length over the loads."""
        return max(
            (length for length in self.speed if length > 0),
            key=lambda length: float(np.log(self.speed[length]).mean()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as JSON-able data."""
        survival, fired = self.acceptance.survival()
        times = self.goodput.times
        return {
            "speculate": self.speculate,
            "table": [[*one] for one in self.table],
            "verdict": self.verdict,
            "now": self.now,
            "intervals": [
                {
                    "in_flight": row.in_flight,
                    "length": row.length,
                    "tokens_per_s": round(row.tokens_per_s, 3),
                    "over_now": _as_json(row.over_now),
                    "over_none": _as_json(row.over_none),
                }
                for row in self.rows
            ],
            "held_out": self.held_out
            and {
                "length": self.held_out.length,
                "in_flight": self.held_out.in_flight,
                "predicted_over_measured_seconds": round(self.held_out.seconds, 4),
                "predicted_over_measured_tokens": round(self.held_out.tokens, 4),
            },
            "fit": {
                "seconds": dict(zip(TERMS, times.coefficient.tolist(), strict=False)),
                "bends": {
                    str(knot): float(seconds)
                    for knot, seconds in zip(
                        times.knots, times.coefficient[len(TERMS) :], strict=True
                    )
                },
                "noise": round(times.noise, 4),
                "prompt_tokens": round(self.goodput.prompt_tokens, 2),
                "output_tokens": round(self.goodput.output_tokens, 2),
                "survival": [round(share, 5) for share in survival],
                "fired": round(fired, 5),
                "tokens_a_step": [round(one.emitted, 4) for one in self.goodput.expected],
                "ordered": self.acceptance.ordered,
            },
            "speeds": {
                "in_flight": self.flights,
                **{_name(k): np.round(v, 3).tolist() for k, v in sorted(self.speed.items())},
            },
            "cells": [_describe(cell) for cell in self.cells],
            "notes": self.notes,
        }


def _name(length: int) -> str:
    return "plain" if length == PLAIN else str(length)


def _as_json(one: Interval) -> dict[str, Any]:
    ratio, low, high = (round(value, 4) for value in one)
    return {"ratio": ratio, "low": low, "high": high, "verdict": one.verdict}


def _describe(cell: Cell) -> dict[str, Any]:
    steps = cell.steps
    return {
        "length": cell.length,
        "plain": not cell.loaded,
        "in_flight": cell.in_flight,
        "block": cell.block,
        "requests": len(cell.replies),
        "steps": round(steps, 1),
        "rows": round(cell.row_steps / steps, 3),
        "drafted": round(cell.window["drafted"] / steps, 3),
        "prompt_tokens": round(cell.prompt_tokens / steps, 3),
        "emitted": round(cell.emitted, 4),
        "step_s": round(cell.seconds(), 7),
        "step_cpu_s": round(cell.seconds(by_cpu=True), 7),
    }


def hold_out(cells: Sequence[Cell], *, by_cpu: bool = False) -> HeldOut | None:
    """Predict a cell in the middle from the others: None if there are too few."""
    loads = sorted({cell.in_flight for cell in cells if cell.loaded})
    lengths = sorted({cell.length for cell in cells if cell.loaded and cell.length})
    if len(loads) < 3 or len(lengths) < 2:
        return None
    return predict(cells, lengths[(len(lengths) - 1) // 2], loads[len(loads) // 2], by_cpu=by_cpu)


def predict(cells: Sequence[Cell], length: int, in_flight: int, *, by_cpu: bool = False) -> HeldOut:
    """Compare a cell with its prediction from all others."""
    out = [
        cell
        for cell in cells
        if cell.loaded and (cell.length, cell.in_flight) == (length, in_flight)
    ]
    goodput = Goodput.fit([cell for cell in cells if cell not in out], by_cpu=by_cpu)
    seconds = goodput.times.seconds(StepLoad.of(out))
    steps = sum(cell.row_steps for cell in out)
    emitted = sum(cell.emitted * cell.row_steps for cell in out) / steps
    measured = np.array([cell.seconds(by_cpu=by_cpu) for cell in out])
    ratio = float(np.exp(np.log(seconds / measured).mean()))
    return HeldOut(length, in_flight, ratio, goodput.expected[length].emitted / emitted)


def advise(
    cells: Sequence[Cell],
    now: int,
    *,
    by_cpu: bool = False,
    heeds_tables: bool = True,
) -> Advice:
    """Fit cells and choose. Raises AdviceError for too few."""
    if len({cell.in_flight for cell in cells}) < 2:
        raise AdviceError("advice needs at least two loads")
    has_plain = any(not cell.loaded for cell in cells)
    acceptance = StepTokens(cells)
    goodput = Goodput.fit(cells, by_cpu=by_cpu, acceptance=acceptance)
    flights = flights_up_to(max(cell.in_flight for cell in cells))
    knows_zero = any(cell.loaded and not cell.length for cell in cells)
    lengths = [*range(0 if knows_zero or has_plain else 1, acceptance.longest + 1)]
    arms = [PLAIN, *lengths] if has_plain else lengths
    speed = {arm: goodput.tokens_per_s(arm, flights) for arm in arms}
    rng = np.random.default_rng(0)
    draws = [
        Goodput.fit(cells, by_cpu=by_cpu, rng=rng, acceptance=acceptance) for _ in range(DRAWS)
    ]
    terms = int((goodput.times.coefficient > 0).sum())
    wide = float(np.sqrt(len(cells) / max(len(cells) - terms, 1)))  # few cells for the terms
    samples = {}
    for arm in arms:
        ratios = np.array([one.tokens_per_s(arm, flights) for one in draws]) / speed[arm]
        samples[arm] = speed[arm] * ratios**wide
    choices = {k: speed[k] for k in lengths}
    table = lengths_by_load(choices, flights.tolist())
    if not heeds_tables:
        best = max((k for k in lengths if k), key=lambda k: float(np.log(speed[k]).mean()))
        table = [LoadRange(1, int(flights[-1]), best)]
    now = min(max(now, 0), acceptance.longest)
    loads = [n for n in sorted({cell.in_flight for cell in cells}) if n <= flights[-1]]
    none = PLAIN if has_plain else 0
    rows = _rows(table, loads, flights, now, none, speed, samples)
    speculate = any(one.length > 0 for one in table) and _pays(rows, table, none, flights, speed)
    with_draft = table
    if not speculate:
        table = [LoadRange(1, int(flights[-1]), 0)]
        rows = _rows(table, loads, flights, now, none, speed, samples, plain=True)
    tail = [0.05, 0.95]
    bands = {arm: tuple(np.quantile(values, tail, 0)) for arm, values in samples.items()}
    return Advice(
        table,
        speculate,
        now,
        rows,
        goodput,
        cells,
        acceptance,
        hold_out(cells, by_cpu=by_cpu),
        has_plain,
        speed,
        bands,
        flights.tolist(),
        with_draft,
    )


def _rows(
    table: list[LoadRange],
    loads: list[int],
    flights: Any,  # int64[flights]
    now: int,
    none: int,
    speed: dict[int, FloatArray],  # [flights] by length
    samples: dict[int, FloatArray],  # [draws, flights] by length
    *,
    plain: bool = False,
) -> list[TableRow]:
    def over(other: int, arm: int, at: int) -> Interval:
        if other not in speed:
            return Interval(1.0, 0.0, np.inf)
        ratio = float(speed[arm][at] / speed[other][at])
        return interval(samples[arm][:, at] / samples[other][:, at], ratio)

    rows = []
    for n in loads:
        at = int(np.searchsorted(flights, n))
        length = length_at(table, n)
        arm = none if plain else length
        ratios = over(now, arm, at), over(none, arm, at)
        rows.append(TableRow(n, length, float(speed[arm][at]), *ratios))
    return rows


def _pays(
    rows: list[TableRow],
    table: list[LoadRange],
    none: int,
    flights: Any,  # int64[flights]
    speed: dict[int, FloatArray],  # [flights] by length
) -> bool:
    """Return whether the table is worth a draft: faster than none at some load for sure, and over
    all loads together, each octave of them counting alike.
    """
    if none not in speed:
        return True
    if not any(row.over_none.verdict == "faster" for row in rows):
        return False
    advised_speed = np.array([speed[length_at(table, n)][at] for at, n in enumerate(flights)])
    gains, octaves = np.log(advised_speed / speed[none]), 1 / np.asarray(flights, float)
    return float(np.average(gains, weights=octaves)) > 0
