"""One step as numbers: what every chain brings, what every forward costs, and the exact score of a
choice; and what a step that was executed should have taken.

The objective is sum_i E[emitted_i] - price * T. A chain of k <= remaining_i - 1 tokens can never
emit more than remains, so E[min(emitted, remaining)] = 1 + sum_{j<=k} s_j with the survival s_j =
h_1 ... h_j. The price of time (tokens per second) couples steps; the shared verification and the
drafts' common forwards couple rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .latency import FIRST_DRAFT, OVERHEAD, VERIFY, Predicted, Times
from .loops import search as loops
from .loops.search import TIE
from .plan import NO_DRAFT, FloatArray, IntArray, Outcome, View


class Choice(NamedTuple):
    """A draft (column or NO_DRAFT) and a length for every row, int64[n] each."""

    draft: IntArray
    length: IntArray

    def of(self, rows: IntArray) -> Choice:
        """Return the choice of some rows."""
        return Choice(self.draft[rows], self.length[rows])


class Score(NamedTuple):
    """Expected tokens, the seconds charged for them (catch-up spread over its horizon), and what
    the step itself takes.
    """

    value: float
    charged_s: float
    step_s: float

    def objective(self, price: float) -> float:
        """Return the priced objective, in tokens."""
        return self.value - price * self.charged_s


@dataclass(eq=False)
class StepProblem:
    """One step's choice: n rows, D drafts, up to K tokens a row.

    Tokens: ``gain[K, D, n]`` expected, that position j adds (falling in j; 0 beyond ``ceiling[D,
    n]``, where nothing is ever chosen); ``base_value`` the bonus tokens; ``first_tokens[D, n]``
    read by a row's first draft forward (1 or 2). Seconds: ``undrafted_s[m]`` of the whole step but
    its drafting, m = 0..n K tokens being proposed, staircases allowed (inf: no room for so many);
    ``speculation_s`` once if any row speculates; ``forward_s[D, t]`` of a draft forward of t
    tokens, 0 at 0, up to 2n and the given ones; ``draft_row_s[D, n]`` per row and draft forward on
    top (its KV); ``switch_s[D, n]`` of catch-up beyond the first tokens, which the objective
    spreads over ``horizon[n]`` steps. Neither ``undrafted_s`` nor ``forward_s`` ever falls.

    ``occupied[D, K]`` (None: none) are tokens of rows outside this choice in the drafts' forwards.
    Those forwards are paid for in ``undrafted_s``; here they make cheaper what shares them.
    ``cap_s`` is the longest step to be chosen (see ``limit_s``).
    """

    gain: FloatArray
    ceiling: IntArray
    base_value: float
    undrafted_s: FloatArray
    speculation_s: float
    forward_s: FloatArray
    first_tokens: IntArray
    draft_row_s: FloatArray
    switch_s: FloatArray
    horizon: FloatArray
    occupied: IntArray | None = None
    cap_s: float = math.inf

    @property
    def rows(self) -> int:
        """Return n."""
        return self.gain.shape[2]

    @property
    def plain_s(self) -> float:
        """Return the seconds of the step without speculation."""
        return float(self.undrafted_s[0])

    @property
    def plain(self) -> Score:
        """Return the score of no speculation."""
        return Score(self.base_value, self.plain_s, self.plain_s)

    @property
    def limit_s(self) -> float:
        """Seconds that no choice may exceed: the cap, or a step without speculation if longer."""
        return max(self.cap_s, self.plain_s) * (1 + TIE)

    @cached_property
    def value(self) -> FloatArray:
        """What a chain of k + 1 tokens brings, float64[K, D, n]."""
        return summed(self.gain)

    @cached_property
    def charge_s(self) -> FloatArray:
        """Catch-up seconds charged to this step, float64[D, n]."""
        spread: FloatArray = self.switch_s / self.horizon
        return spread

    def last_total(self) -> int:
        """Return the most tokens for which there is room."""
        last = len(self.undrafted_s) - 1
        if self.undrafted_s[last] < math.inf:
            return last
        return int(self.undrafted_s.searchsorted(math.inf)) - 1


def no_speculation(rows: int) -> Choice:
    """Return the choice of k = 0 everywhere."""
    return Choice(np.zeros(rows, np.int64) + NO_DRAFT, np.zeros(rows, np.int64))


def columns(problem: StepProblem) -> loops.Problem:
    """Return a problem as the loops take it."""
    drafts, rows = problem.ceiling.shape

    def floats(values: FloatArray) -> FloatArray:
        return np.ascontiguousarray(values, np.float64)

    occupied = problem.occupied
    if occupied is None:
        occupied = np.zeros((drafts, len(problem.gain)), np.int64)
    return loops.Problem(
        gain=floats(problem.gain),
        ceiling=np.ascontiguousarray(problem.ceiling, np.int64),
        first_tokens=np.ascontiguousarray(problem.first_tokens, np.int64),
        draft_row_s=np.broadcast_to(problem.draft_row_s, (drafts, rows)).astype(np.float64, "C"),
        charge_s=floats(problem.charge_s),
        switch_s=floats(problem.switch_s),
        undrafted_s=floats(problem.undrafted_s),
        forward_s=floats(problem.forward_s),
        occupied=np.ascontiguousarray(occupied[:, : len(problem.gain)], np.int64),
        speculation_s=float(problem.speculation_s),
        base_value=float(problem.base_value),
        cap_s=float(problem.cap_s),
    )


def score(problem: StepProblem, choice: Choice) -> Score:
    """Return exact tokens and seconds of a choice."""
    draft, length = (np.ascontiguousarray(column, np.int64) for column in choice)
    return Score(*loops.score_of(columns(problem), draft, length))


@lru_cache(maxsize=64)
def _sums(k_max: int) -> FloatArray:
    """Return the same for sums, by a product of matrices, which is quicker."""
    return np.tri(k_max)


def summed(values: FloatArray) -> FloatArray:
    """Return the cumulative sums over positions, float64[K, D, n]."""
    sums: FloatArray = _sums(len(values)).dot(values.reshape(len(values), -1)).reshape(values.shape)
    return sums


def survival(hazard: FloatArray) -> FloatArray:
    """Return the cumulative products over positions, float64[K, D, n]."""
    product: FloatArray = np.multiply.accumulate(hazard, 0)
    return product


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Rows of a view whose choice is made elsewhere and costs what it costs.

    ``expected_tokens`` is what they are expected to emit.
    """

    rows: IntArray
    choice: Choice
    expected_tokens: float = 0.0

    @classmethod
    def of(cls, rows: IntArray, choice: Choice, hazard: FloatArray) -> Given:
        """Return rows with what is expected of them by ``hazard`` float64[K, drafts, rows]."""
        within = np.arange(len(hazard))[:, None] < choice.length
        gained = survival(hazard)[:, choice.draft, np.arange(len(rows))] if hazard.size else within
        return cls(rows, choice, float(len(rows) + (gained * within).sum()))

    @property
    def tokens(self) -> int:
        """Return how many are proposed."""
        return int(self.choice.length.sum())

    def occupancy(self, view: View, k_max: int) -> IntArray | None:
        """Return ``StepProblem.occupied``."""
        rows, (draft, length) = self.rows, self.choice
        if not length.any() or not k_max:
            return None
        tokens = np.zeros((len(view.drafts), k_max), np.int64)
        for d in set(draft[length > 0].tolist()):
            group = (draft == d) & (length > 0)
            tokens[d] = (length[group, None] > np.arange(k_max)).sum(0)
            tokens[d, 0] = int(np.clip(view.catchup[rows[group], d], 1, 2).sum())
        return tokens

    def fixed_s(self, times: Times, view: View) -> tuple[float, float]:
        """Return the seconds of a step whatever is chosen, verification apart, and those once any
        other row speculates.
        """
        if not self.choice.length.any():
            return times.overhead_s, times.speculation_s
        drafting = float(drafting_s(times, view, self.rows, self.choice).sum())
        return times.overhead_s + times.speculation_s + drafting, 0.0


