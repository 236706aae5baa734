"""OpenAI's sampling options as values of Triton's tensors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.request import GenerationRequest, SamplingParams
from backend.sampling.options import sampling_params
from backend.sampling.processing import WHOLE_VOCABULARY, process
from backend.tokenizer import ByteTokenizer
from backend.triton_adapter.fields import TEXT_INPUTS
from backend.triton_adapter.openai_options import as_tensors

FIELDS = {field.name: field for field in TEXT_INPUTS}
VOCAB = 8
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def engines(options) -> SamplingParams:
    """Return what an engine reads of the options of a body, once they were tensors."""
    meant = as_tensors({name: value for name, value in options.items() if value is not None})
    for name, value in meant.items():
        field = FIELDS[name]
        exact = float(np.float32(value)) if field.dtype == "FP32" else value
        assert field.range is None or not field.range.wrong(exact), name
        meant[name] = exact
    return sampling_params(
        GenerationRequest("a", 1, **meant), ByteTokenizer(), ByteTokenizer().end_ids
    )


@given(
    prompt=tokens,
    written=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    presence=st.none() | st.floats(-2, 2),
    frequency=st.none() | st.floats(-2, 2),
    repetition=st.sampled_from([None, 1.0, 1.3]),
    temperature=st.sampled_from([None, 0.0, 1e-6, 0.9e-5, 1e-5, 1.1e-5, 0.01, 0.25, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 5]),
)
def test_penalties_count_what_was_written_and_act_before_the_temperature(
    prompt, written, presence, frequency, repetition, temperature, top_k
):
    options = {"presence_penalty": presence, "frequency_penalty": frequency, "top_k": top_k}
    sampling = engines(
        options | {"temperature": temperature, "repetition_penalty": repetition or 1.0}
    )
    logits = np.random.default_rng(len(prompt)).normal(size=VOCAB) * 3
    row = logits.copy()
    process(row, sampling, [*prompt, *written], len(prompt), WHOLE_VOCABULARY)
    for token in range(VOCAB):
        value = logits[token]
        if token in prompt or token in written:
            value = value * (repetition or 1) if value < 0 else value / (repetition or 1)
        count = written.count(token)
        expected = value - (presence or 0) * (count > 0) - (frequency or 0) * count
        assert row[token].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("top_p", [0, 0.0, 1e-50, 1e-7])
@pytest.mark.parametrize("more", [{}, {"temperature": 2.0}, {"top_k": 40, "min_p": 0.1}])
def test_the_least_top_p_keeps_the_likeliest_token(top_p, more):
    assert engines({"temperature": 1.0, "top_p": top_p, **more}).greedy


def test_any_other_top_p_and_no_penalty_stay_as_they_are():
    options = {"temperature": 0.5, "top_p": 1e-3, "presence_penalty": 0.0, "seed": 3}
    assert as_tensors(options) == options
