"""A seeded Markov engine: no model, a settable agreement of draft and target, and a settable time.

It keeps the port's whole contract (catch-up, rollback, trees as a draft and as a target, options
and log-probabilities, block tables that must cover what it writes and still have what it reads), so
that the loop, the messages and the Triton side are tested on it in milliseconds. With ``lookahead``
it computes as a GPU would: in a thread of its own, each submission from its own state after the one
before.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeAlias

import numpy as np

from backend.engines.port import AFTER, Completion, DeviceProposal, EngineLimits, Extras, Turn
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence, child_of
from tests.fakes.markov import MarkovChain

_FAINT = 0.02  # a candidate so much less likely than the best one is not worth a node
_NODES_A_TOKEN = 4  # of a proposal on the device, at most

Top = list[list[tuple[int, float]]]
_Device: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


@dataclass(slots=True, eq=False)
class _Text:
    """The engine's record of one sequence."""

    known: tuple[int, list[int]]  # tokens with KV, and those beyond, after the last polled turn
    ran: tuple[int, list[int]]  # the same after the last turn that ran; the device's
    tokens: list[int] | None = None  # the text after the last turn that ran; the device's
    marks: list[int] = field(default_factory=list)  # what the KV of the text looks like


@dataclass(slots=True)
class _Job:
    """A turn with all that may change until it runs."""

    turn: Turn
    text: _Text
    tokens: list[int] | None  # of the text up to the turn's end; None: the device knows
    blocks: list[int]


@dataclass(slots=True, eq=False)
class _Submission:
    """Turns that run together, and what becomes of them."""

    jobs: list[_Job]
    completions: list[Completion] = field(default_factory=list)
    ran: list[tuple[int, list[int]]] = field(default_factory=list)  # ``_Text.ran`` by job
    parts_s: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    is_void: bool = False
    is_done: Event = field(default_factory=Event)


