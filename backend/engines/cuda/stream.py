"""The work that the host queues on a device: events, copies, CUDA graphs, and the loss of its
context.

On a CPU everything runs at once, but a copy is done only when the host has waited for an event
after it: until then a pinned buffer holds garbage and may not be sent again. So whatever a GPU
would read or write too late fails there, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.port import EngineLostError

logger = logging.getLogger(__name__)

NO_NUMBERS = "the target's logits are not numbers"
"""The error of a row whose logits have a NaN, are infinite, or are all minus infinity."""

_GARBAGE = 0x5A
"""The bytes of a pinned buffer on a CPU whose copy is not done."""


def context_error(device: torch.device) -> str:
    """Return the error that every call gets on a device; empty while its context works."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return ""


class _Moment(NamedTuple):
    """A CPU's event: its number and its time."""

    number: int
    time_s: float


class Stream:
    """The order in which a device does what one thread queues."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self._pool: tuple[Any, torch.cuda.Stream] | None = None
        """Memory of all graphs and the stream that they are captured on: cuBLAS keeps a workspace
        for each stream.
        """
        self._entered = 0
        self._queued = self._passed = 0
        self._late: list[tuple[int, Callable[[], object]]] = []
        """On a CPU: copies to the host, by the number of the event after which they are done."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device the current one of this thread: events and kernels of Triton go there."""
        if self.is_cuda:
            with torch.cuda.device(self.device):
                yield
            return
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """As ``current``; raise EngineLostError, beginning with ``name``, in the place of an error
        after which nothing runs in the device's context.
        """
        try:
            with self.current():
                yield
        except Exception as error:
            if why := context_error(self.device):
                raise EngineLostError(
                    f"{name}: CUDA's context on {self.device} is broken: {why}"
                ) from error
            raise

    def event(self) -> Any:
        """Return an event that passes once the device has done everything queued before it."""
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if not self._entered:
            raise RuntimeError(f"{self.device} is not the current device of this thread")
        self._queued += 1
        return _Moment(self._queued, time.perf_counter())

    def wait(self, event: Any) -> None:
        """Wait until an event has passed."""
        if self.is_cuda:
            event.synchronize()
            return
        self._passed = max(self._passed, event.number)
        while self._late and self._late[0][0] <= self._passed:
            self._late.pop(0)[1]()

    def has_passed(self, event: Any) -> bool:
        """Return whether an event has passed, on a CPU by what the host has waited for."""
        return bool(event.query() if self.is_cuda else event.number <= self._passed)

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events that have passed."""
        if self.is_cuda:
            return float(start.elapsed_time(end) / 1e3)
        return float(end.time_s - start.time_s)

    def finish(self) -> None:
        """Wait until the device has done everything."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        else:
            self.wait(_Moment(self._queued, 0.0))

    def copy_back(
        self,
        host: torch.Tensor,  # of any shape [...]
        source: torch.Tensor,  # of the same [...]
    ) -> Any:
        """Copy from the device into a pinned buffer; return the event after which it is there."""
        if self.is_cuda:
            host.copy_(source, non_blocking=True)
            return self.event()
        event, late, there = self.event(), source.numpy().copy(), host.numpy()
        there.fill(_GARBAGE)
        self._late.append((event.number, lambda: np.copyto(there, late)))
        return event

    def copy_there(
        self,
        target: torch.Tensor,  # of any shape [...]
        host: torch.Tensor,  # of the same [...]
    ) -> Any:
        """Copy a pinned buffer to the device; return the event after which it may be written."""
        target.copy_(host, non_blocking=True)
        if not self.is_cuda:
            host.numpy().fill(_GARBAGE)
        return self.event()

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """Capture launches in a CUDA graph and return its replay, which leaves its results in the
        same tensors. They run once before. Raises what they raise, and RuntimeError.

        The replay keeps ``run`` and so the tensors that it reads: a graph knows only their
        addresses. All graphs share their memory: what one leaves there is void once another runs.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        pool, stream = self._pool
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            run()
        return partial(_replay, graph, run)


def _replay(graph: Any, run: Callable[[], object]) -> None:
    del run  # the caller's partial keeps it
    graph.replay()


class Graphs:
    """Launches by their size, each captured once where ``captures``; else they run as they are.

    A size that cannot be captured runs without a graph, is counted by ``count("cuda_graph")``, and
    is tried again when it is next wanted, at most ``MOST_TRIES`` times.
    """

    MOST_TRIES = 3

    def __init__(
        self, stream: Stream, what: str, count: Callable[[str], None] | None = None
    ) -> None:
        self.captures = stream.is_cuda
        self._stream, self._what, self._count = stream, what, count
        self._runs: dict[Any, Callable[[], object]] = {}
        self._failures: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def forget(self, is_void: Callable[[Any], bool]) -> None:
        """Forget the graphs of sizes that are void."""
        for by_size in (self._runs, self._failures):
            for size in [size for size in by_size if is_void(size)]:
                del by_size[size]

    def of(
        self, size: Any, run: Callable[[], object], clear: Callable[[], object]
    ) -> Callable[[], object]:
        """Return what launches a size, whose launches are ``run``. They are captured after
        ``clear``, which leaves nothing to them that is a sequence's.
        """
        if size not in self._runs or 0 < self._failures.get(size, 0) < self.MOST_TRIES:
            self._runs[size] = self._capture(size, run, clear) if self.captures else run
        return self._runs[size]

    def _capture(
        self, size: Any, run: Callable[[], object], clear: Callable[[], object]
    ) -> Callable[[], object]:
        clear()
        try:
            replay = self._stream.capture(run)
        except Exception as error:  # Triton's OutOfResources is neither RuntimeError nor ValueError
            logger.warning("no CUDA graph of %s %s: %s", self._what, size, error)
            self._failures[size] = self._failures.get(size, 0) + 1
            if self._count is not None:
                self._count("cuda_graph")
            return run
        self._failures.pop(size, None)
        return replay


DTYPES: dict[type, torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float32: torch.float32,
}
"""Torch's types of columns."""

Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
"""By name the NumPy type (int64, int32 or float32) and the shape of a column."""


