"""GGUF files that transformers reads, as Hugging Face folders; without its need of accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
"""``general.architecture`` of files that are read, besides that of the embedded model."""

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head"],
}
"""The entry in ``config.json`` for matrices that were Q4_0."""

_LOST = "rope_freqs.weight"
"""A tensor with factors of angles, which transformers leaves out without a word."""


def reason_against(fields: dict[str, Any], tensor_names: list[str]) -> str:
    """Return why a file is not read; nothing where it is."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = fields.get("tokenizer.ggml.pre")
    for key, allowed in (
        ("general.architecture", FAMILIES),
        ("tokenizer.ggml.model", ("gpt2",)),
        ("tokenizer.ggml.pre", ("smollm", *GGUF_PRE_TOKENIZER_SPLITS)),
    ):
        if fields.get(key) not in allowed:
            return f"{key} must be one of {', '.join(allowed)}, got {fields.get(key)!r}"
    if pre == "smollm":
        return "tokenizer.ggml.pre smollm is read of llama only"
    scaling = fields.get(f"{fields['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none":
        return f"it scales angles ({scaling}), which transformers does not read of a GGUF file"
    if _LOST in tensor_names:
        return f"it has {_LOST}, whose factors of angles transformers does not read"
    return ""


def write_folder(gguf_file: Path, fields: dict[str, Any], folder: Path) -> None:
    """Write the folder of a file, with its weights as bf16, but for matrices of layers in Q4_0,
    which stay as they are. Raises ValueError for one that transformers cannot read.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(gguf_file.parent, trust_remote_code=False, **where)
    head_dim = fields.get(f"{fields['general.architecture']}.attention.key_length")
    if head_dim:  # transformers takes the family's usual one
        config.head_dim = head_dim
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    read = load_gguf_checkpoint(
        str(gguf_file), return_tensors=True, model_to_load=lm, torch_dtype=torch.bfloat16
    )
    tensors = {name: tensor.contiguous() for name, tensor in read["tensors"].items()}
    names = set(lm.state_dict())
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    missing = sorted(names - tensors.keys() - {"lm_head.weight"})
    if missing:
        raise ValueError(f"tensor {missing[0]} is missing")
    packed = _pack_q4_0(gguf_file, fields, lm)
    if packed:
        config.quantization_config = QUANTIZATION
        packed_names = {name.removesuffix("_packed") for name in packed if name.endswith("_packed")}
        tensors = {
            name: tensor for name, tensor in tensors.items() if name not in packed_names
        } | packed
    config.architectures, config.dtype = [type(lm).__name__], torch.bfloat16
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, trust_remote_code=False, **where)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def _pack_q4_0(gguf_file: Path, fields: dict[str, Any], lm: Any) -> dict[str, Any]:
    """Return the matrices of layers in Q4_0 by the names of compressed-tensors: the same integers
    and scales.
    """
    import gguf
    import numpy as np
    import torch

    family = fields["general.architecture"]
    blocks = fields[f"{family}.block_count"]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(architecture, blocks)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}
    heads = fields[f"{family}.attention.head_count"]
    counts = {"q_proj": heads, "k_proj": fields.get(f"{family}.attention.head_count_kv", heads)}
    tensors: dict[str, Any] = {}
    for name, module in lm.get_decoder().named_modules(prefix="model"):
        tensor = stored.get(f"{names.get_name(name)}.weight")
        if (
            tensor is None
            or not isinstance(module, torch.nn.Linear)
            or tensor.tensor_type != gguf.GGMLQuantizationType.Q4_0
        ):
            continue
        rows = module.out_features
        parts = np.asarray(tensor.data).reshape(rows, -1, 18)  # a scale in fp16, 32 integers
        count = counts.get(name.rpartition(".")[2]) if family == "llama" else None
        if count:  # llama.cpp rotates neighbouring rows of a head
            parts = parts.reshape(count, rows // count // 2, 2, *parts.shape[1:]).swapaxes(1, 2)
            parts = parts.reshape(rows, *parts.shape[3:])
        halves = np.ascontiguousarray(parts[..., 2:])
        digits = np.concatenate((halves & 15, halves >> 4), -1).reshape(rows, -1)
        words = (digits[:, 0::2] | digits[:, 1::2] << 4).view(np.int32)
        scale = np.ascontiguousarray(parts[..., :2]).view(np.float16)[..., 0]
        tensors[f"{name}.weight_packed"] = torch.from_numpy(words.copy())
        tensors[f"{name}.weight_scale"] = torch.from_numpy(scale.copy())
        tensors[f"{name}.weight_shape"] = torch.tensor([rows, module.in_features])
    return tensors
