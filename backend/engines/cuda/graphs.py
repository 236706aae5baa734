"""CUDA graphs: launches that are captured once and replayed as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Replay:
    """A captured graph, and the launches whose tensors it reads."""

    graph: Any
    run: Callable[[], object]

    def __call__(self) -> None:
        """Launch the graph."""
        self.graph.replay()


_shared: dict[torch.device, tuple[Any, torch.cuda.Stream]] = {}
"""By device the memory of all graphs and the stream that they are captured on: cuBLAS keeps a
workspace for each stream.
"""


def capture(device: torch.device, run: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
    """Capture launches in a CUDA graph; return what they return and the replay, which leaves its
    results in the same tensors. They run once before. Raises RuntimeError.

    The replay keeps ``run`` and so the tensors that it reads: a graph knows only their addresses.
    All graphs share their memory: a result is void as soon as another graph runs.
    """
    if device not in _shared:
        _shared[device] = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    pool, stream = _shared[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = run()
    except BaseException:
        del _shared[device]  # what a capture that fails leaves there is not known
        raise
    return result, _Replay(graph, run)
