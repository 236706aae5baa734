"""The output of a target by itself: every prefix is run afresh by transformers' own forward, and
the options are applied by the book, in numpy and one row at a time.

Nothing of the engine but its weights is used.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from backend.request import SamplingParams
from backend.sampling.draw import HEAD
from backend.sampling.randomness import TAIL, exponentials, word
from tests.fakes.llamas import copy_of
from tests.options import processed, top_p_after

GREEDY = SamplingParams()


class Reference:
    """Distributions and texts of an engine's weights."""

    def __init__(self, engine: Any) -> None:
        self._lm: Any = copy_of(engine.model.lm)
        self._logits: dict[tuple[int, ...], np.ndarray] = {}
        self._kv: dict[tuple[int, ...], torch.Tensor] = {}
        self._texts: dict[tuple[tuple[int, ...], int, SamplingParams], list[int]] = {}

    def logits(self, tokens: Seq[int]) -> np.ndarray:
        """The model's own logits [vocab] after ``tokens``."""
        key = tuple(tokens)
        if key not in self._logits:
            with torch.inference_mode():
                out = self._lm(torch.tensor([key]), use_cache=False, logits_to_keep=1)
            self._logits[key] = out.logits[0, 0].double().numpy()
        return self._logits[key]

    def kv(self, tokens: Seq[int]) -> torch.Tensor:
        """Keys and values of a prefill of ``tokens`` [tokens, numbers], layer by layer."""
        key = tuple(tokens)
        if key not in self._kv:  # a draft at rest has the same from step to step
            with torch.inference_mode():
                out = self._lm(torch.tensor([key]), use_cache=True, logits_to_keep=1)
            layers = out.past_key_values.layers
            parts = [part for layer in layers for part in (layer.keys, layer.values)]
            self._kv[key] = torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts], 1)
        return self._kv[key]

    def log_probs(
        self, tokens: Seq[int], prompt_tokens: int, sampling: SamplingParams
    ) -> np.ndarray:
        """Log-probabilities [vocab] after ``tokens``, with options and temperature and before
        top-k and top-p.
        """
        scores = processed(self.logits(tokens), list(tokens), prompt_tokens, sampling)
        scores -= scores.max()
        return scores - np.log(np.exp(scores).sum())

    def probs(self, tokens: Seq[int], prompt_tokens: int, sampling: SamplingParams) -> np.ndarray:
        """The distribution [vocab] of the next token of a request that samples."""
        probs = np.exp(self.log_probs(tokens, prompt_tokens, sampling))
        probs[probs < sampling.min_p * probs.max()] = 0.0
        if sampling.top_k:
            probs[probs < np.sort(probs)[-sampling.top_k]] = 0.0
        probs /= probs.sum()
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= top_p_after(list(tokens[prompt_tokens:]), sampling)]] = 0.0
        return probs / probs.sum()

    def text(self, prompt: Seq[int], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
        """Prompt and the next ``count`` tokens, or fewer up to an end id."""
        key = tuple(prompt), count, sampling
        if key not in self._texts:  # scenarios share them
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(self.next(tokens, len(prompt), sampling))
                if tokens[-1] in sampling.end_ids:
                    break
            self._texts[key] = tokens
        return list(self._texts[key])

    def next(self, tokens: Seq[int], prompt_tokens: int, sampling: SamplingParams) -> int:
        """The token after ``tokens``."""
        if sampling.greedy:
            return int(self.log_probs(tokens, prompt_tokens, sampling).argmax())
        return drawn(self.probs(tokens, prompt_tokens, sampling), sampling.seed, len(tokens))

    def guess(self, tokens: Seq[int], prompt_tokens: int, sampling: SamplingParams) -> int:
        """The token that this model, as a draft, proposes first after ``tokens``; the head of its
        distribution has to have a token.
        """
        if sampling.greedy:
            return self.next(tokens, prompt_tokens, sampling)
        probs = self.probs(tokens, prompt_tokens, sampling)
        return drawn(np.where(probs < HEAD, 0.0, probs), sampling.seed, len(tokens))

    def joint(
        self, prompt: Seq[int], sampling: SamplingParams, length: int
    ) -> dict[tuple[int, ...], float]:
        """The probability of each text of ``length`` tokens after the prompt, or fewer up to an
        end id.
        """
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        for size in range(length):
            for text in [
                text
                for text in chances
                if len(text) == size and text[-1:] not in {(end,) for end in sampling.end_ids}
            ]:
                chance, probs = (
                    chances.pop(text),
                    self.probs([*prompt, *text], len(prompt), sampling),
                )
                chances |= {
                    (*text, token): chance * float(p) for token, p in enumerate(probs) if p > 0.0
                }
        return chances


def drawn(probs: np.ndarray, seed: int, position: int) -> int:
    """The token that wins the race: the head's tokens against the tail as one, and then within the
    tail.
    """
    place, tail = np.uint64(word(seed, position)), probs < HEAD
    with np.errstate(divide="ignore"):
        times = exponentials(place ^ np.arange(len(probs), dtype=np.uint64)) / probs
        of_tail = exponentials(np.array([place ^ TAIL]))[0] / probs[tail].sum()
    runs = tail if of_tail < times[~tail].min(initial=np.inf) else ~tail
    return int(np.where(runs, times, np.inf).argmin())
