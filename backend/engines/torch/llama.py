"""A forward of Llama-family decoders over paged KV: all rows of an in-flight batch in one packed
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.engines.checkpoint import LlamaConfig, Weights
from backend.engines.stepping.chunks import Chunk, ancestors, logit_rows, moves
from backend.engines.stepping.rope import rope_tables
from backend.sequence import BLOCK_TOKENS

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of a pass: of ``qkv`` [rows, heads + 2 kv_heads, head_dim] over a layer's pool, the
output [rows, heads x head_dim].
"""


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] of ``rows`` [rows, in]."""
        return functional.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer and its KV pool [slots, 2 x kv_heads, head_dim] (keys
    first).
    """

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    pool: torch.Tensor


class Llama:
    """A decoder with a KV pool of ``kv_blocks`` blocks; positions up to ``max_positions``.

    ``taps``: the layers, counted from 1, after which ``hidden_states`` are kept. ``weights`` is
    emptied while its layers are made, so that memory never holds them all twice.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kv_blocks: int,
        max_positions: int,
        taps: Seq[int] = (),
    ) -> None:
        self.config, self.taps = config, tuple(taps)
        self.hidden_states: torch.Tensor | None = None
        self._embedding = weights["model.embed_tokens.weight"]
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self._norm = weights["model.norm.weight"]
        self._head = Linear(weights.get("lm_head.weight", self._embedding))
        shape = (
            config.num_layers,
            kv_blocks * BLOCK_TOKENS,
            2 * config.num_kv_heads,
            config.head_dim,
        )
        self._pool = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self._layers = [self._layer(weights, index, pool) for index, pool in enumerate(self._pool)]
        cos, sin = rope_tables(config, max_positions)
        self._cos, self._sin = (table.to(self.device, self.dtype)[:, None] for table in (cos, sin))

    def _layer(self, weights: Weights, index: int, pool: torch.Tensor) -> Layer:
        def get(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{index}.{name}")

        def bias(*names: str) -> torch.Tensor | None:
            present = [
                weights.pop(key)
                for name in names
                if (key := f"model.layers.{index}.self_attn.{name}.bias") in weights
            ]
            return torch.cat(present) if present else None

        qkv = torch.cat(
            [get(f"self_attn.{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
        )
        return Layer(
            attention_norm=get("input_layernorm.weight"),
            qkv=Linear(qkv, bias("q_proj", "k_proj", "v_proj")),
            output=Linear(get("self_attn.o_proj.weight"), bias("o_proj")),
            mlp_norm=get("post_attention_layernorm.weight"),
            gate_up=Linear(torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])),
            down=Linear(get("mlp.down_proj.weight")),
            pool=pool,
        )

    def forward(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Run the chunks in one pass, writing their KV; return the logits of the rows that want
        them, chunk by chunk: [rows, vocab].

        ``vocab`` is the head's (S of a shortlisted draft). Call under ``torch.inference_mode``.
        """
        if not any(chunk.logits for chunk in chunks):
            self._hidden(chunks)
            return torch.empty(
                0,
                self.config.vocab_size,
                device=self.device,
                dtype=self.dtype,
            )
        hidden = functional.rms_norm(
            self._hidden(chunks), (self.config.hidden_size,), self._norm, self.config.rms_norm_eps
        )
        return self._head(hidden)

    def _hidden(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Run the chunks; return the hidden states of the rows that want logits."""
        ids = torch.tensor(
            [token for chunk in chunks for token in chunk.tokens], device=self.device
        )
        positions = torch.tensor(
            [p for chunk in chunks for p in chunk.positions], device=self.device
        )
        slots = _joined(
            [chunk.table.slots[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
        )
        wanted = torch.tensor(logit_rows(chunks), dtype=torch.int64, device=self.device)
        masks = [self._mask(chunk) for chunk in chunks]

        def attend(qkv: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
            return self._attend(qkv, pool, chunks, masks)

        return self._run(ids, positions, slots, attend, wanted)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Run the layers on tokens [rows], writing KV to ``slots``; return the hidden states
        [wanted, hidden] of the rows ``wanted``.
        """
        tapped = []
        config, heads, kv_heads = self.config, self.config.num_heads, self.config.num_kv_heads
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = self._embedding[ids]
        for number, layer in enumerate(self._layers, 1):
            normed = functional.rms_norm(
                hidden, (config.hidden_size,), layer.attention_norm, config.rms_norm_eps
            )
            qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, config.head_dim)
            rotated = qkv[:, : heads + kv_heads]
            swapped = torch.roll(rotated, config.head_dim // 2, -1)
            rotated.mul_(cos).addcmul_(swapped, sin)
            layer.pool.index_copy_(0, slots, qkv[:, heads:])
            hidden += layer.output(attend(qkv, layer.pool))
            gate_up = layer.gate_up(
                functional.rms_norm(
                    hidden, (config.hidden_size,), layer.mlp_norm, config.rms_norm_eps
                )
            )
            gate, up = (
                gate_up[:, : config.intermediate_size],
                gate_up[:, config.intermediate_size :],
            )
            hidden += layer.down(functional.silu(gate).mul_(up))
            if number in self.taps:
                tapped.append(hidden.clone())
        self.hidden_states = torch.stack(tapped, 1) if tapped else None
        return hidden if len(wanted) == len(ids) else hidden[wanted]

    def keep(self, accepted: Seq[tuple[Chunk, Seq[int]]]) -> None:
        """Move the KV of accepted nodes to where their tokens are in the text (``Model.keep``)."""
        sources, targets = moves(accepted)
        if len(sources):
            self._pool.index_copy_(1, targets, self._pool.index_select(1, sources))

    def _mask(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the mask [group x rows, keys] (0 or -inf) of a chunk, none for a single row, which
        sees every key.
        """
        rows = len(chunk.tokens)
        if rows == 1:
            return None
        mask = torch.full(
            (rows, chunk.start + rows), -math.inf, device=self.device, dtype=self.dtype
        ).triu_(chunk.start + 1)
        if chunk.parents:
            nodes = ancestors(chunk.parents).to(self.device)
            mask[-len(nodes) :, -len(nodes) :].masked_fill_(~nodes, -math.inf)
        return mask.repeat(self.config.num_heads // self.config.num_kv_heads, 1)

    def _attend(
        self,
        qkv: torch.Tensor,
        pool: torch.Tensor,
        chunks: Seq[Chunk],
        masks: Seq[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return attention's output [rows, heads x head_dim], each chunk over its own keys.

        The query heads of a KV head are folded into the query length, so that keys are read once
        per KV head and never repeated.
        """
        kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        group = self.config.num_heads // kv_heads
        outputs, row = [], 0
        for chunk, mask in zip(chunks, masks, strict=True):
            rows, table = len(chunk.tokens), chunk.table
            keys = chunk.start + rows
            kv = table.read(pool, keys).transpose(0, 1)[None]
            queries = qkv[row : row + rows, : kv_heads * group].view(
                rows, kv_heads, group, head_dim
            )
            queries = queries.permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, head_dim)
            output = functional.scaled_dot_product_attention(
                queries, kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=mask
            )
            outputs.append(
                output.reshape(kv_heads, group, rows, head_dim)
                .permute(2, 0, 1, 3)
                .reshape(rows, kv_heads * group * head_dim)
            )
            row += rows
        return _joined(outputs)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
