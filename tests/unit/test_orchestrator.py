"""The loop over fake engines: one final reply each, whatever fails, and text that no plan
changes.
"""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from backend.engines.port import EngineLostError
from backend.request import ErrorCode
from backend.speculation.drafting import SCORED_EVERY
from policy import NoSpeculation, Plan, RandomChoice
from policy.custom import CheckedPolicy
from tests.fakes.clock import Clock
from tests.fakes.loop import World


class Recorded(RandomChoice):
    """A random policy that keeps its last outcome."""

    def observe(self, outcome, state, now):
        self.last = outcome
        return state


@pytest.fixture(scope="module", params=[0, 1], ids=["step by step", "looking ahead"], autouse=True)
def lookahead(request):
    """Every test holds however many submissions the target takes."""
    World.lookahead = request.param
    yield
    World.lookahead = 0


def plain_text(prompt, max_tokens=20):
    world = World(NoSpeculation(), drafts=(), lookahead=0)
    sink = world.submit(prompt, max_tokens)
    world.run()
    return sink.text


def test_no_reply_waits_while_an_engine_works_or_nothing_is_left():
    world, holds, working = World(), [False], []
    world.loop.hold_replies = holds.append

    def watched(poll):
        def watch(timeout_s):
            working.append(holds[-1])
            return poll(timeout_s)

        return watch

    for engine in (world.target, *world.drafts):
        engine.poll = watched(engine.poll)
    world.submit("one", 30)
    world.submit("another", 5)
    world.run()
    assert any(holds), "every reply wakes another thread"
    assert working
    assert not any(working)
    assert not holds[-1]


def test_a_loop_that_ends_lets_its_last_replies_go():
    world, holds, stop = World(), [], threading.Event()
    world.loop.hold_replies = holds.append
    sink = world.submit("one", 30)
    while not (holds and holds[-1]):
        world.step()
    stop.set()
    world.loop.run(stop)
    assert sink.has_ended
    assert not holds[-1]


@pytest.mark.parametrize("needs", [True, False])
def test_drafts_are_asked_where_the_policy_needs_it_and_free_ones_now_and_then(needs):
    seen, asked = [], []

    class Watching(NoSpeculation):
        def needs_ceilings(self, request, state):
            asked.append(request.tolist())
            return needs

        def plan(self, view, state, now, rng):
            seen.append(
                (view.request.tolist(), view.ceiling.sum(0).tolist(), view.catchup.sum(0).tolist())
            )
            return super().plan(view, state, now, rng)

        def observe(self, outcome, state, now):
            assert set(outcome.free.draft.tolist()) <= {1}
            self.scored = getattr(self, "scored", 0) + int(outcome.free.scored.sum())

    world = World(policy := Watching())
    world.drafts[1].limits = replace(world.drafts[1].limits, free=True)
    world.submit("prompt", 2 * SCORED_EVERY)
    world.run()
    decoded = [view for view in seen if view[0]]
    assert asked == [request for request, _, _ in seen]
    assert all((ceiling[0] > 0 and catchup[0] > 0) == needs for _, ceiling, catchup in decoded[:-1])
    free = [ceiling[1] > 0 for _, ceiling, _ in decoded[:-1]]
    calls = [place for place, view in enumerate(seen) if view[0]][:-1]
    assert free == [needs or place % SCORED_EVERY == 0 for place in calls]
    assert policy.scored > 0


def test_the_policy_sees_what_drafts_show_and_learns_it_with_what_they_did():
    prompt, drafts, free, planned = "a prompt", 0, 0, set()
    text = {1: len(prompt), 2: len(prompt)}

    class Watching(RandomChoice):
        def plan(self, view, state, now, rng):
            by_text = np.where(view.ceiling[:, 1] > 0, view.context % 12, 0)
            assert view.evidence[:, 1].tolist() == by_text.tolist()
            assert view.evidence[:, 0].tolist() == by_text.tolist()  # it shows nothing of its own
            planned.update(zip(view.request.tolist(), by_text.tolist(), strict=True))
            return super().plan(view, state, now, rng)

        def observe(self, outcome, state, now):
            nonlocal drafts, free
            rows, chains = outcome.rows, outcome.free
            for request, draft, shown in zip(
                rows.request.tolist(), rows.draft.tolist(), rows.evidence.tolist(), strict=True
            ):
                assert draft == 0 or shown == (text[request] % 12 if draft == 1 else 0)
                assert draft != 0 or (request, shown) in planned
                drafts += draft == 1
            for request, draft, shown in zip(
                chains.request.tolist(), chains.draft.tolist(), chains.evidence, strict=True
            ):
                assert (draft, shown) == (1, text[request] % 12)
                free += 1
            for request, emitted in zip(rows.request.tolist(), rows.emitted.tolist(), strict=True):
                text[request] += emitted
            return state

    world, policy = World(), Watching()
    world.drafts[1].limits = replace(world.drafts[1].limits, free=True)
    world.drafts[1].evidence = lambda sequence: len(sequence.tokens) % 12
    world.loop.cycle.change(world.drafts, policy, policy.start())
    for _ in range(2):
        world.submit(prompt, 40)
    world.run()
    assert drafts > 2
    assert free > 2


