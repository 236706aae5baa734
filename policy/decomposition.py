"""Request decomposition (SPIN, arXiv 2503.15921): uneven contexts of an engine that pads, cut into
pieces of one length.

An engine that pads reads max_i n_i cached tokens for each of B rows. Cut into pieces of L tokens it
reads L for each piece, and the pieces' partial outputs are merged exactly by log-sum-exp. The
paper's objective is not public; this is what it says in words:

    least of (L + c) sum_i ceil(n_i / L) over L, and of B max_i n_i uncut

with c the price of merging a piece, in tokens read. Ragged attention reads sum_i n_i anyway: it has
nothing to gain. How contexts are cut depends on nothing else that is chosen, so it is a part of the
step's fixed time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .latency import Predicted, Times
from .plan import IntArray, Outcome, Plan, View
from .problem import StepProblem, predicted_parts


class Pieces(NamedTuple):
    """``piece_tokens`` (0: not cut), the cached tokens that a pass over the batch then reads,
    merging included, and why contexts are not cut (empty: they are).
    """

    piece_tokens: int
    work_tokens: float
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """How plans are executed by an engine that pads (``policy.extensions.Execution``).

    Merging a piece takes as long as reading ``merge_tokens`` cached tokens, as measured; pieces are
    whole KV blocks of ``block_tokens``. Raises ValueError naming the value that is out of range.
    """

    merge_tokens: float
    block_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("merge_tokens", 0), ("block_tokens", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")

    def start(self) -> None:
        """Remember nothing."""

    def prepare(self, problem: StepProblem, view: View, times: Times) -> None:
        """Add what padding and merging take to every verification."""
        context = view.context[view.ready]
        problem.undrafted_s += self._padding_s(times, self.best_piece(context).work_tokens, context)

    def execute(self, plan: Plan, view: View, times: Times, memory: None) -> tuple[Plan, None]:
        """Return the plan with ``Plan.piece_tokens``; ``notes["why_not"]`` says why it has none."""
        del times, memory
        cut = self.best_piece(view.context[view.ready])
        if cut.why_not:
            notes = {**plan.notes, "why_not": {"decomposition": cut.why_not}}
            return replace(plan, notes=notes), None
        return replace(plan, piece_tokens=cut.piece_tokens), None

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the seconds by part, contexts padded or cut as they were."""
        context = view.context[np.isin(view.request, outcome.request)]
        work_tokens = float(len(context) * context.max(initial=0))
        if outcome.piece_tokens:
            pieces = float((-(-context // outcome.piece_tokens)).sum())
            work_tokens = (outcome.piece_tokens + self.merge_tokens) * pieces
        padding_s = self._padding_s(times, work_tokens, context)
        return predicted_parts(times, outcome, view).longer(padding_s)

    def best_piece(self, context: IntArray) -> Pieces:
        """Return the piece for contexts int64[B] (tokens) that is least work.

        Exact: every multiple of a block is looked at. Of equal work the longest piece, and no cut
        before any.
        """
        longest = int(context.max(initial=0))
        padded = float(len(context) * longest)
        length = np.arange(self.block_tokens, longest, self.block_tokens)[::-1]
        if not len(length):
            return Pieces(0, padded, "no context is longer than a block")
        work = (length + self.merge_tokens) * (-(-context // length[:, None])).sum(1)
        best = int(work.argmin())
        if work[best] < padded:
            return Pieces(int(length[best]), float(work[best]))
        return Pieces(0, padded, f"does not pay: {padded / work[best]:.2f}")

    @staticmethod
    def _padding_s(times: Times, work_tokens: float, context: IntArray) -> float:
        """Return how much longer reading so many tokens takes than reading the contexts."""
        return times.context_s * (work_tokens - float(context.sum()))
