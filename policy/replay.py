"""A planner's views and decisions: recorded as JSON lines, planned again, and explained.

The first line of a trace holds the planner (drafts, times, constants) and its state. Each other one
is a view with its plan, an outcome, or a state that was put in the place of the last one (a
restored one). The same plans are made again from them, bit for bit:
floating-point numbers survive JSON as they are.

``spindle replay FILE`` plans a trace again, compares, and says what was decided. ``--step N`` says
of the N-th plan what every request got, and why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
from numpy.random import Generator as Rng

from .latency import LatencyModel
from .loops.problem import StepProblem
from .plan import NO_DRAFT, Outcome, Plan, View
from .planner import AdaptivePlanner, PlannerConfig, PlannerState
from .problem import Choice, Score, score
from .wrappers import Wrapper, WrapperState

Option = tuple[int, int]
"""A draft and a length."""

_NOTHING = (NO_DRAFT, 0)
_CAP = "the cap on the step's time"


def explain(
    planner: AdaptivePlanner, view: View, state: PlannerState, plan: Plan, now: float
) -> list[str]:
    """Return a line for each row of a view about the plan that was made of it and this state.

    Tokens and seconds are marginal: with the row's chain against without it, all others' chains as
    they are. The price turns the seconds, catch-up spread over its horizon, into tokens. For a
    shape it says only what the row got; ``explain_batch`` has the rest. The bin of what a draft
    showed (``View.evidence``) is said where it showed something.
    """
    problem, rows = planner.problem(view, planner.admit(view, state, now))
    choice, place = Choice(plan.draft[rows], plan.length[rows]), {r: i for i, r in enumerate(rows)}
    lines = []
    for row, request in enumerate(view.request.tolist()):
        if row not in place:
            why = "its choice is given, not planned"
        else:
            one = _Row(problem, view.drafts, choice, place[row], plan.price)
            one.evidence = [] if view.evidence is None else view.evidence[row].tolist()
            why = one.why(plan)
        lines.append(f"request {request}: {why}")
    return lines


def explain_batch(plan: Plan) -> str:
    """Return a line about the whole step's figures."""
    text = f"{len(plan.length)} requests, {int(plan.length.sum())} tokens proposed, "
    text += f"{plan.predicted_tokens:.2f} expected in {1e3 * plan.predicted_s:.2f} ms, "
    return text + f"at {plan.price:.1f} tokens/s"


class _Row:
    """Row i of a problem: what its options bring and cost, all other rows' choices as they are."""

    def __init__(
        self, problem: StepProblem, drafts: tuple[str, ...], choice: Choice, i: int, price: float
    ) -> None:
        self._problem, self._drafts, self._choice = problem, drafts, choice
        self._i, self._price = i, price
        self.evidence: list[int] = []  # by draft, its evidence; empty: none
        self._without = self._score(_NOTHING)

    def why(self, plan: Plan) -> str:
        """Return why the row has what it has."""
        present = int(self._choice.draft[self._i]), int(self._choice.length[self._i])
        ceiling = self._problem.ceiling[:, self._i].tolist()
        options = [(d, k) for d, most in enumerate(ceiling) for k in range(1, most + 1)]
        scores = {option: self._score(option) for option in options}
        gains = {
            option: result.objective(self._price) - self._without.objective(self._price)
            for option, result in scores.items()
            if option == present or result.step_s <= self._problem.limit_s
        }
        gain = gains.pop(present, 0.0)
        best = max(gains, key=lambda option: gains[option], default=_NOTHING)
        most = gains.get(best, 0.0)
        if present[1] == 0:
            if best == _NOTHING:
                return f"none: {_CAP if options else 'no draft can propose anything'}"
            return f"none: at best {self._account(best, scores[best])}"
        text = self._account(present, scores[present])
        if most > 0:
            text += f"; next best {self._name(best)}, {gain - most:.3f} less"
        else:
            text += f"; next best none, {gain:.3f} less" if gain >= 0 else "; none would be better"
        draft, length = present
        if length == ceiling[draft]:
            text += "; its ceiling"
        elif scores[draft, length + 1].step_s > self._problem.limit_s:
            text += f"; longer: {_CAP}"
        return text + ("; a trial" if plan.notes.get("trial") and gain < max(most, 0.0) else "")

    def _score(self, option: Option) -> Score:
        choice = Choice(self._choice.draft.copy(), self._choice.length.copy())
        choice.draft[self._i], choice.length[self._i] = option
        return score(self._problem, choice)

    def _account(self, option: Option, result: Score) -> str:
        tokens = result.value - self._without.value
        seconds = result.charged_s - self._without.charged_s
        text = f"{self._name(option)}: +{tokens:.3f} tokens for {1e3 * seconds:+.3f} ms"
        return f"{text}, worth {self._price * seconds:.3f} at {self._price:.1f} tokens/s"

    def _name(self, option: Option) -> str:
        draft, length = option
        evidence = (
            f" (evidence {self.evidence[draft]})" if self.evidence and self.evidence[draft] else ""
        )
        return f"{self._drafts[draft]} x {length}{evidence}"


