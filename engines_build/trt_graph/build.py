"""Build the trt_graph engines of a ``serving.json``: every torch target and draft of it becomes a
folder of compiled networks.

A folder holds the checkpoint's own files and weights, one engine for each network (``logits``, of a
target ``greedy`` and ``drawn`` too), and ``trt_graph.json``, written last. Weights are inputs of
the engines and are not in them, unless they are asked to be inside.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from backend.config import ServingConfig, load_config
from backend.engine_config import EngineConfig
from backend.engines.models.llama import load_llama
from backend.engines.trt_graph.engine import PassShape
from backend.engines.trt_graph.inputs import DRAWN, GREEDY, LOGITS
from backend.model_folders import model_path
from engines_build.trt_graph.compile import Profile, SerialisedEngine, compile_step
from engines_build.trt_graph.graph import BF16, F16, F32
from engines_build.trt_graph.library import find_library
from engines_build.trt_graph.network import StepNetwork

MANIFEST = "trt_graph.json"
DTYPES = {"bf16": BF16, "fp16": F16, "fp32": F32}
PREFILL_BATCH = 4
Report = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The parameters of a build: the dtype of all models (None: each model's own), weights in the
    engines or besides them, attention's layers.
    """

    dtype: str | None = None
    weights_inside: bool = False
    native: bool | None = None
    library: str | None = None


def build_all(
    config_file: Path, output: Path, choice: BuildOptions, report: Report = print
) -> None:
    """Build the engines of a configuration and write ``serving.json`` for them. Raises ConfigError,
    CheckpointError or TrtError.
    """
    config, library = load_config(config_file), find_library(choice.library)
    raw = json.loads(config_file.read_text("utf-8"))
    for engine, entry in zip(config.engines, (raw["target"], *raw.get("drafts", [])), strict=True):
        if engine.kind.checkpoint:
            folder = output / engine.name
            build_folder(engine, config, folder, choice, library, report)
            for key in ("attention", "dtype"):
                entry.pop(key, None)
            entry |= {"engine": "trt_graph", "model": str(folder.resolve()), "device": "cuda"}
    (output / "serving.json").write_text(json.dumps(raw, indent=1) + "\n", "utf-8")
    report(f"{output / 'serving.json'} is ready; it needs a CUDA GPU to serve")


def build_folder(
    engine: EngineConfig,
    config: ServingConfig,
    folder: Path,
    choice: BuildOptions,
    library: ModuleType,
    report: Report,
) -> None:
    """Compile one model's networks."""
    source, dtype = (
        model_path(engine),
        choice.dtype or ("bf16" if engine.dtype == "int8" else engine.dtype),
    )
    model, weights = load_llama(source, "fp32" if dtype == "fp16" else dtype)
    if dtype == "fp16":
        weights = {name: tensor.half() for name, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    k_max, context = max(1, config.policy.k_max), config.limits.max_context_tokens
    record: dict[str, Any] = {}
    for network in (LOGITS, GREEDY, DRAWN) if engine is config.target else (LOGITS,):
        step = StepNetwork(model, DTYPES[dtype], context + k_max + 1, network)
        shapes, shared = profiles(config, network), not choice.weights_inside
        network_engine = compile_step(
            library, step, weights, shapes, shared=shared, native=choice.native
        )
        (folder / f"{network}.engine").write_bytes(network_engine.blob)
        record[network] = {
            "layers": network_engine.layers,
            "seconds": round(network_engine.seconds, 1),
            "megabytes": round(len(network_engine.blob) / 1e6, 2),
        }
        report(f"{engine.name} {network}: {_words(network_engine)}")
    _copy(source, folder)
    manifest = {
        "library": library.__name__,
        "version": library.__version__,
        "dtype": dtype,
        "shared": not choice.weights_inside,
        "max_context_tokens": context,
        "max_draft_tokens": k_max,
        "passes": [asdict(PassShape(one.batch, one.queries)) for one in profiles(config, LOGITS)],
        "engines": {name: f"{name}.engine" for name in record},
    }
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def profiles(config: ServingConfig, network: str) -> list[Profile]:
    """Return the shapes of decoding and of prefill; only logits are wanted of more rows than a
    proposal has.
    """
    queries, limits = config.policy.k_max + 2, config.limits
    chunk = max(queries, limits.prefill_chunk_tokens + 1)
    shapes = ((limits.max_active_requests, queries), (PREFILL_BATCH, chunk))
    past = limits.max_context_tokens + queries
    return [
        Profile(batch, rows, past, rows=rows if network == LOGITS else queries)
        for batch, rows in shapes
    ]


def _copy(source: Path, folder: Path) -> None:
    """Bring the checkpoint's files, as links to the same data where the file system has them."""
    for file in sorted(source.iterdir()):
        if file.suffix in {".json", ".safetensors", ".model", ".jinja"}:
            target = folder / file.name
            target.unlink(missing_ok=True)
            try:
                os.link(file.resolve(), target)
            except OSError:
                shutil.copyfile(file, target)


def _words(engine: SerialisedEngine) -> str:
    return f"{engine.layers} layers, {engine.seconds:.1f} s, {len(engine.blob) / 1e6:.2f} MB"
