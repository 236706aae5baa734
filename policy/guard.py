"""A guard that measures instead of models: speculation ends where plain decoding is faster, and
comes back where it pays again.

By load, in buckets of the number of rows, steps by the *level* that is applied (the policy's own
plans at first) are compared with short experiments by the other one. A sample is the logarithm of a
ratio of goodputs, with the same rows and without prefill; ``policy.paired`` decides when they are
enough. No level is final: the other one is still tried, for a share of the time that is small, and
smaller where the policy's plans are clearly better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numpy.random import Generator as Rng

from .levels import (
    LEVELS,
    NONE,
    PLANNED,
    Bucket,
    Seen,
    bucket_of,
    restored,
    rows_of,
    saved,
)
from .plan import AnyPolicy, Drafted, IntArray, Outcome, Plan, State, View, copier
from .wrappers import Wrapped, Wrapper

_COUNTED_STEPS, _COUNTED_ROWS = 2, 8  # of an experiment; the rows count where tokens vary
_MOST_PLAIN_STEPS = 8  # of an experiment without speculation, until an engine that pads does not
_SEEN_STEPS = 8  # are taken up at once
_SETTLING_STEPS = 6  # after an experiment: engines that pad go back to their width in some steps
_START_STEPS = 1.0  # the credit for the first experiment at a level
_MOST_CREDIT_STEPS = 8.0
_HALF_LIFE_S = 3600.0  # of the evidence, while no server runs


class Block(NamedTuple):
    """An experiment: successive steps at another level; the first is not counted."""

    level: int
    rows: int
    steps: int
    """The most steps; one without speculation ends with its last counted one."""
    planned: int = 0


class PendingStep(NamedTuple):
    """A planned step from which nothing was learnt yet."""

    request: IntArray
    """The column of the view, whose identity tells it from other steps'."""
    rows: int
    level: int
    trial: bool
    """Whether it belongs to an experiment."""
    counted: bool
    """Whether the step before was planned in the same way, with as many rows and no prompt; a plain
    step has the width of the last pass, too.
    """
    last: bool
    """Whether it ends an experiment."""
    settles: bool = False
    """Whether it follows an experiment so soon that it is part of what that cost."""


class Trial(NamedTuple):
    """The experiment's results until now."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    proposed: int = 0


_NO_TRIAL = Trial()


@dataclass(slots=True)
class Memory:
    """The guard's state from step to step."""

    buckets: dict[int, Bucket] = field(default_factory=dict)
    credit_s: float = 0.0
    """The time that experiments may still lose."""
    step: int = 0
    samples: int = 0
    """The pairs that were compared."""
    block: Block | None = None
    before: tuple[int, bool, int] | None = None
    """The level of the last planned step, whether it was an experiment's, and its rows; None: it
    had a prompt, or there was none.
    """
    settling: int = 0
    """The steps for which the last experiment may still make a change."""
    pending: tuple[PendingStep, ...] = ()
    """The last planned steps. One submission ahead: at most two."""
    trial: Trial = _NO_TRIAL
    seen: tuple[Seen, ...] = ()
    """Steps of one bucket that it has not taken up yet."""


_copied = copier(Memory)


class Verdict(NamedTuple):
    """The guard's finding for a range of rows."""

    rows: str
    level: str
    """One of ``policy.levels.LEVELS``."""
    ratio: float
    """Goodput of what the policy plans over that of plain decoding; nan: not measured."""


