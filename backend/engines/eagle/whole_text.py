"""A head over a whole text at once, without a KV cache: for training and for the probe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from backend.engines.eagle.folder import EagleShape
from backend.engines.stepping.rope import rope_tables


class WholeText:
    """The forward of ``folder`` for every place of a text, in the dtype of its tensors."""

    def __init__(
        self, shape: EagleShape, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        """``embedding`` [vocab, hidden] and ``head``, of the same tokens, are the target's."""
        self.shape, self._tensors = shape, tensors
        self.token_ids = tensors["token_ids"]
        self._embedding = tensors.get("embed_tokens.weight", embedding)
        own_rows = tensors.get("lm_head.weight")
        self._rows = head[self.token_ids] if own_rows is None else own_rows

    def unroll(self, tokens: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield logits [places, draft vocabulary] by step, of a text's ``tokens`` [n] and the
        target's ``states`` [n, layers, hidden] there.

        In step j (from 0 on), place i is a proposal of j + 1 tokens that begins after token
        i + 1: its last token follows token i + j + 1, and those before it are the text's.
        """
        rows = len(tokens) - 1
        cos, sin = (table.to(states) for table in rope_tables(self.shape, rows))
        embedded = self._embedding[tokens[1:]]
        state = self._fused(states[:-1])
        drafted: list[tuple[Tensor, Tensor]] = []
        for step in range(min(steps, rows)):
            at = slice(step, rows)  # of all rows, those that this step has
            query, key, value, residual = self._read(embedded[at], state, cos[at], sin[at])
            drafted.append((key, value))
            attended = self._attend(query, drafted)
            output = self._finish(residual, attended)
            normed = self._norm(output, "norm")
            yield normed @ self._rows.T
            state = (normed if self.shape.norm_output else output)[:-1]

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return functional.rms_norm(rows, weight.shape, eps=self.shape.rms_norm_eps) * weight

    def _fused(self, states: Tensor) -> Tensor:
        """Return f of states [n, layers, hidden]."""
        if self.shape.fuse == "each":
            each = [self._norm(states[:, tap], f"fc_norm.{tap}") for tap in range(states.shape[1])]
            states = torch.stack(each, 1)
        flat = states.flatten(1)
        if self.shape.fuse == "joint":
            flat = self._norm(flat, "input_norm")
        return functional.linear(flat, self._tensors["fc.weight"], self._tensors.get("fc.bias"))

    def _read(
        self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values [rows, heads, columns], and the residual."""
        shape, normed = self.shape, self._norm(state, "hidden_norm")
        read = torch.cat([self._norm(embedded, "input_layernorm"), normed], 1)
        query, key, value = (
            (read @ self._tensors[f"self_attn.{name}_proj.weight"].T).unflatten(
                1, (-1, shape.head_dim)
            )
            for name in "qkv"
        )
        if shape.qk_norm:
            query = self._norm(query, "self_attn.q_norm")
            key = self._norm(key, "self_attn.k_norm")
        query, key = (
            rows * cos[:, None] + rows.roll(shape.head_dim // 2, -1) * sin[:, None]
            for rows in (query, key)
        )
        return query, key, value, normed if shape.norm_before_residual else state

    def _attend(self, query: Tensor, drafted: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend to the text's rows, the first of ``drafted``, and to each proposal's own, the
        others: those of step j begin j rows later.
        """
        shape, step = self.shape, len(drafted) - 1
        groups = shape.num_heads // shape.num_kv_heads
        count = len(query)
        repeated = [
            (keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1))
            for keys, values in drafted
        ]
        (texts, text_values), *rest = repeated
        texts, text_values = texts[:count], text_values[:count]
        scores = torch.einsum("qhd,khd->hqk", query, texts) / math.sqrt(shape.head_dim)
        place = torch.arange(count, device=query.device)
        distance = place[:, None] - place[None]
        seen = distance >= 0
        if shape.sliding_window:
            seen &= distance + step < shape.sliding_window
        scores = scores.masked_fill(~seen, -math.inf)
        own = [(query * keys[:count]).sum(-1).T / math.sqrt(shape.head_dim) for keys, _ in rest]
        if shape.sliding_window:
            reach = [step - at < shape.sliding_window for at in range(1, len(own) + 1)]
            far = query.new_full((shape.num_heads, count), -math.inf)
            own = [one if is_near else far for one, is_near in zip(own, reach, strict=True)]
        weights = torch.cat([scores, *(column[:, :, None] for column in own)], 2).softmax(-1)
        result = torch.einsum("hqk,khd->qhd", weights[:, :, :count], text_values)
        for at, (_, values) in enumerate(rest):
            result = result + weights[:, :, count + at].T[:, :, None] * values[:count]
        return result.flatten(1)

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return z: the layer's output before the last norm."""
        output = residual + attended @ self._tensors["self_attn.o_proj.weight"].T
        normed = self._norm(output, "post_attention_layernorm")
        gate, up = (normed @ self._tensors[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        down = self._tensors["mlp.down_proj.weight"]
        return output + (functional.silu(gate) * up) @ down.T
