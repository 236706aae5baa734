"""The real engine process over its real socket, with the fake engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from backend.ipc.messages import (
    VERSION,
    Admin,
    AdminReply,
    Cancel,
    Chunk,
    ErrorReply,
    Final,
    Frames,
    FromEngine,
    Hello,
    StatsUpdate,
    Submit,
    Subscribe,
    frame,
)
from backend.launcher.run_folder import MOST_SOCKET_PATH_BYTES
from backend.request import ErrorCode, GenerationRequest
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.medium

CONFIG = {
    "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.002}},
    "drafts": [{"name": "d0", "engine": "tests.fakes.fake", "options": {"agreement": 0.8}}],
    "policy": {"kind": "random"},
    "limits": {"max_context_tokens": 512},
}


class Client:
    def __init__(self, path, version=VERSION):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self.frames, self.queue = Frames(FromEngine), []
        self.send(Hello(version=version))

    def send(self, message):
        self.sock.sendall(frame(message))

    def submit(self, request_id, text, max_tokens=20, **options):
        self.send(Submit(id=request_id, request=GenerationRequest(text, max_tokens, **options)))

    def ask(self, command):
        self.send(Admin(id=9, command=command))
        return self.until(AdminReply).reply

    def receive(self):
        while not self.queue:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self.queue += self.frames.feed(data)
        return self.queue.pop(0)

    def until(self, *kinds):
        while type(message := self.receive()) not in kinds:
            pass
        return message


@pytest.fixture
def start(tmp_path):
    processes = []

    def begin(config=None, wait=True, path=tmp_path / "engine.sock"):
        file = tmp_path / "serving.json"
        file.write_text(json.dumps(config or CONFIG))
        command = [
            sys.executable,
            "-m",
            "backend.engine_process",
            "--config",
            str(file),
            "--socket",
            str(path),
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        if wait:
            wait_until(lambda: path.exists() or process.poll() is not None)
            assert process.poll() is None, process.stderr.read()
        return process, path

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_it_listens_on_the_longest_path_of_a_socket(start, tmp_path):
    folder = tmp_path / ("d" * (MOST_SOCKET_PATH_BYTES - len(f"{tmp_path}//engine.sock")))
    folder.mkdir()
    path = folder / "engine.sock"
    assert len(os.fsencode(path)) == MOST_SOCKET_PATH_BYTES
    start(path=path)
    Client(path)


def test_streams_are_whole_and_unmixed_and_end_once(start):
    _, path = start()
    client = Client(path)
    assert client.receive().info["drafts"] == ["d0"]
    for i in range(20):
        client.submit(i, f"a different prompt, number {i}", stream=i % 2 == 0)
    texts, finals = dict.fromkeys(range(20), ""), {}
    while len(finals) < 20:
        message = client.receive()
        assert message.id not in finals
        texts[message.id] += message.text
        if isinstance(message, Final):
            finals[message.id] = message
    for i in range(20):
        again = Client(path)
        again.submit(
            0, f"a different prompt, number {i}", num_draft_tokens=0, exclude_input_in_output=True
        )
        alone = again.until(Final).text
        assert texts[i] == (alone if i % 2 == 0 else f"a different prompt, number {i}{alone}")
        assert finals[i].num_output_tokens == 20


def test_a_cancelled_request_gets_one_error_and_a_closed_connection_frees_its_requests(start):
    _, path = start()
    client, other = Client(path), Client(path)
    client.submit(1, "abc", 400, stream=True)
    client.until(Chunk)
    client.send(Cancel(id=1))
    assert client.until(ErrorReply, Final).code is ErrorCode.CANCELLED
    other.submit(1, "abc", 400, stream=True)
    other.until(Chunk)
    other.sock.close()
    wait_until(lambda: client.ask("health")["active"] == 0, 1.0)


@pytest.mark.parametrize(
    ("request_body", "words"),
    [
        ({"text_input": "", "max_tokens": 5}, "text_input has no tokens"),
        (
            {"text_input": "x" * 600, "max_tokens": 5},
            "text_input of 600 tokens is over the limit of 511",
        ),
        ({"text_input": "abc", "max_tokens": 5, "pad_id": -2}, "pad_id must be -1"),
    ],
)
def test_a_request_that_cannot_be_served_learns_why(start, request_body, words):
    _, path = start()
    client = Client(path)
    client.send(Submit(id=1, request=GenerationRequest(**request_body)))
    error = client.until(ErrorReply, Final)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert words in error.message


def test_statistics_reach_a_subscriber(start):
    _, path = start()
    client = Client(path)
    client.send(Subscribe())
    client.submit(1, "abc", 40)
    counters = {}
    while not counters.get(("spindle_requests_total", "success")):
        message = client.until(StatsUpdate)
        for name, labels, value in message.counters:
            key = (name, *labels.values())
            counters[key] = counters.get(key, 0) + value
    emitted = sum(
        value for key, value in counters.items() if key[0] == "spindle_emitted_tokens_total"
    )
    assert emitted == 40
    assert (
        0
        < counters["spindle_accepted_tokens_total", "planner", "d0"]
        <= counters["spindle_draft_tokens_total", "planner", "d0"]
    )


def test_sigterm_answers_what_is_in_flight_and_refuses_what_is_new(start):
    process, path = start()
    client = Client(path)
    client.submit(1, "abc", 400, num_draft_tokens=0)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    client.submit(2, "def")
    replies = {
        message.id: type(message)
        for message in (client.until(Final, ErrorReply), client.until(Final, ErrorReply))
    }
    assert replies == {1: Final, 2: ErrorReply}
    assert process.wait(10) == 0
    assert not path.exists()


@pytest.mark.slow
def test_a_drain_refuses_what_is_new_and_ends_what_outlasts_it(start):
    config = {
        "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.02}},
        "policy": {"kind": "none"},
        "limits": {"drain_s": 5.0},
    }
    process, path = start(config)
    client, watcher = Client(path), Client(path)
    client.submit(1, "abc", 1500, end_id=-1)
    client.submit(2, "def", 50, end_id=-1)
    while watcher.ask("health")["unanswered"] < 2:
        pass
    process.send_signal(signal.SIGUSR1)
    while watcher.ask("health")["status"] == "ok":
        pass
    client.submit(3, "ghi")
    endings = {ending.id: ending for ending in (client.until(Final, ErrorReply) for _ in range(3))}
    assert type(endings[2]) is Final
    for number in (1, 3):
        assert endings[number].code is ErrorCode.UNAVAILABLE
        assert endings[number].message == "the server is shutting down"
    assert watcher.ask("health")["unanswered"] == 0
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_a_second_drain_ends_what_runs_at_once(start):
    process, path = start({"target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.05}}})
    client, watcher = Client(path), Client(path)
    client.submit(1, "abc", 1900, end_id=-1)
    while not watcher.ask("health")["active"]:
        pass
    process.send_signal(signal.SIGUSR1)
    while watcher.ask("health")["status"] != "draining":
        pass
    assert watcher.ask("health")["active"] == 1
    process.send_signal(signal.SIGUSR1)
    ending = client.until(Final, ErrorReply)
    assert (ending.id, ending.code) == (1, ErrorCode.UNAVAILABLE)
    assert watcher.ask("health")["unanswered"] == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_another_protocol_version_is_turned_away(start):
    _, path = start()
    client = Client(path, version=99)
    client.until(Hello)
    with pytest.raises(EOFError):
        client.receive()


def test_a_bad_configuration_is_an_exit_status_and_a_sentence(start):
    process, _ = start({"target": {"engine": "tests.fakes.fake"}, "speed": 9}, wait=False)
    assert process.wait(30) == 1
    assert "unknown key 'speed'" in process.stderr.read()


def test_what_was_learnt_outlasts_a_restart(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    config = {**CONFIG, "policy": {"kind": "adaptive"}}
    process, path = start(config)
    client = Client(path)
    assert client.ask("learned")["restored_age_s"] is None
    for i in range(8):
        client.submit(i, f"a different prompt, number {i}", 60)
    for _ in range(8):
        client.until(Final)
    before = client.ask("learned")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    _, path = start(config)
    after = Client(path).ask("learned")
    assert after["restored_age_s"] is not None
    drafts = [data["tenants"][0]["drafts"] for data in (before, after)]
    chains = [np.sum(of["d0"]["reached"]) for of in drafts]
    assert chains[1] == pytest.approx(chains[0], rel=0.05)
    assert chains[1] > 100
