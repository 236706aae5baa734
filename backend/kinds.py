"""The kinds of engines, an entry each: what is known of a kind without importing its module.

A kind's module (``backend.engines.registry.KindModule``) answers the rest: it makes an engine,
checks its folder, plans its memory and lists the passes to measure. A new kind is its module and
its entry here; settings of its own are fields of ``backend.engine_config.EngineConfig``. A user's
own kind is a module that has its ``KIND``, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, TypeVar

T = TypeVar("T")

Package = tuple[str, str]
"""A distribution and the one version of it that is known; empty: any."""

QUANTIZED = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "awq", "gptq")
"""Methods of quantised weights that are read, widened to bf16."""

COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
)
"""Formats of compressed-tensors that are read."""

QUANTIZED_ELSEWHERE = {
    "aqlm": "aqlm",
    "bitsandbytes": "bitsandbytes",
    "eetq": "eetq",
    "higgs": "flute-kernel",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
    "quark": "amd-quark",
    "spqr": "spqr_quant",
    "torchao": "torchao",
    "vptq": "vptq",
}
"""Other methods and the package that reads them, by which a folder may be saved in bf16."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings of models with experts, whose passes no CUDA graph captures."""


def _all_fit(config: Mapping[str, Any]) -> str:
    del config
    return ""


def quantization_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return by what method the weights of a ``config.json`` are quantised, and why that is not
    read; both are empty where there is nothing to say.
    """
    quantized = config.get("quantization_config")
    if not quantized:
        return "", ""
    if not isinstance(quantized, dict) or not isinstance(quantized.get("quant_method"), str):
        return "unknown", "quantization_config names no quant_method"
    method = quantized["quant_method"]
    return method, _unread(method, quantized)


def _unread(method: str, quantized: Mapping[str, Any]) -> str:
    """Return why quantised weights are not read; nothing where they are."""
    if method not in QUANTIZED:
        package = QUANTIZED_ELSEWHERE.get(method)
        reads = f"; the package {package} reads it" if package else ""
        return f"{method} is not one of {', '.join(QUANTIZED)}{reads}"
    if method == "awq" and quantized.get("version", "gemm") != "gemm":
        return f"its version {quantized['version']} is not gemm"
    groups = quantized.get("config_groups")
    parts = [quantized, *(groups.values() if isinstance(groups, dict) else ())]
    formats = {part.get("format") for part in parts if isinstance(part, dict)}
    unread = sorted(map(str, formats - {None, "mixed-precision", *COMPRESSED_FORMATS}))
    if method == "compressed-tensors" and unread:
        reads = "the package compressed-tensors reads it"
        return f"its format {unread[0]} is not one of {', '.join(COMPRESSED_FORMATS)}; {reads}"
    if quantized.get("transform_config"):
        return "its transform_config rotates activations"
    return ""


def _misfit_of_paged_attention(config: Mapping[str, Any]) -> str:
    """Return what of this ``config.json`` OpenVINO's attention cannot run."""
    text = config.get("text_config")
    softcap = (text if isinstance(text, dict) else config).get("attn_logit_softcapping")
    return f"soft-caps of attention scores ({softcap:g})" if softcap else ""


def heads_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the attention heads in a ``config.json``, and the most columns that one has."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    heads = text.get("num_attention_heads") or 1
    columns = text.get("head_dim") or (text.get("hidden_size") or heads) // heads
    return heads, max(columns, text.get("global_head_dim") or 0)


