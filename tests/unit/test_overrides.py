import json

import pytest

from backend.checked_settings import ConfigError
from backend.config import DEFAULT_CONFIG, load_config
from backend.engine_config import EMBEDDED_MODEL
from backend.launcher.environment import LaunchError
from backend.launcher.overrides import Overrides, write_overridden
from tests.fakes.eagle import DIALECTS, published, random_head, write


def effective(tmp_path, config=DEFAULT_CONFIG, **options):
    """Return the configuration that options make, as the engine process reads it."""
    config, written = write_overridden(config, Overrides(**options), tmp_path)
    assert load_config(written) == config
    return config


def by_every_route(tmp_path, name, folder):
    """Return the drafts of the command line, which are those of a file that names no engine."""
    drafts = effective(tmp_path, drafts=f"{name}={folder}").drafts
    file = tmp_path / "file.json"
    target = json.loads(DEFAULT_CONFIG.read_text())["target"]
    for model in (str(folder), str(folder.relative_to(tmp_path))):
        written = {"target": target, "drafts": [{"name": name, "model": model}]}
        file.write_text(json.dumps(written))
        assert load_config(file).drafts == drafts
        assert effective(tmp_path, file, drafts=name).drafts == drafts
    return drafts


def names(config):
    return [draft.name for draft in config.drafts]


def test_without_options_the_file_is_read_where_it_is(tmp_path):
    assert write_overridden(DEFAULT_CONFIG, Overrides(), tmp_path) == (
        load_config(DEFAULT_CONFIG),
        DEFAULT_CONFIG,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_ones_own_is_served_with_suffix_alone_unless_drafts_are_given(
    tmp_path, monkeypatch
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "little").mkdir()
    monkeypatch.chdir(tmp_path)
    config = effective(tmp_path, model="mine")
    assert (config.target.model, names(config)) == (str(tmp_path / "mine"), ["suffix"])
    config = effective(tmp_path, model="mine", drafts="fast=little,lookup")
    assert names(config) == ["fast", "lookup"]
    assert (config.drafts[0].engine, config.drafts[0].model) == (
        "openvino",
        str(tmp_path / "little"),
    )
    assert {draft.device for draft in config.drafts} == {"cpu"}
    assert names(effective(tmp_path, model=EMBEDDED_MODEL)) == names(load_config(DEFAULT_CONFIG))


def test_drafts_may_be_some_of_the_file_s_or_none(tmp_path):
    shipped = {draft.name: draft for draft in load_config(DEFAULT_CONFIG).drafts}
    assert effective(tmp_path, drafts="suffix,head").drafts == (
        shipped["suffix"],
        shipped["head"],
    )
    assert effective(tmp_path, drafts="none").drafts == ()
    with pytest.raises(
        LaunchError,
        match=r"--drafts must be none, or a list of name=FOLDER and of these names: lookup, "
        r"suffix, head; got 'tiny'",
    ):
        effective(tmp_path, drafts="head,tiny")
    with pytest.raises(LaunchError, match="got 'sufix': did you mean 'suffix'"):
        effective(tmp_path, drafts="sufix")


def test_a_folder_that_is_a_head_s_is_one(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"architectures": ["SpindleHead"]}')
    (head,) = by_every_route(tmp_path, "mine", tmp_path / "mine")
    assert (head.engine, head.name) == ("head", "mine")


def test_the_other_options_take_the_place_of_their_keys(tmp_path):
    config = effective(tmp_path, dtype="fp32", policy="none")
    assert (config.target.dtype, config.policy.kind, config.policy.k_max) == ("fp32", "none", 8)
    with pytest.raises(
        ConfigError,
        match=r"serving\.json with the options of the command line: target\.dtype must be one of "
        r".*'fp8'",
    ):
        effective(tmp_path, dtype="fp8")


def test_folders_next_to_the_file_stay_what_they_are(tmp_path):
    (tmp_path / "own" / "weights").mkdir(parents=True)
    file = tmp_path / "own" / "serving.json"
    file.write_text(json.dumps({"target": {"engine": "torch", "model": "weights"}}))
    assert load_config(file).target.model == str(tmp_path / "own" / "weights")
    assert effective(tmp_path, file, dtype="fp32").target.model == str(tmp_path / "own" / "weights")


def test_another_policy_does_not_get_the_options_of_the_one_in_the_file(tmp_path):
    own = {"kind": "my_package.MyPolicy", "options": {"most_rows": 8}, "k_max": 4}
    (tmp_path / "mine.json").write_text(
        json.dumps({"target": {"engine": "tests.fakes.fake"}, "policy": own})
    )
    config = effective(tmp_path, tmp_path / "mine.json", policy="none")
    assert (config.policy.kind, config.policy.options, config.policy.k_max) == ("none", {}, 4)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_published_head_is_one_by_its_folder_alone(dialect, tmp_path):
    folder = write(tmp_path / "head", dialect, *published(dialect, *random_head()))
    (draft,) = by_every_route(tmp_path, "eagle", folder)
    assert draft.engine == "eagle"
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["LlamaForCausalLM"]}))
    assert by_every_route(tmp_path, "mine", folder)[0].engine == "eagle"


def test_a_chat_template_next_to_the_file_is_found_from_the_run_folder(tmp_path):
    file, folder = tmp_path / "mine" / "serving.json", tmp_path / "run"
    file.parent.mkdir()
    folder.mkdir()
    raw = {**json.loads(DEFAULT_CONFIG.read_text()), "openai": {"chat_template": "chat.jinja"}}
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"openai\.chat_template must name a file, got 'chat"):
        load_config(file)
    template = file.parent / "chat.jinja"
    template.write_text("")
    assert load_config(file).openai.chat_template == str(template)
    assert effective(folder, file, policy="none").openai.chat_template == str(template)


def test_a_hosted_engine_replaces_drafts_and_their_lengths(tmp_path):
    config, written = write_overridden(
        DEFAULT_CONFIG, Overrides(engine="vllm", model=str(tmp_path), dtype="bf16"), tmp_path
    )
    assert (config.target.engine, config.drafts, config.policy.k_max) == ("vllm", (), 0)
    assert load_config(written) == config
