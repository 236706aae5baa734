"""vLLM as the target of Spindle, through a real tritonserver: ``make test-vllm``.

Texts are compared with those of vLLM alone, in fp32: greedy decoding there is the same whatever is
verified with it, but for ties that are nearer than rounding.
"""

import http.client
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.app import EMBEDDED_MODEL
from backend.storage import cache
from backend.tokenizer import load_tokenizer
from tests.server.conftest import services
from tests.server.harness import free_ports
from tests.server.tensors import connected, ids_of, token_request
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
    pytest.mark.skipif(
        not cache.model_folder(EMBEDDED_MODEL).exists(), reason="prepare it: spindle prepare"
    ),
]
PROMPTS = [
    "Madrid is the capital of Spain. Paris is the capital of",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "one two three four five six seven eight nine ten one two three four",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
]
SHORT = 24
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
CONFIG = {
    "target": {
        "engine": "vllm",
        "model": EMBEDDED_MODEL,
        "dtype": "fp32",
        "engine_args": {
            "enforce_eager": True,
            "speculative_config": NGRAMS,
            "additional_config": {"spindle": {"calibration_s": 5.0}},
        },
    },
    "limits": {"max_active_requests": 8, "max_context_tokens": 1024, "kv_cache_tokens": 8192},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    file = tmp_path_factory.mktemp("vllm") / "serving.json"
    file.write_text(json.dumps(CONFIG))
    with services(tmp_path_factory) as start:
        (port,) = free_ports(1)
        service = start(file, OPENAI_PORT=str(port), **ENVIRONMENT)
        service.wait_ready(limit_s=START_LIMIT_S)
        service.wait_for_front_end()
        yield service


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(cache.model_folder(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def plain(tokenizer):
    """The token ids that vLLM alone writes after each of the prompts."""
    prompts = [tokenizer.encode(text, True) for text in PROMPTS]
    return written_by_vllm(cache.model_folder(EMBEDDED_MODEL), prompts, SHORT)


def refusal(service, **inputs):
    """Return the error of a request that is refused."""
    body = {"text_input": "a b", "max_tokens": 8, **inputs}
    status, reply = service.post("/v2/models/tensorrt_llm_bls/generate", body, ANSWER_LIMIT_S)
    assert status >= 400, reply
    return reply


def chat(service, **body):
    connection = http.client.HTTPConnection("127.0.0.1", service.openai, timeout=ANSWER_LIMIT_S)
    messages = [{"role": "user", "content": "Say hello."}]
    asked = {"model": EMBEDDED_MODEL, "messages": messages, **body}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


# -- texts


@pytest.mark.parametrize("number", range(len(PROMPTS)))
@pytest.mark.parametrize("drafted", [None, 0])
def test_texts_are_those_of_vllm_alone(service, plain, tokenizer, number, drafted):
    ceiling = {} if drafted is None else {"num_draft_tokens": drafted}
    reply = generate(service, PROMPTS[number], return_perf_metrics=True, **ceiling)
    decoded = b"".join(tokenizer.token_bytes[token] for token in plain[number]).decode()
    assert reply["text_output"] == decoded
    assert drafted is None or reply["total_draft_tokens"] == 0


def test_token_ids_in_token_ids_out(service, plain, tokenizer):
    ids = tokenizer.encode(PROMPTS[0], True)
    with connected(service) as client:
        asked = token_request("", SHORT, exclude_input_in_output=[[True]])
        asked |= {"input_ids": [ids], "input_lengths": [[len(ids)]], "end_id": [[-1]]}
        assert ids_of(client.ask("tensorrt_llm", **asked)) == plain[0]


def test_the_ensemble_streams_the_same_text(service):
    whole = generate(service, PROMPTS[1])["text_output"]
    body = {"text_input": PROMPTS[1], "max_tokens": SHORT, "end_id": -1, "stream": True}
    _, text = service.post(
        "/v2/models/ensemble/generate_stream",
        {**body, "exclude_input_in_output": True},
        ANSWER_LIMIT_S,
    )
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(part["text_output"] for part in parts) == whole
    assert len(parts) > 2


def test_requests_at_once_do_not_mix(service, plain, tokenizer):
    with ThreadPoolExecutor(16) as pool:
        texts = [*pool.map(lambda i: generate(service, PROMPTS[i % 4])["text_output"], range(16))]
    assert len(set(texts)) == 4
    assert texts[:4] * 4 == texts


def test_a_proposal_is_accepted_and_the_reply_says_so(service):
    reply = generate(service, PROMPTS[2], 64, return_perf_metrics=True)
    assert reply["draft_names"] == "ngram"
    assert reply["total_draft_tokens"] >= reply["total_accepted_draft_tokens"] > 0
    assert sum(reply["per_step_drafted"]) == reply["total_draft_tokens"]


# -- options


def test_a_stop_word_over_token_borders(service):
    text = generate(service, PROMPTS[0])["text_output"]
    word = text[5:9]
    reply = generate(service, PROMPTS[0], stop_words=[word])
    assert reply["text_output"] == text[: text.index(word)]
    assert reply["finish_reason"] == "stop_words"


def test_an_end_id_ends_the_text(service, plain):
    reply = generate(service, PROMPTS[0], end_id=plain[0][4])
    assert reply["finish_reason"] == "end_id"


def test_bad_words_are_not_written(service):
    text = generate(service, PROMPTS[0])["text_output"]
    word = " " + text.split()[1]
    assert word not in generate(service, PROMPTS[0], bad_words=[word])["text_output"]


def test_log_probabilities_are_of_the_distribution_that_is_drawn_from(service):
    """With temperature they are flatter, and penalties count."""
    plain, warm = (
        generate(service, PROMPTS[0], 1, return_log_probs=True, **options)["output_log_probs"]
        for options in ({}, {"repetition_penalty": 1.5})
    )
    assert plain != warm
    sampled = [
        generate(
            service,
            PROMPTS[0],
            1,
            return_log_probs=True,
            return_top_log_probs=20,
            temperature=temperature,
            seed=1,
        )["top_log_probs"]
        for temperature in (1.0, 2.0)
    ]
    cold, hot = (numbers if isinstance(numbers, list) else [numbers] for numbers in sampled)
    gaps = (cold[0] - cold[5]) / (hot[0] - hot[5])
    assert gaps == pytest.approx(2.0, rel=0.02)


def test_a_seed_gives_a_text_again(service):
    asked = {"temperature": 1.0, "seed": 7, "return_perf_metrics": True}
    texts = {generate(service, PROMPTS[0], **asked)["text_output"] for _ in range(3)}
    assert len(texts) == 1


def test_a_grammar_is_followed(service):
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]{3}-[0-9]{2}"}
    body = {"text_input": "x", "max_tokens": 30, "exclude_input_in_output": True, **guide}
    _, reply = service.post("/v2/models/ensemble/generate", body, ANSWER_LIMIT_S)
    assert re.fullmatch("[ab]{3}-[0-9]{2}", json.loads(reply)["text_output"]), reply


def test_several_texts_of_one_request(service):
    body = {"text_input": PROMPTS[0], "max_tokens": 8, "end_id": -1, "stream": True}
    body |= {"num_return_sequences": 3, "temperature": 1.0, "seed": 3}
    _, text = service.post("/v2/models/ensemble/generate_stream", body, ANSWER_LIMIT_S)
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert {part["sequence_index"] for part in parts} == {0, 1, 2}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"temperature": 2.5}, "temperature is not supported: vLLM's is at most 2, got 2.5"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported: vLLM counts the output"),
        ({"min_p": 0.1, "temperature": 1.0}, "min_p is not supported: vLLM does not support"),
        ({"return_context_logits": True}, "return_context_logits is not supported: vLLM returns"),
        (
            {"return_log_probs": True, "temperature": 1.0, "top_p": 0.5},
            "return_log_probs is not supported: with top_k",
        ),
        ({"max_tokens": 5000}, "exceed the context of 1024 tokens"),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "["},
            "guided_decoding_guide",
        ),
    ],
)
def test_other_meanings_are_refused_by_name(service, inputs, words):
    assert words in refusal(service, **inputs)