class FakeEngine:
    """A target (``agreement`` 1), or a draft that agrees with the target in the share ``agreement``
    of all contexts.

    ``in_target``: as a draft, it proposes on the target's device (``DeviceProposal``).
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        agreement: float = 1.0,
        step_s: float = 0.0,
        kv_blocks: int = 0,
        max_context_tokens: int = 2048,
        max_draft_tokens: int = 64,
        lookahead: int = 0,
        in_target: bool = False,
        model: MarkovChain | None = None,
    ) -> None:
        self.name = name
        self.step_s = step_s
        self.model = model or MarkovChain(seed, agreement)
        most = max_draft_tokens, max_draft_tokens
        self.limits = EngineLimits(
            self.model.vocab_size,
            max_context_tokens,
            *most,
            kv_blocks,
            tree=True,
            lookahead=lookahead,
            in_target=in_target,
        )
        self.texts: dict[int, _Text] = {}  # by sequence id
        self.submissions: deque[_Submission] = deque()
        self._parts_s: dict[str, float] = {}
        self._device = _start_device(name) if lookahead else None
        if self._device is not None:
            weakref.finalize(self, self._device.put, None)
        self.pool = np.zeros(
            (kv_blocks, BLOCK_TOKENS), np.int64
        )  # KV: a hash of the text (and salt) up to each position

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns."""
        submission = _Submission([self._job(turn) for turn in turns])
        self.submissions.append(submission)
        if self._device is not None:
            self._device.put(partial(self._run, submission))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Complete everything queued, after the time that this many passes take; with ``lookahead``
        the oldest submission.
        """
        del timeout_s  # a pass ends
        completions: list[Completion] = []
        while self.submissions:
            submission = self.submissions.popleft()
            if self._device is None:
                submission.jobs = [job for job in submission.jobs if self._is_live(job)]
                self._run(submission)
            submission.is_done.wait()
            if submission.error is not None:
                for later in self.submissions:
                    later.is_void = True
                self.submissions.clear()
                raise submission.error
            self._parts_s = submission.parts_s
            done = zip(submission.jobs, submission.completions, submission.ran, strict=True)
            for job, completion, ran in done:
                if self._is_live(job):
                    job.text.known = ran
                    completions.append(completion)
            if self._device is not None:
                break
        return completions

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; what the device still runs of them is dropped."""
        for sequence_id in sequence_ids:
            self.texts.pop(sequence_id, None)

    def unseen(self, sequence: Sequence) -> int:
        """Return the committed tokens that this engine has not run on, nor on those of another
        sequence with the same blocks.
        """
        if self.limits.in_target:
            return 1
        text = self.texts.get(sequence.id)
        known = text.known if text is not None else (self._shared(sequence, []), [])
        return len(sequence.tokens) - _tokens_run(known, sequence.tokens)

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed now."""
        room = self.limits.max_context_tokens
        if self.limits.kv_blocks:
            room = min(room, len(sequence.blocks.get(self.name, ())) * BLOCK_TOKENS)
        return max(0, min(length, self.limits.max_draft_tokens, room - len(sequence.tokens)))

    def can_follow(self, sequence: Sequence) -> bool:
        """Return whether a turn may follow one in flight: a grammar's state is the host's."""
        return sequence.sampling.guide is None

    def parts_s(self) -> dict[str, float]:
        """Return the seconds by part of the submission that was polled last."""
        return self._parts_s

    def close(self) -> None:
        """End the device."""
        if self._device is not None:
            self._device.put(None)

    def _is_live(self, job: _Job) -> bool:
        return self.texts.get(job.turn.sequence.id) is job.text

    def _job(self, turn: Turn) -> _Job:
        sequence = turn.sequence
        text = self.texts.get(sequence.id)
        if text is None:
            marks: list[int] = []
            seen = self._shared(sequence, marks), list[int]()
            text = self.texts[sequence.id] = _Text(seen, seen, marks=marks)
        tokens = None if turn.end == AFTER else sequence.tokens[: turn.end]
        return _Job(turn, text, tokens, list(sequence.blocks.get(self.name, ())))

    # -- the device

    def begin(self, turns: Seq[Turn]) -> None:
        """Begin a pass; what this raises voids what is in flight."""

    def _run(self, submission: _Submission) -> None:
        started_s = time.perf_counter()
        try:
            if not submission.is_void:
                self.begin([job.turn for job in submission.jobs])
                for part, seconds in self._seconds(submission.jobs):
                    time.sleep(seconds)
                    now_s = time.perf_counter()
                    submission.parts_s[part], started_s = now_s - started_s, now_s
                for job in submission.jobs:
                    submission.completions.append(self.complete(job))
                    submission.ran.append(job.text.ran)
        except Exception as error:
            submission.error = error
        verify_s = submission.parts_s.get("verify", 0.0) + time.perf_counter() - started_s
        submission.parts_s["verify"] = verify_s
        submission.is_done.set()

    def _seconds(self, jobs: list[_Job]) -> Iterator[tuple[str, float]]:
        asks = [job.turn.device_proposal for job in jobs]
        drafts = {ask.draft.name: ask.draft for ask in asks if ask is not None}
        for name, draft in drafts.items():
            length = max(ask.length for ask in asks if ask is not None and ask.draft is draft)
            if isinstance(draft, FakeEngine) and draft.step_s:
                yield f"draft:{name}", draft.step_s * length
        if jobs and self.step_s:
            yield "verify", self.step_s * max(1, *(job.turn.run for job in jobs))

    def complete(self, job: _Job) -> Completion:
        turn, text = job.turn, job.text
        sequence, tokens = turn.sequence, text.tokens if job.tokens is None else job.tokens
        if tokens is None:
            return Completion(sequence.id, [], error=f"{self.name}: a turn before it failed")
        text.tokens = None
        ask, proposal, drafted = turn.device_proposal, turn.proposal, None
        if ask is not None:
            drafted = _drafted(ask, tokens, sequence)
            proposal = drafted.first(ask.nodes)
        nodes = len(proposal) if proposal else 0
        if self.limits.kv_blocks:
            written = len(tokens) + nodes + max(0, turn.run - 1)
            if error := self._wrong_with_blocks(job, tokens, written):
                return Completion(sequence.id, [], error=f"{self.name}: {error}")
        if turn.nodes:
            spine, tree = self.propose(tokens, sequence, turn.run, turn.nodes)
            self._keep(job, tokens, None, spine)
            return Completion(sequence.id, [], proposal=tree)
        start = min(len(tokens) - (turn.run > 0), _tokens_run(text.ran, tokens))
        drawn, accepted, log_probs, top = self._draw(turn, tokens, proposal)
        self._keep(job, tokens, proposal, drawn)
        return Completion(
            sequence.id,
            drawn,
            accepted,
            log_probs=log_probs if sequence.sampling.log_probs else None,
            extras=self._extras(sequence, tokens, start, drawn, top),
            drafted=drafted,
            verified=nodes if drafted is not None else 0,
        )

    def _keep(
        self, job: _Job, tokens: list[int], proposal: Proposal | None, new: list[int]
    ) -> None:
        """Note what a turn has run: the text, and all but the last of ``new`` tokens after it."""
        if self.limits.kv_blocks:
            self._write(job, tokens, proposal, new[:-1])
        job.text.ran = len(tokens), new[:-1]
        job.text.tokens = [*tokens, *new]

    def _extras(
        self, sequence: Sequence, tokens: list[int], start: int, drawn: list[int], top: Top
    ) -> Extras | None:
        """Return what a sequence asks for besides its tokens; the turn has run it from token
        ``start`` on.
        """
        text, end = [*tokens, *drawn], len(tokens)
        extras = Extras(top, context_first=start)
        if sequence.generation_logits and drawn:
            extras.logits = np.array(
                [self.model.logits(text[: end + i]) for i in range(len(drawn))], np.float32
            )
        if sequence.reads_context and start < sequence.prompt_tokens and start < end:
            extras.context_logits = np.array(
                [self.model.logits(text[: at + 1]) for at in range(start, end)], np.float32
            )
        return (
            extras
            if top or extras.logits is not None or extras.context_logits is not None
            else None
        )

    def _wrong_with_blocks(self, job: _Job, tokens: list[int], written: int) -> str | None:
        """Return what is wrong with a turn's block table, if anything: too short, or not the KV of
        its text.
        """
        sequence_id, text = job.turn.sequence.id, job.text
        if len(job.blocks) * BLOCK_TOKENS < written:
            return f"the block table of sequence {sequence_id} is too short for {written} tokens"
        seen = min(len(tokens), _tokens_run(text.ran, tokens))
        marks = _marks_of(text.marks, job.turn.sequence.salt, tokens[:seen])
        if (self.pool[job.blocks].ravel()[:seen] != marks).any():
            return f"the KV of sequence {sequence_id} was overwritten"
        return None

    def _write(
        self, job: _Job, tokens: list[int], proposal: Proposal | None, beyond: list[int]
    ) -> None:
        """Write the KV of the turn's text, of the proposal's nodes in their order and, over them,
        of the tokens ``beyond`` the text: what was accepted moves to its place.
        """
        marks = list(_marks_of(job.text.marks, job.turn.sequence.salt, tokens))
        pool = self.pool[job.blocks].ravel()
        start = min(len(tokens), _tokens_run(job.text.ran, tokens))
        if proposal is not None:
            nodes: list[int] = []
            for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
                nodes.append(_mark(marks[-1] if parent == ROOT else nodes[parent], token))
            pool[len(tokens) : len(tokens) + len(nodes)] = nodes
        for token in beyond:
            marks.append(_mark(marks[-1], token))
        pool[start : len(marks)] = marks[start:]
        self.pool[job.blocks] = pool.reshape(-1, BLOCK_TOKENS)

    def _shared(self, sequence: Sequence, marks: list[int]) -> int:
        """Return how many leading tokens of a sequence that has not run here have KV in its blocks
        already; ``marks`` gets those of its text.
        """
        if not self.limits.kv_blocks:
            return 0
        blocks = sequence.blocks.get(self.name, ())[: len(sequence.keys)]
        text = sequence.tokens[: len(blocks) * BLOCK_TOKENS]
        found = _marks_of(marks, sequence.salt, text)
        alike = (
            self.pool[b].tolist() == found[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            for i, b in enumerate(blocks)
        )
        return BLOCK_TOKENS * next((i for i, same in enumerate(alike) if not same), len(blocks))

    def _draw(
        self, turn: Turn, text: list[int], proposal: Proposal | None
    ) -> tuple[list[int], int, list[float], Top]:
        """Return (tokens, how many were accepted, their log-probabilities, the likeliest tokens).

        The path is followed as long as it has what the target draws; ``run`` tokens come after it.
        """
        sequence, sampling = turn.sequence, turn.sequence.sampling
        nodes = (proposal.tokens, proposal.parents) if proposal else ([], [])
        tokens: list[int] = []
        log_probs: list[float] = []
        top: Top = []
        at, follows = ROOT, True
        accepted, most = 0, sampling.top_log_probs or 0
        while len(tokens) < accepted + turn.run:
            token, scores = self.model.next([*text, *tokens], sequence.prompt_tokens, sampling)
            tokens.append(token)
            at = child_of(*nodes, at, token) if follows else ROOT
            follows = at != ROOT
            accepted += follows
            if scores is not None:
                log_probs.append(float(scores[token]))
                if most:
                    best = np.argsort(-scores, kind="stable")[:most]
                    top.append([(int(token), float(scores[token])) for token in best])
        return tokens, accepted, log_probs, top

    def propose(
        self, text: list[int], sequence: Sequence, length: int, most: int
    ) -> tuple[list[int], Proposal]:
        """Return the tokens that were run along the spine, and the tree of the ``most`` best
        nodes.
        """
        prompt_tokens, sampling = sequence.prompt_tokens, sequence.sampling
        spine: list[int] = []
        nodes: list[tuple[int, int, float]] = []
        at, confidence = ROOT, 1.0
        for _ in range(length):
            chances, _ = self.model.chances([*text, *spine], prompt_tokens, sampling)
            best = np.argsort(-chances, kind="stable")[:most].tolist()
            least = _FAINT * float(chances[best[0]])
            level = [(t, at, confidence * float(chances[t])) for t in best if chances[t] >= least]
            at, confidence = len(nodes), level[0][2]
            spine.append(best[0])
            nodes += level
        return spine, Proposal.best(self.name, nodes, most)


def _start_device(name: str) -> _Device:
    """Start a thread that works through a queue until that has None."""
    device: _Device = SimpleQueue()

    def work() -> None:
        while (run := device.get()) is not None:
            run()
            del run  # an engine that nothing else refers to ends its device

    Thread(target=work, name=name, daemon=True).start()
    return device


def _drafted(ask: DeviceProposal, text: list[int], sequence: Sequence) -> Proposal:
    """Return what a draft in the target proposes."""
    assert isinstance(ask.draft, FakeEngine), ask.draft
    return ask.draft.propose(text, sequence, ask.length, _NODES_A_TOKEN * ask.length)[1]


def _tokens_run(ran: tuple[int, list[int]], tokens: list[int]) -> int:
    """Return how many leading tokens have been run, by what has."""
    end, beyond = ran
    matching = next(
        (i for i, token in enumerate(beyond) if tokens[end + i : end + i + 1] != [token]),
        len(beyond),
    )
    return end + matching


def _marks_of(marks: list[int], salt: str, tokens: list[int]) -> list[int]:
    """Return the marks of a text's leading tokens; only those of new ones are made."""
    for token in tokens[len(marks) :]:
        marks.append(_mark(marks[-1] if marks else salt, token))
    return marks[: len(tokens)]


def _mark(before: int | str, token: int) -> int:
    return hash((before, token))
