"""Whatever arrives and however small the KV cache: every request ends with its own text, in a
bounded number of steps, oldest first.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engines.fake import FakeEngine
from backend.ops.stats import Stats, StepStats
from backend.request import ErrorCode, GenerationRequest, SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from backend.speculation.drafting import Drafting
from policy import NoSpeculation, RandomChoice

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


class Sink:
    def __init__(self):
        self.cancelled, self.text, self.ends = False, "", []

    def chunk(self, delta):
        assert not self.ends
        self.text += delta.text

    def final(self, delta, reason, usage):
        self.text += delta.text
        self.ends.append(reason.value)

    def error(self, code, message):
        self.ends.append(code)


class Bytes:
    def push(self, token_id):
        return chr(token_id)

    def finish(self):
        return ""


class World:
    """A loop over fake engines whose KV pools notice a slot that holds another text."""

    def __init__(
        self,
        blocks,
        max_active=64,
        chunk=64,
        policy=None,
        guaranteed=False,
        growth_blocks=0,
        reuse=True,
    ):
        agreements = {"target": 1.0, "good": 0.9, "bad": 0.4}
        engines = [
            FakeEngine(name, seed=i, agreement=a, kv_blocks=blocks)
            for i, (name, a) in enumerate(agreements.items())
        ]
        self.stats, self.ids, self.steps = Stats(), itertools.count(1), 0
        stats, clock = StepStats(self.stats), itertools.count().__next__
        pools = {engine.name: blocks for engine in engines}
        target = engines[0] if reuse else None
        self.ledger = KVLedger(
            pools, K_MAX + 1, guaranteed=guaranteed, growth_blocks=growth_blocks, target=target
        )
        self.admission = Admission(self.ledger, max_active, 1000)
        self.loop = Orchestrator(
            engines[0],
            Drafting(engines[1:], stats, clock),
            policy or RandomChoice(),
            self.ledger,
            self.admission,
            stats,
            clock,
            k_max=K_MAX,
            prefill_chunk_tokens=chunk,
        )

    def submit(self, arrival):
        number = next(self.ids)
        tokens = [
            97 + (number % 2 * 7 + i * i) % 26 for i in range(arrival.prompt_tokens)
        ]  # one of two beginnings
        sampling = SamplingParams(arrival.temperature, seed=number)
        request = GenerationRequest("", arrival.max_tokens, stream=True)
        session = Session(
            Sequence(number, tokens, len(tokens), sampling), request, frozenset(), Bytes(), Sink()
        )
        self.loop.submit(session)
        return session

    def step(self):
        """Take a step and check what must hold behind every one; return whether there was anything
        to do.
        """
        worked = self.loop.step()
        self.steps += 1
        active = list(self.loop._active.values())
        order = [session.id for session in [*active, *self.admission._queue]]
        assert order == sorted(order)
        assert worked or not len(self.admission)
        tables = [session.sequence.blocks["target"] for session in active]
        assert self.ledger.usage()["used"] == len(
            {block for table in tables for block in table}
        )  # who is gone holds nothing
        assert not any(session.sequence.blocks for session in self.admission._queue)
        return worked

    def preemptions(self):
        return sum(
            value
            for name, _, value in self.stats.drain().counters
            if name == "spindle_preemptions_total"
        )


def serve(world, arrivals):
    """Submit each arrival at its step and run to the end; return the sessions."""
    sessions, waiting = [], sorted(arrivals, key=lambda arrival: arrival.step)
    while True:
        while waiting and waiting[0].step <= world.steps:
            sessions.append((world.submit(waiting[0]), waiting[0].cancel_after))
            waiting.pop(0)
        for session, cancel_after in sessions:
            if (
                cancel_after is not None
                and session.output_tokens >= cancel_after
                and not session.sink.ends
            ):
                session.sink.cancelled = True
        if not world.step() and not waiting:
            return [session for session, _ in sessions]


def plain(arrivals, blocks=10_000):
    whole = [replace(arrival, cancel_after=None) for arrival in arrivals]
    return [session.sink.text for session in serve(World(blocks, policy=NoSpeculation()), whole)]


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
@settings(max_examples=100, deadline=None)
@given(
    arrivals=ARRIVALS,
    extra_blocks=st.integers(0, 20),
    max_active=st.integers(1, 12),
    chunk=st.integers(4, 64),
    guaranteed=st.booleans(),
    growth_blocks=st.integers(0, 4),
    speculate=st.booleans(),
    reuse=st.booleans(),
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
)
def test_every_request_ends_in_bounded_steps_and_no_greedy_text_changes(
    arrivals, extra_blocks, max_active, chunk, guaranteed, growth_blocks, speculate, reuse
):
    blocks = -(-(max(a.life for a in arrivals) + K_MAX + 1) // BLOCK_TOKENS) + extra_blocks
    world = World(
        blocks,
        max_active,
        chunk,
        RandomChoice() if speculate else NoSpeculation(),
        guaranteed,
        growth_blocks,
        reuse,
    )
    sessions = serve(world, arrivals)
    assert world.steps <= bound(arrivals, chunk)
    usage = world.ledger.usage()
    assert (usage["used"], usage["free"]) == (0, blocks)
    assert reuse or not usage["cached"]
    assert not guaranteed or not world.preemptions()
    arrivals = sorted(arrivals, key=lambda arrival: arrival.step)
    for session, arrival, text in zip(sessions, arrivals, plain(arrivals), strict=True):
        assert len(session.sink.ends) == 1
        if session.sink.cancelled:
            assert session.sink.ends == [ErrorCode.CANCELLED]
        else:
            assert session.sink.ends == ["length"]
            assert session.sink.text == text or (
                speculate and arrival.temperature > 0
            )  # a plan may change what is drawn, not its law


def test_requests_that_fit_only_one_by_one_are_preempted_and_resumed_without_a_change():
    arrivals = [Arrival(0, 20, 120, temperature) for temperature in (0.0, 0.8) * 4]
    small, ample = (
        World(blocks=24, policy=NoSpeculation()),
        World(blocks=1000, policy=NoSpeculation()),
    )
    texts = [session.sink.text for session in serve(small, arrivals)]
    assert texts == [session.sink.text for session in serve(ample, arrivals)]
    assert small.preemptions() >= 4
    assert ample.preemptions() == 0
