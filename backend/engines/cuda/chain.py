"""A step over chains, all on the device: layout, target pass, draw, acceptance and commit.

Nothing of it depends on values that the host must know, so that one CUDA graph serves every step of
the same number of rows and tokens. The engine does not use it yet: it draws and accepts on the
host. ``bench.cuda`` measures it and compares its texts.
"""

from __future__ import annotations

import torch

from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.pages import PAGE, Layout

_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Slots:
    """What the device knows of each admitted sequence; a row of a step names its slot.

    ``table`` int32[slots, blocks]; ``length`` int64[slots] tokens whose KV is there, which are all
    but the last; ``last`` int64[slots] that token; ``seed`` int64[slots] the mixed seed, as
    ``sampling.randomness`` makes it; ``temperature`` and ``bound`` float32[slots].
    """

    def __init__(self, slots: int, blocks: int, device: torch.device) -> None:
        self.table = torch.zeros(slots, blocks, dtype=torch.int32, device=device)
        self.length, self.last, self.seed = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.temperature = torch.zeros(slots, device=device)
        self.bound = torch.full((slots,), float("-inf"), device=device)


class ChainStep:
    """One bucket: ``rows`` sequences of ``most`` new tokens each, the last one and a proposal, and
    at most ``keys`` tokens in all.

    ``slot`` int64[rows] and ``proposal`` int64[rows, most - 1] (-1: none) are read; ``emitted``
    int64[rows, most] and ``count`` int64[rows] are written: of a row's emitted tokens the first
    ``count`` are its text's, the rest are not. A token of -1 says that a row's logits had a NaN.
    """

    def __init__(self, model: PagedModel, slots: Slots, rows: int, most: int, keys: int) -> None:
        device = model.device
        self._keys = keys
        self.model, self.slots, self.rows, self.most = model, slots, rows, most
        self.slot = torch.arange(rows, device=device)
        self.proposal = torch.full((rows, most - 1), -1, dtype=torch.int64, device=device)
        self.emitted = torch.zeros(rows, most, dtype=torch.int64, device=device)
        self.count = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ancestors = torch.tensor(
            [(2 << n) - 1 for n in range(most)] * rows, dtype=torch.int64, device=device
        )
        self.first = torch.arange(rows + 1, dtype=torch.int32, device=device) * most
        self._offset = torch.arange(most, device=device)

    def run(self) -> None:
        """Launch the step."""
        slots, rows, most = self.slots, self.rows, self.most
        start = slots.length[self.slot]
        ids = torch.cat((slots.last[self.slot][:, None], self.proposal), 1)
        position = start[:, None] + self._offset
        table = slots.table[self.slot]
        place = table.gather(1, position // PAGE) * PAGE + position % PAGE
        layout = Layout(
            table,
            start.int(),
            self.first,
            self.ancestors,
            place.int().flatten(),
            most,
            self._keys,
        )
        logits = self.model.run(ids.clamp(min=0).flatten(), position.flatten(), layout)
        seed, temperature, bound = (
            column[self.slot].repeat_interleave(most, output_size=rows * most)
            for column in (slots.seed, slots.temperature, slots.bound)
        )
        words = _mix(seed ^ (position.flatten() + 1))
        drawn = self.model.kernels.draw(logits, temperature, bound, words).long().view(rows, most)
        accepted = (self.proposal == drawn[:, :-1]).long().cumprod(1).sum(1)
        self.emitted.copy_(drawn)
        self.count.copy_(accepted + 1)
        slots.last[self.slot] = drawn.gather(1, accepted[:, None])[:, 0]
        slots.length[self.slot] = start + self.count


def _mix(word: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser over the bits of int64, as ``sampling.randomness`` has it."""
    word = word + _GOLDEN
    word = (word ^ _shift(word, 30)) * _FIRST
    word = (word ^ _shift(word, 27)) * _SECOND
    return word ^ _shift(word, 31)


def _shift(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros from the left, which torch's int64 does not."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
