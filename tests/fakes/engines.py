"""Fake engines that do what the product's own fake engine does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backend.engines.fake import FakeEngine
from backend.engines.port import Completion, Turn


class FaultyEngine(FakeEngine):
    """A fake engine whose pass raises MemoryError whenever ``breaks`` is true of its turns."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.breaks: Callable[[Sequence[Turn]], bool] = lambda turns: False
        self.failed: list[int] = []
        """Number of turns of each pass that raised."""
        self._waiting: list[Turn] = []

    def submit(self, turns: Sequence[Turn]) -> None:
        self._waiting += turns

    def poll(self, timeout_s: float) -> list[Completion]:
        turns, self._waiting = self._waiting, []
        if turns and self.breaks(turns):
            self.failed.append(len(turns))
            raise MemoryError
        super().submit(turns)
        return super().poll(timeout_s)

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        ids = set(sequence_ids)
        self._waiting = [turn for turn in self._waiting if turn.sequence.id not in ids]
        super().cancel(ids)
