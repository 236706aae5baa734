"""The model of the fake engine: a seeded Markov chain over 257 tokens.

Its logits are a function of the last ``ORDER`` tokens: four letters share the distribution,
everything else is impossible unless an option makes it likely.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from backend.request import IMPOSSIBLE, SamplingParams
from backend.sampling.randomness import exponentials, word

VOCAB_SIZE = 257
"""256 bytes and an end token, as ``backend.tokenizer.ByteTokenizer`` has them."""
_TOKENS = np.arange(VOCAB_SIZE, dtype=np.uint64)

ORDER = 8
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8).astype(np.int64)
_LOGITS = np.log([0.6, 0.25, 0.1, 0.05]) + 4.0
_UNLIKELY_LOGIT = -26.0
_UNGRAMMATICAL_LOGIT = 2 * IMPOSSIBLE

FloatArray = npt.NDArray[np.float64]


class MarkovChain:
    """A model whose distribution equals that of every other chain in the share ``agreement`` of all
    contexts.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, seed: int = 0, agreement: float = 1.0) -> None:
        self._seed = seed
        self._agreement = agreement

    def next(
        self, context: list[int], prompt_tokens: int, sampling: SamplingParams
    ) -> tuple[int, FloatArray | None]:
        """Return the token after a text and, where computed, the log-probabilities [vocab]."""
        if sampling.greedy and not (sampling.changes_logits or sampling.reads_log_probs):
            return int(self._letters(context)[0]), None
        chances, scores = self.chances(context, prompt_tokens, sampling)
        return int(chances.argmax()), scores

    def chances(
        self, context: list[int], prompt_tokens: int, sampling: SamplingParams
    ) -> tuple[FloatArray, FloatArray]:
        """Return how likely each token [vocab] is the next one, the chain's own the likeliest, and
        the log-probabilities [vocab] before top-k and top-p.

        A greedy token is the likeliest. Sampled tokens take the time E / p, E the noise of their
        place: the sooner one comes in, the likelier another engine draws it too.
        """
        scores = _log_softmax(_processed(self.logits(context), context, prompt_tokens, sampling))
        if sampling.greedy:
            return np.exp(scores), scores
        chances = _truncated(np.exp(scores), sampling.after(context[prompt_tokens:]))
        noise = exponentials(np.uint64(word(sampling.seed, len(context))) ^ _TOKENS)
        speeds: FloatArray = chances / noise
        return speeds / speeds.sum(), scores

    def logits(self, context: list[int]) -> FloatArray:
        """Return the logits [vocab] after a text, before any option."""
        logits = np.full(VOCAB_SIZE, _UNLIKELY_LOGIT)
        logits[self._letters(context)] = _LOGITS
        return logits

    def _letters(self, context: list[int]) -> npt.NDArray[np.int64]:
        recent = bytes(token % 256 for token in context[-ORDER:])
        agrees = _fraction(self._seed, recent) < self._agreement
        return _candidates(b"target" if agrees else b"%d" % self._seed, recent)


def _processed(
    logits: FloatArray, context: list[int], prompt_tokens: int, sampling: SamplingParams
) -> FloatArray:
    """Apply a request's options to the logits [vocab] after ``context``, in TensorRT-LLM's
    order.
    """
    for token, weight in sampling.bias:
        logits[token] += weight
    logits /= sampling.temperature or 1.0
    if sampling.penalised:
        seen, penalty = np.bincount(context, minlength=VOCAB_SIZE) > 0, sampling.repetition_penalty
        logits = np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
        counted = context[min(sampling.prompt_ignore_length, prompt_tokens) :]
        counts = np.bincount(np.array(counted, np.int64), minlength=VOCAB_SIZE)
        logits -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    if len(context) - prompt_tokens < sampling.min_tokens:
        logits[list(sampling.end_ids)] = IMPOSSIBLE
    logits[sampling.find_banned(context, len(context))] = IMPOSSIBLE
    if sampling.guide is not None:
        mask = sampling.guide.mask(context[prompt_tokens:])
        if mask is not None:
            logits[~mask] = _UNGRAMMATICAL_LOGIT
    return logits


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max()
    log_probs: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def _truncated(chances: FloatArray, sampling: SamplingParams) -> FloatArray:
    """Apply min-p, top-k, then top-p."""
    if not (sampling.min_p or sampling.top_k) and sampling.top_p == 1.0:
        return chances
    order = np.argsort(-chances, kind="stable")
    p: FloatArray = chances[order]
    p[p < sampling.min_p * p[0]] = 0.0
    p[sampling.top_k or VOCAB_SIZE :] = 0.0
    p /= p.sum()
    p[np.cumsum(p) - p >= sampling.top_p] = 0.0
    chances = np.zeros(VOCAB_SIZE)
    chances[order] = p / p.sum()
    return chances


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
