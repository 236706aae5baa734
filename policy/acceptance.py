"""How likely a draft's tokens are accepted: hazards per position, per request and draft, shrunk towards the draft's and then the prior.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted given that all before it were; counted where a position
was *reached*, it is unbiased under any planned length (accepted / k is not). Survival is s_j = h_1 ... h_j, the expected tokens of a step
1 + sum_{j<=k} s_j. A request's hazards are the draft's, their logits shifted by what the request deviates (``policy.deviation``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from . import one_request
from .counting import Chains, add, follow, sums_by, up_to
from .deviation import Law, at_odds, posterior, posterior_covariance, shifted, told, told_weight
from .groups import NO_GROUP, Groups
from .levels import Levels
from .plan import BoolArray, FloatArray, IntArray
from .shifts import FEWEST_REQUESTS, common

_FADE_SHARE = 0.01  # of the draft level's memory: so much time passes between two fadings, which touch every draft
_BELIEF_ROWS = 8  # decoded between two estimates of requests of which nothing is seen, whose counts only fade
_MOST_STEP = 2.0  # logits that an estimate of a request may move at once: far from the level its approximation overshoots
_LAW_REQUESTS = 20.0  # what the first belief of how requests differ counts for
_TELLING_REQUESTS = 10.0  # after so many half of what a request deviates is held to be its own, not the draft's

_COLUMNS = (
    *("request_accepted", "request_reached", "request_shift", "request_tokens"),
    *("request_group", "request_mean", "request_doubt", "request_recent"),
)
_SOURCE = ("request_group", "request_mean", "request_shift", "request_doubt")  # of a request, known as it comes
_EVIDENCE = ("request_accepted", "request_reached", "request_tokens", "request_recent")  # of a request, gone with it


def _grown(column: Any, rows: int) -> Any:
    """Return a copy with so many rows more."""
    return np.concatenate([column, np.zeros((rows, *column.shape[1:]), column.dtype)]) if rows else column.copy()


def _only(slot: IntArray) -> int | None:
    """Return the slot that all rows are of, None where there are several or one without."""
    first: int = slot.item(0) if len(slot) else -1
    return first if first >= 0 and slot.tobytes() == slot[:1].tobytes() * len(slot) else None


def _own_share(law: Law) -> float:
    """Return how much of what a request deviates is held to be its own, after so many requests."""
    finished = law.requests - _LAW_REQUESTS
    return finished / (finished + _TELLING_REQUESTS)


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Priors and memories. Strengths count pseudo-observations; memories count a request's steps, row-steps of the whole batch, and
    finished requests.

    ``request_variance`` (of logits) is only the start: how unlike requests are is learnt. ``half_life_s`` is the time in which a draft's
    evidence loses half its weight even if nothing runs. Of groups of requests the ``most_groups`` last used are remembered.
    """

    prior_hazard: float = 0.6
    prior_strength: float = 4.0
    request_variance: float = 0.4
    position_strength: float = 30.0
    request_memory_steps: float = 100.0
    draft_memory_rows: float = 8000.0
    law_memory_requests: float = 200.0
    most_groups: int = 128
    half_life_s: float = 900.0


@dataclass(slots=True, eq=False)
class AcceptanceState:
    """Evidence so far.

    ``slots`` request id -> row of ``request_accepted`` and ``request_reached`` float64[slots,
    drafts, positions], ``request_shift`` float64[slots, drafts], by how much the request's logits
    differ from the draft's as far as is known, and ``request_tokens`` float64[slots], emitted since
    it was admitted; ``request_group`` int64[slots] and what that let expect of the shift,
    ``request_mean`` float64[slots, drafts] with the covariance ``request_doubt``;
    ``request_recent`` (see ``counting.follow``); ``draft_*`` float64[drafts, positions].
    ``draft_hazard`` is the draft-level estimate made of the latter, ``law`` and ``groups`` how requests deviate from it.
    ``now`` is the time up to which the state has aged, ``unfaded_rows`` the row-steps by which the draft level has yet to fade.
    """

    slots: dict[int, int]
    request_accepted: FloatArray
    request_reached: FloatArray
    request_shift: FloatArray
    request_tokens: FloatArray
    request_group: IntArray
    request_mean: FloatArray
    request_doubt: FloatArray
    request_recent: FloatArray
    draft_accepted: FloatArray
    draft_reached: FloatArray
    draft_hazard: FloatArray
    law: Law
    groups: Groups
    now: float
    unfaded_rows: int = 0


