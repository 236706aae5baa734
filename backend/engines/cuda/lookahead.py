"""The CUDA engine with a turn of lookahead: what a step decides stays on the device, so that the
next step may be launched before the host has seen it.

Rows whose token the device can draw run as one step of ``DeviceSteps``, launched by ``submit``.
Prompts run before it, in the same stream. Rows with options that change the logits, or that want
more than tokens, take the path of ``StepEngine`` when they are polled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backend.engines.cuda.device import MOST_PLACES, DeviceSteps, LaunchedStep, RowResult
from backend.engines.cuda.engine import CudaEngine
from backend.engines.cuda.heads import DeviceHead
from backend.engines.cuda.step_columns import DeviceRow
from backend.engines.cuda.stream import NO_NUMBERS
from backend.engines.head.folder import TARGET_ROWS
from backend.engines.head.in_target import HeadInTarget
from backend.engines.port import AFTER, Completion, Engine, Turn
from backend.engines.stepping.chunks import PassChunk
from backend.engines.stepping.kv_caches import Cache
from backend.sampling.randomness import seed_word
from backend.sequence import BLOCK_TOKENS, Proposal
from backend.sequence import Sequence as Text


@dataclass(slots=True, eq=False)
class _Slot:
    """The engine's record of a sequence that has a slot on the device."""

    number: int
    blocks: list[int] = field(default_factory=list)
    """Its block table there."""
    length: int = 0
    """Tokens with KV before the turns under way."""
    under_way: list[int] = field(default_factory=list)
    """The tokens at most that each of its turns writes that were launched and not collected."""
    states_at: int = -1
    """The tokens with KV before which the states are there that heads go on from, -1 for none."""
    text_tokens: dict[int, None] = field(default_factory=dict)
    """Tokens of its text there that heads may propose besides their static ones, the oldest first.
    """
    placed: int = 0
    """How many were placed there, in a ring."""
    read: int = 0
    """Tokens of its text that were looked at for ``text_tokens``."""

    @property
    def bound(self) -> int:
        """Tokens with KV at most after all turns under way."""
        return self.length + sum(self.under_way)

    def forget_the_device(self) -> None:
        """Note that nothing is under way and that the device has none of it for certain."""
        self.blocks.clear()
        self.under_way.clear()
        self.text_tokens.clear()
        self.placed = self.read = 0
        self.states_at = -1


@dataclass(slots=True)
class _RowJob:
    """A turn that the device decides."""

    turn: Turn
    slot: _Slot
    cache: Cache


@dataclass(slots=True)
class _SubmittedTurns:
    """Turns under way."""

    jobs: list[_RowJob]
    launched: LaunchedStep | None
    chunks: list[Completion]
    """Completions of turns that only run a chunk of a prompt."""
    by_host: list[Turn]
    chunks_begun: Any
    """A CUDA event before the prompts' chunks, and one after them; times without CUDA."""
    chunks_ended: Any