def test_penalties_that_count_the_output_alone_are_served(service):
    text = generate(
        service, PROMPTS[2], presence_penalty=2.0, frequency_penalty=2.0, prompt_ignore_length=1000
    )
    assert text["text_output"] != generate(service, PROMPTS[2])["text_output"]


# -- the front end, operators


def test_a_chat_is_answered_streamed_and_with_log_probabilities(service):
    status, answer = chat(service, max_tokens=8, logprobs=True, temperature=0)
    assert status == 200, answer
    assert len(json.loads(answer)["choices"][0]["logprobs"]["content"]) == 8
    status, events = chat(service, max_tokens=8, stream=True, temperature=0)
    assert status == 200
    assert events.rstrip().endswith("data: [DONE]")


def test_switches_reach_the_planner_at_once(service):
    assert service.command("set speculation=off")[0] == 200
    try:
        time.sleep(1)
        reply = generate(service, PROMPTS[2], 32, return_perf_metrics=True)
        assert reply["total_draft_tokens"] == 0
    finally:
        service.command("set speculation=on")


def test_plans_are_explained_and_what_is_learned_is_shown(service):
    generate(service, PROMPTS[2], 32)
    status, text = service.command("explain")
    assert status == 200, text
    explained = json.loads(json.loads(text)["reply"])
    assert explained["age_s"] is not None
    status, text = service.command("learned")
    assert status == 200
    assert "ngram" in text


