"""One step as numbers: what every chain brings, what every forward costs, and the exact score of a
choice.

The objective is sum_i E[emitted_i] - price * T. A chain of k <= remaining_i - 1 tokens can never
emit more than remains, so E[min(emitted, remaining)] = 1 + sum_{j<=k} s_j with the survival s_j =
h_1 ... h_j. The price of time (tokens per second) couples steps; the shared verification and the
drafts' common forwards couple rows.
"""

import math
from typing import NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, record
from .times import (
    FIRST_DRAFT,
    TIMES,
    VERIFY,
    WIDTH_STEPS,
    Times,
    change_s,
    decoding_s,
    forward_s,
    price_passes,
    verify_s,
)

TIE = 1e-9
"""Relative difference below which the choice with the fewest tokens wins."""


class StepProblem(NamedTuple):
    """One step's choice: n rows, D drafts, up to K tokens a row.

    Neither ``undrafted_s`` nor ``forward_s`` ever falls.
    """

    gain: Floats
    """[K, D, n] expected tokens that position j adds, falling in j; 0 beyond the ceiling."""
    ceiling: Ints
    """[D, n] the most tokens that a draft may propose for a row."""
    first_tokens: Ints
    """[D, n] tokens that a row's first draft forward reads: 1 or 2."""
    draft_row_s: Floats
    """[K, D, n] seconds of a row in a draft's forward j, and of reading what comes before its nodes
    there.
    """
    nodes: Floats
    """[K, D, n] how many nodes of position j the trim is expected to leave; 1: its token."""
    switch_s: Floats
    """[D, n] seconds of catch-up beyond the first tokens."""
    horizon: Floats
    """[n] steps over which the objective spreads a catch-up."""
    undrafted_s: Floats
    """[m] seconds of the step with m verified nodes, without drafting."""
    forward_s: Floats
    """[D, t] seconds of a draft's forward of t tokens; 0 at 0."""
    occupied: Ints
    """[D, K] tokens of rows outside this choice in the drafts' forwards, which are paid for in
    ``undrafted_s``; here they make cheaper what shares them.
    """
    speculation_s: float
    """Seconds of the step if any row speculates."""
    base_value: float
    """Expected tokens of the step without speculation."""
    cap_s: float
    """The longest step that may be chosen, unless one without speculation is longer, less what a
    change of width takes beyond what is charged; inf: none.
    """

    @property
    def rows(self) -> int:
        """Return n."""
        return len(self.horizon)

    @property
    def plain_s(self) -> float:
        """Return the seconds of the step without speculation."""
        return float(self.undrafted_s[0])

    @property
    def limit_s(self) -> float:
        """Return the seconds that no choice may exceed."""
        return max(self.cap_s, self.plain_s) * (1 + TIE)


STEP_PROBLEM = record(
    StepProblem,
    *(FLOATS[3], INTS[2], INTS[2], FLOATS[3], FLOATS[3], FLOATS[2]),
    *(FLOATS[1], FLOATS[1], FLOATS[2]),
    *(INTS[2], FLOATS[0], FLOATS[0], FLOATS[0]),
)


class ViewRows(NamedTuple):
    """The rows of a view, by request."""

    rows: Ints
    """[N] by request, so that the batch's order makes no difference, not even among rows alike."""
    slot: Ints
    """[N] the slots of ``policy.loops.acceptance``, in the order of ``rows``."""
    context: Ints  # [N]
    remaining: Ints  # [N]
    ceiling: Ints
    """[N, D] like ``catchup``."""
    catchup: Ints  # [N, D]
    evidence: Ints
    """[N, D] the bin of what each draft shows before it proposes."""
    sampled: Ints
    """[N] 1: the row's tokens are sampled; empty: no row's are."""
    control_draft: Ints
    """[N] the choice of rows that is made elsewhere (empty: there are none)."""
    control_length: Ints
    """[N] -1: the row is to be chosen for."""
    prefill_tokens: int
    prefilling: int
    """Requests in prefill, which wait for the step."""
    cap_s: float
    pass_tokens: int
    """As ``policy.plan.View``, like ``change_tokens``."""
    change_tokens: int