NOTHING_GIVEN = Given(np.zeros(0, np.int64), no_speculation(0))


def step_problem(
    times: Times,
    view: View,
    rows: IntArray,
    hazard: FloatArray,
    given: Given,
    most: int,
    horizon_steps: float,
) -> StepProblem:
    """Return the choice that these rows of the view have beside what is given, of at most ``most``
    tokens a row; ``hazard`` float64[K, drafts, rows], catch-ups spread over ``horizon_steps``.
    """
    n = len(rows)
    context, remaining = view.context.take(rows), view.remaining.take(rows)
    ceiling = np.minimum(view.ceiling.take(rows, 0).T, np.minimum(remaining - 1, most))
    k_max = ceiling.item(ceiling.argmax()) if ceiling.size else 0
    everyone, tokens, context_tokens = n, 0, int(np.add.reduce(context))
    fixed_s, speculation_s, occupied = times.overhead_s, times.speculation_s, None
    if len(given.rows):
        everyone, tokens = n + len(given.rows), given.tokens
        context_tokens += int(view.context[given.rows].sum())
        fixed_s, speculation_s = given.fixed_s(times, view)
        occupied = given.occupancy(view, k_max)
    first = view.prefill_tokens + everyone + tokens
    verify_s = times.verify_s(first, n * k_max + 1) if first else np.zeros(1)
    verify_s += fixed_s + everyone * times.row_s + context_tokens * times.context_s
    catchup = np.maximum(view.catchup.take(rows, 0).T, 1)
    row_s = times.draft_row_s[:, None] + times.draft_context_s[:, None] * context
    forward_s, switch_s = times.forward_s(max(2 * everyone, 2) + 1), times.switch_s(catchup)
    gain = survival(hazard[:k_max])
    if ceiling.size and ceiling.item(ceiling.argmin()) < k_max:
        gain *= np.arange(k_max)[:, None, None] < ceiling
    return StepProblem(
        gain=gain,
        ceiling=ceiling,
        base_value=n + given.expected_tokens,
        undrafted_s=verify_s,
        speculation_s=speculation_s,
        forward_s=forward_s,
        first_tokens=np.minimum(catchup, 2),  # a chain accepted whole leaves its last token and
        # the bonus unread: no switch yet
        draft_row_s=row_s,
        switch_s=switch_s,
        horizon=np.minimum(np.maximum(remaining / 2, 1.0), horizon_steps),
        occupied=occupied,
        cap_s=view.cap_s,
    )


