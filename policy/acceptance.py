"""How likely a draft's tokens are accepted: a level per draft, a deviation per request.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted given that all
before it were; counted where a position was *reached*, it is unbiased under any planned length
(accepted / k is not). Survival is s_j = h_1 ... h_j, the expected tokens of a step
1 + sum_{j<=k} s_j.

A draft's level is made of counts. A request deviates from it by x logits at all positions of a
draft, x normal around 0 with a variance that finished requests teach, or around what its group
(``View.group``) lets expect. Its counts tell of x as normal observations would (Laplace's
approximation): with the hazards h at the present x they have the weight w = sum reached h (1 - h)
and the surprise s = sum (accepted - reached h). Around a mean m with a variance V it is next
believed to be v (w x + s + m / V), with v = 1 / (w + 1 / V): one Newton step to the likeliest x.
At last the request's own counts refine each position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .plan import BoolArray, FloatArray, IntArray

_Pair = tuple[FloatArray, FloatArray]

MIN_VARIANCE, MAX_VARIANCE = 1e-3, 9.0  # of deviations
_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_FIRST_REQUESTS = 20.0  # what the first belief of how requests differ counts for
_TELLING_REQUESTS = 10.0  # after so many half of a deviation is the request's own, not the draft's
_MOST_STEP = 2.0  # logits: farther from where it was made Laplace's approximation overshoots

_NEWTON_STEPS = 8  # of what comes from a file: all other counts grow step by step

_NO_GROUP = -1
_GROUP_SHARE = 0.5  # of the variance between requests: by what members of one group differ
_GROUP_MEMORY_REQUESTS = 30.0  # of a group, which drifts

_RECENT_KEEP = 0.75  # per step with a chain: a memory of four
_CHANGE_DEVIATIONS = 3.0  # beyond which a surprise is no chance
_FLOOR = 0.3  # of its variance: one surprise alone, however unlikely, changes nothing


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Priors and memories.

    Strengths count pseudo-observations; memories count a request's steps, a draft's own chains and
    row-steps of the whole batch, and finished requests. ``request_variance`` (of logits) is only the start: how unlike requests are
    is learnt. ``half_life_s`` is the time in which a draft's evidence loses half its weight even if
    nothing runs. Of groups of requests the ``most_groups`` last used are remembered.
    """

    prior_hazard: float = 0.6
    prior_strength: float = 4.0
    request_variance: float = 0.4
    position_strength: float = 30.0
    request_memory_steps: float = 100.0
    draft_memory_chains: float = 500.0
    draft_memory_rows: float = 8000.0
    law_memory_requests: float = 200.0
    most_groups: int = 128
    half_life_s: float = 900.0


@dataclass(slots=True, eq=False)
class AcceptanceState:
    """Evidence so far, of D drafts and K positions.

    ``slots`` is by request id its place in ``counts`` float64[2, slots, D, K] (accepted, reached),
    ``prior`` float64[2, slots, D] of what it deviates by (1 / V and m / V, in logits),
    ``deviation`` float64[slots, D], what that and the counts make of it, ``recent`` float64[2,
    slots, D], weight and surprise of the last few chains, and ``request_tokens`` float64[slots],
    emitted since it came. The last slot is nobody's. ``groups`` (the least recently used first)
    have slots too, with the counts of their members; ``source`` is by request id its group.
    ``draft_accepted``, ``draft_reached`` and the level made of them, ``draft_hazard``, are
    float64[D, K]; ``variance`` float64[D] is that between requests, learnt from so many
    ``requests``. ``now`` is the time up to which the drafts' counts have faded.
    """

    slots: dict[int, int]
    groups: dict[int, int]
    source: dict[int, int]
    counts: FloatArray
    prior: FloatArray
    deviation: FloatArray
    recent: FloatArray
    request_tokens: FloatArray
    draft_accepted: FloatArray
    draft_reached: FloatArray
    draft_hazard: FloatArray
    variance: FloatArray
    requests: float
    now: float


