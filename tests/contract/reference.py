"""What a target says by itself: every prefix is run afresh, and the options are applied by the book, in numpy and one row at a time.

Nothing of the engine but its weights and its forward pass is used, and that on an empty KV pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import numpy as np
import torch

from backend.engines.llama import Chunk, KVTable
from backend.engines.torch_engine import TorchEngine
from backend.request import SamplingParams


class Reference:
    """Laws and greedy texts of an engine made for this purpose alone."""

    def __init__(self, engine: TorchEngine) -> None:
        self._model = engine._model
        self._table = KVTable(range(engine.limits.kv_blocks), "cpu")
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: Seq[int]) -> np.ndarray:
        """Raw logits [vocab] behind ``tokens``."""
        key = tuple(tokens)
        if key not in self._logits:
            with torch.inference_mode():
                self._logits[key] = self._model.forward([Chunk(list(key), 0, self._table, 1)])[0].double().numpy()
        return self._logits[key]

    def kv(self, tokens: Seq[int]) -> torch.Tensor:
        """Keys and values of a prefill of ``tokens`` [layers, tokens, 2 x kv_heads, head_dim]."""
        with torch.inference_mode():
            self._model.forward([Chunk(list(tokens), 0, self._table, 1)])
            return torch.stack([layer.pool[: len(tokens)].clone() for layer in self._model._layers])

    def greedy(self, prompt: Seq[int], count: int) -> list[int]:
        """Prompt and the next ``count`` tokens."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens

    def law(self, tokens: Seq[int], sampling: SamplingParams) -> np.ndarray:
        """The law [vocab] that the next token of a sampled request follows."""
        scores = self.logits(tokens) / sampling.temperature
        law = np.exp(scores - scores.max())
        if sampling.top_k:
            law[law < np.sort(law)[-sampling.top_k]] = 0.0
        law /= law.sum()
        order = np.argsort(-law, kind="stable")
        before = np.cumsum(law[order]) - law[order]
        law[order[before >= sampling.top_p]] = 0.0
        return law / law.sum()

    def joint(self, prompt: Seq[int], sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
        """The probability of each text of ``length`` tokens behind the prompt."""
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            laws = {text: self.law([*prompt, *text], sampling) for text in chances}
            chances = {
                (*text, token): chances[text] * float(p)
                for text, law in laws.items()
                for token, p in enumerate(law)
                if p > 0.0
            }
        return chances
