"""Which nodes the target verifies, once the drafts have proposed (``policy.trim``)."""

import math
from typing import NamedTuple

import numpy as np

from .arrays import Bools, Floats, Ints
from .compiling import BOOLS, FLOATS, INTS, entry, helper, record
from .problem import TIE
from .search import descending
from .times import TIMES, VERIFY, Times, decoding_s, price_passes

BOUNDS = np.array(
    [0.0, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98, 1.0]
)
"""Edges of the bins of confidence, finer towards 0 and 1."""
BINS = len(BOUNDS) - 1
PLACES = 3
"""Places of a proposal that are distinguished: its first token, its second, and all later ones."""
KIND_EDGES = np.array([0.3, 0.5, 0.7, 0.85])
"""Edges of what is expected of a proposal's first token, by which proposals are distinguished: of
promising ones more is left.
"""
KINDS = len(KIND_EDGES) + 1
_PRIOR_NODES = 8.0  # nodes that a bin's claim counts for
_PRIOR_POSITIONS = 4.0  # places of a proposal that are taken to keep one node, the right one
_MEMORY_NODES = 20_000.0  # memory of a column, greedy or sampled: a few thousand steps of a row
_REST_KEEP = 0.98  # of a draft's nodes that a step without it leaves, or it might stay unused


class ProposedNodes(NamedTuple):
    """The nodes of a batch (``policy.plan.DraftNodes``)."""

    row: Ints  # [q]
    column: Ints
    """[q] its column of tenant and draft."""
    depth: Ints
    """[q] the tokens before it on its path."""
    confidence: Floats  # [q]
    sampled: Bools  # [q]
    expected: Floats
    """[q] how likely the first token of its row's proposal was thought to be accepted."""


PROPOSED = record(ProposedNodes, INTS[1], INTS[1], INTS[1], FLOATS[1], BOOLS[1], FLOATS[1])


class Counts(NamedTuple):
    """Fading counts of the nodes that drafts proposed, and what follows."""

    nodes: Floats
    """[C, 2, KINDS, PLACES, BINS] nodes, by column, greedy or sampled, what was expected, place and
    confidence.
    """
    claimed: Floats
    """[C, 2, KINDS, PLACES, BINS] the sum of their confidences."""
    matched: Floats
    """[C, 2, KINDS, PLACES, BINS] how many of them the target drew."""
    likeliest: Floats
    """[C, 2, KINDS, PLACES, BINS] the nodes that were the likeliest of their proposal at their
    depth, from which paths go on.
    """
    knots: Floats
    """[C, 2, BINS + 2] confidences at which it is known how likely nodes are drawn."""
    accepted_at: Floats
    """[C, 2, BINS + 2] how likely they are there."""


COUNTS = record(Counts, *[FLOATS[5]] * 4, *[FLOATS[3]] * 2)


class Pass(NamedTuple):
    """The rest of a pass besides the nodes."""

    context: Ints
    """[n] cached tokens by row."""
    tokens: int
    """Tokens without the nodes."""
    price: float
    longest_tokens: int
    """The nodes of the plan, whose time is no reason to cut it."""
    spare_s: float
    """Seconds that a pass may be longer than the plan's; inf: any."""
    last_tokens: int
    """As ``policy.plan.View.pass_tokens``."""
    change_tokens: int


PASS = record(Pass, *(INTS[1], INTS[0], FLOATS[0], INTS[0], FLOATS[0], INTS[0], INTS[0]))


@helper
def kind_of(expected: float) -> int:
    """Return the kind of a proposal whose first token is expected to be accepted so often."""
    kind = 0
    while kind < KINDS - 1 and expected >= KIND_EDGES[kind]:
        kind += 1
    return kind


@helper
def interpolate(at: Floats, value: Floats, x: float) -> float:
    """Return the value at x of the line through points ``value[n]`` at rising places ``at[n]``."""
    low, high = 0, len(at) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if at[middle] <= x:
            low = middle
        else:
            high = middle
    width = at[high] - at[low]
    share = (x - at[low]) / width if width > 0 else 0.0
    return value[low] + share * (value[high] - value[low])


@entry(INTS[1], FLOATS[1], FLOATS[1], FLOATS[0], INTS[1])
def take_best(row: Ints, worth: Floats, pass_s: Floats, price: float, nodes: Ints) -> None:
    """Count into ``nodes[n]`` how many nodes of each row have the highest net worth together.

    ``row[q]`` rises; ``worth[q]``, in tokens, never does within a row. ``pass_s[m]`` are the
    seconds of a pass with m nodes. Among equal totals it takes the lowest.
    """
    nodes[:] = 0
    order = np.empty(len(worth), np.int64)
    descending(worth, order)
    best, best_m, total = -price * pass_s[0], 0, 0.0
    for m in range(1, min(len(worth) + 1, len(pass_s))):
        total += worth[order[m - 1]]
        net = total - price * pass_s[m]
        if net > best:
            best, best_m = net, m
    for m in range(best_m):
        nodes[row[order[m]]] += 1


