"""Turns to passes of a model and back: what every engine that runs whole steps has in common.

A *model* (``Model``) runs chunks of token ids over paged KV and returns logits. Everything else is
here: which tokens a pass must run, the rule of acceptance, drafts' proposals, and what of each
sequence has KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backend.engines.port import Completion, EngineLimits, Extras, HiddenStates, Turn
from backend.engines.spine import CANDIDATES, Spine
from backend.engines.stepping.chunks import PassChunk
from backend.engines.stepping.counterfactual import DRAWN_ROWS, SCORED_ROWS, chains, guesses
from backend.engines.stepping.kv_caches import Cache, Caches
from backend.sampling.distributions import Floats
from backend.sampling.processing import Columns
from backend.sampling.verification import Verdict, VerifyRequest, candidates, verify
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence


class Model(Protocol):
    """A decoder with its KV pool."""

    taps: tuple[int, ...]
    """The layers, counted from 1, whose output drafts read."""
    hidden_states: Floats | None
    """[rows, layers, hidden], the output of ``taps`` at every row of the last pass, chunk by chunk;
    None without taps. The next pass may overwrite it.
    """

    def forward(self, chunks: Seq[PassChunk]) -> Floats:
        """Run the chunks in one pass, writing their KV; return the logits of the rows that want
        them, chunk by chunk: [rows, vocab]. The next call may overwrite them.
        """
        ...

    def keep(self, accepted: Seq[tuple[PassChunk, Seq[int]]]) -> None:
        """Put the KV of accepted nodes where their tokens are in the text; the chunks are those of
        the last pass, each with the path of nodes from the text on.
        """
        ...


@dataclass(slots=True)
class TurnJob:
    """A turn under way: its chunk of the first pass and its result so far.

    ``tokens`` are accepted and emitted ones; a draft's are in its ``spine``.
    """

    turn: Turn
    cache: Cache
    request: VerifyRequest
    chunk: PassChunk | None
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    spine: Spine = field(default_factory=Spine)
    proposal: Proposal | None = None
    log_probs: list[float] = field(default_factory=list)
    rows_scored: int = 0
    scored: list[tuple[int, int]] = field(default_factory=list)
    context_rows: int = 0
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)  # [rows, vocab] each
    context_logits: Floats | None = None  # [rows, vocab]
    hidden_states: list[Floats] = field(default_factory=list)
    """[rows, layers, hidden] by pass, of the rows that are in the text now."""
    error: str | None = None

    @property
    def run(self) -> list[int]:
        """The tokens that it has run, or is to run, beyond the text."""
        return self.spine.tokens if self.turn.nodes else self.tokens


class StepEngine:
    """``poll`` runs what was submitted, in one pass, and k - 1 more where turns run freely for k
    tokens.

    Positions up to ``max_context_tokens + max_draft_tokens`` can be run, the latter for proposals
    after a full context.
    """

    def __init__(self, name: str, model: Model, limits: EngineLimits) -> None:
        self.name, self.limits = name, limits
        self._max_positions = limits.max_context_tokens + limits.max_draft_tokens
        self.model = model
        self._columns = Columns(size=limits.vocab_size)
        self.caches = Caches(name, limits.kv_blocks)
        self._turns: list[Turn] = []
        self._rows_to_score = SCORED_ROWS  # left in this submission

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns, which run at the next ``poll``; ValueError when a sequence would have
        two.
        """
        ids = [turn.sequence.id for turn in [*self._turns, *turns]]
        if len(set(ids)) < len(ids):
            raise ValueError(f"at most one turn per sequence may be in flight, got sequences {ids}")
        self._turns.extend(turns)

    def poll(self, timeout_s: float) -> list[Completion]:  # noqa: ARG002 (a step engine never waits)
        """Run all queued turns to their end and return their completions; a turn that cannot be run
        completes with its own error.
        """
        turns, self._turns, self._rows_to_score = self._turns, [], SCORED_ROWS
        jobs: list[TurnJob] = []
        completions: list[Completion] = []
        for turn in turns:
            try:
                jobs.append(self._prepare(turn))
            except ValueError as error:  # noqa: PERF203 (it ends this turn alone)
                completions.append(Completion(turn.sequence.id, [], error=str(error)))
        self._run(jobs)
        return completions + [self._complete(job) for job in jobs]

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences and their queued turns."""
        gone = set(sequence_ids)
        if any(turn.sequence.id in gone for turn in self._turns):
            self._turns = [turn for turn in self._turns if turn.sequence.id not in gone]
        self.caches.forget(gone)

    def unseen(self, sequence: Sequence) -> int:
        """Return how many committed tokens have no KV here."""
        return len(sequence.tokens) - self.caches.matching(sequence)

    def available(self, sequence: Sequence, length: int) -> int:
        """Return ``length`` cut to the engine's limit and to the room left in the context and in
        the sequence's blocks.
        """
        room = min(
            self.limits.max_context_tokens, len(sequence.blocks.get(self.name, ())) * BLOCK_TOKENS
        ) - len(sequence.tokens)
        return max(0, min(length, self.limits.max_draft_tokens, room))

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """For measuring only: take the first ``tokens`` tokens as seen without running them (their
        KV is whatever the pool holds).
        """
        cache = self.caches.of(sequence)
        cache.ran, cache.agreed = sequence.tokens[:tokens], 0

    def close(self) -> None:
        """Release the model and its KV; the engine is of no use afterwards."""
        self.caches.clear()
        self._turns.clear()
        del self.model

    # -- one submission

    def _prepare(self, turn: Turn) -> TurnJob:
        """Check a turn, roll its cache back to what the turn builds on, and cut its chunk;
        ValueError names what is wrong.
        """
        sequence, end = turn.sequence, turn.end
        cache = self.caches.of(sequence)
        request = VerifyRequest.of(sequence, turn.proposal)
        if wrong := self._wrong(turn) or self._wrong_in_blocks(turn, len(cache.table)):
            raise ValueError(f"turn of sequence {sequence.id}: {wrong}")
        decides = turn.run > 0
        start = min(
            self.caches.matching_in(cache, sequence), end - decides
        )  # the last row is run again where its logits are wanted
        tokens = [*sequence.tokens[start:end], *request.tokens]
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.limits.vocab_size):
            raise ValueError(
                f"token ids of sequence {sequence.id} must lie in 0..{self.limits.vocab_size - 1}"
            )
        in_prompt = start < sequence.prompt_tokens
        prompt_rows = min(end, sequence.prompt_tokens) - start if in_prompt else 0
        if self.limits.invariant and prompt_rows == 1 and start:
            start, prompt_rows = start - 1, 2
            tokens.insert(0, sequence.tokens[start])
        cache.roll_back(start)
        parents = turn.proposal.parents if turn.proposal and not turn.proposal.is_chain else ()
        scored = self._take_rows_to_score(turn, cache, start) if turn.nodes else 0
        reads_context = in_prompt and sequence.reads_context and not turn.nodes
        context = end - start if reads_context else 0
        logits = max(scored + decides, context) + len(request.tokens)
        chunk = (
            PassChunk(tokens, start, cache.table, logits, parents, prompt_rows) if tokens else None
        )
        return TurnJob(turn, cache, request, chunk, rows_scored=scored, context_rows=context)

    def _take_rows_to_score(self, turn: Turn, cache: Cache, start: int) -> int:
        """Return how many of the last committed tokens, run from ``start`` on, are scored: those of
        steps that did without this draft. The first token has no row here.
        """
        sequence = turn.sequence
        if turn.end == start + 1:  # the only token that it runs is the first
            return 0
        first = max(start + 1, sequence.prompt_tokens, cache.find_end(sequence.tokens))
        price = 1 if sequence.sampling.greedy else DRAWN_ROWS
        rows = max(0, min(turn.end - first, self._rows_to_score // price))
        self._rows_to_score -= rows * price
        return rows

    def _wrong(self, turn: Turn) -> str | None:
        """Return what is wrong with a turn; None for one that can be run."""
        run, end, length = turn.run, turn.end, len(turn.sequence.tokens)
        proposed = len(turn.proposal.tokens) if turn.proposal else 0
        if not 0 <= end <= length or (run and (end != length or not length)):
            return (
                f"end must be the {length} tokens of the sequence (or fewer when run is 0), got "
                f"{end}"
            )
        if proposed and (run != 1 or turn.nodes):
            return f"run must be 1 and nodes 0 after a proposal, got {run} and {turn.nodes}"
        if turn.nodes and not run:
            return "run must be 1 or more where nodes are asked for, got 0"
        if not 0 <= run <= self.limits.max_run_tokens:
            return f"run must be in 0..{self.limits.max_run_tokens}, got {run}"
        return None

    def _wrong_in_blocks(self, turn: Turn, capacity_tokens: int) -> str | None:
        """Return what is wrong with the KV that a turn reads and needs; None where there is
        room.
        """
        proposed = len(turn.proposal.tokens) if turn.proposal else 0
        shared = proposed - turn.proposal.depth if turn.proposal else 0  # nodes at the same place
        needed = turn.end + proposed + max(0, turn.run - 1)
        room = min(capacity_tokens, self._max_positions + shared)
        return f"needs KV for {needed} tokens, has {room}" if needed > room else None

    def _run(self, jobs: list[TurnJob]) -> None:
        """Catch up, verify the proposals and emit a token in one pass; then one pass more for each
        further token of a free run.
        """
        running = [(job, job.chunk) for job in jobs if job.chunk]
        while running:
            self._pass(running)
            self._keep([(job, chunk) for job, chunk in running if job.path])
            going = [job for job, _ in running if job.turn.run and self._goes_on(job)]
            running = [(job, self._next_chunk(job)) for job in going]

    @staticmethod
    def _goes_on(job: TurnJob) -> bool:
        """Whether a turn runs on: a free run to its end, a draft as long as it has candidates."""
        if job.turn.nodes:
            return len(job.spine.tokens) < job.turn.run and not job.spine.is_over
        return len(job.tokens) < job.turn.run and not job.request.tokens

    def _pass(self, running: list[tuple[TurnJob, PassChunk]]) -> None:
        """Run chunks, and decide about their last rows."""
        logits = self._score(self.model.forward([chunk for _, chunk in running]), running)
        self._note_ran(running)
        deciding = [job for job, _ in running if job.turn.run]
        if deciding:
            self._decide(logits, deciding)
        if self.model.hidden_states is not None and any(job.turn.states for job, _ in running):
            self._take_hidden_states(running, self.model.hidden_states)

    @staticmethod
    def _take_hidden_states(
        running: list[tuple[TurnJob, PassChunk]],
        states: Floats,  # [tokens of the pass, taps, hidden]
    ) -> None:
        """Keep those of the text's rows and of the accepted nodes."""
        rows: list[int] = []
        counts, begin = [], 0
        for job, chunk in running:
            end = begin + len(chunk.tokens)
            first_node = end - len(job.request.tokens)
            rows += range(begin, first_node)
            rows += [first_node + node for node in job.path]
            counts.append(first_node - begin + len(job.path))
            begin = end
        parts = np.split(states[rows], np.cumsum(counts[:-1]))
        for (job, _), part in zip(running, parts, strict=True):
            job.hidden_states.append(part)

    def _note_ran(self, running: list[tuple[TurnJob, PassChunk]]) -> None:
        """Note what of the text has KV now; accepted nodes are noted where they have their
        places.
        """
        for job, chunk in running:
            proposed = len(job.request.tokens)
            job.cache.ran += chunk.tokens[:-proposed] if proposed else chunk.tokens
            job.cache.agreed = job.turn.end

    def _score(
        self,
        logits: Floats,  # [rows that want them, vocab]
        running: list[tuple[TurnJob, PassChunk]],
    ) -> Floats:
        """Score the tokens emitted without this draft from their rows of ``logits``, keep a
        prompt's, and return those that decide.
        """
        if not any(job.rows_scored or job.context_rows for job, _ in running):
            return logits
        deciding, row = [], 0
        for job, chunk in running:
            rows = slice(row, row + max(job.rows_scored, job.context_rows - (job.turn.run > 0)))
            if job.context_rows:
                job.context_logits = logits[row : row + job.context_rows].copy()
                job.context_rows = 0
            if job.rows_scored:
                first = job.turn.end - job.rows_scored
                emitted = job.turn.sequence.tokens[first : job.turn.end]
                place = replace(job.request, position=first)
                guessed = guesses(logits[rows], place, self._columns)
                job.scored = chains(guessed, emitted, self.limits.max_draft_tokens)
                job.rows_scored = 0
            row += chunk.logits
            deciding.append(logits[rows.stop : row])
        return np.concatenate(deciding)

    def _next_chunk(self, job: TurnJob) -> PassChunk:
        run = job.run
        job.request = job.request.after(run[:])
        return PassChunk(run[-1:], len(job.cache.ran), job.cache.table, 1)

    def _decide(
        self,
        logits: Floats,  # [rows, vocab]
        jobs: list[TurnJob],
    ) -> None:
        """Turn logits (for each job one row, and one for each proposed token) into tokens or
        nodes.
        """
        drafting = [job for job in jobs if job.turn.nodes]
        if drafting and len(drafting) == len(jobs):
            self._extend(logits, jobs)
            return
        if drafting:
            verifies = [not job.turn.nodes for job in jobs for _ in range(job.request.rows)]
            is_verified = np.array(verifies)
            self._extend(logits[~is_verified], drafting)
            jobs, logits = [job for job in jobs if not job.turn.nodes], logits[is_verified]
        row = 0
        verdicts = verify(logits, [job.request for job in jobs], self._columns)
        for job, verdict in zip(jobs, verdicts, strict=True):
            self._apply_verdict(job, verdict)
            if job.turn.sequence.generation_logits:
                places = [row, *(row + 1 + node for node in verdict.path)]
                job.logits.append(logits[places])
            row += job.request.rows

    def _extend(
        self,
        logits: Floats,  # [jobs, vocab]
        jobs: list[TurnJob],
    ) -> None:
        """Make nodes of the likeliest tokens after each draft's spine, from its row of
        ``logits``.
        """
        places, most = [job.request for job in jobs], max(job.turn.nodes for job in jobs)
        rows = self._candidates(logits, places, min(CANDIDATES, most))
        for job, ones in zip(jobs, rows, strict=True):
            job.spine.extend(ones)

    def _candidates(
        self,
        logits: Floats,  # [places, vocab]
        places: Seq[VerifyRequest],
        most: int,
    ) -> list[list[tuple[int, float]]]:
        return candidates(logits, places, most, self._columns)

    def _apply_verdict(self, job: TurnJob, verdict: Verdict) -> None:
        """Note the tokens that a verdict emits."""
        job.path = verdict.path
        job.tokens += [job.request.tokens[node] for node in verdict.path]
        job.tokens.append(verdict.column)
        job.log_probs += verdict.log_probs
        job.top += verdict.top

    def _keep(self, accepted: list[tuple[TurnJob, PassChunk]]) -> None:
        """Note that accepted nodes have KV, and have it where their tokens are in the text."""
        if accepted:
            self.model.keep([(chunk, job.path) for job, chunk in accepted])
        for job, _ in accepted:
            job.cache.ran += [job.request.tokens[node] for node in job.path]

    def _complete(self, job: TurnJob) -> Completion:
        turn = job.turn
        if job.error is not None:
            return Completion(turn.sequence.id, [], error=job.error)
        if turn.nodes:
            job.proposal = job.spine.proposal(self.name, turn.nodes)
            job.cache.proposed_at, job.cache.proposed = turn.end, job.proposal
        log_probs = job.log_probs if job.log_probs and turn.sequence.sampling.log_probs else None
        return Completion(
            turn.sequence.id,
            job.tokens,
            len(job.path),
            job.proposal,
            log_probs,
            job.scored,
            extras=_extras(job),
            hidden_states=self._hidden_states(job),
        )

    def _hidden_states(self, job: TurnJob) -> HiddenStates | None:
        if not job.hidden_states or job.chunk is None:
            return None
        parts = job.hidden_states
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return HiddenStates(job.chunk.start, self.model.taps, rows)


def step_limits(
    vocab_size: int,
    kv_blocks: int,
    max_context_tokens: int,
    max_draft_tokens: int,
    *,
    invariant: bool = False,
) -> EngineLimits:
    """Return the limits of an engine that runs whole steps."""
    return EngineLimits(
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        max_draft_tokens=max_draft_tokens,
        max_run_tokens=max(1, max_draft_tokens),
        kv_blocks=kv_blocks,
        tree=True,
        scores=True,
        invariant=invariant,
    )


def _extras(job: TurnJob) -> Extras | None:
    if not job.top and not job.logits and job.context_logits is None:
        return None
    extras = Extras(job.top, _in_fp32(np.concatenate(job.logits)) if job.logits else None)
    if job.context_logits is not None:
        extras.context_first = job.turn.end - len(job.context_logits)
        extras.context_logits = _in_fp32(job.context_logits)
    return extras


def _in_fp32(logits: Floats) -> npt.NDArray[np.float32]:
    """Return logits [rows, vocab] in fp32."""
    return logits.astype(np.float32, copy=False)
