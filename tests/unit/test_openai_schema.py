"""The fields of the OpenAI front end, and the page that lists them."""

import pytest
from pydantic import ValidationError

from backend.openai_frontend import schema
from backend.openai_frontend.answers import tensors
from backend.openai_frontend.bodies import IGNORED, REFUSED, ChatMessage
from backend.openai_frontend.errors import invalid_body, upstream_error
from backend.openai_frontend.schema import ChatRequest, CompletionRequest
from docs.tools.openai_page import BODIES, PAGE, with_fields

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ODD = object()


def fields_of(fate):
    """Return (body, name) of the fields of a fate."""
    bodies = (CompletionRequest, ChatRequest)
    found = [
        (body, name, field.json_schema_extra or {})
        for body in bodies
        for name, field in body.model_fields.items()
    ]
    return [(body, name) for body, name, extra in found if extra.get("fate") == fate]


def made(body, **more):
    return body(**({"model": "m", "prompt": "a"} if body is CompletionRequest else CHAT), **more)


def test_the_page_lists_every_field_as_it_is():
    page = PAGE.read_text("utf-8")
    assert page == with_fields(page), "write it by: python -m docs.tools.reference"
    for body in BODIES:
        for name, field in body.model_fields.items():
            assert f"| `{name}` | " in page
            assert field.description, name


@pytest.mark.parametrize(("body", "name"), fields_of(IGNORED))
def test_what_is_ignored_takes_any_value(body, name):
    for value in ({"a": 1}, "x", 5, [ODD], False):
        made(body, **{name: value})


def test_what_vllm_router_adds_asks_for_nothing():
    common = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
        "stream": False,
    }
    made(CompletionRequest, echo=False, **common)
    made(
        ChatRequest,
        logprobs=False,
        continue_final_message=False,
        separate_reasoning=True,
        stream_reasoning=True,
        include_reasoning=True,
        **common,
    )
    schema.TokenizeRequest(**CHAT, continue_final_message=False)


@pytest.mark.parametrize(("body", "name"), fields_of(REFUSED))
def test_what_is_refused_is_named_but_for_null(body, name):
    made(body, **{name: None})
    with pytest.raises(ValidationError) as raised:
        made(body, **{name: {"a": 1}})
    error = invalid_body(raised.value.errors())
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert f"'{name}' is not supported" in str(error)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": "a", "refusal": "b"}, "a"),
        ({"content": [{"type": "refusal", "refusal": "c"}]}, "c"),
    ],
)
def test_an_answer_may_have_null_content(message, content):
    answer = {"role": "assistant", **message}
    assert ChatMessage(**answer).as_dict() == {"role": "assistant", "content": content}
    if message["content"] is None:
        for wrong in ({**answer, "role": "user"}, {"role": "assistant", "content": None}):
            with pytest.raises(ValidationError, match="content must be a text or parts"):
                ChatMessage(**wrong)


def test_hints_for_caches_are_accepted_and_not_shown_to_the_model():
    hint = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f", **hint}, **hint}
    parts = [{"type": "text", "text": "a", **hint}]
    body = made(ChatRequest, tools=[tool], **hint)
    body.messages = [ChatMessage(role="user", content=parts, **hint)]
    assert body.tools[0].model_dump(exclude_none=True) == {
        "type": "function",
        "function": {"name": "f"},
    }
    assert body.messages[0].as_dict() == {"role": "user", "content": "a"}
    made(CompletionRequest, stream_options={"continuous_usage_stats": True}, stream=True)


def test_null_is_the_same_as_no_field():
    nothing = {name: None for name in ChatRequest.model_fields if name not in ("model", "messages")}
    assert made(ChatRequest, **nothing) == made(ChatRequest)


def test_a_stream_as_guidellm_and_aiperf_ask_for_it_is_served():
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = made(ChatRequest, stream=True, stream_options=options, stop=None, ignore_eos=True)
    assert body.stream_options.include_usage


def test_a_message_of_an_answer_is_a_message_of_the_next_request():
    answered = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    assert ChatMessage(**answered).as_dict() == {"role": "assistant", "content": "a"}
    call = {
        "id": "c",
        "type": "function",
        "index": 0,
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    assert ChatMessage(role="assistant", tool_calls=[call]).as_dict() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    }


