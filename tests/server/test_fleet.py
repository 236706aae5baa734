"""Several servers as replicas of NVIDIA Dynamo: a text survives the replica that began it."""

import os
import signal

import pytest

from backend.launcher.dynamo import DEFAULT_PYTHON
from tests.server.fleet import OPTIONS, Fleet, ask, ask_all, chat, models, wait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not DEFAULT_PYTHON.exists(), reason="make fleet, or make test-all, installs Dynamo"
    ),
]
KINDS = [*OPTIONS] * 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    for _ in range(2):
        made.add()
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(fleet):
    made = fleet.front_end("--migration-limit", "3")
    for replica in fleet.replicas:
        wait(lambda: "Registered endpoint" in text_of(replica), "a worker is not registered")  # noqa: B023
    return made


def text_of(replica):
    """Return a replica's log, its worker's included."""
    return replica.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def bodies():
    return [chat(number, kind) for number, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def unbroken(url, bodies):
    """Return the texts of requests that nothing disturbs."""
    answers = ask_all(url, bodies)
    assert [answer.error for answer in answers] == [None] * len(bodies)
    return [answer.text for answer in answers]


def moved(fleet):
    """Return how many texts a worker took over."""
    return sum(text_of(replica).count(" resumes after ") for replica in fleet.replicas)


def test_a_seed_comes_from_the_request_and_is_named(url):
    import json
    import urllib.request

    body = {**chat(1, "greedy", 12), "temperature": 0.9, "nvext": {"extra_fields": ["engine_data"]}}

    def post(body):
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    first = post(body)
    again = post({**body, "seed": first["nvext"]["engine_data"]["seed"]})
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_a_replica_that_is_asked_to_end_lets_streams_end(fleet, url, bodies, unbroken):
    leaving = fleet.replicas[0]
    answers = ask_all(url, bodies, lambda: leaving.process.send_signal(signal.SIGTERM))
    assert [answer.error for answer in answers] == [None] * len(bodies)
    assert [answer.text for answer in answers] == unbroken
    assert leaving.process.wait(60) == 0
    assert moved(fleet) == 0


def test_a_replica_joins_and_every_text_survives_the_kill_of_another(fleet, url, bodies, unbroken):
    joining, dying = fleet.add(), fleet.replicas[1]
    wait(lambda: "Registered endpoint" in text_of(joining), "the third worker is not registered")
    wait(
        lambda: ask(url, chat(0, "greedy", 4)).reason and "request received" in text_of(joining),
        "the third worker gets no request",
    )
    answers = ask_all(url, bodies, lambda: os.kill(dying.process.pid, signal.SIGKILL))
    assert [answer.error for answer in answers] == [None] * len(bodies)
    assert [answer.text for answer in answers] == unbroken
    assert moved(fleet) > 0
    assert models(url)
