"""Policies that the adaptive planner is compared with, and the random one that tests exactness.

Those of others are rebuilt from what is published. Where a choice had to be made it helps the
baseline: evidence that is not biased by short chains, a draft that catches up instead of being lost
for good, times from this project's tables. A view without a policy's draft raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from .latency import LatencyCurve, LatencyModel
from .plan import NO_DRAFT, AnyPolicy, FloatArray, IntArray, Outcome, Plan, Policy, View


class NoSpeculation(Policy[None]):
    """Plain decoding: k = 0 for everyone."""

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        return Plan.nothing(len(view)), None

    def needs_ceilings(self, request: IntArray, state: None) -> bool:
        return False


class FixedLength(Policy[None]):
    """One draft and one length for everyone, as far as each request's ceiling allows."""

    def __init__(self, draft: str, length: int) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self.draft, self.length = draft, length

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        return same_for_all(view, self.draft, self.length), None


class BatchSchedule(Policy[None]):
    """One draft, k by the requests that decode: TensorRT-LLM's ``draft_len_schedule``.

    ``lengths`` maps the largest batch of each range to its k; a larger one does not speculate.
    """

    def __init__(self, draft: str, lengths: Mapping[int, int]) -> None:
        if not lengths or min(lengths) < 1 or min(lengths.values()) < 0:
            raise ValueError(f"lengths must map sizes >= 1 to lengths >= 0, got {dict(lengths)}")
        self.draft, self.lengths = draft, dict(sorted(lengths.items()))

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        fitting = (k for largest, k in self.lengths.items() if len(view) <= largest)
        return same_for_all(view, self.draft, next(fitting, 0)), None


class RandomChoice(Policy[None]):
    """Any draft and any length, drawn again in every step: no text may depend on it."""

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        if not view.drafts or not len(view):
            return Plan.nothing(len(view)), None
        draft = rng.integers(0, len(view.drafts), len(view))
        ceiling = view.ceiling[np.arange(len(view)), draft]
        return Plan.within(view, draft, rng.integers(0, ceiling + 1)), None


def same_for_all(view: View, draft: str, length: int) -> Plan:
    """Return the plan of one choice. Raises ValueError when the view does not have the draft."""
    if draft not in view.drafts:
        raise ValueError(f"draft must be one of {view.drafts}, got {draft!r}")
    return Plan.within(view, view.drafts.index(draft), length)


_FIT_TOKENS = 512
_UPDATE_STEPS, _WINDOW_STEPS = 20, 100
_FIRST_WINDOW = ((7, 3),)
_LEAST_ALPHA, _MOST_ALPHA = 0.01, 0.99
_PLAIN_BONUS = 1.1  # of k = 0


def expected_tokens(alpha: float, length: int) -> float:
    """Return the tokens of a step of k proposals, each accepted with probability alpha < 1."""
    return float((1 - alpha ** (length + 1)) / (1 - alpha))


class SmartSpecState(NamedTuple):
    """k, since how many steps, and (accepted, rejected) of the last steps that speculated."""

    length: int = 0
    age: int = _UPDATE_STEPS
    window: tuple[tuple[int, int], ...] = ()


class SmartSpec(Policy[SmartSpecState]):
    """SmartSpec as its published code decides: one draft, one acceptance rate alpha, one length k.

    Every 20 steps k = 0, 1, ... are scored by goodput V/T, and the scan stops at the first that is
    no better; k = 0 counts for a tenth more. T is linear in tokens, rows and context. alpha is the
    rate over the last 100 steps that speculated, at first 0.7, here by the unbiased estimate
    accepted / (accepted + rejections). Prefill in the step is not modelled, as there.
    """

    def __init__(
        self, drafts: tuple[str, ...], draft: str, latency: LatencyModel, k_max: int = 8
    ) -> None:
        """Raise ValueError for an unknown draft."""
        if draft not in drafts:
            raise ValueError(f"draft must be one of {drafts}, got {draft!r}")
        self.draft, self._k_max = draft, k_max
        self._target = _line(latency.target)
        self._draft = _line(latency.drafts[drafts.index(draft)])
        self._overhead_s, self._speculation_s = latency.overhead_s, latency.speculation_s

    def start(self) -> SmartSpecState:
        return SmartSpecState()

    def plan(
        self, view: View, state: SmartSpecState, now: float, rng: Rng
    ) -> tuple[Plan, SmartSpecState]:
        if state.age >= _UPDATE_STEPS and len(view):
            rows, context = len(view), int(view.context.sum())
            accepted, rejected = map(sum, zip(*(state.window or _FIRST_WINDOW), strict=True))
            alpha = min(max(accepted / max(accepted + rejected, 1), _LEAST_ALPHA), _MOST_ALPHA)
            state = state._replace(length=self._best(rows, context, alpha), age=0)
        return same_for_all(view, self.draft, state.length), state._replace(age=state.age + 1)

    def observe(self, outcome: Outcome, state: SmartSpecState, now: float) -> SmartSpecState:
        rows = outcome.rows
        used = rows.scored > 0
        if not used.any():
            return state
        accepted = np.minimum(rows.accepted, rows.scored)[used]
        step = (int(accepted.sum()), int((accepted < rows.scored[used]).sum()))
        return state._replace(window=(*state.window[-(_WINDOW_STEPS - 1) :], step))

    def _best(self, rows: int, context: int, alpha: float) -> int:
        """Return the k before the first that is no better than the one before it."""
        best, best_goodput = 0, 0.0
        for k in range(self._k_max + 1):
            seconds = self._target.seconds(rows * (k + 1), rows, context) + self._overhead_s
            if k:
                seconds += k * self._draft.seconds(rows, rows, context) + self._speculation_s
            bonus = 1.0 if k else _PLAIN_BONUS
            goodput = rows * expected_tokens(alpha, k) / seconds * bonus
            if goodput <= best_goodput:
                break
            best, best_goodput = k, goodput
        return best


