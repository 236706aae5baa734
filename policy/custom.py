"""A user's policy by its dotted path: found, made, and held to what a policy must do.

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
from pathlib import Path
from typing import Any

import numpy as np

from .latency import LatencyModel
from .plan import NO_DRAFT, Drafted, IntArray, Outcome, Plan, Policy, View

_WHERE = "installed, on PYTHONPATH, beside serving.json or in the folder of the command"
_NOT_THEIRS = (__file__, importlib.__file__, typing.__file__)
METHODS = ("start", "plan", "needs_offers", "observe", "stand_by", "save", "load", "drift")


class PolicyError(ValueError):
    """A policy that cannot be used, or that failed: one line that names it and the reason."""


def found(path: str) -> Callable[..., Any]:
    """Return what a dotted path names, by an import. Raises PolicyError."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise PolicyError(f"{path!r}: importing {module_name} {_said(error)}") from error
        raise PolicyError(f"{path!r}: there is no module {error.name!r} {_WHERE}") from error
    except Exception as error:
        raise PolicyError(f"{path!r}: importing {module_name} {_said(error)}") from error
    if not hasattr(module, name):
        theirs = vars(module).items()
        classes = [key for key, it in theirs if getattr(it, "__module__", "") == module_name]
        has = f"has no {name!r}, it has {', '.join(classes) or 'none'}"
        raise PolicyError(f"{path!r}: {module_name} ({module.__file__}) {has}")
    factory = getattr(module, name)
    if not callable(factory):
        raise PolicyError(f"{path!r} must be a class or a function, got {factory!r}")
    return factory  # type: ignore[no-any-return]


def made(
    path: str,
    drafts: tuple[str, ...],
    latency: LatencyModel,
    k_max: int,
    options: Mapping[str, Any],
) -> Policy:
    """Return the policy that a dotted path makes, guarded. Raises PolicyError."""
    factory = found(path)
    arguments = drafts, latency, k_max
    given = ", ".join(["drafts", "latency", "k_max", *(f"{name}=..." for name in options)])
    try:
        signature = inspect.signature(factory)
    except ValueError:
        signature = None  # a callable need not tell
    try:
        if signature is not None:
            signature.bind(*arguments, **options)
    except TypeError as error:
        takes = f"but takes {signature}: {error}"
        raise PolicyError(f"{path!r} is called with ({given}), {takes}") from None
    try:
        policy = factory(*arguments, **options)
    except Exception as error:
        raise PolicyError(f"{path!r} called with ({given}) {_said(error)}") from error
    if missing := [name for name in METHODS if not callable(getattr(policy, name, None))]:
        lacks = f"made a {type(policy).__name__} without {', '.join(missing)}"
        raise PolicyError(f"{path!r} {lacks}: inherit policy.Policy, which has all but plan")
    guarded = Guarded(path, policy)
    guarded.start()  # what raises here is said before anyone is served
    return guarded


class Guarded:
    """A user's policy: what it raises, or a plan that nobody can follow, is a PolicyError."""

    def __init__(self, path: str, policy: Policy) -> None:
        self.path, self.policy = path, policy

    def start(self) -> Any:
        """Return the policy's state before the first step."""
        return self._of("start")

    def plan(
        self,
        view: View,
        state: Any,
        now: float,
        rng: np.random.Generator,
    ) -> tuple[Plan, Any]:
        """Return the policy's plan and state; the plan is one for this view."""
        answer = self._of("plan", view, state, now, rng)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Plan)):
            got = type(answer).__name__
            raise PolicyError(f"{self.path}.plan must return (Plan, state), got {got}")
        if wrong := fault(answer[0], view):
            raise PolicyError(f"{self.path}.plan: {wrong}")
        return answer

    def needs_offers(self, request: IntArray, state: Any) -> bool:
        """Return the policy's answer."""
        return bool(self._of("needs_offers", request, state))

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Any) -> IntArray:
        """Return how many of each row's nodes are verified: as planned if it says nothing."""
        if not callable(getattr(self.policy, "trim", None)):
            return plan.length
        nodes = self._of("trim", view, plan, drafted, state)
        wrong = _column_fault("nodes", nodes, len(view))
        if not wrong and len(bad := np.flatnonzero(nodes < 0)):
            wrong = f"nodes[{bad[0]}] must be >= 0, got {nodes[bad[0]]}"
        if wrong:
            raise PolicyError(f"{self.path}.trim: {wrong}")
        return np.asarray(nodes, np.int64)

    def observe(self, outcome: Outcome, state: Any, now: float) -> Any:
        """Return the policy's state after a step."""
        return self._of("observe", outcome, state, now)

    def stand_by(self, view: View, state: Any) -> Any:
        """Return the policy's state before a step of someone else's plan."""
        return self._of("stand_by", view, state)

    def save(self, state: Any, now: float) -> dict[str, Any]:
        """Return what the policy keeps."""
        return self._dict("save", state, now)

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> Any:
        """Return the policy's state of what it kept."""
        return self._of("load", data, now, idle_s)

    def drift(self, state: Any) -> dict[str, float]:
        """Return the policy's."""
        return self._dict("drift", state)

    def _of(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.policy, method)(*arguments)
        except Exception as error:
            raise PolicyError(f"{self.path}.{method} {_said(error)}") from error

    def _dict(self, method: str, *arguments: Any) -> dict[str, Any]:
        answer = self._of(method, *arguments)
        if not isinstance(answer, dict):
            raise PolicyError(f"{self.path}.{method} must return a dict, got {answer!r}")
        return answer


def fault(plan: Plan, view: View) -> str:
    """Return what of a plan cannot be done in a view: field, row and value; '' where all can."""
    rows = len(view)
    for name in ("draft", "length"):
        if wrong := _column_fault(name, getattr(plan, name), rows):
            return wrong
    if not rows:
        return ""
    drafts = len(view.drafts)
    if len(bad := np.flatnonzero((plan.draft < NO_DRAFT) | (plan.draft >= drafts))):
        row = int(bad[0])
        return f"draft[{row}] must be {NO_DRAFT} to {drafts - 1}, got {plan.draft[row]}"
    most = np.zeros(rows, np.int64)
    chosen = np.flatnonzero((plan.draft != NO_DRAFT) & view.ready)
    most[chosen] = view.ceiling[chosen, plan.draft[chosen]]
    if len(bad := np.flatnonzero((plan.length < 0) | (plan.length > most))):
        row = int(bad[0])
        return f"length[{row}] must be 0 to {most[row]}, its ceiling, got {plan.length[row]}"
    return ""


def _column_fault(name: str, column: Any, rows: int) -> str:
    """Return why something is no array of one integer for each row; '' where it is."""
    if not (isinstance(column, np.ndarray) and np.issubdtype(column.dtype, np.integer)):
        got = column.dtype if isinstance(column, np.ndarray) else type(column).__name__
        return f"{name} must be an array of integers, got {got}"
    if column.shape != (rows,):
        return f"{name} must have the shape ({rows},), one for each row, got {column.shape}"
    return ""


def _said(error: Exception) -> str:
    """Return in a few words what was raised, and where in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename not in _NOT_THEIRS]
    own = [frame for frame in own if not frame.filename.startswith("<")]
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename or '?').name}:{error.lineno})"
    else:
        theirs = [frame for frame in own if own and frame.filename == own[0].filename]
        place = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"raised {type(error).__name__}: {text}{place}"
