"""A lean forward of Llama-family decoders over paged KV: all rows of an in-flight batch in one
packed matrix.

Fused qkv and gate/up projections, preallocated KV, and weights packed once for oneDNN on CPUs:
plain ``F.linear`` packs them anew in every call there, which costs more than the product itself at
a few rows (measured: 2.5 times at one to nine rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from backend.engines.torch.checkpoint import LlamaConfig, Weights
from backend.engines.torch.chunks import Chunk, ancestors
from backend.engines.torch.fp16 import Fp16Linear
from backend.engines.torch.int8 import Int8Linear
from backend.engines.torch.padded import Padded
from backend.engines.torch.static import Attend, StaticPasses, recorder
from backend.sequence import BLOCK_TOKENS

PACKED_ROWS = 32
"""The row count that oneDNN is told to lay out packed weights for: steps of one to nine rows take 3
% less than with 8.
"""

MIN_FP32_ROWS = 4
"""Rows that an fp32 product is padded to: oneDNN takes longer for one or two rows of a packed
weight than for four, but for short rows.
"""

SHORT_ROW = 512

SMALL_WEIGHT = 1 << 17
"""Elements below which a weight of an fp32 model stays plain: its product takes less than a packed
one's 10 us and more of overhead (a tiny draft's layers).
"""


class Linear:
    """``x @ weight.T + bias`` with the weight packed once where the processor and dtype have a
    packed kernel.
    """

    __slots__ = ("_bias", "_packed", "_padded", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = _packs(weight)
        self._padded = weight.dtype == torch.float32 and weight.shape[1] >= SHORT_ROW
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            if self._packed
            else weight.contiguous()
        )
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] of ``rows`` [rows, in]."""
        if self._packed:
            count = len(rows)
            if self._padded and count < MIN_FP32_ROWS:
                rows = functional.pad(rows, (0, 0, 0, MIN_FP32_ROWS - count))
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._weight, self._bias, "none", [], ""
            )
            return product[:count]
        return functional.linear(rows, self._weight, self._bias)


