import json

import numpy as np
import pytest

from backend.checked_settings import ConfigError
from backend.engines.eagle.folder import load, read_shape, save
from tests.fakes.eagle import random_head

FORMS = {
    "plain": {},
    "all tokens": {"draft_vocab_size": 96, "own_head": False},
    "own embedding": {"own_embedding": True, "hidden_size": 16, "head_dim": 4},
    "joint": {"fuse": "joint", "norm_before_residual": True, "norm_output": True},
    "each, qk norms, bias": {"fuse": "each", "qk_norm": True, "fc_bias": True},
    "rope, window": {"rope": {"rope_type": "linear", "factor": 2.0}, "sliding_window": 9},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_read_as_it_was_written(form, tmp_path):
    shape, tensors = random_head(**FORMS[form])
    save(tmp_path, shape, tensors, {"source": "test"})
    same, again = load(tmp_path)
    assert same == shape
    assert again.keys() == tensors.keys() == shape.tensors().keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor.numpy())
    assert json.loads((tmp_path / "config.json").read_text())["source"] == "test"


def damage(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    raw |= changes
    raw = {name: value for name, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"layers": 3}, "not the config of a converted EAGLE-3 head"),
        ({"fuse": "some"}, "fuse must be one of plain, joint, each, got 'some'"),
        ({"hidden_size": 64}, r"fc.weight should be \[64, 96\], is \[32, 96\]"),
        ({"qk_norm": True}, r"self_attn.q_norm.weight should be \[8\], is missing"),
        ({"own_head": False}, "unknown tensors: lm_head.weight"),
        ({"vocab_size": 50}, "token_ids must be different ids below 50"),
    ],
)
def test_a_damaged_head_is_refused_by_field(changes, text, tmp_path):
    save(tmp_path, *random_head(), {})
    damage(tmp_path, **changes)
    with pytest.raises(ConfigError, match=text):
        load(tmp_path)


def test_tensors_that_do_not_fit_are_not_written(tmp_path):
    shape, tensors = random_head()
    tensors["token_ids"][1] = tensors["token_ids"][0]
    with pytest.raises(ConfigError, match="different ids"):
        save(tmp_path / "out", shape, tensors, {})
    assert not (tmp_path / "out").exists()


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        read_shape(tmp_path)
    save(tmp_path, *random_head(), {})
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        load(tmp_path)
