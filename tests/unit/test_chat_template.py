import json
import pickle

import pytest

from backend.checked_settings import ConfigError
from backend.openai_frontend.template import ChatTemplate, RenderError, load_template
from tests.fakes.checkpoints import LFS_POINTER

SOURCE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}[answer]{% endif %}"
)


def checkpoint(folder, **config):
    """Write a tokenizer's settings."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


MESSAGES = [{"role": "user", "content": "hi"}]


def test_messages_become_the_prompt_that_the_model_answers():
    assert ChatTemplate(SOURCE, "<s>").prompt(MESSAGES) == "<s>[user]hi[answer]"


@pytest.mark.parametrize(
    ("token", "prompt"),
    [
        ("<s>", "<s>[user]hi[answer]"),
        ({"content": "<s>", "lstrip": False}, "<s>[user]hi[answer]"),
        (None, "[user]hi[answer]"),
    ],
)
def test_a_template_writes_the_begin_token_of_the_tokenizer_s_settings(tmp_path, token, prompt):
    folder = checkpoint(tmp_path, chat_template=SOURCE, bos_token=token)
    assert load_template(folder, None).prompt(MESSAGES) == prompt


def test_a_file_wins_over_the_folder_and_a_model_may_have_none(tmp_path):
    folder = checkpoint(tmp_path, chat_template="of the config")
    (folder / "chat_template.jinja").write_text("of the folder")
    (folder / "given.jinja").write_text("given")
    assert load_template(folder, folder / "given.jinja").prompt(MESSAGES) == "given"
    assert load_template(folder, None).prompt(MESSAGES) == "of the folder"
    (folder / "chat_template.jinja").unlink()
    assert load_template(folder, None).prompt(MESSAGES) == "of the config"
    assert load_template(checkpoint(tmp_path), None) is None
    assert load_template(None, None) is None


def test_of_templates_by_name_the_one_for_tools_is_taken_where_there_are_some(tmp_path):
    several = [{"name": "default", "template": SOURCE}, {"name": "rag", "template": "{{ none }}"}]
    assert load_template(checkpoint(tmp_path, chat_template=several), None).prompt(MESSAGES) == (
        "[user]hi[answer]"
    )
    several.append({"name": "tool_use", "template": "{{ tools | length }}<tool_call>"})
    template = load_template(checkpoint(tmp_path, chat_template=several), None)
    assert template.prompt(MESSAGES) == "[user]hi[answer]"
    assert template.prompt(MESSAGES, [{}]) == "1<tool_call>"
    assert template.calls.name == "Hermes"


def test_templates_of_files_are_named_as_transformers_names_them(tmp_path):
    config = [{"name": "default", "template": SOURCE}, {"name": "tool_use", "template": "config"}]
    folder = checkpoint(tmp_path, chat_template=config)
    more = folder / "additional_chat_templates"
    more.mkdir()
    # each is a template of its own: its last line end is none of the text, its macros are its own
    macro = "{{% macro m() %}}{}{{% endmacro %}}\n{{{{ m() }}}}{}\n".format
    (folder / "chat_template.jinja").write_text(macro("plain", ""))
    (more / "tool_use.jinja").write_text(macro("{{ tools | length }}", "<tool_call>"))
    (more / "rag.jinja").write_text("{{ raise_exception('no') }}")
    template = load_template(folder, None)
    assert template.prompt(MESSAGES) == template.prompt(MESSAGES, []) == "plain"
    assert template.prompt(MESSAGES, [{}]) == "1<tool_call>"
    assert template.calls.name == "Hermes"
    again = pickle.loads(pickle.dumps(template))
    assert again.prompt(MESSAGES, [{}]) == "1<tool_call>"
    (more / "tool_use.jinja").unlink()
    assert load_template(folder, None).prompt(MESSAGES, [{}]) == "config"
    (folder / "given.jinja").write_text("given")
    assert load_template(folder, folder / "given.jinja").prompt(MESSAGES, [{}]) == "given"


def test_a_template_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(LFS_POINTER)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is a Git LFS pointer"):
        load_template(tmp_path, None)
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.jinja: No such file"):
        load_template(None, tmp_path / "absent.jinja")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"the chat template of .* cannot be read: Expected an"):
        load_template(tmp_path, None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[5].content.x }}",
    ],
)
def test_what_a_template_cannot_do_is_an_error_of_the_messages(source):
    with pytest.raises(ValueError, match="messages: the model's chat template refuses them"):
        ChatTemplate(source).prompt(MESSAGES)


def test_a_developer_is_a_system_unless_the_template_knows_developers():
    messages = [{"role": "developer", "content": "be kind"}]
    assert ChatTemplate(SOURCE).prompt(messages) == "[system]be kind[answer]"
    assert ChatTemplate("{# developer #}" + SOURCE).prompt(messages) == "[developer]be kind[answer]"


def test_tools_are_shown_as_the_model_was_trained_on_them():
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}]
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson }}{% endfor %}")
    assert template.prompt(MESSAGES, tools) == json.dumps(tools[0], ensure_ascii=False)
    assert template.shows_tools
    assert not ChatTemplate(SOURCE).shows_tools


def test_what_templates_of_today_use_is_there():
    source = (
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %} "
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}"
    )
    assert ChatTemplate(source).prompt(MESSAGES) == '4 {"a":2,"b":1}'


THINKS = SOURCE + "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
EFFORT = "{{ reasoning_effort | default('medium') }}" + SOURCE


@pytest.mark.parametrize(
    ("source", "effort", "variables"),
    [
        (THINKS, None, {}),
        (THINKS, "none", {"enable_thinking": False, "thinking": False}),
        (SOURCE, "none", {}),
        (EFFORT, None, {}),
        (EFFORT, "high", {"reasoning_effort": "high"}),
        (EFFORT, "none", {"reasoning_effort": "none"}),
    ],
)
def test_an_effort_is_what_the_template_reads(source, effort, variables):
    assert ChatTemplate(source).variables(effort) == variables


def test_an_effort_that_the_template_does_not_read_is_refused():
    with pytest.raises(RenderError, match='reads none, got "high"') as raised:
        ChatTemplate(THINKS).variables("high")
    assert raised.value.field == "reasoning_effort"


def test_variables_reach_the_template_and_those_that_it_does_not_read_change_nothing():
    template = ChatTemplate(THINKS)
    assert template.prompt(MESSAGES, None, {"enable_thinking": False}).endswith("</think>")
    assert template.prompt(MESSAGES, None, {"x": [{}]}) == template.prompt(MESSAGES)


@pytest.mark.parametrize(
    "variables", [{"n": "x"}, {"n": 0}, {"n": 2, "items": 5}, {"n": 10**30, "items": []}]
)
def test_variables_that_break_the_template_are_refused_by_name_and_value(variables):
    source = (
        SOURCE + "{% if n %}{{ 'ab' * n }}{% endif %}{% if n is defined %}{{ 5 / n }}{% endif %}"
    )
    source += "{% for i in items %}{% endfor %}"
    with pytest.raises(RenderError) as raised:
        ChatTemplate(source).prompt(MESSAGES, None, variables)
    assert raised.value.field == "chat_template_kwargs"
    assert json.dumps(variables)[:30] in str(raised.value)


def test_messages_that_break_the_template_are_refused_whatever_the_variables():
    with pytest.raises(RenderError, match="refuses them: integer division") as raised:
        ChatTemplate("{{ 1 // 0 }}").prompt(MESSAGES, None, {"x": 1})
    assert raised.value.field == "messages"
