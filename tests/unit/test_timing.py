import random

import pytest

from backend.engines.latency_cases import Case, blocks_for
from backend.engines.port import Completion, Turn
from backend.sequence import BLOCK_TOKENS
from engines_build.timing import Rig, interleave
from tests.fakes.clock import Clock
from tests.fakes.fake_engine import FakeEngine


class ClockedEngine(FakeEngine):
    """The fake engine with a price: a millisecond per pass and a microsecond per query token."""

    def __init__(self, clock, kv_blocks):
        super().__init__("timed", kv_blocks=kv_blocks)
        self.clock = clock

    def assume(self, sequence, tokens):
        super().submit([Turn(sequence, tokens, run=0)])
        self.poll(0.0)

    def submit(self, turns):
        self.submitted = [(self.unseen(turn.sequence), turn) for turn in turns]
        queries = sum(
            unseen + len(turn.proposal.tokens if turn.proposal else [])
            for unseen, turn in self.submitted
        )
        self.clock.now_s += 1e-3 * max(1, *(turn.run for turn in turns)) + 1e-6 * queries
        super().submit(turns)


def rig(cases):
    clock = Clock()
    return Rig(ClockedEngine(clock, blocks_for(cases)), random.Random(0), clock)


CASES = [
    Case(1, 32),
    Case(3, 32, length=4),
    Case(2, 32, new=40, run=0),
    Case(4, 16, run=6),
    Case(1, 500, new=300, run=0),
]


@pytest.mark.parametrize("case", CASES)
def test_only_the_submission_of_the_case_is_timed_every_time(case):
    timed = rig([case])
    for _ in range(3):
        assert timed.time(case) == pytest.approx(1e-3 * max(1, case.run) + 1e-6 * case.query_tokens)
        assert [(unseen, turn.run, turn.end) for unseen, turn in timed.engine.submitted] == [
            (case.new, case.run, case.context + case.new)
        ] * case.rows
    assert timed.engine.texts == {}


def test_rows_have_block_tables_of_their_own_that_fit_the_pool():
    timed = rig(CASES)
    for case in CASES:
        timed.time(case)
        tables = [turn.sequence.blocks["timed"] for _, turn in timed.engine.submitted]
        blocks = [block for table in tables for block in table]
        assert len(blocks) == len(set(blocks))
        assert max(blocks) < blocks_for(CASES)
        assert len(tables[0]) * BLOCK_TOKENS >= case.context + case.new + case.length + case.run


def test_a_failing_turn_is_an_error_that_names_the_engine():
    timed = rig([Case(1, 8)])
    timed.engine.poll = lambda timeout_s: [Completion(0, [], error="out of memory")]
    with pytest.raises(RuntimeError, match="'timed': out of memory"):
        timed.time(Case(1, 8))


def run(budget_s, **options):
    clock, reports, order = Clock(), [], []

    def piece(name, seconds):
        def work():
            order.append(name)
            clock.now_s += seconds
            return seconds

        return work

    work = [piece("a", 1.0), piece("b", 2.0)]
    samples = interleave(
        work,
        budget_s=budget_s,
        rng=random.Random(0),
        report=lambda *seconds: reports.append(seconds),
        clock=clock,
        **options,
    )
    return samples, reports, order


def test_every_piece_runs_once_a_round_and_the_first_round_is_dropped():
    samples, _, order = run(1000.0, most=5)
    assert samples == [[1.0] * 5, [2.0] * 5]
    assert [set(order[i : i + 2]) for i in range(0, 12, 2)] == [{"a", "b"}] * 6
    assert order != ["a", "b"] * 6


@pytest.mark.parametrize(
    ("budget_s", "rounds", "expected_s"), [(1000.0, 6, 18.0), (0.0, 4, 12.0), (15.5, 5, 15.5)]
)
def test_it_says_how_far_it_is_after_every_piece(budget_s, rounds, expected_s):
    _, reports, _ = run(budget_s, least=3, most=5)
    assert len(reports) == 2 * rounds
    assert [done_s for done_s, _ in reports] == sorted(done_s for done_s, _ in reports)
    assert {all_s for _, all_s in reports[2:]} == {
        expected_s
    }  # the first round knows only the budget


@pytest.mark.parametrize(("budget_s", "kept"), [(0.0, 3), (14.0, 3), (15.0, 4), (20.0, 5)])
def test_the_budget_ends_the_rounds_but_never_before_the_least(budget_s, kept):
    assert len(run(budget_s, least=3, most=50)[0][0]) == kept
