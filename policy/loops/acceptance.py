"""How likely a draft's tokens are accepted: what chains teach, and what follows for a request.

The estimates are explained in ``policy.acceptance``. Columns C are of tenants and drafts, slots S
of requests; a slot without a tenant is free, and the last one always is. Bins B are of
the evidence that a draft shows (``policy.evidence``).
"""

import math
from typing import NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, record

MIN_VARIANCE, MAX_VARIANCE = 1e-3, 9.0  # of deviations between requests, squared logits
FIRST_REQUESTS = 20.0  # requests that the first belief of their variance counts for
_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_BIN_CHAINS = 4.0  # prior weight of the draft's odds in a bin, in positions
_DRAFT_MEMORY_CHAINS = 500.0  # memory of a bin's level, in its own chains
_ALIKE = 0.05  # correlation of the chains of one step (Kish's design effect)
_IDLE_FADING = 3.0  # how much faster a low level fades while no draft is used
_VARIANCE_MEMORY_REQUESTS = 200.0  # memory of the variance between requests
_SHRINKAGE_REQUESTS = 10.0  # requests after which half of a deviation is attributed to the request
MOST_STEP = 2.0  # logits of one step: farther away Laplace's approximation overshoots
_RECENT_KEEP = 0.85  # share of a recent surprise that the next chain leaves: a memory of seven
_CHANGE_DEVIATIONS = 3.0  # standard deviations of a recent surprise that is no chance
_LEAST_VARIANCE = 0.1  # least variance of a recent surprise: one rejection is no change


class Constants(NamedTuple):
    """Priors and memories (``policy.acceptance.AcceptanceConfig``)."""

    prior_hazard: float
    prior_strength: float
    request_memory_steps: float
    draft_memory_rows: float


class Estimates(NamedTuple):
    """Observations, and what follows from them."""

    information: Floats
    """[S, D, 2] the weight of a request's own chains, and the deviation they show times that."""
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
    """[C, B, K] positions of all chains that were accepted."""
    draft_reached: Floats
    """[C, B, K] positions that were reached."""
    draft_hazard: Floats
    """[C, B, K] the level that follows."""
    variance: Floats
    """[C] of deviations between requests."""
    requests: Floats
    """[T] requests that taught the variance."""


CONSTANTS = record(Constants, *[FLOATS[0]] * 4)
ESTIMATES = record(
    Estimates,
    *(FLOATS[3], FLOATS[3], FLOATS[2], FLOATS[3], FLOATS[1], INTS[1]),
    *(FLOATS[3], FLOATS[3], FLOATS[3], FLOATS[1], FLOATS[1]),
)


@helper
def find(requests: Ints, slots: Ints, request: int) -> int:
    """Return the one of ``slots[m]`` that a request of the sorted ``requests[m]`` has, -1 where it
    has none.
    """
    low, high = 0, len(requests)
    while low < high:
        middle = (low + high) // 2
        if requests[middle] < request:
            low = middle + 1
        else:
            high = middle
    return slots[low] if low < len(requests) and requests[low] == request else -1


@entry(INTS[1], INTS[1], INTS[1], INTS[1])
def find_all(requests: Ints, slots: Ints, request: Ints, slot: Ints) -> int:
    """Look up the ``slots[m]`` that ``request[n]`` have among the sorted ``requests[m]``, into
    ``slot[n]``; return how many have none.
    """
    missing = 0
    for i in range(len(request)):
        slot[i] = find(requests, slots, request[i])
        missing += slot[i] < 0
    return missing


@helper
def shifted(hazard: float, shift: float) -> float:
    """Return a hazard whose odds are ``shift`` times as high."""
    odds = shift * hazard
    return odds / (odds + (1.0 - hazard))


@entry(ESTIMATES, INTS[1], INTS[2], FLOATS[3])
def set_hazards(estimates: Estimates, slot: Ints, evidence: Ints, hazard: Floats) -> None:
    """Compute what is expected of requests in ``slot[n]``, ``hazard[K, D, n]``: the level of the
    bin of evidence, ``evidence[n, D]``, at their deviation.
    """
    e = estimates
    k_max, drafts, n = hazard.shape
    for i in range(n):
        s = slot[i]
        for d in range(drafts):
            shift, c, b = math.exp(e.deviation[s, d]), e.tenant[s] * drafts + d, evidence[i, d]
            for j in range(k_max):
                hazard[j, d, i] = shifted(e.draft_hazard[c, b, j], shift)


