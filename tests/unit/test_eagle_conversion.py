"""A published head is converted once, for one target, into the cache."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines.eagle import conversion, whole_text
from backend.engines.eagle import kind as eagle_kind
from backend.engines.eagle.conversion import bring_head, convert
from backend.engines.eagle.folder import load, made_for, served_folder
from backend.engines.eagle.whole_text import PROMPTS, answer
from backend.engines.openvino import kind as openvino_kind
from backend.engines.registry import Service
from backend.engines.weights import load_embeddings
from backend.launcher import doctor
from backend.model_folders import check_folders, check_pairs, model_path
from backend.storage import cache
from backend.storage.manifest import check_pair, read_manifest, weights_sha256
from backend.storage.tables import table_file, timed_engines
from engines_build.prepare import convert_folders, prepare
from policy.latency import SYNTHETIC, LatencyTable
from tests.fakes.eagle import published, random_head, read, write
from tests.unit.training import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))


def head_for(target, **changes):
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 64, "target_hidden_size": 64, "head_dim": 16, "layers": (1, 2)}
    return random_head(**{"vocab_size": vocab, **sizes, **changes})


def folder_of(path, head, dialect="flat", **config):
    raw, named = published(dialect, *head)
    return write(path, dialect, raw | config, named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_that_are_the_target_s_are_left_out(dtype, target, tmp_path):
    shape, tensors = head_for(target, own_embedding=True)
    embedding, rows = load_embeddings(target)
    tensors["embed_tokens.weight"] = embedding.to(dtype)
    tensors["lm_head.weight"] = rows[tensors["token_ids"]].to(dtype)
    convert(folder_of(tmp_path / "head", (shape, tensors)), target, tmp_path / "out")
    found, kept = read(tmp_path / "out")
    assert found == replace(shape, own_embedding=False, own_head=False)
    assert not {"embed_tokens.weight", "lm_head.weight"} & kept.keys()


def test_matrices_of_its_own_are_kept(target, tmp_path):
    shape, tensors = head_for(target, own_embedding=True)
    tensors["embed_tokens.weight"] = load_embeddings(target)[0].clone()
    tensors["embed_tokens.weight"][3, 4] += 0.5
    convert(folder_of(tmp_path / "head", (shape, tensors)), target, tmp_path / "out")
    found, kept = read(tmp_path / "out")
    assert found == shape
    assert torch.equal(kept["embed_tokens.weight"], tensors["embed_tokens.weight"])


def test_a_converted_head_is_paired_with_its_target(target, tmp_path):
    convert(folder_of(tmp_path / "head", head_for(target)), target, tmp_path / "out")
    check_pair(read_manifest(target), read_manifest(tmp_path / "out"), same_size=True)
    assert made_for(tmp_path / "out") == weights_sha256(target)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dialect"] == "flat"


def test_a_head_that_is_padded_otherwise_is_paired_with_its_target(target, tmp_path):
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    head = head_for(target, vocab_size=vocab + 8, own_embedding=True)
    convert(folder_of(tmp_path / "head", head), target, tmp_path / "out")
    check_pair(read_manifest(target), read_manifest(tmp_path / "out"), same_size=True)
    assert load(tmp_path / "out")[1]["embed_tokens.weight"].shape[0] == vocab


def test_a_folder_with_the_tokens_of_another_target_is_refused(target, tmp_path):
    folder = folder_of(tmp_path / "head", head_for(target))
    spec = json.loads((target / "tokenizer.json").read_text())
    spec["model"]["vocab"]["!"], spec["model"]["vocab"]['"'] = (
        spec["model"]["vocab"][name] for name in ('"', "!")
    )
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="does not have the vocabulary of its target"):
        convert(folder, target, tmp_path / "out")


def test_answers_are_greedy_and_states_those_after_each_layer(target):
    found = answer(target, "fp32")
    lm, tokenizer = (one.from_pretrained(target) for one in (AutoModelForCausalLM, AutoTokenizer))
    assert len(found) == len(PROMPTS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        tokens = one.tokens
        assert tokens[: one.prompt_tokens].tolist() == tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            out = lm(tokens[None], output_hidden_states=True)
        new = out.logits[0].argmax(-1)[one.prompt_tokens - 1 : -1]
        assert torch.equal(new, tokens[one.prompt_tokens :])
        torch.testing.assert_close(one.states[:, 0], out.hidden_states[1][0])
        last = lm.model.norm(one.states[:, 1])  # transformers' last state is normed
        torch.testing.assert_close(last, out.hidden_states[2][0])


def test_an_answer_ends_with_its_end_token():
    assert whole_text._until_end([5, 6, 2, 0, 0], {2, 3}) == [5, 6, 2]
    assert whole_text._until_end([5, 6], {2}) == [5, 6]


@pytest.fixture
def fitting(target, tmp_path, monkeypatch):
    """A head that fits whatever the target answers; and how often it was asked to."""
    asked = []

    def fits(head, embedding, rows, answers, name):
        asked.append((name, len(answers)))
        return replace(head.shape, norm_before_residual=True), []

    monkeypatch.setattr(conversion, "choose", fits)
    return folder_of(tmp_path / "head", head_for(target)), asked


def bring(folder, target, free_bytes=1 << 30):
    said = []
    return bring_head(folder, target, said.append, dtype="fp32", free_bytes=free_bytes), said


def test_a_head_is_converted_once_for_a_target(fitting, target, tmp_path):
    folder, asked = fitting
    with pytest.raises(ConfigError, match=f"{folder} is not converted yet: run `spindle prepare`"):
        served_folder(folder)
    place, said = bring(folder, target)
    assert "its target answers a few prompts" in said[0]
    assert load(place)[0].norm_before_residual  # as was measured
    assert served_folder(folder) == place == served_folder(place)
    assert bring(folder, target) == (place, [])
    assert asked == [(str(folder), len(PROMPTS))]


def test_it_is_converted_again_for_another_target_or_where_a_file_has_changed(fitting, target):
    folder, asked = fitting
    place, _ = bring(folder, target)
    tuned = target.with_name("tuned")
    if not tuned.exists():
        lm = AutoModelForCausalLM.from_pretrained(target)
        lm.model.norm.weight.data += 0.5
        lm.save_pretrained(tuned)
        AutoTokenizer.from_pretrained(target).save_pretrained(tuned)
    assert bring(folder, tuned)[0] == place
    assert made_for(place) == weights_sha256(tuned)
    (place / "model.safetensors").unlink()
    bring(folder, tuned)
    assert len(asked) == 3
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 1e-6}))
    assert bring(folder, tuned)[0] != place
    assert len(asked) == 4


def test_a_target_that_does_not_fit_into_memory_is_not_loaded(fitting, target):
    folder, asked = fitting
    files = (target / "model.safetensors").stat().st_size
    with pytest.raises(ConfigError, match=r"needs 0\.0 GiB of memory, 0\.0 GiB are free"):
        bring(folder, target, 2 * files - 1)
    assert asked == []
    bring(folder, target, 2 * files)


def test_nothing_is_left_of_a_head_that_does_not_fit(target, tmp_path):
    folder = folder_of(tmp_path / "head", head_for(target))
    with pytest.raises(ConfigError, match="does not fit its target"):
        bring(folder, target)
    with pytest.raises(ConfigError, match="not converted yet"):
        served_folder(folder)
    assert list((tmp_path / "cache" / "heads").iterdir()) == []


def serving(target, folder, engine="torch"):
    return parse_config(
        {
            "target": {"engine": engine, "model": str(target), "dtype": "fp32"},
            "threads": 1,
            "drafts": [{"name": "eagle", "engine": "eagle", "model": str(folder), "dtype": "fp32"}],
        }
    )


class Measured:
    """Measures in no time, and counts."""

    def __init__(self):
        self.names = []

    def __call__(self, config, folders, names):
        self.names.append([*names])
        for engine in timed_engines(config):
            table = LatencyTable(engine.name, (1,), (1,), (0,), (1e-3,), SYNTHETIC)
            threads = 1 if engine.name == "target" else SYNTHETIC.threads
            path = table_file(engine, folders[engine.name], threads)
            cache.publish_file(path, json.dumps(table.to_dict()))


def test_prepare_converts_a_head_before_it_measures_and_a_second_time_does_nothing(
    fitting, target, capsys
):
    folder, asked = fitting
    config, measured = serving(target, folder), Measured()
    with pytest.raises(ConfigError, match="is not converted yet: run `spindle prepare`"):
        check_pairs(config)
    said = doctor.tables(config)
    assert (said.state, "the first start does so" in said.text) == (doctor.WARNING, True)
    for _ in range(2):
        prepare(config, measure=measured)
    assert measured.names == [["target", "eagle"]]
    assert asked == [(str(folder), len(PROMPTS))]
    assert capsys.readouterr().out.count("its target answers a few prompts") == 1
    check_pairs(config)
    assert Service(config, 1, model_path).taps == (1, 2)
    assert model_path(config.drafts[0]) == served_folder(folder)


def test_drafts_are_converted_before_the_target_whose_graph_has_their_layers(
    target, tmp_path, monkeypatch
):
    calls = []
    for module in (eagle_kind, openvino_kind):
        monkeypatch.setattr(module, "convert", lambda engine, *others: calls.append(engine.name))
    convert_folders(serving(target, tmp_path, "openvino"), str)
    assert calls == ["eagle", "target"]


def test_a_folder_in_our_form_is_served_as_it_is(target, tmp_path):
    convert(folder_of(tmp_path / "head", head_for(target)), target, tmp_path / "ours")
    config, measured = serving(target, tmp_path / "ours"), Measured()
    prepare(config, measure=measured)
    assert model_path(config.drafts[0]) == tmp_path / "ours"
    assert not (tmp_path / "cache" / "heads").exists()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"dflash_config": {}}, r"drafts\[0\]\.model: .*head cannot be served: it is DFlash"),
        ({"medusa_num_heads": 3}, "it is Medusa's heads"),
    ],
)
def test_other_heads_are_refused_before_anything_is_converted(config, text, target, tmp_path):
    folder = folder_of(tmp_path / "head", head_for(target), **config)
    with pytest.raises(ConfigError, match=text):
        check_folders(serving(target, folder))


def test_a_folder_that_is_not_there_is_named(target):
    with pytest.raises(ConfigError, match=r"drafts\[0\]\.model must be a folder, got 'absent'"):
        check_folders(serving(target, "absent"))
