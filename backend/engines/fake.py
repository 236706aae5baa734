"""A seeded Markov engine: no model, a settable agreement between draft and target, and a settable time per pass.

It keeps the port's whole contract (catch-up, rollback, exact rejection sampling, plan-invariant sampling, options and log-probabilities,
block tables that must cover what it writes and still hold what it reads), so that the loop, the wire and the Triton side are tested on it
in milliseconds. Its logits are a function of the last ``ORDER`` tokens: four letters share the law, everything else is impossible unless an
option makes it likely.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from backend.ports import BLOCK_TOKENS, Completion, EngineLimits, Extras, Proposal, Sequence, Turn
from backend.request import SamplingParams

VOCAB_SIZE = 257
"""256 bytes and an end token, as ``backend.tokenizer.ByteTokenizer`` has them."""

ORDER = 8
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8).astype(np.int64)
_LOGITS = np.log([0.6, 0.25, 0.1, 0.05]) + 4.0
_UNLIKELY_LOGIT = -26.0
_IMPOSSIBLE_LOGIT = -1e30  # finite: a row in which everything is banned still has a law
_UNGRAMMATICAL_LOGIT = -2e30
_DRAFT, _ACCEPT, _SAMPLE, _COUPLED = range(4)

FloatArray = npt.NDArray[np.float64]


class FakeEngine:
    """A target (``agreement`` 1) or a draft whose law equals the target's in the share ``agreement`` of all contexts."""

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
        self.limits = EngineLimits(VOCAB_SIZE, max_context_tokens, max_draft_tokens, max_draft_tokens, kv_blocks, overlaps=True)
        self._seed = seed
        self._agreement = agreement
        self._step_s = step_s
        self._queued: list[Turn] = []
        self._ran: dict[int, tuple[int, list[int]]] = {}  # sequence id -> (verified length, tokens run beyond it)
        self._marks: dict[int, list[int]] = {}  # sequence id -> what KV of its committed tokens looks like
        self._pool = np.zeros((kv_blocks, BLOCK_TOKENS), np.int64)  # KV: a hash of the text (and salt) up to each position

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
        """Return the committed tokens that this engine has not run on, nor on those of another sequence with the same blocks."""
        verified, beyond = self._ran.get(sequence.id) or (self._shared(sequence), [])
        matching = next((i for i, token in enumerate(beyond) if sequence.tokens[verified + i : verified + i + 1] != [token]), len(beyond))
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
        sequence, proposed = turn.sequence, turn.proposal.tokens if turn.proposal else []
        error = self._wrong_with_blocks(turn, turn.end + len(proposed) + max(0, turn.run - 1)) if self.limits.kv_blocks else None
        if error:
            return Completion(sequence.id, [], error=f"{self.name}: {error}")
        start = min(turn.end - (turn.run > 0), len(sequence.tokens) - self.unseen(sequence))
        tokens, accepted, laws, log_probs, top = self._run(turn)
        if self.limits.kv_blocks:
            self._write(turn, proposed or tokens[:-1])
        self._ran[sequence.id] = (turn.end, tokens[:-1])
        point_mass = sequence.sampling.greedy or sequence.sampling.coupled
        probs = np.array(laws) if turn.keep_probs and not point_mass else None
        told = log_probs if sequence.sampling.log_probs else None
        return Completion(
            sequence.id, tokens, accepted, probs, told, extras=None if turn.keep_probs else self._extras(turn, start, tokens, top)
        )

    def _extras(self, turn: Turn, start: int, tokens: list[int], top: list[list[tuple[int, float]]]) -> Extras | None:
        """Return what a sequence asks for beside its tokens; the turn has run it from token ``start`` on."""
        sequence, text = turn.sequence, [*turn.sequence.tokens, *tokens]
        extras = Extras(top, context_first=start)
        if sequence.generation_logits and tokens:
            end = len(sequence.tokens)
            extras.logits = np.array([self._logits(text[: end + i]) for i in range(len(tokens))], np.float32)
        if sequence.reads_context and start < sequence.prompt_tokens and start < turn.end:
            extras.context_logits = np.array([self._logits(text[: at + 1]) for at in range(start, turn.end)], np.float32)
        return extras if top or extras.logits is not None or extras.context_logits is not None else None

    def _wrong_with_blocks(self, turn: Turn, written_tokens: int) -> str | None:
        """Return what is wrong with a turn's block table, if anything: too short, or not the KV of its text."""
        sequence, blocks = turn.sequence, turn.sequence.blocks.get(self.name, [])
        if len(blocks) * BLOCK_TOKENS < written_tokens:
            return f"the block table of sequence {sequence.id} is too short for {written_tokens} tokens"
        seen = min(turn.end, len(sequence.tokens) - self.unseen(sequence))
        if (self._pool[blocks].ravel()[:seen] != self._marks_of(sequence, seen)).any():
            return f"the KV of sequence {sequence.id} was overwritten"
        return None

    def _write(self, turn: Turn, beyond: list[int]) -> None:
        """Write the KV of the turn's text and of the tokens run ``beyond`` it, which may or may not become text."""
        sequence, blocks = turn.sequence, turn.sequence.blocks[self.name]
        marks = list(self._marks_of(sequence, turn.end))
        for token in beyond:
            marks.append(_mark(marks[-1], token))
        start = min(turn.end, len(sequence.tokens) - self.unseen(sequence))
        pool = self._pool[blocks].ravel()
        pool[start : len(marks)] = marks[start:]
        self._pool[blocks] = pool.reshape(-1, BLOCK_TOKENS)

    def _marks_of(self, sequence: Sequence, end: int) -> list[int]:
        """Return the marks of the first ``end`` committed tokens; only those of new ones are made."""
        marks = self._marks.setdefault(sequence.id, [])
        for token in sequence.tokens[len(marks) : end]:
            marks.append(_mark(marks[-1] if marks else sequence.salt, token))
        return marks[:end]

    def _shared(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a sequence that has not run here have KV in its blocks already."""
        blocks = sequence.blocks.get(self.name, ())[: len(sequence.keys)] if self.limits.kv_blocks else ()
        marks = self._marks_of(sequence, len(blocks) * BLOCK_TOKENS) if blocks else []
        alike = (self._pool[b].tolist() == marks[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS] for i, b in enumerate(blocks))
        return BLOCK_TOKENS * next((i for i, same in enumerate(alike) if not same), len(blocks))

    def _run(self, turn: Turn) -> tuple[list[int], int, list[FloatArray], list[float], list[list[tuple[int, float]]]]:
        """Return (tokens, how many were accepted, the laws of the freely run ones, every token's log-probability, the likeliest tokens).

        Verification ends with the first rejection, whose place a draw from the residual law takes.
        """
        sequence, proposed = turn.sequence, turn.proposal.tokens if turn.proposal else []
        tokens: list[int] = []
        laws: list[FloatArray] = []
        log_probs: list[float] = []
        top: list[list[tuple[int, float]]] = []
        accepted, most = 0, sequence.sampling.top_log_probs or 0
        while accepted == len(tokens) < len(proposed) or len(tokens) < accepted + turn.run:
            law, scores = self._law([*sequence.tokens, *tokens], sequence)
            if turn.proposal is not None and accepted == len(tokens) < len(proposed):
                token, kept = _verified(law, turn.proposal, len(tokens), sequence)
                accepted += kept
            else:
                token = _draw(law, sequence, len(tokens), _DRAFT if turn.keep_probs else _SAMPLE)
                laws.append(law)
            tokens.append(token)
            if scores is not None:
                log_probs.append(float(scores[token]))
                if most:
                    top.append([(int(best), float(scores[best])) for best in np.argsort(-scores, kind="stable")[:most]])
        return tokens, accepted, laws, log_probs, top

    def _law(self, context: list[int], sequence: Sequence) -> tuple[FloatArray, FloatArray | None]:
        """Return the law of the next token [vocab] and, where options or log-probabilities need them, the log-probabilities [vocab].

        The law of a greedy or plan-invariant request is a point mass, so that one rule verifies all.
        """
        sampling = sequence.sampling
        if sampling.greedy and not (sampling.changes_logits or sampling.reads_log_probs):
            return _point_mass(int(self._letters(context)[0])), None
        scores = _log_softmax(_processed(self._logits(context), context, sequence))
        if sampling.greedy:
            return _point_mass(int(scores.argmax())), scores
        law = _truncated(np.exp(scores), sampling.behind(context[sequence.prompt_tokens :]))
        if sampling.coupled:  # least of E / p, with exponential noise E of the token's position alone
            noise = np.random.default_rng((sampling.seed, len(context), _COUPLED)).standard_exponential(VOCAB_SIZE)
            law = _point_mass(int((law / noise).argmax()))
        return law, scores

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
    """Apply a request's options to the logits [vocab] behind ``context``, in TensorRT-LLM's order."""
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
        logits[list(sampling.end_ids)] = _IMPOSSIBLE_LOGIT
    logits[sampling.banned(context, len(context))] = _IMPOSSIBLE_LOGIT
    for mask in sampling.guide.masks(context[sequence.prompt_tokens :], ()) if sampling.guide else ():
        logits[~mask] = _UNGRAMMATICAL_LOGIT
    return logits


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max()
    log_probs: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def _truncated(law: FloatArray, sampling: SamplingParams) -> FloatArray:
    """Apply top-k, then top-p."""
    if not sampling.top_k and sampling.top_p == 1.0:
        return law
    order = np.argsort(-law, kind="stable")
    p: FloatArray = law[order]
    p[sampling.top_k or VOCAB_SIZE :] = 0.0
    p /= p.sum()
    p[np.cumsum(p) - p >= sampling.top_p] = 0.0
    law = np.zeros(VOCAB_SIZE)
    law[order] = p / p.sum()
    return law


def _verified(law: FloatArray, proposal: Proposal, j: int, sequence: Sequence) -> tuple[int, bool]:
    """Return (token, whether it is the proposed one) of the chain rule at proposed position ``j``."""
    token = proposal.tokens[j]
    q = _point_mass(token) if proposal.probs is None else proposal.probs[j]
    if _uniform(sequence, j, _ACCEPT) * q[token] < law[token]:
        return token, True
    residual = np.maximum(law - q, 0.0)
    return _draw(residual if residual.any() else law, sequence, j, _SAMPLE), False


def _candidates(salt: bytes, recent: bytes) -> npt.NDArray[np.int64]:
    digest = hashlib.blake2b(recent, key=salt, digest_size=8).digest()
    start, stride = digest[0] % 27, 1 + digest[1] % 8
    letters: npt.NDArray[np.int64] = _LETTERS[(start + stride * np.arange(len(_LOGITS))) % 27]
    return letters


def _fraction(seed: int, recent: bytes) -> float:
    return int.from_bytes(hashlib.blake2b(recent, key=b"agree%d" % seed, digest_size=8).digest(), "big") / 2.0**64


def _point_mass(token: int) -> FloatArray:
    law = np.zeros(VOCAB_SIZE)
    law[token] = 1.0
    return law


def _uniform(sequence: Sequence, offset: int, purpose: int) -> float:
    key = (sequence.sampling.seed, len(sequence.tokens) + offset, purpose, sequence.attempt)
    return float(np.random.default_rng(key).random())


def _draw(law: FloatArray, sequence: Sequence, offset: int, purpose: int) -> int:
    if law.max() == 1.0:
        return int(law.argmax())
    cumulative = np.cumsum(law)
    return int(np.searchsorted(cumulative, _uniform(sequence, offset, purpose) * cumulative[-1], side="right"))
