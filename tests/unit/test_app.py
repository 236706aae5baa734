import pytest

from backend.app import _policy, build, sampling_params
from backend.config import parse_config
from backend.engines.fake import FakeEngine
from backend.request import GenerationRequest, SamplingParams
from policy import AdaptivePlanner, FixedLength, LatencyError, NoSpeculation

FAKE = {"target": {"engine": "fake"}, "drafts": [{"name": "d0", "engine": "fake"}, {"name": "lookup", "engine": "lookup"}]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingParams(seed=5)),
        ({"temperature": 0.0, "top_k": 40}, SamplingParams(0.0, 40, seed=5)),
        ({"temperature": 0.7}, SamplingParams(0.7, seed=5)),
        ({"top_p": 0.9}, SamplingParams(1.0, 0, 0.9, seed=5)),
        ({"top_k": 3}, SamplingParams(1.0, 3, seed=5)),
        ({"temperature": 0.7, "top_p": 0.0}, SamplingParams(0.7, seed=5)),
    ],
)
def test_absent_options_mean_greedy_and_zero_means_off(options, expected):
    assert sampling_params(GenerationRequest("a", 1, seed=5, **options)) == expected


def test_greedy_is_no_option_temperature_zero_or_one_candidate():
    greedy = [{}, {"temperature": 0.0}, {"temperature": 0.9, "top_k": 1}, {"top_k": 1}]
    assert all(sampling_params(GenerationRequest("a", 1, **options)).greedy for options in greedy)
    assert not sampling_params(GenerationRequest("a", 1, temperature=0.9)).greedy


def test_requests_without_a_seed_differ():
    seeds = {sampling_params(GenerationRequest("a", 1)).seed for _ in range(10)}
    assert len(seeds) == 10


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"kind": "adaptive"}, AdaptivePlanner),
        ({"kind": "none"}, NoSpeculation),
        ({"kind": "fixed", "draft": "d0", "length": 2}, FixedLength),
    ],
)
def test_the_configured_policy_is_built(settings, kind):
    assert isinstance(build(parse_config({**FAKE, "policy": settings})).orchestrator._policy, kind)


def test_a_deployment_without_drafts_does_not_speculate():
    assert isinstance(build(parse_config({"target": {"engine": "fake"}})).orchestrator._policy, NoSpeculation)


def test_a_missing_latency_table_is_an_error_that_names_the_engine():
    config = parse_config({"target": {"engine": "fake"}, "drafts": [{"name": "d0", "engine": "torch", "model": "m"}]})
    with pytest.raises(LatencyError, match="d0"):
        _policy(config, [FakeEngine("d0")], {})
