"""The result of one step, row by row, until it becomes the policy's ``Outcome`` and the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from backend.sequence import Proposal
from policy import (
    NO_DRAFT,
    FreeChains,
    IntArray,
    Outcome,
    StepNodes,
    StepRows,
    StepTimes,
)

_NONE = np.zeros(0, np.int64)


class LoggedRow(NamedTuple):
    """A row of ``policy.StepRows``."""

    request: int
    draft: int
    length: int
    accepted: int
    emitted: int
    scored: int
    verified: int
    followed: int
    evidence: int


class LoggedChain(NamedTuple):
    """A row of ``policy.FreeChains``."""

    request: int
    draft: int
    accepted: int
    scored: int
    evidence: int


class LoggedNode(NamedTuple):
    """A row of ``policy.StepNodes``."""

    row: int
    confidence: float
    sampled: bool
    accepted: bool
    depth: int


@dataclass(slots=True)
class StepLog:
    """A step in the making, until it becomes the policy's ``Outcome`` and metrics."""

    drafts: tuple[str, ...]
    batch_size: int = 0
    decoding: int = 0
    prefill_tokens: int = 0
    pass_tokens: int = 0
    """As ``policy.Outcome``."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """Wall times by part; ``planning``, and ``learning`` from the step before, are overhead."""
    rows: list[LoggedRow] = field(default_factory=list)
    free: list[LoggedChain] = field(default_factory=list)
    nodes: list[LoggedNode] = field(default_factory=list)
    control: list[bool] = field(default_factory=list)
    """By row, whether it belongs to the control arm of a canary."""
    finished: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=perf_counter)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to ``parts_s[name]``."""
        started = perf_counter()
        try:
            yield
        finally:
            self.parts_s[name] = self.parts_s.get(name, 0.0) + perf_counter() - started

    def record(
        self,
        request: int,
        drafted: Proposal | None,
        verified: int,
        emitted: Seq[int],
        *,
        sampled: bool,
        evidence: Seq[int] = (),
    ) -> None:
        """Note a decoding row: the tokens committed for it (``sampled`` or greedy), how many of its
        drafted nodes were verified, and the ``evidence`` that each draft showed before (none: no
        draft shows any).

        The tokens are also evidence of nodes that were not verified: of those on the emitted path,
        and of those whose parent was verified. Nothing is known after an end of the text.
        """
        if drafted is None:
            self.rows.append(LoggedRow(request, NO_DRAFT, 0, 0, len(emitted), 0, 0, 0, 0))
            return
        draft, depths = self.drafts.index(drafted.draft), drafted.depths
        length = max(depths, default=0)
        path = drafted.follow(emitted)
        scored, followed = min(len(emitted), length), sum([node < verified for node in path])
        counts = length, len(path), len(emitted), scored, verified, followed
        row = len(self.rows)
        self.rows.append(LoggedRow(request, draft, *counts, _evidence_of(evidence, draft)))
        accepted, unknown = set(path), set(path[-1:] if len(path) == len(emitted) else [])
        for node, parent in enumerate(drafted.parents):
            if parent in unknown:
                unknown.add(node)
            elif parent < verified:
                judged = drafted.confidence[node], sampled, node in accepted, depths[node] - 1
                self.nodes.append(LoggedNode(row, *judged))

    def record_free(
        self, request: int, proposal: Proposal, emitted: list[int], evidence: Seq[int] = ()
    ) -> None:
        """Note how an unused proposal would have fared against the tokens that were emitted
        instead; ``evidence`` as in ``record``.
        """
        accepted, scored = len(proposal.follow(emitted)), min(proposal.depth, len(emitted))
        draft = self.drafts.index(proposal.draft)
        self.free.append(
            LoggedChain(request, draft, accepted, scored, _evidence_of(evidence, draft))
        )

    def record_scored(self, request: int, chains: Iterable[tuple[str, int, int]]) -> None:
        """Note (draft, accepted, length) of chains that a draft would have made of tokens emitted
        without it. It is not known what it would have shown before them.
        """
        self.free += [
            LoggedChain(request, self.drafts.index(draft), accepted, length, 0)
            for draft, accepted, length in chains
        ]

    def outcome(self, since_s: float = 0.0) -> Outcome:
        """Return the step as the policy learns it; call it last, it closes the clock.

        A step that was submitted while another ran takes the time from the end of that one,
        ``since_s``. Work of the host while the target worked is hidden and takes none of it.
        """
        measured_s = perf_counter() - max(self.started_s, since_s)
        if since_s > self.started_s:
            self._hide(measured_s)
        engines_s = sum(
            seconds
            for part, seconds in self.parts_s.items()
            if part not in ("planning", "learning")
        )
        overhead_s = max(0.0, measured_s - engines_s)
        return Outcome(
            StepRows(*_columns(self.rows, len(LoggedRow._fields))),
            StepTimes(measured_s, {**self.parts_s, "overhead": overhead_s}),
            FreeChains(*_columns(self.free, len(LoggedChain._fields))),
            _nodes(self.nodes),
            prefill_tokens=self.prefill_tokens,
            pass_tokens=self.pass_tokens,
            finished=np.array(self.finished, np.int64) if self.finished else _NONE,
        )

    def _hide(self, left_s: float) -> None:
        """Cut the parts to the seconds that are left for them, the target's first."""
        for part in sorted(self.parts_s, key=lambda part: part != "verify"):
            self.parts_s[part] = min(self.parts_s[part], left_s)
            left_s -= self.parts_s[part]


def _evidence_of(evidence: Seq[int], draft: int) -> int:
    return evidence[draft] if evidence else 0


def _columns(rows: Seq[tuple[int, ...]], width: int) -> list[IntArray]:
    """Return the columns of rows of integers. (NumPy takes five times as long for named tuples.)"""
    return list(np.array([*zip(*rows, strict=True)], np.int64)) if rows else [_NONE] * width


def _nodes(nodes: list[LoggedNode]) -> StepNodes:
    if not nodes:
        return StepNodes()
    row, confidence, sampled, accepted, depth = zip(*nodes, strict=True)
    flags = np.array(sampled, np.bool_), np.array(accepted, np.bool_)
    claimed = np.array(row, np.int64), np.array(confidence, np.float64)
    return StepNodes(*claimed, *flags, np.array(depth, np.int64))