def _misfit_of_pages(config: Mapping[str, Any]) -> str:
    """Return why the CUDA engine's kernels cannot run a model of this ``config.json``."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    for setting in ("draft_vocab_size", *EXPERTS):
        if text.get(setting):
            return f"{setting} {text[setting]!r}"
    if unread := quantization_of(config)[1]:
        return f"quantised weights: {unread}"
    _, columns = heads_of(config)
    return f"attention heads of {columns} columns, no power of two" if columns & columns - 1 else ""


@dataclass(frozen=True, slots=True)
class Kind:
    """Facts about a kind of engine that are known before one is made; what one kind alone says, its
    module answers.
    """

    module: str
    """It answers for the kind, and imports no tensor library until it makes an engine."""
    model: bool = True
    """It runs one, which the setting ``model`` names."""
    architectures: tuple[str, ...] = ()
    """Those of the Hugging Face folders that it loads."""
    any_decoder: bool = False
    """It loads those of any decoder that transformers builds and we can serve."""
    automatic: tuple[str, ...] = ()
    """The devices, "cpu" or "cuda", where ``auto`` means the first kind that can run."""
    misfit: Callable[[Mapping[str, Any]], str] = _all_fit
    """(config.json) to the reason why it cannot run the model; empty where it can."""
    dtypes: tuple[str, ...] = ()
    """Those that it runs; none: its folder decides."""
    package: Package | None = None
    """It cannot run without this one."""
    int8_package: Package | None = None
    """On CPUs with it, ``dtype`` auto is int8."""
    token_bytes: int = 0
    """Host memory for each of ``remembered_tokens``."""
    target: bool = True
    """It can be one."""
    reads_target: bool = False
    """As a draft, it reads the target's ``hidden_states``."""
    tokenizer: bool = True
    """Its model folder has one; else texts are bytes."""
    known_s: float = 0.0
    """Seconds of a pass that needs no measuring."""
    behaviour: int = 0
    """Above 0: its passes are measured, and again where this is raised."""
    hosted: bool = False
    """As a target, it batches, schedules and samples by itself (``backend.engines.hosted``)."""
    most_ahead: int = 0
    """As a target with ``lookahead``, the requests that it serves at once; 0: it has none."""

    def answer(self, name: str, default: T) -> T:
        """Return what the kind's module says by a name (``registry.KindModule``), if anything."""
        value: T = getattr(import_module(self.module), name, default)
        return value

    @property
    def checkpoint(self) -> bool:
        """Whether its model is a Hugging Face folder."""
        return self.any_decoder or bool(self.architectures)

    @property
    def gives_states(self) -> bool:
        """Whether, as a target, its completions can have ``hidden_states``."""
        return self.target and self.checkpoint

    @property
    def free(self) -> bool:
        """Whether it is a draft that costs next to nothing, as its ``EngineLimits`` say."""
        return not (self.model or self.target)

    @property
    def cpu_only(self) -> bool:
        """Whether it runs on no other device."""
        return self.automatic == ("cpu",)

    @property
    def measured(self) -> bool:
        """Whether we measure its passes."""
        return self.behaviour > 0

    @property
    def missing(self) -> str:
        """Packages that must be installed for it and are not, and what is there; empty where it can
        run.
        """
        return _missing(self.package) if self.package else ""

    @property
    def runs_int8(self) -> bool:
        """Whether the package that runs it in int8 is installed."""
        return self.int8_package is not None and not _missing(self.int8_package)


def _missing(package: Package) -> str:
    name, version = package
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = "none"
    if not version:
        return f"{name} (in spindle[convert])" if installed == "none" else ""
    return "" if installed == version else f"{name}=={version} (found: {installed})"


_OPENVINO, _TORCH = ("openvino", "2026.4.1"), ("torch", "")
KINDS = {
    "openvino": Kind(
        "backend.engines.openvino.kind",
        any_decoder=True,
        automatic=("cpu",),
        misfit=_misfit_of_paged_attention,
        dtypes=("bf16", "int4", "int8", "fp32"),
        package=_OPENVINO,
        behaviour=5,
    ),
    "cuda": Kind(
        "backend.engines.cuda.kind",
        any_decoder=True,
        automatic=("cuda",),
        misfit=_misfit_of_pages,
        dtypes=("bf16", "fp32", "fp64"),
        package=_TORCH,
        behaviour=2,
        most_ahead=256,
    ),
    "torch": Kind(
        "backend.engines.torch.kind",
        any_decoder=True,
        automatic=("cpu", "cuda"),
        dtypes=("bf16", "fp32", "fp64"),
        package=_TORCH,
        behaviour=2,
    ),
    "head": Kind(
        "backend.engines.head.kind",
        architectures=("SpindleHead",),
        int8_package=_OPENVINO,
        dtypes=("bf16", "fp32", "int8"),
        target=False,
        reads_target=True,
        behaviour=3,
    ),
    "eagle": Kind(
        "backend.engines.eagle.kind",
        architectures=("SpindleEagle",),
        int8_package=_OPENVINO,
        dtypes=("bf16", "fp32", "int8", "fp64"),
        target=False,
        reads_target=True,
        behaviour=2,
    ),
    "lookup": Kind("backend.engines.lookup", model=False, target=False, known_s=2e-5),
    "suffix": Kind(
        "backend.engines.suffix",
        model=False,
        target=False,
        known_s=1e-4,
        token_bytes=64,  # 32 in the ring, the rest its share of what is noted of texts
    ),
    "tensorrt_llm": Kind("backend.engines.tensorrt_llm.kind", hosted=True),
    "vllm": Kind("backend.engines.vllm.kind", hosted=True, dtypes=("bf16", "fp32")),
    "trt_graph": Kind("backend.engines.trt_graph.kind", package=_TORCH, behaviour=1),
}


def kind_of(engine: str) -> Kind:
    """Return what is known of a kind: one of ``KINDS``, or the ``KIND`` of the module that a dotted
    path names. Whatever that module's import raises is raised.
    """
    if engine in KINDS:
        return KINDS[engine]
    kind: Kind = import_module(engine).KIND
    return kind


def automatic(device: str) -> list[str]:
    """Return the kinds that ``auto`` may mean on a device, the best first."""
    return [name for name, kind in KINDS.items() if device.partition(":")[0] in kind.automatic]
