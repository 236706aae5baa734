"""From a view of the batch to a step as numbers, and from a step as it was executed back to what it should have taken."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .correction import Target
from .goodput import Choice, StepProblem, no_speculation
from .latency import FIRST_DRAFT, OVERHEAD, VERIFY, LatencyModel
from .plan import BoolArray, FloatArray, IntArray, Outcome, Ran, View


class Bounds(NamedTuple):
    """``k_max`` tokens a row, and the most steps over which a catch-up is spread."""

    k_max: int
    horizon_steps: float


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Rows of the view whose choice is not the planner's; it is taken as it is and costs what it costs.

    ``tokens`` are proposed, ``expected_tokens`` is what they are expected to emit. Of these rows,
    those ``flying`` bool[rows] (None: none) are in flight in the target's batch: they hold their
    tokens there, and were drafted for earlier.
    """

    rows: IntArray
    choice: Choice
    tokens: int = 0
    expected_tokens: float = 0.0
    flying: BoolArray | None = None

    @classmethod
    def of(cls, view: View, rows: IntArray, choice: Choice, hazard: FloatArray) -> Given:
        """Return the rows with what ``hazard`` float64[rows, drafts, positions] lets expect of them."""
        emitted = _tokens_by_row(hazard, choice)
        flying = None if view.flying is None else ~view.ready[rows]
        return cls(rows, choice, int(choice.length.sum()), float(emitted.sum()), flying)

    def part(self, flying: bool) -> tuple[IntArray, Choice]:
        """Return the rows that are in flight, or those that are not, and their choice."""
        if self.flying is None:
            return (self.rows[:0], no_speculation(0)) if flying else (self.rows, self.choice)
        some = self.flying == flying
        return self.rows[some], Choice(self.choice.draft[some], self.choice.length[some])

    def occupancy(self, view: View, k_max: int) -> IntArray | None:
        """Return the tokens in the drafts' forwards, int64[drafts, k_max], as ``StepProblem.given``; None when there are none."""
        rows, (draft, length) = self.part(flying=False)
        if not length.any() or not k_max:
            return None
        tokens = np.zeros((len(view.drafts), k_max), np.int64)
        for d in set(draft[length > 0].tolist()):
            group = (draft == d) & (length > 0)
            tokens[d] = (length[group, None] > np.arange(k_max)).sum(0)
            tokens[d, 0] = int(np.clip(view.catchup[rows[group], d], 1, 2).sum())
        return tokens


NOTHING_GIVEN = Given(np.zeros(0, np.int64), no_speculation(0))


def step_problem(
    latency: LatencyModel,
    correction: FloatArray,
    view: View,
    rows: IntArray,
    hazard: FloatArray,
    given: Given,
    bounds: Bounds,
) -> StepProblem:
    """Return the choice that these rows of the view have beside what is given; ``hazard`` float64[rows, drafts, positions].

    Beside rows in flight, drafting is priced by the share of the rows that wait for it: the target verifies the others meanwhile, and
    their own drafting, by the same share, was before. In the mean over a round of all rows that is the step's time, and where a draft's
    forward takes as long for few rows as for many, a row pays what it would pay in a batch that drafts at once.
    """
    n, everyone = len(rows), len(rows) + len(given.rows)
    context, remaining = view.context.take(rows), view.remaining.take(rows)
    ceiling, catchup = view.ceiling.take(rows, 0).T.copy(), view.catchup.take(rows, 0).T.copy()  # rows lie together
    ceiling = np.minimum(ceiling, np.minimum(remaining - 1, bounds.k_max))
    k_max = ceiling.item(ceiling.argmax()) if ceiling.size else 0
    share = 1 - len(given.part(flying=True)[0]) / max(everyone, 1)
    target, drafts, scale = latency.target, latency.stack, share * correction[FIRST_DRAFT:, None]
    verify_scale, (overhead_s, speculation_s) = correction.item(VERIFY), _fixed_s(latency, correction, view, given, share)
    base = view.prefill_tokens + everyone + given.tokens
    verify_s = target.run(base, n * k_max + 1) if base else np.zeros(1)
    context_tokens = float(np.add.reduce(context)) + (float(view.context[given.rows].sum()) if everyone > n else 0.0)
    verify_s = verify_scale * verify_s + (verify_scale * (everyone * target.row_s + context_tokens * target.context_s) + overhead_s)
    catchup = np.maximum(catchup, 1)
    first_tokens = np.minimum(catchup, 2)  # a chain accepted whole leaves two tokens unseen: no switch yet
    forward_s = scale * drafts.run(max(2 * everyone, 2) + 1)
    forward_s[:, 0] = 0.0
    return StepProblem(
        gains(hazard, ceiling, k_max),
        ceiling,
        n + given.expected_tokens,
        verify_s,
        speculation_s,
        forward_s,
        first_tokens,
        scale * (drafts.row_s[:, None] + drafts.context_s[:, None] * context),
        scale * drafts.beyond_two(catchup),
        np.minimum(np.maximum(remaining / 2, 1.0), bounds.horizon_steps),
        given.occupancy(view, k_max),
        view.cap_s,
    )


def _fixed_s(latency: LatencyModel, correction: FloatArray, view: View, given: Given, share: float) -> tuple[float, float]:
    """Return the seconds that a step has whatever is chosen, verification apart, and those once any of ``share`` of its rows speculates."""
    scale, drafts_scale = correction.item(OVERHEAD), correction[FIRST_DRAFT:]
    overhead_s, speculation_s = scale * latency.overhead_s, scale * latency.speculation_s
    now, flown = given.part(flying=False), given.part(flying=True)
    if flown[1].length.any():
        overhead_s += (1 - share) * (speculation_s + float(drafting_s(latency, view, *flown) @ drafts_scale))
    if not now[1].length.any():
        return overhead_s, share * speculation_s
    return overhead_s + share * (speculation_s + float(drafting_s(latency, view, *now) @ drafts_scale)), 0.0


