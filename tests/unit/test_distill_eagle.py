"""An EAGLE-3 head from generated answers to a published folder that is converted again."""

import json
from dataclasses import replace

import pytest
import torch

from backend import PROJECT_ROOT
from backend.engines.eagle.conversion import convert
from backend.engines.eagle.dialects import TargetShape, read_published
from backend.engines.eagle.folder import load
from backend.engines.eagle.whole_text import WholeText
from backend.engines.models.llama import read_llama
from backend.engines.weights import load_embeddings
from engines_build.distill.arguments import parse
from engines_build.distill.eagle import EagleNetwork, EagleUnroller, eagle_shape, export_eagle
from engines_build.distill.head import HeadSample
from engines_build.distill.make_head import distil_head
from tests.fakes.eagle import read
from tests.unit.training import SHORTLIST, arguments, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target")


def sample(tokens, prompt_tokens):
    nothing = torch.zeros(len(tokens) - prompt_tokens, 0)
    return HeadSample(torch.tensor(tokens), prompt_tokens, "sql", True, nothing, nothing, nothing)


def states(tokens):
    """States that depend on each place's token alone."""
    table = torch.randn(300, 2, 64, generator=torch.Generator().manual_seed(1))
    return table[tokens.long()]


def network_of(target, taps=(1, 2)):
    config = read_llama(target)
    shortlist = torch.arange(3, 3 + SHORTLIST)
    return EagleNetwork(eagle_shape(config, taps, SHORTLIST), shortlist), shortlist


def test_what_is_trained_is_what_is_proposed_after_each_token_of_an_answer(target):
    network, shortlist = network_of(target)
    tables = load_embeddings(target)
    unroller = EagleUnroller(network, states, *tables, shortlist)
    samples = [sample([5, 6, 7, 8, 9, 10, 11], 3), sample([12, 13, 14, 15], 2)]
    head, rows = WholeText(network.shape, network.tensors(), *tables), []
    for step, (logits, kept, starts) in enumerate(unroller.unroll(samples, 3)):
        assert logits.shape == (len(kept), SHORTLIST)
        for row, start in zip(logits, kept.tolist(), strict=True):
            text, first = int(starts.answer[start]), int(starts.first[start])
            tokens = samples[text].tokens[: first + 1 + step]  # those drafted are the text's
            assert len(tokens) < len(samples[text].tokens)
            *_, last = head.unroll(tokens, states(tokens), step + 1)
            torch.testing.assert_close(row, last[first - 1])
            rows.append((step, text, first))
    assert rows == [
        *[(0, 0, first) for first in (3, 4, 5)],
        (0, 1, 2),
        *[(1, 0, first) for first in (3, 4)],
        (2, 0, 3),
    ]


@pytest.mark.parametrize("names_layers", [True, False])
def test_a_head_is_written_in_safeailab_s_files(names_layers, target, tmp_path):
    network, shortlist = network_of(target)
    _, rows = load_embeddings(target)
    export_eagle(network, rows, tmp_path / "head", names_layers=names_layers)
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    stored = torch.load(tmp_path / "head" / "pytorch_model.bin", weights_only=True)
    assert "rope_theta" not in raw
    assert ("eagle_aux_hidden_state_layer_ids" in raw) == names_layers
    assert {"midlayer.hidden_norm.weight", "fc.weight", "norm.weight"} <= stored.keys()
    assert torch.equal(stored["d2t"], shortlist - torch.arange(SHORTLIST))
    assert int(stored["t2d"].sum()) == SHORTLIST
    if names_layers:
        found = read_published(tmp_path / "head", TargetShape(64, len(rows), 2))
        assert found.shape == replace(network.shape, own_head=True)
        convert(tmp_path / "head", target, tmp_path / "out")
        shape, tensors = read(tmp_path / "out")
        assert shape == network.shape  # its rows are the target's
        for name, tensor in network.tensors().items():
            torch.testing.assert_close(tensors[name].to(tensor), tensor, rtol=1e-3, atol=1e-4)


def test_without_taps_it_reads_the_layers_that_a_folder_means_which_names_none(target):
    config = replace(read_llama(target), num_layers=32)
    assert eagle_shape(config, (), 9).layers == (2, 16, 29)


def test_a_start_is_of_our_form_only(target, capsys):
    words = ["--target", str(target), "--out", "x", "--form", "eagle", "--start", str(target)]
    with pytest.raises(SystemExit):
        parse(words)
    assert "--start: only with --form recurrent, got --form eagle" in capsys.readouterr().err


@pytest.mark.slow
def test_it_learns_and_its_card_says_what_it_is(tmp_path):
    model = PROJECT_ROOT / "engines_build" / "drafts" / "tiny-target"
    changes = {"form": "eagle", "train-tokens": 40_000, "tokens": 3000, "slots": 16}
    changes |= {"taps": "1,2,4", "shortlist": 2048}
    report = distil_head(arguments(model, tmp_path, **changes))
    assert report["scores"]["sql"]["accepted_1"] > 0.04  # by chance one in 2,048
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "An EAGLE-3 head, one decoder layer in SafeAILab's files: reads layers 1, 2, 4" in card
    assert "It proposes 2,048 tokens (`d2t`)" in card
    convert(tmp_path / "draft", model, tmp_path / "out")
    assert load(tmp_path / "out")[0].layers == (1, 2, 4)
