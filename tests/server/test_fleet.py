"""Several servers that NVIDIA Dynamo routes to: a text survives the replica that began it."""

import json
import signal
import urllib.request

import pytest

from backend.launcher.processes import WORKER_PYTHON
from bench.fleet import OPTIONS, Fleet, ask, ask_all, chat, models, routing, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not WORKER_PYTHON.exists(), reason="make fleet, or make test-all, installs Dynamo"
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
    for replica in fleet.replicas:
        replica.wait()
    return fleet.front_end("--router-mode", "round-robin", "--migration-limit", "3")


@pytest.fixture(scope="module")
def bodies():
    return [chat(number, kind) for number, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def unbroken(url, bodies):
    """Return the texts of requests that nothing disturbs."""
    answers = ask_all(url, bodies)
    assert [answer.error for answer in answers] == [None] * len(bodies)
    return [answer.text for answer in answers]


def post(url, body):
    """Return the whole answer to a chat."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_a_seed_comes_from_the_request_and_is_named(url):
    body = {**chat(1, "greedy", 12), "temperature": 0.9, "nvext": {"extra_fields": ["engine_data"]}}
    first = post(url, body)
    again = post(url, {**body, "seed": first["nvext"]["engine_data"]["seed"]})
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_a_server_of_its_own_writes_the_same_texts(fleet, url):
    for body in (chat(2, "greedy", 24), chat(3, "seeded", 24)):
        alone = post(fleet.replicas[0].url, body)["choices"][0]["message"]["content"]
        assert alone == post(url, body)["choices"][0]["message"]["content"]


def test_routing_by_kv_events_reuses_more_than_taking_turns(fleet, url):
    reused = routing(fleet, {"turns": url, "kv": fleet.front_end("--router-mode", "kv")})
    assert reused["kv"]["reused_blocks"] > 1.2 * reused["turns"]["reused_blocks"]


def test_a_replica_that_gets_sigterm_lets_its_streams_end(fleet, url, bodies, unbroken):
    leaving = fleet.replicas[0].process
    answers = ask_all(url, bodies, lambda: leaving.send_signal(signal.SIGTERM))
    assert [answer.error for answer in answers] == [None] * len(bodies)
    assert [answer.text for answer in answers] == unbroken
    assert leaving.wait(60) == 0
    assert fleet.count_moved() == 0


def test_a_replica_joins_and_every_text_survives_the_kill_of_another(fleet, url, bodies, unbroken):
    dying, joining = fleet.replicas[1].process, fleet.add()
    joining.wait()
    until(
        lambda: ask(url, chat(0, "greedy", 4)).reason and joining.count_in_log("request received"),
        "the third worker gets no request",
    )
    answers = ask_all(url, bodies, dying.kill)
    assert [answer.error for answer in answers] == [None] * len(bodies)
    assert [answer.text for answer in answers] == unbroken
    assert fleet.count_moved() > 0
    assert models(url)
