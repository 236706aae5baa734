"""Why the last plan is what it is, asked of the running loop."""

import math
import re
from dataclasses import replace

import pytest

from backend.app import build
from backend.config import parse_config
from backend.request import GenerationRequest
from backend.speculation.explaining import MOST_ROWS, explain_last
from bench.in_process import SilentSink

DRAFTS = [
    {"name": "d", "engine": "tests.fakes.fake", "options": {"agreement": 0.9, "step_s": 0.0001}}
]
CONFIG = {
    "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.002}},
    "drafts": DRAFTS,
    "limits": {"max_active_requests": 100},
}


def stepped(requests, **settings):
    """Return the loop of an app in the middle of ``requests`` requests."""
    app = build(parse_config({**CONFIG, **settings}))
    for number in range(requests):
        app.orchestrator.submit(
            app.session(GenerationRequest(f"request {number}", 50, end_id=-1), SilentSink())
        )
    for _ in range(4):
        app.orchestrator.step()
    return app.orchestrator.cycle


def test_each_request_of_the_last_plan_has_a_line():
    explained = explain_last(stepped(3))
    assert explained["age_s"] >= 0
    assert explained["step"].startswith("3 requests, ")
    kept = r"with 3-4 in flight \d\.\d\dx the planned tokens come in \d+\.\d\dx the time"
    assert re.search(kept, explained["step"])
    assert [line.split(":")[0] for line in explained["requests"]] == [
        "request 1",
        "request 2",
        "request 3",
    ]
    assert any("d x " in line for line in explained["requests"])


def test_what_steps_showed_of_passes_that_verify_is_shown():
    cycle, words = stepped(2), "in passes that verify, decoding takes"
    planner_state = cycle.runner.state
    while hasattr(planner_state, "inner"):
        planner_state = planner_state.inner
    planner_state.correction.verifying[:] = 0.0, 0.0
    assert words not in explain_last(cycle)["step"]
    planner_state.correction.verifying[:] = math.log(1.3), 20.0
    assert f"{words} 1.30x the time" in explain_last(cycle)["step"]


def test_a_traced_planner_is_explained_too(tmp_path):
    assert (
        len(explain_last(stepped(2, policy={"trace_file": str(tmp_path / "trace")}))["requests"])
        == 2
    )


def test_before_the_first_step_there_is_nothing_to_explain():
    assert explain_last(stepped(0)) == {
        "age_s": None,
        "step": "no step has been planned yet",
        "requests": [],
    }


@pytest.mark.parametrize(
    ("requests", "policy", "words"),
    [(MOST_ROWS + 1, {}, "more than"), (2, {"kind": "random"}, "not the adaptive one")],
)
def test_what_is_not_explained_says_so(requests, policy, words):
    (line,) = explain_last(stepped(requests, policy=policy))["requests"]
    assert words in line


def test_a_step_that_is_plain_to_be_measured_says_so():
    loop = stepped(2)
    view, state, plan, now = loop.runner.last_plan
    first = replace(plan, notes={"first_plain": True})
    loop.runner.last_plan = (view, state, first, now)
    assert explain_last(loop)["requests"] == [
        "all requests: plain, to measure the time of such steps"
    ]
