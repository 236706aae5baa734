"""Networks as TensorRT layers, strongly typed and without plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engines_build.trt_graph.graph import (
    BF16,
    BOOL,
    F16,
    F32,
    FP8,
    I32,
    INT8,
    Dimension,
    Graph,
    GraphTensor,
)
from engines_build.trt_graph.library import Messages

TORCH_NAMES = {
    torch.float32: F32,
    torch.float16: F16,
    torch.bfloat16: BF16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
}
UNARY = {"exp": "EXP", "sqrt": "SQRT", "not": "NOT"}
BINARY = {
    "add": "SUM", "sub": "SUB", "mul": "PROD", "div": "DIV",
    "less": "LESS", "greater": "GREATER", "equal": "EQUAL", "and": "AND", "or": "OR",
}  # fmt: skip


class TrtGraph(Graph):
    """A graph whose handles are TensorRT tensors.

    ``weights`` are the checkpoint's, on the CPU; a pair (values, scales [out]) is a quantised
    matrix. They become constants of the engine, or with ``shared`` its inputs, by name, so that all
    engines of a model read one copy. ``native`` takes the library's attention layer.
    """

    def __init__(
        self,
        library: ModuleType,
        network: Any,
        messages: Messages,
        weights: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]],  # [out, in], [n]
        *,
        shared: bool = False,
        native: bool = False,
    ) -> None:
        self.native = native
        self._trt, self._network, self._messages, self._weights, self._shared = (
            library,
            network,
            messages,
            weights,
            shared,
        )
        self._constants: dict[str, GraphTensor] = {}
        self._buffers: list[Any] = []
        kinds = library.DataType
        self._types = {
            F32: kinds.FLOAT,
            F16: kinds.HALF,
            BF16: kinds.BF16,
            I32: kinds.INT32,
            BOOL: kinds.BOOL,
            INT8: kinds.INT8,
            FP8: kinds.FP8,
        }

    def input(self, name: str, dtype: str, *shape: Dimension) -> GraphTensor:
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        tensor = self._network.add_input(name, self._types[dtype], sizes)
        if tensor is None:
            raise self._messages.error(f"input {name}")
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                tensor.set_dimension_name(axis, size)
        return GraphTensor(self, tensor, dtype, len(shape))

    def output(self, name: str, tensor: GraphTensor) -> None:  # [...]
        handle = self._add("add_identity", tensor.handle)
        handle.name = name
        self._network.mark_output(handle)

    def constant(self, array: npt.NDArray[Any]) -> GraphTensor:  # f32, i32 or bool [...]
        dtype = {"f4": F32, "i4": I32, "b1": BOOL}[array.dtype.str[1:]]
        array = np.require(array, requirements="C")
        self._buffers.append(array)
        return GraphTensor(
            self,
            self._add("add_constant", array.shape, self._trt.Weights(array)),
            dtype,
            array.ndim,
        )

    def table(self, name: str) -> GraphTensor:
        if name not in self._constants:
            weight = self._weights[name]
            if isinstance(weight, tuple):
                raise TypeError(f"{name} is quantised and no matrix")
            self._constants[name] = self._weight(name, weight)
        return self._constants[name]

    def linear(self, rows: GraphTensor, name: str) -> GraphTensor:  # [batch, n, in]
        weight = self._weights[name]
        matrix = (
            self._dequantise(name, *weight, rows.dtype)
            if isinstance(weight, tuple)
            else self.table(name)
        )
        plain, turned = self._trt.MatrixOperation.NONE, self._trt.MatrixOperation.TRANSPOSE
        product = self._add(
            "add_matrix_multiply", rows.handle, plain, self.unsqueeze(matrix.handle, [0]), turned
        )
        return GraphTensor(self, product, rows.dtype, rows.rank)

    def attention(
        self,
        query: GraphTensor,  # [batch, heads, n, d]
        key: GraphTensor,  # [batch, kv_heads, total, d]
        value: GraphTensor,  # [batch, kv_heads, total, d]
        mask: GraphTensor,  # bool[batch, 1, n, total]
    ) -> GraphTensor:
        softmax, no_causal = (
            self._trt.AttentionNormalizationOp.SOFTMAX,
            self._trt.CausalMaskKind.NONE,
        )
        layer = self._network.add_attention_v2(
            query.handle, key.handle, value.handle, softmax, no_causal
        )
        if layer is None:
            raise self._messages.error("attention")
        layer.mask = mask.handle
        layer.decomposable = True
        return GraphTensor(self, layer.get_output(0), query.dtype, query.rank)

    def binary(self, operation: str, left: Any, right: Any) -> Any:
        return self._add(
            "add_elementwise",
            left,
            right,
            getattr(self._trt.ElementWiseOperation, BINARY[operation]),
        )

    def unary(self, operation: str, value: Any) -> Any:
        return self._add("add_unary", value, getattr(self._trt.UnaryOperation, UNARY[operation]))

    def reduce(self, operation: str, value: Any, axis: int) -> Any:
        return self._add(
            "add_reduce",
            value,
            getattr(self._trt.ReduceOperation, operation.upper()),
            1 << axis,
            True,
        )

    def cumsum(self, value: Any, axis: int) -> Any:
        where = self.constant(np.array(axis, np.int32)).handle
        return self._add(
            "add_cumulative", value, where, self._trt.CumulativeOperation.SUM, False, False
        )

    def topk(self, value: Any, count: int, axis: int) -> tuple[Any, Any]:
        layer = self._layer("add_topk", value, self._trt.TopKOperation.MAX, count, 1 << axis)
        return layer.get_output(0), layer.get_output(1)

    def softmax(self, value: Any, axis: int) -> Any:
        return self._add(
            "add_softmax", value, change=lambda layer: setattr(layer, "axes", 1 << axis)
        )

    def cast(self, value: Any, dtype: str) -> Any:
        return self._add("add_cast", value, self._types[dtype])

    def reshape(self, value: Any, sizes: Sequence[int]) -> Any:
        return self._add(
            "add_shuffle", value, change=lambda layer: setattr(layer, "reshape_dims", tuple(sizes))
        )

    def unsqueeze(self, value: Any, axes: Sequence[int]) -> Any:
        return self._add("add_unsqueeze", value, self.constant(np.array(axes, np.int32)).handle)

    def transpose(self, value: Any, order: Sequence[int]) -> Any:
        permutation = self._trt.Permutation(list(order))
        return self._add(
            "add_shuffle",
            value,
            change=lambda layer: setattr(layer, "first_transpose", permutation),
        )

    def slice(self, value: Any, axis: int, start: int, size: int) -> Any:
        rank = len(value.shape)
        begin = [start if place == axis else 0 for place in range(rank)]
        if -1 not in [length for place, length in enumerate(value.shape) if place != axis]:
            sizes = [size if place == axis else length for place, length in enumerate(value.shape)]
            return self._add("add_slice", value, begin, sizes, [1] * rank)
        shape = self._add("add_shape", value)  # i64
        others, offsets = (
            self._numbers([at_axis if place == axis else other for place in range(rank)])
            for at_axis, other in ((0, 1), (size, 0))
        )
        sizes = self.binary("add", self.binary("mul", shape, others), offsets)
        static_sizes = [size if place == axis else 0 for place in range(rank)]
        return self._add(
            "add_slice",
            value,
            begin,
            static_sizes,
            [1] * rank,
            change=lambda layer: layer.set_input(2, sizes),
        )

    def concat(self, values: Sequence[Any], axis: int) -> Any:
        return self._add(
            "add_concatenation", list(values), change=lambda layer: setattr(layer, "axis", axis)
        )

    def select(self, condition: Any, value: Any, otherwise: Any) -> Any:
        return self._add("add_select", condition, value, otherwise)

    def gather(self, value: Any, indices: Any, axis: int) -> Any:
        return self._add("add_gather", value, indices, axis)

    def pick(self, value: Any, indices: Any, axis: int) -> Any:
        mode = self._trt.GatherMode.ELEMENT
        return self._add(
            "add_gather_v2", value, indices, mode, change=lambda layer: setattr(layer, "axis", axis)
        )

    def matmul(self, left: Any, right: Any) -> Any:
        plain = self._trt.MatrixOperation.NONE
        return self._add("add_matrix_multiply", left, plain, right, plain)

    def _numbers(self, numbers: list[int]) -> Any:
        """Return a constant of i64, the dtype of shapes."""
        array = np.array(numbers, np.int64)
        self._buffers.append(array)
        return self._add("add_constant", array.shape, self._trt.Weights(array))

    def _dequantise(
        self,
        name: str,
        values: torch.Tensor,  # [out, in]
        scales: torch.Tensor,  # [out]
        dtype: str,
    ) -> GraphTensor:
        values_, scales_ = self._weight(name, values), self._weight(name + " scales", scales)
        matrix = self._add(
            "add_dequantize",
            values_.handle,
            scales_.handle,
            self._types[dtype],
            change=lambda layer: setattr(layer, "axis", 0),
        )
        return GraphTensor(self, matrix, dtype, 2)

    def _weight(self, name: str, weight: torch.Tensor) -> GraphTensor:  # [out, in] or [n]
        dtype, weight = TORCH_NAMES[weight.dtype], weight.contiguous()
        if self._shared:
            return self.input(name, dtype, *weight.shape)
        self._buffers.append(weight)
        weights = self._trt.Weights(self._types[dtype], weight.data_ptr(), weight.numel())
        handle = self._add(
            "add_constant",
            tuple(weight.shape),
            weights,
            change=lambda _: self._network.set_weights_name(weights, name),
        )
        return GraphTensor(self, handle, dtype, weight.ndim)

    def _add(self, method: str, *arguments: Any, change: Callable[[Any], Any] | None = None) -> Any:
        """Add a layer and return its output. Raises TrtError in the library's words."""
        layer = self._layer(method, *arguments)
        if change:
            change(layer)
        return layer.get_output(0)

    def _layer(self, method: str, *arguments: Any) -> Any:
        layer = getattr(self._network, method)(*arguments)
        if layer is None:
            raise self._messages.error(method)
        return layer
