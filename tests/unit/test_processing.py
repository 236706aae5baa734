"""Options on logits, in TensorRT-LLM's order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backend.request import IMPOSSIBLE, SamplingParams
from backend.sampling.distributions import target_probs
from backend.sampling.processing import WHOLE_VOCABULARY, Columns, process
from tests.options import BANNED, processed

VOCAB = 12


tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    prompt_ignore_length=st.sampled_from([0, 2, 2**31 - 1]),
    min_tokens=st.integers(0, 6),
    end_ids=st.sampled_from([(), (2,), (2, 5)]),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    bias=st.lists(st.tuples(tokens, st.sampled_from([-2.0, 1.5])), max_size=3).map(tuple),
)


@given(sampling=params, before=st.lists(tokens, min_size=1, max_size=12), prompt=st.integers(1, 8))
def test_logits_are_changed_by_the_book(sampling, before, prompt):
    prompt = min(prompt, len(before))
    logits = np.random.default_rng(len(before)).normal(size=VOCAB) * 3
    row = logits.copy()
    process(row, sampling, before, prompt, WHOLE_VOCABULARY)
    expected = processed(logits, before, prompt, sampling)
    possible = expected > BANNED
    scaled = row[possible] / (sampling.temperature or 1.0)
    assert np.allclose(scaled, expected[possible], rtol=1e-12)
    assert (row[~possible] == IMPOSSIBLE).all()


def test_a_shortlisted_head_is_changed_where_it_has_the_token():
    words = {"bad_words": ((3,), (7,)), "min_tokens": 2, "end_ids": (9, 11)}
    sampling = SamplingParams(bias=((7, 5.0), (9, 1.0)), presence_penalty=0.5, **words)
    columns, rows = Columns(np.array([9, 7, 4])), np.zeros((2, 3))
    process(rows[0], sampling, [4, 8], 1, columns)
    process(rows[1], sampling, [4, 8, 9], 1, columns)
    assert rows.tolist() == [[IMPOSSIBLE, IMPOSSIBLE, -0.5], [0.5, IMPOSSIBLE, -0.5]]


def test_a_row_in_which_everything_is_banned_still_has_a_distribution():
    logits = np.zeros(VOCAB, np.float32)
    banned = tuple((token,) for token in range(VOCAB))
    process(logits, SamplingParams(bad_words=banned), [1], 0, WHOLE_VOCABULARY)
    assert np.isfinite(target_probs(logits, SamplingParams(0.7))).all()
