"""One file (YAML or JSON) that says of a TensorRT-LLM deployment what is to be built: target,
drafts, their limits and their GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backend.checked_settings import ConfigError, build_settings, setting
from backend.sequence import BLOCK_TOKENS

FAMILIES = ("llama", "qwen")
"""The family whose converter of ``examples/models/core`` is used; Mistral checkpoints are converted
by Llama's.
"""

QFORMATS = ("none", "fp8", "int8_sq", "int4_awq", "w4a8_awq")
FP8_KV_FORMATS = ("fp8", "w4a8_awq")
"""With other formats the builder turns paged context FMHA off where the KV cache is fp8; with an
int8 cache always.
"""


PROMPT_TOKENS = 65_536
"""The most tokens of prompts in an iteration where a deployment does not say."""


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """One engine: a Hugging Face ``checkpoint``, its ``family``, number format, ranks and ``gpus``
    (as many as ranks).

    ``calibration`` is what a ``quantisation`` is fitted to: a folder that ``datasets`` can load,
    whose split ``train`` has a column ``text``. The quantiser's default is a data set that it would
    fetch.
    """

    name: str = ""
    checkpoint: str = ""
    family: str = setting("llama", choices=FAMILIES)
    dtype: str = setting("bfloat16", choices=("auto", "float16", "bfloat16", "float32"))
    quantisation: str = setting("none", choices=QFORMATS)
    calibration: str = ""
    fp8_kv_cache: bool = False
    tp_size: int = setting(1, low=1, high=64)
    pp_size: int = setting(1, low=1, high=64)
    gpus: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class TrtllmDeployment:
    """A target and its drafts, and the limits that all of them are built for."""

    output: str = ""
    target: EngineBuild = EngineBuild()
    drafts: tuple[EngineBuild, ...] = ()
    examples: str = "/app/examples"
    """The examples folder of TensorRT-LLM 1.2.1."""
    max_batch_size: int = setting(64, low=1, high=4096)
    max_context_tokens: int = setting(4096, low=16, high=1 << 20)
    max_draft_len: int = setting(8, low=0, high=256)
    """Built into the target, which verifies drafts up to this length that others send, such as
    NVIDIA's ``tensorrt_llm_bls``; 0: a plain engine.
    """
    max_text_tokens: int = setting(0, low=0, high=1 << 22)
    """The most tokens of prompts that an iteration takes (0: those of a full batch, at most
    65,536). Activations take memory by it.
    """
    tokens_per_block: int = setting(32, choices=(8, 16, 32, 64, 128))
    sampling_logits: bool = True
    """Engines return logits, which requests for log-probabilities need."""

    @property
    def token_budget(self) -> int:
        """``max_num_tokens`` of all engines: at least the longest prompt with its draft, in whole
        blocks.
        """
        longest = self.max_context_tokens + self.max_draft_len + 1
        longest = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
        prompts = self.max_text_tokens or min(self.max_batch_size * longest, PROMPT_TOKENS)
        return max(longest, prompts, self.max_batch_size * (self.max_draft_len + 1))

    @property
    def engines(self) -> list[EngineBuild]:
        """The target, then the drafts."""
        return [self.target, *self.drafts]


def load_deployment(path: Path) -> TrtllmDeployment:
    """Read and check a deployment file. Raises ConfigError naming the file, the key and the
    value.
    """
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is neither YAML nor JSON: {error}") from error
    try:
        return _check(build_settings(TrtllmDeployment, raw, ""))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check(deployment: TrtllmDeployment) -> TrtllmDeployment:
    if not deployment.output:
        raise ConfigError("output must name a folder, got ''")
    names = [engine.name for engine in deployment.engines]
    for where, engine in [
        ("target", deployment.target),
        *((f"drafts[{i}]", d) for i, d in enumerate(deployment.drafts)),
    ]:
        _check_engine(where, engine, names)
    return deployment


def _check_engine(where: str, engine: EngineBuild, names: list[str]) -> None:
    if engine.name in ("", "none") or names.count(engine.name) > 1:
        raise ConfigError(
            f"{where}.name must be unique and neither '' nor 'none', got {engine.name!r}"
        )
    if not engine.checkpoint:
        raise ConfigError(f"{where}.checkpoint must name a folder, got ''")
    if len(engine.gpus) != engine.tp_size * engine.pp_size:
        raise ConfigError(
            f"{where}.gpus must name tp_size * pp_size = {engine.tp_size * engine.pp_size} GPUs, "
            f"got {list(engine.gpus)}"
        )
    if engine.quantisation != "none" and not engine.calibration:
        raise ConfigError(
            f"{where}.calibration must name a folder of texts for the quantisation "
            f"{engine.quantisation!r}, or it would be fetched, got ''"
        )
    if engine.calibration and engine.quantisation == "none":
        raise ConfigError(f"{where}.calibration needs a quantisation, got {engine.calibration!r}")
    if engine.fp8_kv_cache and engine.quantisation not in FP8_KV_FORMATS:
        raise ConfigError(
            f"{where}.fp8_kv_cache needs a quantisation of {list(FP8_KV_FORMATS)}, or KV is not "
            f"reused, got {engine.quantisation!r}"
        )


def serving(deployment: TrtllmDeployment, folder: Path) -> dict[str, Any]:
    """Return the ``serving.json`` of a deployment whose target's engine is in ``folder``. The LLM
    API serves it without drafts.
    """
    return {
        "target": {
            "engine": "tensorrt_llm",
            "name": deployment.target.name,
            "model": str(folder),
        },
        "policy": {"kind": "none"},
        "limits": {
            "max_active_requests": deployment.max_batch_size,
            "max_context_tokens": deployment.max_context_tokens,
        },
    }