def test_the_policy_sees_how_many_wait_for_the_end_of_their_prompts():
    seen = []

    class Watching(NoSpeculation):
        def plan(self, view, state, now, rng):
            seen.append((len(view), view.prefill_tokens, view.prefilling))
            return super().plan(view, state, now, rng)

    world = World(Watching(), drafts=(), chunk=7)
    for _ in range(2):
        world.submit("ten tokens", 2)
    world.run()
    assert seen == [(0, 7, 2), (0, 7, 2), (1, 6, 1), (1, 0, 0)]


@pytest.mark.parametrize("width", [None, (5, 3)])
def test_the_policy_sees_how_wide_the_last_pass_was_where_that_matters(width):
    seen = set()

    class Watching(NoSpeculation):
        def plan(self, view, state, now, rng):
            seen.add((view.pass_tokens, view.change_tokens))
            return super().plan(view, state, now, rng)

    world = World(Watching(), drafts=())
    if width is not None:
        world.target.width = lambda: width
    world.submit("a prompt", 3)
    world.run()
    assert seen == {width or (0, 0)}


def test_usage_counts_what_was_drafted_and_accepted():
    world = World(drafts=(1.0,))
    sink = world.submit("a prompt", 40)
    world.run()
    usage = sink.ends[0][1]
    assert (usage.input_tokens, usage.output_tokens) == (8, 40)
    assert usage.drafted >= usage.accepted > 10
    if not World.lookahead:  # on the device it proposes trees
        assert usage.drafted == usage.accepted
    counters = world.counters()
    assert counters["spindle_accepted_tokens_total", "planner", "draft0"] == usage.accepted
    assert counters["spindle_requests_total", "success"] == 1


def test_num_draft_tokens_is_a_ceiling_and_zero_means_none():
    world = World(drafts=(1.0,))
    none, two = (
        world.submit("first", num_draft_tokens=0),
        world.submit("second", num_draft_tokens=2),
    )
    world.run()
    assert none.ends[0][1].drafted == 0
    assert two.ends[0][1].drafted > 0
    positions = {
        key[2] for key in world.counters() if key[0] == "spindle_draft_tokens_by_position_total"
    }
    assert positions <= {"1", "2"}


@pytest.mark.parametrize(
    ("prompt", "steps"), [("x" * 60, 2), ("abc", 5)], ids=["prefill", "decode"]
)
def test_a_cancelled_request_ends_once_and_its_kv_is_free_within_a_step(prompt, steps):
    world = World()
    sink = world.submit(prompt, 1000)
    for _ in range(steps):
        world.step()
    assert bool(sink.text) == (prompt == "abc")
    assert world.ledger.usage()["used"] > 0
    sink.cancelled = True
    world.step()
    assert sink.ends == [(ErrorCode.CANCELLED, "Request cancelled by client")]
    assert world.ledger.usage()["used"] == 0


def test_a_request_cancelled_in_the_queue_ends_there_and_the_others_go_on():
    world = World(max_active=1)
    first, queued, last = (world.submit(prompt, 50) for prompt in ("abc", "def", "ghi"))
    world.step()
    queued.cancelled = True
    world.step()
    assert queued.ends == [(ErrorCode.CANCELLED, "Request cancelled by client")]
    world.run()
    assert [sink.ends[0][0] for sink in (first, last)] == ["length", "length"]


def test_a_request_that_lives_too_long_ends_wherever_it_is():
    clock = Clock()
    world = World(max_active=1, max_request_s=60, clock=clock)
    old = [world.submit("abc", 1000), world.submit("def", 1000)]
    world.step()
    clock.now_s = 60.0
    young = world.submit("ghi")
    world.step()
    assert [sink.ends for sink in old] == [[], []]
    clock.now_s = 60.1
    world.step()
    assert [sink.ends for sink in old] == [
        [(ErrorCode.UNAVAILABLE, "the request has not ended within limits.max_request_s, 60 s")]
    ] * 2
    world.run()
    assert young.text == plain_text("ghi")


