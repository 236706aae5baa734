"""How likely a draft's tokens are accepted: hazards per position, per request and draft, shrunk towards the draft's and then the prior.

The hazard h_j = accepted_j / reached_j is the chance that position j is accepted given that all before it were; counted where a position
was *reached*, it is unbiased under any planned length (accepted / k is not). Survival is s_j = h_1 ... h_j, the expected tokens of a step
1 + sum_{j<=k} s_j.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from .plan import FloatArray, IntArray, Rule

_MIN_HAZARD, _MAX_HAZARD = 0.02, 0.995
_MIN_STRENGTH, _MAX_STRENGTH = 2.0, 200.0
_LIKENESS_PRIOR = 500.0  # about what five requests of twenty probed tokens tell


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Priors and memories. Strengths count pseudo-observations; memories count a request's steps, row-steps of the whole batch, and
    finished requests.

    ``request_strength`` is only the start: how unlike requests are is learnt. ``half_life_s`` is the time in which a draft's evidence loses
    half its weight even if nothing runs.
    """

    prior_hazard: float = 0.6
    prior_strength: float = 4.0
    request_strength: float = 12.0
    position_strength: float = 30.0
    request_memory_steps: float = 100.0
    draft_memory_rows: float = 8000.0
    likeness_memory_requests: float = 200.0
    half_life_s: float = 900.0


@dataclass(frozen=True, slots=True, eq=False)
class AcceptanceState:
    """Evidence so far. Index ``c`` is the class of a request, the ``Rule`` it is verified by, which never changes.

    ``slots`` request id -> row of ``request_class`` int64[slots] and of the other ``request_*`` float64[slots, drafts, positions];
    ``draft_*`` float64[rules, drafts, positions].
    ``draft_hazard`` is the draft-level estimate made of the latter. ``likeness`` float64[2, drafts] holds, over finished requests, the sums
    of which the ratio is the intra-request correlation (see ``_likeness``). ``now`` is the time up to which the state has aged.
    """

    slots: dict[int, int]
    request_class: IntArray
    request_accepted: FloatArray
    request_reached: FloatArray
    draft_accepted: FloatArray
    draft_reached: FloatArray
    draft_hazard: FloatArray
    likeness: FloatArray
    now: float


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """``hazard[n, d, j]`` for the rows asked about and ``spread`` its standard deviation."""

    hazard: FloatArray
    spread: FloatArray


