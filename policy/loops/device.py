"""A step of drafts that the target's device runs for the whole batch (``policy.supply``).

One head proposes as deep for every row, and the target verifies the likeliest nodes of the batch,
wherever they are. So a step has a head, a depth and a number of nodes. The gain of N nodes is that
of the N likeliest ones that the rows are expected to show: heads' confidences are counted by place
for kinds of requests, and the hazards say how much of it all is accepted.
"""

import math
from typing import NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, record
from .problem import STEP_PROBLEM, TIE, StepProblem, limit_s
from .times import FIRST_DRAFT, VERIFY, Times
from .trim import BINS, BOUNDS, COUNTS, KIND_EDGES, KINDS, PROPOSED, Counts, ProposedNodes

_MEMORY_ROWS = 2000.0  # proposals of a column after which a count fades to 1/e
_PRIOR_ROWS = 4.0  # proposals without nodes that are taken as seen of each kind
_PRIOR_NODES = 8.0  # nodes of the pooled map that a kind's own is worth
_ROUNDS, _TOLERANCE = 3, 0.01  # rounds of pricing, and the change of price that ends them


class Supply(NamedTuple):
    """Fading counts of the nodes that heads show."""

    evidence_nodes: Floats
    """[C, 2, KINDS, K, BINS] nodes, by column, greedy or sampled, kind, place and confidence."""
    proposals: Floats
    """[C, 2, KINDS, K] the proposals that had the place."""


SUPPLY = record(Supply, FLOATS[5], FLOATS[4])


@helper
def _kinds_of(expected: float) -> tuple[int, float]:
    """Return the two kinds of requests that one lies between, the lower one, and the share of the
    other.
    """
    before, low = 0.5 * KIND_EDGES[0], 0
    for kind in range(1, KINDS):
        after = 0.5 * (KIND_EDGES[kind - 1] + (KIND_EDGES[kind] if kind < KINDS - 1 else 1.0))
        if expected < after:
            return low, min(max((expected - before) / (after - before), 0.0), 1.0)
        before, low = after, kind
    return KINDS - 2, 1.0


@helper
def _bin_of(confidence: float) -> int:
    b = 0
    while b < BINS - 1 and confidence >= BOUNDS[b + 1]:
        b += 1
    return b


@entry(SUPPLY, PROPOSED, INTS[1])
def learn_supply(supply: Supply, proposed: ProposedNodes, places: Ints) -> None:
    """Count nodes, in place; ``places[n]`` are how many each row was to propose for, 0: unknown,
    and it teaches nothing.
    """
    s, p = supply, proposed
    columns, _, _, k_max, _ = s.evidence_nodes.shape
    rows = np.zeros(columns)
    row = -1
    for q in range(len(p.row)):
        if p.row[q] != row and p.column[q] >= 0 and places[p.row[q]]:
            rows[p.column[q]] += 1
        row = p.row[q]
    for c in range(columns):
        if rows[c]:
            keep = math.exp(-rows[c] / _MEMORY_ROWS)
            s.evidence_nodes[c] *= keep
            s.proposals[c] *= keep
    row = -1
    low, share = 0, 0.0
    for q in range(len(p.row)):
        c, is_sampled, most = p.column[q], 1 if p.sampled[q] else 0, places[p.row[q]]
        if c < 0 or not most:
            continue
        if p.row[q] != row:
            row = p.row[q]
            low, share = _kinds_of(p.expected[q])
            for j in range(min(most, k_max)):
                s.proposals[c, is_sampled, low, j] += 1.0 - share
                s.proposals[c, is_sampled, low + 1, j] += share
        j = p.depth[q]
        if j < min(most, k_max):
            b = _bin_of(p.confidence[q])
            s.evidence_nodes[c, is_sampled, low, j, b] += 1.0 - share
            s.evidence_nodes[c, is_sampled, low + 1, j, b] += share


class Offer(NamedTuple):
    """The nodes that the rows of a batch are expected to show."""

    nodes: Floats
    """[D, K, BINS] by draft, place and confidence."""
    accepted: Floats
    """[D, K, BINS] how many of them the target draws."""


OFFER = record(Offer, FLOATS[3], FLOATS[3])


@helper
def _value_of(counts: Counts, c: int, is_sampled: int, kind: int, value: Floats) -> None:
    """Compute how likely nodes of a kind are drawn by confidence, ``value[BINS]``."""
    k = counts
    for b in range(BINS):
        right, nodes = 0.0, 0.0
        for place in range(k.nodes.shape[3]):
            right += k.matched[c, is_sampled, kind, place, b]
            nodes += k.nodes[c, is_sampled, kind, place, b]
        pooled = k.accepted_at[c, is_sampled, b + 1]
        value[b] = (right + _PRIOR_NODES * pooled) / (nodes + _PRIOR_NODES)