def _line(curve: LatencyCurve) -> LatencyCurve:
    """Return a straight line for a curve, as a regression over profiled steps would find it."""
    tokens = np.arange(1, _FIT_TOKENS + 1)
    slope_s, fixed_s = np.maximum(np.polyfit(tokens, curve.base(tokens), 1), 0.0)
    return LatencyCurve(np.array([fixed_s]), float(slope_s), curve.row_s, curve.context_s)


_CANDIDATES = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""Lengths by the smallest batch of each range, as there."""
_RATE, _EVERY_STEPS, _WARM_UP_STEPS = 0.2, 5, 10


class EmaState(NamedTuple):
    """One batch range's length, the average of accepted tokens, and the steps it has seen."""

    length: int
    accepted: float
    steps: int = 0


EmaStates = dict[int, EmaState]
"""By the smallest batch of each range."""


class AcceptanceEma(Policy[EmaStates]):
    """Acceptance EMA: a moving average of accepted tokens moves the length (SGLang).

    A range of batches has a few candidates. The average moves with each step's mean by 0.2; every 5
    steps after 10, the length falls to the next candidate c below while the average is at most c -
    0.5 - 0.25 (0.5 above c = 0, and no 0.25 for ranges that may switch off), or rises while it is
    over the present length - 0.5. After an interval of 0 it probes the next one.
    """

    def __init__(self, draft: str) -> None:
        self.draft = draft

    def start(self) -> EmaStates:
        """Return a state for each batch range, in the middle of its candidates."""
        middle = {batch: lengths[len(lengths) // 2] for batch, lengths in _CANDIDATES.items()}
        return {batch: EmaState(length, length - 1.0) for batch, length in middle.items()}

    def plan(self, view: View, state: EmaStates, now: float, rng: Rng) -> tuple[Plan, EmaStates]:
        length = state[_range(len(view))].length
        return same_for_all(view, self.draft, length), state

    def observe(self, outcome: Outcome, state: EmaStates, now: float) -> EmaStates:
        if not len(outcome.rows):
            return state
        batch = _range(len(outcome.rows))
        length, accepted, steps = state[batch]
        if length > 0:
            accepted += _RATE * (float(outcome.rows.accepted.mean()) - accepted)
        after, since = EmaState(length, accepted, steps + 1), steps + 1 - _WARM_UP_STEPS
        if since > 0 and since % _EVERY_STEPS == 0:
            after = _moved(after, _CANDIDATES[batch])
        return {**state, batch: after}


def _range(batch: int) -> int:
    """Return the smallest batch of the range that a batch is in."""
    return max((smallest for smallest in _CANDIDATES if smallest <= batch), default=1)


def _moved(state: EmaState, lengths: Sequence[int]) -> EmaState:
    """Return the state at the candidate that its average asks for."""
    at, last = lengths.index(state.length), len(lengths) - 1
    if state.length == 0:
        probe = lengths[min(1, last)]
        accepted = state.accepted if state.accepted >= 0 else max(probe - 1.0, 0.0)
        return state._replace(length=probe, accepted=accepted)
    slack = 0.0 if lengths[0] == 0 else 0.25
    lower = at
    while lower > 0 and state.accepted <= max(lengths[lower - 1], 1) - 0.5 - slack:
        lower -= 1
    while lower == at < last and state.accepted > lengths[at] - 0.5:
        at = lower = at + 1
    return state._replace(length=lengths[lower])


_EPOCH_STEPS, _EXPLORE_STEPS, _SLOT_STEPS = 200, 20, 5
_MEMORY = 0.99  # of the workload, in a step


class SpinState(NamedTuple):
    """``step`` of the epoch, and the draft ``assigned`` to each request.

    ``seen`` by request and of the whole ``workload`` are accepted tokens and seconds by draft,
    float64[2, drafts].
    """

    step: int
    assigned: dict[int, int]
    seen: dict[int, FloatArray]
    workload: FloatArray

    def best(self, request: int) -> int:
        """Return a request's draft of most tokens a second; the workload's until it tried two."""
        own = self.seen.get(request)
        accepted, seconds = self.workload if own is None or (own[1] > 0).sum() < 2 else own
        rate = np.divide(accepted, seconds, out=np.zeros_like(accepted), where=seconds > 0)
        return int(np.argmax(rate))


class SpinSelection(Policy[SpinState]):
    """SPIN's selection alone: explore then commit, in epochs, with a fixed length.

    An epoch of 200 steps begins with 4 slots of 5 in which every request gets a random draft; for
    its rest a request keeps the draft by which most of its tokens were accepted per second of
    drafting and verifying. How long SPIN's own epochs are is not public.
    """

    def __init__(self, drafts: tuple[str, ...], length: int) -> None:
        self.drafts, self.length = drafts, length

    def start(self) -> SpinState:
        return SpinState(0, {}, {}, np.zeros((2, len(self.drafts))))

    def plan(self, view: View, state: SpinState, now: float, rng: Rng) -> tuple[Plan, SpinState]:
        """Assign drafts where a slot or an epoch's second part begins, and to newcomers."""
        exploring = state.step < _EXPLORE_STEPS
        restarts = state.step == _EXPLORE_STEPS or (exploring and state.step % _SLOT_STEPS == 0)
        assigned = {} if restarts else dict(state.assigned)
        requests = view.request.tolist()
        for request in requests:
            if request not in assigned:
                drawn = int(rng.integers(len(self.drafts))) if exploring else state.best(request)
                assigned[request] = drawn
        draft = np.array([assigned[request] for request in requests], np.int64)
        after = state._replace(step=(state.step + 1) % _EPOCH_STEPS, assigned=assigned)
        return Plan.within(view, draft, self.length), after

    def observe(self, outcome: Outcome, state: SpinState, now: float) -> SpinState:
        gone = set(outcome.finished.tolist())
        assigned = {request: d for request, d in state.assigned.items() if request not in gone}
        seen, workload = dict(state.seen), _MEMORY * state.workload
        rows, parts_s = outcome.rows, outcome.times.parts_s
        verify_s = parts_s.get("verify", outcome.times.measured_s)
        seconds = [verify_s + parts_s.get(f"draft:{name}", 0.0) for name in self.drafts]
        columns = rows.request.tolist(), rows.draft.tolist(), rows.accepted.tolist()
        for request, draft, accepted in zip(*columns, strict=True):
            if draft != NO_DRAFT:
                evidence = np.zeros_like(workload)
                evidence[:, draft] = accepted, seconds[draft]
                seen[request] = seen.get(request, 0.0) + evidence
                workload += evidence
        seen = {request: sums for request, sums in seen.items() if request not in gone}
        return SpinState(state.step, assigned, seen, workload)


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """What a baseline is made from."""

    drafts: tuple[str, ...]
    latency: LatencyModel
    k_max: int = 8
    draft: str = ""
    length: int = 0
    schedule: Mapping[int, int] = field(default_factory=dict)  # length by the largest batch


@dataclass(frozen=True, slots=True)
class Baseline:
    """A policy to compare the planner with: what server, simulator and benches know of it."""

    make: Callable[[BaselineSettings], AnyPolicy]
    label: str  # in tables
    needs: tuple[str, ...] = ()  # the fields of BaselineSettings that must be set
    compared: bool = True  # whether comparisons run it unless they are asked not to
    colour: str = "#6f5a3a"  # in plots
    marker: str = "X"  # in plots, as matplotlib names it


BASELINES: dict[str, Baseline] = {
    "none": Baseline(
        lambda s: NoSpeculation(), "no speculation", compared=False, colour="#555555", marker="s"
    ),
    "fixed": Baseline(
        lambda s: FixedLength(s.draft, s.length),
        "fixed choice",
        needs=("draft", "length"),
        compared=False,
        colour="#b9b9b9",
        marker=".",
    ),
    "schedule": Baseline(
        lambda s: BatchSchedule(s.draft, s.schedule),
        "table by batch size",
        needs=("draft", "schedule"),
        colour="#b58900",
        marker="v",
    ),
    "ema": Baseline(
        lambda s: AcceptanceEma(s.draft),
        "acceptance EMA",
        needs=("draft",),
        colour="#2a8a57",
        marker="^",
    ),
    "smartspec": Baseline(
        lambda s: SmartSpec(s.drafts, s.draft, s.latency, s.k_max),
        "SmartSpec",
        needs=("draft",),
        colour="#2f6fb2",
        marker="D",
    ),
    "spin": Baseline(
        lambda s: SpinSelection(s.drafts, s.length),
        "SPIN's selection",
        needs=("length",),
        colour="#8a4fb0",
        marker="P",
    ),
    "random": Baseline(lambda s: RandomChoice(), "random choice", compared=False),
}
"""Every baseline by the name that settings, the simulator and the benches give it; another one is
an entry here.
"""


def compared() -> dict[str, Baseline]:
    """Return the baselines that comparisons run."""
    return {name: baseline for name, baseline in BASELINES.items() if baseline.compared}
