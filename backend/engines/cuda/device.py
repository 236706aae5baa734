"""Verification steps of a batch on the device, from the rows of a submission to what came of them.

A step runs in CUDA graphs: one that brings the slots up to date, one for each head that proposes,
and three that verify. The second of these is the pass that ``forward`` has for as many rows and
tokens. Per step one copy goes to the device and one comes back, and the host waits for nothing
before it collects the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.cuda.forward import (
    ROW_SIZES,
    TOKEN_SIZES,
    PagedForward,
    Size,
    size_of,
    sizes_of,
)
from backend.engines.cuda.heads import DeviceHead, HeadProposal
from backend.engines.cuda.pages import MAX_NEW_TOKENS, PAGE
from backend.engines.cuda.step import Slots, VerifyStep
from backend.engines.cuda.step_columns import MOST_HEADS, DeviceRow, StepColumns, Updates
from backend.engines.cuda.stream import Graphs, to_device
from backend.engines.spine import CANDIDATES

MOST_COLUMNS = MAX_NEW_TOKENS - 1
"""The most nodes of a row's proposal: a row has as many new tokens, and the one before them."""

MOST_PLACES = MOST_COLUMNS // CANDIDATES
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


@dataclass(slots=True)
class LaunchedStep:
    """A step under way."""

    size: Size
    rows: list[DeviceRow]
    host: dict[str, npt.NDArray[Any]]  # by name, [rows, ...]
    events: list[Any]
    """CUDA events before the proposal, after it, and after the copy back; times without CUDA."""


