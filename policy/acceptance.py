"""How likely a draft's tokens are accepted: a level by draft and position, a deviation by request.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted, given that all
before it were. Counted where a position was *reached*, it is unbiased whatever lengths were planned
(accepted / k is not). Survival is s_j = h_1 ... h_j; a step of k tokens emits 1 + sum_{j<=k} s_j.

A draft's level is its counts, by tenant (``policy.tenants``). A request deviates from it by x
logits at all positions of a draft. Before any evidence x is normal around 0, with a variance that
finished requests of the tenant teach, or around what is expected of its group (``View.group``). Its
counts are taken as normal observations of x (Laplace's approximation): with the hazards h at the
present x they have the weight w = sum reached h (1 - h) and the surprise s = sum (accepted -
reached h). With a prior of mean m and variance V, x becomes v (w x + s + m / V), where
v = 1 / (w + 1 / V): one Newton step towards the likeliest x. At last the request's own counts
refine each position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .plan import BoolArray, FloatArray, IntArray
from .tenants import NOBODY, with_rows

_Pair = tuple[FloatArray, FloatArray]

MIN_VARIANCE, MAX_VARIANCE = 1e-3, 9.0  # of deviations between requests
_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_POSITION_CHAINS = 30.0  # of a request, that count as much as its deviation does at a position
_DRAFT_MEMORY_CHAINS = 500.0  # of a draft's own chains
_VARIANCE_MEMORY_REQUESTS = 200.0
_FIRST_REQUESTS = 20.0  # that the first belief of how requests differ counts for
_TELLING_REQUESTS = 10.0  # after so many, half of a deviation is the request's and not the draft's
_MOST_STEP = 2.0  # logits: farther away Laplace's approximation overshoots
_NEWTON_STEPS = 8  # for counts that come all at once; others grow step by step
NO_GROUP = -1
_GROUP_SHARE = 0.5  # of the variance between requests: that between members of one group
_GROUP_MEMORY_REQUESTS = 30.0
_RECENT_KEEP = 0.85  # in a step with a chain: a memory of seven steps
_CHANGE_DEVIATIONS = 3.0  # a recent surprise beyond is no chance
_LEAST_VARIANCE = 0.1  # of a recent surprise: one rejection, however unlikely, is no change


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Priors and memories.

    ``prior_strength`` counts chains that the prior hazard is worth, ``request_variance`` (squared
    logits) is the first belief of how unlike requests are. Evidence fades to 1/e in
    ``request_memory_steps`` steps of a request and ``draft_memory_rows`` steps of any requests; the
    drafts' levels fade by half in ``half_life_s`` even if nothing runs. The ``most_groups`` and the
    ``most_tenants`` last used are remembered.
    """

    prior_hazard: float = 0.6
    prior_strength: float = 4.0
    request_variance: float = 0.4
    request_memory_steps: float = 100.0
    draft_memory_rows: float = 8000.0
    most_groups: int = 128
    most_tenants: int = 32
    half_life_s: float = 900.0


@dataclass(slots=True, eq=False)
class AcceptanceState:
    """Evidence so far, of D drafts, K positions and S slots: one slot a request or group.

    ``slots`` and ``groups`` (least recently used first) are the slots by request and group id,
    ``source`` the group by request id. The last slot is nobody's. By slot: ``counts``
    float64[2, K, D, S] (accepted, reached), ``prior`` float64[2, D, S] of the deviation (1 / V and
    m / V), ``deviation`` float64[D, S] in logits, ``hazard`` float64[K, D, S] at that deviation,
    ``recent`` float64[2, D, S] weight and surprise of the last few chains, and ``request_tokens``
    float64[S] emitted since it came, ``tenant`` int64[S] the row of its tenant. By column of tenant
    and draft (C = T * D, ``policy.tenants``): ``draft_accepted``, ``draft_reached`` and the level
    made of them, ``draft_hazard``, float64[C, K]; ``variance`` float64[C] between requests, learnt
    from ``requests`` float64[T] of them. ``now`` (seconds) is the time up to which the levels have
    faded.
    """

    slots: dict[int, int]
    groups: dict[int, int]
    source: dict[int, int]
    counts: FloatArray
    prior: FloatArray
    deviation: FloatArray
    hazard: FloatArray
    recent: FloatArray
    request_tokens: FloatArray
    tenant: IntArray
    draft_accepted: FloatArray
    draft_reached: FloatArray
    draft_hazard: FloatArray
    variance: FloatArray
    requests: FloatArray
    now: float

    @property
    def tenants(self) -> int:
        """Return T."""
        return len(self.requests)

    def of_slots(self, column: FloatArray, slots: list[int] | IntArray | slice) -> FloatArray:
        """Return the columns [C, ...] of slots' tenants, [..., D, n]; n is 1 for one tenant."""
        if self.tenants == 1:
            return column.T[..., None]
        by_tenant = column.T.reshape(*column.T.shape[:-1], self.tenants, -1)
        of_slots: FloatArray = by_tenant[..., self.tenant[slots], :].swapaxes(-1, -2)
        return of_slots

    def by_tenant(self, values: FloatArray) -> FloatArray:
        """Return the sums of values [..., D, S] over the slots of each tenant, [..., C]."""
        if self.tenants == 1:
            total: FloatArray = np.add.reduce(values, -1)
            return total
        sums: FloatArray = values @ (self.tenant[:, None] == np.arange(self.tenants))
        return sums.swapaxes(-1, -2).reshape(*values.shape[:-2], -1)