def extra_prefill_s(times: Times, view: View, tokens: int) -> float:
    """Return how much longer a step of so many other tokens takes for its prefill tokens."""
    if not view.prefill_tokens:
        return 0.0
    return times.verify_at(view.prefill_tokens + tokens) - times.verify_at(tokens)


def drafting_s(times: Times, view: View, rows: IntArray, choice: Choice) -> FloatArray:
    """Return the seconds of every draft's forwards, float64[drafts], when rows of the view propose
    as chosen.
    """
    used, drafts = choice.length.nonzero()[0], len(times.draft_row_s)
    if not len(used):
        return np.zeros(drafts)
    (draft, length), rows = choice.of(used), rows[used]
    member = (draft[:, None] == np.arange(drafts)).astype(np.float64)
    alive = (np.arange(length.item(length.argmax()))[:, None] < length).astype(np.float64)
    alive[0] = np.maximum(view.catchup[rows, draft], 1)
    tokens = alive.dot(member).T.astype(np.int64)
    row_s = times.draft_row_s.take(draft) + times.draft_context_s.take(draft) * view.context[rows]
    seconds: FloatArray = times.forwards_s(tokens).sum(1) + (length * row_s).dot(member)
    return seconds


def predicted_parts(times: Times, outcome: Outcome, view: View) -> Predicted:
    """Return the seconds by part of the turns that ran.

    The target is charged for the nodes that it verified, a draft for a forward for each token of
    ``length``. A row that the view lacks has just ended its prompt: its tokens are among the
    prefill.
    """
    row = _rows_of(outcome.rows.request, view)
    length = np.where(row >= 0, outcome.rows.length, 0)
    parts = np.zeros(FIRST_DRAFT + len(times.draft_row_s))
    parts[OVERHEAD] = times.overhead_s + times.speculation_s * bool(length.any())
    parts[FIRST_DRAFT:] = drafting_s(times, view, row, Choice(outcome.rows.draft, length))
    known = row >= 0
    context, verified = view.context[row[known]], outcome.rows.verified[known]
    tokens = int(np.add.reduce(verified)) + len(context) + outcome.prefill_tokens
    base_s = times.verify_at(tokens)
    parts[VERIFY] = base_s + len(context) * times.row_s + int(context.sum()) * times.context_s
    parts[VERIFY] += times.node_context_s * float(verified @ context)
    return Predicted(tokens, base_s, parts)


def _rows_of(request: IntArray, view: View) -> IntArray:
    """Return the rows of a view that requests have, -1 for those that it lacks."""
    if len(request) == len(view) and (request == view.request).all():
        return np.arange(len(view))
    place = {known: row for row, known in enumerate(view.request.tolist())}
    return np.array([place.get(r, -1) for r in request.tolist()], np.int64)
