"""The OpenAI front end by the real ``openai`` client, over the real tritonserver."""

import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request

import openai
import pytest

from backend import __version__
from backend.openai_frontend.access import tenant_of, tenant_salt
from backend.tokenizer import BYTE_VALUES
from tests.server.harness import free_ports, write_config

KEY, OTHER_KEY = "a-key", "another-key"
LLAMA = (
    '{% if tools %}{# {"name": function name, "parameters": '
    "dictionary of argument name and its value} #}{% endif %}"
)
TEMPLATE = LLAMA + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def fronted(start_service, tmp_path_factory):
    """A service with the front end, a key and a chat template, where proxies are set."""
    folder = tmp_path_factory.mktemp("configuration")
    config = write_config(folder, TEMPLATE)
    (port,) = free_ports(1)
    variables = {
        "OPENAI_API_KEY": f"{KEY}, {OTHER_KEY}",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    service = start_service(config, OPENAI_PORT=str(port), **variables).wait_ready()
    service.openai = port
    service.wait_until(
        lambda: f"spindle: OpenAI API http://127.0.0.1:{port}/v1" in service.log.read_text()
    )
    assert post(service, "/v1/none", {})[0] == 404, "it was said to answer"
    return service


@pytest.fixture
def client(fronted):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{fronted.openai}/v1", api_key=KEY, max_retries=0
    ) as made:
        yield made


