"""Policies around a policy: operators' switches, and the guard of a user's own.

``my_package.MyPolicy`` is a class, or anything else to call, that makes a policy of
``(drafts, latency, k_max)``: the drafts' names in the order of the view's columns, a
``LatencyModel``, and the longest proposal. Options are keyword arguments.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.random import Generator as Rng

from .baselines import same_for_all
from .latency import LatencyModel
from .plan import NO_DRAFT, Drafted, IntArray, Outcome, Plan, Policy, View


class Wrapped(NamedTuple):
    """A wrapper's state: that of the policy within, and what it knows itself of the last step."""

    inner: Any
    own: Any = None


class Wrapper(Policy):
    """A policy around another: what a wrapper does not change is as the policy within does it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def start(self) -> Wrapped:
        return Wrapped(self.policy.start())

    def plan(self, view: View, state: Wrapped, now: float, rng: Rng) -> tuple[Plan, Wrapped]:
        plan, inner = self.policy.plan(view, state.inner, now, rng)
        return plan, Wrapped(inner)

    def needs_offers(self, request: IntArray, state: Wrapped) -> bool:
        return self.policy.needs_offers(request, state.inner)

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Wrapped) -> IntArray:
        return self.policy.trim(view, plan, drafted, state.inner)

    def observe(self, outcome: Outcome, state: Wrapped, now: float) -> Wrapped:
        return state._replace(inner=self.policy.observe(outcome, state.inner, now))

    def stand_by(self, view: View, state: Wrapped) -> Wrapped:
        return Wrapped(self.policy.stand_by(view, state.inner))

    def save(self, state: Wrapped, now: float) -> dict[str, Any]:
        return self.policy.save(state.inner, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> Wrapped:
        return Wrapped(self.policy.load(data, now, idle_s))

    def drift(self, state: Wrapped) -> dict[str, float]:
        return self.policy.drift(state.inner)


@dataclass(frozen=True, slots=True)
class Switches:
    """One setting of the switches; a change is another value.

    ``speculation``: ``on`` (the planner's choice is applied), ``off`` (none is, k = 0) or
    ``shadow`` (the planner's choice is recorded, the fixed one applied). ``canary_share`` of the
    requests follow the planner, the others the fixed choice ``fixed_draft``, ``fixed_length`` (0:
    no speculation). ``inter_token_cap_s`` is the longest step that the planner may choose, unless
    one without speculation takes longer anyway; 0: no cap.
    """

    speculation: str = "on"
    canary_share: float = 1.0
    fixed_draft: str = ""
    fixed_length: int = 0
    inter_token_cap_s: float = 0.0

    def arm(self, control: bool) -> str:
        """Return whose choice a request gets: ``planner`` or ``fixed``, or the mode if not on."""
        if self.speculation != "on":
            return self.speculation
        return "fixed" if control else "planner"

    def in_control(self, request: int) -> bool:
        """Return whether a new request takes the fixed choice, by a hash of its id."""
        digest = blake2b(str(request).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 >= self.canary_share

    def fixed(self, view: View) -> Plan:
        """Return the fixed choice for all rows. Raises ValueError for a draft not in the view."""
        if not self.fixed_length:
            return Plan.nothing(len(view))
        return same_for_all(view, self.fixed_draft, self.fixed_length)

    def capped(self, view: View) -> View:
        """Return the view with the cap on the step's time."""
        cap_s = self.inter_token_cap_s
        return replace(view, cap_s=cap_s) if cap_s > 0 else view


class SwitchedPolicy(Wrapper):
    """A policy under switches, which are read anew before every step.

    Its own state is, by request, the draft that the shadow would have used in the last step.
    """

    def __init__(self, policy: Policy, switches: Callable[[], Switches]) -> None:
        super().__init__(policy)
        self._switches = switches

    def plan(self, view: View, state: Wrapped, now: float, rng: Rng) -> tuple[Plan, Wrapped]:
        """Plan as the switches say. Raises ValueError when the fixed draft is not in the view."""
        switches = self._switches()
        if switches.speculation == "off":
            return Plan.nothing(len(view)), self.stand_by(view, state)
        view = switches.capped(view)
        if switches.speculation == "shadow":
            seen = _with_shadow(view, state.own or {})
            shadow, inner = self.policy.plan(seen, state.inner, now, rng)
            used = np.flatnonzero(shadow.length)
            drafts = zip(view.request[used].tolist(), shadow.draft[used].tolist(), strict=True)
            after = Wrapped(self.policy.stand_by(view, inner), dict(drafts))
            return replace(switches.fixed(view), shadow=shadow), after
        if view.control is None or not view.control.any():
            return super().plan(view, state, now, rng)
        fixed = switches.fixed(view)
        plan, after = super().plan(replace(view, control_plan=fixed), state, now, rng)
        draft = np.where(view.control, fixed.draft, plan.draft)
        length = np.where(view.control, fixed.length, plan.length)
        return replace(plan, draft=draft, length=length), after

    def needs_offers(self, request: IntArray, state: Wrapped) -> bool:
        """Return the policy's answer where it alone decides; False where none is to speculate."""
        switches = self._switches()
        if switches.speculation == "off":
            return False
        alone = switches.speculation == "on" and switches.canary_share == 1
        return not alone or super().needs_offers(request, state)

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Wrapped) -> IntArray:
        """Return the policy's answer; rows that it did not plan are verified as planned."""
        switches = self._switches()
        if switches.speculation != "on":
            return plan.length
        nodes = super().trim(switches.capped(view), plan, drafted, state)
        return nodes if view.control is None else np.where(view.control, plan.length, nodes)


def _with_shadow(view: View, shadowed: dict[int, int]) -> View:
    """Return the view in which drafts that the shadow used have no more than a token to read."""
    catchup = view.catchup.copy()
    for row, request in enumerate(view.request.tolist()):
        if (draft := shadowed.get(request)) is not None:
            catchup[row, draft] = min(1, catchup[row, draft])
    return replace(view, catchup=catchup)


class PolicyError(ValueError):
    """A policy that cannot be used, or that failed: one line that names it and the reason."""


def found(path: str) -> Callable[..., Any]:
    """Return what a dotted path names, by an import. Raises PolicyError."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise PolicyError(f"{path!r}: importing {module_name} {_said(error)}") from error
        where = "installed, on PYTHONPATH, beside serving.json or in the folder of the command"
        raise PolicyError(f"{path!r}: there is no module {missing!r} {where}") from error
    if not hasattr(module, name):
        own = [
            key for key, it in vars(module).items() if getattr(it, "__module__", "") == module_name
        ]
        has = f"has no {name!r}, it has {', '.join(own) or 'none'}"
        raise PolicyError(f"{path!r}: {module_name} ({module.__file__}) {has}")
    factory = getattr(module, name)
    if not callable(factory):
        raise PolicyError(f"{path!r} must be a class or a function, got {factory!r}")
    return cast(Callable[..., Any], factory)


def made(
    path: str,
    drafts: tuple[str, ...],
    latency: LatencyModel,
    k_max: int,
    options: Mapping[str, Any],
) -> Policy:
    """Return the policy that a dotted path makes, guarded. Raises PolicyError."""
    factory, arguments = found(path), (drafts, latency, k_max)
    call = ", ".join(["drafts", "latency", "k_max", *(f"{name}=..." for name in options)])
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        takes = f"but takes {inspect.signature(factory)}: {error}"
        raise PolicyError(f"{path!r} is called with ({call}), {takes}") from None
    except ValueError:
        pass  # a callable need not tell what it takes
    try:
        policy = factory(*arguments, **options)
    except Exception as error:
        raise PolicyError(f"{path!r} called with ({call}) {_said(error)}") from error
    methods = [name for name in vars(Policy) if not name.startswith("_")]
    if missing := [name for name in methods if not callable(getattr(policy, name, None))]:
        lacks = f"made a {type(policy).__name__} without {', '.join(missing)}"
        raise PolicyError(f"{path!r} {lacks}: inherit policy.Policy, which has all but plan")
    guarded = Guarded(path, policy)
    guarded.start()  # what raises here is said before anyone is served
    return guarded


class Blamed:
    """A user's policy whose methods raise nothing but PolicyError, which names path and method."""

    def __init__(self, path: str, policy: Policy) -> None:
        self.path, self.policy = path, policy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.policy, name)

        def called(*arguments: Any) -> Any:
            try:
                answer = method(*arguments)
            except Exception as error:
                raise PolicyError(f"{self.path}.{name} {_said(error)}") from error
            if name in ("save", "drift") and not isinstance(answer, dict):
                raise PolicyError(f"{self.path}.{name} must return a dict, got {answer!r}")
            return answer

        return called


