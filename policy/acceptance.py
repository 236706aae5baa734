"""How likely a draft's tokens are accepted: a level by draft and position, a deviation by request.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted, given that all
before it were. Counted where a position was *reached*, it is unbiased whatever lengths were planned
(accepted / k is not). Survival is s_j = h_1 ... h_j; a step of k tokens emits 1 + sum_{j<=k} s_j.

A draft's level is its counts, by tenant (``policy.tenants``) and by the bin of what the draft
shows before it proposes (``policy.evidence``). A request deviates from it by x logits, at all
positions and in all bins of a draft. Before any evidence x is normal around 0, with a variance that
finished requests of the tenant teach, or around what is expected of its group (``View.group``). A
chain is taken as a normal observation of x (Laplace's approximation): with the hazards h at the
present x it has the weight w = sum reached h (1 - h) and shows x + s / w, with the surprise s =
sum (accepted - reached h). With a prior of mean m and variance V, x becomes v (sum (w x + s) +
m / V), where v = 1 / (sum w + 1 / V).

The arithmetic is in ``policy.loops.acceptance``; here is which request has which slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

import numpy as np

from .evidence import EVIDENCE_BINS
from .loops import acceptance as loops
from .plan import FloatArray, IntArray
from .problem import ints
from .tenants import NO_TENANT, with_rows

NO_GROUP = -1
_GROUP_SHARE = 0.5  # share of the variance between requests that is within one group
_GROUP_MEMORY_REQUESTS = 30.0


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Priors and memories."""

    prior_hazard: float = 0.6
    prior_strength: float = 4.0
    """Chains that the prior hazard counts for."""
    request_variance: float = 0.4
    """First belief of how unlike requests are, in squared logits."""
    request_memory_steps: float = 100.0
    """Steps of a request in which its evidence fades to 1/e."""
    draft_memory_rows: float = 8000.0
    """Steps of any requests in which a draft's level fades to 1/e."""
    most_groups: int = 128
    """Groups that are remembered, the last used ones."""
    most_tenants: int = 32
    """Tenants that are remembered, the last used ones."""
    half_life_s: float = 900.0
    """Time in which a draft's level fades by half even if nothing runs."""


def _ints(*values: int) -> IntArray:
    return np.array(values, np.int64)


@dataclass(slots=True, eq=False)
class AcceptanceState:
    """Evidence so far, of D drafts, B bins, K positions, S slots and C columns of tenants and
    drafts.
    """

    information: FloatArray
    """[S, D, 2], like the others a field of ``policy.loops.acceptance.Estimates``."""
    prior: FloatArray
    deviation: FloatArray
    recent: FloatArray
    request_tokens: FloatArray
    tenant: IntArray
    draft_accepted: FloatArray
    draft_reached: FloatArray
    draft_hazard: FloatArray
    variance: FloatArray
    requests: FloatArray
    request: IntArray = field(default_factory=_ints)
    """The ids of the requests that have a slot, rising."""
    slot: IntArray = field(default_factory=_ints)
    """Their slots."""
    groups: dict[int, int] = field(default_factory=dict)
    """Slots by group id, the least recently used group first."""
    source: dict[int, int] = field(default_factory=dict)
    """Group by request id."""
    now: float = -math.inf
    """The time in seconds up to which the levels have faded."""

    @property
    def tenants(self) -> int:
        """Return T."""
        return len(self.requests)

    @property
    def slots(self) -> dict[int, int]:
        """Return the slots by request id."""
        return dict(zip(self.request.tolist(), self.slot.tolist(), strict=True))

    @property
    def estimates(self) -> loops.Estimates:
        """Return the arrays, as the loops take them."""
        return loops.Estimates(
            self.information,
            self.prior,
            self.deviation,
            self.recent,
            self.request_tokens,
            self.tenant,
            self.draft_accepted,
            self.draft_reached,
            self.draft_hazard,
            self.variance,
            self.requests,
        )

    def find(self, request: IntArray) -> tuple[IntArray, int]:
        """Return the slots of requests, -1 for those without one, and how many these are."""
        slot = np.empty(len(request), np.int64)
        return slot, loops.find_all(self.request, self.slot, request, slot)

    def columns(self, slot: int) -> slice:
        """Return the columns of a slot's tenant."""
        drafts, row = self.deviation.shape[1], int(self.tenant[slot])
        return slice(row * drafts, (row + 1) * drafts)


