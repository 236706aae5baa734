"""The forward of an EAGLE-3 head on torch: on GPUs, in fp64, and on CPUs without OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from backend.engines.eagle.engine import Flags, HeadRows
from backend.engines.eagle.folder import EagleShape
from backend.engines.models.arrays import to_array
from backend.engines.models.rope import rope_tables
from backend.sampling.distributions import Floats
from backend.sampling.draw import IntArray


class TorchModel:
    """``EagleModel`` in one dtype on one device.

    ``embedding`` and ``lm_head`` are the target's, for heads without their own.
    """

    def __init__(
        self,
        shape: EagleShape,
        tensors: Mapping[str, Tensor],  # as in ``folder``: fc.weight [h, n H] and others
        *,
        embedding: Tensor,  # [vocab, hidden]
        lm_head: Tensor,  # [vocab, hidden]
        positions: int,
        slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self._dtype, self._device = shape, dtype, torch.device(device)
        self.token_ids = tensors["token_ids"].numpy()
        weights = {
            name: t.to(device, dtype) for name, t in tensors.items() if t.is_floating_point()
        }
        self._embedding = weights.pop("embed_tokens.weight", embedding)
        if not shape.own_head:
            weights["lm_head.weight"] = lm_head[self.token_ids].to(device, dtype)
        weights["qkv"] = torch.cat([weights.pop(f"self_attn.{name}_proj.weight") for name in "qkv"])
        weights["kv"] = weights["qkv"][shape.num_heads * shape.head_dim :]
        weights["gate_up"] = torch.cat(
            [weights.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        )
        self._weights = weights
        self._cos: Tensor
        self._sin: Tensor
        self._cos, self._sin = (
            table[:, None].to(device, dtype) for table in rope_tables(shape, positions, torch)
        )
        width = 2 * shape.num_kv_heads, shape.head_dim
        self._pool = torch.zeros(slots + 1, *width, dtype=dtype, device=device)
        """[slots, 2 kv_heads, head_dim]: keys and values; the last row stays zero."""
        self._drafted = self._pool[None, :0]
        """[texts, columns, 2 kv_heads, head_dim]: those that proposals attend to."""

    @torch.inference_mode()
    def fuse(self, states: Floats) -> Floats:
        """Return the fused states of ``states[n, layers, target_hidden]`` (``EagleModel``)."""
        rows = self._tensor(states)
        if self.shape.fuse == "each":
            parts = enumerate(rows.unbind(1))
            rows = torch.stack([self._norm(part, f"fc_norm.{n}") for n, part in parts], 1)
        flat = rows.flatten(1)
        if self.shape.fuse == "joint":
            flat = self._norm(flat, "input_norm")
        return to_array(
            functional.linear(flat, self._weights["fc.weight"], self._weights.get("fc.bias"))
        )

    @torch.inference_mode()
    def write(self, rows: HeadRows, slots: IntArray) -> None:
        """Write rows of texts into ``slots[n]`` (``EagleModel``)."""
        heads, _ = self._read(rows, "kv")
        self._pool[self._tensor(slots)] = self._key_values(heads, self._tensor(rows.positions))

    @torch.inference_mode()
    def begin(self, slots: IntArray, most: int) -> None:
        """Begin proposals for ``slots[texts, columns]`` (``EagleModel``)."""
        texts, count = slots.shape
        self._drafted = self._pool.new_empty(texts, count + most, *self._pool.shape[1:])
        self._drafted[:, :count] = self._pool[self._tensor(slots)]

    @torch.inference_mode()
    def run(self, rows: HeadRows, mask: Flags) -> tuple[Floats, Floats]:
        """Run drafted rows by ``mask[texts, rows, columns]`` (``EagleModel``)."""
        shape, (texts, count, end) = self.shape, mask.shape
        heads, residual = self._read(rows, "qkv")
        query, new = heads.split([shape.num_heads, 2 * shape.num_kv_heads], 1)
        places, columns = self._tensor(rows.positions), self._drafted[:texts, :end]
        columns[:, -count:] = self._key_values(new, places).view(texts, count, *new.shape[1:])
        query = self._rotate(query, places, "q").view(texts, count, *query.shape[1:])
        attended = self._attend(query, columns, self._tensor(mask)).reshape(len(heads), -1)
        out = residual + self._product(attended, "self_attn.o_proj.weight")
        normed = self._norm(out, "post_attention_layernorm")
        gate, up = self._product(normed, "gate_up").chunk(2, -1)
        out = out + self._product(functional.silu(gate) * up, "mlp.down_proj.weight")
        vectors = self._norm(out, "norm")
        carried = vectors if shape.norm_output else out
        return to_array(self._product(vectors, "lm_head.weight")), to_array(carried)

    def _attend(
        self,
        query: Tensor,  # [texts, rows, heads, head_dim]
        columns: Tensor,  # [texts, columns, 2 kv_heads, head_dim], keys and values
        mask: Tensor,  # bool[texts, rows, columns]
    ) -> Tensor:
        """Return attention's output, of the shape of ``query``. Queries of a KV head are folded
        into rows, so that keys are never repeated.
        """
        texts, count, heads, dim = query.shape
        kv_heads = self.shape.num_kv_heads
        group = heads // kv_heads
        folded = query.view(texts, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        keys, values = columns.transpose(1, 2).split(kv_heads, 1)
        is_visible = mask.repeat(1, group, 1)[:, None]
        out = functional.scaled_dot_product_attention(
            folded.reshape(texts, kv_heads, group * count, dim), keys, values, attn_mask=is_visible
        )
        out = out.view(texts, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(texts, count, heads, dim)

    def _read(self, rows: HeadRows, which: str) -> tuple[Tensor, Tensor]:
        """Return heads [n, heads, head_dim], all ("qkv") or those of keys and values ("kv"), and
        the residual [n, hidden].
        """
        hidden = self._tensor(rows.hidden)
        normed = self._norm(hidden, "hidden_norm")
        embedded = self._embedding[rows.tokens].to(self._device, self._dtype)
        read = torch.cat([self._norm(embedded, "input_layernorm"), normed], -1)
        heads = self._product(read, which).unflatten(1, (-1, self.shape.head_dim))
        return heads, normed if self.shape.norm_before_residual else hidden

    def _key_values(
        self,
        heads: Tensor,  # [n, 2 kv_heads, head_dim], keys and values
        positions: Tensor,  # int64[n]
    ) -> Tensor:
        """Return keys turned to their positions, and the values."""
        keys, values = heads.split(self.shape.num_kv_heads, 1)
        return torch.cat([self._rotate(keys, positions, "k"), values], 1)

    def _rotate(
        self,
        heads: Tensor,  # [n, heads, head_dim]
        positions: Tensor,  # int64[n]
        which: str,
    ) -> Tensor:
        """Return queries ("q") or keys ("k") turned to their positions."""
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

    def _product(
        self,
        rows: Tensor,  # [n, columns of the weight]
        name: str,
    ) -> Tensor:
        return functional.linear(rows, self._weights[name])

    def _tensor(
        self,
        array: Floats | IntArray | Flags,  # of any shape, such as [n, hidden]
    ) -> Tensor:
        """Return an array on the device, floating-point numbers in its dtype."""
        tensor = torch.from_numpy(array).to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
