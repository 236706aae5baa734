"""The vocabulary that networks are described in, once for all back ends: tensors with operators
over a small set of primitive layers.

Every operation exists in TensorRT 10.14, TensorRT 11, TensorRT-RTX and ONNX with the same meaning.
Types are strong: both sides of an operator have the same dtype and rank (a Python number takes
those of the other side), and dimensions of 1 are broadcast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64, F32, F16, BF16, I32, BOOL, INT8, FP8 = (
    "f64",
    "f32",
    "f16",
    "bf16",
    "i32",
    "bool",
    "int8",
    "fp8",
)
NUMPY = {F64: np.float64, F32: np.float32, I32: np.int32, BOOL: np.bool_}

Dimension = int | str
"""A size, or the name of a dimension that varies: the same name is the same size everywhere."""


class GraphTensor:
    """A value in a graph. ``handle`` is the back end's; ``dtype`` is one of the names above."""

    __slots__ = ("dtype", "graph", "handle", "rank")

    def __init__(self, graph: Graph, handle: Any, dtype: str, rank: int) -> None:
        self.graph, self.handle, self.dtype, self.rank = graph, handle, dtype, rank

    def __add__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return self._with("add", other)

    def __sub__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return self._with("sub", other)

    def __mul__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return self._with("mul", other)

    def __truediv__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return self._with("div", other)

    def __lt__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return self._with("less", other, BOOL)

    def __gt__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return self._with("greater", other, BOOL)

    def __ge__(self, other: GraphTensor | float) -> GraphTensor:  # [...]: this rank
        return ~(self < other)

    def __and__(self, other: GraphTensor) -> GraphTensor:  # [...]: this rank
        return self._with("and", other)

    def __or__(self, other: GraphTensor) -> GraphTensor:  # [...]: this rank
        return self._with("or", other)

    def __invert__(self) -> GraphTensor:
        return self._new(self.graph.unary("not", self.handle))

    def equals(self, other: GraphTensor | float) -> GraphTensor:
        """Return bool[...], of this rank: where both are equal."""
        return self._with("equal", other, BOOL)

    def exp(self) -> GraphTensor:
        """Return e to this power."""
        return self._new(self.graph.unary("exp", self.handle))

    def sqrt(self) -> GraphTensor:
        """Return the square root."""
        return self._new(self.graph.unary("sqrt", self.handle))

    def sum(self, axis: int) -> GraphTensor:
        """Return the sum over an axis, which stays as 1."""
        return self._new(self.graph.reduce("sum", self.handle, axis % self.rank))

    def amax(self, axis: int) -> GraphTensor:
        """Return the greatest over an axis, which stays as 1."""
        return self._new(self.graph.reduce("max", self.handle, axis % self.rank))

    def amin(self, axis: int) -> GraphTensor:
        """Return the least over an axis, which stays as 1."""
        return self._new(self.graph.reduce("min", self.handle, axis % self.rank))

    def cumsum(self, axis: int) -> GraphTensor:
        """Return the running sums along an axis, each with its own element."""
        return self._new(self.graph.cumsum(self.handle, axis % self.rank))

    def topk(self, count: int) -> tuple[GraphTensor, GraphTensor]:
        """Return the ``count`` greatest of the last axis, greatest first, and where each was (i32).

        Which of equals come first, or at all, is open.
        """
        values, indices = self.graph.topk(self.handle, count, self.rank - 1)
        return self._new(values), self._new(indices, dtype=I32)

    def softmax(self) -> GraphTensor:
        """Return the softmax over the last axis."""
        return self._new(self.graph.softmax(self.handle, self.rank - 1))

    def to(self, dtype: str) -> GraphTensor:
        """Return the values as another dtype."""
        return (
            self
            if dtype == self.dtype
            else self._new(self.graph.cast(self.handle, dtype), dtype=dtype)
        )

    def reshape(self, *sizes: int) -> GraphTensor:
        """Return another shape: 0 keeps the size in that place, one -1 takes what is left."""
        return self._new(self.graph.reshape(self.handle, sizes), rank=len(sizes))

    def unsqueeze(self, *axes: int) -> GraphTensor:
        """Return the values with new axes of size 1 at these places of the result."""
        return self._new(self.graph.unsqueeze(self.handle, axes), rank=self.rank + len(axes))

    def transpose(self, *order: int) -> GraphTensor:
        """Return the axes in another order."""
        return self._new(self.graph.transpose(self.handle, order))

    def slice(self, axis: int, start: int, size: int) -> GraphTensor:
        """Return ``size`` elements of an axis."""
        return self._new(self.graph.slice(self.handle, axis % self.rank, start, size))

    def take(self, indices: GraphTensor, axis: int = 0) -> GraphTensor:
        """Return what lies at ``indices`` i32[...] (any rank) of an axis."""
        return self._new(
            self.graph.gather(self.handle, indices.handle, axis), rank=self.rank - 1 + indices.rank
        )

    def pick(self, indices: GraphTensor, axis: int) -> GraphTensor:
        """Return one element for each of ``indices`` i32[...] (this rank, same sizes but along
        ``axis``), at that index of ``axis``.
        """
        return self._new(self.graph.pick(self.handle, indices.handle, axis % self.rank))

    def matmul(self, other: GraphTensor) -> GraphTensor:
        """Return the matrix product with ``other`` [..., k, m]; leading axes are equal or 1."""
        return self._new(self.graph.matmul(self.handle, other.handle))

    def _with(
        self,
        operation: str,
        other: GraphTensor | float,  # [...]: this rank
        dtype: str | None = None,
    ) -> GraphTensor:
        if not isinstance(other, GraphTensor):
            other = _number(self, other)
        if (self.dtype, self.rank) != (other.dtype, other.rank):
            raise TypeError(
                f"{operation} of {self.dtype} of rank {self.rank} and {other.dtype} of rank "
                f"{other.rank}"
            )
        return self._new(self.graph.binary(operation, self.handle, other.handle), dtype=dtype)

    def _new(
        self, handle: Any, *, dtype: str | None = None, rank: int | None = None
    ) -> GraphTensor:
        return GraphTensor(
            self.graph, handle, dtype or self.dtype, self.rank if rank is None else rank
        )