class Guarded(Wrapper):
    """A user's policy: what it raises, or answers that nobody can use, is a PolicyError."""

    def __init__(self, path: str, policy: Policy) -> None:
        super().__init__(cast(Policy, Blamed(path, policy)))
        self.path = path

    def plan(self, view: View, state: Wrapped, now: float, rng: Rng) -> tuple[Plan, Wrapped]:
        """Return the policy's plan and state; the plan is one for this view."""
        answer: Any = self.policy.plan(view, state.inner, now, rng)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Plan)):
            got = type(answer).__name__
            raise PolicyError(f"{self.path}.plan must return (Plan, state), got {got}")
        if wrong := fault(answer[0], view):
            raise PolicyError(f"{self.path}.plan: {wrong}")
        return answer[0], Wrapped(answer[1])

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Wrapped) -> IntArray:
        nodes = super().trim(view, plan, drafted, state)
        if wrong := _column_fault("nodes", nodes, len(view), 0):
            raise PolicyError(f"{self.path}.trim: {wrong}")
        return nodes.astype(np.int64)


def fault(plan: Plan, view: View) -> str:
    """Return what of a plan cannot be done in a view: field, row and value; '' where all can."""
    rows = len(view)
    drafts = np.full(rows, len(view.drafts) - 1)
    if wrong := _column_fault("draft", plan.draft, rows, NO_DRAFT, drafts):
        return wrong
    most = np.zeros(rows, np.int64)
    chosen = np.flatnonzero(plan.draft != NO_DRAFT)
    most[chosen] = view.ceiling[chosen, plan.draft[chosen]]
    return _column_fault("length", plan.length, rows, 0, most, ", its ceiling")


