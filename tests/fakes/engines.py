"""Fake engines that do what the product's own fake engine does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from backend.engines.port import Turn
from backend.sequence import Proposal
from backend.sequence import Sequence as TokenSequence
from tests.fakes.fake_engine import FakeEngine


class FaultyEngine(FakeEngine):
    """A fake engine whose pass raises MemoryError whenever ``breaks`` is true of its turns."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.breaks: Callable[[Sequence[Turn]], bool] = lambda turns: False
        self.failed: list[int] = []
        """Number of turns of each pass that raised."""

    def begin(self, turns: Sequence[Turn]) -> None:
        if turns and self.breaks(turns):
            self.failed.append(len(turns))
            raise MemoryError
        super().begin(turns)

    def propose(
        self, text: list[int], sequence: TokenSequence, length: int, most: int
    ) -> tuple[list[int], Proposal]:
        if self.limits.in_target and self.breaks([]):
            raise MemoryError
        return super().propose(text, sequence, length, most)
