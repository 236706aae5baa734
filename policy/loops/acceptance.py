"""How likely a draft's tokens are accepted: what chains teach, and what follows for a request.

The estimates are explained in ``policy.acceptance``. Columns C are of tenants and drafts, slots S
of requests and groups; a slot without a tenant is free, and the last one always is.
"""

import math
from typing import NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, record

MIN_VARIANCE, MAX_VARIANCE = 1e-3, 9.0  # of deviations between requests, squared logits
FIRST_REQUESTS = 20.0  # requests that the first belief of their variance counts for
_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_POSITION_CHAINS = 30.0  # chains of a request that count as much as its deviation at a position
_DRAFT_MEMORY_CHAINS = 500.0  # memory of a draft's level, in its own chains
_VARIANCE_MEMORY_REQUESTS = 200.0  # memory of the variance between requests
_SHRINKAGE_REQUESTS = 10.0  # requests after which half of a deviation is attributed to the request
MOST_STEP = 2.0  # logits of one Newton step: farther away Laplace's approximation overshoots
_RECENT_KEEP = 0.85  # share of a recent surprise that the next chain leaves: a memory of seven
_CHANGE_DEVIATIONS = 3.0  # standard deviations of a recent surprise that is no chance
_LEAST_VARIANCE = 0.1  # least variance of a recent surprise: one rejection is no change


class Constants(NamedTuple):
    """Priors and memories (``policy.acceptance.AcceptanceConfig``)."""

    prior_hazard: float
    prior_strength: float
    request_memory_steps: float
    draft_memory_rows: float


class Evidence(NamedTuple):
    """What was seen, and what follows from it."""

    counts: Floats
    """[S, D, 2, K] positions that were accepted, and reached."""
    prior: Floats
    """[S, D, 2] 1 / V and m / V of the deviation before any evidence."""
    deviation: Floats
    """[S, D] logits by which a request differs from its draft's level."""
    recent: Floats
    """[S, D, 2] weight and surprise of the last few chains."""
    request_tokens: Floats
    """[S] tokens emitted since the request came."""
    tenant: Ints
    """[S] the row of the tenant, -1: the slot is free."""
    draft_accepted: Floats
    """[C, K] positions of all chains that were accepted."""
    draft_reached: Floats
    """[C, K] positions that were reached."""
    draft_hazard: Floats
    """[C, K] the level that follows."""
    variance: Floats
    """[C] of deviations between requests."""
    requests: Floats
    """[T] requests that taught the variance."""


CONSTANTS = record(Constants, *[FLOATS[0]] * 4)
EVIDENCE = record(
    Evidence,
    *(FLOATS[4], FLOATS[3], FLOATS[2], FLOATS[3], FLOATS[1], INTS[1]),
    *(FLOATS[2], FLOATS[2], FLOATS[2], FLOATS[1], FLOATS[1]),
)


@helper
def find(known: Ints, slots: Ints, request: int) -> int:
    """Return the slot of a request among the sorted ``known`` ones, -1 where it has none."""
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        if known[middle] < request:
            low = middle + 1
        else:
            high = middle
    return slots[low] if low < len(known) and known[low] == request else -1


@entry(INTS[1], INTS[1], INTS[1], INTS[1])
def find_all(known: Ints, slots: Ints, request: Ints, slot: Ints) -> int:
    """Look up the slots of requests, into ``slot``; return how many have none."""
    missing = 0
    for i in range(len(request)):
        slot[i] = find(known, slots, request[i])
        missing += slot[i] < 0
    return missing


@helper
def shifted(hazard: float, shift: float) -> float:
    """Return a hazard whose odds are ``shift`` times as high."""
    odds = shift * hazard
    return odds / (odds + (1.0 - hazard))


@entry(EVIDENCE, INTS[1], FLOATS[3])
def set_hazards(evidence: Evidence, slot: Ints, hazard: Floats) -> None:
    """Compute what is expected of requests, ``hazard[K, D, n]``: their counts refine each position
    of the level at their deviation.
    """
    e = evidence
    k_max, drafts, n = hazard.shape
    for i in range(n):
        s = slot[i]
        for d in range(drafts):
            shift, c = math.exp(e.deviation[s, d]), e.tenant[s] * drafts + d
            for j in range(k_max):
                expected = _POSITION_CHAINS * shifted(e.draft_hazard[c, j], shift)
                reached = e.counts[s, d, 1, j] + _POSITION_CHAINS
                hazard[j, d, i] = (expected + e.counts[s, d, 0, j]) / reached


