"""Drafted rows of an EAGLE-3 head on OpenVINO's kernels, in int8."""

from __future__ import annotations

import math

import torch
from openvino import Model, Output, Type, opset13
from torch import Tensor

from backend.engines.eagle.model import RowWeights
from backend.engines.models.arrays import to_array
from backend.engines.openvino.paged_attention import check_version
from backend.engines.openvino.parts import (
    RowGraph,
    ints,
    matrix,
    name_graph,
    norm_rows,
    parameter,
)
from backend.sampling.distributions import Floats


class OpenvinoRows:
    """``RowProducts`` whose matrices are in int8; ``precision`` is that of activations. A row that
    is no number has logits that are none, and spoils no other.
    """

    def __init__(self, weights: RowWeights, *, precision: str, threads: int) -> None:
        check_version()
        self._heads = RowGraph(_heads(weights), precision, threads)
        self._finish = RowGraph(_finish(weights), precision, threads)

    def heads(
        self,
        read: Tensor,  # [n, 2 hidden]
    ) -> Tensor:
        """Return queries, keys and values (``RowProducts``)."""
        outputs = self._heads.run(read=_numbers(read, _is_finite(read)))
        return torch.from_numpy(outputs["heads"])

    def finish(
        self,
        attended: Tensor,  # [n, heads x head_dim]
        residual: Tensor,  # [n, hidden]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return output, normed output and logits (``RowProducts``)."""
        finite = _is_finite(attended) & _is_finite(residual)
        inputs = {"attended": attended, "residual": residual}
        outputs = self._finish.run(
            **{name: _numbers(rows, finite) for name, rows in inputs.items()}
        )
        output, vectors, logits = (
            torch.from_numpy(outputs[name]) for name in ("output", "vectors", "logits")
        )
        logits[~finite] = math.nan
        return output, vectors, logits


def _is_finite(
    rows: Tensor,  # [n, columns]
) -> Tensor:
    return rows.isfinite().all(1)


def _numbers(
    rows: Tensor,  # [n, columns]
    finite: Tensor,  # bool [n]
) -> Floats:
    """Return rows, zeros in place of those that are not ``finite``."""
    return to_array(rows.masked_fill(~finite[:, None], 0.0))


def _product(values: Output, weight: Tensor) -> Output:
    """Return values [n, in] times the transpose of a weight [out, in], in int8."""
    return opset13.matmul(values, matrix(to_array(weight), rounded=True), False, True).output(0)


def _heads(weights: RowWeights) -> Model:
    read = parameter("read", [-1, weights.qkv.shape[1]], Type.f32)
    return name_graph({"heads": _product(read.output(0), weights.qkv)}, [read], "heads")


def _finish(w: RowWeights) -> Model:
    attended = parameter("attended", [-1, w.o.shape[1]], Type.f32)
    residual = parameter("residual", [-1, w.o.shape[0]], Type.f32)
    after = opset13.add(residual, _product(attended.output(0), w.o)).output(0)
    both = _product(norm_rows(after, to_array(w.mlp_norm), w.eps).output(0), w.gate_up)
    gate, up = opset13.split(both, ints(-1), 2).outputs()
    inner = opset13.multiply(opset13.swish(gate), up).output(0)
    out = opset13.add(after, _product(inner, w.down)).output(0)
    vectors = norm_rows(out, to_array(w.norm), w.eps).output(0)
    outputs = {"output": out, "vectors": vectors, "logits": _product(vectors, w.head)}
    return name_graph(outputs, [attended, residual], "finish")