def post(service, path, body, **headers):
    """Return (status, body, headers); status 0 where no server answers."""
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
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_a_completion_is_the_model_s_text(client, fronted):
    reply = client.completions.create(model="fake", prompt="Grüße ", max_tokens=30, temperature=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == expected(
        fronted, "Grüße ", 30
    )
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (8, 30)
    assert reply.object == "text_completion"


def test_options_reach_the_model(client, fronted):
    text, _ = expected(fronted, "options ", 40)
    reply = client.completions.create(
        model="fake",
        prompt="options ",
        max_tokens=40,
        temperature=0,
        stop=["~never~", text[10:13]],
        echo=True,
    )
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (
        "options " + text[: text.index(text[10:13])],
        "stop",
    )
    seeded = {"model": "fake", "prompt": "seed ", "max_tokens": 20, "seed": 5, "top_p": 0.9}
    same = expected(fronted, "seed ", 20, temperature=1.0, seed=5, top_p=0.9)[0]
    assert client.completions.create(**seeded).choices[0].text == same


def test_several_prompts_and_several_texts_are_choices_in_order(client, fronted):
    reply = client.completions.create(
        model="fake", prompt=["one ", "three "], n=2, max_tokens=10, seed=3
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(reply.choices):
        prompt, seed = ["one ", "three "][index // 2], 3 + index % 2
        assert choice.text == expected(fronted, prompt, 10, temperature=1.0, seed=seed)[0]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4 + 6, 40)


@pytest.mark.parametrize("stream", [False, True])
def test_options_of_vllm_mean_what_they_mean_there(client, stream):
    def text(**options):
        reply = client.completions.create(
            model="fake", prompt="vllm ", max_tokens=30, stream=stream, extra_body=options
        )
        choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        return "".join(choice.text for choice in choices), choices[-1].finish_reason

    greedy, reason = text(temperature=0, ignore_eos=True)
    assert reason == "length"
    assert text(min_p=1, ignore_eos=True)[0] == greedy
    assert text(temperature=0, ignore_eos=True, top_k=-1)[0] == greedy
    assert text(seed=1, top_k=-1) == text(seed=1, top_k=0) == text(seed=1)
    for more in ({}, {"num_draft_tokens": 0}):
        stopped = text(temperature=0, ignore_eos=True, stop_token_ids=[ord(greedy[9])], **more)
        assert stopped == (greedy[: greedy.index(greedy[9])], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_may_ask_for_more_texts_than_the_queue_holds(client, stream):
    prompts, n = [f"{index} " for index in range(256)], 6  # the queue has 1,024 places
    reply = client.completions.create(
        model="fake", prompt=prompts, n=n, max_tokens=1, echo=True, stream=stream
    )
    texts = {}
    choices = [choice for part in reply for choice in part.choices] if stream else reply.choices
    for choice in choices:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [texts[index].partition(" ")[0] for index in range(256 * n)] == [
        str(index // n) for index in range(256 * n)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_can_be_had_again_by_the_seed_that_its_choice_names(client, stream):
    def ask(**options):
        """Return (text, seed) of each choice."""
        options = {"model": "fake", "prompt": "again ", "max_tokens": 40, **options}
        if not stream:
            choices = client.completions.create(**options).choices
            return [(choice.text, choice.seed) for choice in choices]
        found = [["", None] for _ in range(options.get("n", 1))]
        for chunk in client.completions.create(**options, stream=True):
            (choice,) = chunk.choices
            assert hasattr(choice, "seed") == (choice.finish_reason is not None)
            found[choice.index][0] += choice.text
            found[choice.index][1] = getattr(choice, "seed", None)
        return [tuple(one) for one in found]

    made = ask(n=3)
    assert len(set(made)) == 3
    for text, seed in made:
        for body in ({}, {"num_draft_tokens": 0}):
            assert ask(seed=seed, extra_body=body) == [(text, seed)]


def test_a_streamed_completion_comes_in_parts_with_usage_at_the_end(client, fronted):
    options = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 60,
    }
    chunks = list(client.completions.create(model="fake", prompt="stream ", **options))
    *parts, last = chunks
    assert len(parts) > 5
    assert "".join(part.choices[0].text for part in parts) == expected(fronted, "stream ", 60)[0]
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        "length"
    ]
    assert (last.choices, last.usage.completion_tokens) == ([], 60)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_through_the_template(client, fronted, stream):
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    reply = client.chat.completions.create(
        model="fake", messages=messages, max_completion_tokens=25, temperature=0, n=2, stream=stream
    )
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
    ({"model": "other"}, 404, "model", "model_not_found", "'other' does not exist"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_value", "needs echo true"),
    (
        {"max_tokens": "few"},
        400,
        "max_tokens",
        "invalid_type",
        'expected an integer, but got "few"',
    ),
    (
        {"max_tokens": 100000},
        400,
        "max_tokens",
        "context_length_exceeded",
        "maximum context length is 2048 tokens. However, you requested 100001 tokens (1 in the "
        "prompt, 100000 by max_tokens)",
    ),
    ({"temperature": 3}, 400, "temperature", "invalid_value", "expected a value <= 2.0, but got 3"),
    ({"temprature": 1}, 400, "temprature", "unknown_parameter", "Did you mean 'temperature'?"),
    ({"surprise": 1}, 400, "surprise", "unknown_parameter", "Unknown parameter: 'surprise'"),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter", "'suffix' is not supported"),
    ({"prompt": None}, 400, "prompt", "missing_required_parameter", "Missing required parameter"),
    ({"prompt": []}, 400, "prompt", "invalid_value", "must be 1 to 256 prompts, got 0"),
    ({"prompt": [1, "a"]}, 400, "prompt", "invalid_value", "must be a string, an array of strings"),
    ({"prompt": ""}, 400, "prompt", None, "prompt must not be empty"),
    ({"prompt": [999]}, 400, "prompt", None, "prompt must contain token ids below 257, got 999"),
    ({"logprobs": 6}, 400, "logprobs", "invalid_value", "<= 5, but got 6"),
    ({"logit_bias": {"999": 1}}, 400, "logit_bias", None, "token ids below 257, got 999"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", "invalid_value", "<= 100"),
    ({"num_draft_tokens": -1}, 400, "num_draft_tokens", "invalid_value", ">= 0, but got -1"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "status", "param", "code", "words"), BAD)
def test_what_is_wrong_with_a_request_is_reported_as_openai_does(
    fronted, change, status, param, code, words, stream
):
    body = {"model": "fake", "prompt": "a", "max_tokens": 4, "stream": stream, **change}
    found, text, _ = post(fronted, "/v1/completions", body)
    assert found == status, text
    error = json.loads(text)["error"]
    assert words in error.pop("message"), text
    assert error == {"type": "invalid_request_error", "param": param, "code": code}


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
}
SCHEMA["additionalProperties"] = False
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "clock"}},
]
HI = [{"role": "user", "content": "hi"}]