class Guard(Wrapper[State]):
    """A policy whose plans are applied where measured goodput says that they pay."""

    def start(self) -> Wrapped[State]:
        """Return the state before the first step."""
        return Wrapped(self.policy.start(), Memory())

    # -- before a step

    def plan(
        self, view: View, state: Wrapped[State], now: float, rng: Rng
    ) -> tuple[Plan, Wrapped[State]]:
        """Plan by the level of the view's number of rows, or by the experiment that is due."""
        memory, rows = _copied(state.own), len(view)
        level = _level(memory, rows)
        memory.block = block = _block(memory, rows, view.prefill_tokens)
        applied, trial = (level, False) if block is None else (block.level, True)
        plan, inner = Plan.nothing(rows), state.inner
        if applied == PLANNED:
            plan, inner = self.policy.plan(view, inner, now, rng)
        if level != PLANNED or trial:
            notes: dict[str, Any] = {"guard": LEVELS[level]}
            if trial:
                notes["experiment"] = LEVELS[applied]
            plan = replace(plan, notes={**plan.notes, **notes})
        counted = memory.before == (applied, trial, rows)
        counted &= applied != NONE or view.pass_tokens in (0, rows)
        last = block is not None and block.planned == block.steps
        settles = self._settles(memory, trial, rows, view.prefill_tokens)
        step = PendingStep(view.request, rows, applied, trial, counted, last, settles)
        memory.before = None if view.prefill_tokens else (applied, trial, rows)
        memory.pending = (*memory.pending[-1:], step)
        return plan, Wrapped(inner, memory)

    @staticmethod
    def _settles(memory: Memory, trial: bool, rows: int, prefill_tokens: int) -> bool:
        """Return whether a step still suffers from an experiment, in place; ``trial``: it is part
        of one.
        """
        if trial:
            memory.settling = _SETTLING_STEPS
            return False
        is_other = prefill_tokens or memory.before is None or memory.before[2] != rows
        left = 0 if is_other else memory.settling
        memory.settling = max(left - 1, 0)
        return left > 0

    def needs_ceilings(self, request: IntArray, state: Wrapped[State]) -> bool:
        """Return the policy's answer; False where the next step is plain in any case."""
        memory, rows = state.own, len(request)
        block = _block(memory, rows, 0)
        if block is None:
            is_plain = _level(memory, rows) == NONE
        else:  # the first step of one is not certain: a prompt may come
            is_plain = block.level == NONE and block.planned > 1
        return not is_plain and super().needs_ceilings(request, state)

    def trim(self, view: View, plan: Plan, drafted: Drafted, state: Wrapped[State]) -> IntArray:
        """Return the policy's answer; a step that it did not plan is verified as planned."""
        level = plan.notes.get("experiment") or plan.notes.get("guard")
        return plan.length if level == "none" else super().trim(view, plan, drafted, state)

    # -- after a step

    def observe(self, outcome: Outcome, state: Wrapped[State], now: float) -> Wrapped[State]:
        """Let the policy learn from a step, and compare it with others."""
        inner = self.policy.observe(outcome, state.inner, now)
        if not len(outcome.rows.request):
            return Wrapped(inner, state.own)
        memory = _copied(state.own)
        memory.step += 1
        for place, step in enumerate(memory.pending):
            if outcome.view is not None and step.request is outcome.view.request:
                memory.pending = memory.pending[place + 1 :]
                self._learn(step, outcome, memory)
                break
        return Wrapped(inner, memory)

    def _learn(self, step: PendingStep, outcome: Outcome, memory: Memory) -> None:
        """Learn from a step that was planned here, in place."""
        place, rows, seconds = bucket_of(step.rows), step.rows, outcome.times.measured_s
        if (bucket := memory.buckets.get(place)) is None:
            bucket = Bucket()
            memory.buckets = {**memory.buckets, place: bucket}
            memory.credit_s += _START_STEPS * seconds
        credit_s = memory.credit_s + bucket.share * seconds
        memory.credit_s = min(credit_s, _MOST_CREDIT_STEPS * seconds)
        done = outcome.rows
        tokens, proposed = sum(done.emitted.tolist()), sum(done.length.tolist())
        is_clean = not outcome.prefill_tokens and tokens > 0 and seconds > 0
        if step.trial:
            memory.credit_s -= bucket.cost.share * seconds
        if not step.trial or step.level == NONE:
            seconds = bucket.usual_s(rows, seconds)
        if (step.trial or step.settles) and is_clean:
            bucket = bucket.billed(rows, tokens, seconds, experiment=step.trial)
            memory.buckets = {**memory.buckets, place: bucket}
        if step.trial:
            before = memory.trial if step.counted else _NO_TRIAL
            if step.counted and is_clean:
                before = Trial(
                    before.tokens + tokens,
                    before.seconds + seconds,
                    before.steps + 1,
                    before.proposed + proposed,
                )
            memory.trial = before
            is_enough = step.level == NONE and before.steps == _COUNTED_STEPS
            if step.last or is_enough:
                memory.block = None if is_enough else memory.block
                self._conclude(step, memory)
        elif step.level == bucket.level and not step.settles and step.counted and is_clean:
            if memory.seen and bucket_of(memory.seen[0].rows) != place:
                self._take_up(memory)
            memory.seen = (*memory.seen, Seen(rows, tokens, seconds, proposed > 0))
            if len(memory.seen) >= _SEEN_STEPS:
                self._take_up(memory)

    @staticmethod
    def _take_up(memory: Memory) -> None:
        """Take up the steps that were seen, in place."""
        if seen := memory.seen:
            place, memory.seen = bucket_of(seen[-1].rows), ()
            bucket = memory.buckets[place].with_steps(seen, memory.step)
            memory.buckets = {**memory.buckets, place: bucket}

    def _conclude(self, step: PendingStep, memory: Memory) -> None:
        """Compare an experiment, in place; its result is ignored where it is no pair."""
        trial, memory.trial = memory.trial, _NO_TRIAL
        self._take_up(memory)
        bucket = memory.buckets[bucket_of(step.rows)]
        if trial.steps < _COUNTED_STEPS or step.level == bucket.level:
            return
        place, against = bucket_of(step.rows), bucket.against(step.rows, memory.step)
        after = bucket.tried()
        if against is not None and (bucket.level != NONE or trial.proposed):
            memory.samples += 1
            after = bucket.sampled(trial.tokens / trial.seconds, against)
            if after.level != bucket.level:
                memory.settling = 0
                memory.credit_s += _START_STEPS * against.seconds / against.steps
        memory.buckets = {**memory.buckets, place: after}

    # -- shown, and kept

    def verdicts(self, state: Wrapped[State]) -> list[Verdict]:
        """Return what was found, by rows in order."""
        buckets: dict[int, Bucket] = state.own.buckets
        return [
            Verdict(rows_of(place), LEVELS[bucket.level], bucket.ratio)
            for place, bucket in sorted(buckets.items())
        ]

    def save(self, state: Wrapped[State], now: float) -> dict[str, Any]:
        """Return what the policy keeps, and the levels with their evidence."""
        data = super().save(state, now)
        return {**data, "guard": saved(state.own.buckets)} if state.own.buckets else data

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> Wrapped[State]:
        """Return the state of what was saved. Raises ValueError, naming field and value."""
        rest = {key: value for key, value in data.items() if key != "guard"}
        inner = self.policy.load(rest, now, idle_s) if rest else self.policy.start()
        if "guard" not in data:
            return Wrapped(inner, Memory())
        share = 0.5 ** (max(idle_s, 0.0) / _HALF_LIFE_S)
        return Wrapped(inner, Memory(restored(data["guard"], share)))


