"""How likely a draft's tokens are accepted: a level by draft and position, a deviation by request.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted, given that all
before it were. Counted where a position was *reached*, it is unbiased whatever lengths were planned
(accepted / k is not). Survival is s_j = h_1 ... h_j; a step of k tokens emits 1 + sum_{j<=k} s_j.

A draft's level is its counts, by tenant (``policy.tenants``) and by the bin of what the draft
shows before it proposes (``policy.evidence``). A request deviates from it by x logits, at all
positions and in all bins of a draft. Before any evidence x is normal around 0, with a variance that
finished requests of the tenant teach. A chain is taken as a normal observation of x (Laplace's
approximation): with the hazards h at the present x it has the weight w = sum reached h (1 - h) and
shows x + s / w, with the surprise s = sum (accepted - reached h). With a prior of mean m and
variance V, x becomes v (sum (w x + s) + m / V), where v = 1 / (sum w + 1 / V).

The arithmetic is in ``policy.loops.acceptance``; here is which request has which slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .evidence import EVIDENCE_BINS
from .loops import acceptance as loops
from .plan import FloatArray, IntArray
from .problem import ints
from .tenants import NO_TENANT, with_rows


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
    most_tenants: int = 32
    """Tenants that are remembered, the last used ones."""
    half_life_s: float = 900.0
    """Time in which a draft's level fades by half even if nothing runs."""


