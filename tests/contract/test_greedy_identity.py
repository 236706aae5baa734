"""Text of the real model in fp32: whatever was planned and whatever else was in the batch, it is
the text of plain decoding.

Different batch shapes round differently, so that a near-tie between two tokens may fall either way;
a first difference must be one, by the gap between the two in fp64 (logits where greedy, the outcome
of the race where sampled). It is logged.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.app import build
from backend.config import parse_config
from backend.model_folders import model_path
from backend.request import GenerationRequest
from bench.in_process import generate
from bench.prompts import PROMPTS
from engines_build.prepare import bring_embedded_model
from policy import LatencyTable, NoSpeculation, RandomChoice
from tests.contract.witness import Witness

pytestmark = pytest.mark.slow

HEAD = "engines_build/drafts/smollm2-135m-instruct-head"
MAX_TOKENS, SEEDED_TOKENS = 40, 24

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
)

CONFIG = {
    "target": {"engine": "torch", "model": "smollm2-135m-instruct", "dtype": "fp32"},
    "drafts": [
        {"name": "head", "engine": "head", "model": HEAD},
        {"name": "lookup", "engine": "lookup"},
    ],
    "limits": {"kv_cache_tokens": 16384},
}
TABLES = {
    "target": LatencyTable.synthetic("target", {1: 0.054, 2: 0.09, 8: 0.13, 16: 0.17, 64: 0.4}),
    "head": LatencyTable.synthetic("head", {1: 0.002, 8: 0.003}),
}


WITNESS = Witness(model_path(parse_config(CONFIG).target))
SEEDED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "bad_words": (" the", "\n\n"),
    "min_tokens": 10,
}


class RandomTrees(RandomChoice):
    """Random drafts and lengths, of whose trees random numbers of nodes are verified."""

    def start(self):
        return np.random.default_rng(0)

    def plan(self, view, state, now, rng):
        return super().plan(view, None, now, rng)[0], state

    def trim(self, view, plan, drafted, state):
        nodes = np.bincount(drafted.row, minlength=len(view))
        return np.where(state.random(len(view)) < 0.5, nodes, state.integers(0, nodes + 1))


@pytest.fixture(scope="module")
def app():
    torch.set_num_threads(1)
    bring_embedded_model()
    made = build(parse_config({**CONFIG, "policy": {"kind": "adaptive"}}), TABLES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts():
    return [prompt for workload in PROMPTS.values() for prompt in workload]


@pytest.fixture(scope="module")
def plain(app, prompts):
    sessions = generate(app, requests(prompts), policy=NoSpeculation())
    assert len(prompts) >= 12
    assert all(session.drafted == 0 for session in sessions)
    return sessions


@pytest.fixture(scope="module")
def seeded(app, prompts):
    sessions = generate(app, seeded_requests(prompts), policy=NoSpeculation())
    assert len({tuple(session.sequence.tokens) for session in sessions}) == len(sessions)
    return sessions


def requests(prompts):
    return [GenerationRequest(prompt, MAX_TOKENS) for prompt in prompts]


def seeded_requests(prompts):
    return [
        GenerationRequest(prompt, SEEDED_TOKENS, seed=number, **SEEDED)
        for number, prompt in enumerate(prompts[::4])
    ]


def test_the_policys_speculation_alone_does_not_change_the_text(app, prompts, plain):
    sessions = generate(app, requests(prompts))
    assert sum(session.accepted for session in sessions) > 20
    WITNESS.check_equal(plain, sessions)


def test_the_policys_speculation_in_a_batch_of_eight_does_not_change_the_text(app, prompts, plain):
    WITNESS.check_equal(plain, generate(app, requests(prompts), together=8))


def test_plain_decoding_in_a_batch_of_eight_does_not_change_the_text(app, prompts, plain):
    WITNESS.check_equal(plain, generate(app, requests(prompts), together=8, policy=NoSpeculation()))


@pytest.mark.parametrize("policy", [RandomChoice(), RandomTrees()], ids=["as planned", "trimmed"])
def test_random_drafts_and_trees_in_every_step_do_not_change_the_text(app, prompts, plain, policy):
    sessions = generate(app, requests(prompts), together=3, policy=policy)
    assert sum(session.accepted for session in sessions) > 20
    WITNESS.check_equal(plain, sessions)


@pytest.mark.parametrize("options", [{}, {"seed": 3, "temperature": 0.8}], ids=["greedy", "seeded"])
def test_guided_text_is_the_same_with_speculation_and_is_json(app, prompts, options):
    requests = [
        GenerationRequest(prompt, 60, guide_type="json_schema", guide=SCHEMA, **options)
        for prompt in prompts[::4]
    ]
    plain = generate(app, requests, policy=NoSpeculation())
    sessions = generate(app, requests, together=3, policy=RandomTrees())
    assert sum(session.accepted for session in sessions) > 10
    WITNESS.check_equal(plain, sessions)
    table = app.tokenizer.token_bytes
    texts = [
        b"".join(table[token] for token in s.sequence.tokens[s.sequence.prompt_tokens :])
        for s in sessions
        if s.finish_reason == "end_id"
    ]
    assert texts
    assert all(json.loads(text).keys() == {"colour", "count"} for text in texts)


@pytest.mark.parametrize(
    ("together", "policy"), [(2, RandomChoice()), (3, RandomTrees()), (4, None)]
)
def test_a_seeded_text_with_options_is_the_same_under_any_plan_and_load(
    app, prompts, seeded, together, policy
):
    sessions = generate(app, seeded_requests(prompts), together, policy)
    assert sum(session.drafted for session in sessions) > 0 or policy is None
    WITNESS.check_equal(seeded, sessions)


def test_a_sampled_text_without_a_seed_is_that_of_the_seed_it_was_given(app, prompts):
    asked = [GenerationRequest(prompt, SEEDED_TOKENS, **SEEDED) for prompt in prompts[::4]]
    sessions = generate(app, asked, together=3, policy=RandomTrees())
    seeds = [session.sequence.sampling.seed for session in sessions]
    assert len(set(seeds)) == len(seeds)
    again = [replace(request, seed=seed) for request, seed in zip(asked, seeds, strict=True)]
    WITNESS.check_equal(generate(app, again, policy=NoSpeculation()), sessions)