@pytest.mark.parametrize(
    ("message", "names", "reported", "param", "code"),
    [
        (
            "text_input must not be empty, got ''",
            {"text_input": "prompt"},
            "prompt must not be empty, got ''",
            "prompt",
            None,
        ),
        (
            "max_tokens 9 and a prompt of 8 tokens exceed the context of 16 tokens",
            {},
            "This model's maximum context length is 16 tokens. However, you requested 17 tokens "
            "(8 in the prompt, 9 by max_tokens). Please reduce the length of the prompt or "
            "max_tokens.",
            "max_tokens",
            "context_length_exceeded",
        ),
        (
            "max_tokens 9 and a prompt of 8 tokens exceed the context of 16 tokens",
            {"text_input": "messages", "max_tokens": "max_completion_tokens"},
            "This model's maximum context length is 16 tokens. However, you requested 17 tokens "
            "(8 in the messages, 9 by max_completion_tokens). Please reduce the length of the "
            "messages or max_completion_tokens.",
            "max_completion_tokens",
            "context_length_exceeded",
        ),
        (
            "text_input of 20 tokens is over the limit of 15",
            {"text_input": "messages"},
            "This model's maximum context length is 16 tokens. However, the messages have 20 "
            "tokens, and at least one must be left for the completion. Please reduce the length of "
            "the messages.",
            "messages",
            "context_length_exceeded",
        ),
        (
            "text_input of 900 bytes is over the limit of 15 tokens",
            {"text_input": "prompt"},
            "This model's maximum context length is 16 tokens. However, the prompt has 900 bytes, "
            "which are too many for it. Please reduce the length of the prompt.",
            "prompt",
            "context_length_exceeded",
        ),
        (
            "text_input of 40000000 bytes is over the limit of 33554432 bytes",
            {"text_input": "prompt"},
            "prompt of 40000000 bytes is over the limit of 33554432 bytes",
            "prompt",
            None,
        ),
        ("the engine failed", {"text_input": "prompt"}, None, None, None),
    ],
)
def test_the_model_s_own_refusal_names_the_field(message, names, reported, param, code):
    error = upstream_error(400, message, names)
    assert (str(error), error.param, error.code) == (reported or message, param, code)


def test_minus_one_is_no_top_k():
    def sent(**options):
        body = CompletionRequest.model_validate({"model": "m", "prompt": "p", **options})
        return tensors(body, 4, 16).get("top_k")

    assert [sent(top_k=k) for k in (-1, 0, 5)] == [0, 0, 5]
    with pytest.raises(ValidationError, match="greater than or equal to -1"):
        sent(top_k=-2)


def test_salt_and_not_being_remembered_reach_the_text_model():
    def sent(**options):
        body = CompletionRequest.model_validate({"model": "m", "prompt": "p", **options})
        return {k: v for k, v in tensors(body, 4, 16).items() if k in ("cache_salt", "remember")}

    assert sent() == sent(remember=True) == {}
    assert sent(cache_salt="a", remember=False) == {"cache_salt": "a", "remember": False}
    with pytest.raises(ValidationError, match="at least 1 character"):
        sent(cache_salt="")


@pytest.mark.parametrize("body", [ChatRequest, schema.TokenizeRequest])
@pytest.mark.parametrize(
    ("variables", "param", "words"),
    [
        ({"enable_thinking": "false"}, ".enable_thinking", 'true or false, but got "false"'),
        ({"thinking": 1}, ".thinking", "true or false, but got 1"),
        ({"reasoning_effort": 3}, ".reasoning_effort", "a string, but got 3"),
        ({"messages": []}, ".messages", "is set by the server, got []"),
        ({"chat_template": "{{ x }}"}, ".chat_template", "is set by the server"),
        ({"x": [{"y": float("nan")}]}, ".x", "numbers must be finite, got [{"),
        ("enable_thinking", "", 'expected an object, but got "enable_thinking"'),
        ([], "", "expected an object, but got []"),
    ],
)
def test_variables_of_the_template_that_no_template_can_use_are_named(
    body, variables, param, words
):
    with pytest.raises(ValidationError) as raised:
        body(**CHAT, chat_template_kwargs=variables)
    error = invalid_body(raised.value.errors())
    assert error.param == f"chat_template_kwargs{param}"
    assert words in str(error)


def test_variables_of_the_template_have_any_type_of_json():
    given = {"a": None, "b": [1, {"c": "d"}], "enable_thinking": False, "thinking_budget": 5}
    assert made(ChatRequest, chat_template_kwargs=given).chat_template_kwargs == given
