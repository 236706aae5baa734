"""The one table of the models' tensors: the codec reads it and ``config.pbtxt`` is rendered from it.

Names, types and dims are those of NVIDIA's ``inflight_batcher_llm`` models (``ensemble`` and ``tensorrt_llm_bls``), so that their clients
need no change; ``cache_salt`` and ``finish_reason`` are additions. ``auto_complete_config`` is off in those deployments, hence every
config is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NUMPY_TYPES: dict[str, type[Any]] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
"""Triton's data types that the table uses, and what they arrive as."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor without its batch dimension; -1 in ``dims`` is any length."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    required: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """One served name: its tensors, and whether its transaction policy and batch size follow ``serving.json``."""

    name: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    text: bool


TEXT_INPUTS: tuple[Field, ...] = (
    Field("text_input", "STRING", required=True),
    Field("max_tokens", "INT32", required=True),
    Field("stream", "BOOL"),
    Field("stop_words", "STRING", (-1,)),
    Field("bad_words", "STRING", (-1,)),
    Field("temperature", "FP32"),
    Field("top_k", "INT32"),
    Field("top_p", "FP32"),
    Field("seed", "UINT64"),
    Field("min_tokens", "INT32"),
    Field("repetition_penalty", "FP32"),
    Field("presence_penalty", "FP32"),
    Field("frequency_penalty", "FP32"),
    Field("embedding_bias_words", "STRING", (-1,)),
    Field("embedding_bias_weights", "FP32", (-1,)),
    Field("end_id", "INT32"),
    Field("pad_id", "INT32"),
    Field("exclude_input_in_output", "BOOL"),
    Field("num_draft_tokens", "INT32"),
    Field("cache_salt", "STRING"),
    Field("return_num_input_tokens", "BOOL"),
    Field("return_num_output_tokens", "BOOL"),
    Field("return_perf_metrics", "BOOL"),
    Field("return_log_probs", "BOOL"),
)

TEXT_OUTPUTS: tuple[Field, ...] = (
    Field("text_output", "STRING", (-1,)),
    Field("cum_log_probs", "FP32", (-1,)),
    Field("output_log_probs", "FP32", (-1, -1)),
    Field("num_input_tokens", "INT32"),
    Field("num_output_tokens", "INT32"),
    Field("acceptance_rate", "FP32"),
    Field("total_accepted_draft_tokens", "INT32"),
    Field("total_draft_tokens", "INT32"),
    Field("finish_reason", "STRING"),
)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (0, 1),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "guided_decoding_guide_type": ("",),
    "guided_decoding_guide": ("",),
    "decoder_text_input": ("",),
    "image_url_input": ("",),
    "lora_task_id": (),
}
"""Inputs of NVIDIA's models that are not served, with the values that ask for nothing.

As tensors Triton refuses them. As JSON keys of ``/generate`` they arrive as request parameters: there a value that asks for something is
refused too, while parameters of any other name are ignored, as upstream does.
"""

MODELS: tuple[Model, ...] = (
    Model("ensemble", TEXT_INPUTS, TEXT_OUTPUTS, text=True),
    Model("tensorrt_llm_bls", TEXT_INPUTS, TEXT_OUTPUTS, text=True),
    Model("spindle", (Field("command", "STRING", required=True),), (Field("reply", "STRING"),), text=False),
)


def render_config(model: Model, *, decoupled: bool = True, max_batch_size: int = 64) -> str:
    """Return a complete ``config.pbtxt``. ``spindle`` answers each command once, unbatched, whatever the settings."""
    parts = [
        "# Rendered by `python -m backend.triton_adapter.fields` from the table in backend/triton_adapter/fields.py.",
        f'name: "{model.name}"',
        'backend: "python"',
        f"max_batch_size: {max_batch_size if model.text else 0}",
        f"model_transaction_policy {{ decoupled: {str(decoupled and model.text).lower()} }}",
        *(["dynamic_batching { }"] if model.text else []),
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        *(_tensor("input", field) for field in model.inputs),
        *(_tensor("output", field) for field in model.outputs),
    ]
    return "\n".join(parts) + "\n"


def _tensor(kind: str, field: Field) -> str:
    optional = "" if kind == "output" or field.required else ", optional: true"
    dims = ", ".join(map(str, field.dims))
    return f'{kind} [ {{ name: "{field.name}", data_type: TYPE_{field.dtype}, dims: [ {dims} ]{optional} }} ]'


def main() -> None:
    """Write the committed ``config.pbtxt`` files (the defaults)."""
    from pathlib import Path

    repository = Path(__file__).resolve().parents[2] / "model_repository"
    for model in MODELS:
        (repository / model.name / "config.pbtxt").write_text(render_config(model), "utf-8")


if __name__ == "__main__":
    main()
