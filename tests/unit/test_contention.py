"""What side by side costs is measured on the engines that will run, and what comes of it."""

from dataclasses import replace

import pytest

from backend.app import build
from backend.config import ConfigError, parse_config
from backend.core.in_flight import InFlight
from backend.engines import contention
from backend.engines.contention import measure
from backend.engines.fake import FakeEngine
from backend.engines.lookup import LookupEngine
from backend.engines.overlapped import Overlapped
from backend.request import GenerationRequest
from bench.in_process import generate
from policy import AdaptivePlanner
from policy.pipelining import Pipelining
from policy.trim import Promise
from tests.contract.deployment import tiny_engine
from tests.unit.test_policy_pipelining import OVERLAPPING, knowing

FAKE = {
    "target": {"engine": "fake", "step_s": 0.004},
    "drafts": [{"name": "d0", "engine": "fake", "step_s": 0.002, "agreement": 0.95}],
    "policy": {"cohorts": 2, "keep_learned": False},
}


def test_engines_that_sleep_do_not_slow_each_other_down_and_one_that_waits_for_the_other_does(
    monkeypatch,
):
    target, draft = FakeEngine("target", step_s=0.02), FakeEngine("draft", step_s=0.005)
    free = measure(target, [draft])
    assert free >= 1.0
    clock = {"alone": iter([1.0, 1.0, 1.0, 1.0])}
    monkeypatch.setattr(contention, "_seconds", lambda run: next(clock["alone"]))
    monkeypatch.setattr(contention, "_side_by_side", lambda verify, draft: (1.2, 1.5))
    assert measure(target, [draft]) == 1.5


def test_nothing_of_the_measurement_stays_in_the_engines():
    target, draft = tiny_engine(kv_blocks=32), tiny_engine("draft", seed=1, noise=0.1, kv_blocks=32)
    assert measure(target, [draft, LookupEngine("lookup", max_draft_tokens=4)]) >= 1.0
    for engine in (target, draft):
        assert not engine._caches._caches
        assert not engine._caches.contents


def test_where_no_draft_takes_time_nothing_is_measured():
    assert measure(FakeEngine("target"), [LookupEngine("lookup", max_draft_tokens=4)]) is None
    assert measure(FakeEngine("target"), []) is None


def test_a_deployment_with_cohorts_runs_its_target_in_a_thread_and_tells_its_texts():
    texts = []
    for policy in ({"kind": "none"}, FAKE["policy"]):
        app = build(parse_config({**FAKE, "policy": policy}), {})
        assert isinstance(app.target, Overlapped) == ("cohorts" in policy)
        sessions = generate(
            app, [GenerationRequest(prompt, 40) for prompt in ("abc", "def", "ghi", "jkl")], 4
        )
        texts.append([session.sequence.tokens for session in sessions])
        app.close()
    assert texts[0] == texts[1]


def test_cohorts_are_refused_where_they_cannot_be():
    alone = FakeEngine("target")
    alone.limits = type(alone.limits)(257, 100, 4, 4, 0)
    with pytest.raises(
        ConfigError, match=r"policy.cohorts must be 1: the engine of 'target' runs no cohorts"
    ):
        contention.overlapped(alone, [])


def test_the_adaptive_policy_cuts_a_batch_where_it_thinks_that_pays_and_no_text_changes(
    monkeypatch,
):
    config = parse_config(
        {**FAKE, "target": {"engine": "fake"}, "drafts": [{**FAKE["drafts"][0], "step_s": 0.0}]}
    )
    monkeypatch.setattr(
        AdaptivePlanner, "_timed", lambda planner, outcome, state, view: state.correction
    )
    monkeypatch.setattr(Promise, "of", lambda *_: None)  # what it knows is all that it goes by
    texts, submitted = {}, []
    collect = InFlight.collect
    monkeypatch.setattr(
        InFlight, "collect", lambda self, log: submitted.append(len(self)) or collect(self, log)
    )
    for cohorts in (1, 2):
        submitted.clear()
        app = build(replace(config, policy=replace(config.policy, cohorts=cohorts)), {})
        planner = knowing(OVERLAPPING, Pipelining(cohorts, 1.0), drafts=("d0",))
        sessions = generate(
            app,
            [GenerationRequest(f"prompt {i}", 150 + i, end_id=-1) for i in range(16)],
            16,
            planner,
        )
        texts[cohorts] = [session.sequence.tokens for session in sessions]
        app.close()
        assert (sum(count > 1 for count in submitted) > 10) == (cohorts > 1)
    assert texts[1] == texts[2]
