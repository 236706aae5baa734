"""Passes in 4 bits against llama.cpp's, in turn in one process: ``python -m bench.micro.four_bits
--libs FOLDER --bindings FILE --out FILE``.

``--libs`` has llama.cpp's libraries (``bins/linux-x64`` of the npm package
``@node-llama-cpp/linux-x64``), ``--bindings`` declares its functions (``_cffi_bindings.py`` of the
package llama-cpp-py-sync); cffi must be importable. Both sides have random weights of the same
shape: ours a folder of compressed-tensors' int4 in groups of 128, read as a server reads it. A cell
``RxM`` is a pass of R sequences with M tokens each after ``--context``. With fewer ``--layers`` the
vocabulary has 512 words, so that layers are compared; without, the head is Q6_K there, and int4
here.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.machine import machine
from backend.sequence import BLOCK_TOKENS
from bench import records

CELLS = ("1x1", "1x2", "1x3", "1x4", "1x5", "4x1", "8x1", "8x3")
SEQUENCES = 8
FEW_WORDS = 512
GROUP = 128
SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
}
"""Shapes of Llama 3.2."""

REST = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}

KEPT: list[Any] = []
"""Functions that llama.cpp may call until the process ends."""

Items = list[tuple[int, int]]
"""Sequence and place in the text of each row."""


def matrices(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return rows and columns of a layer's matrices by their GGUF names."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]
    return {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }


NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(shape: dict[str, int], folder: Path) -> Path:
    """Write a folder with random integers of 4 bits."""
    generator = torch.Generator().manual_seed(0)
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    embedding = torch.empty(vocab, hidden, dtype=torch.bfloat16)
    for rows in embedding.split(4096):
        rows.copy_(torch.randn(rows.shape, generator=generator) * 0.02)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = norm.clone()
        for name, (rows, columns) in matrices(shape).items():
            words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator)
            scale = (torch.rand(rows, columns // GROUP, generator=generator) + 0.5) * 0.004
            place = at + NAMES[name] + ".weight_"
            tensors[f"{place}packed"] = words.int()
            tensors[f"{place}scale"] = scale.half()
            tensors[f"{place}shape"] = torch.tensor([rows, columns])
    weights = {"num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    config = {
        **shape,
        **REST,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "quantization_config": quantization,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(shape: dict[str, int], kind: str, file: Path) -> Path:
    """Write a GGUF file with random blocks of this kind."""
    import gguf

    from bench.peers.models import add_config, finish

    writer = gguf.GGUFWriter(file, "llama")
    add_config(writer, shape | REST)
    writer.add_string("tokenizer.ggml.model", "none")
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, quantized: str) -> None:
        numbers, size, scales = {
            "Q4_0": (32, 18, ((0, 0.004),)),
            "Q4_K": (256, 144, ((0, 0.0001), (2, 0.0008))),
            "Q6_K": (256, 210, ((208, 0.00001),)),
        }[quantized]
        count = rows * columns // numbers
        blocks = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
        for at, middle in scales:
            scale = (rng.uniform(0.5, 1.5, count) * middle).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(count, 2)
        dtype = gguf.GGMLQuantizationType[quantized]
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=dtype)

    norm = np.ones(shape["hidden_size"], np.float32)
    add("token_embd.weight", shape["vocab_size"], shape["hidden_size"], "Q6_K")
    writer.add_tensor("output_norm.weight", norm)
    for layer in range(shape["num_hidden_layers"]):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
        for name, (rows, columns) in matrices(shape).items():
            add(f"blk.{layer}.{name}.weight", rows, columns, kind)
    finish(writer)
    return file


class Llama:
    """llama.cpp with a text's beginning in the KV of every sequence."""

    def __init__(self, args: argparse.Namespace, file: Path) -> None:
        source = args.bindings.read_text()
        ffi = self._ffi = import_module("cffi").FFI()
        ffi.cdef(source.split('_LLAMA_H_CDEF = """')[1].split('"""')[0])
        (base,) = args.libs.glob("libggml.v*.so*")
        ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL).ggml_backend_load_all_from_path(
            str(args.libs).encode()
        )
        (library,) = args.libs.glob("libllama.v*.so*")
        self._lib = lib = ffi.dlopen(str(library))
        KEPT.append(ffi.callback("ggml_log_callback", lambda *_: None))
        lib.llama_log_set(KEPT[-1], ffi.NULL)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(file).encode(), lib.llama_model_default_params()
        )
        settings = lib.llama_context_default_params()
        settings.n_ctx = (args.context + 64) * SEQUENCES
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = SEQUENCES
        settings.n_threads = settings.n_threads_batch = args.threads
        self._context = lib.llama_init_from_model(self._model, settings)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(512, 0, 1)
        self._start = args.context
        self._decode([(0, place) for place in range(args.context)], logits=False)
        for sequence in range(1, SEQUENCES):
            lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _decode(self, items: Items, *, logits: bool = True) -> None:
        batch = self._batch
        batch.n_tokens = len(items)
        for row, (sequence, place) in enumerate(items):
            batch.token[row], batch.pos[row] = token_at(place), place
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = logits
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp ran no pass")
        self._lib.llama_synchronize(self._context)

    def run(self, items: Items) -> float:
        """Return the milliseconds of a pass, which is then forgotten."""
        started = time.perf_counter()
        self._decode(items)
        taken_ms = (time.perf_counter() - started) * 1e3
        for sequence in {sequence for sequence, _ in items}:
            self._lib.llama_memory_seq_rm(self._memory, sequence, self._start, -1)
        return taken_ms

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