@helper
def _posterior(evidence: Evidence, s: int, d: int) -> tuple[float, float]:
    """Return mean and variance of a slot's deviation, one Newton step on."""
    e = evidence
    c, x = e.tenant[s] * e.counts.shape[1] + d, e.deviation[s, d]
    shift, weight, surprise = math.exp(x), 0.0, 0.0
    for j in range(e.counts.shape[3]):
        hazard = shifted(e.draft_hazard[c, j], shift)
        expected = e.counts[s, d, 1, j] * hazard
        weight += expected * (1.0 - hazard)
        surprise += e.counts[s, d, 0, j] - expected
    variance = 1.0 / (weight + e.prior[s, d, 0])
    step = variance * (weight * x + surprise + e.prior[s, d, 1]) - x
    return x + min(max(step, -MOST_STEP), MOST_STEP), variance


@helper
def _set_level(evidence: Evidence, constants: Constants, c: int) -> None:
    """Compute a column's level from its counts.

    Each position's prior is the estimate of the one before it. An unprobed position inherits the
    posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next succeeds
    with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the plug-in power
    of the mean would understate it. a + b is the evidence of all positions so far: what is well
    known is inherited as it is.
    """
    e, strength = evidence, constants.prior_strength
    inherited, known = constants.prior_hazard, strength
    for j in range(e.draft_hazard.shape[1]):
        reached = e.draft_reached[c, j]
        mean = (e.draft_accepted[c, j] + strength * inherited) / (reached + strength)
        e.draft_hazard[c, j] = min(max(mean, _MIN_HAZARD), _MAX_HAZARD)
        known += reached
        inherited = (mean * known + 1) / (known + 1)
        known += 1


@entry(EVIDENCE, CONSTANTS, FLOATS[0], INTS[0])
def refresh(evidence: Evidence, constants: Constants, keep: float, newton_steps: int) -> None:
    """Leave ``keep`` of the drafts' counts, and compute levels and deviations again, in place."""
    e = evidence
    for c in range(len(e.variance)):
        for j in range(e.draft_hazard.shape[1]):
            e.draft_accepted[c, j] *= keep
            e.draft_reached[c, j] *= keep
        _set_level(e, constants, c)
    for _ in range(newton_steps):
        for s in range(len(e.tenant)):
            if e.tenant[s] >= 0:
                for d in range(e.counts.shape[1]):
                    e.deviation[s, d], _ = _posterior(e, s, d)


class Chains(NamedTuple):
    """Chains whose fate is known: ``accepted`` of the first ``scored`` positions of a draft's."""

    request: Ints
    draft: Ints
    accepted: Ints
    scored: Ints


CHAINS = record(Chains, *[INTS[1]] * 4)


@helper
def _count(known: Ints, slots: Ints, chains: Chains, counted: Floats, own: Floats) -> bool:
    """Count chains, into ``counted[S, D, 2, K]`` and, for requests without a slot, ``own[D, 2,
    K]``; return whether any.
    """
    any_scored = False
    for p in range(len(chains.request)):
        scored = chains.scored[p]
        if scored == 0:
            continue
        any_scored = True
        s, d = find(known, slots, chains.request[p]), max(chains.draft[p], 0)
        accepted = min(chains.accepted[p], scored)
        for j in range(min(accepted + 1, scored)):
            one = 1.0 if j < accepted else 0.0
            if s >= 0:
                counted[s, d, 0, j] += one
                counted[s, d, 1, j] += 1.0
            else:
                own[d, 0, j] += one
                own[d, 1, j] += 1.0
    return any_scored