class Expected(NamedTuple):
    """What is expected of requests: ``hazard`` float64[K, D, n], and the tokens ``emitted[n]``
    since they came; ``slot`` int64[n] is the estimator's own key to them.
    """

    slot: IntArray
    hazard: FloatArray
    emitted: FloatArray

    def rows(self, chosen: IntArray | BoolArray) -> Expected:
        """Return what is expected of some of them."""
        return Expected(self.slot[chosen], self.hazard[:, :, chosen], self.emitted[chosen])


def shifted(hazard: FloatArray, shift: FloatArray) -> FloatArray:
    """Return hazards whose logits are higher by ``shift``; the shapes broadcast."""
    odds: FloatArray = np.exp(shift) * hazard
    odds /= odds + (1.0 - hazard)
    return odds


def _evidence(counts: FloatArray, hazard: FloatArray) -> _Pair:
    """Return weight and surprise [..., D, n] of counts [2, ..., K, D, n] at a hazard [K, D, n]."""
    expected = counts[1] * hazard
    surprise = np.add.reduce(counts[0] - expected, -3)
    expected *= 1.0 - hazard
    return np.add.reduce(expected, -3), surprise


def _believed(prior: FloatArray, evidence: _Pair, deviation: FloatArray) -> _Pair:
    """Return mean and variance [D, n] of deviations by the evidence found at a ``deviation``."""
    weight, surprise = evidence
    variance = 1.0 / (weight + prior[0])
    step = variance * (weight * deviation + surprise + prior[1]) - deviation
    return deviation + np.minimum(np.maximum(step, -_MOST_STEP), _MOST_STEP), variance


def _posterior(state: AcceptanceState, slots: list[int] | slice) -> _Pair:
    """Return mean and variance [D, n] of the deviations of some slots, one Newton step on."""
    evidence = _evidence(state.counts[..., slots], state.hazard[..., slots])
    return _believed(state.prior[..., slots], evidence, state.deviation[:, slots])


def _set_hazards(after: AcceptanceState) -> None:
    """Compute the slots' hazards from levels and deviations."""
    after.hazard = shifted(after.of_slots(after.draft_hazard, slice(None)), after.deviation)


