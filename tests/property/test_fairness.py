"""Whatever arrives and however small the KV cache: every request ends with its own text, in a
bounded number of steps, oldest first.
"""

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.request import ErrorCode
from backend.sequence import BLOCK_TOKENS
from policy import NoSpeculation, RandomChoice
from tests.fakes.loop import World

K_MAX = 4


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt_tokens: int
    max_tokens: int
    temperature: float
    cancel_after: int | None = None

    @property
    def life(self):
        return self.prompt_tokens + self.max_tokens


def small_world(blocks, **options):
    """A loop that runs into every limit."""
    options = {"max_active": 64, "chunk": 64, "growth_blocks": 0} | options
    return World(drafts=(0.9, 0.4), blocks=blocks, k_max=K_MAX, **options)


def start(world, arrival, number):
    """Submit a request with one of two beginnings."""
    prompt = [97 + (number % 2 * 7 + i * i) % 26 for i in range(arrival.prompt_tokens)]
    return world.start(prompt, arrival.max_tokens, arrival.temperature, end_ids=(), seed=number)


def preemptions(world):
    return world.counters().get(("spindle_preemptions_total",), 0)


def serve(world, arrivals):
    """Submit each arrival at its step and run to the end; return the sessions."""
    sessions, waiting = [], sorted(arrivals, key=lambda arrival: arrival.step)
    while True:
        while waiting and waiting[0].step <= world.steps:
            arrival = waiting.pop(0)
            session = start(world, arrival, len(sessions) + 1)
            sessions.append((session, arrival.cancel_after))
        for session, cancel_after in sessions:
            if (
                cancel_after is not None
                and session.output_tokens >= cancel_after
                and not session.sink.ends
            ):
                session.sink.cancelled = True
        worked = world.step()
        assert worked or not world.loop.counts()[1]
        if not worked and not waiting:
            return [session for session, _ in sessions]


def plain(arrivals, blocks=10_000):
    whole = [replace(arrival, cancel_after=None) for arrival in arrivals]
    world = small_world(blocks, policy=NoSpeculation())
    return [session.sink.text for session in serve(world, whole)]


def bound(arrivals, chunk):
    """Steps that suffice: each request in turn is the oldest and, at worst, then starts with a
    prefill of all it has.
    """
    return (
        max(a.step for a in arrivals)
        + 1
        + sum(-(-a.life // chunk) + a.max_tokens + 1 for a in arrivals)
    )


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt_tokens=st.integers(1, 70),
        max_tokens=st.integers(1, 60),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        cancel_after=st.sampled_from([None, None, None, 0, 5]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.medium
@settings(max_examples=25)
@given(
    arrivals=ARRIVALS,
    extra_blocks=st.integers(0, 20),
    max_active=st.integers(1, 12),
    chunk=st.integers(4, 64),
    guaranteed=st.booleans(),
    growth_blocks=st.integers(0, 4),
    speculate=st.booleans(),
    reuse=st.booleans(),
    lookahead=st.integers(0, 1),
)
@example(  # cancelled before its first step, which would have been its last
    arrivals=[Arrival(0, 1, 1, 0.0, cancel_after=0)],
    extra_blocks=0,
    max_active=1,
    chunk=4,
    guaranteed=False,
    growth_blocks=0,
    speculate=False,
    reuse=False,
    lookahead=0,
)
def test_every_request_ends_in_bounded_steps_and_no_greedy_text_changes(
    arrivals,
    extra_blocks,
    max_active,
    chunk,
    guaranteed,
    growth_blocks,
    speculate,
    reuse,
    lookahead,
):
    headroom = (K_MAX + 1) * (1 + lookahead)
    blocks = -(-(max(a.life for a in arrivals) + headroom) // BLOCK_TOKENS) + extra_blocks
    world = small_world(
        blocks,
        max_active=max_active,
        chunk=chunk,
        policy=RandomChoice() if speculate else NoSpeculation(),
        guaranteed=guaranteed,
        growth_blocks=growth_blocks,
        reuse=reuse,
        lookahead=lookahead,
    )
    sessions = serve(world, arrivals)
    # a step may only submit, and a row that waits takes part in every second one
    assert world.steps <= (1 + lookahead) * bound(arrivals, chunk) + 5 * lookahead
    usage = world.ledger.usage()
    assert (usage["used"], usage["free"]) == (0, blocks)
    assert reuse or not usage["cached"]
    assert not guaranteed or not preemptions(world)
    arrivals = sorted(arrivals, key=lambda arrival: arrival.step)
    for session, arrival, text in zip(sessions, arrivals, plain(arrivals), strict=True):
        assert len(session.sink.ends) == 1
        if session.sink.cancelled:
            assert session.sink.ends[0][0] == ErrorCode.CANCELLED
        else:
            assert session.sink.ends[0][0] == "length"
            assert session.sink.text == text or (
                speculate and arrival.temperature > 0
            )  # a plan may change what is drawn, not its distribution


def test_requests_that_fit_only_one_by_one_are_preempted_and_resumed_without_a_change():
    arrivals = [Arrival(0, 20, 120, temperature) for temperature in (0.0, 0.8) * 4]
    small, ample = (
        small_world(blocks=24, policy=NoSpeculation()),
        small_world(blocks=1000, policy=NoSpeculation()),
    )
    texts = [session.sink.text for session in serve(small, arrivals)]
    assert texts == [session.sink.text for session in serve(ample, arrivals)]
    assert preemptions(small) >= 4
    assert preemptions(ample) == 0