Product = Linear | Fp16Linear | Int8Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer and its KV pool [slots, 2 x kv_heads, head_dim] (keys
    first).
    """

    attention_norm: torch.Tensor
    qkv: Product
    output: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product
    pool: torch.Tensor


class Llama:
    """A decoder with a KV pool of ``kv_blocks`` blocks; positions up to ``max_positions``.

    ``pads``: of the chunks that are attended to beside others, all are padded to the longest, not
    only those of a tile (``padded``). ``static``: passes of short chunks run in static shapes, as
    CUDA graphs where the device is CUDA (``static``). ``matrices``: what they are rounded to
    (``fp16``, ``int8``), the embedding is not; empty: nothing. ``weights`` is emptied while its
    layers are packed, so that memory never holds them all twice.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        *,
        kv_blocks: int,
        max_positions: int,
        pads: bool = False,
        static: bool = False,
        matrices: str = "",
    ) -> None:
        self.config = config
        self._pads = pads
        self._matrices = matrices
        self._embedding = weights["model.embed_tokens.weight"]
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self._norm = weights["model.norm.weight"]
        self._head = self._linear(weights.get("lm_head.weight", self._embedding))
        self.token_ids = weights.get("lm_head.token_ids")
        shape = (
            config.num_layers,
            (kv_blocks + static) * BLOCK_TOKENS,
            2 * config.num_kv_heads,
            config.head_dim,
        )
        self._pool = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self._layers = [self._layer(weights, index, pool) for index, pool in enumerate(self._pool)]
        cos, sin = rope_tables(config, max_positions)
        self._cos, self._sin = (table.to(self.device, self.dtype)[:, None] for table in (cos, sin))
        group, record = config.num_heads // config.num_kv_heads, recorder(self.device)
        passes = StaticPasses(
            self._run,
            scratch_block=kv_blocks,
            group=group,
            dtype=self.dtype,
            device=self.device,
            record=record,
        )
        self._static = passes if static else None

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        if self._matrices == "int8":
            return Int8Linear(weight, bias)
        if self._matrices == "fp16" and weight.numel() >= SMALL_WEIGHT:
            return Fp16Linear(weight, bias)
        return Linear(weight.to(self.dtype), bias)

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
            qkv=self._linear(qkv, bias("q_proj", "k_proj", "v_proj")),
            output=self._linear(get("self_attn.o_proj.weight"), bias("o_proj")),
            mlp_norm=get("post_attention_layernorm.weight"),
            gate_up=self._linear(
                torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
            ),
            down=self._linear(get("mlp.down_proj.weight")),
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
                self.config.draft_vocab_size or self.config.vocab_size,
                device=self.device,
                dtype=self.dtype,
            )
        hidden = functional.rms_norm(
            self._hidden(chunks), (self.config.hidden_size,), self._norm, self.config.rms_norm_eps
        )
        return self._head(hidden)

    def _hidden(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Run the chunks; return the hidden states of the rows that want logits."""
        if self._static and self._static.takes(chunks):
            return self._static(chunks)
        ids = torch.tensor(
            [token for chunk in chunks for token in chunk.tokens], device=self.device
        )
        positions = torch.tensor(
            [p for chunk in chunks for p in chunk.positions], device=self.device
        )
        slots = _joined(
            [chunk.table.slots[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
        )
        hidden = self._run(ids, positions, slots, self._attention(chunks))
        wanted = _logit_rows(chunks)
        return (
            hidden
            if len(wanted) == len(ids)
            else hidden[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        )

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Run the layers on tokens [rows], writing KV to ``slots``; return hidden states [rows,
        hidden].
        """
        config, heads, kv_heads = self.config, self.config.num_heads, self.config.num_kv_heads
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = self._embedding[ids]
        for layer in self._layers:
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
        return hidden

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the KV of slots [n] to others [n] in every layer, as if all at once. Call under
        ``torch.inference_mode``.
        """
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

    def _attention(self, chunks: Seq[Chunk]) -> Attend:
        """Return attention over the chunks, a function of ``qkv`` and a layer's pool."""
        together = self._side_by_side(chunks)
        alone = sorted({*range(len(chunks))}.difference(*together))
        masks = [self._mask(chunks[number]) for number in alone]
        if not together:
            return lambda qkv, pool: self._attend(qkv, pool, chunks, masks)
        firsts = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
        group = self.config.num_heads // self.config.num_kv_heads
        padded = [
            Padded(
                [chunks[n] for n in numbers],
                [firsts[n] for n in numbers],
                group,
                self.dtype,
                self.device,
                uniform=self._pads,
            )
            for numbers in together
        ]
        others = torch.tensor(
            [row for n in alone for row in range(firsts[n], firsts[n + 1])],
            dtype=torch.int64,
            device=self.device,
        )
        order = torch.cat([*(part.rows for part in padded), others]).argsort()

        def both(qkv: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
            parts = [part(qkv, pool) for part in padded]
            if alone:
                parts.append(self._attend(qkv[others], pool, [chunks[n] for n in alone], masks))
            return _joined(parts)[order]

        return both

    def _side_by_side(self, chunks: Seq[Chunk]) -> list[list[int]]:
        """Return the chunks that attend side by side, by number: all at once where the engine pads,
        else those of as many rows together.

        In tiles a chunk of nine rows would have every other padded to nine: one proposal of eight
        tokens cost a batch of 16 as much as 30.
        """
        together = [number for number, chunk in enumerate(chunks) if chunk.piece_tokens is not None]
        if self._pads:
            return [together] if together else []
        by_rows: dict[int, list[int]] = {}
        for number in sorted(together, key=lambda number: chunks[number].start):
            by_rows.setdefault(len(chunks[number].tokens), []).append(number)
        return [numbers for numbers in by_rows.values() if len(numbers) > 1]

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


def rope_tables(config: LlamaConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [positions, head_dim] of the rotary embedding in fp32, the first half of
    sin negated.

    With that sign, rotating is ``x * cos + roll(x, head_dim / 2) * sin``. Scaling as in
    transformers: ``linear`` divides the frequencies by the factor; ``llama3`` does so for long
    waves only and passes smoothly to short ones (Llama 3.1's ``config.json``).
    """
    inverse = 1.0 / config.rope_theta ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    )
    rope = config.rope
    if rope["rope_type"] == "linear":
        inverse = inverse / rope["factor"]
    elif rope["rope_type"] == "llama3":
        waves = (
            rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
        )  # waves that fit the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((waves - low) / (high - low)).clamp(0.0, 1.0)
        inverse = (1 - smooth) * inverse / rope["factor"] + smooth * inverse
    angles = torch.outer(torch.arange(positions).float(), inverse)
    return angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=1)


def _logit_rows(chunks: Seq[Chunk]) -> list[int]:
    wanted: list[int] = []
    row = 0
    for chunk in chunks:
        row += len(chunk.tokens)
        wanted += range(row - chunk.logits, row)
    return wanted


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= SMALL_WEIGHT
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
