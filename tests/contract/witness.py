"""How near a tie was, by transformers' own code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.request import SamplingParams
from backend.sampling.randomness import exponentials, word


class Witness:
    """The target in fp64 (transformers' own code), which says how near a tie was. Made when first
    asked: it takes seconds and a GiB.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits [vocab] behind ``tokens``."""
        from transformers import AutoModelForCausalLM

        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float64)
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0, -1]
        return logits

    def greedy_gap(self, tokens: list[int], one: int, other: int) -> float:
        """Return by how much the logits of two tokens differ behind ``tokens``."""
        logits = self.logits(tokens)
        return abs(float(logits[one] - logits[other]))

    def race_gap(self, tokens: list[int], one: int, other: int, sampling: SamplingParams) -> float:
        """Return by how much, in scaled logits, the race between two tokens was decided (without
        top-k, top-p and options).
        """
        place = np.uint64(word(sampling.seed, len(tokens)))
        noise = exponentials(place ^ np.array([one, other], np.uint64))
        logits = self.logits(tokens)
        return abs(
            float(logits[one] - logits[other]) / sampling.temperature
            - math.log(float(noise[0] / noise[1]))
        )
