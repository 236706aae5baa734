"""A draft that takes states of every pass, and is hardly ever chosen, stops taking them."""

import itertools

from backend.engines.port import EngineLimits, HiddenStates
from backend.ops.stats import Stats, StepStats
from backend.request import SamplingParams
from backend.sequence import Sequence
from backend.speculation.drafting import Drafting
from backend.speculation.sleeping import LEAST_SHARE, SLEEP_AFTER_STEPS, WAKE_AFTER_STEPS, Sleep
from backend.speculation.step_log import StepLog


def steps_awake(sleep, rows=4):
    return next(step for step in itertools.count() if not sleep.takes(rows))


def test_it_sleeps_after_many_steps_without_a_proposal_and_wakes_to_be_tried():
    sleep = Sleep("eagle")
    assert steps_awake(sleep) == SLEEP_AFTER_STEPS
    asleep = next(step for step in itertools.count(1) if sleep.takes(4))
    assert asleep == WAKE_AFTER_STEPS
    assert steps_awake(sleep) == SLEEP_AFTER_STEPS


def test_a_draft_that_proposes_now_and_then_stays_awake():
    sleep = Sleep("eagle")
    for step in range(3 * SLEEP_AFTER_STEPS):
        if step % int(0.9 / LEAST_SHARE) == 0:
            sleep.proposed()
        assert sleep.takes(4)


def test_a_batch_of_half_the_rows_wakes_it():
    sleep = Sleep("eagle")
    steps_awake(sleep, rows=16)
    assert not sleep.takes(9)
    assert sleep.takes(8)


class Reader:
    """A draft that counts what it takes."""

    taken = 0

    def __init__(self, name, kv_blocks):
        self.name, self.limits = name, EngineLimits(9, 99, 4, 4, kv_blocks)

    def absorb(self, states):
        self.taken += len(states)


def test_only_drafts_that_keep_kv_sleep():
    readers = [Reader("eagle", kv_blocks=1), Reader("head", kv_blocks=0)]
    drafting = Drafting(readers, StepStats(Stats()), lambda: 0.0)
    log, sequence = StepLog(("eagle", "head")), Sequence(1, [1, 2], 1, SamplingParams())
    states = [(sequence, HiddenStates(0, (1,), [0]))]
    for _ in range(SLEEP_AFTER_STEPS + 5):
        drafting.absorb(states, log)
    assert [reader.taken for reader in readers] == [SLEEP_AFTER_STEPS, SLEEP_AFTER_STEPS + 5]
    assert log.parts_s["verify"] > 0
