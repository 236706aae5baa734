"""The device that a part of the probe measures on: graphs, event times and the time left."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.cuda.step import SHAPES


class Probe:
    """The device, a model's shape (a tiny one on a CPU, to rehearse), and the end of its time."""

    def __init__(self, end_s: float, *, rehearse: bool) -> None:
        self.end_s, self.rehearse = end_s, rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.gpu = "none" if rehearse else torch.cuda.get_device_name()
        self.shape = SHAPES["tiny" if rehearse else "8b"]
        self.context = 70 if rehearse else 1000
        self.copy_gb_s = 3000.0

    def left_s(self) -> float:
        """Return the seconds left for all parts."""
        return self.end_s - time.monotonic()

    def empty(self) -> None:
        """Give memory back. Raises RuntimeError where the CUDA context is broken."""
        gc.collect()
        if not self.rehearse:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def graph(
        self, launch: Callable[[], object], stream: torch.cuda.Stream | None = None
    ) -> Callable[[], object]:
        """Capture launches in a CUDA graph and return its replay.

        Graphs that run at once need streams of their own: cuBLAS keeps a workspace for each, and
        kernels that share one wait for each other without end. Tensors that the graph reads must be
        kept alive.
        """
        if self.rehearse:
            return launch
        stream = stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        replay: Callable[[], object] = graph.replay
        return replay

    def time_ms(self, launch: Callable[[], object], rounds: int = 11) -> float:
        """Return the median of the device's milliseconds for a launch."""
        if self.rehearse:
            return self.host_ms(launch, 1)
        launch()
        torch.cuda.synchronize()
        found = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch()
            end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)))
        return statistics.median(found)

    def host_ms(self, launch: Callable[[], object], rounds: int = 3) -> float:
        """Return the median of the host's milliseconds for a launch that it waits for."""
        found = []
        for _ in range(rounds + 1):
            self.wait()
            start = time.perf_counter()
            launch()
            self.wait()
            found.append((time.perf_counter() - start) * 1e3)
        return statistics.median(found[1:])

    def wait(self) -> None:
        """Wait for the device."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def floor_ms(self, read_bytes: float) -> float:
        """Return the least time to read bytes, at the bandwidth of a copy."""
        return read_bytes / self.copy_gb_s / 1e6

    def of(self, full: Any, rehearsal: Any) -> Any:
        """Return a size for the GPU or for a rehearsal."""
        return rehearsal if self.rehearse else full
