"""Verification steps of a batch on the device, from the rows of a submission to what came of them.

A step runs in a bucket, whose sizes are those of the submission rounded up: two CUDA graphs, one in
which the heads propose and one that verifies. Buckets share those that do not depend on where they
differ. Per step one copy goes to the device and one comes back, and the host waits for nothing
before it collects the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.cuda.columns import to_device
from backend.engines.cuda.forward import KEY_SIZES, ROW_SIZES, TOKEN_SIZES
from backend.engines.cuda.graphs import capture
from backend.engines.cuda.heads import DeviceHead, HeadProposal
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.step import Slots, VerifyStep
from backend.engines.cuda.step_columns import MOST_HEADS, DeviceRow, StepColumns, Updates
from backend.engines.spine import CANDIDATES

logger = logging.getLogger(__name__)


COLUMN_SIZES = (0, 16, 32, 63)
"""Nodes of a row's proposal that a bucket has room for."""

MOST_PLACES = COLUMN_SIZES[-1] // CANDIDATES
"""The longest path that a head can propose."""


@dataclass(slots=True)
class RowResult:
    """The result of a step for a row."""

    emitted: list[int]
    """The tokens; the last one is no node. A -1 says that logits were no numbers."""
    verified: int
    """Nodes verified: the first of a head's, all of the host's."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the nodes that a head proposed and the row has room for, the likeliest first."""
    parents: list[int] = field(default_factory=list)
    """The parent of each of them, -1 for the text."""
    confidence: list[float] = field(default_factory=list)
    """The probability of each one's path."""


class Bucket(NamedTuple):
    """The sizes of a step. Verification depends on the first five, proposals not on ``tokens`` and
    ``keys``.
    """

    rows: int
    tokens: int
    columns: int
    keys: int
    is_bounded: bool
    heads: tuple[str, ...]
    depth: int


@dataclass(slots=True)
class Launched:
    """A step under way."""

    rows: list[DeviceRow]
    host: dict[str, npt.NDArray[Any]]
    events: list[Any]
    """CUDA events before the proposal, after it, and after the copy back; times without CUDA."""


