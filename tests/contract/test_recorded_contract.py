"""The models' ``config.pbtxt`` against those of NVIDIA's ``inflight_batcher_llm`` (recorded with
their provenance in a data file).
"""

import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from backend.triton_adapter.fields import MODELS, Reason

RECORDED = json.loads((Path(__file__).parent / "inflight_batcher_llm.json").read_text())["models"]
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
SERVED = {model.name: model for model in MODELS if model.name in RECORDED}
PERMITTED = {
    Reason.LORA: r"lora_",
    Reason.MULTIMODAL: r"(?i)image_|video_|is_video|vision_|pixel_|aspect_|attention_mask"
    r"|cross_attention_mask|prompt_|mrope_",
    Reason.ENCODER: r"(?i)decoder_|encoder_|cross_|skip_cross_",
    Reason.BEAMS: r"beam_width",
    Reason.DISAGGREGATED: r"context_phase_params",
}
"""Names that are still missing: this list may only shrink."""


def test_all_recorded_models_are_served():
    assert set(SERVED) == set(RECORDED)


def parsed(name):
    """Return a committed config.pbtxt as Triton's own message."""
    return text_format.Parse(
        (REPOSITORY / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )


def shape(tensor):
    return model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_"), list(tensor.dims)


@pytest.mark.parametrize("name", SERVED)
def test_every_recorded_tensor_is_there_with_its_type_dims_and_optionality(name):
    config = parsed(name)
    inputs = {
        tensor.name: {"type": shape(tensor), "optional": tensor.optional} for tensor in config.input
    }
    outputs = {tensor.name: shape(tensor) for tensor in config.output}
    recorded = RECORDED[name]
    expected = {
        n: {"type": (t["dtype"], t["dims"]), "optional": t["optional"]}
        for n, t in recorded["inputs"].items()
    }
    assert {n: inputs.get(n) for n in expected} == expected
    expected = {n: (t["dtype"], t["dims"]) for n, t in recorded["outputs"].items()}
    assert {n: outputs.get(n) for n in expected} == expected


@pytest.mark.parametrize("name", SERVED)
def test_what_is_added_is_said_to_be_and_optional(name):
    model = SERVED[name]
    for side, fields in (("inputs", model.inputs), ("outputs", model.outputs)):
        everywhere = {tensor for recorded in RECORDED.values() for tensor in recorded[side]}
        for field in fields:
            assert field.extra == (field.name not in everywhere), field.name
            assert not (field.extra and field.required), field.name


@pytest.mark.parametrize("name", SERVED)
def test_the_list_of_refusals_is_closed(name):
    import re

    fields = (*SERVED[name].inputs, *SERVED[name].outputs)
    for field in fields:
        assert field.does or field.refused, field.name
        if field.refused in PERMITTED:
            assert re.match(PERMITTED[field.refused], field.name), field.name
        else:
            assert field.refused is None, field.name
