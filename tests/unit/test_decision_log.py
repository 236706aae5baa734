"""A line when what the planner does changes, none while it does not, and at most one a window."""

import logging

import numpy as np
import pytest

from backend.speculation.decision_log import DecisionLog
from policy import NO_DRAFT, Plan

STEP_S = 0.2


def plan(*choices, **notes):
    """Return a plan of (draft, length) by row."""
    draft, length = np.array(choices, np.int64).reshape(-1, 2).T
    return Plan(draft, length, 0.02, 4.0, 123.4, notes)


NONE, SMALL, LONGER, LOOKUP = (NO_DRAFT, 0), (0, 2), (0, 4), (1, 4)


class Runs:
    def __init__(self):
        self.log, self.now_s, self.drifts = DecisionLog(("small", "lookup")), 0.0, 0

    def drift(self):
        self.drifts += 1
        return {"verify": 1.234}

    def steps(self, count, *rows, **notes):
        for _ in range(count):
            self.log.note(plan(*rows, **notes), self.now_s, self.drift)
            self.now_s += STEP_S


@pytest.fixture
def runs(caplog):
    caplog.set_level(logging.INFO)
    made = Runs()
    made.lines = lambda: [record.fields for record in caplog.records]
    return made


def test_steady_plans_make_one_line_with_their_figures(runs):
    runs.steps(100, SMALL, SMALL, NONE, gain=1.2344)
    assert runs.lines() == [
        {
            "draft": "small",
            "length": 2.0,
            "row_share": {"none": 0.33, "small": 0.67},
            "batch_size": 3.0,
            "price": 123.4,
            "predicted_s": 0.02,
            "gain": 1.234,
            "drift": {"verify": 1.23},
            "step_changes": 0,
        }
    ]
    assert runs.drifts == 1


def test_another_draft_another_length_and_the_end_of_speculation_are_logged(runs):
    for rows in (SMALL, LOOKUP, LONGER, SMALL, NONE):
        runs.steps(30, rows)
    logged = [(line["draft"], line["length"], line.get("before_draft")) for line in runs.lines()]
    assert [draft for draft, _, _ in logged] == ["small", "lookup", "small", "small", "none"]
    assert logged[-1] == ("none", 0.0, "small")


def test_a_flapping_length_within_a_token_is_counted_and_not_logged(runs):
    for _ in range(50):
        runs.steps(1, (0, 2))
        runs.steps(1, (0, 3))
    assert len(runs.lines()) == 1
    runs.steps(30, LOOKUP)
    assert runs.lines()[1]["step_changes"] > 70


def test_drafts_that_take_turns_make_at_most_a_line_a_window(runs):
    rng = np.random.default_rng(3)
    for _ in range(600):
        runs.steps(1, *[(SMALL, LOOKUP, NONE)[i] for i in rng.integers(0, 3, 6)])
    assert len(runs.lines()) <= 6  # of 60 windows: a lead within a fifth of the rows is no change


def test_steps_without_decoding_rows_are_no_decisions(runs):
    runs.steps(50)
    assert runs.lines() == []


def test_a_draft_named_without_tokens_is_no_speculation(runs):
    runs.steps(30, (1, 0))
    assert runs.lines()[0]["draft"] == "none"