class LookaheadEngine(CudaEngine):
    """A target that takes a turn of a sequence while its last one runs. At most ``sequences`` have
    a slot on the device at once; heads may propose ``text_rows`` tokens of a
    text besides static ones.
    """

    steps_type: type[DeviceSteps] = DeviceSteps

    def __init__(
        self,
        name: str,
        lm: Any,
        *,
        sequences: int,
        text_rows: int = TARGET_ROWS,
        count: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, lm, lookahead=1, count=count, **options)
        taps, hidden = tuple(options.get("taps", ())), lm.get_input_embeddings().weight.shape[1]
        self._lm = lm
        self._steps = self.steps_type(
            self.model,
            {},
            slots=sequences,
            most=self.limits.max_draft_tokens + 1,
            text_rows=text_rows if taps else 0,
            states=(len(taps), hidden if taps else 0),
            count=count,
        )
        self._text_rows = text_rows if taps else 0
        self._heads: dict[str, HeadInTarget] = {}
        self._free = list(range(sequences))
        self._by_host: dict[int, tuple[int, torch.Tensor]] = {}
        """By sequence whose last turn the host decided: tokens after it, and the state before the
        last of them [taps, hidden].
        """
        self._slots: dict[int, _Slot] = {}
        self._submitted: deque[_SubmittedTurns] = deque()
        self._parts_s: dict[str, float] = {}

    @property
    def graphs(self) -> int:
        """How many CUDA graphs it has captured."""
        return self._steps.graphs

    def prepare(self, drafts: Sequence[Engine], rows: int) -> None:
        """Capture the graphs of all steps and of the drafts that are heads (``port.Prepares``)."""
        for draft in drafts:
            if isinstance(draft, HeadInTarget):
                self._head(draft)
        if self.model.graphs.captures:
            with self._stream.current(), torch.inference_mode():
                self._steps.capture(rows)

    def submit(self, turns: Sequence[Turn]) -> None:
        """Launch what the device decides, and queue the rest. Raises EngineLostError."""
        with self._stream.serving(self.name):
            try:
                with torch.inference_mode():
                    self._submitted.append(self._launch(turns))
            except Exception:
                self._drop()
                raise

    def poll(self, timeout_s: float) -> list[Completion]:  # noqa: ARG002 (a step ends)
        """Complete the oldest submission. Raises EngineLostError."""
        if not self._submitted:
            return []
        submission = self._submitted.popleft()
        with self._stream.serving(self.name):
            try:
                completions = [*submission.chunks, *self._collect(submission)]
                if submission.by_host:
                    started_s = time.perf_counter()
                    self._turns = submission.by_host
                    completions += self._note_states(super().poll(0.0))
                    spent_s = time.perf_counter() - started_s
                    self._parts_s["verify"] = self._parts_s.get("verify", 0.0) + spent_s
            except Exception:
                self._drop()
                raise
        return completions

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; what the device still runs of them is dropped."""
        gone = set(sequence_ids)
        super().cancel(gone)
        for submission in self._submitted:
            submission.by_host = [t for t in submission.by_host if t.sequence.id not in gone]
            submission.chunks = [c for c in submission.chunks if c.sequence_id not in gone]
        for sequence_id in gone:
            self._by_host.pop(sequence_id, None)
            slot = self._slots.pop(sequence_id, None)
            if slot is not None:
                self._free.append(slot.number)

    def can_follow(self, sequence: Text) -> bool:
        """Return whether a turn may follow one in flight."""
        slot = self._slots.get(sequence.id)
        return slot is not None and bool(slot.under_way) and _is_for_device(sequence)

    def parts_s(self) -> dict[str, float]:
        """Return the seconds by part of the submission that was polled last."""
        return self._parts_s

    def assume(self, sequence: Text, tokens: int) -> None:
        """For measuring only (``StepEngine.assume``): heads have their state, too."""
        super().assume(sequence, tokens)
        no_states = torch.zeros_like(self._steps.slots.states[0])
        self._by_host[sequence.id] = len(sequence.tokens), no_states

    def close(self) -> None:
        """Release the model and its KV; the engine is of no use afterwards."""
        self._drop()
        del self._steps, self._lm
        super().close()

    # -- submitting

    def _launch(self, turns: Sequence[Turn]) -> _SubmittedTurns:
        jobs: list[_RowJob] = []
        rows: list[DeviceRow] = []
        chunks: list[PassChunk] = []
        done: list[Completion] = []
        by_host: list[Turn] = []
        for turn in turns:
            try:
                if turn.end == AFTER:
                    job = self._job_after(turn)
                elif turn.run == 0 and not turn.sequence.reads_context:
                    chunks += self._chunk(turn)
                    done.append(Completion(turn.sequence.id, []))
                    continue
                elif self._takes(turn):
                    job = self._job(turn, chunks)
                else:
                    by_host.append(turn)
                    continue
                row = self._row(job)
                rows.append(row)
                jobs.append(job)
                job.slot.under_way.append(1 + row.room)
            except ValueError as error:
                done.append(Completion(turn.sequence.id, [], error=str(error)))
        begun = ended = self._stream.event()
        if chunks:
            self.model.launch(chunks)
            ended = self._stream.event()
        launched = self._steps.launch(rows) if rows else None
        return _SubmittedTurns(jobs, launched, done, by_host, begun, ended)

    def _takes(self, turn: Turn) -> bool:
        """Return whether the device decides a turn; it has a slot then."""
        sequence = turn.sequence
        proposed = len(turn.proposal) if turn.proposal else 0
        if turn.run != 1 or turn.nodes or proposed > self.limits.max_draft_tokens:
            return False
        if not _is_for_device(sequence):
            return False
        if sequence.id not in self._slots:
            if not self._free:
                return False
            self._slots[sequence.id] = slot = _Slot(self._free.pop())
            self._steps.clear(slot.number)
        return True

    def _chunk(self, turn: Turn) -> list[PassChunk]:
        """Return the chunk of a prompt that a turn runs. Raises ValueError for a wrong turn."""
        job = self._prepare(turn)
        if job.chunk is None:
            return []
        job.cache.ran += job.chunk.tokens
        job.cache.agreed = turn.end
        return [job.chunk]

    def _job(self, turn: Turn, chunks: list[PassChunk]) -> _RowJob:
        """Return what the device decides after the text; what of it has no KV joins ``chunks``.
        Raises ValueError for a wrong turn.
        """
        job = self._prepare(turn)
        chunk, sequence, start = job.chunk, turn.sequence, turn.end - 1
        assert chunk is not None
        if chunk.start < start:
            tokens = sequence.tokens[chunk.start : start]
            chunks.append(PassChunk(tokens, chunk.start, chunk.table, 0, (), len(tokens)))
            job.cache.ran += tokens
            job.cache.agreed = start
        job.cache.roll_back(start)
        slot = self._slots[sequence.id]
        if slot.under_way:
            raise ValueError(f"turn of sequence {sequence.id}: it must follow the one in flight")
        slot.length = start
        end, states = self._by_host.get(sequence.id, (0, None))
        if states is not None and end == turn.end and slot.states_at != start:
            self._steps.place_states(slot.number, states)
            slot.states_at = start
        return _RowJob(turn, slot, job.cache)

    def _job_after(self, turn: Turn) -> _RowJob:
        """Return what the device decides after the sequence's turn in flight. Raises ValueError
        where there is none.
        """
        sequence = turn.sequence
        slot = self._slots.get(sequence.id)
        if slot is None or not slot.under_way:
            raise ValueError(f"turn of sequence {sequence.id}: there is none that it may follow")
        return _RowJob(turn, slot, self.caches.of(sequence))

    def _row(self, job: _RowJob) -> DeviceRow:
        """Return a job's row, its slot brought up to date. Raises ValueError for blocks that do not
        cover it, or a draft that the engine cannot run.
        """
        turn, slot, sequence = job.turn, job.slot, job.turn.sequence
        blocks, follows = sequence.blocks[self.name], turn.end == AFTER
        room = min(self.limits.max_draft_tokens, len(blocks) * BLOCK_TOKENS - slot.bound - 1)
        if room < 0:
            raise ValueError(
                f"turn of sequence {sequence.id}: needs KV for {slot.bound + 1} tokens, has "
                f"{len(blocks) * BLOCK_TOKENS}"
            )
        if slot.blocks != blocks[: len(slot.blocks)]:
            slot.blocks.clear()
        self._steps.place_blocks(slot.number, len(slot.blocks), blocks[len(slot.blocks) :])
        slot.blocks = list(blocks)
        word = seed_word(sequence.sampling.seed)
        signed = word - (word >> 63 << 64)
        last = -1 if follows else sequence.tokens[turn.end - 1]
        start = slot.length
        row = DeviceRow(slot.number, start, last, follows, sequence.sampling, signed, room=room)
        if turn.proposal is not None:
            row.tokens, row.parents = turn.proposal.tokens, turn.proposal.parents
            row.budget = row.room = len(turn.proposal)
        elif turn.device_proposal is not None and room and (follows or slot.states_at == start):
            ask = turn.device_proposal
            row.head = self._head(ask.draft)
            row.places = min(ask.length, room, MOST_PLACES)
            row.budget = min(ask.nodes, room)
            self._place_text_tokens(slot, sequence)
        return row

    def _head(self, draft: object) -> str:
        """Return a head's name among the device's. Raises ValueError for another kind of draft."""
        if not isinstance(draft, HeadInTarget):
            raise ValueError(f"{self.name}: cannot run the draft {draft!r}")
        if self._heads.get(draft.name) is not draft:
            self._heads[draft.name] = draft
            embedding, head = (
                module.weight.detach()
                for module in (self._lm.get_input_embeddings(), self._lm.get_output_embeddings())
            )
            self._steps.set_head(
                DeviceHead(draft.name, draft.network, draft.token_ids, embedding, head)
            )
        return draft.name

    def _place_text_tokens(self, slot: _Slot, sequence: Text) -> None:
        """Bring to the device which tokens of a text heads may propose: the last of them."""
        heads = self._heads.values()
        new = [
            token
            for token in dict.fromkeys(reversed(sequence.tokens[slot.read :]))
            if token not in slot.text_tokens and not all(head.is_static(token) for head in heads)
        ][: self._text_rows][::-1]
        slot.read = len(sequence.tokens)
        self._steps.place_text_tokens(slot.number, slot.placed, new)
        slot.placed += len(new)
        slot.text_tokens.update(dict.fromkeys(new))
        for token in [*slot.text_tokens][: -self._text_rows or None]:
            del slot.text_tokens[token]

    # -- collecting

    def _note_states(self, completions: list[Completion]) -> list[Completion]:
        """Keep the states that heads on the device go on from."""
        for completion in completions:
            if (states := completion.hidden_states) is not None:
                last = torch.from_numpy(states.rows[-1]).to(self.model.device)
                self._by_host[completion.sequence_id] = states.end + 1, last
        return completions

    def _collect(self, submission: _SubmittedTurns) -> list[Completion]:
        self._parts_s = {}
        if submission.launched is None:
            self._stream.wait(submission.chunks_ended)
            self._parts_s["verify"] = self._stream.seconds(
                submission.chunks_begun, submission.chunks_ended
            )
            return []
        for job in submission.jobs:
            job.slot.under_way.pop(0)
        results, seconds = self._steps.collect(submission.launched)
        names = {row.head for row in submission.launched.rows if row.head}
        self._parts_s = {f"draft:{name}": seconds["draft"] / len(names) for name in names}
        # Not up to the step's own start: a graph may have been captured between.
        before_s = self._stream.seconds(submission.chunks_begun, submission.chunks_ended)
        self._parts_s["verify"] = before_s + seconds["verify"] + seconds["draft"] * (not names)
        return [
            self._completion(job, row, result)
            for job, row, result in zip(
                submission.jobs, submission.launched.rows, results, strict=True
            )
            if self._slots.get(job.turn.sequence.id) is job.slot
        ]

    def _completion(self, job: _RowJob, row: DeviceRow, result: RowResult) -> Completion:
        """Return what came of a turn, and note what has KV now."""
        turn, cache, sequence = job.turn, job.cache, job.turn.sequence
        emitted = result.emitted
        if -1 in emitted:
            job.slot.states_at = -1
            return Completion(sequence.id, [], error=NO_NUMBERS)
        start = len(sequence.tokens) - 1
        cache.roll_back(start)
        cache.ran += [sequence.tokens[start], *emitted[:-1]]
        job.slot.length = job.slot.states_at = len(cache.ran)
        completion = Completion(sequence.id, emitted, len(emitted) - 1)
        if turn.device_proposal is not None:
            draft = turn.device_proposal.draft.name
            nodes = result.tokens, result.parents, result.confidence
            completion.drafted = Proposal(draft, *nodes)
            completion.verified = result.verified if row.head else 0
        return completion

    def _drop(self) -> None:
        """Wait for the device, and use nothing of what is submitted."""
        self._submitted.clear()
        self._turns.clear()
        for slot in self._slots.values():
            slot.forget_the_device()
        self._stream.finish()


def _is_for_device(sequence: Text) -> bool:
    """Return whether the device can draw a sequence's tokens, and that is all that is wanted."""
    sampling = sequence.sampling
    return not (
        sampling.changes_logits
        or sampling.reads_log_probs
        or sampling.top_p_decay != 1.0
        or sequence.reads_context
        or sequence.generation_logits
    )
