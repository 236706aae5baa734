"""vLLM's adaptive verification: every row drafts the same, and the batch verifies what pays.

``vllm/v1/worker/gpu/spec_decode/adaptive_verification.py`` (read at 057929c) with the acceptance
estimator next to it (165b366), ``enable_adaptive_verification`` of vLLM 0.33.0, off by default:

- The draft proposes K tokens for every row, even where none will be verified.
- A token's score is the chance that the whole path to it is accepted. The budget is the number of
  tokens with the most (rows + the sum of the best scores) / (drafting + verification), in seconds
  of tables profiled at the start; the tokens of the highest score in the whole batch get it.
- No price of a queue, no other draft, no other length.

Every difference helps it. Chances come from this project's calibration of confidences, which learns
from the first step; theirs is a logistic regression by position, refitted every 100 steps after 300
of full verification. The budget reads this step's confidences, theirs those of two steps before.
Times count the context; theirs are profiled at one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from policy.baselines import Baseline, same_for_all
from policy.latency import LatencyModel
from policy.plan import DraftNodes, FloatArray, IntArray, Outcome, Plan, Policy, View
from policy.trim import Calibration


class VerificationState(NamedTuple):
    """The worth of confidences."""

    calibration: Calibration


class AdaptiveVerification(Policy[VerificationState]):
    """One draft and one length for every row; of their tokens the most profitable are verified."""

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        k_max: int,
        *,
        draft: str,
        length: int,
    ) -> None:
        """Raise ValueError for an unknown draft."""
        if draft not in drafts:
            raise ValueError(f"draft must be one of {drafts}, got {draft!r}")
        self.draft, self.length = draft, length
        self._drafts, self._latency = len(drafts), latency
        self._draft = latency.drafts[drafts.index(draft)]

    def start(self) -> VerificationState:
        return VerificationState(Calibration.none(self._drafts))

    def plan(
        self, view: View, state: VerificationState, now: float, rng: Rng
    ) -> tuple[Plan, VerificationState]:
        return same_for_all(view, self.draft, self.length), state

    def trim(
        self, view: View, plan: Plan, drafted: DraftNodes, state: VerificationState
    ) -> IntArray:
        rows = len(view)
        likely = state.calibration.probability(drafted.draft, drafted.sampled, drafted.confidence)
        best = (-likely).argsort(kind="stable")
        tokens = rows + np.concatenate([[0.0], likely[best].cumsum()])
        budget = int(np.argmax(tokens / self._seconds(view, plan, len(likely))))
        return np.bincount(drafted.row[best[:budget]], minlength=rows).astype(np.int64)

    def observe(self, outcome: Outcome, state: VerificationState, now: float) -> VerificationState:
        nodes = outcome.nodes
        columns = outcome.rows.draft[nodes.row], nodes.sampled, nodes.confidence, nodes.accepted
        return VerificationState(state.calibration.learnt(*columns))

    def _seconds(self, view: View, plan: Plan, nodes: int) -> FloatArray:
        """Return the seconds of the step by how many of its nodes are verified, 0 and up."""
        rows, context = len(view), int(view.context.sum())
        target, latency = self._latency.target, self._latency
        drafting_s = int(plan.length.max(initial=0)) * self._draft.seconds(rows, rows, context)
        same_s = target.row_s * rows + target.context_s * context + drafting_s
        same_s += latency.overhead_s + latency.speculation_s
        node_s = target.node_context_s * context / max(rows, 1)
        base_s = target.base(view.prefill_tokens + rows + np.arange(nodes + 1))
        return base_s + same_s + node_s * np.arange(nodes + 1)


ENTRIES = {
    "verification": Baseline.by_path(
        AdaptiveVerification,
        "adaptive verification",
        needs=("draft", "length"),
        colour="#00808a",
        marker="s",
    ),
}
