"""Streams of a device that is not there: who may touch which memory after whom, as CUDA has it.

An operation sees what was queued before it on its own stream, and on others up to the events that
its stream has waited for. That the host has waited gives no order here (it would where one thread
has told the other), so that whatever crosses must have an event.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

DEFAULT = "default"
Event = tuple[str, int]
"""A stream, and how many operations it had been given."""


class PretendStreams:
    """Every thread is on ``DEFAULT`` until it enters another."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._given: Counter[str] = Counter()
        self._waited: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._written: dict[int, Event] = {}
        self._read: dict[int, dict[str, int]] = {}

    @property
    def current(self) -> str:
        """The calling thread's stream."""
        return getattr(self._here, "stream", DEFAULT)

    def event(self) -> Event:
        """Return a mark behind all that the current stream has been given."""
        return self.current, self._given[self.current]

    @contextmanager
    def on(self, stream: str, event: Event) -> Iterator[None]:
        """Queue the body's operations on a stream, behind an event."""
        other, number = event
        self._waited[stream][other] = max(number, self._waited[stream][other])
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def queue(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> set[str]:
        """Queue an operation; return the streams that it should have waited for."""
        stream = self.current
        self._given[stream] += 1
        read, written = memories(reads), memories(writes)
        before = [self._written[place] for place in read | written if place in self._written]
        before += [event for place in written for event in self._read.get(place, {}).items()]
        for place in read:
            self._read.setdefault(place, {})[stream] = self._given[stream]
        for place in written:
            self._written[place] = stream, self._given[stream]
        return {
            other
            for other, number in before
            if other != stream and number > self._waited[stream][other]
        }

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that memory is the current stream's and new, whoever had it before."""
        self._given[self.current] += 1
        for place in memories(tensors):
            self._read[place] = {}
            self._written[place] = self.event()


def memory(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's memory from others'; all views of it have the same."""
    return tensor.as_subclass(torch.Tensor).untyped_storage().data_ptr()


def memories(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the memory of tensors; those without elements have none, and share address 0."""
    return {memory(tensor) for tensor in tensors} - {0}
