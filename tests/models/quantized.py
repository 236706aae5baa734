"""Folders with quantised weights: every format written from plain tensors, with what it means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 16
"""Columns that have one scale in formats of groups."""

Quantized = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a matrix by the ends of their names, and the matrix that they mean."""


def quantize(plain: Path, folder: Path, method: str, pattern: str = "layers.") -> Path:
    """Save ``plain`` with the matrices of its layers quantised; next to it, as ``FOLDER-wide``,
    the same widened.
    """
    quantization, write = METHODS[method]
    packed: dict[str, torch.Tensor] = {}
    wide: dict[str, torch.Tensor] = {}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        packed[name] = wide[name] = tensor.bfloat16()
        if tensor.dim() > 1 and pattern in name and "router" not in name:
            parts, meant = write(tensor.float())
            del packed[name]
            prefix = name.removesuffix("weight")
            new = {prefix + end: part.contiguous() for end, part in parts.items()}
            packed |= {key: part for key, part in new.items() if key not in tensors or key == name}
            wide[name] = meant.bfloat16()
    config = json.loads((plain / "config.json").read_text())
    for place, written, more in (
        (folder, packed, {"quantization_config": quantization}),
        (folder.with_name(f"{folder.name}-wide"), wide, {}),
    ):
        shutil.copytree(plain, place)
        whole = {name: tensor.contiguous() for name, tensor in written.items()}
        save_file(whole, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(config | more))
    return folder