SCHEMA = 13


class TraceError(ValueError):
    """A trace that cannot be replayed; the message says where and why."""


class TracedPlanner(Wrapper[PlannerState]):
    """A planner that hands each line of its trace to ``emit``; none after ``most_lines``."""

    def __init__(
        self, planner: AdaptivePlanner, emit: Callable[[str], None], most_lines: int
    ) -> None:
        super().__init__(planner)
        self._planner, self._emit, self._most, self._lines = planner, emit, most_lines, 0
        self._last: PlannerState | None = None  # the state after the last line

    def plan(
        self, view: View, state: WrapperState[PlannerState], now: float, rng: Rng
    ) -> tuple[Plan, WrapperState[PlannerState]]:
        plan, after = super().plan(view, state, now, rng)
        self._trace(state, after, plan={"view": view, "now": now, "plan": plan})
        return plan, after

    def observe(
        self, outcome: Outcome, state: WrapperState[PlannerState], now: float
    ) -> WrapperState[PlannerState]:
        after = super().observe(outcome, state, now)
        self._trace(state, after, observe={"outcome": outcome, "now": now})
        return after

    def _trace(
        self, before: WrapperState[PlannerState], after: WrapperState[PlannerState], **event: Any
    ) -> None:
        """Emit an event, and before it the state, if that is not the last event's."""
        if not self._lines:
            self._write(planner=_describe(self._planner), state=before.inner)
        elif before.inner is not self._last:
            self._write(state=before.inner)
        self._write(**event)
        self._last = after.inner

    def _write(self, **data: Any) -> None:
        if self._lines < self._most:
            self._lines += 1
            self._emit(json.dumps(encode(data), separators=(",", ":")))


class ReplannedStep(NamedTuple):
    """A recorded plan and the one that the planner makes now, with all that it was made from."""

    recorded: Plan
    plan: Plan
    planner: AdaptivePlanner
    view: View
    state: PlannerState
    now: float


def replay(lines: Iterable[str]) -> Iterator[ReplannedStep]:
    """Yield every recorded plan with the one that the planner makes now.

    Raises TraceError for lines that are no trace.
    """
    planner: AdaptivePlanner | None = None
    state: Any = None
    rng = np.random.default_rng(0)  # the planner draws nothing
    for number, line in enumerate(lines, 1):
        replanned = None
        try:
            data = json.loads(line)
            if planner is None:
                planner, state = _planner(data["planner"]), decode(data["state"])
                continue
            match decode(data):
                case {"plan": {"view": view, "now": now, "plan": recorded}}:
                    plan, after = planner.plan(view, state, now, rng)
                    replanned = ReplannedStep(recorded, plan, planner, view, state, now)
                    state = after
                case {"observe": {"outcome": outcome, "now": now}}:
                    state = planner.observe(outcome, state, now)
                case {"state": PlannerState() as state}:
                    pass
                case _:
                    raise ValueError("no plan, observe or state")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"line {number} is not a line of a trace: {error!r}") from error
        if replanned is not None:
            yield replanned


def same(one: Plan, other: Plan) -> bool:
    """Return whether two plans are equal to the last bit."""
    return json.dumps(encode(one)) == json.dumps(encode(other))


def _describe(planner: AdaptivePlanner) -> dict[str, Any]:
    made_of = {"drafts": planner.drafts, "latency": planner.latency, "config": planner.config}
    return {"schema": SCHEMA, **made_of}


def _planner(data: dict[str, Any]) -> AdaptivePlanner:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {data['schema']!r}")
    del data["schema"]
    return AdaptivePlanner(**decode(data))