def gains(hazard: FloatArray, ceiling: IntArray, k_max: int) -> FloatArray:
    """Return the survival float64[positions, drafts, rows], 0 beyond the ceilings."""
    gain = hazard[:, :, :k_max].transpose(2, 1, 0).copy()
    for before, at in pairwise(gain):
        np.multiply(before, at, out=at)
    if ceiling.size and ceiling.item(ceiling.argmin()) < k_max:
        gain *= np.arange(k_max)[:, None, None] < ceiling
    return gain


def extra_prefill_s(latency: LatencyModel, correction: FloatArray, view: View, tokens: int) -> float:
    """Return how much longer a step of so many other tokens takes for its prefill tokens."""
    if not view.prefill_tokens:
        return 0.0
    with_prefill, without = latency.target.base(np.array([view.prefill_tokens + tokens, tokens]))
    return float(correction[VERIFY] * (with_prefill - without))


def chains_s(latency: LatencyModel, correction: FloatArray, view: View, choice: Choice) -> float:
    """Return the seconds of a step of all rows of the view with these chains, without prompts, every catch-up whole."""
    n, total = len(view), int(np.add.reduce(choice.length))
    seconds = correction.item(VERIFY) * latency.target.seconds(n + total, n, int(np.add.reduce(view.context)))
    seconds += correction.item(OVERHEAD) * (latency.overhead_s + latency.speculation_s * (total > 0))
    return seconds + float(drafting_s(latency, view, np.arange(n), choice) @ correction[FIRST_DRAFT:])


def drafting_s(latency: LatencyModel, view: View, rows: IntArray, choice: Choice) -> FloatArray:
    """Return the uncorrected seconds of every draft's forwards, float64[drafts], when ``rows`` of the view propose as chosen."""
    used = choice.length.nonzero()[0]
    if not len(used):
        return np.zeros(len(latency.drafts))
    draft, length, rows, stack = choice.draft[used], choice.length[used], rows[used], latency.stack
    member = (draft[:, None] == np.arange(len(latency.drafts))).astype(np.float64)
    alive = (np.arange(length.item(length.argmax()))[:, None] < length).astype(np.float64)
    alive[0] = np.maximum(view.catchup[rows, draft], 1)
    tokens = alive.dot(member).T
    row_s = length * (stack.row_s.take(draft) + stack.context_s.take(draft) * view.context[rows])
    seconds: FloatArray = (stack.base(tokens.astype(np.int64)) * (tokens > 0)).sum(1) + row_s.dot(member)
    return seconds


def predicted_parts(latency: LatencyModel, outcome: Outcome, view: View) -> tuple[FloatArray, Target]:
    """Return the uncorrected seconds by part (places as in ``policy.latency``) for the turns that ran, and those of the target.

    The target is charged for the nodes that it verified, a draft for a forward for each token of
    ``length``. A row that the view lacks has just ended its prompt: its tokens are among the
    prefill.
    """
    if outcome.ran is not None:
        return _parts_ran(latency, outcome.ran, view)
    row = _rows_of(outcome.request, view)
    known = row >= 0
    length = np.where(known, outcome.length, 0)
    rows, context = int(known.sum()), int(view.context[row[known]].sum())
    predicted = np.zeros(FIRST_DRAFT + len(latency.drafts))
    tokens = int(outcome.verified[known].sum()) + rows + outcome.prefill_tokens
    base_s, whole_s = latency.target.at(tokens), latency.target.seconds(tokens, rows, context)
    predicted[VERIFY] = whole_s
    predicted[OVERHEAD] = latency.overhead_s + latency.speculation_s * bool(length.any())
    predicted[FIRST_DRAFT:] = drafting_s(latency, view, row, Choice(outcome.draft, length))
    return predicted, Target(tokens, base_s, whole_s - base_s)


def _parts_ran(latency: LatencyModel, ran: Ran, view: View) -> tuple[FloatArray, Target]:
    row = _rows_of(ran.request, view)
    length = np.where(row >= 0, ran.length, 0)
    predicted = np.zeros(FIRST_DRAFT + len(latency.drafts))
    predicted[OVERHEAD] = latency.overhead_s + latency.speculation_s * bool(length.any())
    predicted[FIRST_DRAFT:] = drafting_s(latency, view, row, Choice(ran.draft, length))
    if not ran.tokens:
        return predicted, Target(0, 0.0, 0.0)
    base_s, whole_s = latency.target.at(ran.tokens), latency.target.seconds(ran.tokens, ran.rows, ran.context_tokens)
    predicted[VERIFY] = ran.iterations * whole_s - (ran.iterations - 1) * latency.turn_s  # which is in the table, once an iteration
    return predicted, Target(ran.tokens, ran.iterations * base_s, predicted.item(VERIFY) - ran.iterations * base_s)


def _rows_of(request: IntArray, view: View) -> IntArray:
    """Return the rows of a view that requests have, -1 for those that it lacks."""
    if len(request) == len(view) and (request == view.request).all():
        return np.arange(len(view))
    place = {known: row for row, known in enumerate(view.request.tolist())}
    return np.array([place.get(r, -1) for r in request.tolist()], np.int64)


def _tokens_by_row(hazard: FloatArray, choice: Choice) -> FloatArray:
    survival = np.cumprod(hazard, axis=2)[np.arange(len(hazard)), choice.draft] if hazard.size else np.zeros((len(hazard), 0))
    tokens: FloatArray = 1.0 + np.where(np.arange(survival.shape[1]) < choice.length[:, None], survival, 0.0).sum(1)
    return tokens
