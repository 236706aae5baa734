"""Loads and guards a user's policy.

``my_package.MyPolicy`` is a class, or any other callable, that makes a policy of
``(drafts, latency, k_max)``: the drafts' names in the order of the view's columns, a
``LatencyModel``, and the longest proposal. Options are keyword arguments.
"""

from __future__ import annotations

import importlib
import inspect
import json
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.random import Generator as Rng

from .latency import LatencyModel
from .plan import NO_DRAFT, AnyPolicy, DraftNodes, IntArray, Plan, Policy, View
from .wrappers import Wrapper, WrapperState


class PolicyError(ValueError):
    """A policy that cannot be used, or that failed; the message is a line with path and reason."""


def import_policy(path: str) -> Callable[..., Any]:
    """Import what a dotted path names. Raises PolicyError."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise PolicyError(f"{path!r}: importing {module_name} {_describe(error)}") from error
        where = "installed, on PYTHONPATH, next to serving.json or in the folder of the command"
        raise PolicyError(f"{path!r}: there is no module {missing!r} {where}") from error
    if not hasattr(module, name):
        names = [
            key for key, it in vars(module).items() if getattr(it, "__module__", "") == module_name
        ]
        has = closest(name, names) or f", it has {', '.join(names) or 'none'}"
        raise PolicyError(f"{path!r}: {module_name} ({module.__file__}) has no {name!r}{has}")
    factory = getattr(module, name)
    if not callable(factory):
        raise PolicyError(f"{path!r} must be a class or a function, got {factory!r}")
    return cast(Callable[..., Any], factory)


def parse_path(arm: str) -> tuple[str, dict[str, Any]]:
    """Return path and options of ``my_package.MyPolicy:NAME=VALUE``; a value is JSON, or else the
    text as it is. Raises PolicyError.
    """
    path, *words = arm.split(":")
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise PolicyError(f"{arm!r}: an option must be NAME=VALUE, got {word!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return path, options


def closest(name: str, names: Iterable[str]) -> str:
    """Return the known name that is most like one, as a question to end an error with; '' if none
    is like it.
    """
    like = get_close_matches(name, [*names], 1)
    return f"; did you mean {like[0]!r}?" if like else ""


def load_policy(
    path: str,
    drafts: tuple[str, ...],
    latency: LatencyModel,
    k_max: int,
    options: Mapping[str, Any],
) -> AnyPolicy:
    """Make the policy that a dotted path names, and guard it. Raises PolicyError."""
    factory, arguments = import_policy(path), (drafts, latency, k_max)
    call = ", ".join(["drafts", "latency", "k_max", *(f"{name}=..." for name in options)])
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        takes = f"but takes {inspect.signature(factory)}: {error}"
        raise PolicyError(f"{path!r} is called with ({call}), {takes}") from None
    except ValueError:
        pass  # a callable may have no signature
    try:
        policy = factory(*arguments, **options)
    except Exception as error:
        raise PolicyError(f"{path!r} called with ({call}) {_describe(error)}") from error
    methods = [name for name in vars(Policy) if not name.startswith("_")]
    if missing := [name for name in methods if not callable(getattr(policy, name, None))]:
        lacks = f"made a {type(policy).__name__} without {', '.join(missing)}"
        raise PolicyError(f"{path!r} {lacks}: inherit policy.Policy, which has all but plan")
    guarded = CheckedPolicy(path, policy)
    guarded.start()  # an error is raised here, before any request is served
    return guarded


class NamedErrors:
    """A user's policy; every exception of it becomes a PolicyError that names path and method."""

    def __init__(self, path: str, policy: AnyPolicy) -> None:
        self.path, self.policy = path, policy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.policy, name)

        def call(*arguments: Any) -> Any:
            try:
                answer = method(*arguments)
            except Exception as error:
                raise PolicyError(f"{self.path}.{name} {_describe(error)}") from error
            if name in ("save", "drift") and not isinstance(answer, dict):
                raise PolicyError(f"{self.path}.{name} must return a dict, got {answer!r}")
            return answer

        return call


class CheckedPolicy(Wrapper[Any]):
    """A user's policy: its exceptions, and answers that do not fit, are PolicyErrors."""

    def __init__(self, path: str, policy: AnyPolicy) -> None:
        super().__init__(cast("AnyPolicy", NamedErrors(path, policy)))
        self.path = path

    def plan(
        self, view: View, state: WrapperState[Any], now: float, rng: Rng
    ) -> tuple[Plan, WrapperState[Any]]:
        """Return the policy's plan and state; the plan is one for this view."""
        answer: Any = self.policy.plan(view, state.inner, now, rng)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Plan)):
            got = type(answer).__name__
            raise PolicyError(f"{self.path}.plan must return (Plan, state), got {got}")
        if wrong := plan_error(answer[0], view):
            raise PolicyError(f"{self.path}.plan: {wrong}")
        return answer[0], WrapperState(answer[1])

    def trim(
        self, view: View, plan: Plan, drafted: DraftNodes, state: WrapperState[Any]
    ) -> IntArray:
        nodes = super().trim(view, plan, drafted, state)
        if wrong := _column_error("nodes", nodes, len(view), 0):
            raise PolicyError(f"{self.path}.trim: {wrong}")
        return nodes.astype(np.int64)


def plan_error(plan: Plan, view: View) -> str:
    """Return why a plan does not fit a view: field, row and value; '' where it fits."""
    rows = len(view)
    drafts = np.full(rows, len(view.drafts) - 1)
    if wrong := _column_error("draft", plan.draft, rows, NO_DRAFT, drafts):
        return wrong
    most = np.zeros(rows, np.int64)
    drafting = np.flatnonzero(plan.draft != NO_DRAFT)
    most[drafting] = view.ceiling[drafting, plan.draft[drafting]]
    return _column_error("length", plan.length, rows, 0, most, ", its ceiling")


def _column_error(
    name: str,
    column: Any,
    rows: int,
    least: int,
    most: IntArray | None = None,  # [rows]
    which: str = "",
) -> str:
    """Return why a column is no array of one integer in a range for each row; '' where it is."""
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


def _describe(error: Exception) -> str:
    """Return an exception in a few words, and its place in the user's is_theirs code."""
    if isinstance(error, SyntaxError):
        text, file, line = error.msg, error.filename, error.lineno
    else:
        text, file, line = str(error), None, None
        ours = __file__, inspect.getfile(Wrapper), importlib.__file__, typing.__file__
        for frame in traceback.extract_tb(error.__traceback__):
            is_theirs = frame.filename not in ours and not frame.filename.startswith("<")
            if is_theirs and file in (
                None,
                frame.filename,
            ):  # deepest in the first file of the user's
                file, line = frame.filename, frame.lineno
    place = f" ({Path(file).name}:{line})" if file else ""
    return f"raised {type(error).__name__}: {' '.join(text.split())}{place}"
