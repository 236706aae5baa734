"""Matrices of a folder that hold integers of 4 bits, kept as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from backend.engines.openvino.formats import FOUR_BIT_GROUPS

Tensors = dict[str, torch.Tensor]

_ROWS = 512
"""Rows of a matrix that are in fp32 at once while it is rounded."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each column among the 8 numbers of an int32 in AWQ, the lowest bits first."""


class UnfitError(ValueError):
    """A matrix that is no plain one of 4 bits; the message says why."""


@dataclass(frozen=True, slots=True)
class FourBits:
    """A matrix of integers from 0 to 15, with a zero and a scale for each group of a row's
    columns.
    """

    digits: torch.Tensor
    """uint8 [rows, columns / 2]: two integers, the earlier column's in the lower half."""
    scale: torch.Tensor
    """[rows, groups]"""
    zero: torch.Tensor | None
    """uint8 [rows, groups]; none: all are 8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.digits.shape[0], 2 * self.digits.shape[1]

    @property
    def group(self) -> int:
        """Columns that have one scale."""
        return self.shape[1] // self.scale.shape[1]

    def widen(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the matrix, or some of its rows, in fp32."""
        scale = self.scale[rows].float()[..., None]
        zero = 8 if self.zero is None else self.zero[rows].float()[..., None]
        digits = split_bytes(self.digits[rows]).float().unflatten(1, (-1, self.group))
        wide: torch.Tensor = ((digits - zero) * scale).flatten(1)
        return wide


def join(parts: Seq[FourBits]) -> FourBits:
    """Return matrices of the same columns and groups as one, above each other."""
    if len(parts) == 1:
        return parts[0]
    zeros = [
        torch.full_like(p.scale, 8, dtype=torch.uint8) if p.zero is None else p.zero for p in parts
    ]
    is_plain = all(part.zero is None for part in parts)
    return FourBits(
        torch.cat([part.digits for part in parts]),
        torch.cat([part.scale for part in parts]),
        None if is_plain else torch.cat(zeros),
    )


def split_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return the integers of 4 bits in bytes [..., n] as uint8 [..., 2n], the lower half first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def join_bytes(digits: torch.Tensor) -> torch.Tensor:
    """Return integers of 4 bits, uint8 [..., 2n], two in a byte: [..., n]."""
    return digits[..., 0::2] | digits[..., 1::2] << 4


def take_four_bits(
    tensors: Tensors, quantization: Mapping[str, Any]
) -> tuple[dict[str, FourBits], dict[str, str]]:
    """Take the matrices of 4 bits out of a folder's ``tensors``; return them by the names that
    they have without quantisation, and why others that are packed stay, by the same names.
    """
    matrices: dict[str, FourBits] = {}
    reasons: dict[str, str] = {}
    read: Callable[[str, Tensors, Mapping[str, Any]], tuple[FourBits, Seq[str]]]
    for end, read in (
        ("qweight", _read_awq if quantization.get("quant_method") == "awq" else _read_gptq),
        ("weight_packed", _read_packed),
    ):
        for name in [name for name in tensors if name.endswith(end)]:
            prefix = name.removesuffix(end)
            try:
                _check_dimensions(prefix, tensors)
                matrix, parts = read(prefix, tensors, quantization)
                _check(matrix)
            except (KeyError, UnfitError) as error:
                reasons[f"{prefix}weight"] = str(error)
                continue
            matrices[f"{prefix}weight"] = matrix
            for part in parts:
                tensors.pop(prefix + part, None)
            bias = tensors.get(f"{prefix}bias")
            if bias is not None and not bias.any():  # some writers store zeros
                del tensors[f"{prefix}bias"]
    return matrices, reasons


def _read_gptq(
    prefix: str, tensors: Tensors, quantization: Mapping[str, Any]
) -> tuple[FourBits, Seq[str]]:
    """Read int32 with 8 integers each along the columns of a transposed matrix: ``qweight``
    [columns / 8, rows], ``qzeros`` [groups, rows / 8]; ``scales`` [groups, rows], ``g_idx``
    [columns].
    """
    packed, zeros, scales = (tensors[prefix + end] for end in ("qweight", "qzeros", "scales"))
    index = tensors.get(f"{prefix}g_idx")
    columns = 8 * packed.shape[0] if index is None else len(index)
    if 8 * packed.shape[0] != columns or quantization.get("bits", 4) != 4:
        raise UnfitError("its integers are not 4 bits wide")
    _check_order(index, columns, scales.shape[0])
    if zeros.is_floating_point():
        raise UnfitError("its zeros are not integers")
    moved = quantization.get("checkpoint_format") != "gptq_v2"  # the first format stores one less
    zero = (split_bytes(zeros.contiguous().view(torch.uint8)) + moved) & 15
    digits = packed.T.contiguous().view(torch.uint8)
    return _drop_plain_zeros(digits, scales.T, zero.T), ("qweight", "qzeros", "scales", "g_idx")