@entry(TIMES, COUNTS, PASS, PROPOSED, INTS[1])
def trim(times: Times, counts: Counts, step: Pass, proposed: ProposedNodes, nodes: Ints) -> None:
    """Count into ``nodes[n]`` how many nodes of each row are verified. A confidence is worth what
    the line of its column through ``accepted_at`` at ``knots`` says.
    """
    knots, accepted_at = counts.knots, counts.accepted_at
    t, s, p = times, step, proposed
    count = len(p.row)
    pass_s = np.empty(max(count, s.longest_tokens) + 1)
    rows = len(s.context)
    price_passes(t, s.tokens, rows, s.last_tokens, s.change_tokens, pass_s)
    pass_s[1:] += (t.verifying - 1) * decoding_s(t, rows, rows, s.context.sum())
    last = count + 1
    if s.spare_s < np.inf:
        longest_s = (pass_s[s.longest_tokens] + s.spare_s) * (1 + TIE)
        last = 1
        while last <= count and pass_s[last] <= longest_s:
            last += 1
    pass_s = pass_s[:last]
    node_s = t.factor[VERIFY] * t.node_context_s
    worth = np.empty(count)
    for q in range(count):
        c, is_sampled = p.column[q], 1 if p.sampled[q] else 0
        likely = interpolate(knots[c, is_sampled], accepted_at[c, is_sampled], p.confidence[q])
        worth[q] = likely - s.price * node_s * s.context[p.row[q]]
    take_best(p.row, worth, pass_s, s.price, nodes)


@entry(COUNTS, PROPOSED, FLOATS[1])
def calibrate(counts: Counts, proposed: ProposedNodes, likely: Floats) -> None:
    """Compute how likely the target draws the path to each node, ``likely[q]``."""
    k, p = counts, proposed
    for q in range(len(p.row)):
        c, is_sampled = p.column[q], 1 if p.sampled[q] else 0
        likely[q] = interpolate(
            k.knots[c, is_sampled], k.accepted_at[c, is_sampled], p.confidence[q]
        )


@entry(COUNTS, PROPOSED, BOOLS[1], BOOLS[2], INTS[0])
def learn_nodes(
    counts: Counts,
    proposed: ProposedNodes,
    accepted: Bools,  # [q]
    present: Bools,  # [C, 2]
    steps: int,
) -> None:
    """Count nodes, in place; ``accepted`` is whether the target drew the path to a node.

    Columns without nodes fade by ``steps`` steps where there were rows that could have had some,
    ``present``.
    """
    k, p = counts, proposed
    columns = len(k.nodes)
    new = np.zeros((4, columns, 2, KINDS, PLACES, BINS))
    row, depths = -1, 0
    for q in range(len(p.row)):
        c, is_sampled, x = p.column[q], 1 if p.sampled[q] else 0, p.confidence[q]
        if c < 0:
            continue
        if p.row[q] != row:
            row, depths = p.row[q], 0
        kind, place = kind_of(p.expected[q]), min(p.depth[q], PLACES - 1)
        depth = 1 << min(p.depth[q], 62)
        b = 0
        while b < BINS - 1 and x >= BOUNDS[b + 1]:
            b += 1
        if not depths & depth:
            depths |= depth
            new[3, c, is_sampled, kind, place, b] += 1.0
        new[0, c, is_sampled, kind, place, b] += 1.0
        new[1, c, is_sampled, kind, place, b] += x
        new[2, c, is_sampled, kind, place, b] += 1.0 if accepted[q] else 0.0
    for c in range(columns):
        for is_sampled in range(2):
            total = new[0, c, is_sampled].sum()
            keep = math.exp(-total / _MEMORY_NODES)
            if total == 0 and present[c, is_sampled]:
                keep = _REST_KEEP**steps
            if total == 0 and keep == 1.0:
                continue
            for kind in range(KINDS):
                for place in range(PLACES):
                    at = c, is_sampled, kind, place
                    for b in range(BINS):
                        k.nodes[at][b] = keep * k.nodes[at][b] + new[0][at][b]
                        k.claimed[at][b] = keep * k.claimed[at][b] + new[1][at][b]
                        k.matched[at][b] = keep * k.matched[at][b] + new[2][at][b]
                        k.likeliest[at][b] = keep * k.likeliest[at][b] + new[3][at][b]


class TrimShares(NamedTuple):
    """Shares of proposals that the trim leaves at a price. A place counts where the node before it
    was verified, so that shares of places multiply along a path.
    """

    accepted: Floats
    """[C, 2, KINDS, PLACES] share of what the nodes of a place would have had accepted."""
    path: Floats
    """[C, 2, KINDS, PLACES] the same of the likeliest node alone."""
    nodes: Floats
    """[C, 2, KINDS, PLACES] nodes that are left of a proposal; not a share."""
    reached: Floats
    """[C, 2, KINDS, PLACES] how often the likeliest node is left, and the next place is reached."""


