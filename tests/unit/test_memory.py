import json
from math import prod

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines import memory
from backend.engines.cuda.engine import CudaEngine
from backend.engines.cuda.forward import ROW_SIZES
from backend.engines.cuda.kind import RUNTIME_BYTES
from backend.engines.head import folder as heads
from backend.engines.head.folder import HeadConfig, config_json
from backend.engines.memory import PROCESS_BYTES
from backend.engines.models.attention import ATTENTION
from backend.engines.models.llama import read_llama
from backend.engines.openvino.kind import WEIGHT_BYTES
from backend.engines.port import Footprint
from backend.engines.registry import Service, make_engine
from backend.engines.torch.engine import TorchEngine
from backend.kinds import KINDS
from backend.model_folders import check_memory, model_path, with_kv
from backend.sequence import BLOCK_TOKENS
from tests.fakes.machine import FakeMachine

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GIB = 2**30


def folder(path, **changed):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**MODEL, **changed}))
    return path


def serving(target, draft, **limits):
    engines = [
        {"engine": "torch", "model": str(path), "dtype": dtype}
        for path, dtype in ((target, "bf16"), (draft, "fp32"))
    ]
    return parse_config(
        {
            "target": engines[0],
            "drafts": [{"name": "small", **engines[1]}],
            "limits": limits,
            "policy": {"k_max": 5},
        }
    )


@pytest.mark.parametrize(
    ("name", "tied", "dtype"), [("target", False, torch.bfloat16), ("small", True, torch.float32)]
)
def test_weights_and_kv_are_those_of_the_engine_that_is_loaded(tmp_path, name, tied, dtype):
    path = folder(tmp_path / "model", tie_word_embeddings=tied)
    footprint = memory.plan(
        serving(path, path, kv_cache_tokens=4096), {"target": path, "small": path}
    )[name]
    weights = {
        key: torch.rand(shape).bfloat16() for key, shape in read_llama(path).shapes().items()
    }
    save_file(weights, path / "model.safetensors")
    engine = TorchEngine.load(
        name,
        path,
        dtype="bf16" if name == "target" else "fp32",
        kv_blocks=4096 // BLOCK_TOKENS,
        max_context_tokens=64,
    )
    pools = [pool for layer in engine.model.pools.values() for pool in layer]
    assert footprint.kv == sum(pool.nbytes for pool in pools)
    assert footprint.weights == sum(weight.numel() for weight in weights.values()) * dtype.itemsize


@pytest.mark.parametrize("dtype", WEIGHT_BYTES)
def test_a_tied_embedding_is_looked_up_and_packed_as_the_head(tmp_path, dtype):
    """As read, and as packed."""
    path = folder(tmp_path / "model", tie_word_embeddings=True)
    raw = {"target": {"engine": "openvino", "model": str(path), "dtype": dtype}}
    found = memory.plan(parse_config(raw), {"target": path})["target"].weights
    shapes = read_llama(path).shapes()
    looked_up, multiplied, _ = WEIGHT_BYTES[dtype]
    embedding = prod(shapes["model.embed_tokens.weight"])
    assert found == looked_up * embedding + multiplied * sum(map(prod, shapes.values()))


def test_a_pass_grows_with_the_requests_and_the_length_that_it_may_verify(tmp_path):
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft")
    few = memory.plan(
        serving(target, draft, max_active_requests=4), {"target": target, "small": draft}
    )
    many = memory.plan(
        serving(target, draft, max_active_requests=8), {"target": target, "small": draft}
    )
    assert many["target"].passes > few["target"].passes > 4 * 6 * 300 * 24
    assert many["small"].passes > few["small"].passes
    assert many["target"].passes - few["target"].passes > many["small"].passes - few["small"].passes