class Expected(NamedTuple):
    """What is expected of requests in some ``slot`` int64[n].

    ``hazard`` float64[n, D, K], positions first in memory: what is summed over rows lies together.
    """

    slot: IntArray
    hazard: FloatArray

    def rows(self, chosen: IntArray | BoolArray) -> Expected:
        """Return what is expected of some of them."""
        return Expected(self.slot[chosen], self.hazard[chosen])


def shifted(hazard: FloatArray, shift: FloatArray) -> FloatArray:
    """Return hazards whose logits are higher by ``shift``; the shapes broadcast."""
    found: FloatArray = np.exp(shift) * hazard  # the odds, at first
    found /= found + (1.0 - hazard)
    return found


def _evidence(counts: FloatArray, hazard: FloatArray) -> _Pair:
    """Return weight and surprise [..., n, D] of counts [..., 2, n, D, K] at a hazard [n, D, K]."""
    expected = counts[..., 1, :, :, :] * hazard
    surprise = np.add.reduce(counts[..., 0, :, :, :] - expected, -1)
    expected *= 1.0 - hazard
    return np.add.reduce(expected, -1), surprise


def _believed(prior: FloatArray, evidence: _Pair, deviation: FloatArray) -> _Pair:
    """Return mean and variance [n, D] of deviations by the evidence found at a ``deviation``."""
    weight, surprise = evidence
    variance = 1.0 / (weight + prior[0])
    step = variance * (weight * deviation + surprise + prior[1]) - deviation
    return deviation + np.minimum(np.maximum(step, -_MOST_STEP), _MOST_STEP), variance


def _posterior(state: AcceptanceState, slots: list[int] | slice) -> _Pair:
    """Return mean and variance [n, D] of deviations as the counts of some slots have them."""
    deviation = state.deviation[slots]
    evidence = _evidence(state.counts[:, slots], shifted(state.draft_hazard, deviation[:, :, None]))
    return _believed(state.prior[:, slots], evidence, deviation)


def _follow(after: AcceptanceState, told: FloatArray, evidence: _Pair) -> None:
    """Follow recent chains, in place; of a request that changed at once only the newest count."""
    weight, surprise = evidence
    after.recent = recent = after.recent * np.where(weight > 0, _RECENT_KEEP, 1.0)
    recent[0] += weight
    recent[1] += surprise
    changed = recent[1] ** 2 > _CHANGE_DEVIATIONS**2 * (recent[0] + _FLOOR)
    if np.count_nonzero(changed):
        after.counts[:, changed] = told[:, changed]
        recent[:, changed] = 0.0


def _blurred(state: AcceptanceState, counts: FloatArray) -> FloatArray:
    """Return counts [2, D, K] of a request as counts of its group.

    They tell no more of it than a member's deviation from its group lets them.
    """
    weight = (counts[1] * state.draft_hazard * (1.0 - state.draft_hazard)).sum(1)
    told: FloatArray = counts / (1.0 + _GROUP_SHARE * state.variance * weight)[:, None]
    return told