@helper
def _kept_at(counts: Counts, at: tuple[int, int, int, int], cost: float, edge: Floats) -> Floats:
    """Return of the proposals of a kind, at a place: what the nodes have accepted and what the ones
    that are left have, both of the likeliest node alone, the proposals, the nodes that are left,
    and the proposals whose likeliest node is left.

    ``edge[BINS + 1]`` is how likely nodes at the edges of the bins are.
    """
    k, (c, is_sampled, _, _) = counts, at
    sums = np.zeros(7)
    for b in range(BINS):
        low, high = edge[b], edge[b + 1]
        likely, part, mean = k.accepted_at[c, is_sampled, b + 1], 0.0, 0.0
        if low >= cost:
            part, mean = 1.0, likely
        elif high > cost:
            part = (high - cost) / (high - low)
            mean = min((cost + high) / 2, likely / part)
        count, likeliest = k.nodes[at][b], k.likeliest[at][b]
        sums[0] += count * likely
        sums[1] += count * part * mean
        sums[2] += likeliest * likely
        sums[3] += likeliest * part * mean
        sums[4] += likeliest
        sums[5] += count * part
        sums[6] += likeliest * part
    return sums


@helper
def expect_kept(
    counts: Counts, c: int, is_sampled: int, kind: int, cost: float, shares: TrimShares
) -> None:
    """Compute what the trim leaves of a column's proposals of a kind where a node costs ``cost``
    tokens: the nodes that are likelier than they cost. The prior is the share left of all kinds.
    """
    k, prior = counts, _PRIOR_POSITIONS
    edge = np.empty(BINS + 1)
    for b in range(BINS + 1):
        edge[b] = interpolate(k.knots[c, is_sampled], k.accepted_at[c, is_sampled], BOUNDS[b])
    for place in range(PLACES):
        every, of_kind = np.zeros(7), np.zeros(7)
        for other in range(KINDS):
            sums = _kept_at(counts, (c, is_sampled, other, place), cost, edge)
            every += sums
            if other == kind:
                of_kind = sums
        had, remaining, path, path_left, proposals, nodes, reached = of_kind
        at = c, is_sampled, kind, place
        share = (every[1] + prior) / (every[0] + prior)
        shares.accepted[at] = (remaining + prior * share) / (had + prior)
        share = (every[3] + prior) / (every[2] + prior)
        shares.path[at] = (path_left + prior * share) / (path + prior)
        share = (every[5] + prior) / (every[4] + prior)
        shares.nodes[at] = (nodes + prior * share) / (proposals + prior)
        share = (every[6] + prior) / (every[4] + prior)
        shares.reached[at] = (reached + prior * share) / (proposals + prior)


@helper
def _make_rising(
    share: Floats,  # [BINS]
    weight: Floats,  # [BINS]
) -> None:
    """Make shares rise, in place: the nearest in weighted squares.

    Neighbours that fall are pooled (pool adjacent violators, Ayer et al. 1955).
    """
    count = len(share)
    mean, mass, size = np.empty(count), np.empty(count), np.empty(count, np.int64)
    pools = 0
    for b in range(count):
        mean[pools], mass[pools], size[pools] = share[b], weight[b], 1
        while pools and mean[pools - 1] >= mean[pools]:
            total = mass[pools - 1] + mass[pools]
            mean[pools - 1] = mean[pools - 1] * mass[pools - 1] + mean[pools] * mass[pools]
            mean[pools - 1] /= total
            mass[pools - 1] = total
            size[pools - 1] += size[pools]
            pools -= 1
        pools += 1
    b = 0
    for pool in range(pools):
        for _ in range(size[pool]):
            share[b] = mean[pool]
            b += 1


@entry(COUNTS)
def set_maps(counts: Counts) -> None:
    """Compute what confidences are worth, in place: ``accepted_at`` at ``knots``."""
    k = counts
    mean, share, weight = np.empty(BINS), np.empty(BINS), np.empty(BINS)
    for c in range(len(k.nodes)):
        for is_sampled in range(2):
            for b in range(BINS):
                prior = _PRIOR_NODES * (BOUNDS[b] + BOUNDS[b + 1]) / 2
                weight[b] = k.nodes[c, is_sampled, :, :, b].sum() + _PRIOR_NODES
                mean[b] = (k.claimed[c, is_sampled, :, :, b].sum() + prior) / weight[b]
                share[b] = (k.matched[c, is_sampled, :, :, b].sum() + prior) / weight[b]
            _make_rising(share, weight)
            k.knots[c, is_sampled, 0] = k.accepted_at[c, is_sampled, 0] = 0.0
            k.knots[c, is_sampled, 1:-1] = mean
            k.accepted_at[c, is_sampled, 1:-1] = share
            k.knots[c, is_sampled, -1] = 1.0
            k.accepted_at[c, is_sampled, -1] = min(share[-1] / mean[-1], 1.0)