BATCH = record(
    ViewRows,
    *(*[INTS[1]] * 4, *[INTS[2]] * 3, *[INTS[1]] * 3),
    *(INTS[0], INTS[0], FLOATS[0], INTS[0], INTS[0]),
)


class Limits(NamedTuple):
    """Constants of a planner."""

    k_max: int
    horizon_steps: float
    padded_tokens: int
    """Nodes of every row if any row speculates (an engine that pads); 0: as many as are planned."""
    whole_batch: int
    """1: the drafts are as ``policy.planner.PlannerConfig.whole_batch`` says."""


LIMITS = record(Limits, INTS[0], FLOATS[0], INTS[0], INTS[0])


@helper
def charge_s(problem: StepProblem, d: int, i: int) -> float:
    """Return the seconds of catch-up that the objective charges to this step."""
    return problem.switch_s[d, i] / problem.horizon[i]


@helper
def pass_s(undrafted_s: Floats, nodes: float) -> float:
    """Return the seconds of a step with this mean number of nodes, by ``undrafted_s[m]`` and linear
    between whole ones.
    """
    last = len(undrafted_s) - 1
    low = min(int(nodes), last)
    seconds, share = undrafted_s[low], nodes - low
    if share > 0 and low < last:
        seconds += share * (undrafted_s[low + 1] - seconds)
    return seconds


@entry(STEP_PROBLEM, INTS[1], INTS[1], INTS[2])
def score(
    problem: StepProblem,
    draft: Ints,  # [n]
    length: Ints,  # [n]
    count: Ints,  # [D, K]
) -> tuple[float, float, float]:
    """Return expected tokens, charged seconds and the step's seconds of a choice; ``count`` becomes
    the tokens of every forward.
    """
    gain, row_s, first_tokens = problem.gain, problem.draft_row_s, problem.first_tokens
    occupied, forward_s = problem.occupied, problem.forward_s
    k_max, drafts, n = gain.shape
    count[:] = occupied
    value, total, nodes, rows_s, charged_s, switch_s = 0.0, 0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        k = length[i]
        if k == 0:
            continue
        d = draft[i]
        total += k
        charged_s += charge_s(problem, d, i)
        switch_s += problem.switch_s[d, i]
        for j in range(k):
            count[d, j] += first_tokens[d, i] if j == 0 else 1
            value += gain[j, d, i]
            nodes += problem.nodes[j, d, i]
            rows_s += row_s[j, d, i]
    seconds = pass_s(problem.undrafted_s, nodes) + rows_s
    if total:
        seconds += problem.speculation_s
    for d in range(drafts):
        for j in range(k_max):
            if count[d, j] > occupied[d, j]:
                seconds += forward_s[d, count[d, j]] - forward_s[d, occupied[d, j]]
    return problem.base_value + value, seconds + charged_s, seconds + switch_s


@helper
def limit_s(problem: StepProblem) -> float:
    """Return the seconds that no choice may exceed: the cap, or those without speculation."""
    return max(problem.cap_s, problem.undrafted_s[0]) * (1 + TIE)


@helper
def _fix_control(
    times: Times,
    batch: ViewRows,
    hazard: Floats,  # [K, D, N]
    nodes: Floats,  # [K, D, N]
    row_s: Floats,  # [K, D, N]
    occupied: Ints,  # [D, K]
) -> tuple[int, float, float]:
    """Put the control rows into the drafts' forwards, ``occupied``. Return the nodes of theirs that
    are verified, their expected gain, and the seconds of drafting for them.
    """
    b = batch
    drafts, k_max = b.ceiling.shape[1], max(b.control_length.max(), 1)
    count = np.zeros((drafts, k_max), np.int64)
    verified, value, seconds = 0.0, 0.0, 0.0
    for i in range(len(b.rows)):
        r = b.rows[i]
        d, k = b.control_draft[r], b.control_length[r]
        if k <= 0:
            continue
        survival = 1.0
        for j in range(k):
            at = min(j, len(row_s) - 1), d, i
            seconds += row_s[at]
            verified += nodes[at]
            survival *= hazard[j, d, i] if j < len(hazard) else 0.0
            value += survival
            count[d, j] += max(b.catchup[r, d], 1) if j == 0 else 1
            if j < occupied.shape[1]:
                occupied[d, j] += min(max(b.catchup[r, d], 1), 2) if j == 0 else 1
    for d in range(drafts):
        for j in range(k_max):
            seconds += forward_s(times, d, count[d, j])
    return max(round(verified), 1 if seconds > 0 else 0), value, seconds


