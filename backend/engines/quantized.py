"""Quantised tensors of a folder as bf16 matrices, so that every engine reads every format.

A format is known by its tensors' names next to a matrix's: ``weight_scale``, ``qweight`` and so on.
Activations that a format would round, too, are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a number of 4 bits with 2 of exponent; the highest bit is the sign."""

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each 4 bits of an int32 have in AWQ, the lowest bits first."""

_DROPPED = ("input_scale", "activation_scale", "input_global_scale", "k_scale", "v_scale")
"""Ends of the names of tensors by which activations or KV would be rounded."""


_BY_BLOCK = ("scales", "qzeros", "_scale", "_scale_inv", "_zero_point")
"""Ends of the names of tensors that have a number for each block of a matrix."""

_OR_ONE = ("_scale", "_scale_inv", "_zero_point")
"""Ends of those that may have one number for all of it instead."""


class QuantizedError(ValueError):
    """A quantised tensor that cannot be read; the message names it."""


def widen(
    tensors: Mapping[str, torch.Tensor],  # of any shape, such as [rows, columns]
    quantization: Mapping[str, Any],
) -> Tensors:
    """Return the tensors of a folder with its quantised ones as bf16, under the names that they
    have in a folder without quantisation.

    ``quantization`` is the ``quantization_config`` of ``config.json``. Raises QuantizedError.
    """
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(_DROPPED)}
    _check_dimensions(rest)
    widened: Tensors = {}
    for end, read in _FORMATS.items():
        for name in [name for name in rest if name.endswith(end)]:
            if name not in rest:
                continue
            prefix = name.removesuffix(end)
            try:
                wide_name, wide = read(prefix, rest, quantization)
            except (IndexError, KeyError, RuntimeError, ValueError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise QuantizedError(f"tensor {name} cannot be read: {reason}") from error
            widened[wide_name] = wide.to(torch.bfloat16)
    for name, tensor in rest.items():
        if tensor.element_size() == 1 or not tensor.is_floating_point():
            raise QuantizedError(f"tensor {name} is {tensor.dtype}, in no format that is read")
    return rest | widened


def _gptq(prefix: str, rest: Tensors, quantization: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    """Read int32 that hold 2, 4 or 8 bits each along the columns of a transposed matrix (GPTQ):
    ``qweight`` [columns x bits / 32, rows], ``qzeros`` [groups, rows x bits / 32]; ``scales``
    [groups, rows], ``g_idx`` [columns].
    """
    packed, zeros, scales = (rest.pop(prefix + end) for end in ("qweight", "qzeros", "scales"))
    groups, inputs = scales.shape[0], rest.get(f"{prefix}g_idx", torch.empty(0)).numel()
    bits = packed.shape[0] * 32 // inputs if inputs else int(quantization["bits"])
    _check_bits(bits)
    digits = _unpack(packed.T, bits).T
    group = rest.pop(f"{prefix}g_idx", torch.arange(len(digits)) // (len(digits) // groups)).long()
    moved = quantization.get("checkpoint_format") != "gptq_v2"  # the first format stores one less
    zero = (_unpack(zeros, bits) + moved) & ((1 << bits) - 1)
    _drop_empty_bias(prefix, rest)
    return f"{prefix}weight", ((digits - zero[group]) * scales.float()[group]).T


def _awq(prefix: str, rest: Tensors, quantization: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    """Read int32 that hold 4 bits each along the rows of a transposed matrix (AWQ, gemm):
    ``qweight`` [columns, rows / 8], ``qzeros`` [groups, rows / 8]; ``scales`` [groups, rows].
    """
    del quantization
    packed, zeros, scales = (rest.pop(prefix + end) for end in ("qweight", "qzeros", "scales"))
    _check_bits(packed.shape[1] * 32 // scales.shape[1], (4,))
    places = [_AWQ_COLUMNS.index(column) for column in range(8)]

    def unpack(words: torch.Tensor) -> torch.Tensor:
        """Return the numbers [n, rows] of ``words`` int32 [n, rows / 8]."""
        return _unpack(words, 4).view(len(words), -1, 8)[..., places].flatten(1)

    each = packed.shape[0] // scales.shape[0]
    zero, scale = (rows.repeat_interleave(each, 0) for rows in (unpack(zeros), scales.float()))
    _drop_empty_bias(prefix, rest)
    return f"{prefix}weight", ((unpack(packed) - zero) * scale).T


def _qweight(
    prefix: str, rest: Tensors, quantization: Mapping[str, Any]
) -> tuple[str, torch.Tensor]:
    is_awq = quantization["quant_method"] == "awq"
    return (_awq if is_awq else _gptq)(prefix, rest, quantization)


def _read_packed(
    prefix: str, rest: Tensors, quantization: Mapping[str, Any]
) -> tuple[str, torch.Tensor]:
    """Read int32 that hold 4 or 8 bits each along a row (compressed-tensors, pack-quantized):
    ``weight_packed`` [rows, ⌈columns x bits / 32⌉], ``weight_zero_point``
    [⌈rows x bits / 32⌉, groups]; ``weight_scale`` [rows, groups], ``weight_g_idx`` [columns].
    """
    del quantization
    packed, scale, shape = (
        rest.pop(f"{prefix}weight_{end}") for end in ("packed", "scale", "shape")
    )
    rows, columns = (int(size) for size in shape)
    bits = packed.shape[-1] * 32 // columns
    _check_bits(bits)
    middle = 1 << (bits - 1)
    digits = _unpack(packed, bits)[:, :columns] - middle
    zeros = rest.pop(f"{prefix}weight_zero_point", None)
    zero = None if zeros is None else _unpack(zeros.T, bits).T[:rows] - middle
    group = rest.pop(f"{prefix}weight_g_idx", None)
    if group is not None and int(group.min()) >= 0:
        scale = scale[:, group.long()]
        zero = None if zero is None else zero[:, group.long()]
    return f"{prefix}weight", _scale(digits, scale, zero, ())


def _scaled_by(end: str) -> Callable[..., tuple[str, torch.Tensor]]:
    def read(name: str, rest: Tensors, quantization: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
        """Read fp8 or int8 [..., rows, columns] with a scale for all, a row, a group or a block."""
        scale, zero = rest.pop(name + end), rest.pop(f"{name}_zero_point", None)
        return name, _scale(rest.pop(name), scale, zero, _block(quantization))

    return read


def _mxfp4(prefix: str, rest: Tensors, quantization: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    """Read blocks of 32 numbers of 4 bits with an exponent each (MXFP4 of gpt-oss): ``_blocks``
    uint8 [..., rows, groups, 16], ``_scales`` uint8 [..., rows, groups].
    """
    del quantization
    blocks, exponents = rest.pop(f"{prefix}_blocks"), rest.pop(f"{prefix}_scales")
    magnitudes = torch.tensor(_FP4)
    table = torch.cat((magnitudes, -magnitudes))
    digits = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    scale = torch.exp2(exponents.float() - 127)
    wide = (table[digits.int()] * scale[..., None]).flatten(-2)
    return prefix, wide.transpose(-1, -2).contiguous()


_FORMATS: dict[str, Callable[[str, Tensors, Mapping[str, Any]], tuple[str, torch.Tensor]]] = {
    "qweight": _qweight,
    "weight_packed": _read_packed,
    "_blocks": _mxfp4,
    "_scale_inv": _scaled_by("_scale_inv"),
    "_scale": _scaled_by("_scale"),
}
"""The reader of a matrix, by the end of the name of one of its tensors; an earlier one is first."""


def _check_dimensions(tensors: Mapping[str, torch.Tensor]) -> None:  # of any shape, such as [n]
    """Raise QuantizedError for scales or zeros of one dimension, which fit no blocks."""
    for name, tensor in tensors.items():
        is_one = tensor.numel() == 1 and name.endswith(_OR_ONE)
        if name.endswith(_BY_BLOCK) and tensor.dim() < 2 and not is_one:
            shape = f"its shape {list(tensor.shape)} has no rows and columns"
            raise QuantizedError(f"tensor {name} cannot be read: {shape}")


def _check_bits(bits: int, choices: Seq[int] = (2, 4, 8)) -> None:
    if bits not in choices:
        raise ValueError(f"it has {bits} bits, and may have {', '.join(map(str, choices))}")


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers [..., n x 32 / bits] in int32 ``words`` [..., n], the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.int()[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)


def _scale(
    digits: torch.Tensor,  # [..., rows, columns]
    scale: torch.Tensor,  # [..., m, n] for m x n blocks, or one number
    zero: torch.Tensor | None,  # [..., m, n], or one number
    block: Seq[int],
) -> torch.Tensor:
    """Return numbers of a scale, less ``zero``, in fp32."""
    wide = digits.float()
    if zero is not None:
        wide = wide - _spread(zero.float(), wide.shape, block)
    return wide * _spread(scale.float(), wide.shape, block)


def _spread(
    parts: torch.Tensor,  # [..., m, n] for m x n blocks, or one number
    shape: Seq[int],
    block: Seq[int],
) -> torch.Tensor:
    """Return ``parts``, one for each block of a matrix, as they broadcast to its ``shape``."""
    if parts.numel() == 1:
        return parts.reshape(())
    for axis in (-2, -1):
        size, count = shape[axis], parts.shape[axis]
        if count in (1, size):
            continue
        each = block[axis] if block else size // count
        if -(-size // each) != count:
            raise ValueError(f"scales {list(parts.shape)} do not fit a matrix {list(shape)}")
        parts = parts.repeat_interleave(each, axis).narrow(axis, 0, size)
    return parts


def _block(quantization: Mapping[str, Any]) -> Seq[int]:
    """Return rows and columns of a block that has one scale; nothing where none is named."""
    if block := quantization.get("weight_block_size"):
        return [int(size) for size in block]
    for group in (quantization.get("config_groups") or {}).values():
        if block := (group.get("weights") or {}).get("block_structure"):
            return [int(size) for size in block]
    return ()


def _drop_empty_bias(prefix: str, rest: Tensors) -> None:
    """Drop the zeros that some writers store for products without a bias."""
    bias = rest.get(f"{prefix}bias")
    if bias is not None and not bias.any():
        del rest[f"{prefix}bias"]