def test_a_full_queue_and_an_impossible_request_are_refused_with_a_reply():
    world = World(max_active=1, max_queued=1, blocks=8)
    too_long = world.submit("x" * 100, 500)
    running, waiting, refused = world.submit("a"), world.submit("b"), world.submit("c")
    world.run()
    assert too_long.ends[0][0] is ErrorCode.INVALID_ARGUMENT
    assert "500" in too_long.ends[0][1]
    outcomes = [sink.ends[0][0] for sink in (running, waiting, refused)]
    assert outcomes == [
        "length",
        "length",
        ErrorCode.UNAVAILABLE,
    ]  # one place to run in, one to wait in


@pytest.mark.parametrize("culprit", [1, 4, 7])
def test_of_a_batch_that_the_target_cannot_run_only_the_culprit_fails(culprit):
    world = World()
    sinks = {i: world.submit(f"prompt {i}", 10) for i in range(1, 8)}
    world.step()
    world.target.breaks = lambda turns: any(turn.sequence.id == culprit for turn in turns)
    world.run()
    assert sinks.pop(culprit).ends == [(ErrorCode.INTERNAL, "the engine failed (MemoryError)")]
    assert [sink.text for sink in sinks.values()] == [plain_text(f"prompt {i}", 10) for i in sinks]
    # all 7 turns twice, then halves; and what the device had begun to run ahead
    assert len(world.target.failed) <= 5 + world.target.limits.lookahead
    assert world.counters()["spindle_fallback_total", "target_error"] == 1


@pytest.mark.parametrize("submissions", [{3}, {2, 4, 5, 9}])
def test_a_target_that_raises_now_and_then_costs_no_request_a_token(submissions):
    world, count = World(), itertools.count()
    world.target.breaks = lambda turns: next(count) in submissions
    sinks = [world.submit(prompt) for prompt in ("abc", "defghijklmnop", "x")]
    world.run()
    assert [sink.text for sink in sinks] == [
        plain_text(prompt) for prompt in ("abc", "defghijklmnop", "x")
    ]


def test_proposals_that_the_target_cannot_run_are_dropped_and_not_counted():
    world = World(drafts=(1.0,))
    world.target.breaks = lambda turns: any(t.proposal or t.device_proposal for t in turns)
    sink = world.submit("abc")
    world.run()
    assert sink.text == plain_text("abc")
    assert sink.ends[0][1].drafted == 0
    assert world.counters()["spindle_fallback_total", "target_error"] > 0


def test_a_target_that_fails_for_good_ends_the_loop_after_the_third_time():
    world = World(max_active=1)
    world.target.breaks = lambda turns: True
    sinks = [world.submit("abc") for _ in range(6)]
    world.loop.run(threading.Event())
    ends = [sink.ends for sink in sinks]
    assert ends[:3] == [[(ErrorCode.INTERNAL, "the engine failed (MemoryError)")]] * 3
    assert (
        ends[3:]
        == [[(ErrorCode.UNAVAILABLE, "the engine keeps failing: it is being restarted")]] * 3
    )
    assert world.ledger.usage()["used"] == 0


def test_a_target_that_is_lost_ends_the_loop_at_once_with_one_reply_each():
    world = World(max_active=2)

    def lose(turns):
        raise EngineLostError("target: CUDA's context is broken")

    sinks = [world.submit("abc") for _ in range(4)]
    world.step()
    world.target.breaks = lose
    world.loop.run(threading.Event())
    reason = "the engine keeps failing: it is being restarted"
    assert [sink.ends for sink in sinks] == [[(ErrorCode.UNAVAILABLE, reason)]] * 4
    assert ("spindle_fallback_total", "target_error") not in world.counters()
    assert world.ledger.usage()["used"] == 0


def test_a_culprit_that_comes_back_among_others_does_not_end_the_loop():
    world = World(max_active=2)
    world.target.breaks = lambda turns: any(
        bytes(turn.sequence.tokens[:3]) == b"bad" for turn in turns
    )
    stop = threading.Event()
    sinks = [world.submit(prompt, 5) for prompt in ("good", *["bad"] * 8, "also good")]
    sinks[-1].on_end = stop.set
    world.loop.run(stop)
    assert [sink.ends[0][0] for sink in sinks] == ["length", *[ErrorCode.INTERNAL] * 8, "length"]


