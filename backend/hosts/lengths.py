"""The policy where a host's own drafter proposes: it plans, a step or two ahead, how many tokens
the drafter proposes for each request, down to none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from time import perf_counter

import numpy as np

from backend.engines.port import Engine
from backend.engines.proposer import InTarget
from backend.hosts.adapter import Host, HostRow, VerifiedRow
from backend.hosts.settings import HostConfig
from backend.ops.stats import Stats
from backend.sequence import Proposal
from backend.speculation.cycle import DecodeStep
from policy import LatencyTable


class Lengths(Host):
    """Plans the lengths of the host's next step while the host schedules the present one, since
    that one's pass ends with the drafter's. The host may schedule it before the one before is over.
    """

    def __init__(
        self, config: HostConfig, stats: Stats, clock: Callable[[], float] = perf_counter
    ) -> None:
        (drafter,) = config.serving.drafts
        drafts: list[Engine] = [
            InTarget(drafter.name, max_draft_tokens=config.serving.policy.k_max)
        ]
        super().__init__(config, stats, clock, drafts=drafts)
        self._name = drafter.name
        self._running: deque[DecodeStep | None] = deque()
        """The plans of steps that are scheduled and not over, oldest first; None: without one."""
        self._next: DecodeStep | None = None
        self._forward_s: tuple[list[float], list[float]] = [1.0], [0.0]

    def plan_by_passes(self, target: LatencyTable, forward_s: Mapping[int, float]) -> None:
        """Plan by the table of the host's passes, and the seconds that each token of a proposal
        takes its drafter, by the number of rows.
        """
        seconds = {rows: max(1e-7, forward_s[rows]) for rows in sorted(forward_s)} or {1: 1e-7}
        self._forward_s = [float(rows) for rows in seconds], list(seconds.values())
        self._tables[self._name] = LatencyTable.synthetic(self._name, seconds)
        self.plan_by(target)

    def plan_lengths(
        self, rows: Seq[HostRow], prefill_tokens: int, prefilling: int
    ) -> dict[Hashable, int]:
        """Plan the step after the one that the host starts now, whose plan begins to count. Return
        lengths above 0 by key.
        """
        self._running.append(self._next)
        self.propose(rows, prefill_tokens=prefill_tokens, prefilling=prefilling)
        self._next = self._step
        if self._next is None:
            return {}
        asks = (
            (row.key, self._next.proposals[self.sequences[row.key].id].on_device) for row in rows
        )
        return {key: ask.length for key, ask in asks if ask is not None}

    def catch_up(self, key: Hashable, tokens: Seq[int]) -> None:
        """Take a request's tokens up to the step that is over next, if they are new: it may have
        been planned before the step before was over.
        """
        sequence = self.sequences.get(key)
        if sequence is not None:
            sequence.tokens += tokens[len(sequence.tokens) :]

    def ran(self, rows: Iterable[VerifiedRow], *, verify_s: float, prefill_tokens: int = 0) -> None:
        """Learn from the oldest step that runs. Its seconds contain those of the drafter for the
        next one, which are taken from the table; its own drafter ran in the pass before.
        """
        self._step = self._running.popleft() if self._running else None
        rows = [*rows]
        if self._step is not None:
            self._take(self._step, rows)
            own_s = self._drafter_s(self._step)
            if own_s:
                self._step.log.parts_s[f"draft:{self._name}"] = own_s
        following = self._running[0] if self._running else self._next
        if following is not None:
            verify_s = max(0.0, verify_s - self._drafter_s(following))
        super().ran(rows, verify_s=verify_s, prefill_tokens=prefill_tokens)

    def _take(self, step: DecodeStep, rows: Seq[VerifiedRow]) -> None:
        """Note as the drafter's proposals what was verified of them."""
        for row in rows:
            sequence = self.sequences.get(row.key)
            if row.proposed and sequence is not None and sequence.id in step.proposals:
                proposal = Proposal.chain(self._name, row.proposed)
                step.take(sequence.id, proposal, len(row.proposed))

    def _drafter_s(self, step: DecodeStep) -> float:
        """Return about the seconds of the drafter: it drafts for all rows as much as for one."""
        rows = len(step.plan.length)
        longest = int(step.plan.length.max(initial=0))
        return float(longest * np.interp(rows, *self._forward_s))