def _records(*kinds: Any) -> dict[str, type]:
    """Return the dataclasses and named tuples among types, and all that they hold, by name."""
    records: dict[str, type] = {}
    pending = list(kinds)
    while pending:
        kind = pending.pop()
        is_record = is_dataclass(kind) or hasattr(kind, "_fields")
        if isinstance(kind, type) and is_record and kind.__name__ not in records:
            records[kind.__name__] = kind
            pending += get_type_hints(kind).values()
        pending += get_args(kind)
    return records


_RECORDS = _records(View, Plan, Outcome, PlannerState, PlannerConfig, LatencyModel)
_DTYPES = {"i": np.int64, "f": np.float64, "b": np.bool_}


def encode(value: Any) -> Any:
    """Return records, arrays and what holds them as JSON-able data, the inverse of ``decode``."""
    if isinstance(value, np.ndarray):
        return {"shape": list(value.shape), value.dtype.kind: value.ravel().tolist()}
    names = getattr(type(value), "_fields", None)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.init]
    if names is not None:
        members = {name: encode(getattr(value, name)) for name in names}
        return {"is": type(value).__name__, **members}
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            return {"pairs": [[key, encode(item)] for key, item in value.items()]}
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def decode(data: Any) -> Any:
    """Return what ``encode`` was made of; lists become tuples.

    Raises KeyError or TypeError for other data.
    """
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "pairs" in data:
        return {key: decode(item) for key, item in data["pairs"]}
    if "is" in data:
        members = {str(key): decode(item) for key, item in data.items() if key != "is"}
        return _RECORDS[data["is"]](**members)
    if "shape" in data:
        ((kind, values),) = ((key, item) for key, item in data.items() if key != "shape")
        return np.array(values, _DTYPES[kind]).reshape(data["shape"])
    return {key: decode(item) for key, item in data.items()}


def main() -> int:
    """Replay a file; return 1 if a plan differs, 2 if the file is no trace or has no such step."""
    parser = argparse.ArgumentParser(
        prog="spindle replay",
        description="Plan the steps of a JSON-lines trace again, compare the plans, and explain "
        "one.",
        epilog="example: spindle replay trace.jsonl --step 12",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=int, help="plan to explain (0: the first)")
    options = parser.parse_args()
    plans: list[Plan] = []
    drafts: tuple[str, ...] = ()
    try:
        with options.file.open(encoding="utf-8") as lines:
            for step in replay(lines):
                if len(plans) == options.step:
                    print("\n".join(explain_step(step)))
                    return 0
                if not same(step.recorded, step.plan):
                    print(f"plan {len(plans)} differs:")
                    print(f"  recorded {step.recorded}\n  now      {step.plan}")
                    return 1
                plans.append(step.recorded)
                drafts = step.planner.drafts
    except (OSError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.step is not None:
        print(f"error: --step must be in 0..{len(plans) - 1}, got {options.step}", file=sys.stderr)
        return 2
    print("\n".join([f"{len(plans)} plans, all the same", *summary(plans, drafts)]))
    return 0


def explain_step(step: ReplannedStep) -> list[str]:
    """Return a line about the step, planned now, and one for each of its requests."""
    prompts = f"{step.view.prefill_tokens} prompt tokens"
    lines = explain(step.planner, step.view, step.state, step.plan, step.now)
    return [f"{prompts}; {explain_batch(step.plan)}", *lines]


def summary(plans: list[Plan], drafts: tuple[str, ...]) -> list[str]:
    """Return what the plans decided, in a few lines."""
    planned = [plan for plan in plans if len(plan.length)]
    if not planned:
        return []
    draft = np.concatenate([plan.draft for plan in planned])
    length = np.concatenate([plan.length for plan in planned])
    shares = [f"none {(length == 0).mean():.0%}"]
    for d, name in enumerate(drafts):
        rows = (draft == d) & (length > 0)
        if rows.any():
            shares.append(f"{name} {rows.mean():.0%} (mean length {length[rows].mean():.1f})")
    resting = sum(not plan.length.any() for plan in planned)
    trying = sum(bool(plan.notes.get("trial")) for plan in planned)
    step_ms = 1e3 * np.median([plan.predicted_s for plan in planned])
    return [
        f"rows {len(length)}: {', '.join(shares)}",
        f"steps {len(planned)}: {resting} without speculation, {trying} trying; "
        f"predicted {step_ms:.2f} ms (median)",
        f"--step N, 0 to {len(plans) - 1}, says why each request got what it got",
    ]


if __name__ == "__main__":
    sys.exit(main())
