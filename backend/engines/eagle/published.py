"""The files of a published draft head, as their publisher wrote them, and heads that are not
EAGLE-3's: each kind is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.checked_settings import ConfigError
from backend.files import check_content
from backend.published_heads import PICKLES, SAFETENSORS
from backend.storage.weight_files import INDEX, shapes_in, weight_files

if TYPE_CHECKING:
    from torch import Tensor
Config = Mapping[str, Any]
Names = Collection[str]
_INSTEAD = "use an EAGLE-3 head for the same target"
_PARALLEL = f"which drafts in parallel: {_INSTEAD}"
_QUANTISED = (".weight_scale", ".input_scale", ".weight_scale_2", ".qweight", ".weight_packed")


def files_of(folder: Path) -> list[Path]:
    """Return the files that hold a head's tensors. Raises ConfigError where there are none, and
    for one that is missing, damaged, or only a Git LFS pointer.
    """
    if (folder / INDEX).exists():
        files = weight_files(folder)
    else:
        files = sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(PICKLES))
    if not files:
        raise ConfigError(f"{folder} has neither {SAFETENSORS} nor {PICKLES}")
    for file in files:
        check_content(file)
        if file.suffix == ".safetensors":
            shapes_in(file)
    return files


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by its name there. Only tensors of a pickle are read: code in
    it is an error. Raises ConfigError naming the file.
    """
    tensors: dict[str, Tensor] = {}
    for file in files_of(folder):
        for name, tensor in _read(file).items():
            if name in tensors:
                raise ConfigError(f"{file}: tensor {name} is in two files")
            tensors[name] = tensor
    return tensors


def _read(file: Path) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    except Exception as error:  # pickle's own, which nothing here imports
        line = str(error).splitlines()[0]
        raise ConfigError(f"{file} has more than tensors, so it is not read: {line}") from error
    if not isinstance(tensors, dict) or not all(torch.is_tensor(one) for one in tensors.values()):
        raise ConfigError(f"{file} is not a dictionary of tensors")
    return tensors


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
    (_is_quantised, "a quantised head: use the one in bf16"),
    (_is_mlp_speculator, f"an MLP speculator: {_INSTEAD}"),
    (_is_first_eagle, f"an EAGLE-1 or EAGLE-2 head (fc, but no hidden_norm): {_INSTEAD}"),
)


def other_kind(config: Config, names: Names) -> str:
    """Return what a folder with these tensors is instead of an EAGLE-3 head; empty where nothing
    says so.
    """
    return next((what for is_it, what in _KINDS if is_it(config, names)), "")
