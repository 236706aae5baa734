"""How long each request's draft has been right: the evidence of drafts that show none of their
own.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from backend.sequence import Sequence
from backend.speculation.step_log import LoggedRow
from policy import IntArray
from policy.streaks import bin_of_streak, streak_after


class Streaks:
    """Keeps of each request which draft proposed in its last step, and that draft's streak."""

    def __init__(self, columns: Iterable[int]) -> None:
        """``columns`` are those of the drafts that show no evidence of their own."""
        self._columns = frozenset(columns)
        self._streaks: dict[int, tuple[int, int]] = {}

    def note(self, row: LoggedRow) -> None:
        """Take up what the last step did for a request."""
        if row.draft not in self._columns:
            self._streaks.pop(row.request, None)
            return
        draft, streak = self._streaks.get(row.request, (row.draft, 0))
        before = streak if draft == row.draft else 0
        after = streak_after(before, row.accepted, row.scored, row.emitted)
        self._streaks[row.request] = row.draft, after

    def show(self, sequences: Seq[Sequence], ceiling: IntArray, evidence: IntArray) -> None:
        """Write the bins of drafts that can propose, int64[n, D]."""
        if not self._streaks:
            return
        for row, sequence in enumerate(sequences):
            last = self._streaks.get(sequence.id)
            if last is not None and ceiling[row, last[0]] > 0:
                evidence[row, last[0]] = bin_of_streak(last[1])

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget requests."""
        for sequence_id in sequence_ids:
            self._streaks.pop(sequence_id, None)
