"""Switches and drafts through a real tritonserver: the model ``spindle`` takes commands, the
metrics say what they did.
"""

import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request

import pytest

from backend.launcher import admin
from backend.triton_adapter.admin_secret import VARIABLE
from tests.server.harness import ADMIN_SECRET, CONFIG


@pytest.fixture
def command(service):
    def send(text, status=200):
        found, body = service.command(text)
        assert found == status, body
        return json.loads(body)["error"] if status != 200 else json.loads(json.loads(body)["reply"])

    started = send("switches")
    yield send
    send("set " + " ".join(f"{key}={value}" for key, value in started.items()))


def drafted(service, **labels):
    return service.metric("spindle_draft_tokens_total", **labels)


def settled(service, arm, tokens):
    """Wait until the figures of what was just served have arrived: they come twice a second."""
    service.wait_until(lambda: service.metric("spindle_emitted_tokens_total", arm=arm) >= tokens, 5)


def test_speculation_is_switched_off_and_on_while_it_serves(service, command, reference_text):
    assert command("set speculation=off")["speculation"] == "off"
    status, reply = service.generate("switched off", 40, exclude_input_in_output=True)
    assert (status, reply["text_output"]) == (200, reference_text("switched off", 40))
    settled(service, "off", 40)
    assert drafted(service, arm="off") == 0
    assert service.metric("spindle_speculation_mode", mode="off") == 1
    before = drafted(service, arm="planner")
    command("set speculation=on")
    assert service.generate("switched on", 40)[0] == 200
    service.wait_until(lambda: drafted(service, arm="planner") > before, 5)


def test_the_shadow_decides_and_records_and_applies_nothing(service, command):
    command("set speculation=shadow")
    assert service.generate("in the shadow", 40)[0] == 200
    settled(service, "shadow", 40)
    assert drafted(service, arm="shadow") == 0
    assert service.wait_until(lambda: service.metric("spindle_shadow_draft_length_count") >= 39)


def test_both_arms_of_a_canary_have_their_figures(service, command):
    command("set canary_share=0.5 fixed_draft=poor fixed_length=3")
    for number in range(12):
        assert service.generate(f"request {number}", 20)[0] == 200
    for arm in ("planner", "fixed"):
        settled(service, arm, 20)
        assert service.metric("spindle_time_to_first_token_seconds_count", arm=arm) >= 1
        assert service.metric("spindle_inter_token_seconds_count", arm=arm) > 0
    assert drafted(service, arm="fixed", draft="poor") > 0
    assert drafted(service, arm="fixed", draft="good") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("set speculation=sometimes", ["switches.speculation", "sometimes"]),
        ("set fixed_length=2", ["switches.fixed_draft", "good", "poor"]),
        ("switch off", ["switch off", "health, learned, explain, switches, set"]),
    ],
)
def test_a_bad_command_is_answered_with_what_is_wrong(command, text, words):
    message = command(text, status=400)
    assert all(word in message for word in words)


def test_a_web_page_commands_nothing(service, command):
    """A page can have a browser post any text without asking first, but knows no secret."""
    before = command("switches")
    url = f"http://127.0.0.1:{service.http}/v2/models/spindle/generate"
    for guess in ({}, {"secret": ""}, {"secret": "a guess"}):
        data = json.dumps({"command": "set speculation=off", **guess}).encode()
        headers = {"Content-Type": "text/plain", "Origin": "http://elsewhere.example"}
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10)
        assert "secret" in json.load(error.value)["error"]
    assert command("switches") == before


@pytest.mark.parametrize("given", [True, False])
def test_spindle_admin_sends_the_secret(service, command, monkeypatch, capsys, given):
    """It takes the environment's, else that of the server on this port."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if given:
        monkeypatch.setenv(VARIABLE, ADMIN_SECRET)
    port = ["--port", str(service.http)]
    monkeypatch.setenv("HTTP_PORT", "")
    monkeypatch.setattr(sys, "argv", ["admin", "set", "speculation=off", *port])
    assert admin.main() == 0
    assert json.loads(capsys.readouterr().out)["speculation"] == "off"
    monkeypatch.setattr(sys, "argv", ["admin", "set", "speculation=maybe", *port])
    assert admin.main() == 1
    assert "switches.speculation" in capsys.readouterr().err


def test_the_kill_switch_outlasts_a_crash_of_the_engine_process(service, command):
    command("set speculation=off")
    pid = service.health()["pid"]
    os.kill(pid, signal.SIGKILL)

    def restarted():
        status, body = service.command("health")
        return status == 200 and json.loads(json.loads(body)["reply"])["pid"] != pid

    service.wait_until(restarted, 30)
    assert command("switches")["speculation"] == "off"


def test_drafts_are_added_and_removed_while_it_serves(start_service, tmp_path, reference_text):
    config = tmp_path / "serving.json"
    settings = json.loads(CONFIG.read_text())
    config.write_text(json.dumps(settings))
    service = start_service(config).wait_ready()

    def reload(drafts, status=200):
        config.write_text(json.dumps({**settings, "drafts": drafts}))
        found, body = service.command("reload drafts")
        assert found == status, body
        return json.loads(body)["error"] if status != 200 else json.loads(json.loads(body)["reply"])

    texts = []
    clients = [
        threading.Thread(
            target=lambda: texts.append(
                service.generate("goes on", 400, exclude_input_in_output=True)
            )
        )
        for _ in range(4)
    ]
    for client in clients:
        client.start()
    good, poor = settings["drafts"]
    pid = service.health()["pid"]
    new = {**good, "name": "new"}
    assert reload([poor, new]) == {"drafts": ["poor", "new"], "added": ["new"], "removed": ["good"]}
    assert "drafts[1].engine must be one of" in reload(
        [poor, {**new, "engine": "oracle"}], status=400
    )
    for client in clients:
        client.join(60)
    assert [(status, reply["text_output"]) for status, reply in texts] == [
        (200, reference_text("goes on", 400))
    ] * 4
    assert service.wait_until(lambda: drafted(service, draft="new"), 5)
    before = drafted(service, draft="good")
    assert service.generate("without it", 100)[0] == 200
    assert service.health()["pid"] == pid
    assert drafted(service, draft="good") == before