def part(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


BAD_CHATS = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "got null"),
    (
        {"messages": [*HI, {"role": "robot", "content": "x"}]},
        "messages[1].role",
        "\"robot\". Supported values are: 'system'",
    ),
    (
        {"messages": [{"role": "user", "contents": "x"}]},
        "messages[0].contents",
        "Did you mean 'content'?",
    ),
    (
        part(type="image_url", image_url="u"),
        "messages[0].content[0].type",
        "only content parts of type text",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20, but got 21"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be given"),
    ({"response_format": {"type": "poem"}}, "response_format.type", "Supported values are: 'text'"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "x"}},
            }
        },
        "response_format",
        "response_format is no json_schema that can be served: Invalid type: x",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
        "is not among the tools",
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "Supported values are: 'function'"),
    ({"functions": [{"name": "x"}]}, "functions", "not supported: use tools"),
    ({"reasoning_effort": "high"}, "reasoning_effort", 'template reads none, got "high"'),
    (
        {"chat_template_kwargs": {"enable_thinking": "false"}},
        "chat_template_kwargs.enable_thinking",
        'expected true or false, but got "false"',
    ),
    ({"max_completion_token": 5}, "max_completion_token", "Did you mean 'max_completion_tokens'?"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens", "5000 by max_completion_tokens"),
    (
        {"max_tokens": 5000, "n": 2, "tools": TOOLS, "tool_choice": "required"},
        "max_tokens",
        "5000 by max_tokens",
    ),
    (
        {"messages": [{"role": "user", "content": "x" * 2100}]},
        "messages",
        "the messages have 2117 tokens",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "param", "words"), BAD_CHATS)
def test_what_is_wrong_with_a_chat_is_named(fronted, change, param, words, stream):
    status, text, _ = post(
        fronted,
        "/v1/chat/completions",
        {"model": "fake", "messages": HI, "stream": stream, **change},
    )
    assert status == 400, text
    error = json.loads(text)["error"]
    assert words in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("left", [1, 5, 200])
def test_without_max_tokens_a_text_has_what_is_left_of_the_context(client, stream, left):
    def counted(create, **body):
        reply = create(model="fake", temperature=0, stream=stream, extra_body=KEEPS_ON, **body)
        if not stream:
            return reply.usage, {choice.finish_reason for choice in reply.choices}
        *parts, last = list(reply)
        reasons = {choice.finish_reason for part in parts for choice in part.choices}
        return last.usage, reasons - {None}

    options = {"stream_options": {"include_usage": True}} if stream else {}
    messages = [{"role": "user", "content": "x" * (2048 - left - len("<user><assistant>"))}]
    usage, reasons = counted(client.chat.completions.create, messages=messages, n=2, **options)
    assert (usage.prompt_tokens, usage.completion_tokens) == (2048 - left, 2 * left)
    assert reasons == {"length"}
    prompts = ["x" * (2048 - left), "y" * 2000]
    usage, _ = counted(client.completions.create, prompt=prompts, echo=True, **options)
    assert usage.completion_tokens == min(left, 16) + 16


KEEPS_ON = {"ignore_eos": True}


def test_a_logit_bias_is_added_to_the_logits_of_its_tokens(client):
    options = {"model": "fake", "prompt": "bias ", "max_tokens": 6, "temperature": 0}
    assert (
        client.completions.create(**options, logit_bias={str(ord("x")): 100}).choices[0].text
        == "xxxxxx"
    )
    plain = client.completions.create(**options).choices[0].text
    assert (
        client.completions.create(**options, logit_bias={str(ord("x")): 1}).choices[0].text == plain
    )
    banned = (
        client.completions.create(**options, logit_bias={str(ord(plain[0])): -100}).choices[0].text
    )
    assert banned[0] != plain[0]


