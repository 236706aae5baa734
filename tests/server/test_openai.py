"""The OpenAI front end by the real ``openai`` client, over the real tritonserver."""

import json
import signal
import socket
import urllib.error
import urllib.request

import openai
import pytest

from tests.server.harness import free_ports

KEY = "a-key"
REFUSES = "{% if messages[0].role == 'odd' %}{{ raise_exception('odd') }}{% endif %}"
TEMPLATE = REFUSES + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def fronted(start_service, tmp_path_factory):
    """A service with the front end, a key and a chat template."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    (port,) = free_ports(1)
    variables = {"OPENAI_API_KEY": KEY, "OPENAI_CHAT_TEMPLATE": str(template), "OPENAI_CORS_ORIGINS": "http://page.example"}
    service = start_service(OPENAI_PORT=str(port), **variables).wait_ready()
    service.openai = port
    service.wait_until(lambda: f"spindle: OpenAI API http://127.0.0.1:{port}/v1" in service.log.read_text())
    assert post(service, "/v1/none", {})[0] == 404, "it was said to answer"
    return service


@pytest.fixture
def client(fronted):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{fronted.openai}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def post(service, path, body, **headers):
    """Return (status, body, headers); status 0 where nobody answers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{service.openai}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers
    except OSError:
        return 0, "", {}


def expected(service, prompt, max_tokens, **inputs):
    """Return what the text model itself writes; the fake's end token may end it."""
    _, text = service.post(
        "/v2/models/tensorrt_llm_bls/generate",
        {"text_input": prompt, "max_tokens": max_tokens, "exclude_input_in_output": True, **inputs},
    )
    reply = json.loads(text)
    return reply["text_output"], "length" if reply["finish_reason"] == "length" else "stop"


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["fake"]


def test_a_completion_is_the_model_s_text(client, fronted):
    reply = client.completions.create(model="fake", prompt="Grüße ", max_tokens=30, temperature=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == expected(fronted, "Grüße ", 30)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (8, 30)
    assert reply.object == "text_completion"


def test_options_reach_the_model(client, fronted):
    text, _ = expected(fronted, "options ", 40)
    reply = client.completions.create(
        model="fake", prompt="options ", max_tokens=40, temperature=0, stop=["~never~", text[10:13]], echo=True
    )
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("options " + text[: text.index(text[10:13])], "stop")
    seeded = {
        "model": "fake",
        "prompt": "seed ",
        "max_tokens": 20,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "top_p": 0.9,
    }
    same = expected(fronted, "seed ", 20, temperature=1.0, seed=5, presence_penalty=0.5, frequency_penalty=0.25, top_p=0.9)[0]
    assert client.completions.create(**seeded).choices[0].text == same


def test_several_prompts_and_several_texts_are_choices_in_order(client, fronted):
    reply = client.completions.create(model="fake", prompt=["one ", "three "], n=2, max_tokens=10, seed=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(reply.choices):
        prompt, seed = ["one ", "three "][index // 2], 3 + index % 2
        assert choice.text == expected(fronted, prompt, 10, temperature=1.0, seed=seed)[0]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4 + 6, 40)


def test_a_streamed_completion_comes_in_parts_with_usage_at_the_end(client, fronted):
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 60}
    chunks = list(client.completions.create(model="fake", prompt="stream ", **options))
    *parts, last = chunks
    assert len(parts) > 5
    assert "".join(part.choices[0].text for part in parts) == expected(fronted, "stream ", 60)[0]
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 60)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_through_the_template(client, fronted, stream):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    reply = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=25, temperature=0, n=2, stream=stream)
    text = expected(fronted, "<system>be kind<user>hi<assistant>", 25)[0]
    if not stream:
        assert [choice.message.content for choice in reply.choices] == [text, text]
        assert reply.choices[0].message.role == "assistant"
        return
    chunks = list(reply)
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content for choice in mine) == text
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"