@helper
def node_s(times: Times, rows: int) -> float:
    """Return the seconds of one more token in a pass that verifies some: the mean of the next four
    of each row but the first, which may change the pass for all of them.
    """
    more_s = verify_s(times, 5 * rows) - verify_s(times, rows + 1)
    return times.verifying * more_s / max(4 * rows - 1, 1)


@helper
def _find_members(
    batch: ViewRows,
    limits: Limits,
    members: Ints,  # [N]
    ceiling: Ints,  # [D, N]
) -> tuple[int, int, int]:
    """Find the places of the rows that are to be chosen for, and the most tokens that drafts may
    propose for them, into the beginnings of ``members`` and ``ceiling``. Return how many they are,
    the longest proposal, and the cached tokens of all rows.
    """
    b = batch
    n, k_max, context = 0, 0, 0
    for i in range(len(b.rows)):
        r = b.rows[i]
        context += b.context[r]
        if len(b.control_length) and b.control_length[r] >= 0:
            continue
        members[n] = i
        for d in range(len(ceiling)):
            most = min(b.ceiling[r, d], b.remaining[r] - 1, limits.k_max)
            ceiling[d, n] = most
            k_max = max(k_max, most)
        n += 1
    return n, k_max, context


@helper
def _price_rows(
    times: Times,
    batch: ViewRows,
    nodes: Floats,  # [K, D, N]
) -> Floats:
    """Return the seconds [K, D, N] of a row in a draft's forward, and of reading what comes before
    its nodes.
    """
    t, b = times, batch
    row_s = np.empty(nodes.shape)
    for j in range(nodes.shape[0]):
        for d in range(nodes.shape[1]):
            f = t.factor[FIRST_DRAFT + d]
            for i in range(nodes.shape[2]):
                tokens = b.context[b.rows[i]]
                forward_row_s = f * (t.draft_row_s[d] + t.draft_context_s[d] * tokens)
                node_row_s = t.factor[VERIFY] * t.node_context_s * tokens
                row_s[j, d, i] = forward_row_s + nodes[j, d, i] * node_row_s
    return row_s


@helper
def _take(
    values: Floats,  # [K, D, N]
    k_max: int,
    members: Ints,  # [n]
) -> Floats:
    """Return the values [k_max, D, n] of some rows."""
    columns = np.empty((k_max, values.shape[1], len(members)))
    for j in range(k_max):
        for d in range(values.shape[1]):
            for place in range(len(members)):
                columns[j, d, place] = values[j, d, members[place]]
    return columns


@helper
def _most_nodes(
    nodes: Floats,  # [K, D, n]
) -> int:
    """Return the most nodes that all rows together are expected to have."""
    k_max, drafts, n = nodes.shape
    most = 0.0
    for place in range(n):
        of_row = 0.0
        for d in range(drafts):
            total = 0.0
            for j in range(k_max):
                total += nodes[j, d, place]
            of_row = max(of_row, total)
        most += of_row
    return math.ceil(most)


@helper
def _price_nodes(
    times: Times, batch: ViewRows, limits: Limits, control_nodes: int, most: int
) -> Floats:
    """Return the seconds of passes with up to ``most`` nodes more than the control's, rows and
    context apart.
    """
    t, b, everyone = times, batch, len(batch.rows)
    seconds = np.zeros(most + 1)
    decoding, padding = everyone + control_nodes, limits.padded_tokens * everyone
    plain = b.prefill_tokens + decoding
    if plain:
        price_passes(t, plain, decoding, b.pass_tokens, b.change_tokens, seconds)
    if padding:
        padded_s = verify_s(t, plain + padding) - verify_s(t, plain)
        more_s = verify_s(t, decoding + padding) - verify_s(t, decoding)
        seconds[1:] = seconds[0] + max(padded_s + (t.verifying - 1) * more_s, 0.0)
    return seconds


