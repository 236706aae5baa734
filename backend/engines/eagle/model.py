"""The forward of an EAGLE-3 head (``folder`` has its formula), many rows at a time.

Row p is of token p and of the target's states at the token before. Its keys and values depend on
these two only: the rows of a text need no attention, and a prompt may come in any pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from backend.engines.eagle.folder import EagleShape
from backend.engines.stepping.rope import rope_tables


class EagleModel:
    """The weights of a head in one dtype on one device, for positions below ``positions``.

    ``embedding`` [vocab, hidden] and ``lm_head`` [vocab, hidden] are the target's, for heads
    without their own.
    """

    def __init__(
        self,
        shape: EagleShape,
        tensors: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        lm_head: Tensor,
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        own = {name: t.to(device, dtype) for name, t in tensors.items() if t.is_floating_point()}
        self.token_ids = tensors["token_ids"].to(device, torch.int64)
        self._weights = own
        self._embedding = own.pop("embed_tokens.weight", embedding)
        rows = own.pop("lm_head.weight", None)
        if rows is None:
            rows = lm_head[self.token_ids.to(lm_head.device)].to(device, dtype)
        self._head = rows
        q, k, v = (own.pop(f"self_attn.{name}_proj.weight") for name in "qkv")
        self._kv, self._qkv_of_rows = torch.cat([k, v]), torch.cat([q, k, v])
        self._gate_up = torch.cat([own.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")])
        self._cos, self._sin = (
            table[:, None].to(device, dtype) for table in rope_tables(shape, positions)
        )

    def fuse(self, states: Tensor) -> Tensor:
        """Return [n, hidden] of the target's states [n, layers, target_hidden]."""
        states = states.to(self.device, self.dtype)
        if self.shape.fuse == "each":
            parts = enumerate(states.unbind(1))
            states = torch.stack([self._normed(part, f"fc_norm.{n}") for n, part in parts], 1)
        flat = states.flatten(1)
        if self.shape.fuse == "joint":
            flat = self._normed(flat, "input_norm")
        return functional.linear(flat, self._weights["fc.weight"], self._weights.get("fc.bias"))

    def key_values(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the keys and values [n, 2 kv_heads, head_dim] of rows: ``tokens`` int64[n] after
        the fused states ``hidden`` [n, hidden].
        """
        read = self._read(tokens, hidden)[0]
        heads = functional.linear(read, self._kv).view(len(read), -1, self.shape.head_dim)
        keys, values = heads.split(self.shape.num_kv_heads, 1)
        return torch.cat([self._rotated(keys, positions, "k"), values], 1)

    def rows(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, pool: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run ``r`` rows of each of ``b`` texts: ``tokens`` and ``positions`` int64[b, r],
        ``hidden`` [b, r, hidden]. Return the logits [b, r, columns], and the states [b, r, hidden]
        that their children go on from.

        ``pool`` [b, keys, 2 kv_heads, head_dim] has the keys and values that they attend to; the
        last ``r`` are written here. ``mask`` bool[b, r, keys]: which of them each row sees.
        """
        shape, (texts, count) = self.shape, tokens.shape
        read, residual = self._read(tokens.flatten(), hidden.flatten(0, 1))
        heads = functional.linear(read, self._qkv_of_rows).view(len(read), -1, shape.head_dim)
        query, keys, values = heads.split([shape.num_heads, *[shape.num_kv_heads] * 2], 1)
        places = positions.flatten()
        new = torch.cat([self._rotated(keys, places, "k"), values], 1)
        pool[:, -count:] = new.view(texts, count, *new.shape[1:])
        query = self._rotated(query, places, "q").view(texts, count, *query.shape[1:])
        attended = self._attend(query, pool, mask).reshape(len(read), -1)
        out = residual + functional.linear(attended, self._weights["self_attn.o_proj.weight"])
        normed = self._normed(out, "post_attention_layernorm")
        gate, up = functional.linear(normed, self._gate_up).chunk(2, -1)
        inner = functional.silu(gate) * up
        out = out + functional.linear(inner, self._weights["mlp.down_proj.weight"])
        vectors = self._normed(out, "norm")
        logits = functional.linear(vectors, self._head)
        carried = vectors if shape.norm_output else out
        return logits.view(texts, count, -1), carried.view(texts, count, -1)

    def _attend(self, query: Tensor, pool: Tensor, mask: Tensor) -> Tensor:
        """Return the attention [b, r, heads, head_dim] of queries of that shape. Those of a KV head
        are folded into rows, so that keys are never repeated.
        """
        texts, count, heads, dim = query.shape
        kv_heads = self.shape.num_kv_heads
        group = heads // kv_heads
        folded = query.view(texts, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        keys, values = pool.transpose(1, 2).split(kv_heads, 1)
        seen = mask.repeat(1, group, 1)[:, None]
        out = functional.scaled_dot_product_attention(
            folded.reshape(texts, kv_heads, group * count, dim), keys, values, attn_mask=seen
        )
        out = out.view(texts, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(texts, count, heads, dim)

    def _read(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads of rows [n, 2 hidden], and their residual [n, hidden]."""
        normed = self._normed(hidden, "hidden_norm")
        embedded = self._embedding[tokens.to(self._embedding.device)].to(self.device, self.dtype)
        read = torch.cat([self._normed(embedded, "input_layernorm"), normed], -1)
        return read, normed if self.shape.norm_before_residual else hidden

    def _rotated(self, heads: Tensor, positions: Tensor, which: str) -> Tensor:
        """Return queries or keys ("q", "k") [n, heads, head_dim] turned to their positions."""
        if self.shape.qk_norm:
            heads = self._normed(heads, f"self_attn.{which}_norm")
        swapped = torch.roll(heads, self.shape.head_dim // 2, -1)
        return heads * self._cos[positions] + swapped * self._sin[positions]

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return functional.rms_norm(rows, weight.shape, weight, self.shape.rms_norm_eps)
