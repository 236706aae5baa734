"""A Llama as an OpenVINO graph, straight from its weights."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from openvino import Model, Output, Type, op, opset13

from backend.engines.checkpoint import Weights
from backend.engines.models.spec import PlainLlama
from backend.engines.openvino.paged_attention import Heads, paged_attention
from backend.engines.openvino.parts import (
    floats,
    ints,
    matrix,
    named,
    normed,
    number,
    parameter,
)
from backend.engines.stepping.rope import rope_tables

LAYOUT = {
    "past_lens": [-1],
    "subsequence_begins": [-1],
    "block_indices": [-1],
    "block_indices_begins": [-1],
    "max_context_len": [],
}
"""Inputs that say where sequences lie, all int32, with their shapes."""


def build(
    config: PlainLlama,
    weights: Weights,
    *,
    max_positions: int,
    int8: bool,
    repeats: bool,
    best: int = 0,
    taps: Seq[int] = (),
    stored: Type = Type.f32,
) -> Model:
    """Return the graph of a model whose ``weights`` are fp32 or bf16 (emptied on the way).

    Inputs: ``ids`` i64[T], ``positions`` i64[E], ``LAYOUT``, ``rows`` i32[R] (which want logits),
    and caches ``key_cache.<layer>``, ``value_cache.<layer>``. Output: ``logits`` f32[R, vocab].
    ``int8``: matrices in int8 with a scale a row. ``repeats``: attention has E rows, ``expand``
    i32[E] of the T others, and after it ``compress`` i32[T] of those; else E = T. ``best``: there
    are also ``best_ids`` i32 and ``best_logits`` f32[R, best], the greatest first, and ``masses``
    f32[R, 1], the sums of exp(logit - greatest). ``taps``: there is ``hidden_states`` [T,
    taps x hidden], the output of these layers, as ``stored``: an output of another type than the
    activations would have the sums that lead to it in fp32.
    """
    builder = _Builder(config, weights, max_positions, int8=int8, repeats=repeats)
    return builder.model(best, taps, stored)


@dataclass(slots=True)
class _Inputs:
    ids: op.Parameter
    positions: op.Parameter
    rows: op.Parameter
    layout: dict[str, op.Parameter]
    repeats: list[op.Parameter]
    caches: list[op.Parameter]

    def all(self) -> list[op.Parameter]:
        """Return them in one list."""
        layout = self.layout.values()
        return [self.ids, self.positions, self.rows, *layout, *self.repeats, *self.caches]


class _Builder:
    def __init__(
        self,
        config: PlainLlama,
        weights: Weights,
        max_positions: int,
        *,
        int8: bool,
        repeats: bool,
    ) -> None:
        self._config, self._weights, self._int8 = config, weights, int8
        inputs = self._inputs = _Inputs(
            parameter("ids", [-1], Type.i64),
            parameter("positions", [-1], Type.i64),
            parameter("rows", [-1], Type.i32),
            {name: parameter(name, shape, Type.i32) for name, shape in LAYOUT.items()},
            [parameter(name, [-1], Type.i32) for name in ("expand", "compress") if repeats],
            [],
        )
        self._layout = {name: node.output(0) for name, node in inputs.layout.items()}
        cos, signed = (table[:, None, None] for table in rope_tables(config, max_positions))
        half = config.head_dim // 2
        sin = torch.cat([-signed[..., :half], signed[..., half:]], -1)
        self._cos, self._sin = (
            opset13.gather(opset13.constant(table.numpy()), inputs.positions, ints(0))
            for table in (cos, sin)
        )

    def model(self, best: int, taps: Seq[int], stored: Type) -> Model:
        """Return the graph."""
        embedding = matrix(self._weights["model.embed_tokens.weight"], rounded=False)
        hidden = opset13.gather(embedding, self._inputs.ids, ints(0))
        tapped = []
        for layer in range(self._config.num_layers):
            hidden = self._layer(hidden, layer)
            if layer + 1 in taps:
                tapped.append(hidden)
        hidden = opset13.gather(hidden, self._inputs.rows, ints(0))
        hidden = self._norm(hidden, "model.norm.weight")
        head = self._weights.get("lm_head.weight")
        if head is None and self._int8:
            head = self._weights["model.embed_tokens.weight"]
        rows = embedding if head is None else matrix(head, rounded=self._int8)
        logits = opset13.matmul(hidden, rows, False, True)
        outputs = {"logits": logits.output(0), **(ranked(logits, best) if best else {})}
        if tapped:
            outputs["hidden_states"] = opset13.convert(opset13.concat(tapped, 1), stored).output(0)
        return named(outputs, self._inputs.all(), "llama")

    def _layer(self, hidden: Output, layer: int) -> Output:
        config, at = self._config, f"model.layers.{layer}."
        normed = self._norm(hidden, f"{at}input_layernorm.weight")
        if self._inputs.repeats:
            normed = opset13.gather(normed, self._inputs.repeats[0], ints(0))
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = self._product(normed, *(f"{at}self_attn.{name}_proj" for name in ("q", "k", "v")))
        query, key, value = self._split(qkv, [config.head_dim * count for count in heads])
        caches = [cache_input(f"{kind}_cache.{layer}") for kind in ("key", "value")]
        self._inputs.caches += caches
        attended = paged_attention(
            (
                self._rotated(query, config.num_heads),
                self._rotated(key, config.num_kv_heads),
                value,
            ),
            (caches[0].output(0), caches[1].output(0)),
            self._layout,
            Heads(config.num_kv_heads, config.head_dim, config.head_dim),
        )
        if self._inputs.repeats:
            attended = opset13.gather(attended, self._inputs.repeats[1], ints(0)).output(0)
        hidden = opset13.add(hidden, self._product(attended, f"{at}self_attn.o_proj"))
        normed = self._norm(hidden, f"{at}post_attention_layernorm.weight")
        gate, up = self._split(
            self._product(normed, f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
            [config.intermediate_size] * 2,
        )
        inner = opset13.multiply(opset13.swish(gate), up)
        return opset13.add(hidden, self._product(inner, f"{at}mlp.down_proj"))

    def _norm(self, hidden: Output, name: str) -> Output:
        return normed(hidden, self._weights.pop(name), self._config.rms_norm_eps)

    def _product(self, rows: Output, *names: str) -> Output:
        """Return the product with matrices side by side."""
        matrices = [self._weights.pop(f"{name}.weight") for name in names]
        product = opset13.matmul(rows, matrix(torch.cat(matrices), rounded=self._int8), False, True)
        biases = [
            self._weights.pop(key) for name in names if (key := f"{name}.bias") in self._weights
        ]
        if not biases:
            return product
        return opset13.add(product, opset13.constant(floats(torch.cat(biases))))

    @staticmethod
    def _split(rows: Output, sizes: list[int]) -> list[Output]:
        parts: list[Output] = opset13.variadic_split(rows, ints(-1), ints(sizes)).outputs()
        return parts

    def _rotated(self, rows: Output, heads: int) -> Output:
        """Rotate [rows, heads x head_dim] by the rows' positions, in the form that becomes one
        operation (``RoPE``).
        """
        head_dim = self._config.head_dim
        apart = opset13.reshape(rows, ints([0, heads, 1, head_dim]), True)
        first, second = (
            opset13.slice(apart, ints([start]), ints([stop]), ints([1]), ints([3]))
            for start, stop in ((0, head_dim // 2), (head_dim // 2, 2**31 - 1))
        )
        turned = opset13.concat([opset13.multiply(second, number(-1.0)), first], -1)
        rotated = opset13.add(
            opset13.multiply(apart, self._cos), opset13.multiply(turned, self._sin)
        )
        return opset13.reshape(rotated, ints([0, heads * head_dim]), True).output(0)


def ranked(logits: Output, count: int) -> dict[str, Output]:
    """Return the outputs that rank ``count`` columns (``build``: ``best``)."""
    # Not stable: that takes longer than NumPy does, and of equals a draft may propose either.
    found = opset13.topk(logits, ints(count), -1, "max", "value", "i32")
    greatest = opset13.reduce_max(logits, ints(-1), True)
    masses = opset13.reduce_sum(opset13.exp(opset13.subtract(logits, greatest)), ints(-1), True)
    values, ids = found.outputs()
    return {"best_ids": ids, "best_logits": values, "masses": masses.output(0)}


def cache_input(name: str) -> op.Parameter:
    """Return a cache whose precision and layout the plug-in settles."""
    return parameter(name, [-1, -1, -1, -1], Type.dynamic)