@entry(SUPPLY, COUNTS, INTS[1], INTS[1], INTS[2], FLOATS[3])
def offer_of(
    supply: Supply,
    counts: Counts,
    column: Ints,  # [n]
    is_sampled: Ints,  # [n]
    ceiling: Ints,  # [D, n]
    hazard: Floats,  # [K, D, n]
) -> Offer:
    """Return the nodes that rows will show: ``column`` is that of their tenant's first draft,
    ``ceiling`` and ``hazard`` are those of whole proposals.

    A place's nodes bring what its hazards say. If those that were counted are worth less, the rest
    is in one that was not: none are counted where nothing was proposed yet, nor after a node that
    was not verified.
    """
    k_max, drafts, n = hazard.shape
    nodes, accepted = np.zeros((drafts, k_max, BINS)), np.zeros((drafts, k_max, BINS))
    if k_max == 0:
        return Offer(nodes, accepted)
    columns, value = supply.proposals.shape[0], np.empty(BINS)
    for d in range(drafts):
        rows, reached = np.zeros((2, columns, 2, KINDS, k_max))
        for i in range(n):
            low, share = _kinds_of(hazard[0, d, i])
            survival, at = 1.0, column[i] + d
            for j in range(ceiling[d, i]):
                survival *= hazard[j, d, i]
                for kind in range(low, low + 2):
                    part = share if kind > low else 1.0 - share
                    rows[at, is_sampled[i], kind, j] += part
                    reached[at, is_sampled[i], kind, j] += part * survival
        for c in range(d, columns, drafts):
            for sampled in range(2):
                for kind in range(KINDS):
                    if rows[c, sampled, kind, 0] == 0.0:
                        continue
                    _value_of(counts, c, sampled, kind, value)
                    for j in range(k_max):
                        here = rows[c, sampled, kind, j]
                        if here == 0.0:
                            break
                        each = here / (supply.proposals[c, sampled, kind, j] + _PRIOR_ROWS)
                        total, expected = 0.0, reached[c, sampled, kind, j]
                        for b in range(BINS):
                            total += each * supply.evidence_nodes[c, sampled, kind, j, b] * value[b]
                        scale = min(expected / total, 1.0) if total > 0.0 else 1.0
                        for b in range(BINS):
                            some = each * supply.evidence_nodes[c, sampled, kind, j, b]
                            nodes[d, j, b] += some
                            accepted[d, j, b] += scale * some * value[b]
                        if expected > total:
                            b = _bin_of((expected - total) / here)
                            nodes[d, j, b] += here
                            accepted[d, j, b] += expected - total
    return Offer(nodes, accepted)


class Batchwide(NamedTuple):
    """A choice for the whole batch; ``depth`` 0: no speculation."""

    draft: int
    depth: int
    nodes: int
    value: float
    """Expected tokens."""
    step_s: float


@entry(STEP_PROBLEM, OFFER, FLOATS[2], FLOATS[0], FLOATS[0])
def best_of(
    problem: StepProblem, offer: Offer, forward_s: Floats, node_s: float, price: float
) -> Batchwide:
    """Return the best choice at a price: a draft, a depth and a number of nodes, each number tried.

    ``forward_s[K, D]`` are the seconds of a draft's forward j for all rows, ``node_s`` those of
    reading what comes before a node.
    """
    p, most_s = problem, limit_s(problem)
    drafts, plain_s = forward_s.shape[1], p.undrafted_s[0]
    best = Batchwide(-1, 0, 0, p.base_value, plain_s)
    highest = p.base_value - price * plain_s
    nodes, accepted = np.empty((2, BINS))
    for d in range(drafts):
        nodes[:] = 0.0
        accepted[:] = 0.0
        drafting_s = p.speculation_s
        for depth in range(1, p.ceiling[d].max() + 1):
            nodes += offer.nodes[d, depth - 1]
            accepted += offer.accepted[d, depth - 1]
            drafting_s += forward_s[depth - 1, d]
            b, rest, value = BINS, 0.0, p.base_value
            for m in range(1, len(p.undrafted_s)):
                need = 1.0
                while need > 0.0 and (rest > 0.0 or b > 0):
                    if rest <= 0.0:
                        b -= 1
                        rest = nodes[b]
                        continue
                    part = min(need, rest)
                    value += accepted[b] * part / nodes[b]
                    rest -= part
                    need -= part
                seconds = p.undrafted_s[m] + m * node_s + drafting_s
                if seconds <= most_s and value - price * seconds > highest + TIE * (value + 1):
                    highest = value - price * seconds
                    best = Batchwide(d, depth, m, value, seconds)
                if need > 0.0:
                    break
    return best


@helper
def forwards_of(times: Times, problem: StepProblem, context: int, forward_s: Floats) -> None:
    """Compute the seconds of each draft's forwards for all rows, ``forward_s[K, D]``, together with
    what is in them already.
    """
    t, p = times, problem
    k_max, drafts = forward_s.shape
    n = p.gain.shape[2]
    for d in range(drafts):
        alone_s = t.factor[FIRST_DRAFT + d] * (
            n * t.draft_row_s[d] + context * t.draft_context_s[d]
        )
        for j in range(k_max):
            before = p.occupied[d, j]
            forward_s[j, d] = p.forward_s[d, before + n] - p.forward_s[d, before] + alone_s


@helper
def best_for_batch(
    times: Times,
    problem: StepProblem,
    offer: Offer,
    context: int,
    known_goodput: float,
    waiting: float,
    prefill_s: float,
) -> tuple[float, float, Batchwide]:
    """Return the price of time, the goodput and the best choice for the whole batch, as
    ``policy.loops.search.best_priced`` does for single rows; ``context`` is the cached tokens of
    all rows.
    """
    p = problem
    k_max, drafts, n = p.gain.shape
    plain_s = p.undrafted_s[0]
    choice = Batchwide(-1, 0, 0, p.base_value, plain_s)
    goodput = known_goodput if known_goodput else p.base_value / max(plain_s - prefill_s, 1e-12)
    price = 0.0
    if n == 0:
        return price, goodput, choice
    forward_s = np.empty((k_max, drafts))
    forwards_of(times, p, context, forward_s)
    node_s = times.factor[VERIFY] * times.node_context_s * context / n
    for _ in range(_ROUNDS):
        price = waiting * goodput
        choice = best_of(p, offer, forward_s, node_s, price)
        before, goodput = goodput, choice.value / max(choice.step_s - prefill_s, 1e-12)
        if abs(goodput - before) <= _TOLERANCE * before:
            break
    return price, goodput, choice
