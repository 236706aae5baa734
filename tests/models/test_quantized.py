"""Folders with quantised weights are read as the matrices that they mean."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.loading import load_decoder
from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.openvino.four_bits import take_four_bits
from backend.engines.quantized import QuantizedError, widen
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.engines.torch.engine import TorchEngine
from backend.kinds import QUANTIZED, quantization_of
from tests.models.families import BASE, make_folder
from tests.models.quantized import METHODS, quantize, write_mxfp4

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folders of a family of our own forward, and of one of transformers'."""
    folder = tmp_path_factory.mktemp("plain")
    return {name: make_folder(name, folder / name) for name in ("qwen 2", "qwen 3")}


@pytest.mark.parametrize(
    "method", [name for name in METHODS if "in 64" not in name and "128" not in name]
)
def test_every_format_is_read_by_both_forwards(method, plain, tmp_path):
    for family, folder in plain.items():
        place = quantize(folder, tmp_path / family, method)
        wide = load_file(tmp_path / f"{family}-wide" / "model.safetensors")
        found = load_decoder(place, "bf16").state_dict()
        for name, tensor in wide.items():
            assert torch.equal(found[name], tensor), name
        assert found.keys() - wide.keys() <= {"lm_head.weight"}


def test_experts_in_mxfp4_are_read(tmp_path):
    folder = make_folder("gpt-oss", tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    experts = [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    wide = {}
    for name in experts:
        parts, wide[name] = write_mxfp4(tensors.pop(name))
        tensors |= {name + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    found = load_decoder(folder, "bf16").state_dict()
    assert len(experts) == 2 * BASE["num_hidden_layers"]
    for name in experts:
        assert torch.equal(found[name], wide[name].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("engine", [TorchEngine.load, OpenvinoEngine.load])
@pytest.mark.parametrize("family", ["qwen 2", "qwen 3"])
def test_logits_are_those_of_the_widened_folder(engine, family, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    place = quantize(plain[family], tmp_path / "awq", "awq")
    logits = []
    for folder in (place, tmp_path / "awq-wide"):
        made = engine("target", folder, dtype="fp32", kv_blocks=4, max_context_tokens=48)
        chunk = PassChunk(list(range(3, 40)), 0, KVTable([2, 0, 1]), 37)
        with torch.inference_mode():
            logits.append(made.model.forward([chunk]).copy())
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes is not one of fp8, .* the package bitsan"),
        ({"quant_method": "new"}, "new is not one of fp8, fbgemm_fp8"),
        ({"bits": 4}, "quantization_config names no quant_method"),
        ({"quant_method": "awq", "version": "gemv"}, "its version gemv is not gemm"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "its format nvfp4-pack-quantized is not .* the package compressed-tensors reads it",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"groups": {}}},
            "its transform_config rotates activations",
        ),
    ],
)
def test_other_formats_are_refused_by_name(quantization, reason, plain, tmp_path):
    place = quantize(plain["qwen 3"], tmp_path / "other", "awq")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=f"its weights are quantised: {reason}"):
        load_decoder(place)
    assert quantization_of({}) == ("", "")
    for method in QUANTIZED:
        assert not quantization_of({"quantization_config": {"quant_method": method}})[1]


@pytest.mark.parametrize("method", METHODS)
def test_scales_of_one_dimension_are_refused_by_name_in_every_format(method):
    quantization, write = METHODS[method]
    parts, _ = write(torch.randn(64, 128))
    ends = {"scales", "qzeros", "weight_scale", "weight_scale_inv", "weight_zero_point"}
    for end in parts.keys() & ends:
        tensors = {f"layer.{name}": part.contiguous() for name, part in parts.items()}
        tensors[f"layer.{end}"] = torch.ones(64, dtype=parts[end].dtype)
        taken, _ = take_four_bits(tensors, quantization)
        assert not taken
        with pytest.raises(QuantizedError, match=rf"tensor layer\.{end} .* shape \[64\]"):
            widen(tensors, quantization)


def test_a_damaged_tensor_is_named(plain, tmp_path):
    place = quantize(plain["qwen 2"], tmp_path / "damaged", "fp8 of blocks")
    tensors = load_file(place / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    for change, reason in (
        (lambda t: t.pop(f"{name}_scale_inv"), f"tensor {name} is torch.float8_e4m3fn, in no form"),
        (lambda t: t.pop(name), f"{name}_scale_inv cannot be read: '{name}' is missing"),
        (
            lambda t: t.update({f"{name}_scale_inv": torch.ones(3, 3)}),
            r"scales \[3, 3\] do not fit a matrix \[64, 64\]",
        ),
        (
            lambda t: t.update({f"{name}_scale_inv": torch.ones(64)}),
            rf"tensor {name}_scale_inv cannot be read: its shape \[64\] has no rows and columns",
        ),
    ):
        changed = dict(tensors)
        change(changed)
        save_file(changed, place / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=reason):
            load_decoder(place)
