"""A guard that measures instead of models: speculation ends where plain decoding is faster, and
comes back where it pays again.

By load, in buckets of the number of rows, steps by the *level* that is applied (the policy's own
plans at first) are compared with short experiments by an alternative. A sample is the logarithm of
a ratio of goodputs, with the same rows and without prefill; ``policy.paired`` decides when they
are enough. No level is final: at each the others are still tried, for a share of the time that is
small, and smaller where the policy's plans are clearly better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numpy.random import Generator as Rng

from .levels import (
    LEVELS,
    NO_LEVEL,
    NONE,
    PLANNED,
    Bucket,
    LevelStep,
    bucket_of,
    restore_buckets,
    rows_of,
    save_buckets,
)
from .plan import AnyPolicy, DraftNodes, IntArray, Outcome, Plan, State, View, copier
from .wrappers import Wrapper, WrapperState

_WARM_STEPS = 2  # of an experiment that drafts, before the counted ones
_COUNTED_STEPS, _COUNTED_ROWS = 2, 8  # of an experiment that drafts; rows, where tokens vary
_SETTLING_STEPS = 8  # after drafting: caches, padding and what is learnt of it make them dearer
_PLAIN_STEPS, _MOST_PLAIN_STEPS = 4, 24  # of an experiment without speculation: counted, all
_SEEN_STEPS = 8  # are taken up at once
_MOST_CREDIT_STEPS = 8.0
_HALF_LIFE_S = 3600.0  # of the evidence, while no server runs


class Block(NamedTuple):
    """An experiment: successive steps at another level. The first ones are not counted.

    One without speculation goes on through prompts and other numbers of rows, whose steps are not
    counted, and ends with its last counted step.
    """

    level: int
    rows: int
    steps: int
    """The most steps."""
    planned: int = 0

    @property
    def is_warm(self) -> bool:
        """Whether nothing of the step to come is due to the level before."""
        return self.planned > (_SETTLING_STEPS if self.level == NONE else _WARM_STEPS)


class PendingStep(NamedTuple):
    """A planned step from which nothing was learnt yet."""

    request: IntArray
    """[n] the column of the view, whose identity tells it from other steps'."""
    rows: int
    level: int
    trial: bool
    """Whether it belongs to an experiment."""
    counted: bool
    """Whether the step before was planned in the same way, with as many rows and no prompt; a plain
    step has the width of the last pass, too, and an experiment is warm.
    """
    last: bool
    """Whether it ends an experiment."""
    settles: int = NO_LEVEL
    """The level of the experiment that it follows so soon that it is part of what that cost."""


class Trial(NamedTuple):
    """The experiment's results until now."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    def more(self, tokens: int, seconds: float) -> Trial:
        """Return the results with another counted step."""
        return Trial(self.tokens + tokens, self.seconds + seconds, self.steps + 1)


_NO_TRIAL = Trial()


@dataclass(slots=True)
class Memory:
    """The guard's state from step to step."""

    buckets: dict[int, Bucket] = field(default_factory=dict)
    credit_s: float = 0.0
    """The time that experiments may still lose. The first one at a level needs none."""
    step: int = 0
    samples: int = 0
    """The pairs that were compared."""
    block: Block | None = None
    before: tuple[int, bool, int] | None = None
    """The level of the last planned step, whether it was an experiment's, and its rows; None: it
    had a prompt, or there was none.
    """
    settling: tuple[int, int] = (NO_LEVEL, 0)
    """The level of the last experiment, and the steps for which it may have made a change."""
    pending: tuple[PendingStep, ...] = ()
    """The last planned steps. One submission ahead: at most two."""
    trial: Trial = _NO_TRIAL
    pending_steps: tuple[LevelStep, ...] = ()
    """Steps of one bucket that it has not taken up yet."""


_copied = copier(Memory)


class GuardVerdict(NamedTuple):
    """The guard's finding for a range of rows."""

    rows: str
    level: str
    """One of ``policy.levels.LEVELS``."""
    ratio: float
    """Goodput of what the policy plans over that of plain decoding; nan: not measured."""


