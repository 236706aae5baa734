import json

import pytest

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.model_folders import check_folders
from backend.storage.manifest import check_folder, check_pair, check_vocabulary, read_manifest
from engines_build.prepare import prepare
from tests.fakes.checkpoints import folder

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "HuggingFaceTB/SmolLM2-360M",
            "hf download HuggingFaceTB/SmolLM2-360M --local-dir SmolLM2-360M; then give "
            "SmolLM2-360M$",
        ),
        (
            "/nowhere/at/all",
            "target.model must be a folder, got '/nowhere/at/all', which is not there$",
        ),
        ("smolm2-135m-instruct", "not there: did you mean 'smollm2-135m-instruct'\\?$"),
        (
            "/models/a.gguf",
            r"Of a GGUF file make one: .* --gguf /models/a.gguf --out FOLDER \(spindle serve",
        ),
    ],
)
def test_what_is_no_folder_says_how_to_get_one(tmp_path, model, words):
    with pytest.raises(ConfigError, match=words):
        check_folder("target.model", model, tmp_path / model, FAMILY, tokenizer=True)


def test_a_folder_that_cannot_be_served_says_what_it_lacks(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"target\.model: .*empty has no config\.json\. Give the folder of a Hugging Face "
        r"checkpoint",
    ):
        check_folder("target.model", "empty", tmp_path / "empty", FAMILY, tokenizer=True)
    other = folder(tmp_path, "gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        ConfigError,
        match=r"is a GPT2LMHeadModel, which is not supported\. Supported are LlamaForCausalLM, "
        r"MistralForCausalLM, Qwen2ForCausalLM",
    ):
        check_folder("target.model", "gpt2", other, FAMILY, tokenizer=True)
    bare = folder(tmp_path, "bare", tokenizer=None)
    with pytest.raises(
        ConfigError,
        match=r"bare has no tokenizer\.json\. Download it with the model; .*save_pretrained",
    ):
        check_folder("target.model", "bare", bare, FAMILY, tokenizer=True)
    check_folder("drafts[0].model", "bare", bare, FAMILY, tokenizer=False)


def test_a_draft_that_names_its_targets_tokenizer_pairs_with_it(tmp_path):
    target = read_manifest(folder(tmp_path, "target"))
    draft = read_manifest(
        folder(
            tmp_path,
            "draft",
            tokenizer=None,
            vocabulary_sha256=target.vocabulary_sha256,
            shape=(1, 4),
        )
    )
    check_pair(target, draft, same_size=True)
    assert target.layout_sha256 != draft.layout_sha256
    assert (target.architecture, target.vocab_size, target.max_context_tokens) == (
        "LlamaForCausalLM",
        10,
        64,
    )


def test_how_a_tokenizer_file_is_written_does_not_matter(tmp_path):
    target = read_manifest(folder(tmp_path, "target"))
    check_pair(
        target,
        read_manifest(
            folder(
                tmp_path, "same", tokenizer='{"model":  {"vocab": {"b":1, "a":0}}, "padding": null}'
            )
        ),
        same_size=True,
    )


def tokenizer_of(base, added=()):
    """Return a tokenizer.json of these tokens, by id from 0 on."""
    added = [{"id": number, "content": token} for number, token in added]
    return json.dumps(
        {"model": {"vocab": {t: n for n, t in enumerate(base)}}, "added_tokens": added}
    )


def test_another_size_is_refused_where_a_draft_has_the_target_s_rows(tmp_path):
    target, small = (
        read_manifest(folder(tmp_path, name, vocab_size=rows))
        for name, rows in (("target", 10), ("small", 9))
    )
    with pytest.raises(ConfigError, match=r"small.* 9 tokens, its target .*target 10"):
        check_pair(target, small, same_size=True)


