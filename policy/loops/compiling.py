"""How the loops are compiled: when, for which types, and where the result is cached.

Compiling all takes about 30 s, loading it from the cache a fraction of one. ``compile_all`` does
either, so that no step of a server has to. With ``NUMBA_DISABLE_JIT=1`` the same source runs as
plain Python, about a hundred times as slowly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar, cast

import numba
from numba import njit, types

_config: Any = numba.config
Function = TypeVar("Function", bound=Callable[..., Any])

FLOATS, INTS, BOOLS = (
    [dtype] + [types.Array(dtype, axes, "C") for axes in (1, 2, 3, 4, 5)]
    for dtype in (types.float64, types.int64, types.boolean)
)
"""Types of arguments by the number of axes; the first is that of a scalar."""

_KEPT_S = 30 * 86400.0
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_entries: list[tuple[Any, tuple[Any, ...]]] = []
problems: list[str] = []
"""Reasons why nothing is cached, if any: every process then compiles at its start."""


def record(kind: Any, *fields: Any) -> Any:
    """Return the type of a NamedTuple whose fields have these types."""
    return types.BaseTuple.from_types(fields, kind)


def helper(function: Function) -> Function:
    """Mark a function that only other loops call: it is compiled into its callers."""
    return cast(Function, njit(**_OPTIONS)(function))


def unordered_helper(function: Function) -> Function:
    """Mark a helper in which the compiler may add up in any order, several terms at once."""
    return cast(Function, njit(fastmath={"reassoc", "nsz"}, **_OPTIONS)(function))


def entry(*signature: Any) -> Callable[[Function], Function]:
    """Mark a function that Python calls, with arguments of these types only."""

    def mark(function: Function) -> Function:
        if _config.DISABLE_JIT:
            return function
        compiled = _cache(function)
        _entries.append((compiled, signature))
        return cast(Function, compiled)

    return mark


def is_cached() -> bool:
    """Return whether an earlier process has compiled this source at this place, as numba asks."""
    places = ((Path(f.stats.cache_path or os.devnull), f.__name__) for f, _ in _entries)
    return all(any(place.glob(f"*.{name}-*.nbi")) for place, name in places)


@cache
def compile_all() -> None:
    """Compile all entries, or load them; later calls with other types raise TypeError.

    It removes versions from the cache that have not run for ``_KEPT_S``.
    """
    for function, signature in _entries:
        function.compile(signature)
        function.disable_compile()
    with suppress(OSError):
        os.utime(_folder())
        oldest_s = _folder().stat().st_mtime - _KEPT_S
        for folder in _folder().parent.glob("loops-" + "[0-9a-f]" * 16):
            if folder.stat().st_mtime < oldest_s:
                rmtree(folder, ignore_errors=True)


def _cache(function: Callable[..., Any]) -> Any:
    """Return the function with a cache, in a folder of its own for each version of the loops.

    By itself numba would not notice that a helper in another module has changed.
    """
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(_folder())
    try:
        compiled = njit(cache=True, **_OPTIONS)(function)
        if _folder() in Path(compiled.stats.cache_path).parents:
            return compiled
        reason = f"the folder {_folder()} cannot be written"
    except RuntimeError as error:
        reason = str(error)
    finally:
        _config.CACHE_DIR = before
    if reason not in problems:
        problems.append(reason)
    return njit(**_OPTIONS)(function)


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Return the cache folder: within ``NUMBA_CACHE_DIR``, or else ``SPINDLE_CACHE``."""
    source = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source.update(path.read_bytes())
    root = _config.CACHE_DIR or os.environ.get("SPINDLE_CACHE") or "~/.cache/spindle"
    return Path(root).expanduser().absolute() / f"loops-{source.hexdigest()}"