def _with_room(state: AcceptanceState, count: int) -> tuple[AcceptanceState, list[int]]:
    """Return a state whose rows may be written to, and so many slots of it, free and empty."""
    nobody = len(state.request_tokens) - 1
    used = {*state.slots.values(), *state.groups.values()}
    free = [slot for slot in range(nobody + count) if slot not in used][:count]
    more = max(free[-1] + 1 - nobody, nobody // 2) if free and free[-1] >= nobody else 0

    def grown(column: FloatArray, axis: int) -> FloatArray:
        shape = (*column.shape[:axis], more, *column.shape[axis + 1 :])
        return np.concatenate([column, np.zeros(shape)], axis)

    after = replace(
        state,
        counts=grown(state.counts, 1),
        prior=grown(state.prior, 1),
        deviation=grown(state.deviation, 0),
        recent=grown(state.recent, 1),
        request_tokens=grown(state.request_tokens, 0),
    )
    fresh = [*free, *range(nobody, nobody + more + 1)]
    after.prior[0, fresh], after.prior[1, fresh] = 1.0 / state.variance, 0.0
    after.deviation[free] = after.recent[:, free] = after.request_tokens[free] = 0.0
    return after, free


class AcceptanceModel:
    """The estimator: its methods return new states and leave the given one alone."""

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts, self._k_max, self._config = drafts, k_max, config
        self._first = np.tri(k_max + 1, k_max, -1)  # row j is 1 at the first j positions
        self.most_groups = config.most_groups

    def start(self) -> AcceptanceState:
        """Return the state before any evidence."""
        variance = np.full(self._drafts, self._config.request_variance)
        rows, none = np.zeros((2, 9, self._drafts)), np.zeros((self._drafts, self._k_max))
        counts, prior = np.zeros((*rows.shape, self._k_max)), rows + 0.0
        prior[0] = 1.0 / variance
        of_requests = counts, prior, rows[0], rows, np.zeros(9)
        of_drafts = none, none, none, variance, _FIRST_REQUESTS
        state = AcceptanceState({}, {}, {}, *of_requests, *of_drafts, -math.inf)
        return self.with_drafts(state, none, none)

    def admit(
        self,
        state: AcceptanceState,
        requests: list[int],
        group: list[int] | None = None,
    ) -> AcceptanceState:
        """Return the state with a slot for every request (``group`` of each, -1 or None: none).

        A new one is believed to be as its group, as far as that is known, else as all are.
        """
        new = {r: i for i, r in enumerate(requests) if r not in state.slots}
        if not new:
            return state
        after, free = _with_room(state, len(new))
        after.slots = {**state.slots, **dict(zip(new, free, strict=True))}
        if group is not None and self.most_groups:
            source = {r: group[i] for r, i in new.items() if group[i] != _NO_GROUP}
            after.source = {**state.source, **source}
            for request in (r for r, its in source.items() if its in state.groups):
                mean, variance = _posterior(state, [state.groups[source[request]]])
                weight = 1.0 / (variance[0] + _GROUP_SHARE * state.variance)
                after.prior[:, after.slots[request]] = weight, weight * mean[0]
                after.deviation[after.slots[request]] = mean[0]
        return after

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        """Return the state without these requests; unknown ones do not matter.

        What they showed teaches how unlike requests are, the drafts' levels their mean (one made
        of counts alone would be that of the requests that use a draft most), and their groups.
        """
        gone = [request for request in requests if request in state.slots]
        if not gone:
            return state
        after = self._taught_groups(state, gone)
        after.slots = state.slots.copy()
        rows = [after.slots.pop(request) for request in gone]
        after.counts[:, rows] = 0.0
        seen = [row for row in rows if state.counts[1, row].any()]
        if seen:
            mean, variance = _posterior(state, seen)
            total = state.requests + len(seen)
            step = (mean * mean + variance - state.variance).sum(0) / total
            after.variance = np.clip(state.variance + step, MIN_VARIANCE, MAX_VARIANCE)
            after.requests = min(total, self._config.law_memory_requests)
            after.prior[0, [*after.groups.values()]] = 1.0 / after.variance
            hazard, reached = state.draft_hazard, state.draft_reached
            slope = reached * hazard * (1.0 - hazard)
            moved = state.draft_accepted + slope * (mean.sum(0) / total)[:, None]
            after.draft_accepted = np.clip(moved, 0.0, reached)
            after.draft_hazard = self._levels(after, range(self._drafts))
        return after

    def _taught_groups(self, state: AcceptanceState, gone: list[int]) -> AcceptanceState:
        """Return a state whose rows may be written to, groups having learnt from these requests."""
        members = [(request, state.source[request]) for request in gone if request in state.source]
        new = {group for _, group in members}.difference(state.groups)
        after, free = _with_room(state, len(new))
        after.source, groups, counts = state.source.copy(), state.groups.copy(), after.counts
        keep = math.exp(-1 / _GROUP_MEMORY_REQUESTS)
        for request, group in members:
            slot = groups.pop(group, None)
            slot = groups[group] = free.pop() if slot is None else slot
            own = state.counts[:, state.slots[request]]
            counts[:, slot] = keep * counts[:, slot] + _blurred(state, own)
            del after.source[request]
        while len(groups) > self.most_groups:
            counts[:, groups.pop(next(iter(groups)))] = 0.0
        after.groups = groups
        return after

    def with_groups(self, state: AcceptanceState, groups: dict[int, FloatArray]) -> AcceptanceState:
        """Return the state with these groups, counts [2, D, K] each, the least recent first."""
        after, free = _with_room(replace(state, groups={}), len(groups))
        after.groups = dict(zip(groups, free, strict=True))
        for slot, counts in zip(free, groups.values(), strict=True):
            after.counts[:, slot] = counts
        for _ in range(_NEWTON_STEPS):
            after.deviation, _ = _posterior(after, slice(None))
        return after

    def aged(self, state: AcceptanceState, now: float) -> AcceptanceState:
        """Return the state whose draft-level evidence has faded towards the prior by the time.

        A second at the least: finer steps change nothing. The first call sets the clock. Levels of
        drafts and requests whose counts have faded while nothing was proposed are made anew too.
        """
        passed_s = now - state.now
        if not 1.0 < passed_s < math.inf:
            return state if passed_s <= 1.0 else replace(state, now=now)
        keep = 0.5 ** (passed_s / self._config.half_life_s)
        after = self.with_drafts(state, keep * state.draft_accepted, keep * state.draft_reached)
        after.deviation, _ = _posterior(after, slice(None))
        after.now = now
        return after

    def with_drafts(
        self,
        state: AcceptanceState,
        accepted: FloatArray,
        reached: FloatArray,
    ) -> AcceptanceState:
        """Return the state with this draft-level evidence, float64[D, K]."""
        after = replace(state, draft_accepted=accepted, draft_reached=reached)
        after.draft_hazard = self._levels(after, range(self._drafts))
        return after

    def observe(
        self,
        state: AcceptanceState,
        request: IntArray,
        draft: IntArray,
        accepted: IntArray,
        scored: IntArray,
        emitted: IntArray,
    ) -> AcceptanceState:
        """Learn from m chains: row r saw ``scored[r]`` positions, the first ``accepted[r]`` held.

        Positions behind the first rejection were not reached and are no evidence. Requests without
        a slot teach the draft level only. The first rows are those that took a step and ``emitted``
        so many tokens: by it their own older evidence fades, and a little all drafts'. A request may
        be there several times, for several steps.
        """
        nobody, slots = len(state.request_tokens) - 1, state.slots
        slot = np.array([slots.get(r, nobody) for r in request.tolist()], np.int64)
        stepped = slot[: len(emitted)]
        steps = np.bincount(stepped, minlength=nobody + 1)
        keep = np.exp(steps / -self._config.request_memory_steps)[:, None, None]
        tokens = state.request_tokens + np.bincount(stepped, emitted, nobody + 1)
        after = replace(state, counts=state.counts * keep, request_tokens=tokens)
        fading = math.exp(-len(emitted) / self._config.draft_memory_rows)
        after.draft_accepted = fading * state.draft_accepted
        after.draft_reached = fading * state.draft_reached
        if np.count_nonzero(scored):
            told = self._told((slot, draft, accepted, scored), nobody + 1)
            hazard = shifted(state.draft_hazard, state.deviation[:, :, None])
            after.counts += told
            after.counts[:, -1] = 0.0
            weight, surprise = _evidence(np.array([told, after.counts]), hazard)
            evidence = weight[1], surprise[1]
            after.deviation, _ = _believed(state.prior, evidence, state.deviation)
            _follow(after, told, (weight[0], surprise[0]))
            self._count(after, np.add.reduce(told, 1), np.add.reduce(told[1] * hazard))
        return after

    def _told(self, chains: tuple[IntArray, ...], slots: int) -> FloatArray:
        """Return what chains (slot, draft, accepted, scored) add to counts of so many slots."""
        slot, draft, accepted, scored = chains
        ends, places = self._k_max + 1, slots * self._drafts * (self._k_max + 1)
        held = np.minimum(accepted, scored)
        seen = np.minimum(held + 1, scored)
        place = ends * (slot * self._drafts + np.maximum(draft, 0))
        end = np.concatenate([place + held, place + (seen + places)])
        ended = np.bincount(end, minlength=2 * places).astype(np.float64)
        told: FloatArray = ended.reshape(-1, ends).dot(self._first)
        return told.reshape(2, slots, self._drafts, self._k_max)

    def _count(self, after: AcceptanceState, told: FloatArray, expected: FloatArray) -> None:
        """Let the drafts' levels learn, in place, from what all chains told [2, D, K] and what was
        expected of them [D, K].

        They learn from what surprises in view of the request: late positions are reached by easy
        requests, which says nothing of the draft. At first, while it is not known how requests
        differ, all is taken for the draft's.
        """
        finished = after.requests - _FIRST_REQUESTS
        accepted, reached = told
        keep = np.exp(reached[:, :1] / -self._config.draft_memory_chains)
        held = after.draft_hazard * reached - expected
        held *= finished / (finished + _TELLING_REQUESTS)
        held += accepted
        held += keep * after.draft_accepted
        after.draft_reached = reached + keep * after.draft_reached
        np.maximum(held, 0.0, out=held)
        after.draft_accepted = np.minimum(held, after.draft_reached, out=held)
        after.draft_hazard = self._levels(after, reached[:, 0].nonzero()[0].tolist())

    def _levels(self, state: AcceptanceState, drafts: Iterable[int]) -> FloatArray:
        """Return the drafts' levels [D, K], those of some made anew of their counts.

        Each position's prior is the estimate of the one before it. An unprobed position inherits
        the posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next
        succeeds with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the
        plug-in power of the mean would understate it. a + b is the evidence of all positions so
        far: what is well known is inherited as it is.
        """
        strength, hazard = self._config.prior_strength, state.draft_hazard.copy()
        for draft in drafts:
            inherited, evidence, chain = self._config.prior_hazard, strength, []
            counts = state.draft_accepted[draft].tolist(), state.draft_reached[draft].tolist()
            for a, r in zip(*counts, strict=True):  # a few positions: quicker without arrays
                mean = (a + strength * inherited) / (r + strength)
                low = _MIN_HAZARD if mean < _MIN_HAZARD else mean
                chain.append(_MAX_HAZARD if low > _MAX_HAZARD else low)
                evidence += r
                inherited = (mean * evidence + 1) / (evidence + 1)
                evidence += 1
            hazard[draft] = chain
        return hazard

    def expected(self, state: AcceptanceState, request: list[int]) -> Expected:
        """Return what is expected of admitted requests."""
        slot = np.fromiter(map(state.slots.__getitem__, request), np.int64, len(request))
        deviation = state.deviation.take(slot, 0).T.copy()
        accepted, reached = state.counts.take(slot, 1).transpose(0, 3, 2, 1).copy()
        hazard = shifted(state.draft_hazard.T[:, :, None], deviation)
        hazard *= self._config.position_strength
        hazard += accepted
        hazard /= reached + self._config.position_strength
        return Expected(slot, hazard.transpose(2, 1, 0))

    def hazards(self, state: AcceptanceState, request: list[int]) -> FloatArray:
        """Return the hazards float64[n, D, K] expected of admitted requests."""
        return self.expected(state, request).hazard

    def doubt(self, state: AcceptanceState, expected: Expected) -> tuple[FloatArray, FloatArray]:
        """Return what is not known of requests.

        The standard deviations of their hazards, float64[n, D, K], and the variance of what they
        deviate by, float64[n, D] (logits).
        """
        slope = expected.hazard * (1.0 - expected.hazard)
        weight = (state.counts[1].take(expected.slot, 0) * slope).sum(2)
        variance = 1.0 / (weight + state.prior[0].take(expected.slot, 0))
        level = 1.0 / (state.draft_reached + self._config.prior_strength + 1.0)
        spread = slope * (variance[:, :, None] * slope + level)
        return np.sqrt(spread, out=spread), variance
