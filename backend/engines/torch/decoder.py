"""Any decoder of transformers over paged KV: all rows of an in-flight batch as one row of its
modules, each attending to its own sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from backend.engines.models.arrays import to_array
from backend.engines.models.attention import attending_by
from backend.engines.models.spec import AttentionSpec
from backend.engines.stepping.chunks import KVTable, PassChunk, ancestors, logit_rows, moves
from backend.sampling.distributions import Floats
from backend.sequence import BLOCK_TOKENS

Masks = dict[tuple[int, int], torch.Tensor | None]
"""Masks of a chunk's scores [group x rows, keys], by window and by the heads of a KV head:
minus infinity where a row does not see a key, else 0; None where all rows see all keys.
"""


class Decoder:
    """A decoder whose layers keep KV in ``kv_blocks`` blocks (``stepping.engine.Model``).

    ``lm`` attends by ``ATTENTION``; ``layers`` is what it asks. ``taps`` are the layers, counted
    from 1, whose output drafts read. ``pools`` has each layer's keys and its values [slots, heads,
    columns].
    """

    def __init__(
        self, lm: Any, layers: Seq[AttentionSpec], *, kv_blocks: int, taps: Seq[int] = ()
    ) -> None:
        self.lm = lm
        self.device: torch.device = self.lm.device
        self.dtype: torch.dtype = self.lm.dtype
        self.vocab_size: int = self.lm.config.get_text_config().vocab_size
        self.taps = tuple(taps)
        self.hidden_states: Floats | None = None
        slots = kv_blocks * BLOCK_TOKENS
        self.pools = {
            spec.layer: [self._pool(slots, *shape) for shape in _kv(spec)] for spec in layers
        }
        self._groups = {(spec.window, spec.heads // spec.kv_heads) for spec in layers}
        self._has_windows = any(window for window, _ in self._groups)
        self._tapped: list[torch.Tensor] = []
        for layer in taps:
            self.lm.get_decoder().layers[layer - 1].register_forward_hook(self._tap)
        self._chunks: Seq[PassChunk] = ()
        self._masks: list[Masks] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def forward(self, chunks: Seq[PassChunk]) -> Floats:
        """Run the chunks in one pass, writing their KV; return the logits [rows, vocab] of the rows
        that want them.
        """
        ids = torch.tensor([[t for chunk in chunks for t in chunk.tokens]], device=self.device)
        positions = torch.tensor([[p for c in chunks for p in c.positions]], device=self.device)
        wanted = torch.tensor(logit_rows(chunks), dtype=torch.int64, device=self.device)
        self._chunks, self._masks = chunks, [self._masks_of(chunk) for chunk in chunks]
        slots = [c.table.slots[c.start : c.start + len(c.tokens)] for c in chunks]
        self._slots = torch.from_numpy(np.concatenate(slots)).to(self.device)
        self._tapped.clear()
        with attending_by(self._attend):
            out = self.lm(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
            )
        self.hidden_states = to_array(torch.stack(self._tapped, 1)) if self._tapped else None
        return to_array(out.logits[0])

    @torch.inference_mode()
    def keep(self, accepted: Seq[tuple[PassChunk, Seq[int]]]) -> None:
        """Move the KV of accepted nodes to where their tokens are in the text (``Model.keep``)."""
        sources, targets = (torch.from_numpy(slots).to(self.device) for slots in moves(accepted))
        if len(sources):
            for pool in (pool for pools in self.pools.values() for pool in pools):
                pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _pool(self, slots: int, heads: int, columns: int) -> torch.Tensor:
        return torch.zeros(slots, heads, columns, device=self.device, dtype=self.dtype)

    def _tap(self, module: nn.Module, inputs: object, output: Any) -> None:
        """Keep the output of a layer (a hook of torch)."""
        del module, inputs
        states = output[0] if isinstance(output, tuple) else output
        self._tapped.append(states.reshape(-1, states.shape[-1]))

    def _masks_of(self, chunk: PassChunk) -> Masks:
        """Return the masks of a chunk."""
        if len(chunk.tokens) == 1 and not self._has_windows:
            return dict.fromkeys(self._groups)
        positions = torch.tensor(chunk.positions)
        keys = torch.cat((torch.arange(chunk.start), positions))
        hidden = keys > positions[:, None]
        if nodes := len(chunk.parents):
            hidden[:-nodes, -nodes:] = True
            hidden[-nodes:, -nodes:] = torch.from_numpy(~ancestors(chunk.parents))
        masks: Masks = {}
        for window, group in self._groups:
            outside = hidden | (keys <= positions[:, None] - window) if window else hidden
            mask = torch.zeros(outside.shape, dtype=self.dtype).masked_fill_(outside, -math.inf)
            masks[window, group] = mask.repeat(group, 1).to(self.device)
        return masks

    def _attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,  # [1, heads, rows, key_dim]
        key: torch.Tensor,  # [1, kv_heads, rows, key_dim]
        value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
        sinks: torch.Tensor | None,  # [heads]
    ) -> torch.Tensor:
        """Store keys and values, and attend, each chunk to its own keys (``Attend``)."""
        pools = self.pools[spec.layer]
        for pool, new in zip(pools, (key, value), strict=True):
            pool.index_copy_(0, self._slots, new[0].transpose(0, 1))
        outputs, row = [], 0
        for chunk, masks in zip(self._chunks, self._masks, strict=True):
            rows = len(chunk.tokens)
            keys, values = (read_positions(pool, chunk.table, chunk.start + rows) for pool in pools)
            queries = query[0, :, row : row + rows]
            mask = masks[spec.window, spec.heads // spec.kv_heads]
            outputs.append(attend(spec, queries, keys, values, mask, sinks))
            row += rows
        return torch.cat(outputs)[None]


def attend(
    spec: AttentionSpec,
    queries: torch.Tensor,  # [heads, rows, key_dim]
    keys: torch.Tensor,  # [keys, kv_heads, key_dim]
    values: torch.Tensor,  # [keys, kv_heads, value_dim]
    mask: torch.Tensor | None,  # [group x rows, keys]
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Return the attention [rows, heads, value_dim] of a sequence's ``queries`` [heads, rows, dim]
    to its ``keys`` and ``values`` [keys, kv_heads, dim].

    The query heads of a KV head are folded into rows, so keys are never repeated.
    """
    rows, group = queries.shape[1], spec.heads // spec.kv_heads
    q = queries.reshape(spec.kv_heads, group * rows, spec.key_dim)
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if spec.softcap or sinks is not None:
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if mask is not None:
            scores = scores + mask
        if sinks is not None:
            sink_scores = sinks.view(spec.kv_heads, group, 1).repeat_interleave(rows, 1)
            scores = torch.cat((scores, sink_scores.to(scores.dtype)), -1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        shares = scores.softmax(-1, dtype=wide)[..., : k.shape[1]]
        output = shares.to(v.dtype) @ v
    else:
        output = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=spec.scale
        )[0]
    output = output.view(spec.kv_heads, group, rows, spec.value_dim)
    return output.permute(2, 0, 1, 3).reshape(rows, spec.heads, spec.value_dim)


def read_positions(
    pool: torch.Tensor,  # [slots, heads, columns]
    table: KVTable,
    positions: int,
) -> torch.Tensor:
    """Return the first positions of a sequence [positions, heads, columns].

    It copies whole blocks, also where they are neighbours: attention over a view of the pool
    takes 1.1 to 1.9 times as long on a CPU.
    """
    numbers = torch.from_numpy(table.numbers[: -(-positions // BLOCK_TOKENS)])
    blocks = pool.view(-1, BLOCK_TOKENS, *pool.shape[1:])
    return blocks.index_select(0, numbers.to(pool.device)).flatten(0, 1)[:positions]


def _kv(spec: AttentionSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return heads and columns of a layer's keys and of its values."""
    return (spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim)
