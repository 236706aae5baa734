"""Draft heads that are not EAGLE-3's, by what tells them apart: each is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

Config = Mapping[str, Any]
Names = Collection[str]

_INSTEAD = "take an EAGLE-3 head of the same target"
_PARALLEL = f"which drafts in parallel: {_INSTEAD}"
_QUANTISED = (".weight_scale", ".input_scale", ".weight_scale_2", ".qweight", ".weight_packed")


def model_type(config: Config) -> str:
    """Return what speculators calls a head; empty for a folder of others."""
    return str(config.get("speculators_model_type") or "")


def _is_named(config: Config, part: str) -> bool:
    return any(part in name for name in config.get("architectures") or ())


def _is_lora(config: Config, names: Names) -> bool:
    del config
    return any(".lora_" in name for name in names)


def _is_medusa(config: Config, names: Names) -> bool:
    return "medusa_num_heads" in config or any("medusa" in name for name in names)


def _is_parallel_eagle(config: Config, names: Names) -> bool:
    return "mask_hidden" in names or model_type(config) == "peagle" or "pard_token" in config


def _is_dspark(config: Config, names: Names) -> bool:
    del names
    inner = config.get("dflash_config") or {}
    return "markov_rank" in {*config, *inner} or model_type(config) == "dspark"


def _is_dflash(config: Config, names: Names) -> bool:
    del names
    marked = "dflash_config" in config or _is_named(config, "DFlash")
    return marked or model_type(config).startswith("dflash")


def _is_mtp(config: Config, names: Names) -> bool:
    marked = model_type(config) == "mtp" or _is_named(config, "MTP")
    return marked or any(".eh_proj" in name or name.startswith("mtp.") for name in names)


def _is_mla(config: Config, names: Names) -> bool:
    del config
    return any("kv_a_proj_with_mqa" in name or "kv_b_proj" in name for name in names)


def _is_quantised(config: Config, names: Names) -> bool:
    return bool(config.get("quantization_config")) or any(
        name.endswith(_QUANTISED) for name in names
    )


def _is_mlp_speculator(config: Config, names: Names) -> bool:
    del names
    return _is_named(config, "MLPSpeculator") or config.get("model_type") == "mlp_speculator"


def _is_first_eagle(config: Config, names: Names) -> bool:
    del config
    return any(name.endswith("fc.weight") for name in names) and not any(
        name.endswith("hidden_norm.weight") for name in names
    )


_KINDS: tuple[tuple[Callable[[Config, Names], bool], str], ...] = (
    (_is_lora, "a LoRA of the target together with a head: merge it first"),
    (_is_medusa, f"Medusa's heads: {_INSTEAD}"),
    (_is_parallel_eagle, f"P-EAGLE, {_PARALLEL}"),
    (_is_dspark, f"DSpark, {_PARALLEL}"),
    (_is_dflash, f"DFlash, {_PARALLEL}"),
    (_is_mtp, f"a layer for multi-token prediction (MTP): {_INSTEAD}"),
    (_is_mla, f"an EAGLE-3 head with latent attention (MLA): {_INSTEAD} without it"),
    (_is_quantised, "a quantised head: take the one in bf16"),
    (_is_mlp_speculator, f"an MLP speculator: {_INSTEAD}"),
    (_is_first_eagle, f"an EAGLE-1 or EAGLE-2 head (fc, but no hidden_norm): {_INSTEAD}"),
)


def other_kind(config: Config, names: Names) -> str:
    """Return what a folder with these tensors is instead of an EAGLE-3 head; empty where nothing
    says so.
    """
    return next((what for is_it, what in _KINDS if is_it(config, names)), "")
