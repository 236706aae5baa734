"""Folders whose 4 bits are kept, by their ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.kinds import EXPERTS, quantization_of

FOUR_BIT_GROUPS = (128, 64, 32)
"""Columns of a group of a matrix of 4 bits that stays as it is."""


def misfit_of_four_bits(config: Mapping[str, Any]) -> str:
    """Return why a folder with this ``config.json`` is not served in its own 4 bits."""
    method, reason = quantization_of(config)
    if not method or reason:
        return reason or "its weights are not quantised"
    text = config.get("text_config") or config
    if any(text.get(setting) for setting in EXPERTS):
        return "matrices of experts are widened"
    quantization = config["quantization_config"]
    if method in ("gptq", "awq"):
        bits = quantization.get("bits", quantization.get("w_bit"))
        group = quantization.get("group_size", quantization.get("q_group_size"))
        is_reordered = bool(quantization.get("desc_act"))
    elif method == "compressed-tensors":
        parts = [part.get("weights") or {} for part in quantization["config_groups"].values()]
        bits, group = (
            next(iter(values)) if len(values := {part.get(key) for part in parts}) == 1 else None
            for key in ("num_bits", "group_size")
        )
        is_reordered = any(part.get("actorder") in ("group", True) for part in parts)
    else:
        return f"{method} has no integers of 4 bits"
    if bits != 4:
        return f"its integers have {bits} bits"
    if group not in FOUR_BIT_GROUPS:
        known = ", ".join(map(str, FOUR_BIT_GROUPS))
        return f"its groups have {group} columns, not one of {known}"
    return "its columns are in the order of activations (act-order)" if is_reordered else ""
