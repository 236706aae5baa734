"""Reasoning by the real ``openai`` client: a front end of its own over the real tritonserver."""

import os
import subprocess
import sys
import time
import urllib.request

import openai
import pytest

from tests.server.harness import free_ports, write_config

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
)
LIMIT_S = 30


@pytest.fixture(scope="module")
def client(service, tmp_path_factory):
    """A client of a front end whose template opens reasoning."""
    config = write_config(tmp_path_factory.mktemp("configuration"), TEMPLATE)
    (port,) = free_ports(1)
    variables = {
        "GRPC_PORT": str(service.grpc),
        "HTTP_PORT": str(service.http),
        "METRICS_PORT": str(service.metrics),
        "OPENAI_PORT": str(port),
        "SPINDLE_CONFIG": str(config),
    }
    command = [sys.executable, "-m", "backend.openai_frontend"]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        try:
            wait_for(f"{address}/health", process)
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
                yield made
        finally:
            process.terminate()


def wait_for(url, process):
    """Wait until a server answers."""
    deadline = time.monotonic() + LIMIT_S
    while not answers(url):
        assert process.poll() is None, "the front end has ended"
        assert time.monotonic() < deadline, f"{url} did not answer in {LIMIT_S} s"
        time.sleep(0.1)


def answers(url):
    """Return whether a server answers."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def ask(client, stream, **body):
    """Return the reasoning and the content of an answer."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "fake", "messages": messages, "max_tokens": 40, "temperature": 0, **body}
    reply = client.chat.completions.create(stream=stream, **body)
    deltas = [chunk.choices[0].delta for chunk in reply] if stream else [reply.choices[0].message]
    texts = [
        "".join(getattr(delta, name, None) or "" for delta in deltas)
        for name in ("reasoning_content", "reasoning", "content")
    ]
    assert texts[0] == texts[1]
    return texts[1:]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_content_are_what_the_text_model_writes(client, stream):
    reasoning, content = ask(client, stream)
    assert (bool(reasoning), content) == (True, "")
    _, whole = ask(client, stream, extra_body={"separate_reasoning": False})
    assert whole.strip() == reasoning


@pytest.mark.parametrize("stream", [False, True])
def test_a_variable_of_the_template_switches_reasoning_off(client, stream):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    reasoning, content = ask(client, stream, extra_body=off)
    assert (reasoning, bool(content)) == ("", True)
    assert ask(client, stream, reasoning_effort="none") == [reasoning, content]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_reasoning_are_counted(client, stream):
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    asked = {**body, "stream": stream, "temperature": 0}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    reply = client.chat.completions.create(**asked)
    usage = list(reply)[-1].usage if stream else reply.usage
    assert usage.completion_tokens == 40
    assert 20 <= usage.completion_tokens_details.reasoning_tokens <= 40
