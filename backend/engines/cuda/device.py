"""Verification steps of a batch on the device, from the rows of a submission to what came of them.

A step runs in a bucket, whose sizes are those of the submission rounded up: two CUDA graphs, one in
which the heads propose and one that verifies. Per step one copy goes to the device and one comes
back, and the host waits for nothing before it collects the step.
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

from backend.engines.cuda.columns import Columns
from backend.engines.cuda.forward import KEY_SIZES, ROW_SIZES, TOKEN_SIZES
from backend.engines.cuda.graphs import capture
from backend.engines.cuda.heads import DeviceHead, HeadProposal
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.step import Slots, VerifyStep
from backend.engines.spine import CANDIDATES
from backend.request import SamplingParams

logger = logging.getLogger(__name__)


COLUMN_SIZES = (0, 4, 8, 16, 32, 63)
"""Nodes of a row's proposal that a bucket has room for."""

MOST_PLACES = COLUMN_SIZES[-1] // CANDIDATES
"""The longest path that a head can propose."""

_UPDATES = 256
"""Entries of block tables and of texts' own tokens that one step can bring along."""


@dataclass(slots=True)
class DeviceRow:
    """One sequence's share of a step."""

    slot: int
    """Of ``Slots``."""
    length: int
    """Tokens with KV, all but the last; at least these where ``follows``."""
    last: int
    """The last token; unread where ``follows``."""
    follows: bool
    """Whether it goes on from whatever the step before leaves in its slot."""
    sampling: SamplingParams
    seed: int
    """The mixed seed (``sampling.randomness``)."""
    head: str = ""
    """The head that proposes; empty: the host did, or nothing is proposed."""
    places: int = 0
    """The length of the head's longest path, in tokens."""
    budget: int = 0
    """What this row adds to the nodes that the batch verifies."""
    room: int = 0
    """The nodes that its blocks have room for."""
    tokens: Sequence[int] = ()
    """Tokens of the host's proposal, whose parents are ``parents``."""
    parents: Sequence[int] = ()


@dataclass(slots=True)
class RowResult:
    """What a step did for a row."""

    emitted: list[int]
    """The tokens; the last one is no node. A -1 says that logits were no numbers."""
    verified: int
    """Nodes verified: the first of a head's, all of the host's."""
    tokens: list[int] = field(default_factory=list)
    """Of the nodes that a head proposed and the row has room for, the likeliest first."""
    parents: list[int] = field(default_factory=list)
    """Of each of them, -1 for the text."""
    confidence: list[float] = field(default_factory=list)
    """Of each of them: the probability of its path."""


