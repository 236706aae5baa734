import random

import pytest

from backend.engines.fake import FakeEngine
from backend.ports import BLOCK_TOKENS, Completion
from engines_build.timing import Case, Rig, blocks_for, blocks_of, interleave


class Clock:
    """A clock that only the engine below moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class ClockedEngine(FakeEngine):
    """The fake engine with a price: a millisecond per pass and a microsecond per query token."""

    def __init__(self, clock, kv_blocks):
        super().__init__("timed", kv_blocks=kv_blocks)
        self.clock = clock
        self.turns = []

    def submit(self, turns):
        self.turns.append([(turn.end, self.unseen(turn.sequence), turn) for turn in turns])
        queries = sum(self.unseen(turn.sequence) + len(turn.proposal.tokens if turn.proposal else []) for turn in turns)
        self.clock.now += 1e-3 * max(1, *(turn.run for turn in turns)) + 1e-6 * queries
        super().submit(turns)


def rig(cases, clock=None):
    clock = clock or Clock()
    return Rig(ClockedEngine(clock, blocks_for(cases)), random.Random(0), clock)


@pytest.mark.parametrize(
    "case",
    [Case(1, 32), Case(3, 32, length=4), Case(2, 32, new=40, run=0), Case(4, 16, run=6, keep_probs=True), Case(1, 8, new=300, run=0)],
)
def test_only_the_submission_of_the_case_is_timed_every_time(case):
    timed = rig([case])
    for _ in range(30):
        seconds, context = timed.time(case)
        assert seconds == pytest.approx(1e-3 * max(1, case.run) + 1e-6 * case.query_tokens)
        assert case.context <= context <= 1.5 * case.context + 2 * case.new
        last = timed.engine.turns[-1]
        assert [(unseen, turn.run, turn.keep_probs) for _, unseen, turn in last] == [(case.new, case.run, case.keep_probs)] * case.rows


def test_cases_of_one_context_share_their_sequences_and_tables_never_overlap():
    cases = [Case(1, 32), Case(4, 32, length=2), Case(2, 64)]
    timed = rig(cases)
    for _ in range(40):
        for case in cases:
            timed.time(case)
    sequences = [sequence for pool in timed._pools.values() for sequence in pool]
    assert len(sequences) == 6
    blocks = [block for sequence in sequences for block in sequence.blocks["timed"]]
    assert len(blocks) == len(set(blocks)) == blocks_for(cases)
    assert max(blocks) < blocks_for(cases)


def test_a_block_table_has_room_for_growth():
    assert blocks_of(64) * BLOCK_TOKENS >= 64 * 1.5 + 512
    with pytest.raises(ValueError, match="at most 512 tokens"):
        Case(1, 64, new=513)


def test_a_failing_turn_is_an_error_that_names_the_engine():
    timed = rig([Case(1, 8)])
    timed.engine.poll = lambda timeout_s: [Completion(0, [], error="out of memory")]
    with pytest.raises(RuntimeError, match="'timed': out of memory"):
        timed.time(Case(1, 8))


def run(budget_s, **options):
    cases = [Case(1, 16), Case(8, 16)]
    clock, rounds = Clock(), []
    timed = rig(cases, clock)
    samples = interleave(
        [(timed, case) for case in cases], budget_s=budget_s, rng=random.Random(0), report=rounds.append, clock=clock, **options
    )
    return samples, rounds


def test_every_case_is_timed_once_a_round_and_the_first_round_is_dropped():
    samples, rounds = run(10.0, most=5)
    assert [len(sample.seconds) for sample in samples] == [5, 5]
    assert rounds == [0, 1, 2, 3, 4, 5]
    assert samples[1].median_s - samples[0].median_s == pytest.approx(7e-6)


def test_the_budget_ends_the_rounds_but_never_before_the_least():
    assert len(run(0.0, least=3, most=50)[0][0].seconds) == 3
    assert 3 < len(run(0.05, least=3, most=50)[0][0].seconds) < 50
