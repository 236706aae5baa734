"""Drafts that change under requests in flight."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.reloading import reload_drafts
from tests.fakes.apps import ask
from tests.fakes.checkpoints import VOCABULARY, folder

TARGET = {"engine": "tests.fakes.fake"}


def draft(name, agreement=0.7):
    return {"name": name, "engine": "tests.fakes.fake", "options": {"agreement": agreement}}


def config(*drafts, **settings):
    return parse_config(
        {
            "target": TARGET,
            "drafts": list(drafts),
            "policy": {"kind": "adaptive", "k_max": 4},
            **settings,
        }
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def serving():
    """Return a function that builds an app and runs its loop in a thread until the test ends."""
    stop, loops, apps = threading.Event(), [], []

    def start(*drafts, **settings):
        app = build(config(*drafts, **settings))
        apps.append(app)
        loops.append(threading.Thread(target=app.orchestrator.run, args=(stop,), daemon=True))
        loops[-1].start()
        return app

    yield start
    stop.set()
    for app, loop in zip(apps, loops, strict=True):
        app.orchestrator.wake()
        loop.join(10)
        assert not loop.is_alive()


def served(app, text, max_tokens=120):
    return ask(app, text, max_tokens)


def wait(sinks):
    """Wait for the last reply of each."""
    alarm = threading.Event()
    for _ in range(3000):
        if all(sink.has_ended for sink in sinks):
            return
        alarm.wait(0.01)
    raise AssertionError("a request got no final reply")


def texts(sinks):
    wait(sinks)
    return [sink.text for sink in sinks]


def test_requests_in_flight_go_on_with_the_same_text_while_drafts_come_and_go(serving):
    prompts = [f"request {number}" for number in range(6)]
    alone = serving()
    expected = texts([served(alone, prompt) for prompt in prompts])
    good, poor, other = (
        draft("good", agreement=0.9),
        draft("poor", agreement=0.2),
        draft("other", agreement=0.6),
    )
    lookup = {"name": "lookup", "engine": "lookup"}
    app = serving(good, target={**TARGET, "options": {"step_s": 0.002}})
    sinks = [served(app, prompt) for prompt in prompts]
    for drafts in (
        [good, poor],
        [poor],
        [lookup, other],
        [],
        [good, lookup],
        [draft("good", 0.5), lookup],
    ):
        new = replace(config(*drafts), target=app.config.target)
        reply = reload_drafts(app, new)
        assert reply["drafts"] == [engine["name"] for engine in drafts]
        assert app.config == new
        sinks.append(served(app, prompts[0]))
    assert texts(sinks) == [*expected, *[expected[0]] * 6]
    assert not app.stats.drain().counters or not any(
        name == "spindle_fallback_total" for name, _, _ in app.stats.drain().counters
    )


def test_a_draft_that_was_added_is_used_and_one_that_was_removed_is_not(serving):
    good, sure = draft("good", agreement=0.6), draft("sure", agreement=1.0)
    app = serving(good)
    first = served(app, "before")
    wait([first])
    assert reload_drafts(app, config(sure)) == {
        "drafts": ["sure"],
        "added": ["sure"],
        "removed": ["good"],
    }
    app.stats.drain()  # not before: a step counts what it did after its last reply
    sink = served(app, "after", 200)
    wait([sink])
    proposed = {
        labels["draft"]
        for name, labels, value in app.stats.drain().counters
        if name == "spindle_draft_tokens_total" and value
    }
    assert proposed == {"sure"}
    assert sink.usage.accepted > 100


def test_what_was_learnt_of_a_draft_that_stays_is_kept_and_saved_under_the_new_drafts(serving):
    good, poor = draft("good", agreement=0.9), draft("poor", agreement=0.3)
    app = serving(good)
    wait([served(app, "some text", 200)])
    before = app.learned_state.show()["tenants"][0]["drafts"]
    reload_drafts(app, config(poor, good))
    after = app.learned_state.show()["tenants"][0]["drafts"]
    known, poor_s = (after[name]["reached"] for name in ("good", "poor"))
    assert np.sum(known) == pytest.approx(np.sum(before["good"]["reached"]), rel=0.01)
    assert not np.any(poor_s)
    app.learned_state.save()
    fresh = build(config(poor, good))
    fresh.learned_state.restore()
    assert fresh.learned_state.show()["restored_age_s"] is not None
    assert fresh.stats.drain().counters == []


def test_what_cannot_be_changed_is_refused_by_name_and_nothing_changes(serving, tmp_path):
    good, poor = draft("good"), draft("poor")
    app = serving(good)
    for new, message in (
        (config(good, policy={"kind": "adaptive", "k_max": 5}), "policy differs"),
        (config(poor, threads=2), "threads differs"),
    ):
        with pytest.raises(ConfigError, match=message):
            reload_drafts(app, new)
    app.switches.set(["fixed_draft=good", "fixed_length=2"])
    with pytest.raises(ConfigError, match=r"fixed_draft must be one of \['poor'\], got 'good'"):
        reload_drafts(app, config(poor))
    assert app.config == config(good)
    assert [engine.name for engine in app.drafts] == ["good"]
    traced = serving(good, policy={"kind": "adaptive", "trace_file": str(tmp_path / "trace")})
    with pytest.raises(ConfigError, match="trace_file"):
        reload_drafts(
            traced, config(poor, policy={"kind": "adaptive", "trace_file": str(tmp_path / "trace")})
        )


def test_a_draft_of_another_vocabulary_is_refused_with_the_first_token_that_differs(
    serving, tmp_path, monkeypatch
):
    target = folder(tmp_path, "target")
    other = folder(tmp_path, "other", tokenizer=VOCABULARY.replace('"b"', '"c"'))
    app = serving(draft("good"))
    monkeypatch.setattr(
        "backend.model_folders.model_path",
        lambda engine: target if engine.name == "target" else other,
    )
    with pytest.raises(ConfigError, match=r'id 1 is "c" in the draft, "b" in the target'):
        reload_drafts(
            app, config(draft("good"), {"name": "foreign", "engine": "torch", "model": str(other)})
        )
    assert texts([served(app, "goes on")])


def test_a_loop_that_never_rests_leaves_the_drafts_as_they_are(monkeypatch):
    monkeypatch.setattr("backend.reloading.CHANGE_LIMIT_S", 0.05)
    app = build(config(draft("good")))  # its loop does not run
    with pytest.raises(ConfigError, match=r"timed out after 0.05 s waiting for in-flight work"):
        reload_drafts(app, config(draft("poor")))
    app.orchestrator.step()
    assert [engine.name for engine in app.drafts] == ["good"]
    assert json.dumps(app.switches.show())