class Bucket(NamedTuple):
    """The sizes of a step, for which graphs are captured."""

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
        self._steps: dict[Bucket, _BucketStep] = {}
        self._updates: list[tuple[int, int, int, int]] = []

    def set_head(self, head: DeviceHead) -> None:
        """Run this head from now on, in the place of one of its name."""
        self.heads[head.name] = head
        self._steps = {
            bucket: step for bucket, step in self._steps.items() if head.name not in bucket.heads
        }

    def place_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Write entries ``first`` and following of a slot's block table before the next step."""
        self._place(0, self.slots.table, slot, first, blocks)

    def place_own(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Write tokens of a slot's text that heads may propose besides their static ones."""
        self._place(1, self.slots.own, slot, first, tokens)

    def place_states(self, slot: int, states: npt.NDArray[np.float32]) -> None:
        """Write what the target had at the place that a slot's last token was drawn from."""
        self.slots.states[slot] = torch.from_numpy(states).to(self.slots.states)

    def clear(self, slot: int) -> None:
        """Forget the tokens of a slot's last text."""
        self._updates = [update for update in self._updates if update[1] != slot]
        self.slots.own[slot] = -1

    def launch(self, rows: Sequence[DeviceRow]) -> Launched:
        """Launch a step for these rows, at least one."""
        step = self._step(self._bucket(rows))
        step.fill(rows, self._updates, self._idle)
        self._updates = []
        return step.launch(list(rows))

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
        """Wait until the device has come to an event."""
        if self._has_events:
            event.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events that have passed."""
        return float(start.elapsed_time(end) / 1e3 if self._has_events else end - start)

    def _place(
        self, which: int, column: torch.Tensor, slot: int, first: int, values: Sequence[int]
    ) -> None:
        if len(values) + len(self._updates) > _UPDATES:
            ours = torch.tensor(list(values), dtype=column.dtype)
            column[slot, first : first + len(values)] = ours.to(column.device)
            return
        self._updates += [(which, slot, first + at, value) for at, value in enumerate(values)]

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

    def _step(self, bucket: Bucket) -> _BucketStep:
        step = self._steps.get(bucket)
        if step is None:
            step = self._steps[bucket] = _BucketStep(self, bucket, self._most)
            if self._captures:
                step.fill([], [], self._idle)
                self._capture(step)
        return step

    def _capture(self, step: _BucketStep) -> None:
        try:
            step.capture()
        except (RuntimeError, NotImplementedError) as error:
            logger.warning("no CUDA graph for %s: %s", step.bucket, error)
            if self._count is not None:
                self._count("cuda_graph")


class _BucketStep:
    """The step of one bucket: its columns, its heads and its two graphs."""

    def __init__(self, steps: DeviceSteps, bucket: Bucket, most: int) -> None:
        model, device = steps.model, steps.model.device
        rows, columns = (bucket.rows,), (bucket.rows, bucket.columns)
        self.bucket, self._slots = bucket, steps.slots
        self._steps = steps
        self._idle_block, self._device = len(model.kv[0]) - 1, device
        self._names = {name: number for number, name in enumerate(bucket.heads)}
        long, short, real = np.int64, np.int32, np.float32
        self._inputs = Columns(
            {
                "slot": (long, rows),
                "length": (long, rows),
                "last": (long, rows),
                "seed": (long, rows),
                "token": (long, columns),
                "follows": (short, rows),
                "top_k": (short, rows),
                "room": (short, rows),
                "parent": (short, columns),
                "temperature": (real, rows),
                "top_p": (real, rows),
                "min_p": (real, rows),
                "chance": (real, columns),
                "places": (short, (len(self._names), bucket.rows)),
                "updates": (long, (2, 3, _UPDATES)),
            },
            device,
            copies=2,
        )
        self._outputs = Columns(
            {
                "emitted": (long, (bucket.rows, most)),
                "count": (long, rows),
                "token": (long, columns),
                "parent": (short, columns),
                "chosen": (short, columns),
                "chance": (real, columns),
            },
            device,
            copies=2,
        )
        self._step = step = steps.step_type(
            model,
            steps.slots,
            bucket.rows,
            bucket.columns,
            tokens=bucket.tokens,
            most=most,
            keys=bucket.keys,
            bounded=bucket.is_bounded,
        )
        for name in ("slot", "token", "parent", "chance", "room"):
            setattr(step, name, self._inputs.device[name])
        for name in ("emitted", "count", "chosen"):
            setattr(step, name, self._outputs.device[name])
        self._proposals = []
        for name, number in self._names.items():
            proposal = steps.proposal_type(steps.heads[name], step, bucket.depth)
            proposal.length = self._inputs.device["places"][number]
            self._proposals.append(proposal)
        self._propose: Callable[[], object] = self._run_proposals
        self._verify: Callable[[], object] = step.run

    def fill(
        self, rows: Sequence[DeviceRow], updates: Sequence[tuple[int, int, int, int]], idle: int
    ) -> None:
        """Write the host's columns; the rows left over are the slot ``idle``."""
        host = self._inputs.host
        for column in host.values():
            column.fill(0)
        host["slot"].fill(idle)
        host["top_p"].fill(1.0)
        host["parent"].fill(-1)
        host["updates"][:, 0], host["updates"][0, 2] = idle, self._idle_block
        count = len(rows)
        for name in ("slot", "follows", "length", "last", "seed", "room"):
            host[name][:count] = [getattr(row, name) for row in rows]
        for name in ("top_k", "top_p", "min_p"):
            host[name][:count] = [getattr(row.sampling, name) for row in rows]
        host["temperature"][:count] = [
            0.0 if row.sampling.greedy else row.sampling.temperature for row in rows
        ]
        for number, row in enumerate(rows):
            if row.head:
                host["places"][self._names[row.head], number] = row.places
            elif nodes := len(row.tokens):
                host["token"][number, :nodes] = row.tokens
                host["parent"][number, :nodes] = row.parents
                host["chance"][number, :nodes] = 2.0  # before all that heads propose
        for which in (0, 1):
            own = [update[1:] for update in updates if update[0] == which]
            host["updates"][which, :, : len(own)] = np.array(own, np.int64).reshape(-1, 3).T

    def launch(self, rows: list[DeviceRow]) -> Launched:
        """Launch the step that was filled."""
        events = [self._steps.event()]
        self._inputs.send()
        self._propose()
        events.append(self._steps.event())
        self._verify()
        events.append(self._steps.event())
        self._outputs.device["token"].copy_(self._step.token)
        self._outputs.device["parent"].copy_(self._step.parent)
        self._outputs.device["chance"].copy_(self._step.chance)
        host = self._outputs.fetch()
        return Launched(rows, host, [*events, self._steps.event()])

    def capture(self) -> None:
        """Capture the two graphs, on rows of the idle slot. Raises RuntimeError."""
        self._inputs.send()
        propose = capture(self._device, self._run_proposals)[1]
        verify = capture(self._device, self._step.run)[1]
        self._propose, self._verify = propose, verify

    def _run_proposals(self) -> None:
        """Bring the slots up to date, and let the heads propose."""
        slots, given = self._slots, self._inputs.device
        where, column, value = given["updates"].unbind(1)
        slots.table[where[0], column[0]] = value[0].int()
        if slots.own.shape[1]:
            slots.own[where[1], column[1]] = value[1]
        slot, follows = given["slot"], given["follows"] > 0
        for known, new in ((slots.length, given["length"]), (slots.last, given["last"])):
            known[slot] = torch.where(follows, known[slot], new)
        for name in ("seed", "temperature", "top_k", "top_p", "min_p"):
            getattr(slots, name)[slot] = given[name]
        for proposal in self._proposals:
            proposal.run()


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
