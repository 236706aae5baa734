"""What one step did, row by row, until it becomes the policy's ``Outcome`` and the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from backend.sequence import Proposal
from policy import NO_DRAFT, BoolArray, IntArray, Outcome

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class StepLog:
    """A step in the making. ``rows`` are (request, draft, length, accepted, emitted, scored,
    verified, followed) as in ``Outcome``, ``nodes`` (place in ``rows``, confidence, drawn, held);
    ``free`` (request, draft, accepted, scored) what a draft would have had accepted where it was
    not chosen; ``parts_s`` wall times by part (``planning`` and ``learning`` from the step before,
    belong to ``overhead``).
    """

    drafts: tuple[str, ...]
    batch_size: int = 0
    decoding: int = 0
    prefill_tokens: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    free: list[tuple[int, int, int, int]] = field(default_factory=list)
    nodes: list[tuple[int, float, bool, bool]] = field(default_factory=list)
    control: list[bool] = field(default_factory=list)
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
        drawn: bool,
    ) -> None:
        """Note a decoding row: the tokens committed for it (``drawn``: sampled), and of what was
        drafted for it how many nodes were verified.

        The tokens are evidence of nodes that were not verified, too: of the path, as far as it is
        known, and of each node whose parent was verified. (Of others only failures are ever seen.)
        Of what is behind an end of the text nothing is known.
        """
        if drafted is None:
            self.rows.append((request, NO_DRAFT, 0, 0, len(emitted), 0, 0, 0))
            return
        draft, path, length = (
            self.drafts.index(drafted.draft),
            drafted.followed(emitted),
            drafted.depth,
        )
        scored, followed = min(len(emitted), length), sum([node < verified for node in path])
        row = (request, draft, length, len(path), len(emitted), scored, verified, followed)
        self.rows.append(row)
        held, unknown = set(path), set(path[-1:] if len(path) == len(emitted) else [])
        for node, parent in enumerate(drafted.parents):
            if parent in unknown:
                unknown.add(node)
            elif parent < verified:
                self.nodes.append(
                    (len(self.rows) - 1, drafted.confidence[node], drawn, node in held)
                )

    def record_free(self, request: int, proposal: Proposal, emitted: list[int]) -> None:
        """Note how an unused proposal would have fared against the tokens that were emitted
        instead.
        """
        scored, accepted = min(proposal.depth, len(emitted)), len(proposal.followed(emitted))
        self.free.append((request, self.drafts.index(proposal.draft), accepted, scored))

    def record_scored(self, request: int, chains: Iterable[tuple[str, int, int]]) -> None:
        """Note (draft, accepted, length) of chains that a draft would have made of tokens emitted
        without it.
        """
        self.free += [
            (request, self.drafts.index(draft), accepted, length)
            for draft, accepted, length in chains
        ]

    def outcome(self) -> Outcome:
        """Return the step as the policy learns it; call it last, it closes the clock."""
        now_s = perf_counter()
        engines_s = sum(
            seconds
            for part, seconds in self.parts_s.items()
            if part not in ("planning", "learning")
        )
        request, draft, length, accepted, emitted, scored, verified, followed = _columns(
            self.rows, 8
        )
        free = _columns(self.free, 4)
        node_row, confidence, drawn, held = _node_columns(self.nodes)
        return Outcome(
            request=request,
            draft=draft,
            length=length,
            accepted=accepted,
            emitted=emitted,
            scored=scored,
            verified=verified,
            followed=followed,
            measured_s=now_s - self.started_s,
            parts_s={
                **self.parts_s,
                "overhead": max(0.0, now_s - self.started_s - engines_s),
            },
            prefill_tokens=self.prefill_tokens,
            free_request=free[0],
            free_draft=free[1],
            free_accepted=free[2],
            free_scored=free[3],
            finished=np.array(self.finished, np.int64) if self.finished else _NONE,
            node_row=node_row,
            node_confidence=confidence,
            node_drawn=drawn,
            node_held=held,
        )


def _columns(rows: Seq[tuple[int, ...]], width: int) -> Seq[IntArray]:
    """Return rows of so many numbers as columns."""
    return list(np.array(rows, np.int64).T) if rows else [_NONE] * width


def _node_columns(
    nodes: Seq[tuple[int, float, bool, bool]],
) -> tuple[IntArray, npt.NDArray[np.float64], BoolArray, BoolArray]:
    """Return ``StepLog.nodes`` as columns."""
    row, confidence, drawn, held = np.array(nodes).T if nodes else [_NONE] * 4
    return (
        row.astype(np.int64),
        confidence.astype(np.float64),
        drawn.astype(np.bool_),
        held.astype(np.bool_),
    )