@pytest.mark.parametrize(
    ("ours", "theirs", "rows"),
    [
        (tokenizer_of("ab"), tokenizer_of("ab"), (10, 9)),
        (tokenizer_of("ab"), tokenizer_of("ab"), (9, 10)),
        (tokenizer_of("ab", [(2, "<x>")]), tokenizer_of("ab"), (10, 8)),
        (tokenizer_of("ab"), tokenizer_of("ab", [(2, "<x>"), (5, "<y>")]), (10, 10)),
        (tokenizer_of("ab", [(2, "<x>"), (3, "<y>")]), tokenizer_of("ab", [(2, "<x>")]), (4, 3)),
        (tokenizer_of("abcd"), tokenizer_of("abcd", [(4, "<x>")]), (4, 10)),
        (tokenizer_of("abcd"), tokenizer_of("ab"), (4, 2)),  # none of the others has a row
    ],
)
def test_the_same_tokens_pair_however_the_rows_are_padded(tmp_path, ours, theirs, rows):
    target = folder(tmp_path, "target", tokenizer=ours, vocab_size=rows[0])
    draft = folder(tmp_path, "draft", tokenizer=theirs, vocab_size=rows[1])
    check_pair(read_manifest(target), read_manifest(draft), same_size=False)
    check_vocabulary(target, draft)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            tokenizer_of("ab"),
            tokenizer_of("ac"),
            r"id 1 is \"c\" in the draft, \"b\" in the target",
        ),
        (tokenizer_of("ab"), tokenizer_of("a"), r"id 1 is no token in the draft, \"b\" in the t"),
        (tokenizer_of("a"), tokenizer_of("ab"), r"id 1 is \"b\" in the draft, no token in the t"),
        (
            tokenizer_of("ab", [(2, "<x>")]),
            tokenizer_of("ab", [(2, "<y>")]),
            r"id 2 is \"<y>\" in the draft, \"<x>\" in the target",
        ),
        (
            tokenizer_of("ab", [(2, "<x>"), (3, "<y>")]),
            tokenizer_of("ab", [(2, "<y>"), (3, "<x>")]),
            r"id 2 is \"<y>\" in the draft",
        ),
    ],
)
def test_other_tokens_are_refused_with_the_first_that_differs(tmp_path, ours, theirs, words):
    target = folder(tmp_path, "target", tokenizer=ours, vocab_size=12)
    draft = folder(tmp_path, "draft", tokenizer=theirs)
    with pytest.raises(ConfigError, match=words):
        check_pair(read_manifest(target), read_manifest(draft), same_size=False)
    with pytest.raises(
        ConfigError, match=rf"draft .*draft does not have .*target; first .*{words}"
    ):
        check_vocabulary(target, draft)


def test_a_draft_made_for_another_vocabulary_is_refused_by_its_hash(tmp_path):
    target = folder(tmp_path, "target")
    mute = folder(tmp_path, "mute", tokenizer=None, vocabulary_sha256="0123")
    for check in (
        lambda: check_pair(read_manifest(target), read_manifest(mute), same_size=True),
        lambda: check_vocabulary(target, mute),
    ):
        with pytest.raises(
            ConfigError, match=r"the vocabulary 0123, its target .* has [0-9a-f]{12}$"
        ):
            check()
    check_vocabulary(target, folder(tmp_path, "silent", tokenizer=None))


def test_a_draft_of_another_tokenizer_is_refused_before_anything_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    target = folder(tmp_path, "target", tokenizer=tokenizer_of("ab"))
    draft = folder(tmp_path, "draft", tokenizer=tokenizer_of("ba"))
    engines = [{"engine": "torch", "model": str(model)} for model in (target, draft)]
    config = parse_config({"target": engines[0], "drafts": [{"name": "small", **engines[1]}]})
    with pytest.raises(ConfigError, match=r"id 0 is \"b\" in the draft, \"a\" in the target"):
        prepare(config, make_model=None, measure=None)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["decoders"]


def test_what_a_folder_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent/config\.json"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"vocab_size must be a positive number, got 'x'"):
        read_manifest(folder(tmp_path, "bad", vocab_size="x"))
    with pytest.raises(ConfigError, match="neither a tokenizer"):
        read_manifest(folder(tmp_path, "mute", tokenizer=None))
    (folder(tmp_path, "empty") / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"empty has no \.safetensors"):
        read_manifest(tmp_path / "empty")


def test_a_model_that_its_engine_cannot_run_is_refused_with_the_reason(tmp_path):
    odd = folder(tmp_path, "odd", architectures=["LlamaForCausalLM"], head_dim=96)
    raw = {"target": {"engine": "cuda", "model": str(odd)}}
    with pytest.raises(
        ConfigError, match=r"target\.model: .*odd has attention heads of 96 columns"
    ):
        check_folders(parse_config(raw))
