"""The policy in another engine's loop: rows in and proposals out before a step, then what was
verified.

A host calls, for each of its steps, ``propose`` with the requests that it is about to decode, then
``ran`` with what the step verified and emitted, and ``ended`` with requests that are over. It draws
every token by its own rule: whatever is proposed, no text depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from backend.core.kv_ledger import KVLedger
from backend.engines.port import Engine
from backend.engines.registry import Service, make_engine
from backend.hosts.calibration import draft_table
from backend.hosts.settings import TARGET, HostConfig
from backend.ops.stats import Stats, StepStats
from backend.request import SamplingParams, tenant_id
from backend.sequence import Proposal, Sequence
from backend.speculation.cycle import Cycle, DecodeStep
from backend.speculation.drafting import Drafting
from backend.speculation.learned_state import LearnedState
from backend.speculation.policy_factory import compile_planner, make_policy
from policy import AnyPolicy, LatencyTable, NoSpeculation, Plan, SwitchedPolicy, Switches, View

logger = logging.getLogger(__name__)

_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


@dataclass(slots=True)
class HostRow:
    """A request that the host decodes in its next step."""

    key: Hashable
    """The host's name of it."""
    tokens: Seq[int]
    """Its prompt and all committed tokens; only new ones are read."""
    prompt_tokens: int
    remaining: int
    """Tokens that it may still emit, at least 1."""
    sampled: bool = False
    salt: str = ""
    """Names its tenant: remembered answers and learned estimates are kept apart by it."""
    most: int | None = None
    """A ceiling on the length of its proposals; None: none of its own."""
    control: bool = False
    """It takes a canary's fixed choice."""


@dataclass(slots=True)
class VerifiedRow:
    """The result of a step for a row."""

    key: Hashable
    proposed: Seq[int]
    """The first tokens of its proposal, those that the target verified."""
    tokens: Seq[int]
    """Its prompt and all committed tokens, those of the step included."""


