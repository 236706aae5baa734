"""One step's share of the work, and how the policy sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from backend.core.in_flight import Submission
from backend.core.session import Session
from backend.engines.port import Engine, KeepsWidth, Turn
from backend.speculation.cycle import Step
from backend.speculation.drafting import Drafting
from policy import IntArray, View


@dataclass(slots=True)
class Batch:
    """The rows that decode (the plan is about them) and the chunks of prompts still in prefill;
    ``width`` as in ``KeepsWidth``.
    """

    decoding: list[Session] = field(default_factory=list)
    prefill: list[Turn] = field(default_factory=list)
    prefill_tokens: int = 0
    prefilling: int = 0
    width: tuple[int, int] = (0, 0)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefill)

    @classmethod
    def of(cls, sessions: Iterable[Session], target: Engine, prefill_chunk_tokens: int) -> Batch:
        """Split requests into decoding rows and prompts, the latter cut to a step's token
        budget.
        """
        batch = cls(width=target.width() if isinstance(target, KeepsWidth) else (0, 0))
        for session in sessions:
            unseen = target.unseen(session.sequence)
            if unseen <= 1:
                batch.decoding.append(session)
                continue
            chunk = min(unseen, prefill_chunk_tokens - batch.prefill_tokens)
            batch.prefilling += 1
            if chunk > 0:
                end = len(session.sequence.tokens) - unseen + chunk
                batch.prefill.append(Turn(session.sequence, end, run=int(chunk == unseen)))
                batch.prefill_tokens += chunk
        return batch

    def view(
        self, drafting: Drafting, k_max: int, needs_offers: Callable[[IntArray], bool]
    ) -> View:
        """Return the decoding rows as the policy sees them.

        Drafts that are not free are asked what they could propose only where the plan for requests
        of these ids ``needs_offers``.
        """
        rows = self.decoding
        numbers = [(s.id, len(s.sequence.tokens), s.remaining, s.group, s.tenant) for s in rows]
        request, context, remaining, group, tenant = np.array(numbers, np.int64).reshape(-1, 5).T
        rests = not needs_offers(request)
        ceiling, unseen = drafting.ceilings(
            [s.sequence for s in rows], [_most(s, k_max) for s in rows], only_free=rests
        )
        return View(
            drafts=drafting.names,
            request=request,
            context=context,
            remaining=remaining,
            ceiling=ceiling,
            catchup=unseen,
            prefill_tokens=self.prefill_tokens,
            prefilling=self.prefilling,
            group=group,
            tenant=tenant,
            control=np.array([s.control for s in rows], np.bool_),
            pass_tokens=self.width[0],
            change_tokens=self.width[1],
        )

    def submission(self, step: Step) -> Submission:
        """Return what is submitted: the decoding rows with their proposals, and chunks of
        prompts.
        """
        step.log.decoding, step.log.prefill_tokens = len(self.decoding), self.prefill_tokens
        step.log.batch_size = len(self.decoding) + len(self.prefill)
        rows = (
            Turn(s.sequence, len(s.sequence.tokens), 1, step.chosen(s.id)) for s in self.decoding
        )
        return Submission(step, [*rows, *self.prefill])


def _most(session: Session, k_max: int) -> int:
    """Return the ceiling on a request's speculation: the last token of ``max_tokens`` is always the
    target's own.
    """
    asked = session.request.num_draft_tokens
    return min(k_max, session.remaining - 1, k_max if asked is None else asked)
