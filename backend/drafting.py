"""The drafts' phase of a step: what each could propose, and the proposals that the plan asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from backend.ports import Completion, Engine, Proposal, Sequence, Turn
from backend.stats import StepStats
from backend.step_log import StepLog
from policy import Plan, View

logger = logging.getLogger(__name__)

COOLDOWN_S = 10.0
"""How long a draft that raised is left out."""


@dataclass(slots=True)
class Proposals:
    """One request's proposals in one step: the one to verify, and those of free drafts that are only scored.

    ``scored`` are (draft, accepted, length) of chains that a draft which has caught up would have made of earlier tokens.
    """

    chosen: Proposal | None = None
    unused: list[Proposal] = field(default_factory=list)
    scored: list[tuple[str, int, int]] = field(default_factory=list)


class Drafting:
    """Runs the drafts. A draft that fails costs a step its speculation, never a request."""

    def __init__(self, drafts: Seq[Engine], stats: StepStats, clock: Callable[[], float]) -> None:
        self.names = tuple(draft.name for draft in drafts)
        self._drafts = list(drafts)
        self._stats = stats
        self._clock = clock
        self._resting_until_s = dict.fromkeys(self.names, float("-inf"))

    def ceilings(self, sequence: Sequence, most: int) -> list[tuple[int, int]]:
        """Return, draft by draft, (tokens it could propose now, at most ``most``; committed tokens it has not seen)."""
        now = self._clock()
        return [
            (draft.available(sequence, most), draft.unseen(sequence)) if most > 0 and self._resting_until_s[draft.name] <= now else (0, 0)
            for draft in self._drafts
        ]

    def propose(self, sequences: Seq[Sequence], view: View, plan: Plan, log: StepLog) -> dict[int, Proposals]:
        """Return the proposals by sequence id; row i of view and plan belongs to ``sequences[i]``."""
        proposals = {sequence.id: Proposals() for sequence in sequences}
        for d, draft in enumerate(self._drafts):
            chosen = {s.id: int(k) for s, k in zip(sequences, np.where(plan.draft == d, plan.length, 0), strict=True) if k > 0}
            runs = {s.id: int(k) for s, k in zip(sequences, view.ceiling[:, d], strict=True) if k > 0} if draft.limits.free else chosen
            turns = [Turn(s, len(s.tokens), run=runs[s.id], keep_probs=True) for s in sequences if s.id in runs]
            for completion in self._complete(draft, turns, log):
                row, length = proposals[completion.sequence_id], chosen.get(completion.sequence_id)
                if length is None:
                    row.unused.append(Proposal(draft.name, completion.tokens))
                else:
                    row.chosen = Proposal(draft.name, completion.tokens[:length], completion.probs)
                row.scored += [(draft.name, *chain) for chain in completion.scored]
        return proposals

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Make every draft forget sequences."""
        for draft in self._drafts:
            draft.cancel(sequence_ids)

    def _complete(self, draft: Engine, turns: list[Turn], log: StepLog) -> list[Completion]:
        """Run turns until all are complete, since verification needs them all; drop those that failed, with a metric."""
        if not turns:
            return []
        completions: list[Completion] = []
        try:
            with log.part(f"draft:{draft.name}"):
                draft.submit(turns)
                while len(completions) < len(turns):
                    completions += draft.poll(timeout_s=1.0)
        except Exception:
            logger.exception("draft %s failed; it rests for %s s", draft.name, COOLDOWN_S)
            self._stats.fallback("draft_error")
            self._resting_until_s[draft.name] = self._clock() + COOLDOWN_S
            draft.cancel([turn.sequence.id for turn in turns])
            return []
        for completion in completions:
            if completion.error is not None:
                logger.error("draft %s, sequence %d: %s", draft.name, completion.sequence_id, completion.error)
                self._stats.fallback("draft_error")
        return [completion for completion in completions if completion.error is None and completion.tokens]
