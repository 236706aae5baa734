"""The forward of a whole text, by which heads are trained and converted, against the engine's."""

import numpy as np
import pytest
import torch

from backend.engines.eagle.engine import HeadRows
from backend.engines.eagle.model import TorchModel
from backend.engines.eagle.whole_text import WholeText
from tests.fakes.eagle import random_head

FORMS = {
    "plain": {},
    "joint": {"fuse": "joint", "norm_before_residual": True},
    "each": {"fuse": "each", "fc_bias": True},
    "the output goes on normed": {"norm_output": True, "qk_norm": True},
    "window": {"sliding_window": 4},
    "narrow window": {"sliding_window": 2},
    "another width": {"hidden_size": 16, "head_dim": 4, "own_embedding": True},
    "the target's rows": {"own_head": False},
    "scaled rope": {"rope": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 100.0},
}
TOKENS, STEPS = 9, 4


def inputs(form):
    """A head, a text, the target's states at it, and the target's embedding and head."""
    shape, tensors = random_head(1, **FORMS[form])
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(shape.vocab_size, (TOKENS,), generator=generator)
    states = torch.randn(TOKENS, 3, 32, generator=generator, dtype=torch.float64)
    tables = torch.randn(2, shape.vocab_size, 32, generator=generator).double()
    return shape, tensors, tokens, states, tables


@pytest.mark.parametrize("form", FORMS)
def test_what_is_trained_is_what_the_engine_s_model_computes(form):
    shape, tensors, tokens, states, (embedding, head) = inputs(form)
    by_step = list(WholeText(shape, tensors, embedding, head).unroll(tokens, states, STEPS))
    model = TorchModel(
        shape,
        tensors,
        embedding=embedding,
        lm_head=head,
        positions=32,
        slots=TOKENS,
        dtype=torch.float64,
    )
    text, fused, places = tokens.numpy(), model.fuse(states.numpy()), np.arange(1, TOKENS)
    model.write(HeadRows(text[1:], fused[:-1], places), places)
    for first in range(1, TOKENS):
        model.begin(np.arange(1, first)[None], STEPS)
        hidden = fused[first - 1 : first]
        for step in range(min(STEPS, TOKENS - first)):
            place = first + step
            seen = np.arange(1, place + 1) > place - (shape.sliding_window or TOKENS)
            row = HeadRows(text[place : place + 1], hidden, np.array([place]))
            logits, hidden = model.run(row, seen[None, None])
            wanted = by_step[step][first - 1].numpy()
            np.testing.assert_allclose(logits[0], wanted, atol=1e-5, rtol=1e-5)


def test_a_text_of_few_tokens_has_as_few_steps():
    shape, tensors = random_head()
    head = WholeText(shape, tensors, torch.randn(96, 32), torch.randn(96, 32))
    assert [len(x) for x in head.unroll(torch.arange(3), torch.randn(3, 3, 32), 5)] == [2, 1]
