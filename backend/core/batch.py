"""One step's share of the work, and how the policy sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from backend.core.in_flight import InFlightQueue, Submission
from backend.core.session import Session
from backend.engines.port import AFTER, Engine, KeepsWidth, LooksAhead, Turn
from backend.speculation.cycle import DecodeStep
from backend.speculation.drafting import Drafting
from policy import IntArray, View


@dataclass(slots=True)
class Batch:
    """The rows that decode (the plan is about them) and the chunks of prompts still in prefill;
    ``width`` as in ``KeepsWidth``.
    """

    decoding: list[Session] = field(default_factory=list)
    following: set[int] = field(default_factory=set)
    """Sessions of ``decoding`` whose turn follows one in flight."""
    prefill: list[Turn] = field(default_factory=list)
    prefill_tokens: int = 0
    prefilling: int = 0
    width: tuple[int, int] = (0, 0)
    states: bool = True
    """Whether any draft reads the target's states of the step."""

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefill)

    @classmethod
    def of(
        cls,
        sessions: Iterable[Session],
        in_flight: InFlightQueue,
        target: Engine,
        prefill_chunk_tokens: int,
    ) -> Batch:
        """Split requests into decoding rows and prompts, the latter cut to a step's token budget;
        leave out those that need the host after their turn in flight.
        """
        batch = cls(width=target.width() if isinstance(target, KeepsWidth) else (0, 0))
        ahead = target if isinstance(target, LooksAhead) else None
        for session in sessions:
            last = in_flight.turn(session.id) if in_flight else None
            if last is None:
                unseen = target.unseen(session.sequence)
            elif last.run == 0:
                unseen = len(session.sequence.tokens) - last.end
            elif session.remaining > 1 and ahead and ahead.can_follow(session.sequence):
                unseen = 0
                batch.following.add(session.id)
            else:
                continue
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
        self, drafting: Drafting, k_max: int, needs_ceilings: Callable[[IntArray], bool]
    ) -> View:
        """Return the decoding rows as the policy sees them. A row that follows a turn in flight is
        as it was before that turn, which emits a token at least.

        Drafts are asked what they could propose where the plan for requests of these ids int64[n]
        ``needs_ceilings``, and now and then where it does not (``Drafting.ceilings``).
        """
        rows = self.decoding
        tokens_left = [s.remaining - (s.id in self.following) for s in rows]
        numbers = [
            (s.id, len(s.sequence.tokens), tokens, s.tenant)
            for s, tokens in zip(rows, tokens_left, strict=True)
        ]
        request, context, remaining, tenant = np.array(numbers, np.int64).reshape(-1, 4).T
        is_plain = not needs_ceilings(request)
        self.states = drafting.reads_states(is_plain=is_plain)
        most = [_most(s, k_max, tokens) for s, tokens in zip(rows, tokens_left, strict=True)]
        ceiling, unseen, evidence = drafting.ceilings(
            [s.sequence for s in rows], most, is_plain=is_plain
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
            tenant=tenant,
            sampled=np.array([not s.sequence.sampling.greedy for s in rows], np.bool_),
            evidence=evidence,
            control=np.array([s.control for s in rows], np.bool_),
            pass_tokens=self.width[0],
            change_tokens=self.width[1],
        )

    def submission(self, step: DecodeStep) -> Submission:
        """Return what is submitted: the decoding rows with their proposals, and chunks of
        prompts.
        """
        rows = [self._turn(s, step) for s in self.decoding if s.id not in step.waiting]
        prompts = [replace(turn, states=self.states) for turn in self.prefill]
        step.log.decoding, step.log.prefill_tokens = len(rows), self.prefill_tokens
        step.log.batch_size = len(rows) + len(prompts)
        return Submission(step, {turn.sequence.id: turn for turn in (*rows, *prompts)})

    def _turn(self, session: Session, step: DecodeStep) -> Turn:
        sequence, row = session.sequence, step.proposals[session.id]
        end = AFTER if session.id in self.following else len(sequence.tokens)
        on_device = row.on_device
        return Turn(sequence, end, 1, row.to_verify, device_proposal=on_device, states=self.states)


def _most(session: Session, k_max: int, remaining: int) -> int:
    """Return the ceiling on a request's speculation: the last token of ``max_tokens`` is always the
    target's own.
    """
    limit = session.request.num_draft_tokens
    return min(k_max, remaining - 1, k_max if limit is None else limit)
