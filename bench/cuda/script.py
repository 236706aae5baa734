"""Acceptance by a script, for random weights that accept nothing: every pass runs as it does in
serving, and then the text of a request, and where each head knows it, are a function of its seed.

A head's node for a place of the text is right with a probability that depends on the request, the
head and the place, and its confidence is that probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from backend.engines.cuda.device import DeviceSteps
from backend.engines.cuda.heads import HeadProposal
from backend.engines.cuda.plain import mix
from backend.engines.cuda.step import VerifyStep
from backend.engines.spine import CANDIDATES
from bench.cuda import script_kernels

HARD_SHARE = 0.3
"""Places of a text at which a head's first node is right half as often."""

SECOND_SHARE = 0.4
"""How often the second node is right where the first is not."""


@dataclass(frozen=True)
class Rates:
    """How often a head's first node is right: in requests of an even seed, and in the others."""

    even: float
    odd: float


def tokens_of(seed: torch.Tensor, place: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the text's tokens at ``place``, int64, of requests with these mixed seeds."""
    return (mix(seed ^ place ^ 0x5851F42D4C957F2D) >> 1) % vocab


def uniform_of(seed: torch.Tensor, place: torch.Tensor, what: int) -> torch.Tensor:
    """Return a number in [0, 1) for each place of a text, another one for each ``what``."""
    bits = mix(mix(seed + what * 0x2545F4914F6CDD1D) ^ place)
    return ((bits >> 12) & ((1 << 52) - 1)).double() * 2.0**-52


def choices_of(
    seed: torch.Tensor, place: torch.Tensor, number: int, rates: Rates, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens int64[rows, CANDIDATES] that the head ``number`` proposes at ``place``, and
    how likely each is, float32.
    """
    rate = torch.where(seed % 2 == 0, rates.even, rates.odd)
    is_hard = uniform_of(seed, place, 0) < HARD_SHARE
    rate = torch.where(is_hard, 0.5 * rate, rate)
    second = (1.0 - rate) * SECOND_SHARE
    coin = uniform_of(seed, place, number)
    # The right token is first, second, or not among them.
    rank = torch.where(coin < rate, 0, torch.where(coin < rate + second, 1, CANDIDATES))
    offset = torch.arange(CANDIDATES, device=place.device)
    token = (tokens_of(seed, place, vocab)[:, None] + offset - rank[:, None]) % vocab
    rest = (1.0 - rate - second) * 0.1
    return token, torch.stack((rate, second, rest, 0.5 * rest), 1).float()


class ScriptedStep(VerifyStep):
    """A step whose draw is the script's token; the real draw runs, and is not used."""

    def _draw(self, logits: torch.Tensor, *, bounded: bool) -> torch.Tensor:
        tokens = super()._draw(logits, bounded=bounded)
        seed = self.slots.options["seed"][self.slot[self._owner]]
        place = self.target.inputs.device["position"] + 1
        write = script_kernels.tokens if place.is_cuda else tokens_of
        return write(seed, place, logits.shape[1]).to(tokens.dtype)


class ScriptedProposal(HeadProposal):
    """A proposal that is right where the script says so; the head runs, and is not used."""

    rates: ClassVar[dict[str, tuple[int, Rates]]] = {}
    """By a head's name: its number, from 1, and its rates."""

    def _candidates(
        self, logits: torch.Tensor, tokens: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        super()._candidates(logits, tokens, place)
        seed = self._step.slots.options["seed"][self._step.slot]
        number, rates = self.rates[self._head.name]
        vocab = len(self._head.lm_head)
        if not place.is_cuda:
            return choices_of(seed, place, number, rates, vocab)
        of_head, shares = (rates.even, rates.odd), (HARD_SHARE, SECOND_SHARE)
        return script_kernels.choices(seed, place, number, of_head, shares, vocab)


class ScriptedSteps(DeviceSteps):
    """Steps whose acceptance is the script's."""

    step_type = ScriptedStep
    proposal_type = ScriptedProposal
