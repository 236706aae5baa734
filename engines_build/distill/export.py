"""Write a model as a Hugging Face Llama folder whose weight files stay small enough for a
repository.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from backend.storage.manifest import vocabulary_sha256

MAX_FILE_BYTES = 16 * 2**20
_CONFIG_KEYS = {
    *(
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *(
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
    ),
    *("attention_bias", "mlp_bias", "bos_token_id", "eos_token_id"),
}


def export(model: LlamaForCausalLM, shortlist: Tensor | None, tokenizer: Path, out: Path) -> None:
    """Write config.json and the bf16 weights to ``out`` (no file above ``MAX_FILE_BYTES``, unless
    one tensor alone is).

    A draft names the tokens of its head in ``lm_head.token_ids`` and the vocabulary of its target
    (the hash of the file ``tokenizer``) in its config.json; a whole model has no ``shortlist`` and
    brings its tokenizer along.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.detach().bfloat16().cpu().contiguous() for name, t in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config = {k: v for k, v in model.config.to_dict().items() if k in _CONFIG_KEYS}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    if shortlist is not None:
        tensors["lm_head.token_ids"] = shortlist.int()
        config |= {
            "draft_vocab_size": len(shortlist),
            "vocabulary_sha256": vocabulary_sha256(tokenizer),
        }
    write_weights(tensors, out)
    (out / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def read_draft(folder: Path) -> tuple[LlamaForCausalLM, Tensor]:
    """Return a draft that ``export`` has written, in fp32, and its shortlist. Raises ValueError for
    a folder that is none.
    """
    tensors = {
        name: t
        for file in sorted(folder.glob("model*.safetensors"))
        for name, t in load_file(file).items()
    }
    if "lm_head.token_ids" not in tensors:
        raise ValueError(f"--start: {folder} is no draft with a shortlist")
    shortlist = tensors.pop("lm_head.token_ids").long()
    draft = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float()
    draft.lm_head = torch.nn.Linear(draft.config.hidden_size, len(shortlist), bias=False)
    draft.load_state_dict({name: t.float() for name, t in tensors.items()})
    return draft, shortlist


def write_weights(tensors: dict[str, Tensor], out: Path) -> None:
    """Write ``tensors`` as one safetensors file or as shards with their index, replacing those of
    an earlier run.
    """
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    files: list[dict[str, Tensor]] = [{}]
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        if (
            files[-1]
            and sum(o.nbytes for o in files[-1].values()) + t.nbytes > MAX_FILE_BYTES - 2**16
        ):
            files.append({})
        files[-1][name] = t
    if len(files) == 1:
        save_file(files[0], out / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, name in zip(files, names, strict=True):
        save_file(file, out / name, metadata={"format": "pt"})
    where = {tensor: name for file, name in zip(files, names, strict=True) for tensor in file}
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": where,
    }
    (out / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def parameters(model: torch.nn.Module) -> int:
    """Return how many numbers a model has, a tied head counted once."""
    return sum(p.numel() for p in model.parameters())