class DeviceSteps:
    """Launches steps over ``slots`` sequences of ``blocks`` KV blocks at most, and collects them in
    their order. Two may be under way.

    A row has at most ``most`` - 1 nodes accepted. ``count(reason)`` is called when a graph cannot
    be captured.
    """

    step_type: type[VerifyStep] = VerifyStep
    proposal_type: type[HeadProposal] = HeadProposal

    def __init__(
        self,
        model: PagedModel,
        heads: dict[str, DeviceHead],
        *,
        slots: int,
        blocks: int,
        most: int,
        own: int,
        states: tuple[int, int] = (0, 0),
        count: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.heads, self._most, self._count = model, heads, most, count
        self._idle = slots  # the slot of rows that no sequence owns
        self.slots = Slots(
            slots + 1, blocks, model.device, states=states, own=own, dtype=model.dtype
        )
        self.slots.table[self._idle] = len(model.kv[0]) - 1
        self._captures = self._has_events = model.device.type == "cuda"
        self._columns: dict[tuple[int, int], StepColumns] = {}
        self._proposals: dict[tuple[Any, ...], Callable[[], object]] = {}
        self._verifications: dict[tuple[Any, ...], Callable[[], object]] = {}
        self._updates: Updates = ([], [])

    @property
    def graphs(self) -> int:
        """How many steps' halves have been captured, or run for want of CUDA."""
        return len(self._proposals) + len(self._verifications)

    def set_head(self, head: DeviceHead) -> None:
        """Run this head from now on, in the place of one of its name. Raises ValueError for more
        heads than there is room for.
        """
        if len({*self.heads, head.name}) > MOST_HEADS:
            raise ValueError(f"at most {MOST_HEADS} heads can propose, {head.name!r} is one more")
        self.heads[head.name] = head
        self._proposals = {
            key: run for key, run in self._proposals.items() if head.name not in key[3]
        }

    def place_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Write entries ``first`` and following of a slot's block table before the next step."""
        self._updates[0].extend((slot, first + at, block) for at, block in enumerate(blocks))

    def place_own(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Write tokens of a slot's text that heads may propose besides their static ones."""
        self._updates[1].extend((slot, first + at, token) for at, token in enumerate(tokens))

    def no_states(self) -> torch.Tensor:
        """Return zeros in the shape of a slot's states, for measuring."""
        return torch.zeros_like(self.slots.states[0])

    def place_states(self, slot: int, states: torch.Tensor) -> None:
        """Write what the target had at the place that a slot's last token was drawn from."""
        self.slots.states[slot] = states

    def clear(self, slot: int) -> None:
        """Forget the tokens of a slot's last text."""
        for updates in self._updates:
            updates[:] = [update for update in updates if update[0] != slot]
        self.slots.own[slot] = -1

    def launch(self, rows: Sequence[DeviceRow]) -> Launched:
        """Launch a step for these rows, at least one."""
        bucket = self._bucket(rows)
        columns = self._columns_of(bucket)
        propose, verify = self._proposal(bucket, columns), self._verification(bucket, columns)
        numbers = {name: number for number, name in enumerate(self.heads)}
        self._write_beyond(columns.most_updates)
        columns.fill(rows, numbers, self._updates, self._idle)
        self._updates = ([], [])
        events = [self.event()]
        columns.send()
        propose()
        events.append(self.event())
        verify()
        events.append(self.event())
        host = columns.fetch()
        return Launched([*rows], host, [*events, self.event()])

    def collect(self, launched: Launched) -> tuple[list[RowResult], dict[str, float]]:
        """Wait for a step; return what it did by row, and its seconds by part (``draft``,
        ``verify``).
        """
        self.wait(launched.events[-1])
        results = _results(launched.rows, launched.host)
        start, drafted, verified, _ = launched.events
        parts = {"draft": (start, drafted), "verify": (drafted, verified)}
        return results, {name: self.seconds(*pair) for name, pair in parts.items()}

    def event(self) -> Any:
        """Return a CUDA event of now in the stream; without CUDA the time."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, event: Any) -> None:
        """Wait until the device has reached an event."""
        if self._has_events:
            event.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events that have passed."""
        return float(start.elapsed_time(end) / 1e3 if self._has_events else end - start)

    def _write_beyond(self, most: int) -> None:
        """Write the updates that the columns of a step have no room for: the first ones."""
        for updates, target in zip(self._updates, (self.slots.table, self.slots.own), strict=True):
            if len(updates) > most:
                first = to_device(updates[:-most], torch.int64, self.model.device)
                target[first[:, 0], first[:, 1]] = first[:, 2].to(target.dtype)
                del updates[:-most]

    def _bucket(self, rows: Sequence[DeviceRow]) -> Bucket:
        """Return the smallest bucket that the rows fit. Raises ValueError where none does."""
        depth = max(row.places for row in rows)
        columns = max(depth * CANDIDATES, *(len(row.tokens) for row in rows))
        keys = max(row.length + (self._most + 1) * row.follows + row.room + 1 for row in rows)
        count = _size(ROW_SIZES, len(rows), "rows")
        budget = min(sum(row.budget for row in rows), TOKEN_SIZES[-1] - count)
        bounded = any(p.top_k or p.top_p < 1.0 or p.min_p for p in (r.sampling for r in rows))
        return Bucket(
            count,
            _size(TOKEN_SIZES, count + budget, "tokens") if budget else count,
            _size(COLUMN_SIZES, columns, "nodes of a row"),
            _size(KEY_SIZES, keys, "tokens of a row"),
            bounded,
            tuple(sorted({row.head for row in rows if row.head})),
            depth,
        )

    def _columns_of(self, bucket: Bucket) -> StepColumns:
        key = bucket.rows, bucket.columns
        if key not in self._columns:
            self._columns[key] = StepColumns(
                *key, most=self._most, slots=self.slots, idle_block=len(self.model.kv[0]) - 1
            )
        return self._columns[key]

    def _proposal(self, bucket: Bucket, columns: StepColumns) -> Callable[[], object]:
        """Return what brings the slots up to date and lets the bucket's heads propose."""
        key = bucket.rows, bucket.columns, bucket.is_bounded, bucket.heads, bucket.depth
        if key not in self._proposals:
            step, numbers = self._step(bucket._replace(tokens=bucket.rows), columns), [*self.heads]
            proposals = []
            for name in bucket.heads:
                proposal = self.proposal_type(self.heads[name], step, bucket.depth)
                proposal.length = columns.inputs.device["places"][numbers.index(name)]
                proposals.append(proposal)

            def run() -> None:
                columns.update_slots()
                for proposal in proposals:
                    proposal.run()

            self._proposals[key] = self._captured(run, columns, key)
        return self._proposals[key]

    def _verification(self, bucket: Bucket, columns: StepColumns) -> Callable[[], object]:
        """Return what verifies the likeliest nodes of a bucket."""
        key = bucket[:5]
        if key not in self._verifications:
            step = self._step(bucket, columns)
            self._verifications[key] = self._captured(step.run, columns, key)
        return self._verifications[key]

    def _step(self, bucket: Bucket, columns: StepColumns) -> VerifyStep:
        step = self.step_type(
            self.model,
            self.slots,
            bucket.rows,
            bucket.columns,
            tokens=bucket.tokens,
            most=self._most,
            keys=bucket.keys,
            bounded=bucket.is_bounded,
        )
        columns.share_with(step)
        return step

    def _captured(
        self, run: Callable[[], object], columns: StepColumns, size: object
    ) -> Callable[[], object]:
        """Return the replay of launches, captured on rows of the idle slot; the launches themselves
        where that fails, or without CUDA.
        """
        if not self._captures:
            return run
        if self._has_events:
            torch.cuda.synchronize(self.model.device)  # a step under way reads the same columns
        columns.fill([], {}, ([], []), self._idle)
        columns.send()
        try:
            return capture(self.model.device, run)[1]
        except (RuntimeError, NotImplementedError) as error:
            logger.warning("no CUDA graph for %s: %s", size, error)
            if self._count is not None:
                self._count("cuda_graph")
            return run


def _size(sizes: Sequence[int], value: int, what: str) -> int:
    """Return the smallest of the sizes that has room. Raises ValueError where none has."""
    found = next((size for size in sizes if size >= value), None)
    if found is None:
        raise ValueError(f"a step has at most {sizes[-1]} {what}, got {value}")
    return found


def _results(rows: Sequence[DeviceRow], host: dict[str, npt.NDArray[Any]]) -> list[RowResult]:
    """Return what came of the rows."""
    count = len(rows)
    emitted, verified = host["emitted"][:count].tolist(), host["chosen"][:count].sum(1).tolist()
    results = [
        RowResult(tokens[:written], nodes)
        for tokens, written, nodes in zip(
            emitted, host["count"][:count].tolist(), verified, strict=True
        )
    ]
    numbers = [number for number, row in enumerate(rows) if row.head]
    if not numbers:
        return results
    chance, parent = host["chance"][numbers], host["parent"][numbers]
    order = np.argsort(-chance, axis=1, kind="stable")
    rank = np.empty((len(numbers), chance.shape[1] + 1), np.int64)
    np.put_along_axis(rank, order, np.arange(chance.shape[1])[None], 1)
    rank[:, -1] = -1  # the text's
    order = order[:, : max(rows[number].room for number in numbers)]
    above = np.take_along_axis(rank, np.take_along_axis(parent, order, 1).astype(np.int64), 1)
    confidence = np.take_along_axis(chance, order, 1)
    nodes = np.minimum(np.count_nonzero(confidence, 1), [rows[number].room for number in numbers])
    columns = (np.take_along_axis(host["token"][numbers], order, 1), above, confidence)
    for number, most, *found in zip(
        numbers, nodes.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        result = results[number]
        result.tokens, result.parents, result.confidence = (own[:most] for own in found)
    return results
