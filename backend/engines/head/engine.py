"""Drafts by a head: a token costs it a fraction of what the smallest Llama takes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from backend.engines.checkpoint import Matrix
from backend.engines.head.folder import CONTEXT_ROWS, HeadConfig
from backend.engines.port import EngineLimits, HiddenStates, Turn
from backend.engines.proposer import UNLIMITED, Proposer
from backend.engines.spine import CANDIDATES, Spine
from backend.sampling.distributions import Floats
from backend.sampling.draw import IntArray
from backend.sampling.processing import Columns
from backend.sampling.verification import VerifyRequest, candidates
from backend.sequence import Proposal, Sequence


class Head(Protocol):
    """A network with the target's rows of its static tokens, where it runs. The next call may
    overwrite what it returns.
    """

    def begin(
        self,
        hidden: Floats,  # [n, layers, hidden]
    ) -> Floats:
        """Return states [n, hidden] of the target's."""
        ...

    def step(
        self,
        state: Floats,  # [n, hidden]
        token: Floats,  # [n, hidden]
    ) -> tuple[Floats, Floats, Floats]:
        """Return the states after tokens of these embeddings, the vectors [n, hidden] that the
        target's head multiplies, and their products with the static rows [n, rows].
        """
        ...


@dataclass(slots=True)
class _TextColumns:
    """Columns that a sequence's own text adds to the head's, of the first ``CONTEXT_ROWS`` tokens
    that have no static row.
    """

    columns: Columns
    rows: Floats  # [n, hidden]
    read: int = 0  # tokens that were looked at


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The target's states where it drew a sequence's token number ``tokens``, counted from 1."""

    tokens: int
    row: Floats  # [layers, hidden]


@dataclass(slots=True)
class _HeadTurn:
    turn: Turn
    text: _TextColumns
    place: VerifyRequest
    spine: Spine = field(default_factory=Spine)

    @property
    def goes_on(self) -> bool:
        return len(self.spine.tokens) < self.turn.run and not self.spine.is_over


class HeadEngine(Proposer):
    """A draft without KV: it goes on from the target's state at the token before the last."""

    def __init__(
        self,
        name: str,
        config: HeadConfig,
        head: Head,
        token_ids: IntArray,  # [rows]
        embedding: Matrix,  # [vocab, hidden]
        lm_head: Matrix,  # [vocab, hidden]
        *,
        max_draft_tokens: int,
    ) -> None:
        """``token_ids`` are the tokens of the static rows of ``head``; ``embedding`` and
        ``lm_head`` are the target's.
        """
        self._config, self.head = config, head
        most = max_draft_tokens, max_draft_tokens
        super().__init__(name, EngineLimits(config.vocab_size, UNLIMITED, *most, kv_blocks=0))
        self._embedding, self._lm_head = embedding, lm_head
        self.columns = Columns(token_ids)
        self._texts: dict[int, _TextColumns] = {}
        self.states: dict[int, _State] = {}

    def absorb(self, states: Seq[tuple[Sequence, HiddenStates]]) -> None:
        """Keep the last of each sequence's states (``port.ReadsTarget``), as they are: most are
        never drafted from.
        """
        layers = self._config.layers
        for sequence, one in states:
            self.states[sequence.id] = _State(one.end + 1, one.of(layers)[-1])

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """For measuring only: take the target as having given its state, and the text as read."""
        del tokens
        state = np.zeros((len(self._config.layers), self._config.hidden_size), np.float32)
        self.states[sequence.id] = _State(len(sequence.tokens), state)
        self._text(sequence)

    def close(self) -> None:
        """Forget everything; the engine is of no use afterwards."""
        super().close()
        self._texts.clear()
        self.states.clear()
        del self._embedding, self._lm_head, self.head

    def _propose(self, turns: Seq[Turn]) -> Iterable[Proposal | None]:
        jobs = [
            _HeadTurn(turn, self._text(turn.sequence), VerifyRequest.of(turn.sequence, None))
            for turn in turns
        ]
        self._run(jobs)
        return [job.spine.proposal(self.name, job.turn.nodes) for job in jobs]

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._texts.pop(sequence_id, None)
            self.states.pop(sequence_id, None)

    def _missing(self, sequence: Sequence) -> str:
        state, tokens = self.states.get(sequence.id), len(sequence.tokens)
        if state is None or state.tokens != tokens:
            return f"the target has given no state of its {tokens} tokens"
        return ""

    def _text(self, sequence: Sequence) -> _TextColumns:
        """Return a sequence's columns, with those of the tokens that are new in its text."""
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = _TextColumns(self.columns, self._lm_head[[]])
        new = dict.fromkeys(t for t in sequence.tokens[text.read :] if t not in text.columns)
        text.read = len(sequence.tokens)
        if new and len(text.rows) < CONTEXT_ROWS:
            tokens = list(new)[: CONTEXT_ROWS - len(text.rows)]
            text.columns = text.columns.more(tokens)
            text.rows = np.concatenate([text.rows, self._lm_head[tokens]])
        return text

    def _run(self, jobs: list[_HeadTurn]) -> None:
        """Grow every job's spine, one pass for each of its places."""
        state = self.head.begin(np.stack([self.states[job.turn.sequence.id].row for job in jobs]))
        running = jobs
        while running:
            token = self._embedding[[job.place.before_last for job in running]]
            state, vectors, static = self.head.step(state, token)
            self._extend(running, vectors, static)
            going = [place for place, job in enumerate(running) if job.goes_on]
            if len(going) < len(running):
                state = state[going]
            running = [running[place] for place in going]

    def _extend(self, jobs: list[_HeadTurn], vectors: Floats, static: Floats) -> None:
        """Extend each spine by the candidates after its place, of ``vectors`` [jobs, hidden] and
        their products with the static rows [jobs, rows].
        """
        counts = [len(job.text.rows) for job in jobs]
        if any(counts):
            rows = [
                candidates(self._with_own(static, vectors, row, job), [job.place], most, columns)[0]
                for row, job in enumerate(jobs)
                for most, columns in [(min(CANDIDATES, job.turn.nodes), job.text.columns)]
            ]
        else:
            most = min(CANDIDATES, max(job.turn.nodes for job in jobs))
            rows = candidates(static, [job.place for job in jobs], most, self.columns)
        for job, ones in zip(jobs, rows, strict=True):
            columns = job.text.columns
            job.spine.extend((columns.token(column), p) for column, p in ones)
            job.place = job.place.after([*job.spine.tokens])

    @staticmethod
    def _with_own(static: Floats, vectors: Floats, row: int, job: _HeadTurn) -> Floats:
        """Return the logits [1, columns] of a row, those of its own text's tokens after."""
        if not len(job.text.rows):
            return static[row : row + 1]
        # Not by BLAS, which would wake its threads.
        added = np.einsum("rh,h->r", job.text.rows, vectors[row])
        logits: Floats = np.concatenate([static[row], added])[None]
        return logits