_ESTIMATES = loops.Estimates._fields
_BY_SLOT = ("information", "prior", "deviation", "recent", "request_tokens")
_LEARNT = (
    *("information", "deviation", "recent", "request_tokens"),
    *("draft_accepted", "draft_reached", "draft_hazard"),
)


_ALL = attrgetter(*(item.name for item in fields(AcceptanceState)))


def _copied(state: AcceptanceState, names: Iterable[str] = _ESTIMATES) -> AcceptanceState:
    """Return a state in which these arrays may be written to."""
    after = AcceptanceState(*_ALL(state))
    for name in names:
        setattr(after, name, getattr(state, name).copy())
    return after


def _with_room(state: AcceptanceState, count: int) -> AcceptanceState:
    """Return a state whose arrays may be written to, with at least ``count`` free slots."""
    after, size = _copied(state), len(state.tenant)
    free = size - 1 - len(state.request) - len(state.groups)
    if free < count:
        more = max(count - free, size // 2)
        for name in _BY_SLOT:
            column = getattr(after, name)
            setattr(after, name, np.concatenate([column, np.zeros((more, *column.shape[1:]))]))
        after.tenant = np.concatenate([after.tenant, np.full(more, NO_TENANT)])
    return after


def _free_slots(state: AcceptanceState, count: int) -> list[int]:
    """Return free slots, the first ones."""
    free: list[int] = (state.tenant[:-1] == NO_TENANT).nonzero()[0].tolist()[:count]
    return free


class AcceptanceModel:
    """Learns acceptance for D drafts and K positions; its methods return new states.

    ``with_drafts``, ``with_groups`` and ``by_group`` are for what outlasts a restart
    (``policy.learned``). A model that ``hazards`` of another origin is made by overriding that.
    """

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts, self._k_max, self._config = drafts, k_max, config
        self.most_groups, self.most_tenants = config.most_groups, config.most_tenants
        self.constants = loops.Constants(
            float(config.prior_hazard),
            float(config.prior_strength),
            float(config.request_memory_steps),
            float(config.draft_memory_rows),
        )
        self._no_hazards = np.zeros((0, drafts, 0))

    def start(self) -> AcceptanceState:
        """Return the state before any evidence."""
        drafts, k_max, slots = self._drafts, self._k_max, 9
        none = np.zeros((drafts, EVIDENCE_BINS, k_max))
        state = AcceptanceState(
            information=np.zeros((slots, drafts, 2)),
            prior=np.zeros((slots, drafts, 2)),
            deviation=np.zeros((slots, drafts)),
            recent=np.zeros((slots, drafts, 2)),
            request_tokens=np.zeros(slots),
            tenant=np.full(slots, NO_TENANT),
            draft_accepted=none,
            draft_reached=none,
            draft_hazard=none,
            variance=np.full(drafts, self._config.request_variance),
            requests=np.array([loops.FIRST_REQUESTS]),
        )
        return self._refreshed(state)

    def hazards(self, state: AcceptanceState, request: IntArray) -> FloatArray:
        """Return the hazards [K, D, n] of requests where they are not this model's own; here, where
        they are: none.
        """
        del state, request
        return self._no_hazards

    def admit(
        self,
        state: AcceptanceState,
        request: IntArray,
        group: IntArray | None = None,
        tenant: IntArray | None = None,
    ) -> AcceptanceState:
        """Return the state with a slot for every request int64[n] (``group`` of each, -1 or None:
        none; ``tenant`` row of each, None: the first).

        A new one is believed to be as its group, as far as that is known, else as all of its
        tenant are.
        """
        request, known = ints(request), len(state.request)
        after = _with_room(state, len(request))
        slot, before = np.empty(len(request), np.int64), (state.request, state.slot)
        all_requests, all_slots = np.empty((2, known + len(request)), np.int64)
        rows = np.zeros(len(request), np.int64) if tenant is None else ints(tenant)
        everyone = all_requests, all_slots
        new = loops.admit(after.estimates, *before, request, rows, *everyone, slot)
        if not new:
            return state
        after.request, after.slot = all_requests[: known + new], all_slots[: known + new]
        if group is not None and self.most_groups:
            self._join_groups(after, state, request.tolist(), slot.tolist(), group.tolist())
        return after

    def _join_groups(
        self,
        after: AcceptanceState,
        state: AcceptanceState,
        requests: list[int],
        slots: list[int],
        groups: list[int],
    ) -> None:
        """Let those of the requests that are new be members of their groups, in place."""
        after.source = state.source.copy()
        known = state.slots
        for request, slot, group in zip(requests, slots, groups, strict=True):
            if request not in known and group != NO_GROUP:
                after.source[request] = group
                if group in state.groups:
                    self._expect_as_group(after, slot, state.groups[group])

    @staticmethod
    def _expect_as_group(after: AcceptanceState, slot: int, group: int) -> None:
        """Let a new request's deviation be expected as its group's, in place."""
        variance = 1.0 / (after.information[group, :, 0] + after.prior[group, :, 0])
        mean = variance * (after.information[group, :, 1] + after.prior[group, :, 1])
        between = after.variance[after.columns(slot)]
        weight = 1.0 / (variance + _GROUP_SHARE * between)
        after.prior[slot, :, 0], after.prior[slot, :, 1] = weight, weight * mean
        after.deviation[slot] = mean

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        """Return the state without these requests; unknown ones do not matter.

        They teach how unlike requests are, the drafts' levels, and their groups.
        """
        gone = np.array([*requests], np.int64)
        if state.find(gone)[1] == len(gone):
            return state
        after = self._taught_groups(state, [r for r in gone.tolist() if r in state.source])
        after.request, after.slot = state.request.copy(), state.slot.copy()
        known, groups = (after.request, after.slot), _ints(*after.groups.values())
        left = loops.forget(after.estimates, self.constants, *known, gone, groups)
        after.request, after.slot = (column[:left].copy() for column in known)
        return after

    def _taught_groups(self, state: AcceptanceState, members: list[int]) -> AcceptanceState:
        """Return a state whose arrays may be written to, groups having learnt from these requests.

        A member teaches its group no more than its deviation from it allows.
        """
        if not members:
            return _copied(state)
        new = {state.source[request] for request in members}.difference(state.groups)
        after, known = _with_room(state, len(new)), state.slots
        free = _free_slots(after, len(new))
        after.source, groups, information = (
            state.source.copy(),
            state.groups.copy(),
            after.information,
        )
        keep = math.exp(-1 / _GROUP_MEMORY_REQUESTS)
        for request in members:
            group, member = after.source.pop(request), known[request]
            slot = groups.pop(group, None)
            slot = groups[group] = free.pop() if slot is None else slot
            if group not in state.groups and after.tenant[slot] == NO_TENANT:
                for name in _BY_SLOT:
                    getattr(after, name)[slot] = 0.0
            after.tenant[slot] = state.tenant[member]
            between = state.variance[state.columns(member)]
            after.prior[slot, :, 0] = 1.0 / between
            share = 1.0 / (1.0 + _GROUP_SHARE * between * state.information[member, :, 0])
            information[slot] *= keep
            information[slot] += state.information[member] * share[:, None]
        while len(groups) > self.most_groups:
            slot = groups.pop(self._spare_group(after, groups))
            information[slot], after.tenant[slot] = 0.0, NO_TENANT
        after.groups = groups
        return after

    @staticmethod
    def _spare_group(state: AcceptanceState, groups: dict[int, int]) -> int:
        """Return the least recently used group of the tenant that has the most groups."""
        tenants = state.tenant[[*groups.values()]].tolist()
        most = max(tenants, key=tenants.count)
        return next(group for group, its in zip(groups, tenants, strict=True) if its == most)

    def decayed_to(self, state: AcceptanceState, now: float) -> AcceptanceState:
        """Return the state at a time (seconds of any monotonic clock): levels fade to the prior.

        The first call sets the clock; less than a second changes nothing.
        """
        passed_s = now - state.now
        if not 1.0 < passed_s < math.inf:
            return state if passed_s <= 1.0 else replace(state, now=now)
        keep = 0.5 ** (passed_s / self._config.half_life_s)
        return replace(self._refreshed(state, keep), now=now)

    def observe(
        self,
        state: AcceptanceState,
        step: loops.Chains,
        emitted: IntArray,
        free: loops.Chains,
        steps: int = 1,
    ) -> tuple[AcceptanceState, IntArray]:
        """Return the state after the rows of a step, with the tokens ``emitted`` for each, and the
        slots of these rows. ``steps`` have passed, all but the last one plain.

        Positions after the first rejection were not reached and are no evidence; a row that did not
        speculate has draft -1 and 0 scored. ``free`` are chains that the step scored for free.
        """
        after = _copied(state, _LEARNT)
        slot = np.empty(len(step.request), np.int64)
        known = after.request, after.slot
        loops.learn(after.estimates, self.constants, *known, step, emitted, free, steps, slot)
        return after, slot

    def weigh(
        self,
        state: AcceptanceState,
        request: IntArray,
        slot: IntArray,
        evidence: IntArray,
        claims: loops.Claims,
    ) -> tuple[FloatArray, FloatArray]:
        """Return drafts' claims weighed against what is expected of the requests int64[n]
        whose rows they are of, in these slots, with the ``evidence`` int64[n, D] that the drafts
        showed, and what is expected of their first tokens (``policy.loops.acceptance.weigh_claims``
        has both).
        """
        score, first = np.empty((2, len(claims.row)))
        known = state.tenant, state.deviation, state.draft_hazard
        other = self.hazards(state, request)
        loops.weigh_claims(*known, other, slot, evidence, claims, score, first)
        return score, first

    def with_drafts(
        self, state: AcceptanceState, accepted: FloatArray, reached: FloatArray
    ) -> AcceptanceState:
        """Return the state with this evidence by column and bin, float64[C, B, K] each."""
        return self._refreshed(replace(state, draft_accepted=accepted, draft_reached=reached))

    def with_tenants(
        self, state: AcceptanceState, tenants: int, emptied: list[int]
    ) -> AcceptanceState:
        """Return the state with this number of tenants; nothing is known of ``emptied`` rows."""

        def rows(column: FloatArray, value: float = 0.0) -> FloatArray:
            return with_rows(column, state.tenants, tenants, emptied, value)

        after = _copied(state, ("information", "tenant"))
        gone = [g for g, slot in state.groups.items() if state.tenant[slot] in emptied]
        after.groups = {g: slot for g, slot in state.groups.items() if g not in gone}
        slots = [state.groups[g] for g in gone]
        after.information[slots], after.tenant[slots] = 0.0, NO_TENANT
        after.variance = rows(state.variance, self._config.request_variance)
        after.requests = rows(state.requests, loops.FIRST_REQUESTS)
        after.draft_hazard = rows(state.draft_hazard)
        after.draft_accepted = rows(state.draft_accepted)
        after.draft_reached = rows(state.draft_reached)
        return self._refreshed(after)

    def with_groups(
        self,
        state: AcceptanceState,
        groups: dict[int, FloatArray],
        tenant: list[int] | None = None,
    ) -> AcceptanceState:
        """Return the state with these groups, information [D, 2] each, the least recent first, of
        these ``tenant`` rows (None: the first).
        """
        after = _with_room(replace(state, groups={}), len(groups))
        free = _free_slots(after, len(groups))
        after.tenant[free] = tenant or 0
        after.groups = dict(zip(groups, free, strict=True))
        for slot, information in zip(free, groups.values(), strict=True):
            after.prior[slot, :, 0] = 1.0 / after.variance[after.columns(slot)]
            after.information[slot] = information
        return self._refreshed(after)

    @staticmethod
    def by_group(state: AcceptanceState) -> dict[int, FloatArray]:
        """Return the information [D, 2] of the groups, as ``with_groups`` takes it."""
        return {g: state.information[slot] for g, slot in state.groups.items()}

    def _refreshed(self, state: AcceptanceState, keep: float = 1.0) -> AcceptanceState:
        """Return the state with ``keep`` of the drafts' counts, and the levels that follow."""
        names = ("deviation", "draft_accepted", "draft_reached", "draft_hazard")
        after = _copied(state, names)
        loops.refresh(after.estimates, self.constants, keep)
        return after