@pytest.mark.parametrize("echo", [False, True])
def test_prompts_may_be_token_ids(client, echo):
    options = {"model": "fake", "max_tokens": 8, "temperature": 0, "echo": echo}
    texts = [
        choice.text
        for choice in client.completions.create(prompt=["ids ", "Grüße"], **options).choices
    ]
    ids = [list(b"ids "), list("Grüße".encode())]
    reply = client.completions.create(prompt=ids, **options)
    assert [choice.text for choice in reply.choices] == texts
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[0], **options).choices[0].text == texts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed_with_its_log_probabilities(client, stream):
    options = {"model": "fake", "max_tokens": 5, "logprobs": 2, "temperature": 0}
    alone = client.completions.create(prompt="echo this", **options).choices[0]
    reply = client.completions.create(prompt="echo this", echo=True, stream=stream, **options)
    parts = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    assert "".join(choice.text for choice in parts) == "echo this" + alone.text
    tokens, values, best, offsets = (
        [item for choice in parts for item in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert "".join(tokens) == "echo this" + alone.text
    assert offsets == list(range(14))
    assert (values[0], best[0]) == (None, None)
    assert (values[9:], best[9:]) == (alone.logprobs.token_logprobs, alone.logprobs.top_logprobs)
    for at in range(1, 9):  # what the model would have written at each place of the prompt
        one = (
            client.completions.create(prompt="echo this"[:at], **{**options, "max_tokens": 1})
            .choices[0]
            .logprobs
        )
        assert best[at] == pytest.approx(one.top_logprobs[0])
        assert values[at] <= max(best[at].values())


def test_a_prompt_can_be_scored_alone(client):
    options = {"model": "fake", "prompt": "score", "logprobs": 1, "temperature": 0, "echo": True}
    reply, more = (
        client.completions.create(**options, max_tokens=0),
        client.completions.create(**options, max_tokens=1),
    )
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("score", "length")
    assert reply.choices[0].logprobs.token_logprobs == more.choices[0].logprobs.token_logprobs[:5]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 0)


def test_a_request_may_do_without_speculation(client, fronted):
    def counted():
        return fronted.metric("spindle_emitted_tokens_total"), fronted.metric(
            "spindle_draft_tokens_total"
        )

    options = {"model": "fake", "prompt": "guess ", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    before = counted()
    while before != (now := (time.sleep(1.1), counted())[1]):  # they are reported twice a second
        before = now
    assert before[1] > 0
    assert (
        client.completions.create(**options, extra_body={"num_draft_tokens": 0}).choices[0].text
        == text
    )
    fronted.wait_until(lambda: counted()[0] >= before[0] + 60, 10)
    assert counted()[1] == before[1]
    plain = client.completions.create(**options, extra_body={"num_draft_tokens": 0})
    counts = plain.metrics["speculative_decoding"]
    assert (counts["num_spec_steps"], counts["num_draft_tokens"]) == (0, 0)
    assert counts["mean_acceptance_length"] == 1.0


@pytest.mark.parametrize("texts", [1, 4])
def test_how_proposals_did_comes_once_at_the_root_of_whole_and_streamed_answers(client, texts):
    prompts = ["guess ", "again "][: 1 + (texts > 1)]
    asked = {"model": "fake", "prompt": prompts, "n": 1 + (texts > 1), "max_tokens": 40}
    whole = client.completions.create(**asked, seed=1)
    plain = list(client.completions.create(**asked, seed=1, stream=True))
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with_usage = list(client.completions.create(**asked, seed=1, **usage))
    for stream in plain, with_usage:
        assert not [chunk for chunk in stream[:-1] if "metrics" in chunk.model_extra]
    assert (len(plain[-1].choices), len(with_usage[-1].choices)) == (1, 0)
    for answer in whole, plain[-1], with_usage[-1]:
        counts = answer.metrics["speculative_decoding"]
        histogram, steps = counts["acceptance_histogram"], counts["num_spec_steps"]
        accepted = sum(tokens * count for tokens, count in enumerate(histogram))
        assert (sum(histogram), len(histogram)) == (steps, counts["num_spec_tokens"] + 1)
        assert accepted == counts["num_accepted_draft_tokens"] <= counts["num_draft_tokens"]
        assert counts["mean_acceptance_length"] == 1 + accepted / steps
        assert counts["draft_acceptance_rate"] == accepted / counts["num_draft_tokens"]
        assert 0 < accepted + steps <= 40 * texts


def test_the_counts_of_all_answers_add_up_to_the_counters(client, fronted):
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")

    def counted():
        shown = get(fronted, "/metrics", Authorization=f"Bearer {KEY}")[1]
        kinds = ("drafts", "draft_tokens", "accepted_tokens")
        found = [
            re.search(rf"(?m)^vllm:spec_decode_num_{kind}_total (\d+)$", shown) for kind in kinds
        ]
        return [int(count[1]) for count in found]

    before = counted()
    while before != (now := (time.sleep(1.1), counted())[1]):  # they are reported twice a second
        before = now
    variations = ({}, {"n": 2}, {"prompt": ["one ", "two "]}, {"num_draft_tokens": 2})
    variations += ({"logprobs": 1}, {"stop": "e"}, {"temperature": 0}, {"num_draft_tokens": 0})
    total = [0, 0, 0]
    for seed, variation in enumerate(variations):
        asked = {"model": "fake", "prompt": f"{seed} ", "max_tokens": 30, "seed": seed}
        for stream in False, True:
            status, text, _ = post(
                fronted, "/v1/completions", asked | variation | {"stream": stream}
            )
            assert status == 200
            last = text.removesuffix("data: [DONE]\n\n").rpartition("data: ")[2]
            counts = json.loads(last)["metrics"]["speculative_decoding"]
            total = [so_far + counts[name] for so_far, name in zip(total, names, strict=True)]
    assert 0 < total[0] <= total[2] + total[0] <= 30 * 20
    expected = [count + own for count, own in zip(before, total, strict=True)]
    fronted.wait_until(lambda: counted() == expected, 10)


def test_texts_are_tokenized_and_back(fronted):
    status, text, _ = post(fronted, "/tokenize", {"model": "fake", "prompt": "Grüße"})
    assert (status, json.loads(text)) == (
        200,
        {"count": 7, "max_model_len": 2048, "tokens": list("Grüße".encode())},
    )
    _, text, _ = post(fronted, "/tokenize", {"messages": HI})
    chat = json.loads(text)["tokens"]
    assert bytes(chat) == b"<user>hi<assistant>"
    rendered = post(fronted, "/v1/chat/completions/render", {"model": "fake", "messages": HI})[1]
    assert json.loads(rendered) == {"token_ids": chat}
    body = {"model": "fake", "prompt": ["ab", "c"]}
    rendered = post(fronted, "/v1/completions/render", body)[1]
    assert json.loads(rendered) == [{"token_ids": [97, 98]}, {"token_ids": [99]}]
    status, text, _ = post(fronted, "/detokenize", {"tokens": chat})
    assert (status, json.loads(text)) == (200, {"prompt": "<user>hi<assistant>"})
    assert json.loads(post(fronted, "/detokenize", {"tokens": []})[1]) == {"prompt": ""}
    assert json.loads(post(fronted, "/tokenize", {})[1])["error"]["param"] == "prompt"
    assert (
        json.loads(post(fronted, "/detokenize", {"tokens": [-1]})[1])["error"]["param"]
        == "tokens[0]"
    )
    error = json.loads(post(fronted, "/detokenize", {"tokens": [97, 99999]})[1])["error"]
    assert (error["message"], error["param"]) == (
        "tokens must contain token ids below 257, got 99999",
        "tokens",
    )
    assert post(fronted, "/tokenize", {"model": "other", "prompt": "a"})[0] == 404


def test_health_needs_no_key_and_the_version_is_the_project_s(fronted):
    assert (get(fronted, "/health")[0], get(fronted, "/version")[0]) == (200, 401)
    version = json.loads(get(fronted, "/version", Authorization=f"Bearer {KEY}")[1])["version"]
    assert version == __version__


READABLE = ("/", "/health", "/version", "/metrics", "/explain", "/v1/models", "/v1/models/fake")
WRITABLE = ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions/render")


def test_head_is_get_without_its_body_and_what_a_path_takes_is_said(fronted):
    def asked(method, path):
        with socket.create_connection(("127.0.0.1", fronted.openai)) as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
            connection.settimeout(10)
            text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        head, _, body = text.partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        allowed = {*headers.get("allow", "").split(", ")} - {""}
        return int(status.split()[1]), headers.get("content-length"), allowed, body

    for path in READABLE:
        status, length, _, body = asked("GET", path)
        assert (status, len(body.encode())) == (200, int(length))
        head = asked("HEAD", path)
        assert (head[0], head[3]) == (200, "")
        assert head[1] == length or path in ("/metrics", "/explain")  # which change
        assert asked("DELETE", path)[::2] == (405, {"get", "head"})
        assert asked("OPTIONS", path)[::2] == (204, {"get", "head"})
    for path in WRITABLE:
        for method in ("GET", "HEAD", "PUT"):
            assert asked(method, path)[::2] == (405, {"post"})
        assert asked("OPTIONS", path)[::2] == (204, {"post"})
    assert asked("HEAD", "/v1/models/other")[::3] == (404, "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "required"}),
    ],
)
def test_a_stream_asks_proxies_to_pass_it_on(fronted, path, body):
    status, text, headers = post(
        fronted, path, {"model": "fake", "max_tokens": 3, "stream": True, **body}
    )
    assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert (headers["Cache-Control"], headers["X-Accel-Buffering"]) == ("no-cache", "no")


def check_tokens(tokens, text):
    """Tokens of the fake are bytes, and four are equally likely."""
    assert b"".join(bytes(token.bytes) for token in tokens) == text.encode()
    for token in tokens:
        assert len(token.top_logprobs) == 3
        values = [best.logprob for best in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob <= values[0] <= 0
        assert (
            token.token in [best.token for best in token.top_logprobs]
            or token.logprob <= values[-1]
        )


def test_a_chat_has_the_log_probabilities_of_its_tokens(client):
    options = {
        "model": "fake",
        "messages": HI,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 1,
    }
    choice = client.chat.completions.create(**options).choices[0]
    check_tokens(choice.logprobs.content, choice.message.content)
    streamed = [
        chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)
    ]
    check_tokens(
        [token for part in streamed for token in part.logprobs.content], choice.message.content
    )
    assert [token.logprob for part in streamed for token in part.logprobs.content] == [
        t.logprob for t in choice.logprobs.content
    ]


def test_what_is_banned_is_shown_with_the_log_probability_that_openai_gives_it(client):
    reply = client.chat.completions.create(
        model="fake",
        messages=HI,
        max_tokens=2,
        logprobs=True,
        top_logprobs=20,
        response_format={"type": "json_object"},
    )
    for token in reply.choices[0].logprobs.content:
        values = [best.logprob for best in token.top_logprobs]
        assert len(values) == 20
        assert values[-1] == -9999.0
        assert values[0] > -10
    end = str(BYTE_VALUES)
    reply = client.completions.create(
        model="fake", prompt="é", max_tokens=3, logprobs=2, echo=True, logit_bias={end: 100}
    )
    log_probs = reply.choices[0].logprobs
    assert log_probs.tokens == [r"bytes:\xc3", r"bytes:\xa9", "<|end|>"]
    assert log_probs.text_offset == [0, 0, 1]
    assert log_probs.top_logprobs[-1]["<|end|>"] == max(log_probs.top_logprobs[-1].values())


def test_a_completion_has_log_probabilities_with_offsets(client):
    choice = client.completions.create(
        model="fake", prompt="lp ", max_tokens=15, logprobs=2, seed=1
    ).choices[0]
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset == list(range(15))
    assert len(scores.token_logprobs) == len(scores.top_logprobs) == 15
    assert all(len(best) == 2 for best in scores.top_logprobs)
    assert (
        client.completions.create(model="fake", prompt="lp ", max_tokens=2).choices[0].logprobs
        is None
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_holds_the_text_to_a_schema(client, stream):
    form = {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
    }
    reply = client.chat.completions.create(
        model="fake", messages=HI, max_tokens=200, seed=2, response_format=form, stream=stream
    )
    text = (
        "".join(c.choices[0].delta.content or "" for c in reply)
        if stream
        else reply.choices[0].message.content
    )
    assert json.loads(text)["n"] in (1, 22, 333)
    assert json.loads(text).keys() == {"n", "b"}
    reply = client.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, response_format={"type": "json_object"}
    )
    assert reply.choices[0].message.content.lstrip()[:1] in ("{", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["any", "named"],
)
def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(client, choice, stream):
    options = {
        "model": "fake",
        "messages": HI,
        "max_tokens": 300,
        "seed": 3,
        "tools": TOOLS[:1],
        "tool_choice": choice,
    }
    reply = client.chat.completions.create(**options, stream=stream)
    if stream:
        parts = [chunk.choices[0] for chunk in reply]
        call, reason = parts[-1].delta.tool_calls[0], parts[-1].finish_reason
    else:
        call, reason = reply.choices[0].message.tool_calls[0], reply.choices[0].finish_reason
    assert (reason, call.function.name, call.type) == ("tool_calls", "weather", "function")
    assert json.loads(call.function.arguments).keys() == {"n", "b"}


LARGE = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^(a{1,1000}){200,1000}$"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [None, "required"], ids=["format", "tool"])
def test_a_grammar_that_grows_too_large_is_the_request_s_fault(client, choice, stream):
    """A stream has begun by then: its last event says so."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": LARGE}}
    tool = {"type": "function", "function": {"name": "f", "parameters": LARGE}}
    options = {"tools": [tool], "tool_choice": choice} if choice else {"response_format": form}
    asked = {"model": "fake", "messages": HI, "max_tokens": 400, "temperature": 0}
    asked |= {"logit_bias": dict.fromkeys(map(ord, " \t\r\n"), -100), **options}
    with pytest.raises(openai.APIError) as raised:
        list(client.chat.completions.create(**asked, stream=stream))
    field = "tools" if choice else "response_format"
    assert (raised.value.body["type"], raised.value.param) == ("invalid_request_error", field)
    assert f"{field} cannot be followed any further" in str(raised.value)
    assert stream or raised.value.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_may_be_called_is_read_from_the_text(client, stream):
    """The fake writes a call as Llama does: a schema allows nothing else."""
    fields = {"name": {"const": "clock"}, "parameters": {"enum": [{"zone": "UTC"}]}}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
    asked = {"model": "fake", "messages": HI, "max_tokens": 300, "seed": 4, "logprobs": True}
    asked |= {"response_format": form, "tools": TOOLS, "stream": stream}
    reply = client.chat.completions.create(**asked)
    if stream:
        parts = [chunk.choices[0] for chunk in reply]
        assert not any(choice.delta.content for choice in parts)
        (call,) = (call for choice in parts for call in choice.delta.tool_calls or ())
        assert (call.index, parts[0].delta.role) == (0, "assistant")
        reason = parts[-1].finish_reason
    else:
        (call,), reason = reply.choices[0].message.tool_calls, reply.choices[0].finish_reason
        assert reply.choices[0].message.content is None
    assert (reason, call.function.name) == ("tool_calls", "clock")
    assert json.loads(call.function.arguments) == {"zone": "UTC"}
    assert call.id.startswith("call_")


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
        jobs = [
            pool.submit(
                client.completions.create,
                model="fake",
                prompt=f"p{n} ",
                max_tokens=300,
                temperature=0,
            )
            for n in range(4)
        ]
        fronted.wait_until(lambda: fronted.health()["active"] >= 1, 10)
        explained = json.loads(get(fronted, "/explain", Authorization=f"Bearer {KEY}")[1])
        assert all(job.result().choices[0].text for job in jobs)
    assert explained["age_s"] is not None
    assert "tokens proposed" in explained["step"]
    assert explained["requests"] == ["the policy of this server is not the adaptive one"]
    fronted.wait_until(
        lambda: (
            "spindle_emitted_tokens_total{"
            in get(fronted, "/metrics", Authorization=f"Bearer {KEY}")[1]
        ),
        10,
    )


def test_a_body_over_the_limit_is_refused(fronted):
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        f"{KEY}\r\nContent-Type: application/json\r\n"
    )
    with socket.create_connection(("127.0.0.1", fronted.openai)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {5 * 1024 * 1024}\r\n\r\n{{".encode())
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_tenant_cannot_tell_what_another_has_asked(fronted):
    """Equal prompts of two keys share no KV, whatever salts the clients choose."""
    body = {"model": "fake", "prompt": "a prompt longer than a block of KV. " * 4, "max_tokens": 2}

    def reused_by(key, **more):
        answered = fronted.metric("spindle_requests_total")
        before = fronted.metric("spindle_kv_reused_tokens_total")
        given = {"Authorization": f"Bearer {key}"}
        status, text, _ = post(fronted, "/v1/completions", {**body, **more}, **given)
        assert status == 200, text
        fronted.wait_until(lambda: fronted.metric("spindle_requests_total") > answered, 5)
        return fronted.metric("spindle_kv_reused_tokens_total") - before

    assert [reused_by(KEY), reused_by(KEY)] == [0, 128]
    assert [reused_by(OTHER_KEY), reused_by(OTHER_KEY)] == [0, 128]
    assert reused_by(OTHER_KEY, cache_salt=tenant_salt(tenant_of(KEY), None)) == 0
    for path in ("/metrics", "/explain"):
        assert get(fronted, path, Authorization=f"Bearer {OTHER_KEY}")[0] == 403


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(fronted, stream):
    body = json.dumps(
        {
            "model": "fake",
            "prompt": "gone ",
            "max_tokens": 1500,
            "stream": stream,
            "min_tokens": 1500,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        f"{KEY}\r\nContent-Length: {len(body)}\r\n"
    )
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fronted.openai)) as connection:
        connection.sendall(head.encode() + body)
        fronted.wait_until(lambda: fronted.health()["active"] == 1, 5)
    fronted.wait_until(lambda: fronted.health()["active"] == 0, 3)


def test_at_the_end_requests_in_flight_end_and_nothing_is_left(fronted):
    from concurrent.futures import ThreadPoolExecutor

    tree = fronted.tree()
    body = {"model": "fake", "prompt": "last ", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(post, fronted, "/v1/completions", body)
        fronted.wait_until(lambda: fronted.health()["active"] == 1, 10)
        fronted.process.send_signal(signal.SIGTERM)
        fronted.wait_until(lambda: get(fronted, "/health")[0] == 503, 5)
        assert not last.done()
        status, _, headers = post(fronted, "/v1/completions", body)
        assert (status, headers["Retry-After"]) == (503, "1")
        status, text, _ = last.result()
    assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 200)
    assert fronted.process.wait(20) == 0
    assert fronted.tree() == []
    from backend.launcher.processes import is_running

    assert not any(map(is_running, tree))
