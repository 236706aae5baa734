"""Folders whose weights cannot be read are refused by the file, before anything is loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from backend.checked_settings import ConfigError
from backend.engines.models.loading import load_decoder
from backend.engines.weights import read_weights
from backend.storage.weight_files import check_weight_files, tensor_shapes, weight_files
from tests.fakes.checkpoints import LFS_POINTER

TENSORS = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4).bfloat16()}
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 4}


@pytest.fixture
def folder(tmp_path):
    """A folder of one file of weights."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, made / "model.safetensors")
    return made


def in_parts(folder, *names, keeps=False):
    """Give a folder's tensors to files of these names, by an index."""
    for name, (tensor, value) in zip(names, TENSORS.items(), strict=False):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({tensor: value}, file)
    write_index(folder, dict(zip(TENSORS, names, strict=False)))
    if not keeps:
        (folder / "model.safetensors").unlink()


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_file_and_parts_of_it_are_read(folder):
    assert weight_files(folder) == [folder / "model.safetensors"]
    assert tensor_shapes(folder) == {"a.weight": (2, 3), "b.weight": (4,)}
    in_parts(folder, "model-00001-of-00002.safetensors", "more/model-00002-of-00002.safetensors")
    check_weight_files(folder)
    assert tensor_shapes(folder) == {"a.weight": (2, 3), "b.weight": (4,)}
    assert read_weights(folder).keys() == TENSORS.keys()


def test_the_cache_of_a_hub_is_links_to_files_outside(folder, tmp_path):
    in_parts(folder, "a.safetensors", "b.safetensors")
    (snapshot := tmp_path / "snapshots" / "0a1b").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(folder.iterdir()):
        shutil.copyfile(file, tmp_path / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    check_weight_files(snapshot)
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    assert tensor_shapes(linked) == {"a.weight": (2, 3), "b.weight": (4,)}


OUTSIDE = ["../outside.safetensors", "more/../../outside.safetensors", "away/outside.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, "{}/outside.safetensors"])
@pytest.mark.parametrize("read", [check_weight_files, read_weights, load_decoder])
def test_an_index_leads_to_no_file_outside_the_folder(folder, tmp_path, name, read):
    save_file(TENSORS, tmp_path / "outside.safetensors")
    (folder / "away").symlink_to(tmp_path)
    (folder / "more").mkdir()
    name = name.format(tmp_path)
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    write_index(folder, {"a.weight": "model.safetensors", "b.weight": name})
    with pytest.raises(ConfigError, match="is outside the folder") as error:
        read(folder)
    assert f"index.json: weight_map names {name!r}" in str(error.value)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def point(folder):
    (folder / "model.safetensors").write_text(LFS_POINTER)


def pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save(TENSORS, folder / "pytorch_model-00001-of-00001.bin")


def unindexed(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, r"model\.safetensors is damaged"),
        (point, r"model\.safetensors is a Git LFS pointer.*run `git lfs pull`"),
        (
            pickle,
            r"has neither model\.safetensors nor .*: pytorch_model-.*\.bin is a pickle, which",
        ),
        (unindexed, r"model-00001-of-00001\.safetensors is not found without the index"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"model has neither model\.safetensors nor model\.safetensors\.index\.json$",
        ),
        (
            lambda folder: write_index(folder, {"a.weight": "absent.safetensors"}),
            r"cannot read .*absent\.safetensors: No such file",
        ),
        (lambda folder: write_index(folder, {}), "weight_map is missing or empty"),
        (lambda folder: write_index(folder, ["a"]), "weight_map is missing or empty"),
        (lambda folder: write_index(folder, {"a": 3}), "weight_map must name files, got 3 for a"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(LFS_POINTER),
            r"index\.json is a Git LFS pointer",
        ),
    ],
)
def test_weights_that_are_not_all_there_are_named(folder, damage, words):
    damage(folder)
    for read in (check_weight_files, tensor_shapes, read_weights):
        with pytest.raises(ConfigError, match=words):
            read(folder)
