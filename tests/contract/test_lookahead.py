"""The exactness suite with two submissions in flight, on the fake engine with a device of its own.

The engine itself holds its KV against the text of every turn (``FakeEngine``), in place of
``checks.kv_is_fresh``.
"""

from dataclasses import replace
from time import perf_counter

import pytest

from backend.request import ErrorCode
from policy import FixedLength, RandomChoice
from tests.contract import checks, test_changing_drafts
from tests.contract.ahead import (
    AheadEngine,
    deployment,
    on_device,
    serve_ahead,
    stop_words_end_texts_ahead,
)
from tests.contract.deployment import K_MAX, Scripted, tiny_engine
from tests.contract.exact_cases import SCENARIOS, SETTLED
from tests.contract.guided import SCENARIO as GUIDED
from tests.contract.guided import guide
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, CROWDED, PROMPTS, plain_text
from tests.fakes.apps import ask, fake_app, finish
from tests.fakes.clock import Clock
from tests.fakes.loop import World

ENDS = (*checks.ENDS, checks.blocks_are_of_one_text)
texts_hold = next(f for name, f in vars(test_changing_drafts).items() if name[:10] == "test_texts")


@pytest.fixture(autouse=True)
def _ahead(monkeypatch):
    serve_ahead(monkeypatch)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_exact(name):
    scenario, properties = SCENARIOS[name]
    settled = (checks.one_token_is_unseen,) if properties == SETTLED else ()
    checks.exact(scenario, *ENDS, *settled)


@pytest.mark.parametrize(
    "check",
    [
        checks.tenants_share_nothing,
        checks.an_always_wrong_draft_gives_one_token_a_step,
        checks.an_oracle_gives_k_plus_one_tokens_a_step,
        checks.nothing_is_committed_beyond_an_end,
        stop_words_end_texts_ahead,
    ],
    ids=lambda check: check.__name__,
)
def test_it_holds_that(check):
    check()


def test_turns_follow_turns_in_flight_and_requests_are_pre_empted():
    """If nothing was, the scenarios would show nothing."""
    served = checks.exact(BUSY)
    rows = [row for *_, row in served.deployment.drafting.recorded]
    assert served.deployment.target.following > 40
    assert sum(row.on_device is not None for row in rows) > 20
    assert sum(row.to_verify is not None and row.on_device is None for row in rows) > 9
    assert sum(len(row.unused) for row in rows) > 20
    for scenario in (CRAMPED, CROWDED):
        assert checks.exact(scenario).deployment.counters()["spindle_preemptions_total",] > 0
    shared = checks.exact(ALIKE).deployment.counters()
    assert shared["spindle_kv_reused_tokens_total",] > 0


def test_a_text_follows_the_target_s_distribution():
    checks.texts_follow_the_target_s_distribution(checks.SHARP, ["other", "lookup"], rounds=600)


def test_rows_with_a_grammar_do_not_look_ahead():
    asks = tuple(replace(one, sampling=replace(one.sampling, guide=guide())) for one in GUIDED.asks)
    served = checks.exact(replace(GUIDED, asks=asks), checks.texts, checks.log_probs)
    assert served.deployment.target.following == 0
    mixed = replace(BUSY, asks=(*BUSY.asks, *asks[:3]))
    assert checks.exact(mixed, checks.texts).deployment.target.following > 40


@pytest.mark.parametrize("every", [3, 4, 7])
def test_passes_that_raise_change_no_text(monkeypatch, every):
    """With one submission in flight and with two."""
    passes = []

    def begin(engine, turns):
        passes.append(1)
        if len(passes) % every == 0:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(AheadEngine, "begin", begin)
    checks.exact(BUSY, checks.texts)
    assert len(passes) > 30


def test_a_submission_that_is_refused_changes_no_text(monkeypatch):
    submit, calls = AheadEngine.submit, []

    def refusing(engine, turns):
        calls.append(1)
        if len(calls) % 5 == 0:
            engine.submissions.clear()
            raise RuntimeError("out of memory")
        submit(engine, turns)

    monkeypatch.setattr(AheadEngine, "submit", refusing)
    checks.exact(BUSY, checks.texts)


def test_drafts_change_when_nothing_is_in_flight(monkeypatch):
    monkeypatch.setattr(test_changing_drafts, "Deployment", deployment)
    for before in (0, 1, 7):
        test_changing_drafts.test_texts_are_those_of_plain_decoding_and_a_sure_draft_is_right_from_its_first_proposal(
            before
        )
    made = deployment(tiny_engine(), [], Scripted())
    sessions = [
        (one, made.submit(PROMPTS[one.prompt], one.max_tokens, one.sampling))
        for one in BUSY.asks[:4]
    ]
    engines = [on_device(tiny_engine("near", seed=1, noise=0.05)), on_device(tiny_engine("twin"))]
    for step in range(8):
        in_flight = []
        policy = Scripted([(column, K_MAX) for column in range(-1, 1 + step % 2)])
        done = made.loop.between_steps(
            lambda chosen=engines[: 1 + step % 2], policy=policy, seen=in_flight: (
                seen.append(made.loop.in_flight),
                made.loop.draft_with(chosen, policy, policy.start()),
            )
        )
        while not done.done():
            made.step()
        assert done.result() is None
        assert in_flight == [0]
        made.step()
    made.run()
    for one, session in sessions:
        assert session.sequence.tokens == plain_text(one)