def _read_awq(
    prefix: str, tensors: Tensors, quantization: Mapping[str, Any]
) -> tuple[FourBits, Seq[str]]:
    """Read int32 with 8 integers each along the rows of a transposed matrix, out of order:
    ``qweight`` [columns, rows / 8], ``qzeros`` [groups, rows / 8]; ``scales`` [groups, rows].
    """
    del quantization
    packed, zeros, scales = (tensors[prefix + end] for end in ("qweight", "qzeros", "scales"))
    if 8 * packed.shape[1] != scales.shape[1]:
        raise UnfitError("its integers are not 4 bits wide")

    def order(words: torch.Tensor) -> torch.Tensor:
        """Return the integers uint8 [rows, n] of ``words`` int32 [n, rows / 8]."""
        digits = split_bytes(words.contiguous().view(torch.uint8))
        columns: torch.Tensor = digits.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)]
        return columns.flatten(1).T

    return _drop_plain_zeros(join_bytes(order(packed)), scales.T, order(zeros)), (
        "qweight",
        "qzeros",
        "scales",
    )


def _read_packed(
    prefix: str, tensors: Tensors, quantization: Mapping[str, Any]
) -> tuple[FourBits, Seq[str]]:
    """Read int32 with 8 integers each along a row (compressed-tensors, pack-quantized):
    ``weight_packed`` [rows, columns / 8]; ``weight_scale`` [rows, groups],
    ``weight_zero_point`` int32 [⌈rows / 8⌉, groups], ``weight_g_idx`` [columns].
    """
    del quantization
    packed, scale = tensors[f"{prefix}weight_packed"], tensors[f"{prefix}weight_scale"]
    rows, columns = (int(size) for size in tensors[f"{prefix}weight_shape"])
    if 8 * packed.shape[1] != columns:
        raise UnfitError("its integers are not 4 bits wide")
    index = tensors.get(f"{prefix}weight_g_idx")
    _check_order(None if index is None or int(index.min()) < 0 else index, columns, scale.shape[1])
    zeros = tensors.get(f"{prefix}weight_zero_point")
    zero = None
    if zeros is not None:
        zero = split_bytes(zeros.T.contiguous().view(torch.uint8)).T[:rows]
    parts = ("packed", "scale", "shape", "zero_point", "g_idx")
    return _drop_plain_zeros(packed.contiguous().view(torch.uint8), scale, zero), [
        f"weight_{p}" for p in parts
    ]


def _drop_plain_zeros(
    digits: torch.Tensor,  # uint8 [rows, columns / 2]
    scale: torch.Tensor,  # [rows, groups]
    zero: torch.Tensor | None,  # uint8 [rows, groups]
) -> FourBits:
    """Return a matrix, without zeros where all are 8."""
    if zero is not None and bool((zero == 8).all()):
        zero = None
    return FourBits(digits, scale.contiguous(), None if zero is None else zero.contiguous())


def _check_dimensions(prefix: str, tensors: Tensors) -> None:
    """Raise UnfitError for scales or zeros that are not by row and group."""
    for end in ("qzeros", "scales", "weight_scale", "weight_zero_point"):
        tensor = tensors.get(prefix + end)
        if tensor is not None and tensor.dim() != 2:
            raise UnfitError(f"the shape of {prefix}{end} is {list(tensor.shape)}")


def _check(matrix: FourBits) -> None:
    """Raise UnfitError for groups that the kernels do not know."""
    rows, columns = matrix.shape
    if rows % 2 or columns % matrix.scale.shape[1] or matrix.group not in FOUR_BIT_GROUPS:
        choices = ", ".join(map(str, FOUR_BIT_GROUPS))
        sizes = f"{matrix.scale.shape[1]} groups of {columns} columns"
        raise UnfitError(f"it has {sizes}, not of one of {choices}")


def _check_order(index: torch.Tensor | None, columns: int, groups: int) -> None:
    """Raise UnfitError for columns whose groups, ``index`` [columns], do not follow each other."""
    in_order = torch.arange(columns) // max(1, columns // groups)
    if index is not None and not torch.equal(index.long(), in_order):
        raise UnfitError("the groups of its columns do not follow each other (act-order)")


def round_to_four_bits(weight: torch.Tensor) -> FourBits:
    """Return ``weight`` [rows, columns] as the nearest integers, in the largest groups that fit."""
    group = next((size for size in FOUR_BIT_GROUPS if weight.shape[1] % size == 0), 0)
    if not group or weight.shape[0] % 2:
        raise UnfitError(f"a matrix {list(weight.shape)} has no groups of 4 bits")
    rows, columns = weight.shape
    digits = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // group, dtype=torch.float16)
    for at in range(0, rows, _ROWS):
        some = slice(at, at + _ROWS)
        digits[some], scales[some] = _quantize(weight[some].float().unflatten(1, (-1, group)))
    return FourBits(digits, scales, None)


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes and the fp16 scales [rows, groups] of ``weight`` [rows, groups, group]."""
    greatest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
    scale = (greatest / -8).half()
    scale = torch.where(scale == 0, torch.full_like(scale, 1e-4), scale)
    digits = (weight / scale.float()).round().clamp(-8, 7) + 8
    return join_bytes(digits.to(torch.uint8).flatten(1)), scale[..., 0]
