"""Compiled networks on a CUDA GPU: TensorRT-RTX or TensorRT executes them over torch tensors as
device buffers.

An engine folder (``python -m engines_build.build --engine trt_graph``) holds ``trt_graph.json``,
the checkpoint's ``config.json`` and weights, and an engine for each network. Weights that engines
share are inputs: one copy on the device, bound by address.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.engines.models.llama import load_llama
from backend.engines.trt_graph import LIBRARIES
from backend.engines.trt_graph.engine import PassShape, TrtGraphEngine
from backend.engines.trt_graph.inputs import GREEDY, Tensors
from backend.engines.weights import DTYPES, Weights

MANIFEST = "trt_graph.json"

logger = logging.getLogger(__name__)


class TrtGraphError(RuntimeError):
    """A GPU, a library or an engine folder that cannot serve; the message says what is needed."""


@dataclass(frozen=True, slots=True)
class NetworkManifest:
    """Content of a folder: engines by network name, the library and version that compiled them, and
    the shapes of each profile.
    """

    library: str
    version: str
    dtype: str
    shared: bool
    max_context_tokens: int
    max_draft_tokens: int
    passes: tuple[PassShape, ...]
    engines: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> NetworkManifest:
        """Read a folder's manifest. Raises TrtGraphError when it is missing or damaged."""
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_text("utf-8"))
            raw["passes"] = tuple(PassShape(**one) for one in raw["passes"])
            return cls(**raw)
        except OSError as error:
            raise TrtGraphError(
                f"cannot read {path}: {error.strerror}; build it: python -m engines_build.build "
                f"--engine trt_graph"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise TrtGraphError(f"{path} is damaged: {error}") from error


class TrtRuntime:
    """The networks of a folder on a GPU. Raises TrtGraphError where that is missing or not one that
    the engines run on.
    """

    def __init__(self, folder: Path, device: str = "cuda") -> None:
        manifest = NetworkManifest.read(folder)
        if not torch.cuda.is_available():
            raise TrtGraphError(
                f"{folder}: trt_graph needs a CUDA GPU and a torch built for CUDA; none was "
                f"found (torch {torch.__version__})"
            )
        self._trt = _library(manifest)
        self.config, weights = load_llama(folder, manifest.dtype, device)
        self.device, self.dtype = torch.device(device), DTYPES[manifest.dtype]
        self.verifies = GREEDY in manifest.engines
        self.passes: Seq[PassShape] = manifest.passes
        self._weights: Weights = weights if manifest.shared else {}
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime = self._trt.Runtime(self._logger)
        self._networks = {
            name: self._open(folder / file) for name, file in manifest.engines.items()
        }

    def run(self, network: str, tensors: Tensors) -> Tensors:
        """Run a network on torch's current stream."""
        return self._networks[network].run(tensors | self._weights)

    def _open(self, path: Path) -> _Network:
        blob = path.read_bytes()
        self._check(path, blob)
        engine = self._runtime.deserialize_cuda_engine(blob)
        if engine is None:
            raise TrtGraphError(
                f"{path} cannot be loaded by {self._trt.__name__} {self._trt.__version__} on "
                f"{_gpu(self.device)}"
            )
        return _Network(self._trt, engine, self.passes, self.device)

    def _check(self, path: Path, blob: bytes) -> None:
        """Ask whether an engine is for this GPU, where the library answers that without loading
        it.
        """
        if not hasattr(self._runtime, "get_engine_validity"):
            return
        validity, reasons = self._runtime.get_engine_validity(blob)
        if validity == self._trt.EngineValidity.INVALID:
            raise TrtGraphError(
                f"{path} does not run on {_gpu(self.device)} ({reasons}); build it again on or "
                f"for this GPU"
            )


def open_engine(
    name: str,
    folder: Path,
    device: str,
    *,
    kv_blocks: int,
    max_context_tokens: int,
    max_draft_tokens: int,
) -> TrtGraphEngine:
    """Load an engine folder. Raises TrtGraphError where the folder, the library or the GPU does not
    do.
    """
    manifest = NetworkManifest.read(folder)
    for what, needed, compiled in (
        ("max_context_tokens", max_context_tokens, manifest.max_context_tokens),
        ("k_max", max_draft_tokens, manifest.max_draft_tokens),
    ):
        if needed > compiled:
            raise TrtGraphError(
                f"{what} {needed} is over the {compiled} that {folder} was built for"
            )
    runtime = TrtRuntime(folder, device)
    logger.warning("%s: the engine trt_graph is for tests, not for serving", name)
    sizes = {
        "kv_blocks": kv_blocks,
        "max_context_tokens": max_context_tokens,
        "max_draft_tokens": max_draft_tokens,
    }
    return TrtGraphEngine(name, runtime.config, runtime, **sizes)


class _Network:
    """One engine: a context for each profile, whose shapes and addresses are set before every
    run.
    """

    def __init__(
        self, library: Any, engine: Any, passes: Seq[PassShape], device: torch.device
    ) -> None:
        self._engine, self._passes, self._device = engine, passes, device
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = library.TensorIOMode.INPUT
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == inputs]
        self._outputs = {
            name: _torch_dtype(library, engine.get_tensor_dtype(name))
            for name in names
            if name not in self._inputs
        }
        self._contexts = [
            self._context(library, profile) for profile in range(engine.num_optimization_profiles)
        ]

    def run(self, tensors: Tensors) -> Tensors:
        """Run on torch's current stream. ``tensors`` may hold more than the inputs."""
        batch, queries = tensors["ids"].shape
        fitting = (
            number
            for number, shapes in enumerate(self._passes)
            if batch <= shapes.batch and queries <= shapes.queries
        )
        context, stream = (
            self._contexts[next(fitting)],
            torch.cuda.current_stream(self._device).cuda_stream,
        )
        inputs = {name: tensors[name].contiguous() for name in self._inputs}
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise TrtGraphError(
                    f"{name} of shape {list(tensor.shape)} is outside of what was compiled"
                )
            context.set_tensor_address(name, tensor.data_ptr())
        outputs = {
            name: torch.empty(
                tuple(context.get_tensor_shape(name)), dtype=dtype, device=self._device
            )
            for name, dtype in self._outputs.items()
        }
        for name, tensor in outputs.items():
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(stream):
            raise TrtGraphError(
                f"the engine failed on a batch of {batch} sequences and {queries} rows"
            )
        return outputs

    def _context(self, library: Any, profile: int) -> Any:
        """Make a context for a profile; TensorRT-RTX captures CUDA graphs by itself, shape by
        shape.
        """
        if hasattr(library, "CudaGraphStrategy"):
            config = self._engine.create_runtime_config()
            config.cuda_graph_strategy = library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context()
        if context is None:
            raise TrtGraphError("there is not enough GPU memory for an execution context")
        stream = torch.cuda.current_stream(self._device)
        context.set_optimization_profile_async(profile, stream.cuda_stream)
        stream.synchronize()
        return context


def _library(manifest: NetworkManifest) -> Any:
    """Import what compiled the engines: they are read by the same library and version only."""
    if manifest.library not in LIBRARIES:
        choices = ", ".join(LIBRARIES)
        raise TrtGraphError(f"library in {MANIFEST} must be one of {choices}: {manifest.library!r}")
    try:
        library = importlib.import_module(manifest.library)
    except (ImportError, OSError) as error:
        raise TrtGraphError(
            f"trt_graph needs {manifest.library} {manifest.version}, which cannot be imported: "
            f"{error}"
        ) from error
    if library.__version__ != manifest.version:
        raise TrtGraphError(
            f"the engines need {manifest.library} {manifest.version}, installed is "
            f"{library.__version__}: build them again"
        )
    return library


def _torch_dtype(library: Any, dtype: Any) -> torch.dtype:
    kinds = library.DataType
    dtypes = {
        kinds.FLOAT: torch.float32,
        kinds.HALF: torch.float16,
        kinds.BF16: torch.bfloat16,
        kinds.INT32: torch.int32,
    }
    return dtypes[dtype]


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