class Claims(NamedTuple):
    """The confidences that drafts claim for the nodes of a batch, a row's one after the other."""

    row: Ints  # [q]
    draft: Ints  # [q]
    depth: Ints
    """[q] the tokens before it on its path."""
    confidence: Floats
    """[q] in the whole path to it."""


CLAIMS = record(Claims, INTS[1], INTS[1], INTS[1], FLOATS[1])
_LEAST_ODDS = 1e-3  # of a claim, either way


@helper
def _odds(probability: float) -> float:
    return max(probability, _LEAST_ODDS) / max(1.0 - probability, _LEAST_ODDS)


@entry(INTS[1], FLOATS[2], FLOATS[3], FLOATS[3], INTS[1], INTS[2], CLAIMS, FLOATS[1], FLOATS[1])
def weigh_claims(
    tenant: Ints,  # [S]
    deviation: Floats,  # [S, D]
    level: Floats,  # [C, B, K]
    other: Floats,  # [K, D, n]
    slot: Ints,  # [n]
    evidence: Ints,  # [n, D]
    claims: Claims,
    score: Floats,  # [q]
    first: Floats,  # [q]
) -> None:
    """Compute ``score``: the geometric mean of the odds that the draft claims of a path and of
    those that are expected of its row, never rising within a row; and ``first``, how likely the
    first token of its row's proposal is expected to be accepted.

    ``other`` are hazards instead of those of the ``Estimates``; empty: none.
    """
    p, drafts, k_max = claims, deviation.shape[1], level.shape[2]
    survival, row, least = np.empty(k_max), -1, 1.0
    for q in range(len(p.row)):
        r, d = p.row[q], p.draft[q]
        s = slot[r]
        if r != row:
            row, product, least = r, 1.0, 1.0
            shift = math.exp(deviation[s, d]) if s >= 0 else 1.0
            c = tenant[s] * drafts + d if s >= 0 else d
            for j in range(k_max):
                if other.size:
                    product *= other[j, d, r]
                else:
                    product *= shifted(level[c, evidence[r, d], j], shift)
                survival[j] = product
        expected = survival[min(p.depth[q], k_max - 1)]
        odds = math.sqrt(_odds(p.confidence[q]) * _odds(expected))
        least = min(least, odds / (1.0 + odds))
        score[q], first[q] = least, survival[0]


@helper
def _posterior(estimates: Estimates, s: int, d: int) -> tuple[float, float]:
    """Return mean and variance of a slot's deviation."""
    e = estimates
    variance = 1.0 / (e.information[s, d, 0] + e.prior[s, d, 0])
    return variance * (e.information[s, d, 1] + e.prior[s, d, 1]), variance


@helper
def _set_level(estimates: Estimates, constants: Constants, c: int) -> None:
    """Compute a column's levels from its counts: first that of all bins together.

    Each position's prior is the estimate of the one before it. An unprobed position inherits the
    posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next succeeds
    with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the plug-in power
    of the mean would understate it. a + b is the evidence of all positions so far: what is well
    known is inherited as it is.

    A bin's prior is that level at the odds by which the bin differs at the positions before.
    """
    e, strength = estimates, constants.prior_strength
    bins, k_max = e.draft_hazard.shape[1:]
    level, everything = np.empty(k_max), 0.0
    inherited, weight = constants.prior_hazard, strength
    for j in range(k_max):
        accepted = reached = 0.0
        for b in range(bins):
            accepted += e.draft_accepted[c, b, j]
            reached += e.draft_reached[c, b, j]
        if j == 0:
            everything = reached
        mean = (accepted + strength * inherited) / (reached + strength)
        level[j] = min(max(mean, _MIN_HAZARD), _MAX_HAZARD)
        weight += reached
        inherited = (mean * weight + 1) / (weight + 1)
        weight += 1
    for b in range(bins):
        if e.draft_reached[c, b, 0] in (0.0, everything):
            e.draft_hazard[c, b] = level
            continue
        accepted = rejected = most = least = _BIN_CHAINS
        for j in range(k_max):
            right, reached = e.draft_accepted[c, b, j], e.draft_reached[c, b, j]
            expected = shifted(level[j], accepted * least / (rejected * most))
            mean = (right + strength * expected) / (reached + strength)
            e.draft_hazard[c, b, j] = min(max(mean, _MIN_HAZARD), _MAX_HAZARD)
            accepted += right
            rejected += reached - right
            most += reached * level[j]
            least += reached * (1.0 - level[j])


