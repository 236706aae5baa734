"""GGUF files that transformers reads, as Hugging Face folders; without its need of accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
"""``general.architecture`` of files that are read, besides that of the embedded model."""

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
    """Write the folder of a file, with its weights as bf16. Raises ValueError for one that
    transformers cannot read.
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
    config.architectures, config.dtype = [type(lm).__name__], torch.bfloat16
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, trust_remote_code=False, **where)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)
