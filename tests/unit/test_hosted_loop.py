"""The loop over a hosted engine: replies, limits, and what becomes of requests when it fails."""

import threading
import time

import pytest

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.core.hosted import HostedLoop
from backend.engines.port import EngineLostError
from backend.ipc.process import warm_up
from backend.ops.stats import Stats, StepStats
from backend.reloading import reload_drafts
from backend.request import ErrorCode, GenerationRequest, RequestError
from tests.fakes.apps import ask, fake_app, finish, submit
from tests.fakes.hosted_fake import HostedFake

HOSTED = {"target": {"engine": "tests.fakes.hosted_fake"}}


def hosted_app(**settings):
    return build(parse_config({**HOSTED, **settings}))


@pytest.fixture
def app():
    app = hosted_app()
    yield app
    app.close()


def failing(app, monkeypatch, step):
    """Have a step of the engine do something else for some requests."""
    monkeypatch.setattr(app.loop.engine, "step", step, raising=True)


def test_texts_are_those_of_the_fake_engine_and_count_what_was_drafted(app):
    reference = fake_app()
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"return_log_probs": True}):
        one, other = (ask(each, "tokens ", 30, **options) for each in (app, reference))
        finish(app, one)
        finish(reference, other)
        assert one.text == other.text
        assert one.usage.drafts.keys() == {"own"}
        assert 0 < one.usage.accepted < one.usage.drafted
        assert one.usage.k_max == 2
    reference.close()


def test_many_requests_share_the_places_and_all_get_their_text(monkeypatch):
    app, rows = hosted_app(limits={"max_active_requests": 3}), []
    monkeypatch.setattr(app.loop.engine, "step", lambda _: rows.append(app.loop.counts()[0]))
    alone = ask(app, "same ", 20)
    finish(app, alone)
    sinks = [ask(app, "same ", 20) for _ in range(10)]
    finish(app, *sinks)
    assert max(rows) == 3
    assert {sink.text for sink in sinks} == {alone.text}
    assert app.loop.counts() == (0, 0)
    assert not app.loop.engine.running
    app.close()


def test_a_request_may_forbid_speculation_and_the_switch_does_for_all(app):
    finish(app, one := ask(app, "plain ", 20, num_draft_tokens=0))
    assert one.usage.drafted == 0
    app.switches.set(["speculation=off"])
    finish(app, one := ask(app, "plain ", 20))
    assert one.usage.drafted == 0


def test_a_stop_word_and_a_cancellation_abort_the_generation(app):
    reference = ask(app, "stop ", 60)
    finish(app, reference)
    word = reference.text[20:24]
    finish(app, one := ask(app, "stop ", 60, stop_words=(word,)))
    assert one.text == reference.text[: reference.text.index(word)]
    gone, other = ask(app, "go on ", 1000), ask(app, "stop ", 60)
    while not app.loop.engine.running:
        app.loop.step()
    gone.cancelled = True
    app.loop.wake()
    finish(app, gone, other)
    assert gone.reason == ErrorCode.CANCELLED
    assert other.text == reference.text
    app.loop.step()
    assert not app.loop.engine.running


def test_what_goes_wrong_with_a_request_ends_no_other(app, monkeypatch):
    errors = {
        1: RequestError(ErrorCode.UNIMPLEMENTED, "beams"),
        2: ZeroDivisionError(),
    }

    def step(request):
        if error := errors.get(request.id):
            raise error

    failing(app, monkeypatch, step)
    sinks = [ask(app, "tokens ", 20) for _ in range(3)]
    finish(app, *sinks)
    assert [sink.ends[0] for sink in sinks[:2]] == [
        (ErrorCode.UNIMPLEMENTED, "beams"),
        (ErrorCode.INTERNAL, "the request could not be continued (ZeroDivisionError)"),
    ]
    assert len(sinks[2].text) == 20 + len("tokens ")


def test_a_text_that_the_engine_ends_too_early_is_an_error(app, monkeypatch):
    async def generate(request):
        part = None
        async for part in HostedFake.generate(app.loop.engine, request):
            yield part
            return

    monkeypatch.setattr(app.loop.engine, "generate", generate)
    finish(app, one := ask(app, "tokens ", 20))
    assert one.reason == ErrorCode.INTERNAL


