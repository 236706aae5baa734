"""vLLM as the target of Spindle with small models: starts that fail, a step that hangs, and its
drafters under each policy. ``make test-vllm``.
"""

import json
import os
import shutil
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backend import PROJECT_ROOT
from backend.launcher.output import reasons
from backend.tokenizer import load_tokenizer
from tests.fakes.eagle import published, random_head, write
from tests.server.vllm_servers import (
    ANSWER_LIMIT_S,
    ENVIRONMENT,
    PYTHON,
    START_LIMIT_S,
    answers,
    asking,
    generate,
    vllm_processes,
    written_by_vllm,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make vllm"),
]
DRAFTS = PROJECT_ROOT / "engines_build" / "drafts"
TINY = DRAFTS / "tiny-target"
PROMPTS = [
    "CREATE TABLE orders (id INT, name TEXT);\nSELECT ",
    "SELECT name FROM books WHERE id = 1; SELECT name FROM books WHERE",
    "def add(a, b):\n    return",
]
MOST = 48


def small(folder, model=TINY, dtype="fp32", policy=None, **engine_args):
    """Return a configuration of a small model."""
    target = {"engine": "vllm", "model": str(model), "dtype": dtype}
    target["engine_args"] = {"enforce_eager": True, **engine_args}
    limits = {"max_active_requests": 4, "max_context_tokens": 512}
    config = {"target": target, "limits": limits, "policy": policy or {}}
    file = folder / "serving.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (1 << 16, "ValueError: No available memory for the cache blocks"),
        (1 << 50, "is less than requested memory for kv"),
    ],
)
def test_memory_that_vllm_refuses_ends_the_start_with_its_reason(
    start_service, tmp_path_factory, memory, words
):
    folder = tmp_path_factory.mktemp("memory")
    config = small(folder, kv_cache_memory_bytes=memory)
    service = start_service(config, log=folder / "log", **ENVIRONMENT)
    (core,) = service.wait_until(lambda: vllm_processes(service, "VLLM::EngineCore"), 120)
    assert service.process.wait(START_LIMIT_S) == 1
    said = reasons(service.log)
    assert any(words in line for line in said)
    assert sum("cannot start: " in line for line in said) == 1
    assert service.left() == {}
    assert not Path(f"/proc/{core}").exists()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"no_such_argument": 1}, "unexpected keyword argument 'no_such_argument'"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
    ],
)
def test_an_argument_that_vllm_refuses_is_named(start_service, tmp_path_factory, argument, words):
    folder = tmp_path_factory.mktemp("argument")
    service = start_service(small(folder, **argument), log=folder / "log", **ENVIRONMENT)
    assert service.process.wait(START_LIMIT_S) == 1
    (said,) = [line for line in reasons(service.log) if "cannot start: " in line]
    assert "vLLM refuses target.engine_args: " in said
    assert words in said


class Collector(BaseHTTPRequestHandler):
    """Takes traces in either of OTLP's encodings, and keeps their bytes."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self):
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module")
def small_service(start_service, tmp_path_factory):
    """The small model, traced."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    config = small(tmp_path_factory.mktemp("small"))
    service = start_service(config, TRACE_URL=url, TRACE_RATE="1", **ENVIRONMENT)
    yield service.wait_ready(limit_s=START_LIMIT_S)
    collector.shutdown()
    collector.server_close()


def test_without_a_drafter_nothing_is_proposed_and_steps_are_counted(small_service):
    reply = generate(small_service, "SELECT name FROM", 16, return_perf_metrics=True)
    assert reply["total_draft_tokens"] == 0
    small_service.wait_until(
        lambda: small_service.metric("spindle_emitted_tokens_total") >= 16, ANSWER_LIMIT_S
    )
    assert small_service.metric("spindle_steps_total") > 0


def test_a_request_is_traced(small_service):
    generate(small_service, "SELECT name FROM", 4)
    small_service.wait_until(
        lambda: any(b"spindle.request" in body for body in Collector.bodies), ANSWER_LIMIT_S
    )


def test_a_step_that_hangs_ends_each_request_by_one_error_and_comes_back(small_service):
    """It is noticed after two minutes."""
    (core,) = vllm_processes(small_service, "VLLM::EngineCore")
    finish = asking(small_service, 6, "SELECT", 400)
    small_service.wait_until(lambda: small_service.health()["active"] == 4, 60)
    os.kill(core, signal.SIGSTOP)
    assert all(status >= 400 for status in finish())
    assert small_service.command("health")[0] != 200
    small_service.wait_until(lambda: not Path(f"/proc/{core}").exists(), 60)
    small_service.wait_until(lambda: answers(small_service), START_LIMIT_S)
    assert len(vllm_processes(small_service, "VLLM::EngineCore")) == 1
    small_service.wait_until(lambda: small_service.metric("spindle_engine_restarts_total") == 1, 10)


# -- drafters and policies


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    """A target of random weights and enough layers for an EAGLE-3 head, with such a head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = LlamaConfig(vocab_size=4096, max_position_embeddings=1024, **sizes)
    config.initializer_range = 0.15
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    shape = {"vocab_size": 4096, "draft_vocab_size": 256, "hidden_size": 128}
    shape |= {"intermediate_size": 192, "target_hidden_size": 128, "num_heads": 4}
    head, tensors = published("SafeAILab", *random_head(1, **shape, num_kv_heads=2, head_dim=32))
    head |= {"model_type": "llama", "torch_dtype": "float32"}
    return folder, write(tmp_path_factory.mktemp("head"), "SafeAILab", head, tensors)


@pytest.mark.parametrize(
    ("method", "dtype", "policy"),
    [
        ("draft_model", "fp32", {"kind": "adaptive"}),
        ("draft_model", "fp32", {"kind": "fixed", "length": 3}),
        ("eagle3", "fp32", {"kind": "fixed", "length": 3}),
        ("ngram", "bf16", {"kind": "none"}),
    ],
)
def test_texts_are_those_of_vllm_alone_with_each_drafter(
    start_service, tmp_path_factory, random_target, method, dtype, policy
):
    model, head = random_target if method == "eagle3" else (TINY, DRAFTS / "tiny-0.9m")
    speculation = {"method": method, "num_speculative_tokens": 4}
    speculation |= {"prompt_lookup_max": 4} if method == "ngram" else {"model": str(head)}
    config = small(
        tmp_path_factory.mktemp("drafter"),
        model,
        dtype,
        policy,
        speculative_config=speculation,
        additional_config={"spindle": {"calibration_s": 5.0}},
    )
    service = start_service(config, **ENVIRONMENT).wait_ready(limit_s=START_LIMIT_S)
    replies = [generate(service, text, MOST, return_perf_metrics=True) for text in PROMPTS]
    if dtype == "fp32":
        tokenizer = load_tokenizer(model)
        alone = written_by_vllm(model, [tokenizer.encode(text, True) for text in PROMPTS], MOST)
        for reply, ids in zip(replies, alone, strict=True):
            text = b"".join(tokenizer.token_bytes[token] for token in ids)
            assert reply["text_output"] == text.decode(errors="replace")
    drafted = sum(reply["total_draft_tokens"] for reply in replies)
    assert (drafted > 0) == (policy["kind"] == "fixed") or policy["kind"] == "adaptive"
    service.stop()
