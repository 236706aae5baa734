import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from backend.openai_frontend.template import ChatTemplate, RenderError, load_template

SOURCE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}[answer]{% endif %}"
)


def checkpoint(folder, *, adds_bos=False, **config):
    """Write a tokenizer's files."""
    library = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, "a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


MESSAGES = [{"role": "user", "content": "hi"}]


def test_messages_become_the_prompt_that_the_model_answers():
    assert ChatTemplate(SOURCE, "<s>").prompt(MESSAGES) == "<s>[user]hi[answer]"


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>"}])
@pytest.mark.parametrize(
    ("adds_bos", "prompt"), [(True, "[user]hi[answer]"), (False, "<s>[user]hi[answer]")]
)
def test_the_begin_token_comes_once_by_the_template_or_the_tokenizer(
    tmp_path, token, adds_bos, prompt
):
    folder = checkpoint(tmp_path, adds_bos=adds_bos, chat_template=SOURCE, bos_token=token)
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
