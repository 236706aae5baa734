"""Networks as ONNX, to be executed by ONNX Runtime on a CPU; weights go in as initialisers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines_build.trt_graph.graph import BOOL, F32, F64, I32, Dimension, Graph, GraphTensor

OPSET = 18
IR_VERSION = 9
TYPES = {
    F64: TensorProto.DOUBLE,
    F32: TensorProto.FLOAT,
    I32: TensorProto.INT32,
    BOOL: TensorProto.BOOL,
}
BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div",
    "less": "Less", "greater": "Greater", "equal": "Equal", "and": "And", "or": "Or",
}  # fmt: skip
UNARY = {"exp": "Exp", "sqrt": "Sqrt", "not": "Not"}
REDUCE = {"sum": "ReduceSum", "max": "ReduceMax", "min": "ReduceMin"}


class OnnxGraph(Graph):
    """A graph whose handles are value names. ``weights`` by name, in the dtype that the network
    computes in (f32 or f64).
    """

    def __init__(self, weights: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        self._weights = weights or {}
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initialisers: dict[str, onnx.TensorProto] = {}
        self._constants: dict[tuple[Any, ...], str] = {}

    def model(self) -> onnx.ModelProto:
        """Return the model, checked."""
        graph = helper.make_graph(
            self._nodes, "network", self._inputs, self._outputs, list(self._initialisers.values())
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        )
        onnx.checker.check_model(model)
        return model

    def input(self, name: str, dtype: str, *shape: Dimension) -> GraphTensor:
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))
        return GraphTensor(self, name, dtype, len(shape))

    def output(self, name: str, tensor: GraphTensor) -> None:
        self._nodes.append(helper.make_node("Identity", [tensor.handle], [name]))
        self._outputs.append(
            helper.make_tensor_value_info(name, TYPES[tensor.dtype], [None] * tensor.rank)
        )

    def constant(self, array: npt.NDArray[Any]) -> GraphTensor:
        dtype = next(
            name
            for name, kind in ((F64, "f8"), (F32, "f4"), (I32, "i4"), (BOOL, "b1"))
            if array.dtype.str[1:] == kind
        )
        return GraphTensor(self, self._constant(array), dtype, array.ndim)

    def table(self, name: str) -> GraphTensor:
        return self._initialiser(name, self._weights[name])

    def linear(self, rows: GraphTensor, name: str) -> GraphTensor:
        weight = self._initialiser(
            f"{name} transposed", np.ascontiguousarray(self._weights[name].T)
        )
        return GraphTensor(
            self, self._node("MatMul", [rows.handle, weight.handle]), rows.dtype, rows.rank
        )

    def binary(self, operation: str, left: str, right: str) -> str:
        return self._node(BINARY[operation], [left, right])

    def unary(self, operation: str, value: str) -> str:
        return self._node(UNARY[operation], [value])

    def reduce(self, operation: str, value: str, axis: int) -> str:
        return self._node(REDUCE[operation], [value, self._sizes([axis])], keepdims=1)

    def cumsum(self, value: str, axis: int) -> str:
        return self._node("CumSum", [value, self._constant(np.array(axis, np.int64))])

    def topk(self, value: str, count: int, axis: int) -> tuple[str, str]:
        values = self._node("TopK", [value, self._sizes([count])], axis=axis)
        self._nodes[-1].output.append(f"{values} indices")
        return values, self.cast(f"{values} indices", I32)

    def softmax(self, value: str, axis: int) -> str:
        return self._node("Softmax", [value], axis=axis)

    def cast(self, value: str, dtype: str) -> str:
        return self._node("Cast", [value], to=TYPES[dtype])

    def reshape(self, value: str, sizes: Sequence[int]) -> str:
        return self._node("Reshape", [value, self._sizes(sizes)])

    def unsqueeze(self, value: str, axes: Sequence[int]) -> str:
        return self._node("Unsqueeze", [value, self._sizes(axes)])

    def transpose(self, value: str, order: Sequence[int]) -> str:
        return self._node("Transpose", [value], perm=list(order))

    def slice(self, value: str, axis: int, start: int, size: int) -> str:
        return self._node(
            "Slice", [value, self._sizes([start]), self._sizes([start + size]), self._sizes([axis])]
        )

    def concat(self, values: Sequence[str], axis: int) -> str:
        return self._node("Concat", list(values), axis=axis)

    def select(self, condition: str, chosen: str, otherwise: str) -> str:
        return self._node("Where", [condition, chosen, otherwise])

    def gather(self, value: str, indices: str, axis: int) -> str:
        return self._node("Gather", [value, indices], axis=axis)

    def pick(self, value: str, indices: str, axis: int) -> str:
        return self._node("GatherElements", [value, indices], axis=axis)

    def matmul(self, left: str, right: str) -> str:
        return self._node("MatMul", [left, right])

    def _node(self, operation: str, inputs: list[str], **attributes: Any) -> str:
        name = f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(operation, inputs, [name], **attributes))
        return name

    def _sizes(self, sizes: Sequence[int]) -> str:
        return self._constant(np.array(sizes, np.int64))

    def _constant(self, array: npt.NDArray[Any]) -> str:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._initialiser(f"c{len(self._constants)}", array).handle
        return self._constants[key]

    def _initialiser(self, name: str, array: npt.NDArray[Any]) -> GraphTensor:
        if name not in self._initialisers:
            self._initialisers[name] = numpy_helper.from_array(array, name)
        return GraphTensor(self, name, F64 if array.dtype == np.float64 else F32, array.ndim)
