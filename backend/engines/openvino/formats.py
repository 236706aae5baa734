"""Folders whose 4 bits are kept, by their ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.kinds import EXPERTS, quantization_of

FOUR_BIT_GROUPS = (128, 64, 32)
"""Columns of a group of a matrix of 4 bits that stays as it is."""

HEAD_BYTES = {"folder": 4.0, "int8": 1.0, "int4": 0.6}
"""Bytes of a number of the head as int4 packs it, by ``lm_head``: the folder's becomes fp32."""


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
        is_reordered = bool(quantization.get("desc_act"))
    elif method == "compressed-tensors":
        parts = [part.get("weights") or {} for part in quantization["config_groups"].values()]
        sizes = {part.get("num_bits") for part in parts}
        bits = sizes.pop() if len(sizes) == 1 else None
        is_reordered = any(part.get("actorder") in ("group", True) for part in parts)
    else:
        return f"{method} has no integers of 4 bits"
    if bits != 4:
        return f"its integers have {bits} bits"
    if (group := _group(quantization)) not in FOUR_BIT_GROUPS:
        choices = ", ".join(map(str, FOUR_BIT_GROUPS))
        return f"its groups have {group} columns, not one of {choices}"
    return "its columns are in the order of activations (act-order)" if is_reordered else ""


def price_of_four_bits(config: Mapping[str, Any]) -> str:
    """Return what is slow in a folder whose 4 bits are kept, and what ``lm_head`` changes."""
    text = config.get("text_config") or config
    numbers = text.get("vocab_size", 0) * text.get("hidden_size", 0)
    as_it_is, int8, int4 = (f"{each * numbers / 1e9:.3g} GB" for each in HEAD_BYTES.values())
    head = (
        f"each pass reads the head: {as_it_is} as it is, {int8} with lm_head int8 (logits are off "
        f"by about 1 %), {int4} with int4 (10 %)"
    )
    slow = (
        "groups of 32 verify slowly with AMX: a pass of 4 rows takes 2.2x the time of one row "
        "(groups of 128: 1.1x), and one of 24 rows 1.3x its time in bf16"
    )
    is_slow = _group(config["quantization_config"]) == min(FOUR_BIT_GROUPS)
    return "; ".join([head] * bool(numbers) + [slow] * is_slow)


def _group(quantization: Mapping[str, Any]) -> int | None:
    """Return the columns of a group in the whole folder; None where matrices differ."""
    if parts := quantization.get("config_groups"):
        groups = {(part.get("weights") or {}).get("group_size") for part in parts.values()}
        return groups.pop() if len(groups) == 1 else None
    group: int | None = quantization.get("group_size", quantization.get("q_group_size"))
    return group