def to_device(
    values: Sequence[Any] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return values [...] on the device. The host does not wait for the copy, nor for what is under
    way before it.
    """
    tensor = torch.tensor(values, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class PinnedColumns:
    """Columns on a device in one piece of memory, so that one copy moves them all.

    The host has two pinned buffers that take turns: one is written while the other's copy is under
    way.
    """

    COPIES = 2

    def __init__(self, shapes: Shapes, stream: Stream) -> None:
        lengths = [int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in shapes.values()]
        ends = list(accumulate(-(-length // 8) * 8 for length in lengths))
        size = max(8, *ends) if ends else 8
        self._stream = stream
        self._device = torch.zeros(size, dtype=torch.uint8, device=stream.device)
        self._hosts = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=stream.is_cuda)
            for _ in range(self.COPIES)
        ]
        self._copied: list[Any] = [None] * self.COPIES
        """The event after which a buffer's last copy is done."""
        self._turn = 0
        places = [
            (name, end - -(-length // 8) * 8, length, kind, shape)
            for (name, (kind, shape)), length, end in zip(
                shapes.items(), lengths, ends, strict=True
            )
        ]

        def views(
            memory: torch.Tensor,  # uint8[size]
        ) -> dict[str, torch.Tensor]:
            return {
                name: memory[begin : begin + length].view(DTYPES[kind]).view(shape)
                for name, begin, length, kind, shape in places
            }

        self.device = views(self._device)
        self._host_views: list[dict[str, npt.NDArray[Any]]] = [
            {name: column.numpy() for name, column in views(host).items()} for host in self._hosts
        ]

    @property
    def host(self) -> dict[str, npt.NDArray[Any]]:
        """The host's columns whose turn it is, to be written; waits for the copy of their last
        turn.
        """
        if (copied := self._copied[self._turn]) is not None:
            self._stream.wait(copied)
        return self._host_views[self._turn]

    def send(self) -> None:
        """Copy the host's columns to the device; the next buffer's turn begins. Raises RuntimeError
        where its last copy is under way.
        """
        self._end_turn(self._stream.copy_there(self._device, self._take()))

    def fetch(self) -> dict[str, npt.NDArray[Any]]:
        """Copy the device's columns to the host's, which are returned: they are there once an event
        after this has passed. The next buffer's turn begins.
        """
        views = self._host_views[self._turn]
        self._end_turn(self._stream.copy_back(self._take(), self._device))
        return views

    def _take(self) -> torch.Tensor:
        copied = self._copied[self._turn]
        if copied is not None and not self._stream.has_passed(copied):
            raise RuntimeError("a pinned buffer is wanted again before its last copy is done")
        return self._hosts[self._turn]

    def _end_turn(self, copied: Any) -> None:
        self._copied[self._turn] = copied
        self._turn = (self._turn + 1) % self.COPIES