def _with_room(state: AcceptanceState, count: int) -> tuple[AcceptanceState, list[int]]:
    """Return a state whose slots may be written to, and ``count`` free ones, empty."""
    nobody = len(state.request_tokens) - 1
    used = {*state.slots.values(), *state.groups.values()}
    free = [slot for slot in range(nobody + count) if slot not in used][:count]
    more = max(free[-1] + 1 - nobody, nobody // 2) if free and free[-1] >= nobody else 0

    def grown(column: FloatArray) -> FloatArray:
        return np.concatenate([column, np.zeros((*column.shape[:-1], more))], -1)

    after = replace(
        state,
        counts=grown(state.counts),
        prior=grown(state.prior),
        deviation=grown(state.deviation),
        hazard=grown(state.hazard),
        recent=grown(state.recent),
        request_tokens=grown(state.request_tokens),
    )
    after.tenant = np.concatenate([state.tenant, np.full(more, NOBODY)])
    fresh = [*free, *range(nobody, nobody + more + 1)]
    after.tenant[fresh] = NOBODY
    after.prior[0][:, fresh], after.prior[1][:, fresh] = 1.0 / MIN_VARIANCE, 0.0
    after.deviation[:, free] = after.recent[..., free] = after.request_tokens[free] = 0.0
    return after, free


class AcceptanceModel:
    """The planner's own estimator (``policy.extensions.Estimator``), for D drafts and K positions.

    Its methods return new states and change none. ``with_drafts``, ``with_groups`` and
    ``by_group`` are for what outlasts a restart (``policy.learned``).
    """

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts, self._k_max, self._config = drafts, k_max, config
        self._passed = np.tri(k_max + 1, k_max, -1).T  # [j, end]: 1 where the end is behind j
        self.most_groups, self.most_tenants = config.most_groups, config.most_tenants

    def start(self) -> AcceptanceState:
        """Return the state before any evidence."""
        drafts, k_max, slots = self._drafts, self._k_max, 9
        variance, none = np.full(drafts, self._config.request_variance), np.zeros((drafts, k_max))
        pair = np.zeros((2, drafts, slots))
        state = AcceptanceState(
            slots={},
            groups={},
            source={},
            counts=np.zeros((2, k_max, drafts, slots)),
            prior=pair + np.array([1.0, 0.0])[:, None, None] / variance[:, None],
            deviation=pair[0],
            hazard=np.zeros((k_max, drafts, slots)),
            recent=pair,
            request_tokens=np.zeros(slots),
            tenant=np.full(slots, NOBODY),
            draft_accepted=none,
            draft_reached=none,
            draft_hazard=none,
            variance=variance,
            requests=np.array([_FIRST_REQUESTS]),
            now=-math.inf,
        )
        return self.with_drafts(state, none, none)

    def admit(
        self,
        state: AcceptanceState,
        requests: list[int],
        group: list[int] | None = None,
        tenant: IntArray | None = None,
    ) -> AcceptanceState:
        """Return the state with a slot for every request (``group`` of each, -1 or None: none;
        ``tenant`` row of each, None: the first).

        A new one is believed to be as its group, as far as that is known, else as all of its
        tenant are.
        """
        if all(map(state.slots.__contains__, requests)):
            return state
        new = {r: i for i, r in enumerate(requests) if r not in state.slots}
        after, free = _with_room(state, len(new))
        after.slots = {**state.slots, **dict(zip(new, free, strict=True))}
        after.tenant[free] = 0 if tenant is None else tenant[[*new.values()]]
        variance = after.of_slots(after.variance, free)
        after.prior[0][:, free] = 1.0 / variance
        if group is not None and self.most_groups:
            source = {r: group[i] for r, i in new.items() if group[i] != NO_GROUP}
            after.source = {**state.source, **source}
            for request in (r for r, its in source.items() if its in state.groups):
                mean, variance = _posterior(state, [state.groups[source[request]]])
                slot = after.slots[request]
                between = after.of_slots(after.variance, [slot])[:, 0]
                weight = 1.0 / (variance[:, 0] + _GROUP_SHARE * between)
                after.prior[..., slot] = weight, weight * mean[:, 0]
                after.deviation[:, slot] = mean[:, 0]
        level = after.of_slots(after.draft_hazard, free)
        after.hazard[..., free] = shifted(level, after.deviation[:, free])
        return after

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        """Return the state without these requests; unknown ones do not matter.

        They teach how unlike requests are, their groups, and the drafts' levels their mean (a level
        of counts alone would be that of the requests that use a draft most).
        """
        gone = [request for request in requests if request in state.slots]
        if not gone:
            return state
        after = self._taught_groups(state, gone)
        after.slots = state.slots.copy()
        slots = [after.slots.pop(request) for request in gone]
        after.counts[..., slots] = 0.0
        seen = [slot for slot in slots if state.counts[1, ..., slot].any()]
        if seen:
            after.variance, after.requests = state.variance.copy(), state.requests.copy()
            after.draft_accepted = state.draft_accepted.copy()
            tenants = state.tenant[seen].tolist()
            for row in sorted({*tenants}):
                own = [slot for slot, its in zip(seen, tenants, strict=True) if its == row]
                self._taught_by_requests(state, after, row, own)
            groups = [*after.groups.values()]
            after.prior[0][:, groups] = 1.0 / after.of_slots(after.variance, groups)
            after.draft_hazard = self._levels(after, range(len(after.draft_hazard)))
        _set_hazards(after)
        return after

    def _taught_by_requests(
        self, state: AcceptanceState, after: AcceptanceState, row: int, slots: list[int]
    ) -> None:
        """Let finished requests of one tenant, by their slots, teach its drafts in place."""
        mean, variance = _posterior(state, slots)
        total = float(state.requests[row]) + len(slots)
        own = slice(row * self._drafts, (row + 1) * self._drafts)
        between = state.variance[own]
        step = (mean * mean + variance - between[:, None]).sum(1) / total
        after.variance[own] = np.clip(between + step, MIN_VARIANCE, MAX_VARIANCE)
        after.requests[row] = min(total, _VARIANCE_MEMORY_REQUESTS)
        level, reached = state.draft_hazard[own], state.draft_reached[own]
        slope = reached * level * (1.0 - level)
        moved = state.draft_accepted[own] + slope * (mean.sum(1) / total)[:, None]
        after.draft_accepted[own] = np.clip(moved, 0.0, reached)

    def _taught_groups(self, state: AcceptanceState, gone: list[int]) -> AcceptanceState:
        """Return a state whose slots may be written to, groups having learnt from these requests.

        Counts teach a group no more than a member's deviation from it allows.
        """
        members = [(request, state.source[request]) for request in gone if request in state.source]
        new = {group for _, group in members}.difference(state.groups)
        after, free = _with_room(state, len(new))
        after.source, groups, counts = state.source.copy(), state.groups.copy(), after.counts
        keep = math.exp(-1 / _GROUP_MEMORY_REQUESTS)
        for request, group in members:
            slot = groups.pop(group, None)
            slot = groups[group] = free.pop() if slot is None else slot
            member = [state.slots[request]]
            after.tenant[slot] = state.tenant[member[0]]
            own, level = state.counts[..., member[0]], state.of_slots(state.draft_hazard, member)
            weight = (own[1] * (level * (1.0 - level))[..., 0]).sum(0)
            between = state.of_slots(state.variance, member)[:, 0]
            after.prior[0][:, slot] = 1.0 / between
            counts[..., slot] *= keep
            counts[..., slot] += own / (1.0 + _GROUP_SHARE * between * weight)
            del after.source[request]
        while len(groups) > self.most_groups:
            counts[..., groups.pop(self._spare_group(after, groups))] = 0.0
        after.groups = groups
        return after

    @staticmethod
    def _spare_group(state: AcceptanceState, groups: dict[int, int]) -> int:
        """Return the least recently used group of the tenant that has the most groups."""
        tenants = state.tenant[[*groups.values()]].tolist()
        most = max(tenants, key=tenants.count)
        return next(group for group, its in zip(groups, tenants, strict=True) if its == most)

    def aged(self, state: AcceptanceState, now: float) -> AcceptanceState:
        """Return the state at a time (seconds of any monotonic clock): levels fade to the prior.

        The first call sets the clock; less than a second changes nothing.
        """
        passed_s = now - state.now
        if not 1.0 < passed_s < math.inf:
            return state if passed_s <= 1.0 else replace(state, now=now)
        keep = 0.5 ** (passed_s / self._config.half_life_s)
        after = self.with_drafts(state, keep * state.draft_accepted, keep * state.draft_reached)
        after.deviation, _ = _posterior(after, slice(None))
        _set_hazards(after)
        after.now = now
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
        """Learn from chains, int64[m] each: ``accepted`` of the first ``scored`` positions held.

        A row of the last step comes first, with the tokens that it ``emitted`` int64[<= m]: a step
        passed for it, so that its older evidence fades, and a little all drafts'. The others are
        what was learnt for free. Positions behind the first rejection were not reached and are no
        evidence; a row that did not speculate has draft -1 and 0 scored. A request without a slot
        teaches the draft's level only. Of several steps, a request is there several times.
        """
        size, of = len(state.request_tokens), state.slots.get
        slot = np.array([of(r, size - 1) for r in request.tolist()], np.int64)
        stepped = slot[: len(emitted)]
        keep = np.exp(np.bincount(stepped, minlength=size) / -self._config.request_memory_steps)
        fading = self._faded(state, stepped)
        after = replace(
            state,
            counts=state.counts * keep,
            request_tokens=state.request_tokens + np.bincount(stepped, emitted, size),
            draft_accepted=fading * state.draft_accepted,
            draft_reached=fading * state.draft_reached,
        )
        if np.count_nonzero(scored):
            counted = self._counted(np.maximum(draft, 0) * size + slot, accepted, scored, size)
            after.counts += counted
            after.counts[..., -1] = 0.0
            evidence = _evidence(after.counts, state.hazard)
            after.deviation, _ = _believed(state.prior, evidence, state.deviation)
            self._follow(after, counted)
            self._teach_levels(after, counted)
            _set_hazards(after)
        return after

    def _faded(self, state: AcceptanceState, stepped: IntArray) -> FloatArray:
        """Return what is left of levels after a step of some slots, float64[C, 1]: a tenant's fade
        by its own rows.
        """
        rows = [len(stepped)]
        if state.tenants > 1:
            tenant = state.tenant[stepped]
            rows = np.bincount(tenant[tenant >= 0], minlength=state.tenants).tolist()
        memory = -self._config.draft_memory_rows
        return np.repeat([math.exp(n / memory) for n in rows], self._drafts)[:, None]

    def _counted(
        self, column: IntArray, accepted: IntArray, scored: IntArray, slots: int
    ) -> FloatArray:
        """Return what chains add to counts [2, K, D, slots]; ``column`` is of the last two axes.

        They are counted by where they end; a position was passed by those that end behind it.
        """
        columns, ends = self._drafts * slots, self._k_max + 1
        held = np.minimum(accepted, scored)
        seen = np.minimum(held + 1, scored)
        place = np.concatenate([held * columns + column, (ends + seen) * columns + column])
        ended = np.bincount(place, minlength=2 * ends * columns).reshape(2, ends, columns)
        counted: FloatArray = self._passed @ ended.astype(np.float64)
        return counted.reshape(2, self._k_max, self._drafts, slots)

    @staticmethod
    def _follow(after: AcceptanceState, counted: FloatArray) -> None:
        """Where the last few chains cannot be chance, let only the newest count, in place."""
        weight, surprise = _evidence(counted, after.hazard)
        after.recent = recent = after.recent * np.where(weight > 0, _RECENT_KEEP, 1.0)
        recent[0] += weight
        recent[1] += surprise
        changed = recent[1] ** 2 > _CHANGE_DEVIATIONS**2 * (recent[0] + _LEAST_VARIANCE)
        if np.count_nonzero(changed):
            after.counts[..., changed] = counted[..., changed]
            recent[:, changed] = 0.0

    def _teach_levels(self, after: AcceptanceState, counted: FloatArray) -> None:
        """Let the drafts' levels learn, in place, from what all chains showed, [2, K, D, S].

        They learn from what surprises in view of the request: late positions are reached by easy
        requests, which says nothing of the draft. At first, while it is not known how requests
        differ, all is taken for the draft's.
        """
        finished = after.requests - _FIRST_REQUESTS
        accepted, reached = after.by_tenant(counted).transpose(0, 2, 1)
        expected = after.by_tenant(counted[1] * after.hazard).T
        keep = np.exp(reached[:, :1] / -_DRAFT_MEMORY_CHAINS)
        explained = after.draft_hazard * reached - expected
        telling = finished / (finished + _TELLING_REQUESTS)
        explained *= np.repeat(telling, self._drafts)[:, None]
        held = keep * after.draft_accepted + accepted + explained
        after.draft_reached = keep * after.draft_reached + reached
        after.draft_accepted = np.minimum(np.maximum(held, 0.0), after.draft_reached)
        after.draft_hazard = self._levels(after, reached[:, 0].nonzero()[0].tolist())

    def _levels(self, state: AcceptanceState, columns: Iterable[int]) -> FloatArray:
        """Return the levels [C, K], those of some columns computed from their counts.

        Each position's prior is the estimate of the one before it. An unprobed position inherits
        the posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next
        succeeds with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the
        plug-in power of the mean would understate it. a + b is the evidence of all positions so
        far: what is well known is inherited as it is.
        """
        strength, hazard = self._config.prior_strength, state.draft_hazard.copy()
        for column in columns:
            inherited, evidence, chain = self._config.prior_hazard, strength, []
            counts = state.draft_accepted[column].tolist(), state.draft_reached[column].tolist()
            for a, r in zip(*counts, strict=True):  # a few positions: quicker without arrays
                mean = (a + strength * inherited) / (r + strength)
                low = _MIN_HAZARD if mean < _MIN_HAZARD else mean
                chain.append(_MAX_HAZARD if low > _MAX_HAZARD else low)
                evidence += r
                inherited = (mean * evidence + 1) / (evidence + 1)
                evidence += 1
            hazard[column] = chain
        return hazard

    def expected(self, state: AcceptanceState, request: list[int]) -> Expected:
        """Return what is expected of admitted requests."""
        slot = np.fromiter(map(state.slots.__getitem__, request), np.int64, len(request))
        accepted, reached = state.counts.take(slot, 3)
        hazard = state.hazard.take(slot, 2)
        hazard *= _POSITION_CHAINS
        hazard += accepted
        hazard /= reached + _POSITION_CHAINS
        return Expected(slot, hazard, state.request_tokens.take(slot))

    def doubt(self, state: AcceptanceState, expected: Expected) -> _Pair:
        """Return what is not known of requests: the standard deviations of their hazards,
        float64[K, D, n], and the variance of their deviations, float64[D, n] (squared logits).
        """
        slope = expected.hazard * (1.0 - expected.hazard)
        weight = (state.counts[1].take(expected.slot, 2) * slope).sum(0)
        variance = 1.0 / (weight + state.prior[0].take(expected.slot, 1))
        reached = state.of_slots(state.draft_reached, expected.slot)
        level = 1.0 / (reached + self._config.prior_strength + 1.0)
        return np.sqrt(slope * (variance * slope + level)), variance

    def with_drafts(
        self, state: AcceptanceState, accepted: FloatArray, reached: FloatArray
    ) -> AcceptanceState:
        """Return the state with this evidence by column, float64[C, K] each."""
        after = replace(state, draft_accepted=accepted, draft_reached=reached)
        after.draft_hazard = self._levels(after, range(len(reached)))
        _set_hazards(after)
        return after

    def with_tenants(
        self, state: AcceptanceState, tenants: int, emptied: list[int]
    ) -> AcceptanceState:
        """Return the state with so many tenants; nothing is known of those in ``emptied`` rows."""

        def rows(column: FloatArray, value: float = 0.0) -> FloatArray:
            return with_rows(column, state.tenants, tenants, emptied, value)

        gone = {g: slot for g, slot in state.groups.items() if state.tenant[slot] in emptied}
        after = replace(
            state,
            counts=state.counts.copy(),
            groups={g: slot for g, slot in state.groups.items() if g not in gone},
            variance=rows(state.variance, self._config.request_variance),
            requests=rows(state.requests, _FIRST_REQUESTS),
            draft_hazard=rows(state.draft_hazard),
        )
        after.counts[..., [*gone.values()]] = 0.0
        return self.with_drafts(after, rows(state.draft_accepted), rows(state.draft_reached))

    def with_groups(
        self,
        state: AcceptanceState,
        groups: dict[int, FloatArray],
        tenant: list[int] | None = None,
    ) -> AcceptanceState:
        """Return the state with these groups, counts [2, D, K] each, the least recent first, of
        these ``tenant`` rows (None: the first).
        """
        after, free = _with_room(replace(state, groups={}), len(groups))
        after.tenant[free] = tenant or 0
        after.prior[0][:, free] = 1.0 / after.of_slots(after.variance, free)
        after.groups = dict(zip(groups, free, strict=True))
        for slot, counts in zip(free, groups.values(), strict=True):
            after.counts[..., slot] = counts.transpose(0, 2, 1)
        for _ in range(_NEWTON_STEPS):
            _set_hazards(after)
            after.deviation, _ = _posterior(after, slice(None))
        _set_hazards(after)
        return after

    @staticmethod
    def by_group(state: AcceptanceState) -> dict[int, FloatArray]:
        """Return the counts [2, D, K] of the groups, as ``with_groups`` takes them."""
        counts = state.counts.transpose(3, 0, 2, 1)
        return {group: counts[slot] for group, slot in state.groups.items()}
