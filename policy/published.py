"""Adaptive policies of others, rebuilt from their public descriptions as baselines: SmartSpec's code, SGLang's average, SPIN's selection,
a bandit on tokens per second.

Where a choice had to be made it is the one that helps the baseline: censored evidence instead of biased, catch-up instead of a draft that
is lost for good, times from this project's tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .baselines import same_for_all
from .latency import LatencyCurve, LatencyModel
from .plan import NO_DRAFT, FloatArray, Outcome, Plan, Policy, View

_FIT_TOKENS = 512
_WINDOW_STEPS = 100
_ALPHA_BOUNDS = (0.01, 0.99)


def expected_tokens(alpha: float, length: int) -> float:
    """Return the tokens of a step of k proposals that are each accepted with probability alpha < 1: (1 - alpha^(k+1)) / (1 - alpha)."""
    return float((1 - alpha ** (length + 1)) / (1 - alpha))


@dataclass(frozen=True, slots=True)
class LinearCurve:
    """Seconds of a forward = fixed_s + token_s * tokens + row_s * rows + context_s * cached tokens: a staircase as a line sees it."""

    fixed_s: float
    token_s: float
    row_s: float
    context_s: float

    @classmethod
    def fit(cls, curve: LatencyCurve) -> LinearCurve:
        """Fit the line by least squares of the absolute error over 1..512 tokens, as a regression over profiled steps would."""
        tokens = np.arange(1, _FIT_TOKENS + 1)
        token_s, fixed_s = np.polyfit(tokens, curve.base(tokens), 1)
        return cls(max(float(fixed_s), 0.0), max(float(token_s), 0.0), curve.row_s, curve.context_s)

    def seconds(self, tokens: int, rows: int, context_tokens: int) -> float:
        """Return the seconds of one forward."""
        return self.fixed_s + self.token_s * tokens + self.row_s * rows + self.context_s * context_tokens


@dataclass(frozen=True, slots=True)
class SmartSpecState:
    """The length in use, the steps since it was chosen, and (accepted, rejected) tokens of the last steps that speculated."""

    length: int = 0
    age: int = 0
    window: tuple[tuple[int, int], ...] = ()


class SmartSpec(Policy):
    """SmartSpec as its published code decides: one draft, one acceptance rate alpha, one length k for the whole batch.

    Every ``update_steps`` steps k = 0, 1, ... are scored by goodput V/T and the scan stops at the first that is no better; k = 0 counts
    for a tenth more. T is linear in tokens, rows and context. alpha is the rate over the last 100 steps that speculated, at first 0.7,
    here by the unbiased estimate accepted / (accepted + rejections). Prefill in the step is not modelled, as there.
    """

    def __init__(self, drafts: tuple[str, ...], draft: str, latency: LatencyModel, k_max: int = 8, update_steps: int = 20) -> None:
        """Raise ValueError for an unknown draft."""
        if draft not in drafts:
            raise ValueError(f"draft must be one of {drafts}, got {draft!r}")
        self.draft, self._k_max, self._update_steps = draft, k_max, update_steps
        self._target = LinearCurve.fit(latency.target)
        self._draft = LinearCurve.fit(latency.drafts[drafts.index(draft)])
        self._overhead_s, self._speculation_s = latency.overhead_s, latency.speculation_s

    def start(self) -> SmartSpecState:
        """Return the state before the first step: k is chosen at once."""
        return SmartSpecState(age=self._update_steps)

    def plan(self, view: View, state: SmartSpecState, now: float, rng: np.random.Generator) -> tuple[Plan, SmartSpecState]:
        """Choose k anew if it is due. Raises ValueError when the view does not have the draft."""
        del now, rng
        if state.age >= self._update_steps and view.ready.any():
            rows, context = int(view.ready.sum()), int(view.context[view.ready].sum())
            state = replace(state, length=self._best(rows, context, self._alpha(state)), age=0)
        return same_for_all(view, self.draft, state.length), replace(state, age=state.age + 1)

    def observe(self, outcome: Outcome, state: SmartSpecState, now: float) -> SmartSpecState:
        """Add the step to the window if it speculated."""
        del now
        used = outcome.scored > 0
        if not used.any():
            return state
        accepted = np.minimum(outcome.accepted, outcome.scored)[used]
        step = (int(accepted.sum()), int((accepted < outcome.scored[used]).sum()))
        return replace(state, window=(*state.window[-(_WINDOW_STEPS - 1) :], step))

    def _alpha(self, state: SmartSpecState) -> float:
        if not state.window:
            return 0.7
        accepted, rejected = (sum(column) for column in zip(*state.window, strict=True))
        alpha: float = accepted / max(accepted + rejected, 1)
        return min(max(alpha, _ALPHA_BOUNDS[0]), _ALPHA_BOUNDS[1])

    def _best(self, rows: int, context: int, alpha: float) -> int:
        best, best_goodput = 0, 0.0
        for k in range(self._k_max + 1):
            seconds = self._target.seconds(rows * (k + 1), rows, context) + self._overhead_s
            if k:
                seconds += k * self._draft.seconds(rows, rows, context) + self._speculation_s
            goodput = rows * expected_tokens(alpha, k) / seconds * (1.1 if k == 0 else 1.0)
            if goodput <= best_goodput:
                break
            best, best_goodput = k, goodput
        return best


@dataclass(frozen=True, slots=True)
class EmaSlot:
    """One batch range's length, the average of accepted tokens, and the steps it has seen."""

    length: int
    accepted: float
    steps: int = 0