def test_a_plan_that_fits_is_one_line_and_one_that_does_not_is_refused_with_every_number():
    footprints = {
        "target": Footprint("cpu", 3 * GIB, 2 * GIB, GIB),
        "small": Footprint("cuda:0", GIB // 2, GIB // 4, 0),
    }
    line = memory.check(footprints, {"cpu": 7 * GIB, "cuda:0": GIB})
    assert line == (
        "memory: cpu has 7.00 GiB and 6.39 are needed (target 3.00 weights + 2.00 KV + 1.00 "
        "passes, process 0.39); "
        "cuda:0 has 1.00 GiB and 0.75 are needed (small 0.50 weights + 0.25 KV + 0.00 passes, "
        "process 0.00)"
    )
    assert PROCESS_BYTES == 400 * 2**20
    for available, words in (
        ({"cpu": 6 * GIB, "cuda:0": GIB}, "cpu has 6.00"),
        ({"cpu": 7 * GIB, "cuda:0": GIB // 2}, "cuda:0 has 0.50"),
    ):
        with pytest.raises(
            ConfigError, match=f"not enough memory: {words}.*lower limits.kv_cache_tokens"
        ):
            memory.check(footprints, available)


def test_a_deployment_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path):
    target, draft = (
        folder(tmp_path / "target"),
        folder(tmp_path / "draft"),
    )  # no weights: nothing could be loaded
    check_memory(serving(target, draft, kv_cache_tokens=1024))
    with pytest.raises(ConfigError, match="not enough memory: cpu has"):
        check_memory(serving(target, draft, kv_cache_tokens=10**12))


def cuda(path, *, lookahead=0, device="cuda", **limits):
    target = {"engine": "cuda", "model": str(path), "dtype": "bf16", "device": device}
    limits = {"prefill_chunk_tokens": 256} | limits
    raw = {"target": target | {"lookahead": lookahead}, "limits": limits, "policy": {"k_max": 5}}
    return memory.plan(parse_config(raw), {"target": path})["target"]


def test_kv_of_the_cuda_engine_has_a_page_of_no_sequence(tmp_path):
    path = folder(tmp_path / "model")
    config = AutoConfig.for_model(
        "llama", **{k: v for k, v in MODEL.items() if k not in ("architectures", "model_type")}
    )
    lm = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, dtype=torch.bfloat16
    )
    sizes = {"vocab_size": 300, "kv_blocks": 4096 // BLOCK_TOKENS, "max_context_tokens": 64}
    engine = CudaEngine("target", lm, **sizes)
    kv = sum(pages.nbytes for pages in engine.model.paged.stacked_kv)
    assert cuda(path, kv_cache_tokens=4096, device="cpu").kv == kv


def test_a_gpu_s_kv_is_what_fits_into_nine_tenths_of_what_is_free(tmp_path, monkeypatch):
    target = {"model": str(folder(tmp_path / "model")), "dtype": "bf16", "device": "cuda"}
    config = parse_config({"target": {"engine": "cuda", **target}})
    assert config.limits.kv_cache_tokens == 0
    least = memory.plan(config, {"target": tmp_path / "model"})["target"].total
    sized = {}
    for more in (10**6, 2 * 10**6, 10**12):
        machine = FakeMachine(gpu_bytes=int((least + more) / memory.KV_SHARE) + 1)
        sized[more] = with_kv(config, machine)
        check_memory(sized[more], machine=machine)
    kv = [memory.plan(one, {"target": tmp_path / "model"})["target"].kv for one in sized.values()]
    block_bytes = kv[0] / sized[10**6].limits.kv_cache_tokens * BLOCK_TOKENS
    assert 10**6 - 2 * block_bytes < kv[0] <= 10**6 + block_bytes
    assert kv[1] == pytest.approx(2 * kv[0], abs=2 * block_bytes)
    most = config.limits.max_active_requests * (config.limits.max_context_tokens + 9)
    assert sized[10**12].limits.kv_cache_tokens == most // BLOCK_TOKENS * BLOCK_TOKENS
    assert with_kv(sized[10**6], machine) is sized[10**6]


def test_a_gpu_s_plan_has_graphs_and_slots_that_grow_with_what_may_be_verified(tmp_path):
    path = folder(tmp_path / "model")
    few, many = (cuda(path, max_active_requests=n) for n in (4, 64))
    on_host = cuda(path, max_active_requests=64, device="cpu")
    assert few.passes > RUNTIME_BYTES
    captured = 64 * (1 + 5) * 2 * (4 * 16 + 3 * 32 + 3 * 40 + 2 * 300)
    partials = 5 * 64 * (1 + 5) * 4 * (4 + 1) * 4  # a context of 2,048 and drafts in 5 pieces
    assert many.passes - on_host.passes == RUNTIME_BYTES + captured + partials
    long = cuda(path, max_active_requests=64, max_context_tokens=131072)
    # At most 64 pieces, of twice 512 tokens each: a bit more than 128 times as many tokens.
    others = long.passes - many.passes - 60 * partials // 5
    assert 0 < others < 2**24
    slots = cuda(path, max_active_requests=64, lookahead=1).passes - many.passes
    assert 65 * 4 * (2048 // BLOCK_TOKENS) < slots < 65 * 4 * (2048 // BLOCK_TOKENS + 20)


def test_more_requests_than_a_step_with_lookahead_has_rows_are_refused(tmp_path):
    assert cuda(folder(tmp_path / "model"), max_active_requests=256, lookahead=1).kv
    assert KINDS["cuda"].most_ahead == ROW_SIZES[-1]
    with pytest.raises(ConfigError, match=r"max_active_requests must be at most 256 .* got 257"):
        cuda(tmp_path / "model", max_active_requests=257, lookahead=1)


@pytest.mark.parametrize(("device", "copies"), [("cpu", 1), ("cuda", 2)])
def test_a_head_that_its_target_runs_has_no_copy_of_the_target_s_embeddings(
    tmp_path, device, copies
):
    head = tmp_path / "head"
    head.mkdir()
    shape = HeadConfig(300, 16, 24, (1, 3), rows=50)
    (head / "config.json").write_text(config_json(shape))
    own = shape.parameters + 50 * 16
    apart, inside = (
        heads.footprint(head, "bf16", device, 4, in_target=in_target) for in_target in (False, True)
    )
    assert apart.weights == 2 * own + 2 * copies * 300 * 16
    assert inside.weights == 2 * own
    assert inside.passes > 5 * 2 * 16 * 2


def machine(root, groups, own):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (root / "proc/self/cgroup").write_text(own)
    for path, files in groups.items():
        (root / "sys/fs/cgroup" / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / "sys/fs/cgroup" / path / name).write_text(text)
    return root


def test_what_is_available_is_the_machine_s_or_what_the_tightest_group_leaves(tmp_path):
    def v2(limit, used, file=0):
        return {
            "memory.max": f"{limit}\n",
            "memory.current": f"{used}\n",
            "memory.stat": f"anon 5\ninactive_file {file}\n",
        }

    def v1(limit, used):
        return {
            "memory.limit_in_bytes": f"{limit}",
            "memory.usage_in_bytes": f"{used}",
            "memory.stat": "total_inactive_file 7\n",
        }

    cases = [
        ({}, "0::/\n", 8000 * 1024),
        ({"a/b": v2("max", 10), "a": v2(5000, 2000, 300)}, "0::/a/b\n", 3300),
        ({"a/b": v2(900, 400), "a": v2(5000, 2000)}, "0::/a/b\n", 500),
        ({".": v2(4000, 1000)}, "0::/\n", 3000),
        (
            {"memory/x": v1(6000, 2000), "memory": v1(2**63, 9000)},
            "3:cpu:/\n4:memory:/x\n0::/\n",
            4007,
        ),
        ({"memory": v1(6000, 5000)}, "4:cpu,memory:/elsewhere\n", 1007),
    ]
    for number, (groups, own, expected) in enumerate(cases):
        assert memory.host_bytes(machine(tmp_path / str(number), groups, own)) == expected


def test_logits_that_requests_keep_are_planned_with_their_copy_and_the_prompt_s_in_the_pass(
    tmp_path,
):
    target, draft = folder(tmp_path / "target"), folder(tmp_path / "draft")
    folders, row_bytes = {"target": target, "small": draft}, 4 * MODEL["vocab_size"]
    none, some = (
        serving(target, draft, max_logits_bytes=size, prefill_chunk_tokens=32)
        for size in (0, 20 * row_bytes)
    )
    assert memory.process_bytes(none) == PROCESS_BYTES
    assert memory.process_bytes(some) == PROCESS_BYTES + 2 * 20 * row_bytes
    before, after = memory.plan(none, folders), memory.plan(some, folders)
    assert after["target"].passes - before["target"].passes == 20 * MODEL["vocab_size"] * (2 + 4)
    assert after["small"] == before["small"]


@pytest.mark.parametrize(
    ("instructions", "dtype", "warned"),
    [("AVX2", "bf16", True), ("AVX2", "fp32", False), ("AVX512-BF16", "bf16", False)],
)
def test_an_engine_s_dtype_is_logged_and_a_slow_one_warned_of(
    monkeypatch, caplog, instructions, dtype, warned
):
    monkeypatch.setattr("backend.machine.machine.instructions", lambda: instructions)
    monkeypatch.setattr(TorchEngine, "load", lambda *args, **options: options["dtype"])
    config = parse_config({"target": {"engine": "torch", "model": "m", "dtype": dtype}})
    with caplog.at_level("INFO"):
        assert make_engine(config.target, Service(config, 1, model_path)) == dtype
    assert f"target: {dtype} on " in caplog.text
    assert ("dtype 'bf16' is slow" in caplog.text) is warned