class Host:
    """Plans and drafts for a host's requests, in the thread of the host's loop. Nothing is proposed
    before ``plan_by`` gets a latency table.
    """

    def __init__(
        self,
        config: HostConfig,
        stats: Stats,
        clock: Callable[[], float] = perf_counter,
        *,
        drafts: list[Engine] | None = None,
    ) -> None:
        """Load the drafts, unless they are given, and measure those that run a model. Raises
        ConfigError or CheckpointError for a draft that cannot be had.
        """
        serving = config.serving
        self.k_max = serving.policy.k_max
        self._serving, self._clock = serving, clock
        self._stats = StepStats(stats)
        compile_planner(logger.info, self._stats)
        if drafts is None:
            threads = _threads(serving.threads)
            service = Service(serving, threads, lambda e: Path(e.model), stats.count)
            drafts = [make_engine(engine, service) for engine in serving.drafts]
        self.drafts = drafts
        drafting = Drafting(self.drafts, self._stats, clock)
        self.cycle = Cycle(drafting, NoSpeculation(), self._stats, clock, serving.policy.seed)
        pools = {draft.name: draft.limits.kv_blocks for draft in self.drafts}
        self.ledger = KVLedger(pools, self.k_max + 1) if any(pools.values()) else None
        self._tables = {
            engine.name: draft_table(draft, serving.limits.max_active_requests)
            for engine, draft in zip(serving.drafts, self.drafts, strict=True)
            if engine.kind.measured
        }
        self._numbers = count(1)
        self.sequences: dict[Hashable, Sequence] = {}
        """The drafts' state of each request that is not over."""
        self._step: DecodeStep | None = None
        self.has_plans = False
        """There is a latency table to plan by."""
        self._switches = Switches()
        self._learned: LearnedState | None = None
        self._learned_key = config.learned_key
        self._in_control: set[Hashable] = set()

    @property
    def plan(self) -> Plan | None:
        """The plan of the step under way."""
        return None if self._step is None else self._step.plan

    def plan_by(self, target: LatencyTable, padded_tokens: int = 0) -> None:
        """Plan by this table of the host's passes from now on. A host that pads runs
        ``padded_tokens`` for every row if any row speculates (0: it does not); it gets whole
        proposals.
        """
        tables: Mapping[str, LatencyTable] = {**self._tables, TARGET: target}
        arguments = self._serving, self.drafts, tables, self._stats
        planner = make_policy(*arguments, padded_tokens=padded_tokens)
        policy: AnyPolicy = planner
        if self._learned_key:
            policy = SwitchedPolicy(planner, lambda: self._switches)
        self.cycle.trims = padded_tokens == 0
        self.cycle.runner.change(policy, policy.start())
        if self._learned_key:
            keep = self._serving.policy.keep_learned
            self._learned = LearnedState(
                policy, self.cycle.runner, self._stats, self._learned_key, keep=keep
            )
            self._learned.restore()
            self._learned.start()
        self.has_plans = True

    def switch(self, switches: Switches) -> None:
        """Plan as these switches say from the next step on (any thread)."""
        self._switches = switches
        self._stats.switches(switches)

    def show_learned(self) -> dict[str, Any]:
        """Return what was learned (any thread)."""
        return {} if self._learned is None else self._learned.show()

    # -- before a step

    def propose(
        self, rows: Seq[HostRow], *, prefill_tokens: int = 0, prefilling: int = 0
    ) -> dict[Hashable, Proposal]:
        """Return proposals by key: chains of 1 to ``k_max`` tokens, each with the name of its
        draft; none for a row that is better not speculated for.

        About ``prefill_tokens`` of ``prefilling`` prompts are expected in the step.
        """
        if not rows:
            self._step = None
            self.cycle.pause()
            return {}
        log = self.cycle.begin()
        sequences = [self._sequence(row) for row in rows]
        view = replace(
            self._view(rows, sequences),
            prefill_tokens=prefill_tokens,
            prefilling=prefilling,
        )
        plan = self.cycle.runner.plan(view, log)
        self._step = self.cycle.propose(sequences, view, plan, log)
        proposals = (
            (row.key, self._step.proposal_of(sequence.id))
            for row, sequence in zip(rows, sequences, strict=True)
        )
        return {key: proposal for key, proposal in proposals if proposal is not None}

    def _sequence(self, row: HostRow) -> Sequence:
        """Return what the drafts know of a row, brought up to its tokens."""
        sequence = self.sequences.get(row.key)
        if sequence is not None and len(row.tokens) < len(sequence.tokens):
            self._forget(row.key)  # the host restarted it
            sequence = None
        if sequence is None:
            sampling = _SAMPLED if row.sampled else _GREEDY
            tokens = list(row.tokens)
            sequence = Sequence(
                next(self._numbers), tokens, row.prompt_tokens, sampling, salt=row.salt
            )
            self.sequences[row.key] = sequence
            if row.control:
                self._in_control.add(row.key)
        elif len(row.tokens) > len(sequence.tokens):
            sequence.tokens += row.tokens[len(sequence.tokens) :]
        if self.ledger is not None:
            if sequence.blocks:
                self.ledger.grow(sequence)  # where it has no room, drafts cannot propose
            else:
                self.ledger.reserve(sequence, 0)
        return sequence

    def _view(self, rows: Seq[HostRow], sequences: list[Sequence]) -> View:
        numbers = [
            (s.id, len(s.tokens), row.remaining, self._most(row))
            for row, s in zip(rows, sequences, strict=True)
        ]
        request, context, remaining, most = np.array(numbers, np.int64).T
        is_plain = not self.cycle.runner.needs_ceilings(request)
        ceiling, unseen, evidence = self.cycle.drafting.ceilings(
            sequences, most.tolist(), is_plain=is_plain
        )
        names = self.cycle.drafting.names
        tenant = np.array([tenant_id(row.salt) for row in rows], np.int64)
        sampled = np.array([not s.sampling.greedy for s in sequences], np.bool_)
        control = np.array([row.control for row in rows], np.bool_) if self._in_control else None
        columns = request, context, remaining, ceiling, unseen
        return View(
            names, *columns, tenant=tenant, sampled=sampled, evidence=evidence, control=control
        )

    def _most(self, row: HostRow) -> int:
        """Return the longest proposal that a row may have."""
        most = min(self.k_max, row.remaining - 1)
        return most if row.most is None else min(most, row.most)

    # -- after it

    def ran(self, rows: Iterable[VerifiedRow], *, verify_s: float, prefill_tokens: int = 0) -> None:
        """Learn from the step that was proposed for: its rows, the seconds of the target's pass,
        and the prompts' tokens in it.

        Nothing is learnt from a step that verified something other than the proposals.
        """
        step, self._step = self._step, None
        if step is None:
            return
        log, mine = step.log, True
        for row in rows:
            sequence = self.sequences.get(row.key)
            if sequence is None or sequence.id not in step.proposals:
                continue
            emitted = [*row.tokens[len(sequence.tokens) :]]
            if not emitted:
                continue
            mine &= _is_start(row.proposed, step.proposal_of(sequence.id))
            control = row.key in self._in_control
            self.cycle.note_verified(step, sequence, len(row.proposed), emitted, control=control)
            sequence.tokens += emitted
        if not mine:
            self._stats.fallback("not_as_proposed")
        elif log.rows:
            log.parts_s["verify"] = verify_s
            log.prefill_tokens = prefill_tokens
            self.cycle.learn(step)
            self._stats.state(len(self.sequences), 0, {}, self.cycle.runner.drift())

    def end(self, keys: Iterable[Hashable]) -> None:
        """Forget requests that are over; drafts that remember answers take theirs. Unknown keys
        are ignored.
        """
        for key in keys:
            if (sequence := self.sequences.get(key)) is not None:
                self.cycle.drafting.end(sequence)
                self._forget(key)

    def _forget(self, key: Hashable) -> None:
        sequence = self.sequences.pop(key)
        self._in_control.discard(key)
        self.cycle.drafting.cancel([sequence.id])
        if self.ledger is not None:
            self.ledger.release(sequence)
        self.cycle.forget(sequence.id)

    def close(self) -> None:
        """Save what was learned, and release the drafts."""
        if self._learned is not None:
            self._learned.close()
        for draft in self.drafts:
            with suppress(Exception):
                draft.close()


def _is_start(tokens: Seq[int], proposal: Proposal | None) -> bool:
    """Return whether tokens are the first ones of a proposal (a host may cut it)."""
    return [*tokens] == ([] if proposal is None else proposal.tokens[: len(tokens)])


def _threads(setting: int | str) -> int:
    return setting if isinstance(setting, int) else 1