def test_a_lost_engine_ends_the_loop_and_each_request_by_one_error(app, monkeypatch):
    def step(request):
        raise EngineLostError("its core was killed")

    failing(app, monkeypatch, step)
    sinks = [ask(app, "tokens ", 20) for _ in range(100)]
    app.loop.run(threading.Event())
    messages = {sink.ends[0][1] for sink in sinks}
    assert messages == {
        "the engine was lost: its core was killed",
        "the engine was lost: it is being restarted",
    }
    assert app.loop.counts() == (0, 0)


def test_a_drain_ends_what_is_left(app):
    stop = threading.Event()
    loop = threading.Thread(target=app.loop.run, args=(stop,))
    loop.start()
    app.loop.between_steps(lambda: None).result(10)
    sinks = [ask(app, "go on ", 2000) for _ in range(3)]
    stop.set()
    app.loop.wake()
    loop.join(10)
    assert not loop.is_alive()
    assert {sink.ends[0][1] for sink in sinks} == {"the server is shutting down"}
    assert not app.loop.engine.running


def test_limits_refuse_by_the_sentences_of_the_other_loop():
    app = hosted_app(
        limits={"max_active_requests": 1, "max_queued_requests": 1, "kv_cache_tokens": 256}
    )
    sinks = [ask(app, "tokens ", 20) for _ in range(3)]
    large = ask(app, "tokens ", 300)
    late = submit(app, GenerationRequest("late ", 20, timeout_s=0.0))
    finish(app, *sinks, large, late)
    assert sinks[2].ends[0][1] == "Exceeds maximum queue size 1"
    assert large.ends[0][1] == (
        "max_tokens 300 and a prompt of 7 tokens need more KV cache than this server has"
    )
    assert late.ends[0][1] in (
        "Exceeds maximum queue size 1",
        "the request has not ended within its timeout, 0 s",
    )
    app.close()


def test_an_engine_without_steps_is_stuck_only_while_it_is_asked():
    now_s = 100.0
    config = parse_config(HOSTED)

    async def start():
        engine = HostedFake(config.target, type("Service", (), {"config": config}))
        engine.stepped_s = lambda: 50.0
        return engine

    stats = StepStats(Stats())
    loop = HostedLoop(start, stats, lambda: now_s, max_active=2, max_queued=2)
    now_s = 200.0
    loop.step()
    assert loop.alive_s == 100.0  # nothing has looked
    loop.between_steps(lambda: None)
    loop.step()
    assert loop.alive_s == 200.0
    loop.close()


def test_the_drafter_is_the_engines_own_and_cannot_be_reloaded(app):
    assert [draft.name for draft in app.config.drafts] == ["own"]
    assert app.config.policy.k_max == 2
    with pytest.raises(ConfigError, match="drafter of a hosted engine cannot change"):
        reload_drafts(app, app.config)
    with pytest.raises(ConfigError, match="has a loop of its own"):
        app.orchestrator.step()
    assert app.explain()["requests"] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafts": [{"engine": "lookup", "name": "l"}]}, "drafts must be empty for the engine"),
        ({"policy": {"k_max": 3}}, r"policy\.k_max must be left out for the engine"),
        (
            {"target": {"engine": "lookup", "engine_args": {"a": 1}}},
            "target.engine must be one of",
        ),
        (
            {"target": {"engine": "tests.fakes.fake", "engine_args": {"a": 1}}},
            r"target\.engine_args must be empty for the engine",
        ),
        (
            {
                "target": {"engine": "tests.fakes.fake"},
                "drafts": [{"engine": "tests.fakes.hosted_fake", "name": "d"}],
            },
            r"drafts\[0\]\.engine must not be",
        ),
    ],
)
def test_settings_that_another_engine_has_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**HOSTED, **settings})


def test_warming_up_leaves_no_count(app):
    warm_up(app)
    assert not app.stats.drain().counters


def test_a_late_request_ends_while_the_engine_is_silent():
    app = hosted_app(target={**HOSTED["target"], "options": {"step_s": 30.0}})
    began_s = time.monotonic()
    late = submit(app, GenerationRequest("late ", 20, timeout_s=0.05))
    finish(app, late)
    assert late.ends[0][1] == "the request has not ended within its timeout, 0.05 s"
    assert time.monotonic() - began_s < 20
    app.close()
