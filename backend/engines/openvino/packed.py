"""Products with a folder's matrices as they are stored, in a decoder under conversion.

The modules that transformers builds have no numbers for these matrices: a trace meets an operation
with the matrix's place in a list, and only that place becomes a constant of the graph. So the model
is never there in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import torch
from openvino import Output, Type, op, opset13
from openvino.frontend.pytorch import ConversionExtension
from torch import nn
from torch.nn import functional

from backend.engines.openvino.four_bits import FourBits, join, join_bytes, round_to_four_bits
from backend.engines.openvino.parts import int8, ints, round_to_int8
from backend.engines.weights import stored_matrix

_ROWS = 512
"""Rows of a matrix that are in fp32 at once."""


@dataclass(frozen=True, slots=True)
class Int8:
    """A matrix of int8 with a scale for each row."""

    digits: torch.Tensor
    """[rows, columns]"""
    scale: torch.Tensor
    """fp16 [rows, 1]"""

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.digits.shape

    def widen(self, rows: slice) -> torch.Tensor:
        """Return some rows in fp32."""
        return self.digits[rows].float() * self.scale[rows].float()


Matrix = torch.Tensor | FourBits | Int8  # [rows, columns]


@torch.library.custom_op("spindle::product", mutates_args=())
def _product(rows: torch.Tensor, place: int, width: int) -> torch.Tensor:
    """Stand in a trace for the product [..., width] of ``rows`` [..., columns]."""
    del place
    return rows.new_zeros(*rows.shape[:-1], width)


@torch.library.custom_op("spindle::look_up", mutates_args=())
def _look_up(ids: torch.Tensor, place: int, width: int) -> torch.Tensor:
    """Stand in a trace for the rows fp32 [..., width] of ``ids`` int64 [...]."""
    del place
    return torch.zeros(*ids.shape, width)


class PackedMatrices:
    """The stored matrices of a decoder, by the modules that multiply by them or look them up."""

    def __init__(self, matrices: Mapping[str, Matrix]) -> None:
        self._matrices = dict(matrices)
        self.stand_ins = {
            name: torch.zeros(1).expand(tuple(matrix.shape)) for name, matrix in matrices.items()
        }
        """Tensors of the same shapes without memory, by name: to be loaded instead."""
        self._by_module: dict[nn.Module, Matrix] = {}
        self._groups: dict[nn.Module, list[nn.Module]] = {}
        self._places: list[list[nn.Module]] = []
        self._arrays: list[Any] = []

    def assign(self, lm: nn.Module) -> str:
        """Find the modules that the stand-ins were loaded into; return the name of a matrix that
        is in none, if any.
        """
        names = {stand_in.data_ptr(): name for name, stand_in in self.stand_ins.items()}
        placed = set()
        for module in lm.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                name = names.get(module.weight.data_ptr())
                if name is not None:
                    self._by_module[module] = self._matrices[name]
                    placed.add(name)
        return min(self._matrices.keys() - placed, default="")

    def round(self, module: nn.Module, dtype: str) -> None:
        """Store the matrix of a module as ``int8`` or ``int4``, unless it has 4 bits."""
        matrix = self._by_module.get(module)
        if isinstance(matrix, torch.Tensor):
            if dtype == "int8":
                parts = map(torch.from_numpy, round_to_int8(stored_matrix(matrix)))
                self._by_module[module] = Int8(*parts)
            else:
                self._by_module[module] = round_to_four_bits(matrix)

    def forget_constants(self) -> None:
        """Free the memory of constants, which no graph needs any more."""
        self._arrays.clear()

    @property
    def extensions(self) -> list[ConversionExtension]:
        """Converters of the operations of a trace, which make constants."""
        return [
            ConversionExtension("spindle::product", self._convert_product),
            ConversionExtension("spindle::look_up", self._convert_look_up),
        ]

    @contextmanager
    def multiplied(self) -> Iterator[None]:
        """Have the modules multiply by their matrices, some rows of them at a time."""

        def product(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
            """Return the product [..., width] of ``rows`` [..., columns]."""
            matrix = self._by_module[module]
            parts = [
                functional.linear(rows, _wide(matrix, slice(at, at + _ROWS)))
                for at in range(0, matrix.shape[0], _ROWS)
            ]
            return torch.cat(parts, -1)

        def look_up(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            """Return the rows [..., columns] of ``ids`` int64 [...]."""
            matrix = self._by_module[module]
            rows = [_wide(matrix, slice(row, row + 1)) for row in ids.flatten().tolist()]
            return torch.cat(rows).view(*ids.shape, -1)

        with self._instead(product, look_up):
            yield

    @contextmanager
    def traced(self, lm: nn.Module, *inputs: torch.Tensor) -> Iterator[None]:
        """Have the modules leave an operation in a trace; those that multiply the same rows, one
        for all. ``lm`` runs ``inputs``, int64 [n] each, first to find these.
        """
        self._find_groups(lm, inputs)
        parts: dict[nn.Module, torch.Tensor] = {}

        def product(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
            """Return the product [..., width] of ``rows`` [..., columns]."""
            group = self._groups[module]
            if module is group[0]:
                widths = [self._by_module[one].shape[0] for one in group]
                whole = _product(rows, self._place(group), sum(widths))
                parts.update(zip(group, whole.split(widths, -1), strict=True))
            part: torch.Tensor = parts.pop(module)
            return part

        def look_up(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            """Return the rows [..., columns] of ``ids`` int64 [...]."""
            width = self._by_module[module].shape[1]
            rows: torch.Tensor = _look_up(ids, self._place([module]), width)
            return rows

        with self._instead(product, look_up):
            yield

    def _find_groups(self, lm: nn.Module, inputs: Seq[torch.Tensor]) -> None:
        """Find the modules that multiply the same rows; ``inputs`` are int64 [n] each."""
        by_rows: dict[tuple[int, object], list[nn.Module]] = {}
        alive = []  # so that no two tensors have one id

        def product(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
            """Note a product of ``rows`` [..., columns]; return zeros [..., width]."""
            alive.append(rows)
            group = by_rows.setdefault((id(rows), _kind(self._by_module[module])), [])
            group.append(module)
            self._groups[module] = group
            return rows.new_zeros(*rows.shape[:-1], self._by_module[module].shape[0])

        def look_up(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            """Return zeros [..., columns] for ``ids`` int64 [...]."""
            return torch.zeros(*ids.shape, self._by_module[module].shape[1])

        with self._instead(product, look_up), torch.no_grad():
            lm(*inputs)

    @contextmanager
    def _instead(self, product: Any, look_up: Any) -> Iterator[None]:
        """Run these in the place of what our modules compute, but for biases and factors."""
        linear, embedding = nn.Linear.forward, nn.Embedding.forward

        def multiply(module: Any, rows: torch.Tensor) -> torch.Tensor:
            """Stand in for ``nn.Linear.forward`` of ``rows`` [..., columns]."""
            if module not in self._by_module:
                return linear(module, rows)
            output: torch.Tensor = product(module, rows)
            return output if module.bias is None else output + module.bias

        def embed(module: Any, ids: torch.Tensor) -> torch.Tensor:
            """Stand in for ``nn.Embedding.forward`` of ``ids`` int64 [...]."""
            if module not in self._by_module:
                return embedding(module, ids)
            output: torch.Tensor = look_up(module, ids)
            return output

        classes: tuple[Any, Any] = nn.Linear, nn.Embedding
        classes[0].forward, classes[1].forward = multiply, embed
        try:
            yield
        finally:
            classes[0].forward, classes[1].forward = linear, embedding

    def _place(self, modules: list[nn.Module]) -> int:
        """Return the number of modules' matrices: the same in every trace."""
        if modules not in self._places:
            self._places.append(modules)
        return self._places.index(modules)

    def _convert_product(self, context: Any) -> list[Output]:
        place = int(context.get_values_from_const_input(1))
        return [*opset13.matmul(context.get_input(0), self._constant(place), False, True).outputs()]

    def _convert_look_up(self, context: Any) -> list[Output]:
        place = int(context.get_values_from_const_input(1))
        return [*opset13.gather(self._constant(place), context.get_input(0), ints(0)).outputs()]

    def _constant(self, place: int) -> Output:
        """Return a matrix as part of the graph, in the form that kernels read."""
        matrix = _join([self._by_module[module] for module in self._places[place]])
        if isinstance(matrix, Int8):
            return int8(matrix.digits.numpy(), matrix.scale.numpy())
        if isinstance(matrix, torch.Tensor):
            return opset13.convert(self._floats(matrix), "f32").output(0)
        rows, columns = matrix.shape
        groups = columns // matrix.group
        digits, kind = matrix.digits, Type.u4
        if matrix.zero is None:
            digits, kind = digits ^ 0x88, Type.i4  # from offsets of 8 to two's complement
        wide = opset13.convert(self._halves(digits, kind, [rows, groups, matrix.group]), "f32")
        if matrix.zero is not None:
            zeros = self._halves(join_bytes(matrix.zero.flatten()), kind, [rows, groups, 1])
            wide = opset13.subtract(wide, opset13.convert(zeros, "f32"))
        scale = opset13.convert(self._floats(matrix.scale[..., None]), "f32")
        return opset13.reshape(opset13.multiply(wide, scale), ints([rows, columns]), False).output(
            0
        )

    def _floats(self, tensor: torch.Tensor) -> op.Constant:
        """Return a constant of floats in the memory of a tensor of any shape ([rows, columns])."""
        kinds = {torch.bfloat16: Type.bf16, torch.float16: Type.f16, torch.float32: Type.f32}
        size = torch.int32 if tensor.dtype == torch.float32 else torch.int16
        numbers = tensor.contiguous().view(size).numpy()
        return self._over(numbers, kinds[tensor.dtype], list(tensor.shape))

    def _halves(self, halves: torch.Tensor, kind: Type, shape: list[int]) -> op.Constant:
        """Return a constant of integers of 4 bits, two in a byte of ``halves``: uint8 [..., n]."""
        return self._over(halves.contiguous().numpy(), kind, shape)

    def _over(self, array: np.ndarray[Any, Any], kind: Type, shape: list[int]) -> op.Constant:
        """Return a constant of this shape in the memory of an array of any shape."""
        self._arrays.append(array)  # a tensor over an array does not keep it alive
        return op.Constant(openvino.Tensor(array, shape, kind))


def _wide(matrix: Matrix, rows: slice) -> torch.Tensor:
    """Return some rows [n, columns] of a matrix, in fp32."""
    return matrix[rows].float() if isinstance(matrix, torch.Tensor) else matrix.widen(rows)


def _kind(matrix: Matrix) -> object:
    """Return what matrices must have alike to be one."""
    if isinstance(matrix, FourBits):
        return matrix.group, matrix.scale.dtype
    return type(matrix), matrix.shape if isinstance(matrix, Int8) else matrix.dtype


def _join(matrices: Seq[Matrix]) -> Matrix:
    if len(matrices) == 1:
        return matrices[0]
    if isinstance(matrices[0], FourBits):
        return join([matrix for matrix in matrices if isinstance(matrix, FourBits)])
    return torch.cat([matrix for matrix in matrices if isinstance(matrix, torch.Tensor)])