class DeviceSteps:
    """Launches steps over ``slots`` sequences, and collects them in their order. Two may be under
    way.

    A row has at most ``most`` - 1 nodes verified. ``count(reason)`` is called when a graph cannot
    be captured.
    """

    step_type: type[VerifyStep] = VerifyStep
    proposal_type: type[HeadProposal] = HeadProposal

    def __init__(
        self,
        forward: PagedForward,
        heads: dict[str, DeviceHead],
        *,
        slots: int,
        most: int,
        text_rows: int,
        states: tuple[int, int] = (0, 0),
        count: Callable[[str], None] | None = None,
    ) -> None:
        model = forward.paged
        self.model, self.heads, self._forward, self._most = model, heads, forward, most
        self.stream = model.stream
        self._idle = slots  # the slot of rows that no sequence owns
        self.slots = Slots(
            slots + 1,
            model.row_pages,
            model.device,
            states=states,
            text_rows=text_rows,
            dtype=model.dtype,
        )
        self.slots.table[self._idle] = model.scratch // PAGE
        self._width = min(MOST_COLUMNS, max(most - 1, (most - 1) * CANDIDATES * bool(states[0])))
        self._columns: dict[int, StepColumns] = {}
        self._steps: dict[Size, VerifyStep] = {}
        self._proposals: dict[tuple[int, str, int, bool], HeadProposal] = {}
        self._parts = Graphs(model.stream, "the part of a step of", count)
        self._updates: Updates = ([], [])

    @property
    def graphs(self) -> int:
        """How many graphs have been captured, or run for want of CUDA."""
        return len(self._parts) + len(self._forward.graphs)

    def set_head(self, head: DeviceHead) -> None:
        """Run this head from now on, in the place of one of its name. Raises ValueError for more
        heads than there is room for.
        """
        if len({*self.heads, head.name}) > MOST_HEADS:
            raise ValueError(f"at most {MOST_HEADS} heads can propose, {head.name!r} is one more")
        self.heads[head.name] = head
        self._parts.forget(lambda part: part[1] == head.name)
        self._proposals = {key: run for key, run in self._proposals.items() if key[1] != head.name}

    def capture(self, rows: int) -> None:
        """Capture all that steps of up to ``rows`` rows launch."""
        for size in sizes_of(rows, self._most):
            step = self._step(size)
            self._layout(step)
            for is_bounded in (False, True):
                self._decision(step, is_bounded=is_bounded)
            if size.tokens == size.rows:
                self._update(size.rows)
                for name in self.heads:
                    self._capture_proposals(size.rows, name)

    def _capture_proposals(self, rows: int, name: str) -> None:
        for depth in range(1, min(self._most - 1, MOST_PLACES) + 1):
            for is_bounded in (False, True):
                self._proposal(rows, name, depth, is_bounded=is_bounded)

    def place_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Write entries ``first`` and following of a slot's block table before the next step.
        Raises ValueError where it has no room for them.
        """
        if first + len(blocks) > self.model.row_pages:
            raise ValueError(
                f"a block table has room for {self.model.row_pages} blocks, got "
                f"{first + len(blocks)}"
            )
        self._updates[0].extend((slot, first + at, block) for at, block in enumerate(blocks))

    def place_text_tokens(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Write tokens of a slot's text that heads may propose besides their static ones, into the
        places after the ``first``, which are a ring.
        """
        room = self.slots.text_tokens.shape[1]
        self._updates[1].extend(
            (slot, (first + at) % room, token) for at, token in enumerate(tokens)
        )

    def place_states(
        self,
        slot: int,
        states: torch.Tensor,  # [taps, hidden]
    ) -> None:
        """Write what the target had at the place that a slot's last token was drawn from."""
        self.slots.states[slot] = states

    def clear(self, slot: int) -> None:
        """Forget the tokens of a slot's last text."""
        for updates in self._updates:
            updates[:] = [update for update in updates if update[0] != slot]
        self.slots.text_tokens[slot] = -1

    def launch(self, rows: Sequence[DeviceRow]) -> LaunchedStep:
        """Launch a step for these rows, at least one."""
        size, is_bounded, depths = self._bucket(rows)
        step, columns = self._step(size), self._columns_of(size.rows)
        proposals = [
            self._proposal(size.rows, name, depth, is_bounded=is_bounded)
            for name, depth in depths.items()
        ]
        proposing = [self._update(size.rows), *proposals]
        decision = self._decision(step, is_bounded=is_bounded)
        verifying = [self._layout(step), step.target.launch, decision]
        self._write_beyond(columns.most_updates)
        numbers = {name: number for number, name in enumerate(self.heads)}
        columns.fill(rows, numbers, self._updates, self._idle)
        self._updates = ([], [])
        events = [self.stream.event()]
        columns.send()
        for part in proposing:
            part()
        events.append(self.stream.event())
        for part in verifying:
            part()
        events.append(self.stream.event())
        host = columns.fetch()
        return LaunchedStep(size, [*rows], host, [*events, self.stream.event()])

    def collect(self, launched: LaunchedStep) -> tuple[list[RowResult], dict[str, float]]:
        """Wait for a step; return what it did by row, and its seconds by part (``draft``,
        ``verify``).
        """
        self.stream.wait(launched.events[-1])
        results = _results(launched.rows, launched.host)
        start, drafted, verified, _ = launched.events
        parts = {"draft": (start, drafted), "verify": (drafted, verified)}
        return results, {name: self.stream.seconds(*pair) for name, pair in parts.items()}

    def _write_beyond(self, most: int) -> None:
        """Write the updates that the columns of a step have no room for: the first ones."""
        for updates, target in zip(
            self._updates, (self.slots.table, self.slots.text_tokens), strict=True
        ):
            if len(updates) > most:
                first = to_device(updates[:-most], torch.int64, self.model.device)
                target[first[:, 0], first[:, 1]] = first[:, 2].to(target.dtype)
                del updates[:-most]

    def _bucket(self, rows: Sequence[DeviceRow]) -> tuple[Size, bool, dict[str, int]]:
        """Return the smallest size that the rows fit, whether one has top-k, top-p or min-p, and
        the longest path of each head that proposes. Raises ValueError where no size does.
        """
        count = size_of(ROW_SIZES, len(rows))
        if count is None:
            raise ValueError(f"a step has at most {ROW_SIZES[-1]} rows, got {len(rows)}")
        budget = min(sum(row.budget for row in rows), TOKEN_SIZES[-1] - count)
        tokens = (size_of(TOKEN_SIZES, count + budget) or count) if budget else count
        bounded = any(p.top_k or p.top_p < 1.0 or p.min_p for p in (r.sampling for r in rows))
        depths: dict[str, int] = {}
        for row in rows:
            if row.head:
                depths[row.head] = max(row.places, depths.get(row.head, 0))
        return Size(count, tokens), bounded, depths

    def _columns_of(self, rows: int) -> StepColumns:
        if rows not in self._columns:
            self._columns[rows] = StepColumns(
                self.stream,
                rows,
                self._width,
                most=self._most,
                slots=self.slots,
                idle_block=self.model.scratch // PAGE,
            )
        return self._columns[rows]

    def _step(self, size: Size) -> VerifyStep:
        target = self._forward.pass_of(size)
        if size not in self._steps:
            step = self.step_type(target, self.slots, self._width, most=self._most)
            self._columns_of(size.rows).share_with(step)
            self._steps[size] = step
        return self._steps[size]

    def _part(self, rows: int, run: Callable[[], object], *key: object) -> Callable[[], object]:
        """Return what launches part of a step, captured on rows of the idle slot."""

        def clear() -> None:
            columns = self._columns_of(rows)
            columns.fill([], {}, ([], []), self._idle)
            columns.send()

        return self._parts.of((rows, *key), run, clear)

    def _update(self, rows: int) -> Callable[[], object]:
        """Return what brings the slots up to date."""
        return self._part(rows, self._columns_of(rows).update_slots, "update")

    def _proposal(
        self, rows: int, name: str, depth: int, *, is_bounded: bool
    ) -> Callable[[], object]:
        """Return what lets a head propose ``depth`` places."""
        key = rows, name, depth, is_bounded
        if key not in self._proposals:
            step = self._step(Size(rows, rows))
            proposal = self.proposal_type(self.heads[name], step, depth, bounded=is_bounded)
            places = self._columns_of(rows).inputs.device["places"]
            proposal.length = places[[*self.heads].index(name)]
            self._proposals[key] = proposal
        return self._part(rows, self._proposals[key].run, name, depth, is_bounded)

    def _layout(self, step: VerifyStep) -> Callable[[], object]:
        return self._part(step.rows, step.layout, step.target.inputs.size)

    def _decision(self, step: VerifyStep, *, is_bounded: bool) -> Callable[[], object]:
        """Return what draws, accepts and commits."""
        run = partial(step.decide, bounded=is_bounded)
        return self._part(step.rows, run, step.target.inputs.size, is_bounded)


def _results(rows: Sequence[DeviceRow], host: dict[str, npt.NDArray[Any]]) -> list[RowResult]:
    """Return what came of the rows, from the outputs of ``StepColumns``: ``emitted`` [rows, most],
    ``count`` [rows], and ``token``, ``parent``, ``is_verified`` and ``chance`` [rows, columns].
    """
    count = len(rows)
    emitted, verified = (
        host["emitted"][:count].tolist(),
        host["is_verified"][:count].sum(1).tolist(),
    )
    results = [
        RowResult(tokens[:length], nodes)
        for tokens, length, nodes in zip(
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
    for number, most, *proposals in zip(
        numbers, nodes.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        result = results[number]
        result.tokens, result.parents, result.confidence = (values[:most] for values in proposals)
    return results