def _column_fault(
    name: str, column: Any, rows: int, least: int, most: IntArray | None = None, which: str = ""
) -> str:
    """Return why something is no array of one integer in a range for each row; '' where it is."""
    if not (isinstance(column, np.ndarray) and np.issubdtype(column.dtype, np.integer)):
        got = column.dtype if isinstance(column, np.ndarray) else type(column).__name__
        return f"{name} must be an array of integers, got {got}"
    if column.shape != (rows,):
        return f"{name} must have the shape ({rows},), one for each row, got {column.shape}"
    bad = np.flatnonzero((column < least) | (column > (column if most is None else most)))
    if not len(bad):
        return ""
    row = bad[0]
    must = f">= {least}" if most is None else f"{least} to {most[row]}{which}"
    return f"{name}[{row}] must be {must}, got {column[row]}"


def _said(error: Exception) -> str:
    """Return in a few words what was raised, and where in the user's own code."""
    if isinstance(error, SyntaxError):
        text, file, line = error.msg, error.filename, error.lineno
    else:
        text, file, line = str(error), None, None
        ours = __file__, importlib.__file__, typing.__file__
        for frame in traceback.extract_tb(error.__traceback__):
            own = frame.filename not in ours and not frame.filename.startswith("<")
            if own and file in (None, frame.filename):  # deepest in the first file of the user's
                file, line = frame.filename, frame.lineno
    place = f" ({Path(file).name}:{line})" if file else ""
    return f"raised {type(error).__name__}: {' '.join(text.split())}{place}"
