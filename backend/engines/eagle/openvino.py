"""The forward of an EAGLE-3 head on CPUs: products on OpenVINO, attention on NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from openvino import Model, Output, Type, opset13

from backend.engines.checkpoint import Matrix, Stored, StoredMatrix
from backend.engines.eagle.engine import Flags, HeadRows
from backend.engines.eagle.folder import EagleShape
from backend.engines.models.rope import rope_tables
from backend.engines.openvino.paged_attention import check_version
from backend.engines.openvino.parts import (
    RowGraph,
    half_matrix,
    ints,
    matrix,
    name_graph,
    norm_rows,
    parameter,
)
from backend.sampling.distributions import Floats
from backend.sampling.draw import IntArray

Weights = Mapping[str, Floats]  # [...] as EagleShape.tensors says
Product = Callable[[Output, Floats], Output]  # [n, in] and [out, in] to [n, out]


class OpenvinoModel:
    """``EagleModel`` whose activations are in bf16 if it is ``narrow``, else in fp32. With
    ``rounded``, the matrices of drafted rows are in int8.
    """

    def __init__(
        self,
        shape: EagleShape,
        tensors: Mapping[str, Stored],  # as in ``folder``: fc.weight [h, n H] and others
        *,
        embedding: Matrix,  # [vocab, hidden]
        lm_head: Matrix,  # [vocab, hidden]
        positions: int,
        slots: int,
        rounded: bool,
        narrow: bool,
        threads: int,
    ) -> None:
        check_version()
        self.shape, self.token_ids = shape, tensors["token_ids"]
        matrices = {
            name: StoredMatrix(stored) for name, stored in tensors.items() if name != "token_ids"
        }
        self._embedding = matrices.pop("embed_tokens.weight", embedding)
        weights = {name: stored[:] for name, stored in matrices.items()}
        head = weights["lm_head.weight"] if shape.own_head else lm_head[self.token_ids]
        precision = "bf16" if narrow else "f32"

        def product(rows: Output, weight: Floats) -> Output:
            """Return the product of ``rows[n, in]`` and ``weight[out, in]``."""
            read = half_matrix(weight) if narrow else matrix(weight, rounded=False)
            return opset13.matmul(rows, read, False, True).output(0)

        def int8_product(rows: Output, weight: Floats) -> Output:
            """Return the product of ``rows[n, in]`` and ``weight[out, in]`` as drafts have it."""
            read = matrix(weight, rounded=True)
            return opset13.matmul(rows, read, False, True).output(0)

        drafting = int8_product if rounded else product
        graphs = (
            _fuse(shape, weights, product),
            _read(shape, weights, product, "kv"),
            _read(shape, weights, drafting, "qkv"),
            _finish(shape, weights, head, drafting),
        )
        self._fuse, self._write, self._read, self._finish = (
            RowGraph(graph, precision, threads) for graph in graphs
        )
        self._cos, self._sin = rope_tables(shape, positions)
        self._pool = np.zeros((slots + 1, 2 * shape.num_kv_heads * shape.head_dim), np.float32)
        """[slots, 2 kv_heads x head_dim]: keys and values; the last row stays zero."""
        self._drafted = self._pool[None, :0]
        """[texts, columns, 2 kv_heads x head_dim]: those that proposals attend to."""

    def fuse(self, states: Floats) -> Floats:
        """Return the fused states of ``states[n, layers, target_hidden]`` (``EagleModel``)."""
        return _run(self._fuse, states=states.reshape(len(states), -1))["fused"]

    def write(self, rows: HeadRows, slots: IntArray) -> None:
        """Write rows of texts into ``slots[n]`` (``EagleModel``)."""
        self._pool[slots] = self._run_read(self._write, rows)["kv"]

    def begin(self, slots: IntArray, most: int) -> None:
        """Begin proposals for ``slots[texts, columns]`` (``EagleModel``)."""
        texts, count = slots.shape
        self._drafted = np.empty((texts, count + most, self._pool.shape[1]), np.float32)
        self._drafted[:, :count] = self._pool[slots]

    def run(self, rows: HeadRows, mask: Flags) -> tuple[Floats, Floats]:
        """Run drafted rows by ``mask[texts, rows, columns]`` (``EagleModel``)."""
        texts, count, end = mask.shape
        read, columns = self._run_read(self._read, rows), self._drafted[:texts, :end]
        columns[:, -count:] = read["kv"].reshape(texts, count, -1)
        attended = _attend(self.shape, read["query"], columns, mask)
        residual = read.get("residual", rows.hidden)
        outputs = _run(self._finish, attended=attended, residual=residual)
        return outputs["logits"], outputs["vectors" if self.shape.norm_output else "output"]

    def _run_read(self, graph: RowGraph, rows: HeadRows) -> dict[str, Floats]:
        embedded = self._embedding[rows.tokens]
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        return _run(graph, embedded=embedded, hidden=rows.hidden, cos=cos, sin=sin)


def _run(graph: RowGraph, **inputs: Floats) -> dict[str, Floats]:
    """Return the outputs [n, columns] of inputs [n, columns]: those of a row without numbers have
    none, and it spoils no other.
    """
    is_finite = np.all([np.isfinite(rows).all(1) for rows in inputs.values()], 0)
    if is_finite.all():
        return graph.run(**inputs)
    keep = is_finite[:, None]
    outputs = graph.run(**{name: np.where(keep, rows, 0.0) for name, rows in inputs.items()})
    for rows in outputs.values():
        rows[~is_finite] = math.nan
    return outputs


def _attend(shape: EagleShape, query: Floats, columns: Floats, mask: Flags) -> Floats:
    """Return attention's output [n, heads x head_dim] for ``query[n, heads x head_dim]``;
    ``columns[texts, columns, 2 kv_heads x head_dim]`` are keys and values, ``mask[texts, rows,
    columns]``. Queries of a KV head are folded into rows, so that keys are never repeated.
    """
    (texts, count, _), heads, dim = mask.shape, shape.num_kv_heads, shape.head_dim
    apart = query.reshape(texts, count, heads, -1, dim).transpose(0, 2, 3, 1, 4)
    keys, values = columns.reshape(texts, -1, 2, heads, dim).transpose(2, 0, 3, 1, 4)
    folded = apart.reshape(texts, heads, -1, dim) * np.float32(dim**-0.5)
    scores = folded @ keys.transpose(0, 1, 3, 2)
    by_row = scores.reshape(texts, heads, -1, *mask.shape[1:])
    by_row += np.where(mask, np.float32(0), np.float32(-np.inf))[:, None, None]
    scores -= scores.max(3, keepdims=True)
    np.exp(scores, out=scores)
    out = (scores @ values) / scores.sum(3, keepdims=True)
    apart = out.reshape(texts, heads, -1, count, dim).transpose(0, 3, 1, 2, 4)
    attended: Floats = apart.reshape(texts * count, -1)
    return attended


def _fuse(shape: EagleShape, weights: Weights, product: Product) -> Model:
    taps, width = len(shape.layers), shape.target_hidden_size
    states = parameter("states", [-1, taps * width], Type.f32)
    rows = states.output(0)
    if shape.fuse == "each":
        apart = opset13.reshape(rows, ints([-1, taps, width]), False).output(0)
        each = np.stack([weights[f"fc_norm.{tap}.weight"] for tap in range(taps)])
        normed = norm_rows(apart, each, shape.rms_norm_eps)
        rows = opset13.reshape(normed, ints([-1, taps * width]), False).output(0)
    if shape.fuse == "joint":
        rows = norm_rows(rows, weights["input_norm.weight"], shape.rms_norm_eps).output(0)
    fused = product(rows, weights["fc.weight"])
    if shape.fc_bias:
        fused = opset13.add(fused, opset13.constant(weights["fc.bias"])).output(0)
    return name_graph({"fused": fused}, [states], "fuse")


def _read(shape: EagleShape, weights: Weights, product: Product, which: str) -> Model:
    """Return the graph of rows up to attention: of keys and values alone ("kv"), or of queries and
    the residual, too ("qkv").
    """
    eps, dim, width = shape.rms_norm_eps, shape.head_dim, shape.hidden_size
    embedded, hidden = (parameter(name, [-1, width], Type.f32) for name in ("embedded", "hidden"))
    cos, sin = (parameter(name, [-1, dim], Type.f32) for name in ("cos", "sin"))
    normed = norm_rows(hidden.output(0), weights["hidden_norm.weight"], eps).output(0)
    of_token = norm_rows(embedded.output(0), weights["input_layernorm.weight"], eps).output(0)
    read = opset13.concat([of_token, normed], 1).output(0)
    joined = product(
        read, np.concatenate([weights[f"self_attn.{name}_proj.weight"] for name in which])
    )
    counts = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    parts = opset13.variadic_split(
        joined, ints(1), ints([counts[name] * dim for name in which])
    ).outputs()
    heads = dict(zip(which, parts, strict=True))
    angles = [opset13.reshape(table, ints([-1, 1, dim]), False).output(0) for table in (cos, sin)]
    for name in which.removesuffix("v"):
        rows = opset13.reshape(heads[name], ints([-1, counts[name], dim]), False).output(0)
        if shape.qk_norm:
            rows = norm_rows(rows, weights[f"self_attn.{name}_norm.weight"], eps).output(0)
        first, second = opset13.split(rows, ints(-1), 2).outputs()
        swapped = opset13.concat([second, first], -1)
        turned = opset13.add(
            opset13.multiply(rows, angles[0]), opset13.multiply(swapped, angles[1])
        )
        heads[name] = opset13.reshape(turned, ints([-1, counts[name] * dim]), False).output(0)
    outputs = {"kv": opset13.concat([heads["k"], heads["v"]], 1).output(0)}
    if "q" in heads:
        outputs |= {"query": heads["q"]}
        if shape.norm_before_residual:
            outputs["residual"] = normed
    return name_graph(outputs, [embedded, hidden, cos, sin], "read")


def _finish(shape: EagleShape, weights: Weights, head: Floats, product: Product) -> Model:
    """Return the graph of rows after attention; ``head[draft vocabulary, hidden]``."""
    eps, width = shape.rms_norm_eps, shape.hidden_size
    attended = parameter("attended", [-1, shape.num_heads * shape.head_dim], Type.f32)
    residual = parameter("residual", [-1, width], Type.f32)
    after = opset13.add(
        residual, product(attended.output(0), weights["self_attn.o_proj.weight"])
    ).output(0)
    normed = norm_rows(after, weights["post_attention_layernorm.weight"], eps).output(0)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    both = product(normed, np.concatenate([weights[name] for name in names]))
    gate, up = opset13.split(both, ints(-1), 2).outputs()
    inner = opset13.multiply(opset13.swish(gate), up).output(0)
    out = opset13.add(after, product(inner, weights["mlp.down_proj.weight"])).output(0)
    vectors = norm_rows(out, weights["norm.weight"], eps).output(0)
    outputs = {"output": out, "vectors": vectors, "logits": product(vectors, head)}
    return name_graph(outputs, [attended, residual], "finish")
