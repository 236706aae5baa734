"""A seeded Markov engine: no model, a settable agreement between draft and target, and a settable time per pass.

It keeps the port's whole contract (catch-up, rollback, exact rejection sampling, block tables that must cover what it writes), so that the
loop, the wire and the Triton side are tested on it in milliseconds. Its text is a function of the last ``ORDER`` tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from backend.ports import BLOCK_TOKENS, Completion, EngineLimits, Proposal, Sequence, Turn
from backend.request import SamplingParams

VOCAB_SIZE = 257
"""256 bytes and an end token, as ``backend.tokenizer.ByteTokenizer`` has them."""

ORDER = 8
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8).astype(np.int64)
_LAW = np.array([0.6, 0.25, 0.1, 0.05])
_DRAFT, _ACCEPT, _SAMPLE = range(3)

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
        self.limits = EngineLimits(VOCAB_SIZE, max_context_tokens, max_draft_tokens, max_draft_tokens, kv_blocks)
        self._seed = seed
        self._agreement = agreement
        self._step_s = step_s
        self._queued: list[Turn] = []
        self._ran: dict[int, tuple[int, list[int]]] = {}  # sequence id -> (verified length, tokens run beyond it)

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
        self._queued = [turn for turn in self._queued if turn.sequence.id not in gone]
        for sequence_id in gone:
            self._ran.pop(sequence_id, None)

    def unseen(self, sequence: Sequence) -> int:
        """Return the committed tokens that this engine has not run on."""
        verified, beyond = self._ran.get(sequence.id, (0, []))
        matching = next((i for i, token in enumerate(beyond) if sequence.tokens[verified + i : verified + i + 1] != [token]), len(beyond))
        return len(sequence.tokens) - verified - matching

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed now."""
        return max(0, min(length, self.limits.max_draft_tokens, self.limits.max_context_tokens - len(sequence.tokens)))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _complete(self, turn: Turn) -> Completion:
        sequence, proposal = turn.sequence, turn.proposal
        written = turn.end + (len(proposal.tokens) if proposal else 0) + max(0, turn.run - 1)
        if self.limits.kv_blocks and len(sequence.blocks.get(self.name, ())) * BLOCK_TOKENS < written:
            message = f"{self.name}: the block table of sequence {sequence.id} is too short for {written} tokens"
            return Completion(sequence.id, [], error=message)
        accepted, tokens = self._verify(sequence, proposal) if proposal else (0, [])
        laws: list[FloatArray] = []
        while turn.run and len(tokens) < accepted + turn.run:
            law = self._law([*sequence.tokens, *tokens], sequence.sampling)
            tokens.append(_draw(law, sequence, len(tokens), _DRAFT if turn.keep_probs else _SAMPLE))
            laws.append(law)
        self._ran[sequence.id] = (turn.end, tokens[:-1])
        keep = turn.keep_probs and not sequence.sampling.greedy
        return Completion(sequence.id, tokens, accepted, np.array(laws) if keep else None)

    def _verify(self, sequence: Sequence, proposal: Proposal) -> tuple[int, list[int]]:
        """Return (accepted, tokens) of the chain rule; after a rejection the tokens end with the draw from the residual law."""
        tokens: list[int] = []
        for j, token in enumerate(proposal.tokens):
            p = self._law([*sequence.tokens, *tokens], sequence.sampling)
            q = _point_mass(token) if proposal.probs is None else proposal.probs[j]
            if _uniform(sequence, j, _ACCEPT) * q[token] < p[token]:
                tokens.append(token)
                continue
            residual = np.maximum(p - q, 0.0)
            return j, [*tokens, _draw(residual / residual.sum(), sequence, j, _SAMPLE)]
        return len(tokens), tokens

    def _law(self, context: Seq[int], sampling: SamplingParams) -> FloatArray:
        """Return the law of the next token [vocab]; a greedy request's is a point mass, so that one rule verifies both."""
        recent = bytes(token % 256 for token in context[-ORDER:])
        letters = _candidates(b"target", recent)
        if _fraction(self._seed, recent) >= self._agreement:
            letters = _candidates(b"%d" % self._seed, recent)
        if sampling.greedy:
            return _point_mass(int(letters[0]))
        law = np.zeros(VOCAB_SIZE)
        law[letters] = _processed(_LAW, sampling)
        return law


def _processed(law: FloatArray, sampling: SamplingParams) -> FloatArray:
    """Apply temperature, top-k, then top-p to a descending law."""
    p: FloatArray = law ** (1.0 / sampling.temperature)
    p /= p.sum()
    if sampling.top_k:
        p[sampling.top_k :] = 0.0
    p /= p.sum()
    p[np.cumsum(p) - p >= sampling.top_p] = 0.0
    p /= p.sum()
    return p


def _candidates(salt: bytes, recent: bytes) -> npt.NDArray[np.int64]:
    digest = hashlib.blake2b(recent, key=salt, digest_size=8).digest()
    start, stride = digest[0] % 27, 1 + digest[1] % 8
    letters: npt.NDArray[np.int64] = _LETTERS[(start + stride * np.arange(len(_LAW))) % 27]
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
    return int(np.searchsorted(np.cumsum(law), _uniform(sequence, offset, purpose) * law.sum(), side="right"))
