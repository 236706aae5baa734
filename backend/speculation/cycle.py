"""A loop's work with the policy around each pass of its target: propose before, learn after."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from backend.engines.port import Engine
from backend.ops.stats import StepStats
from backend.sequence import Proposal, Sequence
from backend.speculation.drafting import Drafting, Proposals
from backend.speculation.policy_runner import PolicyRunner
from backend.speculation.step_log import StepLog
from policy import NO_DRAFT, AnyPolicy, BoolArray, Plan, View


@dataclass(slots=True)
class DecodeStep:
    """A step of a loop, from its plan to what the policy learns from it. Several may be open."""

    view: View
    plan: Plan  # of the rows of ``view``
    log: StepLog
    proposals: dict[int, Proposals]  # by sequence id
    waiting: set[int] = field(default_factory=set)
    """Sequences that are not verified: the host drafts for them after their turn in flight."""

    def proposal_of(self, sequence_id: int) -> Proposal | None:
        """Return what the target verifies for a sequence."""
        row = self.proposals.get(sequence_id)
        return None if row is None else row.to_verify

    def take(self, sequence_id: int, drafted: Proposal, nodes: int) -> None:
        """Note what a draft in the target proposed; the first ``nodes`` of it were verified."""
        row = self.proposals[sequence_id]
        row.drafted, row.to_verify = drafted, drafted.first(nodes) if nodes else None


class Cycle:
    """Plans, drafts, chooses what is verified, and learns: the part of a serving loop that is the
    same in ours and in other engines'. For the loop's thread.
    """

    def __init__(
        self,
        drafting: Drafting,
        policy: AnyPolicy,
        stats: StepStats,
        clock: Callable[[], float],
        seed: int = 0,
    ) -> None:
        self.drafting = drafting
        self.runner = PolicyRunner(policy, drafting.names, stats, clock, seed)
        self.trims = True  # else every drafted node is verified
        self._finished: list[int] = []
        self._next_log: StepLog | None = None  # starts when the last step of a busy loop ended
        self._last_end_s = 0.0  # when the last step ended

    def change(self, drafts: Seq[Engine], policy: AnyPolicy, state: Any) -> None:
        """Draft and plan with these from now on; call it while no step is open."""
        self.drafting = self.drafting.with_engines(drafts)
        self.runner.change(policy, state, self.drafting.names)
        self._next_log = None

    def begin(self) -> StepLog:
        """Return the log of a new step. In a busy loop its clock started when the last step
        ended.
        """
        log, self._next_log = self._next_log or StepLog(self.drafting.names), None
        return log

    def pause(self) -> None:
        """Let the next step's clock start with ``begin``: the loop has nothing to do until then."""
        self._next_log = None

    def propose(
        self,
        sequences: Seq[Sequence],
        view: View,
        plan: Plan,
        log: StepLog,
        *,
        following: Collection[int] = (),
    ) -> DecodeStep:
        """Draft as planned, and choose the nodes that the target verifies. Row i of the view
        belongs to ``sequences[i]``.

        The text of those with ids in ``following`` is not known yet: where they are planned for a
        draft of the host, they wait (``DecodeStep.waiting``).
        """
        waiting = set[int]()
        if following:
            follows = np.array([sequence.id in following for sequence in sequences], np.bool_)
            view, plan, waits = self._look_ahead(view, plan, follows)
            waiting.update(view.request[waits].tolist())
        proposals = self.drafting.propose(sequences, view, plan, log)
        if (drafted := self.drafting.nodes(sequences, proposals)) is not None:
            nodes = [len(drafted.row)] * len(sequences)
            if self.trims:
                with log.part("planning"):
                    nodes = self.runner.trim(view, plan, drafted)
            for sequence, most in zip(sequences, nodes, strict=True):
                row = proposals[sequence.id]
                row.to_verify = self.drafting.choose(row.drafted, most)
        return DecodeStep(view, plan, log, proposals, waiting)

    def _look_ahead(
        self,
        view: View,
        plan: Plan,
        follows: BoolArray,  # [n]
    ) -> tuple[View, Plan, BoolArray]:
        """Return view and plan in which no draft of the host is asked about rows that follow a turn
        in flight, and which of these wait for it.
        """
        by_host = np.array(
            [not draft.limits.in_target for draft in self.drafting.engines] + [False]
        )
        waits = follows & by_host[plan.draft]
        ceiling = np.where(follows[:, None] & by_host[:-1], 0, view.ceiling)
        draft, length = np.where(waits, NO_DRAFT, plan.draft), np.where(waits, 0, plan.length)
        return replace(view, ceiling=ceiling), replace(plan, draft=draft, length=length), waits

    def void(self, step: DecodeStep) -> None:
        """Drop the proposals of a step that the target could not run; drafts on its device rest,
        since it may have failed by them.
        """
        asks = [row.on_device for row in step.proposals.values()]
        self.drafting.rest({ask.draft.name for ask in asks if ask is not None})
        step.proposals.clear()

    def catch_up(self, step: DecodeStep, sequences: Seq[Sequence]) -> None:
        """Ask free drafts what they would have proposed for sequences that were submitted when
        their text was not known. It is now, up to the tokens of the step.
        """
        if sequences:
            remaining = dict(zip(step.view.request.tolist(), step.view.remaining, strict=True))
            most = [int(remaining[sequence.id]) - 1 for sequence in sequences]
            self.drafting.propose_unused(sequences, most, step.proposals, step.log)

    def note_verified(
        self,
        step: DecodeStep,
        sequence: Sequence,
        nodes: int,
        emitted: list[int],
        *,
        control: bool = False,
    ) -> None:
        """Note that the target verified ``nodes`` of a sequence's proposal, and which tokens were
        committed for it; ``control`` as in ``View``.
        """
        log, row = step.log, step.proposals.get(sequence.id) or Proposals()
        sampled = not sequence.sampling.greedy
        evidence = row.evidence
        log.record(sequence.id, row.drafted, nodes, emitted, sampled=sampled, evidence=evidence)
        log.control.append(control)
        for unused in row.unused:
            log.record_free(sequence.id, unused, emitted, evidence)
        if row.scored:
            log.record_scored(sequence.id, row.scored)

    def forget(self, sequence_id: int) -> None:
        """Let the policy forget a request, with what it learns next."""
        self._finished.append(sequence_id)

    def learn(self, step: DecodeStep | None) -> None:
        """Let the policy learn from a step, and count it; None: nothing was verified, and the
        policy only forgets requests.
        """
        log = self.begin() if step is None else step.log
        log.finished, self._finished = self._finished, []
        outcome = log.outcome(self._last_end_s)
        self._last_end_s = perf_counter()
        if step is None:
            if log.finished:
                self.runner.observe(outcome)
            return
        outcome.view, outcome.plan = step.view, step.plan
        self.drafting.weigh(log, step.plan.price)
        self._next_log = StepLog(self.drafting.names)
        with self._next_log.part("learning"):
            self.runner.observe(outcome)
        self.runner.metrics.step(step.plan, outcome, self.drafting.names, log.control)
