"""Counts how much work something is, in units that are alike on every machine."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps_of(work: Callable[[], object]) -> int:
    """Return the lines of Python that run, and the bytes that they allocate, each line's even where
    they are freed at once: copies of a growing text count as often as they are made.
    """
    steps = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        del frame, event, arg
        nonlocal steps
        current, peak = tracemalloc.get_traced_memory()
        steps += 1 + max(0, peak - before[0])
        tracemalloc.reset_peak()
        before[0] = current
        return trace

    tracing, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it allocates when it likes
    tracemalloc.start()
    before = [tracemalloc.get_traced_memory()[0]]
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(tracing)
        tracemalloc.stop()
        if collects:
            gc.enable()
    return steps
