"""Tokens of each sequence that an engine which finds KV by content has run."""

from __future__ import annotations

from collections.abc import Iterable

from backend.sequence import Sequence


class Seen:
    """By sequence: a text that was run, and tokens beyond it that were run too; some
    may have been rejected.
    """

    def __init__(self) -> None:
        self._ran: dict[int, tuple[int, list[int]]] = {}

    def ran(self, sequence_id: int, end: int, beyond: list[int]) -> None:
        """Note a turn: the first ``end`` tokens of the text, and those ``beyond``."""
        self._ran[sequence_id] = end, beyond

    def unseen(self, sequence: Sequence) -> int:
        """Return the committed tokens that were not run in the last turn."""
        seen, beyond = self._ran.get(sequence.id, (0, []))
        if sequence.tokens[seen : seen + len(beyond)] == beyond:  # as nearly always
            return len(sequence.tokens) - seen - len(beyond)
        matching = next(
            (
                i
                for i, token in enumerate(beyond)
                if sequence.tokens[seen + i : seen + i + 1] != [token]
            ),
            len(beyond),
        )
        return len(sequence.tokens) - seen - matching

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences."""
        for sequence_id in sequence_ids:
            self._ran.pop(sequence_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._ran.clear()