@entry(ESTIMATES, CONSTANTS, FLOATS[0])
def refresh(estimates: Estimates, constants: Constants, keep: float) -> None:
    """Leave ``keep`` of the drafts' counts, and compute levels and deviations again, in place."""
    e = estimates
    for c in range(len(e.variance)):
        e.draft_accepted[c] *= keep
        e.draft_reached[c] *= keep
        _set_level(e, constants, c)
    for s in range(len(e.tenant)):
        if e.tenant[s] >= 0:
            for d in range(e.deviation.shape[1]):
                e.deviation[s, d], _ = _posterior(e, s, d)


class Chains(NamedTuple):
    """Chains with a known outcome: ``accepted`` of the first ``scored`` positions of a draft's."""

    request: Ints  # [m]
    draft: Ints  # [m]
    accepted: Ints  # [m]
    scored: Ints  # [m]
    evidence: Ints
    """[m] the bin of what the draft showed."""


CHAINS = record(Chains, *[INTS[1]] * 5)


@helper
def _fade(
    estimates: Estimates,
    constants: Constants,
    slot: Ints,  # [n]
    draft: Ints,  # [n]
    emitted: Ints,  # [n]
    steps: int,
) -> None:
    """Let evidence fade by the last steps of some slots: that of each request, and its tenant's
    levels. All but the last one were plain.

    If no row used a ``draft``, levels below the prior fade faster and others do not: nothing
    else could show that one pays again.
    """
    e = estimates
    drafts, tenants = e.deviation.shape[1], len(e.requests)
    rows = np.zeros(tenants)
    keep = math.exp(-steps / constants.request_memory_steps)
    idle = len(draft) > 0 and draft.max() < 0
    for i in range(len(slot)):
        s = slot[i]
        if tenants == 1:
            rows[0] += steps
        if s < 0:
            continue
        if tenants > 1:
            rows[e.tenant[s]] += steps
        e.request_tokens[s] += emitted[i] + steps - 1
        for d in range(drafts):
            e.information[s, d, 0] *= keep
            e.information[s, d, 1] *= keep
    for c in range(len(e.variance)):
        if rows[c // drafts]:
            share = math.exp(-rows[c // drafts] / constants.draft_memory_rows)
            if idle:
                is_low = e.draft_hazard[c, 0, 0] < constants.prior_hazard
                share = share**_IDLE_FADING if is_low else 1.0
            e.draft_accepted[c] *= share
            e.draft_reached[c] *= share
            if idle:
                _set_level(e, constants, c)


@helper
def _learn_chains(
    estimates: Estimates,
    requests: Ints,  # [m]
    slots: Ints,  # [m]
    chains: Chains,
    sums: Floats,  # [C, B, 3, K]
) -> None:
    """Learn the deviations of requests from chains, in place, and add these to ``sums``: accepted,
    reached, and expected in view of the request.

    If a request's last few chains cannot be chance, only these count. (Each array is
    fetched once: numba counts references at every use of a tuple's array.)
    """
    information, prior, deviation = estimates.information, estimates.prior, estimates.deviation
    recent, level, tenant = estimates.recent, estimates.draft_hazard, estimates.tenant
    request, draft, evidence = chains.request, chains.draft, chains.evidence
    right, all_scored = chains.accepted, chains.scored
    drafts, tenants = deviation.shape[1], len(estimates.requests)
    for p in range(len(request)):
        scored, d, b = all_scored[p], draft[p], evidence[p]
        if scored == 0 or d < 0:
            continue
        s = find(requests, slots, request[p])
        if s < 0 and tenants > 1:
            continue
        c, x = d, 0.0
        if s >= 0:
            c, x = tenant[s] * drafts + d, deviation[s, d]
        shift, weight, surprise = math.exp(x), 0.0, 0.0
        accepted = min(right[p], scored)
        for j in range(min(accepted + 1, scored)):
            one = 1.0 if j < accepted else 0.0
            hazard = shifted(level[c, b, j], shift)
            weight += hazard * (1.0 - hazard)
            surprise += one - hazard
            sums[c, b, 0, j] += one
            sums[c, b, 1, j] += 1.0
            sums[c, b, 2, j] += hazard
        if s < 0:
            continue
        most = MOST_STEP * (information[s, d, 0] + weight + prior[s, d, 0])
        moved = weight * x + min(max(surprise, -most), most)
        recent[s, d, 0] = _RECENT_KEEP * recent[s, d, 0] + weight
        recent[s, d, 1] = _RECENT_KEEP * recent[s, d, 1] + surprise
        chance = _CHANGE_DEVIATIONS**2 * (recent[s, d, 0] + _LEAST_VARIANCE)
        if recent[s, d, 1] ** 2 > chance:
            weight, moved = recent[s, d, 0], recent[s, d, 0] * x + recent[s, d, 1]
            recent[s, d, 0] = recent[s, d, 1] = 0.0
            information[s, d, 0] = information[s, d, 1] = 0.0
        information[s, d, 0] += weight
        information[s, d, 1] += moved
        total = information[s, d, 0] + prior[s, d, 0]
        deviation[s, d] = (information[s, d, 1] + prior[s, d, 1]) / total


@entry(ESTIMATES, CONSTANTS, INTS[1], INTS[1], CHAINS, INTS[1], CHAINS, INTS[0], INTS[1])
def learn(
    estimates: Estimates,
    constants: Constants,
    requests: Ints,  # [m]
    slots: Ints,  # [m]
    step: Chains,
    emitted: Ints,  # [n]
    free: Chains,
    steps: int,
    slot: Ints,  # [n]
) -> None:
    """Learn, in place, from the rows of a step and from ``free`` chains; ``slot`` becomes the
    slots of the rows.

    ``steps`` pass for its rows, the last one with the tokens that they ``emitted``. A request
    without a slot teaches its draft's level alone, and only where there is one tenant. Levels learn
    from what surprises in view of the request: late positions are reached by easy requests, which
    says nothing about the draft. At first, while it is not known how requests differ, all is
    attributed to the draft.
    """
    e = estimates
    columns, bins, k_max = e.draft_hazard.shape
    drafts = e.deviation.shape[1]
    for i in range(len(slot)):
        slot[i] = find(requests, slots, step.request[i])
    _fade(e, constants, slot, step.draft, emitted, steps)
    sums = np.zeros((columns, bins, 3, k_max))
    _learn_chains(e, requests, slots, step, sums)
    _learn_chains(e, requests, slots, free, sums)
    for c in range(columns):
        finished = e.requests[c // drafts] - FIRST_REQUESTS
        share = finished / (finished + _SHRINKAGE_REQUESTS)
        chains = sums[c, :, 1, 0].sum()
        if chains == 0:
            continue
        sums[c] /= 1.0 + _ALIKE * (chains - 1.0)
        for b in range(bins):
            if sums[c, b, 1, 0] == 0:
                continue
            keep = math.exp(-sums[c, b, 1, 0] / _DRAFT_MEMORY_CHAINS)
            for j in range(k_max):
                expected = e.draft_hazard[c, b, j] * sums[c, b, 1, j]
                explained = share * (expected - sums[c, b, 2, j])
                reached = keep * e.draft_reached[c, b, j] + sums[c, b, 1, j]
                accepted = keep * e.draft_accepted[c, b, j] + sums[c, b, 0, j] + explained
                e.draft_reached[c, b, j] = reached
                e.draft_accepted[c, b, j] = min(max(accepted, 0.0), reached)
        _set_level(e, constants, c)


@entry(ESTIMATES, INTS[1], INTS[1], INTS[1], INTS[1], INTS[1], INTS[1], INTS[1])
def admit(
    estimates: Estimates,
    requests: Ints,  # [m]
    slots: Ints,  # [m]
    request: Ints,  # [n]
    tenant: Ints,  # [n]
    all_known: Ints,  # [m + n]
    all_slots: Ints,  # [m + n]
    slot: Ints,  # [n]
) -> int:
    """Give each request (a tenant's row each) a slot, those without one a free one, into ``slot``;
    ``all_known, all_slots`` become the requests, rising, and their slots. Return how many are new.

    A new one is expected to be as all of its tenant are. There is room for them.
    """
    e = estimates
    drafts, new, free = e.deviation.shape[1], 0, 0
    size = len(requests)
    all_known[:size] = requests
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
        e.information[free] = 0.0
        e.recent[free] = 0.0
        e.deviation[free] = 0.0
        e.request_tokens[free] = 0.0
        for d in range(drafts):
            e.prior[free, d, 0] = 1.0 / e.variance[tenant[i] * drafts + d]
            e.prior[free, d, 1] = 0.0
    return new


@entry(ESTIMATES, CONSTANTS, INTS[1], INTS[1], INTS[1])
def forget(
    estimates: Estimates,
    constants: Constants,
    requests: Ints,  # [m]
    slots: Ints,  # [m]
    request: Ints,  # [n]
) -> int:
    """Free the slots of finished requests, in place, and take them from ``requests, slots``; return
    how many requests are left there.

    They teach their tenant how requests differ, and its drafts' levels their mean: a level of
    counts alone would be that of the requests that use a draft most.
    """
    e = estimates
    columns, bins, k_max = e.draft_hazard.shape
    drafts = e.deviation.shape[1]
    moments, means, finished = np.zeros(columns), np.zeros(columns), np.zeros(len(e.requests))
    gone, count = np.empty(len(request), np.int64), 0
    for i in range(len(request)):
        s = find(requests, slots, request[i])
        if s < 0:
            continue
        gone[count] = s
        count += 1
        if e.information[s, :, 0].max() > 0:
            finished[e.tenant[s]] += 1
            for d in range(drafts):
                c = e.tenant[s] * drafts + d
                mean, variance = _posterior(e, s, d)
                means[c] += mean
                moments[c] += mean * mean + variance - e.variance[c]
    for i in range(count):
        e.information[gone[i]] = 0.0
        e.tenant[gone[i]] = -1
    remaining = 0
    for i in range(len(requests)):
        if e.tenant[slots[i]] >= 0:
            requests[remaining], slots[remaining] = requests[i], slots[i]
            remaining += 1
    for t in range(len(finished)):
        if finished[t] == 0:
            continue
        total = e.requests[t] + finished[t]
        e.requests[t] = min(total, _VARIANCE_MEMORY_REQUESTS)
        for c in range(t * drafts, (t + 1) * drafts):
            variance = e.variance[c] + moments[c] / total
            e.variance[c] = min(max(variance, MIN_VARIANCE), MAX_VARIANCE)
            for b in range(bins):
                for j in range(k_max):
                    reached, level = e.draft_reached[c, b, j], e.draft_hazard[c, b, j]
                    moved = reached * level * (1 - level) * means[c] / total
                    moved += e.draft_accepted[c, b, j]
                    e.draft_accepted[c, b, j] = min(max(moved, 0.0), reached)
            _set_level(e, constants, c)
    return remaining


@helper
def set_doubt(
    estimates: Estimates,
    constants: Constants,
    s: int,
    d: int,
    b: int,
    hazard: Floats,  # [K]
    spread: Floats,  # [K]
) -> float:
    """Compute how far the hazards of a request may be off, as deviations ``spread``, and return the
    variance of its deviation (squared logits).
    """
    e = estimates
    c = e.tenant[s] * e.deviation.shape[1] + d
    _, variance = _posterior(e, s, d)
    for j in range(len(hazard)):
        slope = hazard[j] * (1.0 - hazard[j])
        level = 1.0 / (e.draft_reached[c, b, j] + constants.prior_strength + 1.0)
        spread[j] = math.sqrt(slope * (variance * slope + level))
    return variance