def test_metrics_of_planner_and_vllm_are_on_one_page(service):
    before = service.metric("spindle_emitted_tokens_total")
    generate(service, PROMPTS[2], 40)
    service.wait_until(lambda: service.metric("spindle_emitted_tokens_total") >= before + 39, 10)
    for name in ("spindle_step_predicted_seconds_count", "spindle_draft_tokens_total"):
        assert service.metric(name) > 0
    assert service.metric("spindle_planning_seconds_count") > 0
    service.wait_until(lambda: service.metric("vllm:generation_tokens_total") >= 40, 10)
    assert service.metric("vllm:spec_decode_num_drafts_total") > 0


def test_a_request_that_is_cancelled_frees_its_place(service):
    with connected(service) as client:
        client.send(
            "tensorrt_llm",
            "long",
            **token_request("go on ", 900, streaming=[[True]], end_id=[[-1]]),
        )
        service.wait_until(lambda: service.health()["active"] == 1, 30)
        with connected(service) as other:
            other.send("tensorrt_llm", "long", **token_request("x", 1, stop=[[True]]))
            other.collect("long")
    service.wait_until(lambda: service.health()["active"] == 0, 30)


# -- faults, which end the engine: last


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker", "backend.engine_process"])
def test_a_killed_process_ends_each_request_by_one_error_and_comes_back(service, title):
    finish = asking(service, 10, PROMPTS[0], 900)
    service.wait_until(lambda: service.health()["active"] == 8, 60)
    (before,) = vllm_processes(service, "VLLM::EngineCore")
    starts = service.log.read_text(errors="replace").count("engine process")
    os.kill(vllm_processes(service, title)[0], signal.SIGKILL)
    assert all(status >= 400 for status in finish())
    service.wait_until(lambda: not Path(f"/proc/{before}").exists(), 60)
    service.wait_until(
        lambda: service.log.read_text(errors="replace").count("engine process") > starts, 60
    )
    service.wait_until(lambda: answers(service), START_LIMIT_S)
    assert len(vllm_processes(service, "VLLM::EngineCore")) == 1


def test_nothing_is_left_after_the_end(service):
    left = vllm_processes(service, "VLLM::")
    assert left
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(120)
    assert service.left() == {}
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
