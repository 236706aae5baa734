"""The decoder of the fake executor: what a request's options make of logits, sampling, and the
verification of draft tokens.

By the C++ sources: the target's own token is drawn at every place; without draft logits a draft
token is accepted when it is that very token, and where it is not *another* token is drawn (so that
sampling without draft logits does not keep the distribution); with draft logits it is accepted when
p(x) > u q(x), q their softmax as they are, else the token is drawn from (p - q)+.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tests.contract.fake_executor_types import FinishReason, Request

Forward = Callable[[Sequence[int]], np.ndarray]
BANNED = -1e38


class Decoder:
    """One request from its prompt to its end; ``rows`` are the raw logits of every place,
    ``output`` what it has emitted.
    """

    dtype = torch.float32

    def __init__(self, request: Request, forward: Forward, vocab_size: int) -> None:
        self._request, self._forward, self._vocab_size = request, forward, vocab_size
        self._sampling = request.sampling_config
        self._rng = np.random.default_rng(self._sampling.seed or 0)  # no seed is seed 0
        self.tokens = list(request.input_token_ids)
        self.rows: list[np.ndarray] = []
        draft = request.external_draft_tokens_config
        self.draft_tokens = list(draft.tokens) if draft else []  # the scheduler may discard some
        self.verified = False
        self._ended = False
        assert not request.stop_words, "stop words are not faked"
        assert self._sampling.min_tokens is None, "a least length is not faked"

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self._request.input_token_ids) :]

    def finish_reason(self) -> FinishReason:
        if self._ended:
            return FinishReason.END_ID
        return (
            FinishReason.LENGTH
            if len(self.output) >= self._request.max_tokens
            else FinishReason.NOT_FINISHED
        )

    def step(self) -> list[int]:
        """Run one iteration and return its tokens: one, or what a verification came to."""
        draft, before = self._request.external_draft_tokens_config, len(self.tokens)
        if self.draft_tokens and not self.verified:
            self.verified = True
            self._verify(self.draft_tokens, draft.logits, draft.acceptance_threshold)
        else:
            self._append(self._draw(self._probs()))
        del self.rows[len(self.output) :]  # none after the last token, and none for an end token
        return self.tokens[before:]

    def _verify(self, proposed: list[int], logits, threshold: float | None) -> None:
        draft_probs = (
            None
            if logits is None
            else _softmax(np.asarray(logits, np.float64)[:, : self._vocab_size])
        )
        self.rows += [
            self._forward([*self.tokens, *proposed[:row]]) for row in range(len(proposed) + 1)
        ]  # all places, in one pass
        for row, token in enumerate(proposed):
            probs = self._probs(keep=False)
            own = self._draw(probs)
            if draft_probs is None:
                accepted, rest = own == token, probs
            else:
                number = self._rng.random() if threshold is None else threshold
                accepted = probs[token] > number * draft_probs[row, token]
                rest = np.maximum(probs - draft_probs[row], 0.0)
            if not accepted:
                self._append(self._draw(rest))
                return
            self._append(token)
            if self._ended or len(self.output) >= self._request.max_tokens:
                return
        self._append(self._draw(self._probs(keep=False)))

    def _append(self, token: int) -> None:
        if token == self._request.end_id:
            self._ended = True  # an end token is not part of the output
        else:
            self.tokens.append(token)

    def _probs(self, keep: bool = True) -> np.ndarray:
        """Bias, temperature, penalties, bad words; then top-k and top-p."""
        sampling, request = self._sampling, self._request
        raw = self._forward(self.tokens)
        if keep:
            self.rows.append(raw)
        scores = np.array(raw, np.float64)
        if request.embedding_bias is not None:
            scores += np.asarray(request.embedding_bias, np.float64)[: len(scores)]
        scores /= sampling.temperature or 1.0
        factor = sampling.repetition_penalty or 1.0
        for token in set(self.tokens) if factor != 1.0 else ():
            scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
        presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
        prompt = len(request.input_token_ids)
        counted = self.tokens[min(prompt, sampling.prompt_ignore_length or 0) :]
        for token in set(counted) if presence or frequency else ():
            scores[token] -= presence + frequency * counted.count(token)
        for *head, last in request.bad_words or []:
            if self.tokens[len(self.tokens) - len(head) :] == head:
                scores[last] = BANNED
        return self._reduced(_softmax(scores[None])[0])

    def _reduced(self, probs: np.ndarray) -> np.ndarray:
        top_k, top_p = self._sampling.top_k or 0, self._sampling.top_p or 0.0
        if top_k == 0 and top_p == 0.0:
            top_k = 1  # nothing given is greedy
        probs = np.where(probs < (self._sampling.min_p or 0.0) * probs.max(), 0.0, probs)
        if top_k == 1:
            return np.eye(len(probs))[int(probs.argmax())]
        if top_k:
            probs = np.where(probs < np.sort(probs)[-min(top_k, len(probs))], 0.0, probs)
            probs /= probs.sum()
        if 0.0 < top_p < 1.0:
            order = np.argsort(-probs, kind="stable")
            before = np.cumsum(probs[order]) - probs[order]
            probs[order[before >= top_p]] = 0.0
        return probs / probs.sum()

    def _draw(self, probs: np.ndarray) -> int:
        cumulative = np.cumsum(probs)
        return int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
