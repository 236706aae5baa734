"""The benchmark of repeated workloads, on the fake target."""

from argparse import Namespace

import pytest

from backend.config import parse_config
from bench.micro.remembered import SCHEMA, TOOLS, WORKLOADS, compare, costs

FAKE = {
    "target": {"engine": "tests.fakes.fake"},
    "policy": {"kind": "fixed", "draft": "lookup", "length": 4},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_different_and_the_seed_s(name):
    prompts = WORKLOADS[name](12, 3)
    assert len({*prompts}) == 12
    assert prompts == WORKLOADS[name](12, 3) != WORKLOADS[name](12, 4)
    shared = {"sql": SCHEMA, "agent": TOOLS, "other": ""}[name]
    assert all(shared in prompt for prompt in prompts)


@pytest.mark.slow
def test_every_arm_serves_the_same_texts_and_counts_what_its_drafts_did():
    config = parse_config({**FAKE, "drafts": [{"name": "lookup", "engine": "lookup"}]})
    options = Namespace(arms=["lookup", "both"], count=3, max_tokens=20, seed=0)
    for figures in compare(config, options).values():
        assert (figures["prompts"], figures["texts_compared"], figures["same"]) == (3, 3, 3)
        for arm in options.arms:
            assert 1 <= figures[arm]["tokens_per_step"] <= 5
            assert {*figures[arm]["proposed_and_accepted"]} <= {"lookup"}


def test_costs_are_those_of_a_full_memory():
    found = costs(8192, 0)
    assert 8192 - 1000 <= found["remembered_tokens"] <= 8192
    assert 0 < found["proposal_us"]["median"] <= found["proposal_us"]["p90"]
    assert found["adding_us_per_token"] > 0
