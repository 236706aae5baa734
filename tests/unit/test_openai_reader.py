"""Large bodies are read by a process of their own, with the same answers as small ones."""

import asyncio
import json
import os
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.reader import LARGE_BODY_BYTES, BodyReader
from backend.openai_frontend.routes import chat_of, completion_of, text_of, tokens_of
from backend.openai_frontend.settings import FrontEnd
from backend.openai_frontend.template import ChatTemplate

pytestmark = pytest.mark.medium

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
SETTINGS = FrontEnd("", ("m",), ChatTemplate(TEMPLATE, "<s>"))
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
HEADERS = {"content-type": "application/json"}
LARGE = {"metadata": {"blank": " " * LARGE_BODY_BYTES}}


class Request:
    def __init__(self, body):
        self.headers = HEADERS
        self._body = json.dumps(body).encode()

    async def body(self):
        return self._body


@pytest.fixture
def bodies():
    with closing(BodyReader(SETTINGS)) as reader:
        yield reader


@pytest.fixture
def every_body():
    """A reader to which no body is small."""
    with closing(BodyReader(SETTINGS, large_bytes=0)) as reader:
        yield reader


def read(bodies, work, body):
    return asyncio.run(bodies.read(Request(body), work))


def pid_of(settings, data, headers):
    return os.getpid()


def fail(settings, data, headers):
    raise ValueError("a fault")


def end(settings, data, headers):
    os._exit(1)


def test_only_a_large_body_leaves_the_process(bodies):
    assert read(bodies, pid_of, {}) == os.getpid()
    assert not bodies.has_process
    first, second = read(bodies, pid_of, LARGE), read(bodies, pid_of, LARGE)
    assert first == second != os.getpid()


@pytest.mark.parametrize(
    ("work", "body"),
    [
        (completion_of, {"prompt": ["a", [1, 2]], "logprobs": 2, "echo": True, "n": 2}),
        (completion_of, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
        (chat_of, {"messages": [HELLO, HELLO], "max_completion_tokens": 5}),
        (chat_of, {"messages": [HELLO], "tools": [TOOL], "tool_choice": "required"}),
        (chat_of, {"messages": [HELLO], "response_format": {"type": "json_object"}}),
        (text_of, {"prompt": "a"}),
        (text_of, {"messages": [HELLO]}),
        (tokens_of, {"tokens": [1, 2]}),
    ],
)
def test_a_large_body_means_the_same_as_a_small_one(bodies, every_body, work, body):
    body = {"model": "m", **body}
    assert read(every_body, work, body) == read(bodies, work, body)
    assert every_body.has_process


@pytest.mark.parametrize("body", [{"model": "other"}, {"model": "m", "top_k": -5}, {"modell": 1}])
def test_it_is_refused_for_the_same_reason(bodies, every_body, body):
    refusals = []
    for reader in (bodies, every_body):
        with pytest.raises(ApiError) as raised:
            read(reader, chat_of, {"messages": [HELLO], **body})
        refusals.append((raised.value.status, raised.value.body()))
    assert refusals[0] == refusals[1]


def test_what_an_answer_does_not_need_stays_in_the_process():
    body = {"model": "m", "messages": [HELLO] * 1000, "tools": [TOOL], "user": "u" * 1000}
    answer = chat_of(SETTINGS, json.dumps(body).encode(), HEADERS)
    assert len(str(answer.body)) < 1000


def test_a_fault_is_an_error_and_a_death_a_restart(bodies):
    with pytest.raises(ApiError, match="internal error"):
        read(bodies, fail, LARGE)
    first = read(bodies, pid_of, LARGE)
    with pytest.raises(ApiError, match="try again later") as raised:
        read(bodies, end, LARGE)
    assert raised.value.status == 503
    assert read(bodies, pid_of, LARGE) not in (first, os.getpid())


def test_a_body_that_takes_too_long_is_given_up(bodies):
    first = read(bodies, pid_of, LARGE)
    usual_s, bodies.longest_s = bodies.longest_s, 0.05
    with pytest.raises(ApiError, match="try again later"):
        read(bodies, wait, LARGE)
    bodies.longest_s = usual_s
    assert read(bodies, pid_of, LARGE) not in (first, os.getpid())


def wait(settings, data, headers):
    signal.pause()


@pytest.mark.parametrize(
    ("work", "body", "param", "words"),
    [
        (completion_of, {"prompt": [[1] * 9, [1] * 10]}, "prompt", "has 10 tokens"),
        (completion_of, {"prompt": "a", "stop": ["a"] * 300}, "stop", "300 words"),
        (chat_of, {"messages": [HELLO], "stop": "a" * 2000}, "stop", "a word of 2000"),
    ],
)
def test_what_the_text_model_would_refuse_by_its_size_does_not_go_there(work, body, param, words):
    settings = replace(SETTINGS, max_context_tokens=10)
    with pytest.raises(ApiError, match=words) as raised:
        work(settings, json.dumps({"model": "m", **body}).encode(), HEADERS)
    assert (raised.value.status, raised.value.param) == (400, param)