class Guard(Wrapper[State]):
    """A policy whose plans are applied where measured goodput says that they pay."""

    def start(self) -> WrapperState[State]:
        """Return the state before the first step."""
        return WrapperState(self.policy.start(), Memory())

    # -- before a step

    def plan(
        self, view: View, state: WrapperState[State], now: float, rng: Rng
    ) -> tuple[Plan, WrapperState[State]]:
        """Plan by the level of the view's number of rows, or by the experiment that is due."""
        memory, rows = _copied(state.outer), len(view)
        level = _level(memory, rows)
        memory.block = block = _block(memory, rows, view.prefill_tokens)
        if block is not None and block.planned == 1:
            memory.trial = _NO_TRIAL
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
        counted &= block is None or (block.is_warm and block.rows == rows)
        last = block is not None and block.planned == block.steps
        settles = self._settles(memory, applied if trial else NO_LEVEL, rows, view.prefill_tokens)
        step = PendingStep(view.request, rows, applied, trial, counted, last, settles)
        memory.before = None if view.prefill_tokens else (applied, trial, rows)
        memory.pending = (*memory.pending[-1:], step)
        return plan, WrapperState(inner, memory)

    @staticmethod
    def _settles(memory: Memory, tried: int, rows: int, prefill_tokens: int) -> int:
        """Return the level of the experiment that a step still suffers from, in place; ``tried`` is
        that of the one which it is part of.
        """
        level, steps = memory.settling
        if tried != NO_LEVEL:
            memory.settling = tried, _SETTLING_STEPS
            return NO_LEVEL
        if prefill_tokens or memory.before is None or memory.before[2] != rows:
            steps = 0
        memory.settling = level, max(steps - 1, 0)
        return level if steps else NO_LEVEL

    def needs_ceilings(self, request: IntArray, state: WrapperState[State]) -> bool:
        """Return the policy's answer for requests int64[n]; False where the next step is plain in
        any case.
        """
        memory, rows = state.outer, len(request)
        block = _block(memory, rows, 0)
        if block is None:
            is_plain = _level(memory, rows) == NONE
        else:  # the first step of one is not certain: a prompt may come
            is_plain = block.level == NONE and block.planned > 1
        return not is_plain and super().needs_ceilings(request, state)

    def trim(
        self, view: View, plan: Plan, drafted: DraftNodes, state: WrapperState[State]
    ) -> IntArray:
        """Return the policy's answer; a step that it did not plan is verified as planned."""
        level = plan.notes.get("experiment") or plan.notes.get("guard")
        return plan.length if level == "none" else super().trim(view, plan, drafted, state)

    # -- after a step

    def observe(
        self, outcome: Outcome, state: WrapperState[State], now: float
    ) -> WrapperState[State]:
        """Let the policy learn from a step, and compare it with others."""
        inner = self.policy.observe(outcome, state.inner, now)
        if not len(outcome.rows.request):
            return WrapperState(inner, state.outer)
        memory = _copied(state.outer)
        memory.step += 1
        for place, step in enumerate(memory.pending):
            if outcome.view is not None and step.request is outcome.view.request:
                memory.pending = memory.pending[place + 1 :]
                if step.rows:  # else prompts ended in it, and nothing decoded
                    self._learn(step, outcome, memory)
                break
        return WrapperState(inner, memory)

    def _learn(self, step: PendingStep, outcome: Outcome, memory: Memory) -> None:
        """Learn from a step that was planned here, in place."""
        place, rows, seconds = bucket_of(step.rows), step.rows, outcome.times.measured_s
        if (bucket := memory.buckets.get(place)) is None:
            bucket = Bucket()
            memory.buckets = {**memory.buckets, place: bucket}
        credit_s = memory.credit_s + bucket.share * seconds
        memory.credit_s = min(credit_s, _MOST_CREDIT_STEPS * seconds)
        tokens = sum(outcome.rows.emitted.tolist())
        is_clean = not outcome.prefill_tokens and tokens > 0 and seconds > 0
        if not step.trial or step.level == NONE:
            seconds = bucket.usual_s(rows, seconds)
        tried = step.level if step.trial else step.settles
        if tried == bucket.other_level and is_clean:
            bucket, lost_s = bucket.bill(rows, tokens, seconds, experiment=step.trial)
            memory.credit_s -= lost_s
            memory.buckets = {**memory.buckets, place: bucket}
        if step.trial:
            if step.counted and is_clean:
                memory.trial = memory.trial.more(tokens, seconds)
            is_enough = step.level == NONE and memory.trial.steps == _PLAIN_STEPS
            if step.last or is_enough:
                memory.block = None if is_enough else memory.block
                self._conclude(step, memory)
        elif step.level == bucket.level and tried == NO_LEVEL and step.counted and is_clean:
            proposes = bool(outcome.rows.length.any())
            if memory.pending_steps and bucket_of(memory.pending_steps[0].rows) != place:
                self._take_up(memory)
            memory.pending_steps = (
                *memory.pending_steps,
                LevelStep(rows, tokens, seconds, proposes),
            )
            if len(memory.pending_steps) >= _SEEN_STEPS:
                self._take_up(memory)

    def _take_up(self, memory: Memory) -> None:
        """Take up the steps that were seen, in place."""
        steps, memory.pending_steps = memory.pending_steps, ()
        if not steps:
            return
        place = bucket_of(steps[-1].rows)
        bucket = memory.buckets[place].with_steps(steps, memory.step)
        memory.buckets = {**memory.buckets, place: bucket}

    def _conclude(self, step: PendingStep, memory: Memory) -> None:
        """Compare an experiment, in place; its result is ignored where it is no pair."""
        trial, memory.trial = memory.trial, _NO_TRIAL
        self._take_up(memory)
        place = bucket_of(step.rows)
        bucket = memory.buckets[place]
        if trial.steps < _COUNTED_STEPS or step.level != bucket.other_level:
            return
        if (against := bucket.against(step.rows, memory.step)) is not None:
            memory.samples += 1
            bucket = bucket.add_pair(trial.tokens / trial.seconds, against)
            memory.buckets = {**memory.buckets, place: bucket}

    # -- shown, and kept

    def verdicts(self, state: WrapperState[State]) -> list[GuardVerdict]:
        """Return what was found, by rows in order."""
        buckets: dict[int, Bucket] = state.outer.buckets
        return [
            GuardVerdict(rows_of(place), LEVELS[bucket.level], bucket.ratio)
            for place, bucket in sorted(buckets.items())
        ]

    def save(self, state: WrapperState[State], now: float) -> dict[str, Any]:
        """Return what the policy keeps, and the levels with their evidence."""
        data = super().save(state, now)
        return {**data, "guard": save_buckets(state.outer.buckets)} if state.outer.buckets else data

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> WrapperState[State]:
        """Return the state of what was saved. Raises ValueError, naming field and value."""
        rest = {key: value for key, value in data.items() if key != "guard"}
        inner = self.policy.load(rest, now, idle_s) if rest else self.policy.start()
        if "guard" not in data:
            return WrapperState(inner, Memory())
        share = 0.5 ** (max(idle_s, 0.0) / _HALF_LIFE_S)
        return WrapperState(inner, Memory(restore_buckets(data["guard"], share)))


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
    """Return the experiment of the next step, if any. Another load ends one; a change of rows or a
    prompt ends one that drafts, and keeps any from beginning.
    """
    block = memory.block
    if not rows or (block is not None and block.planned == block.steps):
        return None
    place = bucket_of(rows)
    if block is not None and place == bucket_of(block.rows):
        is_same = block.rows == rows and not prefill_tokens
        if is_same or block.level == NONE:
            return block._replace(planned=block.planned + 1)
    bucket = memory.buckets.get(place)
    if prefill_tokens or bucket is None:
        return None
    if (against := bucket.against(rows, memory.step)) is None:
        return None
    if bucket.other_level == NONE:
        steps, most = _SETTLING_STEPS + _PLAIN_STEPS, _MOST_PLAIN_STEPS
    else:  # tokens vary: at few rows, more steps
        most = steps = _WARM_STEPS + max(_COUNTED_STEPS, -(-_COUNTED_ROWS // rows))
    cost_s = bucket.cost.share * steps * against.seconds / against.steps
    is_paid = memory.credit_s >= cost_s or not bucket.cost.spent
    return Block(bucket.other_level, rows, most, 1) if is_paid else None
