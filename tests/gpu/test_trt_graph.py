"""Compiled networks on a CUDA GPU against torch on the same: ids in fp32, and how long a step
takes.
"""

import json
import time

import pytest
import torch

from backend.engines.port import Turn
from backend.engines.torch.engine import TorchEngine
from backend.engines.trt_graph.runtime import TrtRuntime, open_engine
from backend.request import SamplingParams
from backend.sequence import ROOT, Proposal, Sequence
from tests.contract.deployment import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU: trt_graph was not run"),
]

SIZES = {"kv_blocks": 64, "max_context_tokens": 512, "max_draft_tokens": 4}
SERVING = {
    "target": {"engine": "torch", "dtype": "fp32"},
    "policy": {"kind": "adaptive", "k_max": 4},
}
SERVING["limits"] = {"max_context_tokens": 512, "kv_cache_tokens": 1024, "max_active_requests": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of the real vocabulary and its engines, compiled by TensorRT-RTX; (checkpoint,
    engine folder).
    """
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    from safetensors.torch import save_file

    from engines_build.trt_graph.build import BuildOptions, build_all

    root = tmp_path_factory.mktemp("trt_graph")
    model, config = root / "model", tiny_config(vocab=49152)
    model.mkdir()
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
    }
    raw |= {
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "head_dim": config.head_dim,
    }
    raw |= {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
    }
    (model / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            name: 0.3 * torch.randn(shape, generator=generator)
            for name, shape in config.shapes().items()
        },
        model / "model.safetensors",
    )
    serving = {**SERVING, "target": {**SERVING["target"], "model": str(model)}}
    (root / "serving.json").write_text(json.dumps(serving))
    build_all(root / "serving.json", root / "out", BuildOptions())
    return model, root / "out" / "target"


def decode(engine, prompt, steps, sampling, proposal=None):
    sequence = Sequence(
        1, list(prompt), len(prompt), sampling, blocks={engine.name: list(range(32))}
    )
    for _ in range(steps):
        engine.submit([Turn(sequence, len(sequence.tokens), proposal=proposal)])
        (done,) = engine.poll(0.0)
        assert done.error is None
        sequence.tokens += done.tokens
    engine.cancel([1])
    return sequence.tokens[len(prompt) :]


def test_the_engines_are_valid_for_this_gpu(folders):
    TrtRuntime(folders[1])  # asks get_engine_validity first, and says what the library says


TREE = Proposal("draft", [5, 6, 7, 8], [ROOT, 0, ROOT, 2], [1.0] * 4)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, seed=3)])
def test_the_ids_are_those_of_torch_in_fp32(folders, sampling):
    model, folder = folders
    compiled = open_engine("target", folder, "cuda", **SIZES)
    plain = TorchEngine.load("target", model, dtype="fp32", device="cuda", **SIZES)
    for proposal in (None, Proposal.chain("draft", [5, 6, 7]), TREE):
        assert decode(compiled, [1, 2, 3], 16, sampling, proposal) == decode(
            plain, [1, 2, 3], 16, sampling, proposal
        )


def test_a_step_is_timed_next_to_torch_s(folders, capsys):
    model, folder = folders
    engines = [
        open_engine("target", folder, "cuda", **SIZES),
        TorchEngine.load("target", model, dtype="fp32", device="cuda", **SIZES),
    ]
    for engine in engines:
        decode(engine, [1, 2, 3], 20, SamplingParams())
    seconds = []
    for engine in engines:
        begin = time.perf_counter()
        decode(engine, [1, 2, 3], 100, SamplingParams())
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / 100)
    with capsys.disabled():
        print(
            f"\n{torch.cuda.get_device_name()}: {1e3 * seconds[0]:.2f} ms a step compiled, "
            f"{1e3 * seconds[1]:.2f} ms torch"
        )
    assert min(seconds) > 0.0
