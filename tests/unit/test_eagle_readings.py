"""The probe finds how a head was trained, whatever its folder says, and refuses what never fits."""

import logging
from dataclasses import replace

import pytest
import torch

from backend.checked_settings import ConfigError
from backend.engines.eagle.conversion import ReadingScore, _is_better, choose, readings
from backend.engines.eagle.dialects import PublishedHead
from backend.engines.eagle.whole_text import Answer, WholeText
from tests.fakes.eagle import SHAPE, random_head

PROMPT, TOKENS, LAYERS = 4, 24, 8
EMBEDDING, ROWS = torch.randn(2, 96, 32, generator=torch.Generator().manual_seed(9))


def answers_of(shape, tensors, count=3, same_states=False):
    """Answers of a target that writes what this head proposes."""
    head, generator = WholeText(shape, tensors, EMBEDDING, ROWS), torch.Generator().manual_seed(3)
    layers, answers = torch.tensor(shape.layers) - 1, []
    for _ in range(count):
        states = torch.randn(TOKENS, LAYERS, 32, generator=generator)
        states = states[:, :1].expand_as(states) if same_states else states
        tokens = torch.randint(96, (PROMPT,), generator=generator)
        while len(tokens) < TOKENS:
            logits = next(head.unroll(tokens, states[: len(tokens), layers], 1))
            tokens = torch.cat([tokens, head.token_ids[logits[-1].argmax()][None]])
        answers.append(Answer(tokens, PROMPT, states))
    return answers


def measure(stated, tensors, answers, states_layers=True, states_residual=True):
    head = PublishedHead(stated, tensors, "flat", states_layers, states_residual)
    return choose(head, EMBEDDING, ROWS, answers, "some/head")


def test_readings_begin_with_the_stated_one_and_stay_within_the_target():
    found = [(one.layers, one.norm_before_residual) for one in readings(SHAPE, LAYERS)]
    shifted = [(2, 4, 5), (3, 5, 6), (1, 3, 4)]  # the default is the stated one
    assert found == [(layers, flag) for layers in shifted for flag in (False, True)]
    at_the_end = replace(SHAPE, layers=(1, 4, 8), norm_before_residual=True)
    found = [(one.layers, one.norm_before_residual) for one in readings(at_the_end, LAYERS)]
    assert found == [(layers, f) for layers in [(1, 4, 8), (2, 4, 5)] for f in (True, False)]
    assert {one.layers for one in readings(replace(SHAPE, layers=(3, 7)), LAYERS)} == {
        (3, 7),
        (4, 8),
        (2, 6),
    }


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("by", [0, 1, -1])
def test_the_reading_that_fits_is_taken(by, residual, caplog):
    true, tensors = random_head(4, layers=(3, 5, 6), norm_before_residual=residual)
    stated = replace(true, layers=tuple(layer + by for layer in true.layers))
    with caplog.at_level(logging.INFO):
        shape, scores = measure(stated, tensors, answers_of(true, tensors))
    assert (shape.layers, shape.norm_before_residual) == ((3, 5, 6), residual)
    assert max(score.first_token_share for score in scores) == 1.0
    assert scores[0].layers == stated.layers
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (by != 0)
    assert f"some/head: {scores[0]}" in caplog.text  # every score is there to be read
    if by:
        assert f"some/head is served with layers [3, 5, 6]{', normed' * residual}" in caplog.text


@pytest.mark.parametrize("states", [True, False])
def test_what_the_folder_leaves_open_is_measured_without_a_warning(states, caplog):
    true, tensors = random_head(4, norm_before_residual=True)
    stated = replace(true, norm_before_residual=False)
    shape, _ = measure(stated, tensors, answers_of(true, tensors), True, states)
    assert shape.norm_before_residual
    assert len(caplog.records) == states


def test_readings_that_do_not_differ_leave_the_stated_one(caplog):
    true, tensors = random_head(4)
    stated = replace(true, layers=(3, 5, 6))
    shape, _ = measure(stated, tensors, answers_of(true, tensors, same_states=True))
    assert shape == stated
    assert not caplog.records


def test_a_head_of_another_target_is_refused_with_its_best_share():
    true, tensors = random_head(4)
    _, others = random_head(5)
    text = r"some/head does not fit its target: at best 0\.\d\d of its first tokens are right \(lay"
    with pytest.raises(ConfigError, match=text):
        measure(true, others, answers_of(true, tensors))


def test_a_likelier_reading_with_fewer_first_tokens_right_does_not_displace_the_stated_one():
    stated = ReadingScore((2, 4, 5), False, 0.6, torch.full((50,), -3.0))
    likelier = torch.full((50,), -2.0) + 0.1 * torch.arange(50) / 50
    assert _is_better(stated, ReadingScore((3, 5, 6), False, 0.6, likelier))
    assert not _is_better(stated, ReadingScore((3, 5, 6), False, 0.59, likelier))
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert not _is_better(stated, ReadingScore((3, 5, 6), False, 0.9, stated.log_probs + noise))
