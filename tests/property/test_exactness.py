"""No text depends on how it came about: plans, trees, trims, drafts, arrivals, chunks, batches and
pools are drawn.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.request import SamplingParams
from tests.contract import checks
from tests.contract.ahead import exactly_ahead
from tests.contract.deployment import K_MAX, NODES, VOCAB
from tests.contract.scenarios import DRAFTS, GREEDY, PROMPTS, Ask, Scenario

tokens = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=6).map(tuple)
options = {
    "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
    "presence_penalty": st.sampled_from([0.0, -0.3, 0.6]),
    "frequency_penalty": st.sampled_from([0.0, 0.2]),
    "prompt_ignore_length": st.sampled_from([0, 3, 2**31 - 1]),
    "min_tokens": st.integers(0, 8),
    "end_ids": st.lists(tokens, max_size=8).map(tuple),
    "bad_words": words,
    "bias": st.lists(st.tuples(tokens, st.floats(-3.0, 3.0)), max_size=3).map(tuple),
    "log_probs": st.booleans(),
}
filters = {
    "temperature": st.floats(0.3, 2.0),
    "top_k": st.integers(0, VOCAB),
    "top_p": st.floats(0.3, 1.0),
    "min_p": st.sampled_from([0.0, 0.1, 0.5]),
    "seed": st.integers(0, 2**64 - 1),
}
samplings = (
    st.just(GREEDY)
    | st.builds(SamplingParams, **options)
    | st.builds(SamplingParams, **filters, **options)
)


drafts, lengths = st.integers(-1, len(DRAFTS) - 1), st.integers(0, K_MAX)


@st.composite
def asks(draw):
    arrival = draw(st.integers(0, 6))
    leaves = draw(st.none() | st.integers(arrival + 1, arrival + 6))
    salt = draw(st.sampled_from(["", "", "tenant"]))
    return Ask(
        draw(st.integers(0, len(PROMPTS) - 1)),
        draw(st.integers(1, 18)),
        arrival,
        leaves,
        salt,
        draw(samplings),
    )


scenarios = st.builds(
    Scenario,
    asks=st.lists(asks(), min_size=1, max_size=6).map(tuple),
    script=st.lists(st.tuples(drafts, lengths), min_size=1, max_size=12).map(tuple),
    trims=st.lists(st.integers(0, NODES), min_size=1, max_size=8).map(tuple),
    nodes=st.sampled_from([0, 2, NODES, NODES]),
    chunk_tokens=st.integers(1, 40),
    max_active=st.integers(1, 6),
    kv_blocks=st.integers(6, 20),
    reuse=st.booleans(),
)


@pytest.mark.medium
@pytest.mark.parametrize("examples", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_whatever_is_asked_and_planned_looking_ahead(examples):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(scenarios)
    def holds(scenario):
        exactly_ahead(scenario, *checks.ENDS, checks.blocks_are_of_one_text)

    holds()


@pytest.mark.medium
@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_is_asked_and_planned(examples):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(scenarios)
    def holds(scenario):
        checks.exact(scenario, *checks.ALL)

    holds()
