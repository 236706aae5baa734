"""CUDA graphs: launches that are captured once and replayed as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


_pools: dict[torch.device, Any] = {}


def capture(device: torch.device, run: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
    """Capture launches in a CUDA graph; return what they return and the replay, which leaves its
    results in the same tensors. They run once before. Raises RuntimeError.

    All graphs share their memory: a result is void as soon as another graph runs.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    pool = _pools.setdefault(device, torch.cuda.graph_pool_handle())
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = run()
    replay: Callable[[], object] = graph.replay
    return result, replay