def world(**options):
    return World(FixedLength("draft0", 3), drafts=(0.9,), lookahead=1, **options)


def test_what_is_in_flight_when_a_client_leaves_is_dropped_and_its_blocks_are_given_back_once():
    made = world(blocks=40)
    gone, stays = made.submit("once upon", 60), made.submit("a time", 60)
    for _ in range(6):
        made.step()
    assert made.loop.in_flight == 1
    gone.cancelled = True
    made.run()
    assert gone.reason == ErrorCode.CANCELLED
    alone = World(FixedLength("draft0", 3), drafts=(0.9,), lookahead=0)
    text = alone.submit("a time", 60)
    alone.run()
    assert stays.text == text.text


def test_what_is_late_ends_with_turns_in_flight():
    clock = Clock()
    made = world(clock=clock, max_request_s=5.0)
    late = made.submit("once upon", 200)
    for _ in range(4):
        made.step()
    clock.now_s = 6.0
    made.run()
    assert late.reason == ErrorCode.UNAVAILABLE


def test_the_end_of_the_loop_drops_what_is_in_flight():
    made = world()
    sinks = [made.submit("once upon", 60), made.submit("a time", 60)]
    for _ in range(5):
        made.step()
    assert made.loop.in_flight == 1
    made.loop.abort(ErrorCode.UNAVAILABLE, "the server is shutting down")
    assert [sink.reason for sink in sinks] == [ErrorCode.UNAVAILABLE] * 2
    assert made.loop.in_flight == 0
    assert made.ledger.usage()["used"] == 0


def test_the_kill_switch_acts_between_two_steps_and_no_text_changes():
    target = {"engine": "tests.fakes.fake", "lookahead": 1}
    prompts = ["once upon a time", "there was", "a a a a a a a a"]

    def texts(app, *settings):
        sinks = [ask(app, prompt, 40) for prompt in prompts]
        for setting in settings:
            for _ in range(5):
                app.orchestrator.step()
            app.switches.set([setting])
        finish(app, *sinks)
        return [sink.text for sink in sinks], sum(sink.usage.drafted for sink in sinks)

    plain, _ = texts(fake_app())
    ahead, drafted = texts(fake_app(target=target))
    assert (ahead, drafted > 0) == (plain, True)
    switched, _ = texts(fake_app(target=target), "speculation=off", "speculation=on")
    assert switched == plain
    assert texts(fake_app(target=target, switches={"speculation": "off"})) == (plain, 0)


def test_no_second_of_a_step_is_counted_twice():
    """A pass of 20 ms, during which the loop commits, plans and drafts."""
    target = {"engine": "tests.fakes.fake", "lookahead": 1, "options": {"step_s": 0.02}}
    app = fake_app(target=target)
    sinks = [ask(app, prompt, 30) for prompt in ("once upon a time", "there was")]
    while not app.orchestrator.in_flight:
        app.orchestrator.step()
    outcomes, started_s = [], perf_counter()
    observe = app.orchestrator.cycle.runner.observe
    app.orchestrator.cycle.runner.observe = lambda one: (outcomes.append(one), observe(one))
    finish(app, *sinks)
    took_s = perf_counter() - started_s
    for outcome in outcomes:
        times = outcome.times
        engines_s = sum(
            s for part, s in times.parts_s.items() if part not in ("planning", "learning")
        )
        assert engines_s == pytest.approx(times.measured_s)
    assert sum(outcome.times.measured_s for outcome in outcomes) <= took_s + 0.05
    assert sum(o.times.parts_s["verify"] for o in outcomes) >= 0.02 * (len(outcomes) - 1)


def test_a_draft_that_fails_on_the_device_rests():
    made = World(FixedLength("draft0", 3), drafts=(1.0,), lookahead=1, clock=Clock())
    made.drafts[0].breaks = lambda turns: True
    sink = made.submit("once upon", 40)
    made.run()
    assert (sink.usage.output_tokens, sink.usage.drafted) == (40, 0)
    assert made.counters()["spindle_fallback_total", "target_error"] == 1


def test_a_policy_learns_from_a_step_with_the_view_of_that_step():
    """Rows whose drafts are on the host are in every second step."""
    seen, learnt, missing = [], [], []

    class Watching(RandomChoice):
        def plan(self, view, state, now, rng):
            seen.append(view)
            return super().plan(view, state, now, rng)

        def observe(self, outcome, state, now):
            if (view := outcome.view) is not None:
                drafted = outcome.rows.request[outcome.rows.length > 0]  # others may end a prompt
                learnt.append(view.request is seen[-1].request)
                missing.extend(set(drafted.tolist()) - set(view.request.tolist()))
            return state

    made = World(Watching(), drafts=(0.8, 0.8), lookahead=1)
    for number in range(5):
        made.submit(f"once upon {number}", 40)
    made.run()
    assert learnt.count(False) > 5
    assert missing == []
