"""The network of a Llama-family decoder step, from token ids to accepted tokens, over any ``Graph``
(TensorRT or ONNX).

The batch is padded: [batch, queries] rows run, each sequence over ``past`` keys of its own, which
``slots`` finds in the layers' pools, and over the step's new keys, under any mask. The new keys and
values come out; the owner of the pools writes them where they belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from backend.engines.models.rope import rope_tables
from backend.engines.models.spec import PlainLlama
from backend.engines.trt_graph.inputs import LOGITS
from engines_build.trt_graph.distributions import VocabularyRows
from engines_build.trt_graph.graph import (
    BOOL,
    F32,
    F64,
    I32,
    NUMPY,
    Graph,
    GraphTensor,
    concatenate,
    where,
)
from engines_build.trt_graph.verification import verify

MASKED = -1e30
"""The score of a key that a row must not see; finite, so that nothing but padding comes of a row
that sees none.
"""


@dataclass(frozen=True, slots=True)
class StepNetwork:
    """The shape of the compiled network: a model's step with a verification (``greedy``,
    ``drawn``), or ``logits``.

    ``dtype`` is the model's (f64, f32, f16, bf16).
    """

    config: PlainLlama
    dtype: str
    max_positions: int
    network: str = LOGITS

    @property
    def wide(self) -> str:
        """The dtype of norms, softmax and distributions."""
        return F64 if self.dtype == F64 else F32


def describe(graph: Graph, step: StepNetwork) -> None:
    """Declare inputs, layers and outputs of a step.

    Inputs: ``ids`` and ``positions`` i32 [batch, queries], ``slots`` i32 [batch, past] (what is
    unused must be masked, and finite in the pools), ``mask`` bool [batch, queries, past + queries]
    (total), ``wanted`` i32 [batch, rows]: rows of the flattened batch that are decided about, and
    ``pool_0``... [slots, 2 x kv_heads, head_dim]. Outputs: ``kv_0``... [batch, queries, 2 x
    kv_heads, head_dim] and the verification's (``network_verification``), or ``logits`` [batch,
    rows, vocab].
    """
    decoder = DecoderGraph(graph, step)
    slots = graph.input("slots", I32, "batch", "past")
    memories = [decoder.pool(layer).take(slots) for layer in range(step.config.num_layers)]
    ids, positions = (graph.input(name, I32, "batch", "queries") for name in ("ids", "positions"))
    mask = graph.input("mask", BOOL, "batch", "queries", "total")
    hidden, new_kv = decoder.run(ids, positions, mask, memories)
    logits = decoder.logits(hidden, graph.input("wanted", I32, "batch", "rows"))
    for layer, kv in enumerate(new_kv):
        graph.output(f"kv_{layer}", kv)
    if step.network == LOGITS:
        graph.output("logits", logits)
    else:
        vocabulary = VocabularyRows(graph, step.config.vocab_size, step.wide)
        verify(graph, logits, vocabulary, step.network)


class DecoderGraph:
    """The layers of a model in a graph; weights by their Hugging Face names."""

    def __init__(self, graph: Graph, step: StepNetwork) -> None:
        self._graph, self._step, self._config = graph, step, step.config
        cos, sin = (
            table.double().numpy() for table in rope_tables(step.config, step.max_positions, torch)
        )
        self._cos, self._sin = (
            graph.constant(table.astype(NUMPY[step.wide])).to(step.dtype) for table in (cos, sin)
        )
        self._swap = graph.constant(np.array([1, 0], np.int32))
        self._embedding = graph.table("model.embed_tokens.weight")

    def pool(self, layer: int) -> GraphTensor:
        """Declare the KV pool of a layer as an input."""
        return self._graph.input(
            f"pool_{layer}",
            self._step.dtype,
            "slots",
            2 * self._config.num_kv_heads,
            self._config.head_dim,
        )

    def run(
        self,
        ids: GraphTensor,  # i32[batch, queries]
        positions: GraphTensor,  # i32[batch, queries]
        mask: GraphTensor,  # bool[batch, queries, total]
        memories: list[GraphTensor],  # [batch, past, 2 x kv_heads, head_dim]
    ) -> tuple[GraphTensor, list[GraphTensor]]:
        """Return the last hidden states [batch, queries, hidden], not normed, and every layer's new
        keys and values [batch, queries, 2 x kv_heads, head_dim].
        """
        cos, sin = (
            table.take(positions).reshape(0, 0, 1, self._config.head_dim)
            for table in (self._cos, self._sin)
        )
        hidden, new_kv = self._embedding.take(ids), []
        for layer, memory in enumerate(memories):
            at = f"model.layers.{layer}."
            normed = self._norm(hidden, at + "input_layernorm.weight")
            query, key, value = (
                self._project(normed, f"{at}self_attn.{name}_proj", self._config.qkv_bias)
                for name in "qkv"
            )
            kv = concatenate([self._rotate(self._heads(key), cos, sin), self._heads(value)], 2)
            new_kv.append(kv)
            attended = self._attend(
                self._rotate(self._heads(query), cos, sin), concatenate([memory, kv], 1), mask
            )
            hidden = hidden + self._project(
                attended, at + "self_attn.o_proj", self._config.output_bias
            )
            normed = self._norm(hidden, at + "post_attention_layernorm.weight")
            gate, up = (
                self._graph.linear(normed, f"{at}mlp.{name}_proj.weight") for name in ("gate", "up")
            )
            hidden = hidden + self._graph.linear(self._silu(gate) * up, at + "mlp.down_proj.weight")
        return hidden, new_kv

    def logits(self, hidden: GraphTensor, wanted: GraphTensor) -> GraphTensor:
        """Return the logits [batch, rows, vocab] of the rows that are ``wanted`` i32[batch, rows]
        of all flattened, from states ``hidden`` [batch, queries, hidden].
        """
        rows = hidden.reshape(-1, self._config.hidden_size).take(wanted)
        return self._graph.linear(
            self._norm(rows, "model.norm.weight"),
            "model.embed_tokens.weight" if self._config.ties_embeddings else "lm_head.weight",
        )

    def _norm(self, hidden: GraphTensor, name: str) -> GraphTensor:  # [batch, n, hidden]
        wide = hidden.to(self._step.wide)
        scale = (
            (wide * wide).sum(-1) * (1.0 / self._config.hidden_size) + self._config.rms_norm_eps
        ).sqrt()
        return (wide / scale).to(self._step.dtype) * self._graph.table(name).reshape(1, 1, -1)

    def _project(self, rows: GraphTensor, name: str, biased: bool) -> GraphTensor:  # [batch, n, in]
        product = self._graph.linear(rows, name + ".weight")
        return product + self._graph.table(name + ".bias").reshape(1, 1, -1) if biased else product

    def _heads(self, rows: GraphTensor) -> GraphTensor:  # [batch, n, heads x head_dim]
        return rows.reshape(0, 0, -1, self._config.head_dim)

    def _rotate(
        self,
        heads: GraphTensor,  # [batch, n, heads, head_dim]
        cos: GraphTensor,  # [batch, n, 1, head_dim]
        sin: GraphTensor,  # [batch, n, 1, head_dim]
    ) -> GraphTensor:
        halves = heads.reshape(0, 0, 0, 2, self._config.head_dim // 2)
        return (
            heads * cos
            + halves.take(self._swap, axis=3).reshape(0, 0, 0, self._config.head_dim) * sin
        )

    def _attend(self, query: GraphTensor, kv: GraphTensor, mask: GraphTensor) -> GraphTensor:
        """Return attention's output [batch, queries, heads x head_dim] of ``query`` [batch,
        queries, heads, head_dim] over ``kv`` [batch, total, 2 x kv_heads, head_dim]; ``mask``
        bool[batch, queries, total] says what a query sees.
        """
        kv_heads, head_dim = self._config.num_kv_heads, self._config.head_dim
        group = self._config.num_heads // kv_heads
        key, value = (kv.slice(2, first, kv_heads) for first in (0, kv_heads))
        if self._graph.native:
            scaled = (query * head_dim**-0.5).transpose(0, 2, 1, 3)
            attended = self._graph.attention(
                scaled, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3), mask.unsqueeze(1)
            )
            return attended.transpose(0, 2, 1, 3).reshape(0, 0, kv_heads * group * head_dim)
        query = query.reshape(0, 0, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        key = key.reshape(0, 0, kv_heads, 1, head_dim).transpose(0, 2, 3, 4, 1)
        value = value.reshape(0, 0, kv_heads, 1, head_dim).transpose(0, 2, 3, 1, 4)
        scores = query.matmul(key).to(self._step.wide) * head_dim**-0.5
        chances = where(mask.unsqueeze(1, 2), scores, MASKED).softmax().to(self._step.dtype)
        return (
            chances.matmul(value)
            .transpose(0, 3, 1, 2, 4)
            .reshape(0, 0, kv_heads * group * head_dim)
        )

    def _silu(self, values: GraphTensor) -> GraphTensor:  # [batch, n, intermediate]
        wide = values.to(self._step.wide)
        return (wide / ((wide * -1.0).exp() + 1.0)).to(self._step.dtype)