def test_a_request_whose_tokens_cannot_be_taken_ends_alone(monkeypatch):
    world = World()
    broken, fine = world.start("abc"), world.submit("def")
    world.step()
    monkeypatch.setattr(broken, "commit", lambda *_: 1 / 0)
    world.run()
    assert broken.sink.ends == [
        (ErrorCode.INTERNAL, "the request could not be continued (ZeroDivisionError)")
    ]
    assert fine.text == plain_text("def")


def test_a_failing_draft_costs_speculation_only():
    world = World(drafts=(1.0,))
    world.drafts[0].breaks = lambda turns: True
    sink = world.submit("abc")
    world.run()
    assert sink.text == plain_text("abc")
    fails = "target_error" if World.lookahead else "draft_error"  # on the device all fails
    assert world.counters()["spindle_fallback_total", fails] >= 1


def test_a_turn_that_fails_alone_ends_its_request_only():
    world = World()
    broken, fine = world.start("abc"), world.submit("def")
    world.step()
    broken.sequence.blocks.clear()
    while not broken.sink.ends:
        world.loop.step()
    assert "block table" in broken.sink.ends[0][1]
    world.run()
    assert fine.text == plain_text("def")


@pytest.mark.parametrize("method", ["plan", "observe", "needs_ceilings", "drift"])
def test_whatever_of_a_policy_fails_in_every_step_no_request_does(method):
    broken = type("Broken", (RandomChoice,), {method: lambda *_: 1 / 0})
    world = World(broken())
    sinks = [world.submit("abc"), world.submit("def", 5)]
    world.run()
    assert [sink.text for sink in sinks] == [plain_text("abc"), plain_text("def", 5)]
    assert world.counters()["spindle_fallback_total", "policy_error"] > 0


def test_a_plan_that_cannot_be_followed_is_not_and_its_policy_is_named_once_in_a_while(caplog):
    class Greedy(RandomChoice):
        def plan(self, view, state, now, rng):
            return Plan(np.zeros(len(view), np.int64), np.full(len(view), 99)), state

    ticks = Clock(tick_s=0.01)  # two lines are 10 s apart, 1,000 ticks
    world = World(CheckedPolicy("my_package.Greedy", Greedy()), clock=ticks)
    sink = world.submit("abc")
    world.run()
    assert sink.text == plain_text("abc")
    failures = world.counters()["spindle_fallback_total", "policy_error"]
    lines = [record for record in caplog.records if "the policy failed" in record.message]
    assert len(lines) == 1 < failures
    assert "this step does not speculate" in lines[0].message
    assert str(lines[0].exc_info[1]) == (
        "my_package.Greedy.plan: length[0] must be 0 to 8, its ceiling, got 99"
    )


def test_abort_ends_everything_once():
    world = World(max_active=1)
    sinks = [world.submit("abc", 500), world.submit("def"), world.submit("ghi")]
    world.step()
    sinks.append(world.submit("jkl"))
    world.loop.abort(ErrorCode.UNAVAILABLE, "the server is shutting down")
    assert [sink.ends for sink in sinks] == [
        [(ErrorCode.UNAVAILABLE, "the server is shutting down")]
    ] * 4
    world.run()


def test_evidence_after_an_end_of_text_is_not_scored():
    policy = Recorded()
    world = World(policy, drafts=(1.0,))
    sink = world.submit("abc", 30, stop_words=(plain_text("abc", 30)[10:13],))
    world.run()
    assert sink.ends[0][0] == "stop_words"
    last = policy.last
    assert (last.rows.scored <= last.rows.length).all()
    assert (last.rows.accepted <= last.rows.scored).all()
    assert last.finished.tolist() == [1]


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_adversarial_and_oracle_drafts_move_speed_only(agreement):
    class Four(RandomChoice):
        def plan(self, view, state, now, rng):
            length = np.minimum(view.ceiling[:, 0], 4) if len(view) else np.zeros(0, np.int64)
            return Plan(np.where(length > 0, 0, -1), length), state

    world = World(Four(), drafts=(agreement,))
    sink = world.submit("abcdefgh", 41)
    world.run()
    assert sink.text == plain_text("abcdefgh", 41)
    steps = world.counters()["spindle_steps_total",]
    if agreement == 1.0 and not World.lookahead:  # on the device it proposes trees
        assert (
            steps == 2 + 8
        )  # prefill in two chunks (the second emits one token), then five tokens a step
    elif agreement == 1.0:
        assert 2 + 8 <= steps < 20
    else:
        assert steps > 30
