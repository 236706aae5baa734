"""One step's share of the work, and how the policy sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from backend.drafting import Drafting
from backend.ports import Engine, Turn
from backend.request import SamplingParams
from backend.session import Session
from policy import Rule, View


@dataclass(slots=True)
class Batch:
    """The rows that decode (the plan is about them) and the chunks of prompts still in prefill."""

    decoding: list[Session] = field(default_factory=list)
    prefill: list[Turn] = field(default_factory=list)
    prefill_tokens: int = 0
    prefilling: int = 0

    @classmethod
    def of(cls, sessions: Iterable[Session], target: Engine, prefill_chunk_tokens: int) -> Batch:
        """Split requests into decoding rows and prompts, the latter cut to a step's token budget."""
        batch = cls()
        for session in sessions:
            unseen = target.unseen(session.sequence)
            chunk = min(unseen, prefill_chunk_tokens - batch.prefill_tokens)
            if unseen <= 1:
                batch.decoding.append(session)
                continue
            batch.prefilling += 1
            if chunk > 0:
                end = len(session.sequence.tokens) - unseen + chunk
                batch.prefill.append(Turn(session.sequence, end, run=int(chunk == unseen)))
                batch.prefill_tokens += chunk
        return batch

    def view(self, drafting: Drafting, k_max: int, queued: int) -> View:
        """Return the decoding rows as the policy sees them; ``queued`` requests wait for admission."""
        rows = self.decoding
        choices = np.array([drafting.ceilings(s.sequence, _most(s, k_max)) for s in rows], np.int64)
        choices = choices.reshape(len(rows), len(drafting.names), 2)
        return View(
            drafts=drafting.names,
            request=np.array([s.id for s in rows], np.int64),
            context=np.array([len(s.sequence.tokens) for s in rows], np.int64),
            remaining=np.array([s.remaining for s in rows], np.int64),
            ceiling=choices[:, :, 0],
            catchup=choices[:, :, 1],
            weight=np.ones(len(rows)),
            rule=np.array([rule_of(s.sequence.sampling) for s in rows], np.int64),
            ready=np.ones(len(rows), np.bool_),
            prefill_tokens=self.prefill_tokens,
            queued=queued,
            prefilling=self.prefilling,
            group=np.array([s.group for s in rows], np.int64),
            control=np.array([s.control for s in rows], np.bool_),
        )


def rule_of(sampling: SamplingParams) -> Rule:
    """Return the rule by which a request's proposals are accepted."""
    if sampling.greedy:
        return Rule.GREEDY
    return Rule.COUPLED if sampling.coupled else Rule.SAMPLED


def _most(session: Session, k_max: int) -> int:
    """Return the ceiling on a request's speculation: the last token of ``max_tokens`` is always the target's own."""
    asked = session.request.num_draft_tokens
    return min(k_max, session.remaining - 1, k_max if asked is None else asked)