class Expected(NamedTuple):
    """What is expected of requests in some ``slot`` int64[n]: their ``hazard`` float64[n, D, K].

    It is made of what is ``believed`` of them by level and deviation, before their own counts refine each position, and where they
    ``reached`` these; both float64[K, D, n], and so lies ``hazard`` in memory: what is summed over rows lies together.
    """

    slot: IntArray
    hazard: FloatArray
    believed: FloatArray
    reached: FloatArray

    def rows(self, chosen: IntArray | BoolArray) -> Expected:
        """Return what is expected of some of them."""
        return Expected(self.slot[chosen], self.hazard[chosen], self.believed[:, :, chosen], self.reached[:, :, chosen])


class AcceptanceModel:
    """The estimator: its methods return new states and leave the given one alone."""

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts = drafts
        self._k_max = k_max
        self._config = config
        self.most_groups = config.most_groups
        self._levels = Levels(config.prior_hazard, config.prior_strength)

    def start(self) -> AcceptanceState:
        """Return the state before any evidence."""
        none = np.zeros((self._drafts, self._k_max))
        empty = np.zeros((8, self._drafts, self._k_max))
        law = Law.prior(self._drafts, self._config.request_variance, _LAW_REQUESTS)
        groups = Groups.none(self._drafts, self._config.request_variance, _LAW_REQUESTS)
        hazard, shift = self._levels.hazards(none, none), np.zeros((8, self._drafts))
        group, doubt = np.full(8, NO_GROUP), np.zeros((8, self._drafts, self._drafts))
        recent, of_drafts = np.zeros((8, self._drafts, 3)), (none, none, hazard)
        of_requests = empty, empty, shift, np.zeros(8), group, shift, doubt, recent
        return AcceptanceState({}, *of_requests, *of_drafts, law, groups, -math.inf)

    def admit(self, state: AcceptanceState, requests: list[int], group: list[int] | None = None) -> AcceptanceState:
        """Return the state with a slot for every request (``group`` of each, None: none); a new one has no evidence of its own yet."""
        unknown = set(requests).difference(state.slots)
        if not unknown:
            return state
        new, capacity = [row for row, request in enumerate(requests) if request in unknown], len(state.request_reached)
        free = sorted(set(range(capacity + len(new))).difference(state.slots.values()))[: len(new)]
        slots = {**state.slots, **{requests[row]: slot for row, slot in zip(new, free, strict=True)}}
        more = len(new) if free[-1] >= capacity else 0
        columns = {name: _grown(getattr(state, name), more) for name in (_COLUMNS if more else _SOURCE)}
        columns["request_group"][free] = NO_GROUP if group is None else [group[row] for row in new]
        columns["request_mean"][free] = columns["request_shift"][free] = 0.0
        columns["request_doubt"][free] = state.law.covariance
        for slot in (slot for slot in free if columns["request_group"][slot] in state.groups.known):
            mean, doubt = state.groups.expected(int(columns["request_group"][slot]), state.law)
            columns["request_mean"][slot] = columns["request_shift"][slot] = mean
            columns["request_doubt"][slot] = doubt
        return replace(state, slots=slots, **columns)

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        """Return the state without these requests, having learnt from them how unlike requests are; unknown ones do not matter."""
        gone = [request for request in requests if request in state.slots]
        if not gone:
            return state
        slots = state.slots.copy()
        rows = [slots.pop(request) for request in gone]
        cleared = {name: getattr(state, name).copy() for name in _EVIDENCE}
        for column in cleared.values():
            column[rows] = 0.0
        return replace(state, slots=slots, **cleared, **self._learnt(state, [row for row in rows if state.request_reached[row].any()]))

    def _learnt(self, state: AcceptanceState, rows: list[int]) -> dict[str, Any]:
        """Return what changes when these finished requests have taught how requests differ, and the drafts' levels their mean.

        A level made of counts alone would be that of the requests that use a draft most.
        """
        if not rows:
            return {}
        law, groups, moved, hazard = state.law, state.groups, state.draft_accepted.copy(), state.draft_hazard.copy()
        slope, expected = state.draft_reached * hazard * (1 - hazard), np.zeros((1, self._drafts))
        for row, weight, pull in zip(rows, *self._told(state, rows), strict=True):
            mean, doubt = posterior(law.covariance[None], weight[None], pull[None], expected)
            moved += slope * (mean[0] / (law.requests + 1))[:, None]
            most = self._config.law_memory_requests
            groups = groups.learnt(int(state.request_group[row]), law, (weight, pull), self.most_groups, most)
            law = law.learnt(mean[0], doubt[0], most)
        moved = np.clip(moved, 0.0, state.draft_reached)
        self._levels.update(hazard, moved, state.draft_reached, range(self._drafts))
        return {"law": law, "groups": groups, "draft_accepted": moved, "draft_hazard": hazard}

    def _told(self, state: AcceptanceState, rows: Any) -> tuple[FloatArray, FloatArray]:
        """Return what the counts of requests tell of their deviations, weight and pull float64[n, drafts] (see ``policy.deviation``)."""
        own = state.request_shift, state.request_accepted, state.request_reached
        return told(state.draft_hazard, *(column.take(rows, 0) for column in own))

    def _believe(self, after: AcceptanceState, rows: IntArray) -> None:
        """Fill in ``request_shift`` as these requests' counts have it; what all deviate by is the level's."""
        weight, pull = self._told(after, rows)
        before, expected, doubt = (column.take(rows, 0) for column in (after.request_shift, after.request_mean, after.request_doubt))
        if len(rows) >= FEWEST_REQUESTS:
            change = common(expected, doubt.diagonal(axis1=1, axis2=2), weight, pull)
            if change.any():
                level = after.draft_hazard, after.draft_accepted, after.draft_reached
                self._levels.move(*level, change)
                pull -= weight * change
                before -= change
        mean, _ = posterior(doubt, weight, pull, expected)
        after.request_shift[rows] = before + np.clip(mean - before, -_MOST_STEP, _MOST_STEP)

    def aged(self, state: AcceptanceState, now: float) -> AcceptanceState:
        """Return the state whose draft-level evidence has faded towards the prior by the time passed."""
        passed_s = now - state.now
        if not 1.0 < passed_s < math.inf:  # finer steps change nothing; the first call only sets the clock
            return state if passed_s <= 1.0 else replace(state, now=now)
        keep = 0.5 ** (passed_s / self._config.half_life_s)
        return self.with_drafts(replace(state, now=now), state.draft_accepted * keep, state.draft_reached * keep)

    def observe(
        self,
        state: AcceptanceState,
        request: IntArray,
        draft: IntArray,
        accepted: IntArray,
        scored: IntArray,
        emitted: IntArray,
    ) -> AcceptanceState:
        """Learn from chains: row r saw ``scored[r]`` positions of which the first ``accepted[r]`` held (int64[m] each).

        Positions behind the first rejection were not reached and are no evidence. Requests without a slot teach the draft level only. It
        learns from what surprises in view of the request: late positions are reached by easy requests, which says nothing of the draft.
        The first rows are those that took a step and ``emitted`` so many tokens: by it their own older evidence and all drafts' fade. A
        request may be there several times, for several steps.
        """
        slots = state.slots
        slot = np.array([slots.get(r, -1) for r in request.tolist()], np.int64)
        after = self._stepped(state, slot[: len(emitted)], emitted)
        believes = after.unfaded_rows // _BELIEF_ROWS != state.unfaded_rows // _BELIEF_ROWS
        if after.unfaded_rows and not believes and not np.count_nonzero(scored):
            return after
        chains, alone = Chains.of(slot, draft, accepted, scored), _only(slot)
        if alone is not None and 0 < len(chains.slot) <= one_request.MOST_CHAINS:
            drafts = one_request.count(after, chains, _own_share(after.law))
        else:
            drafts = self._count(after, chains) if len(chains.slot) else []
        if not after.unfaded_rows and len(emitted):
            for counts in (after.draft_accepted, after.draft_reached):
                np.multiply(counts, math.exp(-(state.unfaded_rows + len(emitted)) / self._config.draft_memory_rows), out=counts)
            drafts = list(range(self._drafts))
        self._levels.update(after.draft_hazard, after.draft_accepted, after.draft_reached, drafts)
        if alone is not None:
            one_request.believe(after, alone, _MOST_STEP)
            return after
        touched = np.zeros(len(state.request_tokens) + 1, np.bool_)  # the last: without a slot
        touched[slot] = True
        moved = touched[:-1].nonzero()[0]
        if len(moved):
            self._believe(after, moved)
        return after

    def _stepped(self, state: AcceptanceState, slot: IntArray, emitted: IntArray) -> AcceptanceState:
        """Return a state of its own, to be filled in, after steps of the requests in these slots (-1: none), one for each time."""
        places = len(state.request_tokens) + 1  # the first for those without a slot
        keep = np.exp(np.bincount(slot + 1, minlength=places)[1:] / -self._config.request_memory_steps)[:, None, None]
        rows = state.unfaded_rows + len(emitted)
        return AcceptanceState(
            slots=state.slots,
            request_accepted=state.request_accepted * keep,
            request_reached=state.request_reached * keep,
            request_shift=state.request_shift.copy(),
            request_tokens=state.request_tokens + np.bincount(slot + 1, emitted, places)[1:],
            request_group=state.request_group,
            request_mean=state.request_mean,
            request_doubt=state.request_doubt,
            request_recent=state.request_recent.copy(),
            draft_accepted=state.draft_accepted.copy(),
            draft_reached=state.draft_reached.copy(),
            draft_hazard=state.draft_hazard.copy(),
            law=state.law,
            groups=state.groups,
            now=state.now,
            unfaded_rows=0 if rows >= _FADE_SHARE * self._config.draft_memory_rows else rows,
        )

    def _count(self, after: AcceptanceState, chains: Chains) -> list[int]:
        """Count the chains in a state's tables, in place; return the drafts that they were of."""
        draft, reach, drafts = chains.draft, up_to(self._k_max), self._drafts
        held, seen = reach.take(chains.held, 0), reach.take(chains.seen, 0)
        level = after.draft_hazard.take(draft, 0)
        place, shifts = chains.slot * drafts + draft, after.request_shift.reshape(-1)
        strangers = chains.slot.item(chains.slot.argmin()) < 0
        shift = np.where(place < 0, 0.0, shifts.take(np.maximum(place, 0))) if strangers else shifts.take(place)
        expected = shifted(level, shift)
        evidence = held + _own_share(after.law) * (level - expected) * seen
        after.draft_accepted += sums_by(draft, drafts, evidence)
        after.draft_reached += sums_by(draft, drafts, seen)
        np.minimum(after.draft_accepted, after.draft_reached, out=after.draft_accepted)
        np.maximum(after.draft_accepted, 0.0, out=after.draft_accepted)
        expected *= seen
        figures = np.stack([chains.held, chains.seen, expected.sum(1)], axis=1)
        own: tuple[Any, ...] = (place, held, seen, figures)
        if strangers:
            known = (chains.slot >= 0).nonzero()[0]
            own = tuple(column.take(known, 0) for column in own)
        if len(own[0]):
            self._count_own(after, *own)
        return list(set(draft.tolist()))

    def _count_own(
        self,
        after: AcceptanceState,
        place: IntArray,
        held: FloatArray,
        seen: FloatArray,
        told: FloatArray,
    ) -> None:
        """Count chains of requests with a slot in their own tables, in place.

        ``place`` is slot x draft, ``told`` as in ``follow``.
        """
        accepted, reached = after.request_accepted.reshape(-1, self._k_max), after.request_reached.reshape(-1, self._k_max)
        apart = bool(np.bincount(place).max() == 1)
        add(accepted, place, held, apart)
        add(reached, place, seen, apart)
        follow(after.request_recent.reshape(-1, 3), place, apart, told, accepted, reached)

    def expected(self, state: AcceptanceState, request: list[int]) -> Expected:
        """Return what is expected of admitted requests.

        A request's deviation from a draft's level shifts every position of it, also those never reached; its own counts then refine each
        position.
        """
        slot = np.fromiter(map(state.slots.__getitem__, request), np.int64, len(request))
        reached = state.request_reached.take(slot, 0).transpose(2, 1, 0).copy()
        ratio = np.exp(state.request_shift.take(slot, 0).T.copy())
        believed = at_odds(state.draft_hazard.T[:, :, None], ratio)
        hazard = self._config.position_strength * believed
        hazard += state.request_accepted.take(slot, 0).transpose(2, 1, 0)
        hazard /= reached + self._config.position_strength
        return Expected(slot, hazard.transpose(2, 1, 0), believed, reached)

    def hazards(self, state: AcceptanceState, request: list[int]) -> FloatArray:
        """Return the hazards float64[n, drafts, positions] expected of admitted requests."""
        return self.expected(state, request).hazard

    def hazards_of(self, state: AcceptanceState, request: int) -> list[list[float]]:
        """Return ``hazards`` [drafts][positions] of one admitted request, by plain numbers: a few positions are quicker without arrays."""
        slot, position_strength, hazards = state.slots[request], self._config.position_strength, []
        accepted, reached = state.request_accepted[slot].tolist(), state.request_reached[slot].tolist()
        levels = state.draft_hazard.tolist()
        ratios = map(math.exp, state.request_shift[slot].tolist())
        for held, seen, level, ratio in zip(accepted, reached, levels, ratios, strict=True):
            chain = []
            for a, r, h in zip(held, seen, level, strict=True):  # no comprehension, whose names in an outer scope take longer
                odds = ratio * h
                chain.append((a + position_strength * (odds / (odds + (1 - h)))) / (r + position_strength))
            hazards.append(chain)
        return hazards

    def doubt(self, state: AcceptanceState, expected: Expected) -> tuple[FloatArray, FloatArray]:
        """Return the standard deviations of the hazards, and the variance of requests' deviations, float64[n, drafts] (logits)."""
        own = self.covariance(state, expected).diagonal(axis1=1, axis2=2)
        hazard = expected.hazard.T
        variance = hazard * (1 - hazard)
        doubt = own.T * variance
        doubt += (1 / (state.draft_reached + self._config.prior_strength + 1)).T[:, :, None]
        doubt *= variance
        return np.sqrt(doubt, out=doubt).T, own

    def covariance(self, state: AcceptanceState, expected: Expected) -> FloatArray:
        """Return what is not known of how requests deviate, float64[n, drafts, drafts] (logits)."""
        return posterior_covariance(state.request_doubt.take(expected.slot, 0), told_weight(expected.believed, expected.reached))

    def with_drafts(self, state: AcceptanceState, accepted: FloatArray, reached: FloatArray) -> AcceptanceState:
        """Return the state with this draft-level evidence."""
        return replace(state, draft_accepted=accepted, draft_reached=reached, draft_hazard=self._levels.hazards(accepted, reached))
