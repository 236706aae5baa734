"""How near a tie was, by transformers' own code."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.core.session import Session
from backend.request import SamplingParams
from backend.sampling.randomness import exponentials, word
from bench.in_process import first_difference

logger = logging.getLogger(__name__)

NEAR_TIE = 2e-3
"""Logits of a shipped model are about 20 in size; fp32 carries 7 digits through 30 layers."""


class Witness:
    """The target in fp64 (transformers' own code), which says how near a tie was. Made when first
    asked: it takes seconds and a GiB.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits [vocab] after ``tokens``."""
        from transformers import AutoModelForCausalLM

        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float64)
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0, -1]
        return logits

    def greedy_gap(self, tokens: list[int], one: int, other: int) -> float:
        """Return by how much the logits of two tokens differ after ``tokens``."""
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

    def check_equal(self, plain: Sequence[Session], others: Sequence[Session]) -> None:
        """Assert that texts are those of plain decoding, but for a first difference that is a near
        tie: by the gap between the two tokens in fp64. It is logged.
        """
        for number, (one, other) in enumerate(zip(plain, others, strict=True)):
            expected, tokens = one.sequence.tokens, other.sequence.tokens
            at = first_difference(expected, tokens)
            if at is None:
                continue
            pair, sampling = (expected[at], tokens[at]), one.sequence.sampling
            if sampling.greedy:
                gap = self.greedy_gap(expected[:at], *pair)
            else:
                gap = self.race_gap(expected[:at], *pair, sampling)
            logger.warning("prompt %d differs at token %d, a tie within %.2e", number, at, gap)
            assert gap < NEAR_TIE
