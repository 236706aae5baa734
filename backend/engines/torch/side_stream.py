"""A CUDA stream beside the one that all other work of the process is queued on: what is on both
runs side by side.

Torch's streams do not wait for the default one by themselves (they are non-blocking), so who reads
across says what to wait for: an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class SideStream:
    """One stream of a device, for the work of one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def behind(self) -> AbstractContextManager[None]:
        """Return what puts its body's work on the stream, in whatever thread, behind all that the
        caller's stream has been given by now.

        The device waits, not the host; at its end the host does, until the body's work has run.
        Hence what the body reads of another stream's needs no ``record_stream``: it lives for as
        long as somebody holds it until then, and its memory is given to nobody else.
        """
        return self._running(torch.cuda.current_stream(self._device).record_event())

    @contextmanager
    def _running(self, queued: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(queued)
            try:
                yield
            finally:
                self._stream.synchronize()