BAD = [
    ({"model": "other"}, 404, "'other' does not exist"),
    ({"max_tokens": 0}, 400, "max_tokens: .*greater than or equal to 1"),
    ({"max_tokens": 100000}, 400, "max_tokens 100000 and a prompt"),
    ({"temperature": 3}, 400, "temperature"),
    ({"n": 0}, 400, "n: "),
    ({"prompt": []}, 400, "prompt must not be empty"),
    ({"prompt": ""}, 400, "text_input must not be empty"),
    ({"prompt": [1, 2]}, 400, "prompt"),
    ({"logprobs": 6}, 400, "logprobs: .*less than or equal to 5"),
    ({"logprobs": 1, "echo": True}, 400, "logprobs is not served with echo"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias is not served"),
    ({"surprise": 1}, 400, "surprise: Extra inputs"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "status", "words"), BAD)
def test_what_is_wrong_with_a_request_has_its_status_and_its_name(fronted, change, status, words, stream):
    import re

    body = {"model": "fake", "prompt": "a", "max_tokens": 4, "stream": stream, **change}
    found, text, _ = post(fronted, "/v1/completions", body)
    assert found == status, text
    assert re.search(words, json.loads(text)["error"]["message"]), text
    assert not re.search(r"Traceback|\.py", text)


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}}, "required": ["n", "b"]}
SCHEMA["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
HI = [{"role": "user", "content": "hi"}]
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "content must be text, got null"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: .*less than or equal to 20"),
    ({"response_format": {"type": "json_schema"}}, "json_schema must be given"),
    ({"response_format": {"type": "poem"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
        "guided_decoding_guide is no json_schema",
    ),
    ({"tool_choice": "required"}, "tool_choice required needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other' is none of the tools"),
    ({"tools": [{"type": "custom"}]}, "tools.0.type"),
    ({"functions": []}, "functions: Extra inputs"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "words"), BAD_CHATS)
def test_what_is_wrong_with_a_chat_is_named(fronted, change, words, stream):
    import re

    status, text, _ = post(fronted, "/v1/chat/completions", {"model": "fake", "messages": HI, "stream": stream, **change})
    assert status == 400, text
    assert re.search(words, json.loads(text)["error"]["message"]), text


def check_tokens(tokens, text):
    """Tokens of the fake are bytes, four of which share the law."""
    assert b"".join(bytes(token.bytes) for token in tokens) == text.encode()
    for token in tokens:
        assert len(token.top_logprobs) == 3
        values = [best.logprob for best in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob <= values[0] <= 0
        assert token.token in [best.token for best in token.top_logprobs] or token.logprob <= values[-1]


def test_a_chat_has_the_log_probabilities_of_its_tokens(client):
    options = {"model": "fake", "messages": HI, "max_tokens": 20, "logprobs": True, "top_logprobs": 3, "seed": 1}
    choice = client.chat.completions.create(**options).choices[0]
    check_tokens(choice.logprobs.content, choice.message.content)
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    check_tokens([token for part in streamed for token in part.logprobs.content], choice.message.content)
    assert [token.logprob for part in streamed for token in part.logprobs.content] == [t.logprob for t in choice.logprobs.content]


def test_a_completion_has_log_probabilities_with_offsets(client):
    choice = client.completions.create(model="fake", prompt="lp ", max_tokens=15, logprobs=2, seed=1).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == list(range(15))
    assert len(told.token_logprobs) == len(told.top_logprobs) == 15
    assert all(len(best) == 2 for best in told.top_logprobs)
    assert client.completions.create(model="fake", prompt="lp ", max_tokens=2).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_holds_the_text_to_a_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    reply = client.chat.completions.create(model="fake", messages=HI, max_tokens=200, seed=2, response_format=form, stream=stream)
    text = "".join(c.choices[0].delta.content or "" for c in reply) if stream else reply.choices[0].message.content
    assert json.loads(text)["n"] in (1, 22, 333)
    assert json.loads(text).keys() == {"n", "b"}
    reply = client.chat.completions.create(model="fake", messages=HI, max_tokens=3, response_format={"type": "json_object"})
    assert reply.choices[0].message.content.lstrip()[:1] in ("{", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["any", "named"])
def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(client, choice, stream):
    options = {"model": "fake", "messages": HI, "max_tokens": 300, "seed": 3, "tools": TOOLS[:1], "tool_choice": choice}
    reply = client.chat.completions.create(**options, stream=stream)
    if stream:
        parts = [chunk.choices[0] for chunk in reply]
        call, reason = parts[-1].delta.tool_calls[0], parts[-1].finish_reason
    else:
        call, reason = reply.choices[0].message.tool_calls[0], reply.choices[0].finish_reason
    assert (reason, call.function.name, call.type) == ("tool_calls", "weather", "function")
    assert json.loads(call.function.arguments).keys() == {"n", "b"}


def test_a_tool_that_may_be_called_is_left_to_the_model_and_a_conversation_may_have_calls(client):
    called = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    reply = client.chat.completions.create(model="fake", messages=messages, max_tokens=5, tools=TOOLS, tool_choice="auto")
    assert reply.choices[0].message.content
    assert reply.choices[0].message.tool_calls is None


def get(service, path, **headers):
    """Return (status, body, headers) of a GET."""
    request = urllib.request.Request(f"http://127.0.0.1:{service.openai}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_status_page_is_there_for_anyone_and_loads_nothing_from_elsewhere(fronted):
    import re

    status, page, headers = get(fronted, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"https?://|src=|@import|url\(|innerHTML", page)
    assert get(fronted, "/?key=x")[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/explain"])
def test_what_the_page_shows_needs_the_key(fronted, path):
    assert get(fronted, path)[0] == 401
    assert get(fronted, path, Authorization=f"Bearer {KEY}")[0] == 200


def test_the_page_s_figures_are_triton_s_and_the_last_plan_is_explained(client, fronted):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(client.completions.create, model="fake", prompt=f"p{n} ", max_tokens=300, temperature=0) for n in range(4)]
        fronted.wait_until(lambda: fronted.health()["active"] >= 1, 10)
        told = json.loads(get(fronted, "/explain", Authorization=f"Bearer {KEY}")[1])
        assert all(job.result().choices[0].text for job in jobs)
    assert told["age_s"] is not None
    assert "tokens proposed" in told["step"]
    assert told["requests"] == ["the policy of this server is not the adaptive one"]
    fronted.wait_until(lambda: "spindle_emitted_tokens_total{" in get(fronted, "/metrics", Authorization=f"Bearer {KEY}")[1], 10)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "fake", "prompt": "\\ud800"}', b"null"])
def test_a_body_that_cannot_be_read_is_refused(fronted, body):
    status, text, _ = post(fronted, "/v1/completions", body)
    assert status == 400, text
    assert json.loads(text)["error"]["message"]


def test_a_body_over_the_limit_is_refused(fronted):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", fronted.openai)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {5 * 1024 * 1024}\r\n\r\n{{".encode())
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_template_may_refuse_messages(client):
    with pytest.raises(openai.BadRequestError, match="chat template refuses them: odd"):
        client.chat.completions.create(model="fake", messages=[{"role": "odd", "content": "x"}])
    part = {"type": "image_url", "image_url": "u"}
    with pytest.raises(openai.BadRequestError, match="only content parts of type text"):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": [part]}])


def test_without_the_key_nobody_is_served(fronted):
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert post(fronted, path, {}, Authorization="Bearer another")[0] == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{fronted.openai}/v1", api_key="wrong").models.list()


def test_only_the_named_site_s_pages_may_call(fronted):
    def allowed(origin):
        return post(fronted, "/v1/completions", {}, Origin=origin)[2].get("access-control-allow-origin")

    assert (allowed("http://page.example"), allowed("http://other.example")) == ("http://page.example", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(fronted, stream):
    body = json.dumps({"model": "fake", "prompt": "gone ", "max_tokens": 1500, "stream": stream, "min_tokens": 1500}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fronted.openai)) as connection:
        connection.sendall(head.encode() + body)
        fronted.wait_until(lambda: fronted.health()["active"] == 1, 5)
    fronted.wait_until(lambda: fronted.health()["active"] == 0, 3)


def test_a_front_end_that_died_is_started_again(fronted):
    import os

    os.kill(fronted.pid_of("backend.openai_frontend"), signal.SIGKILL)
    fronted.wait_until(lambda: post(fronted, "/v1/none", {})[0] == 404, 30)


def test_at_the_end_nothing_is_left(fronted):
    tree = fronted.tree()
    assert fronted.stop() == 0
    assert fronted.tree() == []
    from backend.triton_adapter.launcher.processes import is_running

    assert not any(map(is_running, tree))
