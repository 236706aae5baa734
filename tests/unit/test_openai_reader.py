"""Bodies are read by processes of their own: none holds up the others, or the server."""

import asyncio
import json
import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from backend.launcher.processes import is_running
from backend.openai_frontend import reader as reader_module
from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.reader import LARGE_BODY_BYTES, PROCESSES, BodyReader
from backend.openai_frontend.routes import chat_of, completion_of, text_of, tokens_of
from backend.openai_frontend.template import ChatTemplate
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.medium

ENDLESS = (
    "{% if messages[0].content == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) "
    "%}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
)
TEMPLATE = ENDLESS + "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
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


@pytest.fixture(scope="module")
def bodies():
    with closing(BodyReader(SETTINGS)) as reader:
        reader.longest_s = 60.0  # a busy machine is not what is tested
        yield reader


def read(bodies, work, body):
    return asyncio.run(bodies.read(Request(body), work))


def outcomes(bodies, works):
    """Return what comes of some bodies at once: pairs of what reads it, and a body."""

    async def all_of_them():
        tasks = [bodies.read(Request(body), work) for work, body in works]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(all_of_them())


def pid_of(settings, data, headers):
    return os.getpid()


def fail(settings, data, headers):
    raise ValueError("a fault")


def end(settings, data, headers):
    Path(json.loads(data)["file"]).write_text(str(os.getpid()))
    os._exit(1)


def wait(settings, data, headers):
    signal.pause()


def wait_for_file(settings, data, headers):
    while not Path(json.loads(data)["file"]).exists():
        time.sleep(0.01)


def make_file(settings, data, headers):
    Path(json.loads(data)["file"]).touch()


def take_memory(settings, data, headers):
    return len(bytearray(8 * 2**30))


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
@pytest.mark.parametrize("more", [{}, LARGE])
def test_a_body_means_the_same_in_the_process(bodies, work, body, more):
    if more and work in (text_of, tokens_of):
        more = {}  # which have no metadata
    body = {"model": "m", **body, **more}
    assert read(bodies, work, body) == work(SETTINGS, json.dumps(body).encode(), HEADERS)


@pytest.mark.parametrize("body", [{"model": "other"}, {"model": "m", "top_k": -5}, {"modell": 1}])
def test_it_is_refused_for_the_same_reason(bodies, body):
    body = {"messages": [HELLO], **body}
    with pytest.raises(ApiError) as here:
        chat_of(SETTINGS, json.dumps(body).encode(), HEADERS)
    with pytest.raises(ApiError) as there:
        read(bodies, chat_of, body)
    assert (there.value.status, there.value.body()) == (here.value.status, here.value.body())


def test_what_an_answer_does_not_need_stays_in_the_process():
    body = {"model": "m", "messages": [HELLO] * 1000, "tools": [TOOL], "user": "u" * 1000}
    answer = chat_of(SETTINGS, json.dumps(body).encode(), HEADERS)
    assert len(str(answer.body)) < 1000


def test_one_process_more_than_are_busy_is_ready(bodies):
    read(bodies, pid_of, {})
    wait_until(lambda: len(bodies.pids) == 2)


class SlowStart:
    """Settings that a process takes long to receive."""

    def __reduce__(self):
        return start_slowly, ()


def start_slowly():
    time.sleep(2)
    return SETTINGS


def test_a_process_that_starts_slowly_takes_nothing_of_a_body_s_time():
    with closing(BodyReader(SlowStart())) as reader:
        reader.longest_s = 1.5
        assert read(reader, pid_of, {}) in reader.pids


@pytest.mark.parametrize("more", [{}, LARGE])
def test_a_fault_is_an_error_and_a_death_a_restart(bodies, more, tmp_path):
    with pytest.raises(ApiError, match="internal error"):
        read(bodies, fail, more)
    files = [tmp_path / str(index) for index in range(PROCESSES)]
    results = outcomes(bodies, [(end, {"file": str(file), **more}) for file in files])
    assert {(str(error), error.status) for error in results} == {
        ("the body could not be parsed: try again later", 503)
    }
    dead = {int(file.read_text()) for file in files}
    assert len(dead) == PROCESSES
    assert not dead & bodies.pids
    assert not {os.getpid(), *dead} & {*outcomes(bodies, [(pid_of, more)] * PROCESSES)}


def test_a_template_without_end_is_given_up_and_the_loop_goes_on_meanwhile(bodies):
    usual_s, bodies.longest_s = bodies.longest_s, 0.3
    endless = {"model": "m", "messages": [{"role": "user", "content": "endless"}]}

    async def both():
        task = asyncio.create_task(bodies.read(Request(endless), chat_of))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(ApiError, match="try again later") as raised:
            await task
        return turns, raised.value.status

    turns, status = asyncio.run(both())
    bodies.longest_s = usual_s
    assert turns > 3
    assert status == 503


def test_a_template_may_not_take_all_memory(bodies):
    with pytest.raises(ApiError):
        read(bodies, take_memory, {})
    assert read(bodies, pid_of, {}) != os.getpid()


def test_large_bodies_leave_a_process_for_small_ones(bodies, tmp_path):
    body = {"file": str(tmp_path / "file")}
    large = [(wait_for_file, {**body, **LARGE})] * 2 * PROCESSES
    assert outcomes(bodies, [*large, (make_file, body)]) == [None] * (len(large) + 1)


def test_bodies_beyond_those_that_may_wait_are_refused_at_once(bodies, monkeypatch):
    most = bodies.most_waiting
    bodies.most_waiting = 4
    results = outcomes(bodies, [(pid_of, {})] * 9)
    refused = [error for error in results if isinstance(error, ApiError)]
    assert len(refused) == 5
    assert refused[0].response().headers["retry-after"] == "1"
    bodies.most_waiting = most
    monkeypatch.setattr(reader_module, "MOST_WAITING_BYTES", 2.5 * LARGE_BODY_BYTES)
    results = outcomes(bodies, [(pid_of, LARGE)] * 3)
    assert [isinstance(each, ApiError) for each in results] == [False, False, True]
    monkeypatch.undo()
    assert not any(isinstance(each, ApiError) for each in outcomes(bodies, [(pid_of, LARGE)] * 3))


def test_at_the_end_no_process_is_left_and_none_is_waited_for():
    bodies = BodyReader(SETTINGS)

    async def close_meanwhile():
        task = asyncio.create_task(bodies.read(Request({}), wait))
        while not bodies.pids:
            await asyncio.sleep(0.01)
        pids = bodies.pids
        bodies.close()
        with pytest.raises(ApiError):
            await task
        return pids

    for pid in asyncio.run(close_meanwhile()):
        wait_until(lambda gone=pid: not is_running(gone))


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
