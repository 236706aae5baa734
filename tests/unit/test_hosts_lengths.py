"""The policy where a host's own drafter proposes: lengths are planned a step ahead."""

import pytest

from backend.checked_settings import ConfigError
from backend.hosts.adapter import HostRow, VerifiedRow
from backend.hosts.calibration import StepCalibration, shapes
from backend.hosts.lengths import Lengths
from backend.hosts.settings import host_config
from backend.ops.stats import Stats
from policy import LatencyTable

K_MAX, PROMPT = 4, [1, 2, 3]


class Driven:
    """A host with one request, whose drafter is right in its first ``right`` tokens. With
    ``in_flight`` 1 a step is over after the next one is scheduled.
    """

    def __init__(self, right, forward_s=1e-4, in_flight=0, **settings):
        self.lengths = Lengths(host_config(settings, K_MAX, 4096, "ngram"), Stats())
        target = LatencyTable.synthetic("target", {1: 0.02, 64: 0.021})
        self.lengths.plan_by_passes(target, {1: forward_s})
        self.tokens, self.right, self.in_flight = [*PROMPT], right, in_flight
        self.planned, self.scheduled = [0], []

    def step(self):
        row = HostRow("a", self.tokens, len(PROMPT), 1000)
        self.scheduled.append(self.planned[-1])
        self.planned.append(self.lengths.plan_lengths([row], 0, 0).get("a", 0))
        if len(self.scheduled) > self.in_flight:
            self.end()

    def end(self):
        """End the oldest step that is scheduled."""
        length = self.scheduled.pop(0)
        drafted = [5 if n < self.right else 6 for n in range(length)]
        self.lengths.catch_up("a", self.tokens)
        self.tokens = [*self.tokens, *drafted[: self.right], 7]
        self.lengths.ran([VerifiedRow("a", drafted, self.tokens)], verify_s=0.02)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_drafter_that_is_right_gets_long_lengths_and_a_wrong_one_none(in_flight):
    right = Driven(K_MAX, in_flight=in_flight)
    wrong = Driven(0, forward_s=0.05, in_flight=in_flight)
    for _ in range(60):
        right.step()
        wrong.step()
    assert sum(right.planned[-20:]) > 50
    assert sum(wrong.planned[-20:]) < 10


@pytest.mark.parametrize("in_flight", [0, 1])
def test_what_was_verified_is_learnt_with_the_step_that_was_planned_for_it(in_flight):
    fixed = {"kind": "fixed", "draft": "ngram", "length": 3}
    host = Driven(2, in_flight=in_flight, policy=fixed)
    for _ in range(10):
        host.step()
    while host.scheduled:
        host.end()
    counters = host.lengths._stats._stats.drain().counters
    counts = {name: amount for name, labels, amount in counters if "draft" in labels}
    assert counts["spindle_accepted_tokens_total"] == 2 * 9
    assert not [name for name, *_ in counters if "fallback" in name]


def test_a_token_of_the_prompt_s_step_is_not_counted_with_the_next_step_s():
    host = Driven(1, policy={"kind": "fixed", "draft": "ngram", "length": 2})
    lengths, first = host.lengths, [*PROMPT, 9]
    assert lengths.plan_lengths([HostRow("a", PROMPT, len(PROMPT), 1000)], 0, 0) == {"a": 2}
    assert lengths.plan_lengths([], 0, 0) == {}
    lengths.ran([], verify_s=0.02)
    lengths.catch_up("a", first)
    lengths.ran([VerifiedRow("a", [5, 6], [*first, 5, 7])], verify_s=0.02)
    counters = lengths._stats._stats.drain().counters
    emitted = [amount for name, _, amount in counters if name == "spindle_emitted_tokens_total"]
    assert sum(emitted) == 2


def test_requests_that_are_over_are_forgotten():
    host = Driven(1)
    host.step()
    host.lengths.end(["a"])
    assert not host.lengths.sequences
    host.lengths.catch_up("a", [1])


def test_drafts_cannot_be_set_where_the_host_drafts():
    with pytest.raises(ConfigError, match="drafts must be absent: eagle3"):
        host_config({"drafts": []}, K_MAX, 512, "eagle3")


def test_the_drafter_s_seconds_are_those_that_drafting_adds():
    calibration = StepCalibration(shapes(1, K_MAX, 16, drafter=True), 1e9)
    while (shape := calibration.shape) is not None:
        tokens = shape.rows * (1 + shape.length)
        calibration.ran(shape.rows, tokens, 16, 0.02 + 0.003 * shape.drafted)
    assert calibration.drafter_s() == pytest.approx({1: 0.003})
    assert len(calibration.table("target", "cpu", "m", "fp32", "0").tokens) == len((0, 1, 2, K_MAX))
