"""The command lines that make an engine of a checkpoint, with the programs of TensorRT-LLM
1.2.1.
"""

from __future__ import annotations

from pathlib import Path

from engines_build.trtllm.deployment import EngineBuild, TrtllmDeployment


def convert_command(deployment: TrtllmDeployment, engine: EngineBuild, output: Path) -> list[str]:
    """Return the command that makes a TensorRT-LLM checkpoint: the family's converter, or
    ``quantize.py`` where numbers change.
    """
    examples = Path(deployment.examples)
    common = ["--model_dir", engine.checkpoint, "--output_dir", str(output)]
    common += ["--dtype", engine.dtype]
    common += ["--tp_size", str(engine.tp_size), "--pp_size", str(engine.pp_size)]
    if engine.quantisation == "none":
        program = examples / "models" / "core" / engine.family / "convert_checkpoint.py"
        return ["python3", str(program), *common]
    command = ["python3", str(examples / "quantization" / "quantize.py"), *common]
    command += ["--qformat", engine.quantisation, "--calib_dataset", engine.calibration]
    return command + (["--kv_cache_dtype", "fp8"] if engine.fp8_kv_cache else [])


def engine_command(
    deployment: TrtllmDeployment, engine: EngineBuild, checkpoint: Path, output: Path
) -> list[str]:
    """Return the ``trtllm-build`` command of a target, which verifies up to ``max_draft_len``
    tokens, or of a plain draft. The builder adds ``max_draft_len`` to ``max_seq_len`` by itself.
    """
    draft_len = deployment.max_draft_len if engine is deployment.target else 0
    longest = str(deployment.max_context_tokens + draft_len)
    command = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(output)]
    command += ["--max_batch_size", str(deployment.max_batch_size), "--max_beam_width", "1"]
    command += ["--max_input_len", longest, "--max_seq_len", longest]
    command += ["--kv_cache_type", "paged", "--remove_input_padding", "enable"]
    command += ["--use_paged_context_fmha", "enable"]
    command += ["--tokens_per_block", str(deployment.tokens_per_block)]
    command += ["--logits_dtype", "float32", "--max_num_tokens", str(deployment.token_budget)]
    if deployment.sampling_logits:
        command += ["--gather_generation_logits"]
    if draft_len:
        command += ["--speculative_decoding_mode", "draft_tokens_external"]
        command += ["--max_draft_len", str(draft_len)]
    if engine.fp8_kv_cache:
        command += ["--use_fp8_context_fmha", "enable"]
    return command + (
        ["--workers", str(engine.tp_size * engine.pp_size)] if len(engine.gpus) > 1 else []
    )
