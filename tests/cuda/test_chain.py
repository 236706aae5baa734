"""Steps over chains: the text is that of plain decoding, for any proposal."""

from __future__ import annotations

import pytest
import torch

from backend.engines.cuda.chain import ChainStep, Slots, _mix
from backend.engines.cuda.model import PagedModel
from backend.sampling.randomness import _seed_word, word
from tests.cuda.test_model import models

pytestmark = pytest.mark.slow
ROWS, TOKENS = 3, 24


def prepared(model: PagedModel, temperature: float) -> Slots:
    """Return slots with a text of one token each, in shuffled blocks of their own."""
    slots = Slots(ROWS + 1, 4, model.device)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).int()
    slots.table.copy_(order[: 4 * (ROWS + 1)].view(ROWS + 1, 4))
    slots.last.copy_(torch.arange(ROWS + 1) + 5)
    seeds = [_seed_word(seed) for seed in range(ROWS + 1)]
    slots.seed.copy_(torch.tensor([seed - (seed >> 63 << 64) for seed in seeds]))
    slots.temperature.fill_(temperature)
    return slots


def texts(
    model: PagedModel, slots: Slots, most: int, guess: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """Return the texts of ``TOKENS`` tokens and the steps taken; ``guess`` [rows, tokens] are
    proposed at their places.
    """
    step = ChainStep(model, slots, ROWS, most, 128)
    step.slot.copy_(torch.arange(ROWS) + 1)
    found: list[list[int]] = [[] for _ in range(ROWS)]
    steps = 0
    while min(map(len, found)) < TOKENS:
        for row in range(ROWS):
            at = len(found[row])
            proposed = [] if guess is None else guess[row, at : at + most - 1].tolist()
            padded = proposed + [-1] * (most - 1 - len(proposed))
            step.proposal[row] = torch.tensor(padded, dtype=torch.int64)
        step.run()
        steps += 1
        for row, count in enumerate(step.count.tolist()):
            found[row] += step.emitted[row, :count].tolist()
            assert int(slots.length[row + 1]) == len(found[row])
    return torch.tensor([text[:TOKENS] for text in found]), steps


def test_mixing_is_the_hosts() -> None:
    seed = _seed_word(77)
    words = _mix(torch.tensor([seed - (seed >> 63 << 64)]) ^ torch.arange(50))
    assert [w % (1 << 64) for w in words.tolist()] == [word(77, at) for at in range(50)]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@torch.inference_mode()
def test_text_is_that_of_plain_decoding(temperature: float) -> None:
    reference, model = models("llama")
    model.fuse()
    decoded, steps = texts(model, prepared(model, temperature), 1)
    assert steps == TOKENS
    if temperature == 0.0:
        for row, text in enumerate(decoded):
            tokens = torch.cat((torch.tensor([row + 6]), text))
            logits = reference(tokens[None]).logits[0]
            assert torch.equal(logits.argmax(-1)[:-1], text)
    verified, steps = texts(model, prepared(model, temperature), 5, decoded)
    assert torch.equal(verified, decoded)
    assert steps == -(-TOKENS // 5)  # all that was proposed is accepted
    wrong = decoded.clone()
    wrong[:, 3::5] += 1
    wrong[1] = 4
    verified, steps = texts(model, prepared(model, temperature), 4, wrong)
    assert torch.equal(verified, decoded)
    assert steps > TOKENS // 4
