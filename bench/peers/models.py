"""The models of the peers, made from this project's own checkpoints and kept in the cache: the same
weights in the forms that others read.

A draft here may score a part of the vocabulary only; no peer can read such a head, so theirs is
whole. The rows of tokens that the draft never proposes are the mean of its rows: their score is the
mean of the others' and so never above the best, and a greedy draft proposes what ours does. The
cost is that they read the whole head for each token.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from backend.storage import cache
from backend.storage.manifest import weights_sha256

HEAD, HEAD_IDS = "lm_head.weight", "lm_head.token_ids"
Tensors = dict[str, torch.Tensor]


def whole_head(folder: Path) -> Path:
    """Return a checkpoint folder that any stack can read: ``folder`` itself where its head is
    whole, else one in the cache.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if "draft_vocab_size" not in config:
        return folder
    place = _place(folder, "hf")
    if not place.exists():
        size, tensors = config["vocab_size"], _tensors(folder)
        ids, rows = tensors.pop(HEAD_IDS).long(), tensors[HEAD].float()
        tensors[HEAD] = rows.mean(0).repeat(size, 1)
        tensors[HEAD][ids] = rows
        columns = {
            key: value
            for key, value in config.items()
            if key not in ("draft_vocab_size", "vocabulary_sha256")
        }
        with tempfile.TemporaryDirectory(dir=place.parent) as fresh:
            save_file(
                {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()},
                Path(fresh) / "model.safetensors",
            )
            (Path(fresh) / "config.json").write_text(json.dumps(columns, indent=1) + "\n", "utf-8")
            shutil.copytree(fresh, place)
    return place


def as_gguf(folder: Path, target: Path, kind: str) -> Path:
    """Return a checkpoint as a GGUF file with the tokenizer of the folder ``target``; ``kind``:
    BF16, the weights as they are, or F16.
    """
    place = _place(folder, f"{kind.lower()}.gguf")
    if not place.exists():
        part = place.with_suffix(".part")
        writer = gguf.GGUFWriter(part, "llama")
        source = whole_head(folder)
        config = json.loads((source / "config.json").read_text("utf-8"))
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        writer.add_name(folder.name)
        add_config(writer, config)
        _add_tokenizer(writer, target)
        for name, tensor in _tensors(source).items():
            _add_tensor(
                writer, name, tensor.float().numpy(), config, gguf.GGMLQuantizationType[kind]
            )
        finish(writer)
        os.replace(part, place)
    return place


def _place(folder: Path, name: str) -> Path:
    place = (
        cache.root() / "peers" / "models" / f"{folder.name}-{weights_sha256(folder)[:12]}-{name}"
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _tensors(folder: Path) -> Tensors:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the shape of a model, as ``config.json`` has it."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Add the byte-level BPE tokenizer of a folder, as llama.cpp names the two that this project
    has.
    """
    tokenizer, vocabulary = (
        json.loads((folder / name).read_text("utf-8"))
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    model, special = tokenizer["model"], {token["id"] for token in tokenizer["added_tokens"]}
    digits = any(
        step["type"] == "Digits" for step in tokenizer["pre_tokenizer"].get("pretokenizers", [])
    )
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if digits else "gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
            for i in range(len(words))
        ]
    )
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    writer.add_bos_token_id(model["vocab"][vocabulary["bos_token"]])
    writer.add_eos_token_id(model["vocab"][vocabulary["eos_token"]])
    writer.add_pad_token_id(model["vocab"][vocabulary["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(vocabulary["chat_template"])


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    weight: npt.NDArray[Any],
    config: dict[str, Any],
    kind: gguf.GGMLQuantizationType,
) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if part in heads:
        weight = permute(weight, heads[part])
    stored_kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else kind
    writer.add_tensor(
        names.get_name(name, try_suffixes=(".weight",)) or name,
        gguf.quantize(np.ascontiguousarray(weight), stored_kind),
        raw_dtype=stored_kind,
    )


def permute(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Put the rows of a q or k projection [heads * d, columns] in llama.cpp's order: the inverse of
    ``engines_build.convert.unpermute``.
    """
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )
