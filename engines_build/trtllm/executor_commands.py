"""The command lines that make an engine of a checkpoint, with the programs of TensorRT-LLM
1.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.engines.trtllm.folder import build_command
from engines_build.trtllm.deployment import Deployment, EngineBuild


@dataclass(frozen=True, slots=True)
class Limits:
    """Facts about an engine that ``build_command`` needs; names as in
    ``backend.engines.trtllm.folder.EngineFolder``.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int
    gathers_generation_logits: bool


def convert_command(deployment: Deployment, engine: EngineBuild, output: Path) -> list[str]:
    """Return the command that makes a TensorRT-LLM checkpoint: the family's converter, or
    ``quantize.py`` where numbers change.
    """
    examples = Path(deployment.examples)
    parallel = ["--tp_size", str(engine.tp_size), "--pp_size", str(engine.pp_size)]
    common = [
        "--model_dir",
        engine.checkpoint,
        "--output_dir",
        str(output),
        "--dtype",
        engine.dtype,
        *parallel,
    ]
    if engine.quantisation == "none":
        return [
            "python3",
            str(examples / "models" / "core" / engine.family / "convert_checkpoint.py"),
            *common,
        ]
    calibration = ["--calib_dataset", engine.calibration]
    kv = ["--kv_cache_dtype", "fp8"] if engine.fp8_kv_cache else []
    return [
        "python3",
        str(examples / "quantization" / "quantize.py"),
        *common,
        "--qformat",
        engine.quantisation,
        *calibration,
        *kv,
    ]


def engine_command(
    deployment: Deployment, engine: EngineBuild, checkpoint: Path, output: Path
) -> list[str]:
    """Return the ``trtllm-build`` command of a target (which verifies up to ``max_draft_len``
    tokens) or of a plain draft.
    """
    is_target = engine is deployment.target
    limits = Limits(
        deployment.max_batch_size,
        deployment.max_context_tokens,
        deployment.token_budget,
        deployment.tokens_per_block,
        deployment.sampling_logits,
    )
    command = build_command(
        str(checkpoint), str(output), limits, deployment.max_draft_len if is_target else 0
    )
    if engine.fp8_kv_cache:
        command += ["--use_fp8_context_fmha", "enable"]
    return command + (
        ["--workers", str(engine.tp_size * engine.pp_size)] if len(engine.gpus) > 1 else []
    )
