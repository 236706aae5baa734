"""How likely a draft's tokens are accepted: hazards per position, per request and draft, shrunk towards the draft's and then the prior.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted given that all before it were; counted where a position
was *reached*, it is unbiased under any planned length (accepted / k is not). Survival is s_j = h_1 ... h_j, the expected tokens of a step
1 + sum_{j<=k} s_j. A request's hazards are the draft's, their logits shifted by what the request deviates (``policy.deviation``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .deviation import Law, posterior, shifted
from .groups import NO_GROUP, Groups
from .plan import FloatArray, IntArray, Rule
from .shifts import RECENT_KEEP, abrupt, common

_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_FADE_SHARE = 0.01  # of the draft level's memory: so much time passes between two fadings, which touch every draft
_MOST_STEP = 2.0  # logits that an estimate of a request may move at once: far from the level its approximation overshoots
_LAW_REQUESTS = 20.0  # what the first belief of how requests differ counts for
_TELLING_REQUESTS = 10.0  # after so many half of what a request deviates is held to be its own, not the draft's
_KEPT_AT_CHANGE = 0.1  # of a level's counts, where it changes at once
_FEW_CHAINS = 8  # up to so many are counted one by one, quicker than by arrays


_COLUMNS = (
    *("request_class", "request_accepted", "request_reached", "request_shift", "request_tokens"),
    *("request_group", "request_mean", "request_doubt", "request_recent"),
)


def _grown(column: Any, rows: int) -> Any:
    """Return a copy with so many rows more."""
    return np.pad(column, [(0, rows)] + [(0, 0)] * (column.ndim - 1))


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


@dataclass(frozen=True, slots=True, eq=False)
class AcceptanceState:
    """Evidence so far. Index ``c`` is the class of a request, the ``Rule`` it is verified by, which never changes.

    ``slots`` request id -> row of ``request_class`` int64[slots], ``request_accepted`` and ``request_reached`` float64[slots, drafts,
    positions], ``request_shift`` float64[slots, drafts], by how much the request's logits differ from the draft's as far as is known, and
    ``request_tokens`` float64[slots], emitted since it was admitted; ``request_group`` int64[slots] and what that let expect of the
    shift, ``request_mean`` float64[slots, drafts] with the covariance ``request_doubt``;
    ``request_recent`` (see ``_restarted``); ``draft_*`` float64[rules, drafts, positions].
    ``draft_hazard`` is the draft-level estimate made of the latter, ``law`` and ``groups`` how requests deviate from it.
    ``now`` is the time up to which the state has aged, ``unfaded_rows`` the row-steps by which the draft level has yet to fade.
    """

    slots: dict[int, int]
    request_class: IntArray
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


class AcceptanceModel:
    """The estimator: its methods return new states and leave the given one alone."""

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts = drafts
        self._k_max = k_max
        self._config = config
        self._up_to = np.tri(k_max + 1, k_max, -1)  # row h: the first h positions
        self._each = np.ones(k_max)
        self.most_groups = config.most_groups

    def start(self) -> AcceptanceState:
        """Return the state before any evidence."""
        none = np.zeros((len(Rule), self._drafts, self._k_max))
        empty = np.zeros((8, self._drafts, self._k_max))
        law = Law.prior(self._drafts, self._config.request_variance, _LAW_REQUESTS)
        groups = Groups.none(self._drafts, self._config.request_variance, _LAW_REQUESTS)
        hazard, shift = self._draft_hazard(none, none), np.zeros((8, self._drafts))
        group, doubt = np.full(8, NO_GROUP), np.zeros((8, self._drafts, self._drafts))
        return AcceptanceState(
            {},
            np.zeros(8, np.int64),
            empty,
            empty,
            shift,
            np.zeros(8),
            group,
            shift,
            doubt,
            np.zeros((8, self._drafts, 3)),
            none,
            none,
            hazard,
            law,
            groups,
            -math.inf,
        )

    def admit(self, state: AcceptanceState, requests: list[int], group: list[int] | None = None) -> AcceptanceState:
        """Return the state with a slot for every request (``group`` of each, None: none); a new one has no evidence of its own yet."""
        new = {request: row for row, request in enumerate(requests) if request not in state.slots}
        if not new:
            return state
        slots = dict(state.slots)
        capacity = len(state.request_reached)
        taken = set(slots.values())
        free = [slot for slot in range(capacity + len(new)) if slot not in taken][: len(new)]
        slots.update(zip(new, free, strict=True))
        more = capacity + len(new) - len(state.request_reached) if free[-1] >= capacity else 0
        columns = {name: _grown(getattr(state, name), more) for name in _COLUMNS}
        for slot, row in zip(free, new.values(), strict=True):
            source = NO_GROUP if group is None else group[row]
            mean, doubt = state.groups.expected(source, state.law)
            columns["request_group"][slot] = source
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
        state = self._learnt(state, [row for row in rows if state.request_reached[row].any()])
        accepted, reached, tokens = state.request_accepted.copy(), state.request_reached.copy(), state.request_tokens.copy()
        recent = state.request_recent.copy()
        for column in (accepted, reached, tokens, recent):
            column[rows] = 0.0
        return replace(state, slots=slots, request_accepted=accepted, request_reached=reached, request_tokens=tokens, request_recent=recent)

    def _learnt(self, state: AcceptanceState, rows: list[int]) -> AcceptanceState:
        """Return the state after these finished requests have taught how requests differ, and the drafts' levels their mean.

        A level made of counts alone would be that of the requests that use a draft most.
        """
        law, groups, moved = state.law, state.groups, state.draft_accepted.copy()
        slope = state.draft_reached * state.draft_hazard * (1 - state.draft_hazard)
        weights, pulls = self._told(state, rows)
        for row, weight, pull in zip(rows, weights, pulls, strict=True):
            rule = state.request_class[row]
            mean, doubt = posterior(law.covariance, weight, pull)
            moved[rule] += slope[rule] * (mean / (law.requests + 1))[:, None]
            most = self._config.law_memory_requests
            groups = groups.learnt(int(state.request_group[row]), law, (weight, pull), self.most_groups, most)
            law = law.learnt(mean, doubt, most)
        return self.with_drafts(replace(state, law=law, groups=groups), np.clip(moved, 0.0, state.draft_reached), state.draft_reached)

    def _told(self, state: AcceptanceState, rows: list[int]) -> tuple[FloatArray, FloatArray]:
        """Return what the counts of requests tell of their deviations, weight and pull float64[n, drafts] (see ``policy.deviation``)."""
        accepted, reached = state.request_accepted.take(rows, 0), state.request_reached.take(rows, 0)
        shift = state.request_shift.take(rows, 0)
        hazard = shifted(state.draft_hazard.take(state.request_class.take(rows), 0), shift)
        expected = reached * hazard
        weight = self._total(expected * (1 - hazard))
        return weight, weight * shift + self._total(accepted - expected)

    def _believed(self, state: AcceptanceState, rows: list[int]) -> AcceptanceState:
        """Return the state with ``request_shift`` as these requests' counts have it; what all deviate by is the level's."""
        weight, pull = self._told(state, rows)
        before, expected, doubt = (column.take(rows, 0) for column in (state.request_shift, state.request_mean, state.request_doubt))
        shift, rule = state.request_shift.copy(), state.request_class.take(rows)
        for c in set(rule.tolist()):
            alike = rule == c
            change = common(expected[alike], doubt.diagonal(axis1=1, axis2=2)[alike], weight[alike], pull[alike])
            if change.any():
                state = self._moved(state, c, change)
                pull[alike] -= weight[alike] * change
                before[alike] -= change
        mean, _ = posterior(doubt, weight, pull, expected)
        shift[rows] = before + np.clip(mean - before, -_MOST_STEP, _MOST_STEP)
        return replace(state, request_shift=shift)

    def _moved(self, state: AcceptanceState, rule: int, change: FloatArray) -> AcceptanceState:
        """Return the state whose levels of a rule moved by ``change`` [drafts] (logits); what was counted there before hardly counts."""
        accepted, reached = state.draft_accepted.copy(), state.draft_reached.copy()
        drafts = change.nonzero()[0]
        reached[rule, drafts] *= _KEPT_AT_CHANGE
        accepted[rule, drafts] = reached[rule, drafts] * shifted(state.draft_hazard[rule, drafts], change[drafts])
        return self.with_drafts(state, accepted, reached)

    def _restarted(
        self, recent: FloatArray, accepted: FloatArray, reached: FloatArray, told: tuple[IntArray, ...], expected: FloatArray
    ) -> None:
        """Follow the chains ``told`` (slot, draft, accepted, reached) and what was ``expected`` of them in ``recent``, in place.

        Of a request that changed at once only the recent counts are kept, all at the first position.
        """
        slot, draft, held, seen = told
        places = np.unique(slot * self._drafts + draft)
        table = recent.reshape(-1, 3)
        table[places] *= RECENT_KEEP
        np.add.at(table, slot * self._drafts + draft, np.stack([held, seen, expected], axis=1))
        changed = places[abrupt(*table[places].T)]
        if len(changed):
            for counts, column in ((accepted, 0), (reached, 1)):
                flat = counts.reshape(-1, self._k_max)
                flat[changed] = 0.0
                flat[changed, 0] = table[changed, column]
            table[changed] = 0.0

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
        rule: IntArray,
        accepted: IntArray,
        scored: IntArray,
        stepped: IntArray,
        emitted: IntArray,
    ) -> AcceptanceState:
        """Learn from chains: row r saw ``scored[r]`` positions of which the first ``accepted[r]`` held (int64[m] each).

        Positions behind the first rejection were not reached and are no evidence. Requests without a slot teach the draft level only. It
        learns from what surprises in view of the request: late positions are reached by easy requests, which says nothing of the draft.
        ``stepped`` are the requests that took a step and ``emitted`` so many tokens: by it their own older evidence and all drafts' fade.
        """
        keep = np.ones((len(state.request_class), 1, 1))
        here = np.array([state.slots.get(r, -1) for r in stepped.tolist()], np.int64)
        tokens, recent = state.request_tokens.copy(), state.request_recent.copy()
        tokens[here[here >= 0]] += emitted[here >= 0]
        keep[here[here >= 0]] = math.exp(-1 / self._config.request_memory_steps)
        own_accepted, own_reached, request_class = state.request_accepted * keep, state.request_reached * keep, state.request_class.copy()
        draft_accepted, draft_reached, pairs = state.draft_accepted.copy(), state.draft_reached.copy(), set[int]()
        used = (scored > 0).nonzero()[0]
        if len(used):
            draft, rule, scored = draft[used], rule[used], scored[used]
            held = np.minimum(accepted[used], scored)
            seen = np.minimum(held + 1, scored)
            slot = np.array([state.slots.get(r, -1) for r in request[used].tolist()])
            known = slot >= 0
            request_class[slot[known]] = rule[known]
            own, pair = (slot * self._drafts + draft)[known], rule * self._drafts + draft
            for table, places, positions in (
                *((own_accepted, own, held[known]), (own_reached, own, seen[known])),
                *((draft_accepted, pair, held), (draft_reached, pair, seen)),
            ):
                self._count(table.reshape(-1, self._k_max), places, positions)
            level = state.draft_hazard[rule, draft]
            expected = shifted(level, np.where(known, state.request_shift[slot, draft], 0.0))
            finished = state.law.requests - _LAW_REQUESTS
            own_share = finished / (finished + _TELLING_REQUESTS)
            np.add.at(draft_accepted.reshape(-1, self._k_max), pair, own_share * (level - expected) * self._up_to[seen])
            np.clip(draft_accepted, 0.0, draft_reached, out=draft_accepted)
            likely = (expected * self._up_to[seen]).sum(1)[known]
            self._restarted(recent, own_accepted, own_reached, (slot[known], draft[known], held[known], seen[known]), likely)
            pairs.update(pair.tolist())
        rows = state.unfaded_rows + len(stepped)
        if fades := rows >= _FADE_SHARE * self._config.draft_memory_rows:
            draft_accepted *= (keep_rows := math.exp(-rows / self._config.draft_memory_rows))
            draft_reached *= keep_rows
        after = AcceptanceState(
            slots=state.slots,
            request_class=request_class,
            request_accepted=own_accepted,
            request_reached=own_reached,
            request_shift=state.request_shift,
            request_tokens=tokens,
            request_group=state.request_group,
            request_mean=state.request_mean,
            request_doubt=state.request_doubt,
            request_recent=recent,
            draft_accepted=draft_accepted,
            draft_reached=draft_reached,
            draft_hazard=self._draft_hazard(draft_accepted, draft_reached, state.draft_hazard, None if fades else pairs),
            law=state.law,
            groups=state.groups,
            now=state.now,
            unfaded_rows=0 if fades else rows,
        )
        moved = sorted({state.slots[r] for r in (*stepped.tolist(), *request.tolist()) if r in state.slots})
        return self._believed(after, moved) if moved else after

    def _count(self, table: FloatArray, places: IntArray, positions: IntArray) -> None:
        """Add 1 to the first ``positions`` of each of the places (rows) of a table [places, positions], in place."""
        if len(places) <= _FEW_CHAINS:
            for place, end in zip(places.tolist(), positions.tolist(), strict=True):
                table[place, :end] += 1.0
        else:
            ends = self._k_max + 1
            ending = np.bincount(places * ends + positions, minlength=len(table) * ends).reshape(len(table), ends)
            table += ending.astype(np.float64) @ self._up_to

    def hazards(self, state: AcceptanceState, request: list[int], rule: IntArray) -> FloatArray:
        """Return hazards float64[n, drafts, positions] for admitted requests (``rule`` int64[n]).

        A request's deviation from a draft's level shifts every position of it, also those never reached; its own counts then refine each
        position.
        """
        slot = np.fromiter(map(state.slots.__getitem__, request), np.int64, len(request))
        position_strength = self._config.position_strength
        accepted, reached = state.request_accepted.take(slot, 0), state.request_reached.take(slot, 0)
        hazard = shifted(state.draft_hazard.take(rule, 0), state.request_shift.take(slot, 0))
        hazard *= position_strength
        hazard += accepted
        reached += position_strength
        hazard /= reached
        return hazard

    def hazards_of(self, state: AcceptanceState, request: int, rule: int) -> list[list[float]]:
        """Return ``hazards`` [drafts][positions] of one admitted request, by plain numbers: a few positions are quicker without arrays."""
        slot, position_strength, hazards = state.slots[request], self._config.position_strength, []
        accepted, reached = state.request_accepted[slot].tolist(), state.request_reached[slot].tolist()
        ratios = map(math.exp, state.request_shift[slot].tolist())
        for held, seen, level, ratio in zip(accepted, reached, state.draft_hazard[rule].tolist(), ratios, strict=True):
            hazards.append(
                [
                    (a + position_strength * ((odds := ratio * h) / (odds + (1 - h)))) / (r + position_strength)
                    for a, r, h in zip(held, seen, level, strict=True)
                ]
            )
        return hazards

    def doubt(self, state: AcceptanceState, request: list[int], rule: IntArray, hazard: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the standard deviations of ``hazards``, and the variance of requests' deviations, float64[n, drafts] (logits)."""
        own = np.diagonal(self.covariance(state, request), axis1=1, axis2=2)
        variance = hazard * (1 - hazard)
        level = variance / (state.draft_reached[rule] + self._config.prior_strength + 1)
        return np.sqrt(own[:, :, None] * variance**2 + level), own

    def covariance(self, state: AcceptanceState, request: list[int]) -> FloatArray:
        """Return what is not known of how admitted requests deviate, float64[n, drafts, drafts] (logits)."""
        rows = [state.slots[r] for r in request]
        return posterior(state.request_doubt.take(rows, 0), *self._told(state, rows))[1]

    def _total(self, counts: FloatArray) -> FloatArray:
        total: FloatArray = counts.reshape(counts.shape[0] * self._drafts, self._k_max).dot(self._each).reshape(counts.shape[:2])
        return total

    def with_drafts(self, state: AcceptanceState, accepted: FloatArray, reached: FloatArray) -> AcceptanceState:
        """Return the state with this draft-level evidence."""
        return replace(state, draft_accepted=accepted, draft_reached=reached, draft_hazard=self._draft_hazard(accepted, reached))

    def _draft_hazard(
        self, accepted: FloatArray, reached: FloatArray, before: FloatArray | None = None, pairs: Iterable[int] | None = None
    ) -> FloatArray:
        """Return draft-level hazards [rules, drafts, positions], each position's prior being the estimate of the one before it.

        Given ``before``, only those of ``pairs`` (rule x draft) are computed anew.

        An unprobed position inherits the posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next succeeds
        with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the plug-in power of the mean would understate it.
        a + b is the evidence of all positions so far: what is well known is inherited as it is.
        """
        strength, places = self._config.prior_strength, len(Rule) * self._drafts
        hazards = np.empty((places, self._k_max)) if before is None else before.reshape(places, self._k_max).copy()
        held_by, seen_by = accepted.reshape(hazards.shape), reached.reshape(hazards.shape)
        for pair in range(places) if pairs is None else pairs:
            inherited, evidence, chain = self._config.prior_hazard, strength, []
            for a, r in zip(held_by[pair].tolist(), seen_by[pair].tolist(), strict=True):  # a few positions: quicker without arrays
                mean = (a + strength * inherited) / (r + strength)
                chain.append(min(max(mean, _MIN_HAZARD), _MAX_HAZARD))
                evidence += r
                inherited = (mean * evidence + 1) / (evidence + 1)
                evidence += 1
            hazards[pair] = chain
        return hazards.reshape(accepted.shape)