@helper
def _fade(evidence: Evidence, constants: Constants, slot: Ints, emitted: Ints) -> None:
    """Let evidence fade by a step of some slots: that of each request, and its tenant's levels."""
    e = evidence
    _, drafts, _, k_max = e.counts.shape
    tenants = len(e.requests)
    rows = np.zeros(tenants)
    keep = math.exp(-1.0 / constants.request_memory_steps)
    for i in range(len(slot)):
        s = slot[i]
        if tenants == 1:
            rows[0] += 1
        if s < 0:
            continue
        if tenants > 1:
            rows[e.tenant[s]] += 1
        e.request_tokens[s] += emitted[i]
        for d in range(drafts):
            for j in range(k_max):
                e.counts[s, d, 0, j] *= keep
                e.counts[s, d, 1, j] *= keep
    for c in range(len(e.variance)):
        left = math.exp(-rows[c // drafts] / constants.draft_memory_rows)
        for j in range(k_max):
            e.draft_accepted[c, j] *= left
            e.draft_reached[c, j] *= left


@helper
def _learn_slots(evidence: Evidence, counted: Floats, sums: Floats) -> None:
    """Learn the deviations of all requests and groups from what was counted, [S, D, 2, K], and add
    it to ``sums[C, 3, K]``: accepted, reached, and expected in view of the request.

    Where the last few chains of a request cannot be chance, only the newest count.
    """
    e = evidence
    counts, level, deviation, recent = e.counts, e.draft_hazard, e.deviation, e.recent
    slots, drafts, _, k_max = counts.shape
    for s in range(slots):
        if e.tenant[s] < 0:
            continue
        for d in range(drafts):
            if counts[s, d, 1, 0] == 0 and counted[s, d, 1, 0] == 0:
                continue  # no evidence: the deviation stays what was expected
            c, x = e.tenant[s] * drafts + d, deviation[s, d]
            shift, weight, surprise, new_weight, new_surprise = math.exp(x), 0.0, 0.0, 0.0, 0.0
            for j in range(k_max):
                accepted, reached = counted[s, d, 0, j], counted[s, d, 1, j]
                counts[s, d, 0, j] += accepted
                counts[s, d, 1, j] += reached
                if counts[s, d, 1, j] == 0:
                    break  # no later position was reached, either
                hazard = shifted(level[c, j], shift)
                expected = counts[s, d, 1, j] * hazard
                weight += expected * (1.0 - hazard)
                surprise += counts[s, d, 0, j] - expected
                new_weight += reached * hazard * (1.0 - hazard)
                new_surprise += accepted - reached * hazard
                sums[c, 0, j] += accepted
                sums[c, 1, j] += reached
                sums[c, 2, j] += reached * hazard
            variance = 1.0 / (weight + e.prior[s, d, 0])
            step = variance * (weight * x + surprise + e.prior[s, d, 1]) - x
            deviation[s, d] = x + min(max(step, -MOST_STEP), MOST_STEP)
            if new_weight > 0:
                recent[s, d, 0] = _RECENT_KEEP * recent[s, d, 0] + new_weight
                recent[s, d, 1] = _RECENT_KEEP * recent[s, d, 1] + new_surprise
            known = _CHANGE_DEVIATIONS**2 * (recent[s, d, 0] + _LEAST_VARIANCE)
            if recent[s, d, 1] ** 2 > known:
                recent[s, d, 0] = recent[s, d, 1] = 0.0
                for j in range(k_max):
                    counts[s, d, 0, j] = counted[s, d, 0, j]
                    counts[s, d, 1, j] = counted[s, d, 1, j]


@entry(EVIDENCE, CONSTANTS, INTS[1], INTS[1], CHAINS, INTS[1], CHAINS, INTS[1])
def learn(
    evidence: Evidence,
    constants: Constants,
    known: Ints,
    slots: Ints,
    step: Chains,
    emitted: Ints,
    free: Chains,
    slot: Ints,
) -> None:
    """Learn, in place, from the rows of a step and from ``free`` chains; ``slot`` becomes the
    slots of the rows.

    A step passes for its rows, with the tokens that they ``emitted``. A request without a slot
    teaches its draft's level alone, and only where there is one tenant. Levels learn from what
    surprises in view of the request: late positions are reached by easy requests, which says
    nothing about the draft. At first, while it is not known how requests differ, all is attributed
    to the draft.
    """
    e = evidence
    slots_count, drafts, _, k_max = e.counts.shape
    tenants = len(e.requests)
    for i in range(len(slot)):
        slot[i] = find(known, slots, step.request[i])
    _fade(e, constants, slot, emitted)
    counted, own = np.zeros((slots_count, drafts, 2, k_max)), np.zeros((drafts, 2, k_max))
    any_step = _count(known, slots, step, counted, own)
    if not _count(known, slots, free, counted, own) and not any_step:
        return
    sums = np.zeros((len(e.variance), 3, k_max))
    if tenants == 1:
        for d in range(drafts):
            for j in range(k_max):
                sums[d, 0, j], sums[d, 1, j] = own[d, 0, j], own[d, 1, j]
                sums[d, 2, j] = own[d, 1, j] * e.draft_hazard[d, j]
    _learn_slots(e, counted, sums)
    for c in range(len(e.variance)):
        if sums[c, 1, 0] == 0:
            continue
        finished = e.requests[c // drafts] - FIRST_REQUESTS
        share = finished / (finished + _SHRINKAGE_REQUESTS)
        keep = math.exp(-sums[c, 1, 0] / _DRAFT_MEMORY_CHAINS)
        for j in range(k_max):
            explained = share * (e.draft_hazard[c, j] * sums[c, 1, j] - sums[c, 2, j])
            reached = keep * e.draft_reached[c, j] + sums[c, 1, j]
            accepted = keep * e.draft_accepted[c, j] + sums[c, 0, j] + explained
            e.draft_reached[c, j] = reached
            e.draft_accepted[c, j] = min(max(accepted, 0.0), reached)
        _set_level(e, constants, c)


@entry(EVIDENCE, INTS[1], INTS[1], INTS[1], INTS[1], INTS[1], INTS[1], INTS[1])
def admit(
    evidence: Evidence,
    known: Ints,
    slots: Ints,
    request: Ints,
    tenant: Ints,
    all_known: Ints,
    all_slots: Ints,
    slot: Ints,
) -> int:
    """Give each request (a tenant's row each) a slot, those without one a free one, into ``slot``;
    ``all_known, all_slots`` become the requests, rising, and their slots. Return how many are new.

    A new one is expected to be as all of its tenant are. There is room for them.
    """
    e = evidence
    drafts, new, free = e.counts.shape[1], 0, 0
    size = len(known)
    all_known[:size] = known
    all_slots[:size] = slots
    for i in range(len(request)):
        slot[i] = find(all_known[:size], all_slots[:size], request[i])
        if slot[i] >= 0:
            continue
        while e.tenant[free] >= 0:
            free += 1
        at = size
        while at > 0 and all_known[at - 1] > request[i]:
            all_known[at], all_slots[at] = all_known[at - 1], all_slots[at - 1]
            at -= 1
        all_known[at], all_slots[at], slot[i] = request[i], free, free
        size += 1
        new += 1
        e.tenant[free] = tenant[i]
        e.counts[free] = 0.0
        e.recent[free] = 0.0
        e.deviation[free] = 0.0
        e.request_tokens[free] = 0.0
        for d in range(drafts):
            e.prior[free, d, 0] = 1.0 / e.variance[tenant[i] * drafts + d]
            e.prior[free, d, 1] = 0.0
    return new


@entry(EVIDENCE, CONSTANTS, INTS[1], INTS[1], INTS[1], INTS[1])
def forget(
    evidence: Evidence, constants: Constants, known: Ints, slots: Ints, request: Ints, groups: Ints
) -> int:
    """Free the slots of finished requests, in place, and take them from ``known, slots``; return
    how many requests are left there.

    They teach their tenant how requests differ, and its drafts' levels their mean: a level of
    counts alone would be that of the requests that use a draft most. ``groups`` are the slots of
    groups, which start from that variance.
    """
    e = evidence
    _, drafts, _, k_max = e.counts.shape
    columns = len(e.variance)
    moments, means, seen = np.zeros(columns), np.zeros(columns), np.zeros(len(e.requests))
    gone, count = np.empty(len(request), np.int64), 0
    for i in range(len(request)):
        s = find(known, slots, request[i])
        if s < 0:
            continue
        gone[count] = s
        count += 1
        if e.counts[s, :, 1, 0].max() > 0:
            seen[e.tenant[s]] += 1
            for d in range(drafts):
                c = e.tenant[s] * drafts + d
                mean, variance = _posterior(e, s, d)
                means[c] += mean
                moments[c] += mean * mean + variance - e.variance[c]
    for i in range(count):
        e.counts[gone[i]] = 0.0
        e.tenant[gone[i]] = -1
    left = 0
    for i in range(len(known)):
        if e.tenant[slots[i]] >= 0:
            known[left], slots[left] = known[i], slots[i]
            left += 1
    for t in range(len(seen)):
        if seen[t] == 0:
            continue
        total = e.requests[t] + seen[t]
        e.requests[t] = min(total, _VARIANCE_MEMORY_REQUESTS)
        for c in range(t * drafts, (t + 1) * drafts):
            variance = e.variance[c] + moments[c] / total
            e.variance[c] = min(max(variance, MIN_VARIANCE), MAX_VARIANCE)
            for j in range(k_max):
                reached, level = e.draft_reached[c, j], e.draft_hazard[c, j]
                moved = e.draft_accepted[c, j] + reached * level * (1 - level) * means[c] / total
                e.draft_accepted[c, j] = min(max(moved, 0.0), reached)
            _set_level(e, constants, c)
    for i in range(len(groups)):
        for d in range(drafts):
            e.prior[groups[i], d, 0] = 1.0 / e.variance[e.tenant[groups[i]] * drafts + d]
    return left


@helper
def set_doubt(
    evidence: Evidence, constants: Constants, s: int, d: int, hazard: Floats, spread: Floats
) -> float:
    """Compute how far the hazards [K] of a request may be off, as deviations ``spread[K]``, and
    return the variance of its deviation (squared logits).
    """
    e = evidence
    c, weight = e.tenant[s] * e.counts.shape[1] + d, 0.0
    for j in range(len(hazard)):
        weight += e.counts[s, d, 1, j] * hazard[j] * (1.0 - hazard[j])
    variance = 1.0 / (weight + e.prior[s, d, 0])
    for j in range(len(hazard)):
        slope = hazard[j] * (1.0 - hazard[j])
        level = 1.0 / (e.draft_reached[c, j] + constants.prior_strength + 1.0)
        spread[j] = math.sqrt(slope * (variance * slope + level))
    return variance