class AcceptanceEma(Policy):
    """SGLang's adaptive ``num_steps``: an average of accepted tokens moves the length through a few candidates, by batch range.

    ``candidates`` maps the smallest batch of each range to its lengths (defaults as there). The average moves with each step's mean by
    0.2; every 5 steps after 10, the length falls to the next candidate c below while the average is at most c - 0.5 - 0.25 (0.5 above
    c = 0, and no 0.25 for ranges that may switch off), or rises while it is over the present length - 0.5. After an interval of 0 it
    probes the next one.
    """

    RATE, EVERY_STEPS, WARM_UP_STEPS = 0.2, 5, 10
    DEFAULT: Mapping[int, Sequence[int]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}

    def __init__(self, draft: str, candidates: Mapping[int, Sequence[int]] | None = None) -> None:
        self.draft = draft
        self._candidates = {batch: tuple(sorted(lengths)) for batch, lengths in sorted((candidates or self.DEFAULT).items())}
        self._batches = np.array(list(self._candidates))

    def start(self) -> dict[int, EmaSlot]:
        """Return a slot per batch range, in the middle of its candidates."""
        middle = {batch: lengths[len(lengths) // 2] for batch, lengths in self._candidates.items()}
        return {batch: EmaSlot(length, length - 1.0) for batch, length in middle.items()}

    def plan(self, view: View, state: dict[int, EmaSlot], now: float, rng: np.random.Generator) -> tuple[Plan, dict[int, EmaSlot]]:
        """Look up the length of the batch's range. Raises ValueError when the view does not have the draft."""
        del now, rng
        return same_for_all(view, self.draft, state[self._range(int(view.ready.sum()))].length), state

    def observe(self, outcome: Outcome, state: dict[int, EmaSlot], now: float) -> dict[int, EmaSlot]:
        """Move the average, and with it the length."""
        del now
        if not len(outcome.request):
            return state
        batch = self._range(len(outcome.request))
        slot = state[batch]
        accepted = slot.accepted
        if slot.length > 0:
            accepted += self.RATE * (float(outcome.accepted.mean()) - accepted)
        slot = EmaSlot(slot.length, accepted, slot.steps + 1)
        if slot.steps > self.WARM_UP_STEPS and (slot.steps - self.WARM_UP_STEPS) % self.EVERY_STEPS == 0:
            slot = self._moved(slot, self._candidates[batch])
        return {**state, batch: slot}

    def _range(self, batch: int) -> int:
        return int(self._batches[max(int(np.searchsorted(self._batches, batch, side="right")) - 1, 0)])

    def _moved(self, slot: EmaSlot, lengths: tuple[int, ...]) -> EmaSlot:
        at = lengths.index(slot.length)
        last = len(lengths) - 1
        if slot.length == 0:
            probe = lengths[min(1, last)]
            return replace(slot, length=probe, accepted=slot.accepted if slot.accepted >= 0 else max(probe - 1.0, 0.0))
        slack = 0.0 if lengths[0] == 0 else 0.25
        lower = at
        while lower > 0 and slot.accepted <= max(lengths[lower - 1] - 0.5, 0.5 if lengths[lower - 1] == 0 else -math.inf) - slack:
            lower -= 1
        if lower < at:
            return replace(slot, length=lengths[lower])
        while at < last and slot.accepted > lengths[at] - 0.5:
            at += 1
        return replace(slot, length=lengths[at])


@dataclass(frozen=True, slots=True, eq=False)
class SpinState:
    """``step`` of the epoch; ``assigned`` draft by request; per request and in all: (accepted tokens, seconds) float64[2, drafts]."""

    step: int = 0
    assigned: dict[int, int] = field(default_factory=dict)
    seen: dict[int, FloatArray] = field(default_factory=dict)
    workload: FloatArray = field(default_factory=lambda: np.zeros((2, 0)))


class SpinSelection(Policy):
    """SPIN's selection alone: explore then commit, in epochs, with a fixed length. SPIN's own epoch lengths are not public.

    An epoch begins with slots in which every request gets a random draft; for its rest a request keeps the draft by which most of its
    tokens were accepted per second of drafting and verifying, or the workload's best while it has tried fewer than two.
    """

    def __init__(
        self,
        drafts: tuple[str, ...],
        length: int,
        epoch_steps: int = 200,
        explore_slots: int = 4,
        slot_steps: int = 5,
        memory: float = 0.99,
    ) -> None:
        self.drafts, self.length = drafts, length
        self._epoch_steps, self._slot_steps, self._explore_steps = epoch_steps, slot_steps, explore_slots * slot_steps
        self._memory = memory

    def start(self) -> SpinState:
        """Return the state before the first epoch."""
        return SpinState(workload=np.zeros((2, len(self.drafts))))

    def plan(self, view: View, state: SpinState, now: float, rng: np.random.Generator) -> tuple[Plan, SpinState]:
        """Assign drafts where a slot or an epoch's second part begins, and to requests that are new."""
        del now
        exploring = state.step < self._explore_steps
        anew = state.step == self._explore_steps or (exploring and state.step % self._slot_steps == 0)
        assigned = {} if anew else dict(state.assigned)
        for request in view.request.tolist():
            if request not in assigned:
                assigned[request] = int(rng.integers(len(self.drafts))) if exploring else self._best(request, state)
        draft = np.array([assigned[r] for r in view.request.tolist()], np.int64)
        plan = Plan.within(view, draft, self.length)
        return plan, replace(state, step=(state.step + 1) % self._epoch_steps, assigned=assigned)

    def observe(self, outcome: Outcome, state: SpinState, now: float) -> SpinState:
        """Add accepted tokens and seconds to the request's and the workload's means."""
        del now
        seen, workload = dict(state.seen), state.workload * self._memory
        verify_s = outcome.parts_s.get("verify", outcome.measured_s)
        seconds = [verify_s + outcome.parts_s.get(f"draft:{name}", 0.0) for name in self.drafts]
        for request, draft, accepted in zip(outcome.request.tolist(), outcome.draft.tolist(), outcome.accepted.tolist(), strict=True):
            if draft != NO_DRAFT:
                evidence = np.zeros_like(workload)
                evidence[:, draft] = accepted, seconds[draft]
                seen[request] = seen.get(request, 0.0) + evidence
                workload += evidence
        assigned = dict(state.assigned)
        for request in outcome.finished.tolist():
            seen.pop(request, None)
            assigned.pop(request, None)
        return replace(state, assigned=assigned, seen=seen, workload=workload)

    def _best(self, request: int, state: SpinState) -> int:
        own = state.seen.get(request)
        accepted, seconds = state.workload if own is None or (own[1] > 0).sum() < 2 else own
        return int(np.argmax(np.divide(accepted, seconds, out=np.zeros_like(accepted), where=seconds > 0)))


@dataclass(frozen=True, slots=True, eq=False)
class BanditState:
    """``arm`` by request with the steps for which it holds yet; by request (tokens per second in all, steps) float64[2, arms]; the
    highest tokens per second seen.
    """

    arm: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: dict[int, FloatArray] = field(default_factory=dict)
    highest: float = 1e-9


class ThroughputBandit(Policy):
    """UCB1 (Auer et al. 2002) for every request by itself, on its tokens per second with each arm, a draft with a length.

    Rewards are scaled by the highest seen. The time of a step is everybody's, so that a reward tells of the load and of the others' arms
    as much as of the own one. An arm holds for a few steps, since changing the draft costs a catch-up.
    """

    def __init__(self, drafts: tuple[str, ...], lengths: Sequence[int], hold_steps: int = 5) -> None:
        self.arms = [(draft, length) for draft in range(len(drafts)) for length in lengths]
        self._hold_steps = hold_steps

    def start(self) -> BanditState:
        """Return the state before the first step."""
        return BanditState()

    def plan(self, view: View, state: BanditState, now: float, rng: np.random.Generator) -> tuple[Plan, BanditState]:
        """Give every request its arm, a new one where the last has held long enough."""
        del now
        arms = dict(state.arm)
        for request in view.request[view.ready].tolist():
            arm, left = arms.get(request, (0, 0))
            arms[request] = (arm, left - 1) if left else (self._best(request, state, rng), self._hold_steps - 1)
        drafts, lengths = np.array([self.arms[arms.get(r, (0, 0))[0]] for r in view.request.tolist()], np.int64).reshape(-1, 2).T
        return Plan.within(view, drafts, lengths), replace(state, arm=arms)

    def observe(self, outcome: Outcome, state: BanditState, now: float) -> BanditState:
        """Add each request's tokens per second to those of its arm, whatever length it had of it."""
        del now
        arms, seen, highest = dict(state.arm), dict(state.seen), state.highest
        for request, emitted in zip(outcome.request.tolist(), outcome.emitted.tolist(), strict=True):
            if request in arms and outcome.measured_s > 0:
                rewards = seen.get(request, np.zeros((2, len(self.arms)))).copy()
                rewards[:, arms[request][0]] += emitted / outcome.measured_s, 1.0
                seen[request], highest = rewards, max(highest, emitted / outcome.measured_s)
        for request in outcome.finished.tolist():
            arms.pop(request, None)
            seen.pop(request, None)
        return BanditState(arms, seen, highest)

    def _best(self, request: int, state: BanditState, rng: np.random.Generator) -> int:
        speed, steps = state.seen.get(request, np.zeros((2, len(self.arms))))
        untried = np.flatnonzero(steps == 0)
        if len(untried):
            return int(rng.choice(untried))
        return int(np.argmax(speed / steps / state.highest + np.sqrt(2 * math.log(steps.sum()) / steps)))