@helper
def _set_chains(
    times: Times,
    batch: ViewRows,
    members: Ints,  # [n]
    hazard: Floats,  # [K, D, N]
    ceiling: Ints,  # [D, n]
    gain: Floats,  # [K, D, n]
    first: Ints,  # [D, n]
    switch_s: Floats,  # [D, n]
) -> None:
    """Compute of each row's chains the gains, and of its catch-up the tokens of the first forward
    and the seconds beyond it.
    """
    b = batch
    for place in range(len(members)):
        i = members[place]
        for d in range(len(ceiling)):
            survival = 1.0
            for j in range(ceiling[d, place]):
                survival *= hazard[j, d, i]
                gain[j, d, place] = survival
            unseen = max(b.catchup[b.rows[i], d], 1)
            first[d, place] = min(unseen, 2)  # a chain accepted whole leaves its last token and the
            # bonus unread: no switch yet
            switch_s[d, place] = forward_s(times, d, unseen) - forward_s(times, d, min(unseen, 2))


@entry(TIMES, BATCH, LIMITS, FLOATS[3], FLOATS[3])
def build(
    times: Times, batch: ViewRows, limits: Limits, hazard: Floats, nodes: Floats
) -> tuple[StepProblem, Ints, float]:
    """Return the choice that a batch has, the places of its rows in ``batch.rows``, and how much
    longer the step takes for its prefill tokens.

    ``hazard[K, D, N]`` and ``nodes[K, D, N]``, how many nodes of a proposal's token j are verified,
    are in that order.
    """
    t, b = times, batch
    everyone, drafts = b.ceiling.shape
    members, ceiling = np.empty(everyone, np.int64), np.empty((drafts, everyone), np.int64)
    n, k_max, context = _find_members(b, limits, members, ceiling)
    members, ceiling = members[:n].copy(), ceiling[:, :n].copy()
    every_row_s = _price_rows(t, b, nodes)
    occupied = np.zeros((drafts, k_max), np.int64)
    fixed_s = t.overhead_s + t.factor[VERIFY] * (everyone * t.row_s + context * t.context_s)
    control_nodes, value, drafting_s = 0, float(everyone), 0.0
    if n < everyone:
        rest = nodes, every_row_s, occupied
        control_nodes, more, drafting_s = _fix_control(t, b, hazard, *rest)
        value += more
    plain_s = decoding_s(t, everyone + control_nodes, everyone, context)
    speculation_s = t.speculation_s + (t.verifying - 1) * plain_s
    if control_nodes:
        fixed_s += drafting_s + speculation_s
        speculation_s = 0.0
    row_nodes, most = _take(nodes, k_max, members), n * k_max
    if not limits.whole_batch:
        most = max(most, _most_nodes(row_nodes))
    undrafted_s = _price_nodes(t, b, limits, control_nodes, most) + fixed_s
    prefill_s, plain = 0.0, b.prefill_tokens + everyone + control_nodes
    if b.prefill_tokens:
        prefill_s = verify_s(t, plain) - verify_s(t, plain - b.prefill_tokens)
    forwards_s = np.empty((drafts, max(2 * everyone, 2) + 1))
    for d in range(drafts):
        for tokens in range(forwards_s.shape[1]):
            forwards_s[d, tokens] = forward_s(t, d, tokens)
    gain, horizon = np.zeros((k_max, drafts, n)), np.empty(n)
    first, switch_s = np.empty((drafts, n), np.int64), np.empty((drafts, n))
    _set_chains(t, b, members, hazard, ceiling, gain, first, switch_s)
    for place in range(n):
        remaining = b.remaining[b.rows[members[place]]]
        horizon[place] = min(max(remaining / 2, 1.0), limits.horizon_steps)
    problem = StepProblem(
        gain,
        ceiling,
        first,
        _take(every_row_s, k_max, members),
        row_nodes,
        switch_s,
        horizon,
        undrafted_s,
        forwards_s,
        occupied,
        speculation_s,
        value,
        b.cap_s - (1 - 1 / WIDTH_STEPS) * change_s(t, b.pass_tokens, b.change_tokens),
    )
    return problem, members, prefill_s