def words(digits: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers from 0 in int32 along the last axis, the lowest bits first."""
    each = 32 // bits
    total = torch.zeros(*digits.shape[:-1], digits.shape[-1] // each, dtype=torch.int64)
    for place in range(each):
        total += digits[..., place::each].long() << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def grouped(
    weight: torch.Tensor, bits: int, group: int = GROUP, *, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return digits [rows, columns], and zeros and scales [rows, groups], of this many bits."""
    rows, columns = weight.shape
    parts = weight.reshape(rows, -1, group)
    if symmetric:
        scale = (parts.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
        zero = torch.full_like(scale, 2 ** (bits - 1)).float()
        digits = (parts / scale[..., None]).round() + zero[..., None]
        return digits.clamp(0, 2**bits - 1).view(rows, columns), zero, scale
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    digits = (parts / scale[..., None]).round() + zero[..., None]
    return digits.clamp(0, 2**bits - 1).view(rows, columns), zero, scale


def meant(digits: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the matrix of digits, zeros and scales."""
    wide = digits.view(*zero.shape, -1) - zero[..., None]
    return (wide * scale.float()[..., None]).flatten(1)


def _gptq(
    bits: int, ordered: bool, group: int = GROUP, *, symmetric: bool = False
) -> Callable[[torch.Tensor], Quantized]:
    def write(weight: torch.Tensor) -> Quantized:
        generator = torch.Generator().manual_seed(len(weight))
        groups = weight.shape[1] // group
        index = torch.arange(weight.shape[1]) // group
        if ordered:
            index = index[torch.randperm(len(index), generator=generator)]
        order = torch.argsort(index, stable=True)
        digits, zero, scale = grouped(weight[:, order], bits, group, symmetric=symmetric)
        wide = torch.empty_like(weight)
        wide[:, order] = meant(digits, zero, scale)
        placed = torch.empty_like(digits)
        placed[:, order] = digits
        assert zero.shape[1] == groups
        return {
            "qweight": words(placed, bits).T,
            "qzeros": words(zero.T - 1, bits),
            "scales": scale.T,
            "g_idx": index.int(),
            "bias": torch.zeros(len(weight)),
        }, wide

    return write


def _awq(group: int) -> Callable[[torch.Tensor], Quantized]:
    def columns(rows: torch.Tensor) -> torch.Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return rows.view(len(rows), -1, 8)[..., order].flatten(1)

    def write(weight: torch.Tensor) -> Quantized:
        digits, zero, scale = grouped(weight, 4, group)
        parts = {"qweight": words(columns(digits.T), 4), "qzeros": words(columns(zero.T), 4)}
        return parts | {"scales": scale.T}, meant(digits, zero, scale)

    return write


def _packed(
    bits: int, group: int = GROUP, *, symmetric: bool = False
) -> Callable[[torch.Tensor], Quantized]:
    def write(weight: torch.Tensor) -> Quantized:
        digits, zero, scale = grouped(weight, bits, group, symmetric=symmetric)
        parts = {
            "weight_packed": words(digits, bits),
            "weight_scale": scale.bfloat16() if symmetric else scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if symmetric:
            scale = scale.bfloat16()
        else:
            parts["weight_zero_point"] = words(zero.T, bits).T
        return parts, meant(digits, zero, scale)

    return write


def _int8(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    digits = (weight / scale).round()
    return {"weight": digits.to(torch.int8), "weight_scale": scale}, digits * scale


def _fp8(block: tuple[int, int], scale_name: str) -> Callable[[torch.Tensor], Quantized]:
    def write(weight: torch.Tensor) -> Quantized:
        sizes = [b or size for b, size in zip(block, weight.shape, strict=True)]
        counts = [-(-size // b) for size, b in zip(weight.shape, sizes, strict=True)]
        scale = torch.empty(counts)
        digits = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        wide = torch.empty_like(weight)
        for row in range(counts[0]):
            for column in range(counts[1]):
                place = tuple(
                    slice(at * size, (at + 1) * size)
                    for at, size in zip((row, column), sizes, strict=True)
                )
                scale[row, column] = weight[place].abs().max() / 448
                digits[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
                wide[place] = digits[place].float() * scale[row, column]
        rounded = {"input_scale": torch.ones(1)}
        return rounded | {"weight": digits, f"weight{scale_name}": scale}, wide

    return write


def write_mxfp4(weight: torch.Tensor) -> Quantized:
    """Write a matrix of experts [experts, rows, columns] as MXFP4 holds it, transposed."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = weight.transpose(-1, -2).unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
    digits = (blocks / exponent.exp2()[..., None])[..., None].sub(values).abs().argmin(-1)
    wide = (values[digits] * exponent.exp2()[..., None]).flatten(-2).transpose(-1, -2)
    packed = (digits[..., 0::2] | digits[..., 1::2] << 4).to(torch.uint8)
    return {"_blocks": packed, "_scales": (exponent + 127).to(torch.uint8)}, wide


def _groups(compressed: str, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": more}}
    return {"quant_method": "compressed-tensors", "format": compressed, "config_groups": groups}


METHODS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Quantized]]] = {
    "fp8 of blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
        _fp8((40, 24), "_scale_inv"),
    ),
    "fp8 of one scale": ({"quant_method": "fp8"}, _fp8((0, 0), "_scale")),
    "fbgemm fp8": ({"quant_method": "fbgemm_fp8"}, _fp8((1, 0), "_scale")),
    "compressed fp8": (_groups("float-quantized"), _fp8((1, 0), "_scale")),
    "compressed fp8 of blocks": (
        _groups("float-quantized", block_structure=[40, 24]),
        _fp8((40, 24), "_scale"),
    ),
    "compressed int8": (_groups("int-quantized"), _int8),
    "compressed 4 bits": (_groups("pack-quantized"), _packed(4)),
    "compressed 8 bits": (_groups("pack-quantized"), _packed(8)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, _awq(GROUP)),
    "gptq 4 bits": ({"quant_method": "gptq", "bits": 4}, _gptq(4, ordered=False)),
    "gptq 8 bits, by activations": ({"quant_method": "gptq", "bits": 8}, _gptq(8, ordered=True)),
}
"""By name: the ``quantization_config`` of a format, and what writes a matrix."""


def _int4(group: int, *, symmetric: bool) -> dict[str, Any]:
    return _groups(
        "pack-quantized",
        num_bits=4,
        type="int",
        strategy="group",
        group_size=group,
        symmetric=symmetric,
    )


_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
FOUR_BITS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Quantized]]] = {
    "gptq in 32": ({**_GPTQ, "group_size": 32}, _gptq(4, ordered=False, group=32)),
    "gptq in 32, symmetric": (
        {**_GPTQ, "group_size": 32},
        _gptq(4, ordered=False, group=32, symmetric=True),
    ),
    "awq in 32": ({**_AWQ, "group_size": 32}, _awq(32)),
    "int4 in 32": (_int4(32, symmetric=False), _packed(4, 32)),
    "int4 in 32, symmetric": (_int4(32, symmetric=True), _packed(4, 32, symmetric=True)),
    "gptq in 128": ({**_GPTQ, "group_size": 128}, _gptq(4, ordered=False, group=128)),
    "awq in 64": ({**_AWQ, "group_size": 64}, _awq(64)),
    "int4 in 128, symmetric": (_int4(128, symmetric=True), _packed(4, 128, symmetric=True)),
}
"""The same of formats that the engine of CPUs keeps in 4 bits."""

METHODS |= FOUR_BITS
