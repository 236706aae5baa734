"""The drafts' phase of a step: what each could propose, and the proposals that the plan asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from backend.ports import Completion, Engine, Proposal, Sequence, Turn
from backend.stats import StepStats
from backend.step_log import StepLog
from policy import IntArray, Plan, View

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

    def __init__(self, drafts: Seq[Engine], stats: StepStats, clock: Callable[[], float], *, most_nodes: int = 0) -> None:
        """``most_nodes`` is the most tokens of a tree that the target can verify and has room for in KV; 0: it verifies chains only."""
        self.names = tuple(draft.name for draft in drafts)
        self.engines = tuple(drafts)
        self._stats = stats
        self._clock = clock
        self._most_nodes = most_nodes
        self._resting_until_s = dict.fromkeys(self.names, float("-inf"))

    def with_engines(self, drafts: Seq[Engine]) -> Drafting:
        """Return the same with these drafts."""
        return Drafting(drafts, self._stats, self._clock, most_nodes=self._most_nodes)

    def ceilings(self, sequences: Seq[Sequence], most: Seq[int], *, only_free: bool = False) -> tuple[IntArray, IntArray]:
        """Return by sequence and draft the tokens that it could propose now, at most ``most`` of each sequence, and the committed ones that
        it has not seen, int64[n, D] each; 0 of both from a draft that rests, or is not free where ``only_free`` are asked.
        """
        now, asked = self._clock(), [(sequence, k) if k > 0 else None for sequence, k in zip(sequences, most, strict=True)]
        ceiling, unseen = np.zeros((2, len(sequences), len(self.engines)), np.int64)
        for d, draft in enumerate(self.engines):
            if self._resting_until_s[draft.name] <= now and (draft.limits.free or not only_free):
                ceiling[:, d] = [0 if pair is None else draft.available(*pair) for pair in asked]
                unseen[:, d] = [0 if pair is None else draft.unseen(pair[0]) for pair in asked]
        return ceiling, unseen

    def propose(self, sequences: Seq[Sequence], view: View, plan: Plan, log: StepLog) -> dict[int, Proposals]:
        """Return the proposals by sequence id; row i of view and plan belongs to ``sequences[i]``."""
        proposals = {sequence.id: Proposals() for sequence in sequences}
        seconds: dict[int, Proposal] = {}
        widths, second_draft, second_length = self._shape(sequences, plan)
        wanted = set(plan.draft[plan.length > 0].tolist()) | (set() if second_draft is None else set(second_draft.tolist()))
        for d, draft in enumerate(self.engines):
            if d not in wanted and not draft.limits.free:
                continue
            chosen = _asked(sequences, plan.draft, plan.length, d)
            second = {} if second_draft is None or second_length is None else _asked(sequences, second_draft, second_length, d)
            asked = chosen | second
            runs = {s.id: int(k) for s, k in zip(sequences, view.ceiling[:, d], strict=True) if k > 0} if draft.limits.free else asked
            turns = [
                Turn(s, len(s.tokens), run=runs[s.id], keep_probs=True, widths=widths.get(s.id, ()) if s.id in chosen else ())
                for s in sequences
                if s.id in runs
            ]
            for completion in self._complete(draft, turns, log):
                row, length = proposals[completion.sequence_id], asked.get(completion.sequence_id)
                row.scored += [(draft.name, *chain) for chain in completion.scored]
                if length is None:
                    row.unused.append(Proposal(draft.name, completion.tokens))
                    continue
                proposal = Proposal(draft.name, completion.tokens[:length], completion.probs, completion.siblings[:length])
                if completion.sequence_id in chosen:
                    row.chosen = proposal
                else:
                    seconds[completion.sequence_id] = proposal
        for sequence_id, proposal in seconds.items():
            first = proposals[sequence_id].chosen
            proposals[sequence_id].chosen = replace(first, others=(proposal,)) if first else proposal
        return proposals

    def _shape(self, sequences: Seq[Sequence], plan: Plan) -> tuple[dict[int, list[int]], IntArray | None, IntArray | None]:
        """Return the plan's widths by sequence id, and its second drafts and lengths, without those of rows with too many nodes."""
        if plan.shape is None or (plan.shape.width is None and plan.shape.second_length is None):
            return {}, None, None
        fits = plan.shape.proposed(plan.length) <= np.maximum(plan.length, self._most_nodes)
        for _ in range(int((~fits).sum())):
            self._stats.fallback("tree_too_large")
        width, second_length = plan.shape.width, plan.shape.second_length
        widths = {}
        if width is not None:
            rows = np.flatnonzero(fits & (width.max(1) > 1)).tolist()
            widths = {sequences[row].id: width[row, : plan.length[row]].tolist() for row in rows}
        return widths, plan.shape.second_draft, None if second_length is None else np.where(fits, second_length, 0)

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Make every draft forget sequences."""
        for draft in self.engines:
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


def _asked(sequences: Seq[Sequence], draft: IntArray, length: IntArray, column: int) -> dict[int, int]:
    """Return by sequence id the tokens (above 0) that are asked of one draft; ``draft`` and ``length`` as in ``Plan``."""
    return {s.id: k for s, k in zip(sequences, np.where(draft == column, length, 0).tolist(), strict=True) if k > 0}