class AcceptanceModel:
    """The estimator: its methods return new states and leave the given one alone."""

    def __init__(self, drafts: int, k_max: int, config: AcceptanceConfig) -> None:
        self._drafts = drafts
        self._k_max = k_max
        self._config = config

    def start(self) -> AcceptanceState:
        """Return the state before any evidence."""
        none = np.zeros((len(Rule), self._drafts, self._k_max))
        empty = np.zeros((8, self._drafts, self._k_max))
        start = np.array([_LIKENESS_PRIOR / (self._config.request_strength + 1), _LIKENESS_PRIOR])
        likeness = np.tile(start[:, None], (1, self._drafts))
        return AcceptanceState({}, np.zeros(8, np.int64), empty, empty, none, none, self._draft_hazard(none, none), likeness, -math.inf)

    def admit(self, state: AcceptanceState, requests: list[int]) -> AcceptanceState:
        """Return the state with a slot for every request; a new one has no evidence yet."""
        new = [request for request in requests if request not in state.slots]
        if not new:
            return state
        slots = dict(state.slots)
        capacity = len(state.request_reached)
        free = sorted(set(range(capacity + len(new))) - set(slots.values()))
        slots.update(zip(new, free, strict=False))
        if max(slots.values()) < capacity:
            return replace(state, slots=slots)
        more = (0, capacity + len(new))
        return replace(
            state,
            slots=slots,
            request_class=np.pad(state.request_class, more),
            request_accepted=np.pad(state.request_accepted, (more, (0, 0), (0, 0))),
            request_reached=np.pad(state.request_reached, (more, (0, 0), (0, 0))),
        )

    def forget(self, state: AcceptanceState, requests: Iterable[int]) -> AcceptanceState:
        """Return the state without these requests, having learnt from them how unlike requests are; unknown ones do not matter."""
        gone = [request for request in requests if request in state.slots]
        if not gone:
            return state
        slots = dict(state.slots)
        rows = [slots.pop(request) for request in gone]
        likeness = self._likeness(state, rows)
        accepted, reached = state.request_accepted.copy(), state.request_reached.copy()
        accepted[rows] = 0.0
        reached[rows] = 0.0
        return replace(state, slots=slots, request_accepted=accepted, request_reached=reached, likeness=likeness)

    def _likeness(self, state: AcceptanceState, rows: list[int]) -> FloatArray:
        """Return the sums after these requests' end.

        Of a beta-binomial count A of N trials at mean h, Var(A) = N h (1 - h) (1 + (N - 1) rho) with rho = 1 / (strength + 1) (Williams,
        1982): so rho is the ratio of sum (A - N h)^2 - N h (1 - h) to sum N (N - 1) h (1 - h).
        """
        accepted, reached = state.request_accepted[rows], state.request_reached[rows]
        trials = reached.sum(2)
        level = state.draft_hazard[state.request_class[rows]]
        variance = (reached * level * (1 - level)).sum(2)
        surprise = (accepted.sum(2) - (reached * level).sum(2)) ** 2
        keep = math.exp(-len(rows) / self._config.likeness_memory_requests)
        excess = np.where(trials > 1, surprise - variance, 0.0).sum(0)
        likeness: FloatArray = state.likeness * keep + np.stack([excess, (np.maximum(trials - 1, 0.0) * variance).sum(0)])
        return likeness

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
    ) -> AcceptanceState:
        """Learn from chains: row r saw ``scored[r]`` positions of which the first ``accepted[r]`` held (int64[m] each).

        Positions behind the first rejection were not reached and are no evidence. Requests without a slot teach the draft level only.
        ``stepped`` are the requests that took a step: by it their own older evidence and all drafts' fade a little.
        """
        request_accepted, request_reached = state.request_accepted.copy(), state.request_reached.copy()
        own = [state.slots[r] for r in stepped.tolist() if r in state.slots]
        keep = math.exp(-1 / self._config.request_memory_steps)
        request_accepted[own] *= keep
        request_reached[own] *= keep
        keep = math.exp(-len(stepped) / self._config.draft_memory_rows)
        draft_accepted, draft_reached = state.draft_accepted * keep, state.draft_reached * keep
        request_class, used = state.request_class.copy(), scored > 0
        if used.any():
            draft, cls = draft[used], rule[used]
            position = np.arange(self._k_max)
            held = np.minimum(accepted, scored)[used, None]
            hit = (position < held).astype(np.float64)
            seen = (position < np.minimum(held + 1, scored[used, None])).astype(np.float64)
            np.add.at(draft_accepted, (cls, draft), hit)
            np.add.at(draft_reached, (cls, draft), seen)
            slot = np.array([state.slots.get(r, -1) for r in request[used].tolist()])
            known = slot >= 0
            request_class[slot[known]] = cls[known]
            np.add.at(request_accepted, (slot[known], draft[known]), hit[known])
            np.add.at(request_reached, (slot[known], draft[known]), seen[known])
        state = replace(state, request_class=request_class, request_accepted=request_accepted, request_reached=request_reached)
        return self.with_drafts(state, draft_accepted, draft_reached)

    def estimate(self, state: AcceptanceState, request: list[int], rule: IntArray) -> Estimate:
        """Return hazards and their spread for admitted requests (``rule`` int64[n]).

        A request's difficulty is one number per draft: the odds ratio between what it had accepted and what the draft level expected at
        the positions that it reached, both shrunk by as much as requests are alike. It shifts every position of the draft level, also
        those never reached; the request's own counts then refine each position.
        """
        config = self._config
        slot = [state.slots[r] for r in request]
        accepted, reached = state.request_accepted[slot], state.request_reached[slot]
        level = state.draft_hazard[rule]
        correlation = state.likeness[0] / state.likeness[1]
        strength = (1 / np.clip(correlation, 1 / _MAX_STRENGTH, 1 / _MIN_STRENGTH))[:, None] - 1
        weight = reached.sum(2, keepdims=True) + strength
        actual = (accepted.sum(2, keepdims=True) + strength * level) / weight
        expected = ((reached * level).sum(2, keepdims=True) + strength * level) / weight
        odds = level / (1 - level) * (actual / (1 - actual)) * ((1 - expected) / expected)
        shifted = odds / (1 + odds)
        hazard = (accepted + config.position_strength * shifted) / (reached + config.position_strength)
        hazard = np.clip(hazard, _MIN_HAZARD, _MAX_HAZARD)
        doubt = 1 / (weight + 1) + 1 / (state.draft_reached[rule] + config.prior_strength + 1)
        return Estimate(hazard, np.sqrt(hazard * (1 - hazard) * doubt))

    def with_drafts(self, state: AcceptanceState, accepted: FloatArray, reached: FloatArray) -> AcceptanceState:
        """Return the state with this draft-level evidence."""
        return replace(state, draft_accepted=accepted, draft_reached=reached, draft_hazard=self._draft_hazard(accepted, reached))

    def _draft_hazard(self, accepted: FloatArray, reached: FloatArray) -> FloatArray:
        """Return draft-level hazards [rules, drafts, positions], each position's prior being the estimate of the one before it.

        An unprobed position inherits the posterior predictive: after i more successes of one unknown rate ~ Beta(a, b) the next succeeds
        with (a + i) / (a + b + i), so that the product of the hazards is E[rate^j]; the plug-in power of the mean would understate it.
        a + b is the evidence of all positions so far: what is well known is inherited as it is.
        """
        strength, hazards = self._config.prior_strength, []
        for held, seen in zip(accepted.reshape(-1, self._k_max).tolist(), reached.reshape(-1, self._k_max).tolist(), strict=True):
            inherited, evidence = self._config.prior_hazard, strength
            for a, r in zip(held, seen, strict=True):  # a dozen chains of a few positions: quicker without arrays
                mean = (a + strength * inherited) / (r + strength)
                hazards.append(mean)
                evidence += r
                inherited = (mean * evidence + 1) / (evidence + 1)
                evidence += 1
        return np.clip(np.array(hazards).reshape(accepted.shape), _MIN_HAZARD, _MAX_HAZARD)
