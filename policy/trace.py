"""What a planner saw and decided as JSON lines, from which ``policy.replay`` makes the same plans again, bit for bit.

The first line holds the planner (drafts, constants, tables) and its state; each other one a view with its plan, an outcome, or a view that
someone else planned for. Where random numbers decide (Thompson's selection) their generator's state stands beside the view. Floating-point
numbers survive JSON as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from .acceptance import AcceptanceConfig, AcceptanceState
from .calibration import Calibration
from .correction import Shape
from .latency import LatencyCurve, LatencyModel
from .plan import Drafted, IntArray, Outcome, Plan, Policy, Ran, TurnShape, View
from .planner import AdaptivePlanner
from .planner_state import PlannerConfig, PlannerState
from .promise import Promise
from .selection import THOMPSON, Draws
from .shaped import ShapedPlanner
from .shapes import Shapes

SCHEMA = 5
_KINDS = {"i": np.int64, "f": np.float64, "b": np.bool_}
_PLANS = (View, Plan, TurnShape, Outcome, Ran)
_STATES = (PlannerState, AcceptanceState, Calibration, Draws, Promise, Shape)
_RECORDS = (*_PLANS, *_STATES)
_CLASSES = {cls.__name__: cls for cls in _RECORDS}


class TraceError(ValueError):
    """A trace that cannot be replayed; the message says where and why."""


class Traced(Policy):
    """A planner that hands each line of its trace to ``emit``, the first with its next step; none after ``most_lines``."""

    def __init__(self, planner: AdaptivePlanner, emit: Callable[[str], None], most_lines: int) -> None:
        self.planner = planner
        self._emit, self._left, self._begun = emit, most_lines, False

    def start(self) -> PlannerState:
        """Return the planner's."""
        return self.planner.start()

    def plan(self, view: View, state: PlannerState, now: float, rng: np.random.Generator) -> tuple[Plan, PlannerState]:
        """Plan, and trace it."""
        drawn = {"rng": rng.bit_generator.state} if self.planner.config.selection == THOMPSON else {}
        plan, after = self.planner.plan(view, state, now, rng)
        self._trace(state, plan={"view": view, "now": now, "plan": plan, **drawn})
        return plan, after

    def needs_offers(self, request: IntArray, state: PlannerState) -> bool:
        """Return the planner's."""
        return self.planner.needs_offers(request, state)

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: PlannerState) -> IntArray:
        """Return the planner's."""
        return self.planner.trim(view, plan, drafted, state)

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn, and trace it."""
        self._trace(state, observe={"outcome": outcome, "now": now})
        return self.planner.observe(outcome, state, now)

    def stand_by(self, view: View, state: PlannerState) -> PlannerState:
        """Stand by, and trace it."""
        self._trace(state, stand_by={"view": view})
        return self.planner.stand_by(view, state)

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return the planner's."""
        return self.planner.save(state, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> PlannerState:
        """Return the planner's; a trace begins with the state that it then has."""
        return self.planner.load(data, now, idle_s)

    def drift(self, state: PlannerState) -> dict[str, float]:
        """Return the planner's."""
        return self.planner.drift(state)

    def _trace(self, state: PlannerState, **event: Any) -> None:
        if not self._begun:
            self._begun = True
            self._line({"planner": _planner_data(self.planner), "state": encoded(state)})
        self._line(encoded(event))

    def _line(self, data: Any) -> None:
        if self._left > 0:
            self._left -= 1
            self._emit(json.dumps(data, separators=(",", ":")))


class Replanned(NamedTuple):
    """A recorded plan and the one that the planner makes now, with all that it was made from."""

    recorded: Plan
    plan: Plan
    planner: AdaptivePlanner
    view: View
    state: PlannerState
    now: float


def replayed(lines: Iterable[str]) -> Iterator[Replanned]:
    """Yield every recorded plan with the one that the planner makes now. Raises TraceError for lines that are no trace."""
    planner: AdaptivePlanner | None = None
    state: Any = None
    for number, line in enumerate(lines, 1):
        replanned: Replanned | None = None
        try:
            data = json.loads(line)
            if planner is None:
                planner, state = _planner(data["planner"]), decoded(data["state"])
            else:
                state, replanned = _step(planner, state, decoded(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"line {number} is no line of a trace: {error!r}") from error
        if replanned is not None:
            yield replanned


def _step(planner: AdaptivePlanner, state: PlannerState, line: dict[str, Any]) -> tuple[PlannerState, Replanned | None]:
    """Return the state after a line, and the recorded and the new plan if it has one."""
    ((kind, event),) = line.items()
    if kind == "plan":
        view, now = event["view"], event["now"]
        rng = np.random.default_rng(0)
        if "rng" in event:
            rng.bit_generator.state = event["rng"]
        plan, after = planner.plan(view, state, now, rng)
        return after, Replanned(event["plan"], plan, planner, view, state, now)
    if kind == "observe":
        return planner.observe(event["outcome"], state, event["now"]), None
    if kind == "stand_by":
        return planner.stand_by(event["view"], state), None
    raise ValueError(f"unknown event {kind!r}")


def same(one: Plan, other: Plan) -> bool:
    """Return whether two plans are equal to the last bit."""
    return json.dumps(encoded(one)) == json.dumps(encoded(other))


def encoded(value: Any) -> Any:
    """Return a view, plan, outcome or state (or what is in one) as JSON-able data, the inverse of ``decoded``."""
    if isinstance(value, np.ndarray):
        return {"shape": list(value.shape), value.dtype.kind: value.ravel().tolist()}
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__, **{field.name: encoded(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            return {"pairs": [[key, encoded(item)] for key, item in value.items()]}
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encoded(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def decoded(data: Any) -> Any:
    """Return what ``encoded`` was made of; lists become tuples. Raises KeyError or TypeError for other data."""
    if isinstance(data, list):
        return tuple(decoded(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "pairs" in data:
        return {key: decoded(item) for key, item in data["pairs"]}
    if "shape" in data and "is" not in data:
        ((kind, values),) = ((key, value) for key, value in data.items() if key != "shape")
        return np.array(values, _KINDS[kind]).reshape(data["shape"])
    members = {key: decoded(item) for key, item in data.items() if key != "is"}
    return _CLASSES[data["is"]](**members) if "is" in data else members


def _planner_data(planner: AdaptivePlanner) -> dict[str, Any]:
    latency = planner.latency
    return {
        "schema": SCHEMA,
        "drafts": list(planner.drafts),
        "config": asdict(planner.config),
        "shapes": asdict(planner.shapes) if isinstance(planner, ShapedPlanner) else None,
        "curves": [_curve_data(curve) for curve in (latency.target, *latency.drafts)],
        "overhead_s": latency.overhead_s,
        "speculation_s": latency.speculation_s,
        "turn_s": latency.turn_s,
    }


def _curve_data(curve: LatencyCurve) -> dict[str, Any]:
    return {"base_s": curve.base_s.tolist(), "slope_s": curve.slope_s, "row_s": curve.row_s, "context_s": curve.context_s}


def _planner(data: dict[str, Any]) -> AdaptivePlanner:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {data['schema']!r}")
    target, *drafts = (LatencyCurve(**{**curve, "base_s": np.array(curve["base_s"])}) for curve in data["curves"])
    latency = LatencyModel(target, tuple(drafts), data["overhead_s"], data["speculation_s"], data.get("turn_s", 0.0))
    config = PlannerConfig(**{**data["config"], "acceptance": AcceptanceConfig(**data["config"]["acceptance"])})
    names, shapes = tuple(data["drafts"]), data["shapes"]
    return AdaptivePlanner(names, latency, config) if shapes is None else ShapedPlanner(names, latency, config, Shapes(**shapes))