def where(
    condition: GraphTensor, value: GraphTensor, otherwise: GraphTensor | float
) -> GraphTensor:
    """Return ``value`` where the condition bool[...] holds, else ``otherwise``, of one rank all."""
    if not isinstance(otherwise, GraphTensor):
        otherwise = _number(value, otherwise)
    if value.dtype != otherwise.dtype or not condition.rank == value.rank == otherwise.rank:
        raise TypeError(
            f"select of {value.dtype} of rank {value.rank} and {otherwise.dtype} of rank "
            f"{otherwise.rank}"
        )
    graph = value.graph
    return GraphTensor(
        graph,
        graph.select(condition.handle, value.handle, otherwise.handle),
        value.dtype,
        value.rank,
    )


def _number(like: GraphTensor, value: float) -> GraphTensor:
    """Return a number with the dtype and rank of a tensor [...], every size 1."""
    return like.graph.constant(
        np.full((1,) * like.rank, value, NUMPY.get(like.dtype, np.float32))
    ).to(like.dtype)


def concatenate(parts: Sequence[GraphTensor], axis: int) -> GraphTensor:
    """Return the parts [...] one after the other along an axis; other sizes are the same."""
    first = parts[0]
    return GraphTensor(
        first.graph,
        first.graph.concat([part.handle for part in parts], axis % first.rank),
        first.dtype,
        first.rank,
    )


class Graph(ABC):
    """A network under construction. Methods below ``constant`` take and return handles;
    descriptions use ``GraphTensor``.
    """

    native = False
    """Whether the library's own attention layer is used instead of primitive ones."""

    @abstractmethod
    def input(self, name: str, dtype: str, *shape: Dimension) -> GraphTensor:
        """Declare an input."""

    @abstractmethod
    def output(self, name: str, tensor: GraphTensor) -> None:
        """Declare an output [...]."""

    @abstractmethod
    def constant(self, array: npt.NDArray[Any]) -> GraphTensor:
        """Return a constant [...] of the array's shape."""

    @abstractmethod
    def table(self, name: str) -> GraphTensor:
        """Return a weight as it is stored, of the network's dtype."""

    @abstractmethod
    def linear(self, rows: GraphTensor, name: str) -> GraphTensor:
        """Return ``rows`` [batch, n, in] times the transpose of the weight [out, in]."""

    def attention(
        self, query: GraphTensor, key: GraphTensor, value: GraphTensor, mask: GraphTensor
    ) -> GraphTensor:
        """Return the library's own attention of scaled queries [batch, heads, n, d] over [batch, kv
        heads, total, d].

        ``mask`` [batch, 1, n, total] says what a query sees.
        """
        raise NotImplementedError

    @abstractmethod
    def binary(self, operation: str, left: Any, right: Any) -> Any:
        """add, sub, mul, div, less, greater, equal, and, or."""

    @abstractmethod
    def unary(self, operation: str, value: Any) -> Any:
        """exp, sqrt, not."""

    @abstractmethod
    def reduce(self, operation: str, value: Any, axis: int) -> Any:
        """sum, max, min; the axis stays as 1."""

    @abstractmethod
    def cumsum(self, value: Any, axis: int) -> Any:
        """Inclusive running sums."""

    @abstractmethod
    def topk(self, value: Any, count: int, axis: int) -> tuple[Any, Any]:
        """Find the greatest along an axis, falling, and their indices (i32)."""

    @abstractmethod
    def softmax(self, value: Any, axis: int) -> Any:
        """Softmax over an axis."""

    @abstractmethod
    def cast(self, value: Any, dtype: str) -> Any:
        """Convert."""

    @abstractmethod
    def reshape(self, value: Any, sizes: Sequence[int]) -> Any:
        """0 keeps a size, one -1 takes what is left."""

    @abstractmethod
    def unsqueeze(self, value: Any, axes: Sequence[int]) -> Any:
        """Add axes of size 1."""

    @abstractmethod
    def transpose(self, value: Any, order: Sequence[int]) -> Any:
        """Permute axes."""

    @abstractmethod
    def slice(self, value: Any, axis: int, start: int, size: int) -> Any:
        """Cut an axis."""

    @abstractmethod
    def concat(self, values: Sequence[Any], axis: int) -> Any:
        """Join along an axis."""

    @abstractmethod
    def select(self, condition: Any, value: Any, otherwise: Any) -> Any:
        """Choose element by element."""

    @abstractmethod
    def gather(self, value: Any, indices: Any, axis: int) -> Any:
        """Look up along an axis."""

    @abstractmethod
    def pick(self, value: Any, indices: Any, axis: int) -> Any:
        """Look up element by element along an axis."""

    @abstractmethod
    def matmul(self, left: Any, right: Any) -> Any:
        """Multiply matrices."""
