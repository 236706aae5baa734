"""The forward of an EAGLE-3 head (``folder`` has its formula), many rows at a time.

Row p is of token p and of the target's states at the token before. Its keys and values depend on
these two only: the rows of a text need no attention, and a prompt may come in any pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from backend.engines.eagle.folder import EagleShape
from backend.engines.models.rope import rope_tables


@dataclass(frozen=True, slots=True)
class RowWeights:
    """The weights of what a drafted row goes through besides attention."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    head: Tensor
    mlp_norm: Tensor
    norm: Tensor
    eps: float


class RowProducts(Protocol):
    """Multiplies rows by ``RowWeights``. The next call may overwrite what it returns."""

    def heads(
        self,
        read: Tensor,  # [n, 2 hidden]
    ) -> Tensor:
        """Return the queries, keys and values [n, columns] of what attention reads."""
        ...

    def finish(
        self,
        attended: Tensor,  # [n, heads x head_dim]
        residual: Tensor,  # [n, hidden]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer's output, the same normed, and the logits, of attention's output."""
        ...


class TorchRows:
    """``RowProducts`` by torch, in the dtype of the weights."""

    def __init__(self, weights: RowWeights) -> None:
        self._weights = weights

    def heads(
        self,
        read: Tensor,  # [n, 2 hidden]
    ) -> Tensor:
        """Return queries, keys and values (``RowProducts``)."""
        return functional.linear(read, self._weights.qkv)

    def finish(
        self,
        attended: Tensor,  # [n, heads x head_dim]
        residual: Tensor,  # [n, hidden]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return output, normed output and logits (``RowProducts``)."""
        w = self._weights
        out = residual + functional.linear(attended, w.o)
        normed = functional.rms_norm(out, w.mlp_norm.shape, w.mlp_norm, w.eps)
        gate, up = functional.linear(normed, w.gate_up).chunk(2, -1)
        out = out + functional.linear(functional.silu(gate) * up, w.down)
        vectors = functional.rms_norm(out, w.norm.shape, w.norm, w.eps)
        return out, vectors, functional.linear(vectors, w.head)


class EagleModel:
    """The weights of a head in one dtype on one device, for positions below ``positions``.

    ``embedding`` and ``lm_head`` are the target's, for heads
    without their own.
    """

    def __init__(
        self,
        shape: EagleShape,
        tensors: Mapping[str, Tensor],  # as in ``folder``: fc.weight [h, n H] and others
        *,
        embedding: Tensor,  # [vocab, hidden]
        lm_head: Tensor,  # [vocab, hidden]
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kernels: Callable[[RowWeights], RowProducts] | None = None,
    ) -> None:
        """``kernels``: what multiplies the matrices of drafted rows; None: torch."""
        kernels = kernels or TorchRows
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        weights = {
            name: t.to(device, dtype) for name, t in tensors.items() if t.is_floating_point()
        }
        self.token_ids = tensors["token_ids"].to(device, torch.int64)
        self._weights = weights
        self._embedding = weights.pop("embed_tokens.weight", embedding)
        rows = weights.pop("lm_head.weight", None)
        if rows is None:
            rows = lm_head[self.token_ids.to(lm_head.device)].to(device, dtype)
        q, k, v = (weights.pop(f"self_attn.{name}_proj.weight") for name in "qkv")
        self._kv, qkv = torch.cat([k, v]), torch.cat([q, k, v])
        gate_up = torch.cat([weights.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")])
        o, down = weights.pop("self_attn.o_proj.weight"), weights.pop("mlp.down_proj.weight")
        norms = weights["post_attention_layernorm.weight"], weights["norm.weight"]
        self._rows = kernels(RowWeights(qkv, o, gate_up, down, rows, *norms, shape.rms_norm_eps))
        self._cos, self._sin = (
            table[:, None].to(device, dtype) for table in rope_tables(shape, positions)
        )

    def fuse(self, states: Tensor) -> Tensor:
        """Return [n, hidden] of the target's states [n, layers, target_hidden]."""
        states = states.to(self.device, self.dtype)
        if self.shape.fuse == "each":
            parts = enumerate(states.unbind(1))
            states = torch.stack([self._norm(part, f"fc_norm.{n}") for n, part in parts], 1)
        flat = states.flatten(1)
        if self.shape.fuse == "joint":
            flat = self._norm(flat, "input_norm")
        return functional.linear(flat, self._weights["fc.weight"], self._weights.get("fc.bias"))

    def key_values(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the keys and values [n, 2 kv_heads, head_dim] of rows: ``tokens`` int64[n] after
        the fused states ``hidden`` [n, hidden], at ``positions`` int64[n].
        """
        read = self._read(tokens, hidden)[0]
        heads = functional.linear(read, self._kv).view(len(read), -1, self.shape.head_dim)
        keys, values = heads.split(self.shape.num_kv_heads, 1)
        return torch.cat([self._rotate(keys, positions, "k"), values], 1)

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
        heads = self._rows.heads(read).to(self.dtype).view(len(read), -1, shape.head_dim)
        query, keys, values = heads.split([shape.num_heads, *[shape.num_kv_heads] * 2], 1)
        places = positions.flatten()
        new = torch.cat([self._rotate(keys, places, "k"), values], 1)
        pool[:, -count:] = new.view(texts, count, *new.shape[1:])
        query = self._rotate(query, places, "q").view(texts, count, *query.shape[1:])
        attended = self._attend(query, pool, mask).reshape(len(read), -1)
        out, vectors, logits = self._rows.finish(attended, residual)
        carried = (vectors if shape.norm_output else out).to(self.dtype)
        return logits.view(texts, count, -1), carried.view(texts, count, -1)

    def _attend(self, query: Tensor, pool: Tensor, mask: Tensor) -> Tensor:
        """Return the attention [b, r, heads, head_dim] of queries of that shape; ``pool`` and
        ``mask`` are those of ``rows``. Queries of a KV head are folded into rows, so that keys are
        never repeated.
        """
        texts, count, heads, dim = query.shape
        kv_heads = self.shape.num_kv_heads
        group = heads // kv_heads
        folded = query.view(texts, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        keys, values = pool.transpose(1, 2).split(kv_heads, 1)
        is_visible = mask.repeat(1, group, 1)[:, None]
        out = functional.scaled_dot_product_attention(
            folded.reshape(texts, kv_heads, group * count, dim), keys, values, attn_mask=is_visible
        )
        out = out.view(texts, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(texts, count, heads, dim)

    def _read(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads of rows [n, 2 hidden], and their residual [n, hidden]:
        ``tokens`` int64[n], ``hidden`` [n, hidden].
        """
        normed = self._norm(hidden, "hidden_norm")
        embedded = self._embedding[tokens.to(self._embedding.device)].to(self.device, self.dtype)
        read = torch.cat([self._norm(embedded, "input_layernorm"), normed], -1)
        return read, normed if self.shape.norm_before_residual else hidden

    def _rotate(self, heads: Tensor, positions: Tensor, which: str) -> Tensor:
        """Return queries or keys ("q", "k") [n, heads, head_dim] turned to their ``positions``
        int64[n].
        """
        if self.shape.qk_norm:
            heads = self._norm(heads, f"self_attn.{which}_norm")
        swapped = torch.roll(heads, self.shape.head_dim // 2, -1)
        return heads * self._cos[positions] + swapped * self._sin[positions]

    def _norm(
        self,
        rows: Tensor,  # [..., columns of the weight]
        name: str,
    ) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return functional.rms_norm(rows, weight.shape, weight, self.shape.rms_norm_eps)