@dataclass(slots=True, eq=False)
class AcceptanceState:
    """The evidence so far, and which request has which slot of it."""

    estimates: loops.Estimates
    request: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[s] the ids of the requests that have a slot, rising."""
    slot: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[s] their slots."""
    now: float = -math.inf
    """The time in seconds up to which the levels have faded."""

    @property
    def slots(self) -> dict[int, int]:
        """Return the slots by request id."""
        return dict(zip(self.request.tolist(), self.slot.tolist(), strict=True))

    def find(self, request: IntArray) -> tuple[IntArray, int]:
        """Return the slots int64[n] of requests int64[n], -1 for those without one, and how many
        these are.
        """
        slot = np.empty(len(request), np.int64)
        return slot, loops.find_all(self.request, self.slot, request, slot)

    def with_arrays(self, **arrays: npt.NDArray[Any]) -> AcceptanceState:
        """Return the state with other arrays among its estimates."""
        return AcceptanceState(self.estimates._replace(**arrays), self.request, self.slot, self.now)

    def copy(self, writable: tuple[bool, ...]) -> AcceptanceState:
        """Return a state in which these arrays of its estimates may be written to."""
        pairs = zip(self.estimates, writable, strict=True)
        arrays = [array.copy() if write else array for array, write in pairs]
        estimates = loops.Estimates._make(arrays)
        return AcceptanceState(estimates, self.request, self.slot, self.now)

    def with_room(self, count: int) -> AcceptanceState:
        """Return a state whose arrays may be written to, with at least ``count`` free slots."""
        after, size = self.copy(_ALL), len(self.estimates.tenant)
        free = size - 1 - len(self.request)
        if free >= count:
            return after
        more = max(count - free, size // 2)
        columns = {name: getattr(after.estimates, name) for name in _BY_SLOT}
        longer = {
            name: np.concatenate([column, np.zeros((more, *column.shape[1:]))])
            for name, column in columns.items()
        }
        tenant = np.concatenate([after.estimates.tenant, np.full(more, NO_TENANT)])
        return after.with_arrays(**longer, tenant=tenant)


_BY_SLOT = ("information", "prior", "deviation", "recent", "request_tokens")


def _only(*names: str) -> tuple[bool, ...]:
    """Return which fields of ``policy.loops.acceptance.Estimates`` have these names."""
    return tuple(name in names for name in loops.Estimates._fields)


_ALL = _only(*loops.Estimates._fields)
_LEVELS = _only("deviation", "draft_accepted", "draft_reached", "draft_hazard")
_LEARNT = _only(
    *("information", "deviation", "recent", "request_tokens"),
    *("draft_accepted", "draft_reached", "draft_hazard"),
)


class AcceptanceModel:
    """Learns acceptance for D drafts and K positions; its methods return new states.

    ``with_drafts`` is for what outlasts a restart (``policy.learned``). A model that has hazards of
    another origin overrides ``hazards``.
    """

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts, self._k_max, self._config = drafts, k_max, config
        self.most_tenants = config.most_tenants
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
        estimates = loops.Estimates(
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
        return self._refresh(AcceptanceState(estimates))

    def hazards(self, state: AcceptanceState, request: IntArray) -> FloatArray:
        """Return the hazards [K, D, n] of requests where they are not this model's own; here, where
        they are: none.
        """
        del state, request
        return self._no_hazards

    def admit(
        self, state: AcceptanceState, request: IntArray, tenant: IntArray | None = None
    ) -> AcceptanceState:
        """Return the state with a slot for every request int64[n], of the ``tenant[n]`` rows (None:
        the first). A new one is believed to be as all of its tenant are.
        """
        request, count = ints(request), len(state.request)
        after = state.with_room(len(request))
        slot, before = np.empty(len(request), np.int64), (state.request, state.slot)
        all_requests, all_slots = np.empty((2, count + len(request)), np.int64)
        rows = np.zeros(len(request), np.int64) if tenant is None else ints(tenant)
        everyone = all_requests, all_slots
        new = loops.admit(after.estimates, *before, request, rows, *everyone, slot)
        if not new:
            return state
        after.request, after.slot = all_requests[: count + new], all_slots[: count + new]
        return after

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        """Return the state without these requests; unknown ones do not matter.

        They teach how unlike requests are, and the drafts' levels.
        """
        gone = np.array([*requests], np.int64)
        if state.find(gone)[1] == len(gone):
            return state
        after = state.copy(_ALL)
        after.request, after.slot = columns = state.request.copy(), state.slot.copy()
        count = loops.forget(after.estimates, self.constants, *columns, gone)
        after.request, after.slot = (column[:count].copy() for column in columns)
        return after

    def decayed_to(self, state: AcceptanceState, now: float) -> AcceptanceState:
        """Return the state at a time (seconds of any monotonic clock): levels fade to the prior.

        The first call sets the clock; less than a second changes nothing.
        """
        passed_s = now - state.now
        if not 1.0 < passed_s < math.inf:
            return state if passed_s <= 1.0 else replace(state, now=now)
        keep = 0.5 ** (passed_s / self._config.half_life_s)
        return replace(self._refresh(state, keep), now=now)

    def observe(
        self,
        state: AcceptanceState,
        step: loops.Chains,
        emitted: IntArray,  # [n]
        free: loops.Chains,
        steps: int = 1,
    ) -> tuple[AcceptanceState, IntArray]:
        """Return the state after the rows of a step, with the tokens ``emitted`` for each, and the
        slots of these rows. ``steps`` have passed, all but the last one plain.

        Positions after the first rejection were not reached and are no evidence; a row that did not
        speculate has draft -1 and 0 scored. ``free`` are chains that the step scored for free.
        """
        after = state.copy(_LEARNT)
        slot = np.empty(len(step.request), np.int64)
        columns = after.request, after.slot
        loops.learn(after.estimates, self.constants, *columns, step, emitted, free, steps, slot)
        return after, slot

    def weigh(
        self,
        state: AcceptanceState,
        request: IntArray,  # [n]
        slot: IntArray,  # [n]
        evidence: IntArray,  # [n, D]
        claims: loops.Claims,
    ) -> tuple[FloatArray, FloatArray]:
        """Return drafts' claims, [q] each, weighed against what is expected of the requests whose
        rows they are of, in these slots, with the ``evidence`` that the drafts showed, and what is
        expected of their first tokens (``policy.loops.acceptance.weigh_claims`` has both).
        """
        score, first = np.empty((2, len(claims.row)))
        e = state.estimates
        columns = e.tenant, e.deviation, e.draft_hazard
        other = self.hazards(state, request)
        loops.weigh_claims(*columns, other, slot, evidence, claims, score, first)
        return score, first

    def with_drafts(
        self, state: AcceptanceState, accepted: FloatArray, reached: FloatArray
    ) -> AcceptanceState:
        """Return the state with this evidence by column and bin, float64[C, B, K] each."""
        return self._refresh(state.with_arrays(draft_accepted=accepted, draft_reached=reached))

    def with_tenants(
        self, state: AcceptanceState, tenants: int, emptied: list[int]
    ) -> AcceptanceState:
        """Return the state with this number of tenants; nothing is known of ``emptied`` rows."""
        e = state.estimates

        def rows(
            column: FloatArray,  # [C, ...] or [T]
            value: float = 0.0,
        ) -> FloatArray:
            return with_rows(column, len(e.requests), tenants, emptied, value)

        after = state.with_arrays(
            variance=rows(e.variance, self._config.request_variance),
            requests=rows(e.requests, loops.FIRST_REQUESTS),
            draft_hazard=rows(e.draft_hazard),
            draft_accepted=rows(e.draft_accepted),
            draft_reached=rows(e.draft_reached),
        )
        return self._refresh(after)

    def _refresh(self, state: AcceptanceState, keep: float = 1.0) -> AcceptanceState:
        """Return the state with ``keep`` of the drafts' counts, and the levels that follow."""
        after = state.copy(_LEVELS)
        loops.refresh(after.estimates, self.constants, keep)
        return after
