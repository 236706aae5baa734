"""A seeded Markov engine: no model, a settable agreement of draft and target, and a settable time.

It keeps the port's whole contract (catch-up, rollback, trees as a draft and as a target, options
and log-probabilities, block tables that must cover what it writes and still hold what it reads), so
that the loop, the messages and the Triton side are tested on it in milliseconds. Its logits are a
function of the last ``ORDER`` tokens: four letters share the law, everything else is impossible
unless an option makes it likely.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from backend.config import EngineConfig
from backend.engines.port import Completion, EngineLimits, Extras, Turn
from backend.engines.registry import Service
from backend.request import IMPOSSIBLE, SamplingParams
from backend.sampling.randomness import exponentials, word
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence

VOCAB_SIZE = 257
"""256 bytes and an end token, as ``backend.tokenizer.ByteTokenizer`` has them."""
_TOKENS = np.arange(VOCAB_SIZE, dtype=np.uint64)

ORDER = 8
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8).astype(np.int64)
_LOGITS = np.log([0.6, 0.25, 0.1, 0.05]) + 4.0
_UNLIKELY_LOGIT = -26.0
_UNGRAMMATICAL_LOGIT = 2 * IMPOSSIBLE
_FAINT = 0.02  # a candidate so much less likely than the best one is not worth a node

FloatArray = npt.NDArray[np.float64]
Top = list[list[tuple[int, float]]]


class FakeEngine:
    """A target (``agreement`` 1) or a draft whose law equals the target's in the share
    ``agreement`` of all contexts.
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
    ) -> None:
        self.name = name
        most = max_draft_tokens, max_draft_tokens
        self.limits = EngineLimits(
            VOCAB_SIZE,
            max_context_tokens,
            *most,
            kv_blocks,
            tree=True,
        )
        self._seed = seed
        self._agreement = agreement
        self._step_s = step_s
        self._queued: list[Turn] = []
        self._ran: dict[
            int, tuple[int, list[int]]
        ] = {}  # sequence id -> (verified length, tokens run beyond it)
        self._marks: dict[
            int, list[int]
        ] = {}  # sequence id -> what KV of its committed tokens looks like
        self._pool = np.zeros(
            (kv_blocks, BLOCK_TOKENS), np.int64
        )  # KV: a hash of the text (and salt) up to each position

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns."""
        self._queued += turns

    def poll(self, timeout_s: float) -> list[Completion]:
        """Complete everything queued, after the time that so many passes take."""
        del timeout_s  # a step engine never waits
        turns, self._queued = self._queued, []
        if turns and self._step_s:
            time.sleep(self._step_s * max(1, *(turn.run for turn in turns)))
        return [self._complete(turn) for turn in turns]

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences."""
        gone = set(sequence_ids)
        if any(turn.sequence.id in gone for turn in self._queued):
            self._queued = [turn for turn in self._queued if turn.sequence.id not in gone]
        for sequence_id in gone:
            self._ran.pop(sequence_id, None)
            self._marks.pop(sequence_id, None)

    def unseen(self, sequence: Sequence) -> int:
        """Return the committed tokens that this engine has not run on, nor on those of another
        sequence with the same blocks.
        """
        verified, beyond = self._ran.get(sequence.id) or (self._shared(sequence), [])
        matching = next(
            (
                i
                for i, token in enumerate(beyond)
                if sequence.tokens[verified + i : verified + i + 1] != [token]
            ),
            len(beyond),
        )
        return len(sequence.tokens) - verified - matching

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed now."""
        room = self.limits.max_context_tokens
        if self.limits.kv_blocks:
            room = min(room, len(sequence.blocks.get(self.name, ())) * BLOCK_TOKENS)
        return max(0, min(length, self.limits.max_draft_tokens, room - len(sequence.tokens)))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _complete(self, turn: Turn) -> Completion:
        sequence, nodes = turn.sequence, len(turn.proposal) if turn.proposal else 0
        if self.limits.kv_blocks:
            error = self._wrong_with_blocks(turn, turn.end + nodes + max(0, turn.run - 1))
            if error:
                return Completion(sequence.id, [], error=f"{self.name}: {error}")
        if turn.nodes:
            spine, proposal = self._propose(turn)
            self._keep(turn, spine[:-1])
            return Completion(sequence.id, [], proposal=proposal)
        start = min(turn.end - (turn.run > 0), len(sequence.tokens) - self.unseen(sequence))
        tokens, accepted, log_probs, top = self._run(turn)
        self._keep(turn, tokens[:-1])
        reported = log_probs if sequence.sampling.log_probs else None
        extras = self._extras(turn, start, tokens, top)
        return Completion(sequence.id, tokens, accepted, log_probs=reported, extras=extras)

    def _keep(self, turn: Turn, beyond: list[int]) -> None:
        """Note what a turn has run: the text, and tokens ``beyond`` it that may become text."""
        if self.limits.kv_blocks:
            self._write(turn, beyond)
        self._ran[turn.sequence.id] = (turn.end, beyond)

    def _extras(self, turn: Turn, start: int, tokens: list[int], top: Top) -> Extras | None:
        """Return what a sequence asks for beside its tokens; the turn has run it from token
        ``start`` on.
        """
        sequence, text = turn.sequence, [*turn.sequence.tokens, *tokens]
        extras = Extras(top, context_first=start)
        if sequence.generation_logits and tokens:
            end = len(sequence.tokens)
            extras.logits = np.array(
                [self._logits(text[: end + i]) for i in range(len(tokens))], np.float32
            )
        if sequence.reads_context and start < sequence.prompt_tokens and start < turn.end:
            extras.context_logits = np.array(
                [self._logits(text[: at + 1]) for at in range(start, turn.end)], np.float32
            )
        return (
            extras
            if top or extras.logits is not None or extras.context_logits is not None
            else None
        )

    def _wrong_with_blocks(self, turn: Turn, written_tokens: int) -> str | None:
        """Return what is wrong with a turn's block table, if anything: too short, or not the KV of
        its text.
        """
        sequence, blocks = turn.sequence, turn.sequence.blocks.get(self.name, [])
        if len(blocks) * BLOCK_TOKENS < written_tokens:
            return (
                f"the block table of sequence {sequence.id} is too short for {written_tokens} "
                f"tokens"
            )
        seen = min(turn.end, len(sequence.tokens) - self.unseen(sequence))
        if (self._pool[blocks].ravel()[:seen] != self._marks_of(sequence, seen)).any():
            return f"the KV of sequence {sequence.id} was overwritten"
        return None

    def _write(self, turn: Turn, beyond: list[int]) -> None:
        """Write the KV of the turn's text, of the proposal's nodes in their order and, over them,
        of the tokens ``beyond`` the text: what was accepted moves to its place.
        """
        sequence, blocks = turn.sequence, turn.sequence.blocks[self.name]
        marks = list(self._marks_of(sequence, turn.end))
        pool = self._pool[blocks].ravel()
        start = min(turn.end, len(sequence.tokens) - self.unseen(sequence))
        if turn.proposal is not None:
            nodes: list[int] = []
            for token, parent in zip(turn.proposal.tokens, turn.proposal.parents, strict=True):
                nodes.append(_mark(marks[-1] if parent == ROOT else nodes[parent], token))
            pool[turn.end : turn.end + len(nodes)] = nodes
        for token in beyond:
            marks.append(_mark(marks[-1], token))
        pool[start : len(marks)] = marks[start:]
        self._pool[blocks] = pool.reshape(-1, BLOCK_TOKENS)

    def _marks_of(self, sequence: Sequence, end: int) -> list[int]:
        """Return the marks of the first ``end`` committed tokens; only those of new ones are
        made.
        """
        marks = self._marks.setdefault(sequence.id, [])
        for token in sequence.tokens[len(marks) : end]:
            marks.append(_mark(marks[-1] if marks else sequence.salt, token))
        return marks[:end]

    def _shared(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a sequence that has not run here have KV in its blocks
        already.
        """
        blocks = (
            sequence.blocks.get(self.name, ())[: len(sequence.keys)]
            if self.limits.kv_blocks
            else ()
        )
        marks = self._marks_of(sequence, len(blocks) * BLOCK_TOKENS) if blocks else []
        alike = (
            self._pool[b].tolist() == marks[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            for i, b in enumerate(blocks)
        )
        return BLOCK_TOKENS * next((i for i, same in enumerate(alike) if not same), len(blocks))

    def _run(self, turn: Turn) -> tuple[list[int], int, list[float], Top]:
        """Return (tokens, how many were accepted, their log-probabilities, the likeliest tokens).

        The path is followed as long as it has what the target draws; ``run`` tokens come behind it.
        """
        sequence, proposal = turn.sequence, turn.proposal
        nodes = zip(proposal.parents, proposal.tokens, strict=True) if proposal else ()
        children = {edge: node for node, edge in enumerate(nodes)}
        tokens: list[int] = []
        log_probs: list[float] = []
        top: Top = []
        at: int | None = ROOT
        accepted, most = 0, sequence.sampling.top_log_probs or 0
        while len(tokens) < accepted + turn.run:
            token, scores = self._next([*sequence.tokens, *tokens], sequence)
            tokens.append(token)
            at = None if at is None else children.get((at, token))
            accepted += at is not None
            if scores is not None:
                log_probs.append(float(scores[token]))
                if most:
                    best = np.argsort(-scores, kind="stable")[:most]
                    top.append([(int(token), float(scores[token])) for token in best])
        return tokens, accepted, log_probs, top

    def _propose(self, turn: Turn) -> tuple[list[int], Proposal]:
        """Return the tokens that were run along the spine, and the tree of the best nodes."""
        sequence = turn.sequence
        spine: list[int] = []
        nodes: list[tuple[int, int, float]] = []
        at, held = ROOT, 1.0
        for _ in range(turn.run):
            chances, _ = self._chances([*sequence.tokens, *spine], sequence)
            best = np.argsort(-chances, kind="stable")[: turn.nodes].tolist()
            least = _FAINT * float(chances[best[0]])
            found = [(t, at, held * float(chances[t])) for t in best if chances[t] >= least]
            at, held = len(nodes), found[0][2]
            spine.append(best[0])
            nodes += found
        return spine, Proposal.best(self.name, nodes, turn.nodes)

    def _next(self, context: list[int], sequence: Sequence) -> tuple[int, FloatArray | None]:
        """Return the token behind a text and, where computed, the log-probabilities [vocab]."""
        sampling = sequence.sampling
        if sampling.greedy and not (sampling.changes_logits or sampling.reads_log_probs):
            return int(self._letters(context)[0]), None
        chances, scores = self._chances(context, sequence)
        return int(chances.argmax()), scores

    def _chances(self, context: list[int], sequence: Sequence) -> tuple[FloatArray, FloatArray]:
        """Return how likely each token [vocab] is the next one, the engine's own the likeliest, and
        the log-probabilities [vocab] before top-k and top-p.

        A greedy token is the likeliest by the law. Sampled tokens take the time E / p, E the noise
        of their place: the sooner one comes in, the likelier another engine draws it too.
        """
        sampling = sequence.sampling
        scores = _log_softmax(_processed(self._logits(context), context, sequence))
        if sampling.greedy:
            return np.exp(scores), scores
        law = _truncated(np.exp(scores), sampling.behind(context[sequence.prompt_tokens :]))
        noise = exponentials(np.uint64(word(sampling.seed, len(context))) ^ _TOKENS)
        speeds: FloatArray = law / noise
        return speeds / speeds.sum(), scores

    def _logits(self, context: list[int]) -> FloatArray:
        """Return the logits [vocab] behind a text, before any option."""
        logits = np.full(VOCAB_SIZE, _UNLIKELY_LOGIT)
        logits[self._letters(context)] = _LOGITS
        return logits

    def _letters(self, context: list[int]) -> npt.NDArray[np.int64]:
        recent = bytes(token % 256 for token in context[-ORDER:])
        agrees = _fraction(self._seed, recent) < self._agreement
        return _candidates(b"target" if agrees else b"%d" % self._seed, recent)


def _mark(before: int | str, token: int) -> int:
    return hash((before, token))


def _processed(logits: FloatArray, context: list[int], sequence: Sequence) -> FloatArray:
    """Apply a request's options to the logits [vocab] behind ``context``, in TensorRT-LLM's
    order.
    """
    sampling = sequence.sampling
    for token, weight in sampling.bias:
        logits[token] += weight
    logits /= sampling.temperature or 1.0
    if sampling.penalised:
        counts = np.bincount(context, minlength=VOCAB_SIZE)
        seen, penalty = counts > 0, sampling.repetition_penalty
        logits = np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
        logits -= sampling.presence_penalty * seen + sampling.frequency_penalty * counts
    if len(context) - sequence.prompt_tokens < sampling.min_tokens:
        logits[list(sampling.end_ids)] = IMPOSSIBLE
    logits[sampling.banned(context, len(context))] = IMPOSSIBLE
    if sampling.guide is not None:
        mask = sampling.guide.mask(context[sequence.prompt_tokens :])
        if mask is not None:
            logits[~mask] = _UNGRAMMATICAL_LOGIT
    return logits


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max()
    log_probs: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def _truncated(law: FloatArray, sampling: SamplingParams) -> FloatArray:
    """Apply min-p, top-k, then top-p."""
    if not (sampling.min_p or sampling.top_k) and sampling.top_p == 1.0:
        return law
    order = np.argsort(-law, kind="stable")
    p: FloatArray = law[order]
    p[p < sampling.min_p * p[0]] = 0.0
    p[sampling.top_k or VOCAB_SIZE :] = 0.0
    p /= p.sum()
    p[np.cumsum(p) - p >= sampling.top_p] = 0.0
    law = np.zeros(VOCAB_SIZE)
    law[order] = p / p.sum()
    return law


def _candidates(salt: bytes, recent: bytes) -> npt.NDArray[np.int64]:
    digest = hashlib.blake2b(recent, key=salt, digest_size=8).digest()
    start, stride = digest[0] % 27, 1 + digest[1] % 8
    letters: npt.NDArray[np.int64] = _LETTERS[(start + stride * np.arange(len(_LOGITS))) % 27]
    return letters


def _fraction(seed: int, recent: bytes) -> float:
    return (
        int.from_bytes(
            hashlib.blake2b(recent, key=b"agree%d" % seed, digest_size=8).digest(), "big"
        )
        / 2.0**64
    )


def make(engine: EngineConfig, service: Service) -> FakeEngine:
    """Make an engine of this kind (``backend.engines.registry``)."""
    agreement = 1.0 if engine is service.config.target else engine.agreement
    return FakeEngine(
        engine.name,
        seed=engine.seed,
        agreement=agreement,
        step_s=engine.step_s,
        **service.sizes,
    )
