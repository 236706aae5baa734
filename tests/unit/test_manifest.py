import json

import pytest

from backend.config import parse_config
from backend.kinds import LLAMA_FAMILY
from backend.model_folders import check_folders
from backend.settings import ConfigError
from backend.storage.manifest import check_folder, check_pair, read_manifest
from tests.fakes.checkpoints import VOCABULARY, folder


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
        (
            "/models/a.gguf",
            r"Of a GGUF file make one: .* --gguf /models/a.gguf --out FOLDER \(spindle serve",
        ),
    ],
)
def test_what_is_no_folder_says_how_to_get_one(tmp_path, model, words):
    with pytest.raises(ConfigError, match=words):
        check_folder("target.model", model, tmp_path / model, LLAMA_FAMILY, tokenizer=True)


def test_a_folder_that_cannot_be_served_says_what_it_lacks(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"target\.model: .*empty has no config\.json\. Give the folder of a Hugging Face "
        r"checkpoint",
    ):
        check_folder("target.model", "empty", tmp_path / "empty", LLAMA_FAMILY, tokenizer=True)
    other = folder(tmp_path, "gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        ConfigError,
        match=r"is a GPT2LMHeadModel, which is not supported\. Supported are LlamaForCausalLM, "
        r"MistralForCausalLM, Qwen2ForCausalLM",
    ):
        check_folder("target.model", "gpt2", other, LLAMA_FAMILY, tokenizer=True)
    bare = folder(tmp_path, "bare", tokenizer=None)
    with pytest.raises(
        ConfigError,
        match=r"bare has no tokenizer\.json\. Download it with the model; .*save_pretrained",
    ):
        check_folder("target.model", "bare", bare, LLAMA_FAMILY, tokenizer=True)
    check_folder("drafts[0].model", "bare", bare, LLAMA_FAMILY, tokenizer=False)


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
    check_pair(target, draft)
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
    )


def test_another_vocabulary_or_tokenizer_is_refused_by_both_folders(tmp_path):
    target = read_manifest(folder(tmp_path, "target"))
    with pytest.raises(ConfigError, match=r"small.* 9 tokens, its target .*target 10"):
        check_pair(target, read_manifest(folder(tmp_path, "small", vocab_size=9)))
    with pytest.raises(
        ConfigError,
        match=r"draft .*other was made for .*: id 1 is \"c\" in the draft, \"b\" in the target",
    ):
        check_pair(
            target,
            read_manifest(folder(tmp_path, "other", tokenizer=VOCABULARY.replace('"b"', '"c"'))),
        )
    with pytest.raises(ConfigError, match=r"id 1 is no token in the draft"):
        check_pair(
            target,
            read_manifest(
                folder(tmp_path, "short", tokenizer=json.dumps({"model": {"vocab": {"a": 0}}}))
            ),
        )
    with pytest.raises(
        ConfigError, match=r"was made for the vocabulary 0123, its target .* has [0-9a-f]{12}$"
    ):
        check_pair(
            target,
            read_manifest(folder(tmp_path, "mute", tokenizer=None, vocabulary_sha256="0123")),
        )


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
