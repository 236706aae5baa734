"""Networks compiled for real: by TensorRT-RTX, which does so without a GPU; what an engine computes
is only known where it runs.
"""

import pytest
import torch

from backend.engines.trt_graph.inputs import DRAWN, GREEDY, LOGITS
from engines_build.trt_graph.compile import Profile, compile_step
from engines_build.trt_graph.graph import BF16, F32
from engines_build.trt_graph.layers import TrtGraph
from engines_build.trt_graph.library import Messages, TrtError, find_library
from engines_build.trt_graph.network import StepNetwork
from tests.contract.deployment import tiny_config

pytestmark = pytest.mark.slow

library = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

PROFILES = [
    Profile(batch=8, queries=6, past=128, rows=6),
    Profile(batch=2, queries=64, past=128, rows=1),
]


def tiny_weights(dtype, config=None):
    return {
        name: torch.randn(shape).to(dtype)
        for name, shape in (config or tiny_config()).shapes().items()
    }


@pytest.mark.parametrize("network", [LOGITS, GREEDY, DRAWN])
def test_every_step_compiles_for_every_profile(network):
    config = tiny_config(vocab=49152)  # distributions of few columns do not come to an end
    weights = tiny_weights(torch.bfloat16, config)
    engine = compile_step(library, StepNetwork(config, BF16, 160, network), weights, PROFILES)
    assert engine.blob
    assert engine.layers > 100


def test_weights_are_inputs_of_the_engine_or_inside_it_and_attention_is_native_or_primitive():
    step = StepNetwork(tiny_config(vocab=1 << 17), F32, 160, GREEDY)
    weights = tiny_weights(torch.float32, step.config)
    matrix = weights["lm_head.weight"].numel() * 4
    ways = {"shared": {"native": False}, "inside": {"shared": False, "native": True}}
    sizes = {
        name: len(compile_step(library, step, weights, PROFILES[:1], **way).blob)
        for name, way in ways.items()
    }
    assert sizes["inside"] > matrix + sizes["shared"]


def test_int8_weights_with_a_scale_for_each_row_compile():
    step, weights = (
        StepNetwork(tiny_config(), BF16, 160, GREEDY),
        dict(tiny_weights(torch.bfloat16)),
    )
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scales = weight.float().abs().amax(1) / 127
            weights[name] = (
                (weight.float() / scales[:, None]).round().to(torch.int8),
                scales.bfloat16(),
            )
    assert compile_step(library, step, weights, PROFILES[:1], shared=False).blob


def test_what_tensorrt_refuses_is_an_error_in_its_words():
    messages = Messages(library)
    graph = TrtGraph(library, library.Builder(messages.logger).create_network(1), messages, {})
    graph.input("ids", F32, 2, 3)
    with pytest.raises(TrtError, match=r"^input ids: .*inName"):
        graph.input("ids", F32, 2, 3)


def test_an_unknown_library_is_an_error():
    with pytest.raises(TrtError, match="library must be one of tensorrt_rtx, tensorrt, got 'onnx'"):
        find_library("onnx")