def guard_in(policy: AnyPolicy) -> tuple[Guard[Any], int] | None:
    """Return the guard around or within a policy, and how many wrappers are around it."""
    depth = 0
    while isinstance(policy, Wrapper):
        if isinstance(policy, Guard):
            return policy, depth
        policy, depth = policy.policy, depth + 1
    return None


def _level(memory: Memory, rows: int) -> int:
    """Return the level that is applied to a number of rows."""
    bucket = memory.buckets.get(bucket_of(rows)) if rows else None
    return PLANNED if bucket is None else bucket.level


def _block(memory: Memory, rows: int, prefill_tokens: int) -> Block | None:
    """Return the experiment of the next step, if any. A change of rows or a prompt ends one."""
    block = memory.block
    ended = block is not None and block.planned == block.steps
    if prefill_tokens or not rows or ended:
        return None
    if block is not None and block.rows == rows:
        return block._replace(planned=block.planned + 1)
    bucket = memory.buckets.get(bucket_of(rows))
    against = bucket and bucket.against(rows, memory.step)
    if bucket is None or against is None:
        return None
    level, steps = 1 - bucket.level, 1 + _COUNTED_STEPS
    if level == NONE:
        most = _MOST_PLAIN_STEPS
    else:  # tokens vary: at few rows, more steps
        most = steps = max(steps, 1 + -(-_COUNTED_ROWS // rows))
    cost_s = bucket.cost.share * steps * against.seconds / against.steps
    return Block(level, rows, most, 1) if memory.credit_s >= cost_s else None