class Spindle:
    """Our engine with the same."""

    def __init__(self, args: argparse.Namespace, folder: Path, head: str) -> None:
        each = -(-(args.context + 40) // BLOCK_TOKENS)
        engine = OpenvinoEngine.load(
            "target",
            folder,
            dtype="int4",
            lm_head=head,
            threads=args.threads,
            kv_blocks=SEQUENCES * each,
            max_context_tokens=args.context + 40,
        )
        self.model = engine.model
        self.tables = [KVTable(range(each * n, each * (n + 1))) for n in range(SEQUENCES)]
        text = [token_at(place) for place in range(args.context)]
        for table in self.tables:
            self.model.forward([PassChunk(text, 0, table, 1, (), len(text))])

    def run(self, items: Items) -> float:
        """Return the milliseconds of a pass."""
        chunks = []
        for sequence in sorted({sequence for sequence, _ in items}):
            places = [place for one, place in items if one == sequence]
            tokens = [token_at(place) for place in places]
            chunks.append(PassChunk(tokens, places[0], self.tables[sequence], len(tokens)))
        started = time.perf_counter()
        self.model.forward(chunks)
        return (time.perf_counter() - started) * 1e3


def token_at(place: int) -> int:
    """Return the token of a place in the text."""
    return 3 + place * 7919 % 500


def compare(
    ours: Callable[[Items], float], theirs: Callable[[Items], float], cell: str, args: Any
) -> dict[str, Any]:
    """Run a cell on both sides in turn; return medians and the ratio's of pairs."""
    rows, tokens = map(int, cell.split("x"))
    items = [(row, args.context + token) for row in range(rows) for token in range(tokens)]
    pairs = []
    for repeat in range(args.repeats + 2):
        order = (ours, theirs) if repeat % 2 else (theirs, ours)
        times = {run: run(items) for run in order}
        pairs.append((times[ours], times[theirs]))
    pairs = pairs[2:]
    ratios = [mine / other for mine, other in pairs]
    return {
        "cell": cell,
        "spindle_ms": round(statistics.median(mine for mine, _ in pairs), 2),
        "llama_cpp_ms": round(statistics.median(other for _, other in pairs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(float(q), 3) for q in np.percentile(ratios, (25, 75))],
    }


def main() -> None:
    """Measure the shapes and write a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--libs", type=Path, required=True)
    parser.add_argument("--bindings", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["1b", "3b"], choices=SHAPES)
    parser.add_argument("--kinds", nargs="+", default=["Q4_0", "Q4_K"])
    parser.add_argument("--layers", type=int, default=4, help="0: all, with the head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--prepare", action="store_true", help="only write and convert the folders")
    parser.add_argument("--place", type=Path, help="where folders are written (default: temporary)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = args.place or Path(temporary)
        os.environ.setdefault("SPINDLE_CACHE", str(place / "cache"))
        cells = [measured for shape in args.shapes for measured in _measure(args, shape, place)]
    if args.prepare:
        return
    records.write(args.out, {"instructions": machine.instructions(), "cells": cells})


def _measure(args: argparse.Namespace, name: str, place: Path) -> Sequence[dict[str, Any]]:
    shape = dict(SHAPES[name])
    if args.layers:
        shape |= {"num_hidden_layers": args.layers, "vocab_size": FEW_WORDS}
    stem = f"{name}-{args.layers}"
    folder = place / stem
    if not folder.exists():
        write_folder(shape, folder)
    spindle = Spindle(args, folder, "" if args.layers else "int4")
    rows = []
    for kind in args.kinds:
        file = place / f"{stem}-{kind}.gguf"
        if not file.exists():
            write_gguf(shape, kind, file)
        if args.prepare:
            continue
        llama = Llama(args, file)
        for cell in CELLS:
            row = {"shape": name, "layers": args.layers or "all", "llama.cpp": kind}
            row |= {"threads": args.threads} | compare(spindle.run, llama.run, cell, args)
            print(json.dumps(row), flush=True)
            rows.append(row)
        llama.close()
    del spindle
    gc.collect()
    return rows


if __name__ == "__main__":
    main()
