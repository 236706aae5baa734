"""The forward of a whole text against one that computes every proposal by itself, row by row."""

import math

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from backend.engines.eagle.model import EagleModel
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


class RowByRow:
    """Proposes after one place of a text at a time, by lists of rows."""

    def __init__(self, shape, tensors, embedding, head):
        self.s, self.w = shape, tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.rows = tensors.get("lm_head.weight", head[tensors["token_ids"]])

    def norm(self, x, name):
        return rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.s.rms_norm_eps)

    def fused(self, states):
        if self.s.fuse == "each":
            states = torch.stack([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(states)])
        x = states.flatten()
        x = self.norm(x, "input_norm") if self.s.fuse == "joint" else x
        return self.w["fc.weight"] @ x + self.w.get("fc.bias", 0)

    def turned(self, x, place):
        half = self.s.head_dim // 2
        angles = place / self.s.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
        angles = (angles / self.s.rope.get("factor", 1.0)).to(x)
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def read(self, token, state, place):
        normed = self.norm(state, "hidden_norm")
        x = torch.cat([self.norm(self.embedding[token], "input_layernorm"), normed])
        q, k, v = (
            (self.w[f"self_attn.{n}_proj.weight"] @ x).view(-1, self.s.head_dim) for n in "qkv"
        )
        if self.s.qk_norm:
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        q, k = self.turned(q, place), self.turned(k, place)
        return q, k, v, normed if self.s.norm_before_residual else state

    def output(self, q, residual, seen):
        groups = self.s.num_heads // self.s.num_kv_heads
        seen = seen[-self.s.sliding_window :] if self.s.sliding_window else seen
        heads = []
        for head, query in enumerate(q):
            keys = torch.stack([k[head // groups] for k, _ in seen])
            values = torch.stack([v[head // groups] for _, v in seen])
            heads.append((keys @ query / math.sqrt(self.s.head_dim)).softmax(0) @ values)
        x = residual + self.w["self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = self.norm(x, "post_attention_layernorm")
        gate, up = (self.w[f"mlp.{n}_proj.weight"] @ normed for n in ("gate", "up"))
        return x + self.w["mlp.down_proj.weight"] @ (silu(gate) * up)

    def propose(self, tokens, states, first, steps):
        """Logits of the tokens after ``first``, the text's being those drafted before each."""
        seen, found = [], []
        for place in range(1, first + 1):
            q, k, v, residual = self.read(tokens[place], self.fused(states[place - 1]), place)
            seen.append((k, v))
        out = self.output(q, residual, seen)
        for step in range(steps):
            found.append(self.rows @ self.norm(out, "norm"))
            place = first + 1 + step
            if place == len(tokens) or step == steps - 1:
                break
            state = self.norm(out, "norm") if self.s.norm_output else out
            q, k, v, residual = self.read(tokens[place], state, place)
            seen.append((k, v))
            out = self.output(q, residual, seen)
        return found


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
def test_every_proposal_is_that_of_a_forward_row_by_row(form):
    shape, tensors, tokens, states, (embedding, head) = inputs(form)
    by_step = list(WholeText(shape, tensors, embedding, head).unroll(tokens, states, STEPS))
    assert [len(logits) for logits in by_step] == [8, 7, 6, 5]
    reference = RowByRow(shape, tensors, embedding, head)
    for first in range(1, TOKENS):
        for step, logits in enumerate(reference.propose(tokens, states, first, STEPS)):
            torch.testing.assert_close(by_step[step][first - 1], logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_trained_is_what_the_engine_s_model_computes(form):
    shape, tensors, tokens, states, (embedding, head) = inputs(form)
    by_step = list(WholeText(shape, tensors, embedding, head).unroll(tokens, states, STEPS))
    model = EagleModel(
        shape, tensors, embedding=embedding, lm_head=head, positions=32, dtype=torch.float64
    )
    fused, places = model.fuse(states), torch.arange(1, TOKENS)
    texts = model.key_values(tokens[1:], fused[:-1], places)
    for first in range(1, TOKENS):
        pool, hidden = texts[: first - 1], fused[first - 1]
        for step in range(min(STEPS, TOKENS - first)):
            place = first + step
            pool = torch.cat([pool, torch.zeros_like(texts[:1])])
            seen = torch.arange(1, place + 1) > place - (shape.sliding_window or TOKENS)
            logits, carried = model.rows(
                tokens[place][None, None],
                hidden[None, None],
                torch.tensor([[place]]),
                pool[None],
                seen[None, None],
            )
            torch.testing.assert_close(logits[0, 0], by_step[step][first - 1], atol=1e-6, rtol=1e-5)
            hidden = carried[0, 0]


def test_a_text_of_few_tokens_has_as_few_steps():
    shape, tensors = random_head()
    head = WholeText(shape, tensors, torch.randn(96, 32), torch.randn(96, 32))
    assert [len(x) for x in head.unroll(torch.arange(3), torch.randn(3, 3, 32), 5)] == [2, 1]
