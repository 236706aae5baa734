"""A folder as many are: its own end token in the tokenizer alone, special tokens added to every
text, tokens without a row, a template for tools, and a draft that is padded otherwise.
"""

import json
import shutil
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend import PROJECT_ROOT
from tests.server.harness import free_ports

SOURCE = PROJECT_ROOT / "engines_build" / "drafts" / "tiny-target"
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BEGIN = {"<|endoftext|>": 0, "<|im_start|>": 1}
TEMPLATE = (
    "<|endoftext|><|im_start|>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
HELLO = [{"role": "user", "content": "Hello there"}]
CHAT = [0, 1, 467, 28, 691, 394, 877, 814, 201]

pytestmark = pytest.mark.slow


def edit(file, **changes):
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and its draft."""
    made = tmp_path_factory.mktemp("odd")
    target = shutil.copytree(SOURCE, made / "target")
    (target / "generation_config.json").unlink()
    edit(target / "config.json", eos_token_id=0)
    edit(target / "tokenizer_config.json", chat_template=None, bos_token=None)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    (target / "additional_chat_templates").mkdir()
    tools = "TOOLS {{ tools[0]['function']['name'] }}"
    (target / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    spec = json.loads((target / "tokenizer.json").read_text())
    spec["added_tokens"] += [
        {"id": 4096 + n, "content": f"<|extra_{n}|>", "special": True, **ADDED} for n in range(4)
    ]
    special = [{"SpecialToken": {"id": name, "type_id": 0}} for name in BEGIN]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*special, first],
        "pair": [*special, first, second],
        "special_tokens": {n: {"id": n, "ids": [i], "tokens": [n]} for n, i in BEGIN.items()},
    }
    (target / "tokenizer.json").write_text(json.dumps(spec))
    draft = shutil.copytree(target, made / "draft")
    weights = load_file(draft / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([rows, rows.new_zeros(64, rows.shape[1])])
    save_file(weights, draft / "model.safetensors")
    edit(draft / "config.json", vocab_size=4160)
    return target, draft


@pytest.fixture(scope="module")
def service(folders, start_service, tmp_path_factory):
    """A server of them."""
    target, draft = folders
    folder = tmp_path_factory.mktemp("service")
    settings = {
        "target": {"model": str(target), "dtype": "fp32"},
        "drafts": [{"name": "small", "model": str(draft), "dtype": "fp32"}],
        "policy": {"kind": "fixed", "draft": "small", "length": 3},
    }
    (folder / "serving.json").write_text(json.dumps(settings))
    variables = {"SPINDLE_CACHE": str(folder / "cache"), "OPENAI_PORT": str(free_ports(1)[0])}
    made = start_service(folder / "serving.json", **variables).wait_ready(limit_s=300)
    made.wait_for_front_end()
    return made


def ask(service, path, **body):
    """Return (status, answer) of the OpenAI front end."""
    url = f"http://127.0.0.1:{service.openai}{path}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(service, text="Hello there", **body):
    messages = [{"role": "user", "content": text}]
    return ask(
        service,
        "/v1/chat/completions",
        **{"model": "target", "messages": messages, "max_tokens": 8, "temperature": 0, **body},
    )


def test_the_tokenizer_s_end_token_ends_an_answer(service):
    _, answer = chat(service, logit_bias={"2": 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": len(CHAT),
        "completion_tokens": 1,
        "total_tokens": len(CHAT) + 1,
    }


def test_a_chat_has_the_special_tokens_of_its_template_alone(service):
    assert ask(service, "/tokenize", messages=HELLO)[1]["tokens"] == CHAT
    body = {"model": "target", "messages": HELLO}
    assert ask(service, "/v1/chat/completions/render", **body)[1] == {"token_ids": CHAT}
    for special, begin in ((None, [0, 1]), (True, [0, 1]), (False, [])):
        asked = {} if special is None else {"add_special_tokens": special}
        expected = [*begin, 42, 394, 877]
        assert ask(service, "/tokenize", prompt="Hello", **asked)[1]["tokens"] == expected
        body = {"model": "target", "prompt": "Hello", **asked}
        assert ask(service, "/v1/completions/render", **body)[1] == [{"token_ids": expected}]
        _, answer = ask(service, "/v1/completions", max_tokens=1, **body)
        assert answer["usage"]["prompt_tokens"] == len(expected)


def test_a_chat_with_tools_has_their_template(service):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    _, asked = ask(service, "/tokenize", messages=HELLO, tools=tools)
    assert ask(service, "/detokenize", tokens=asked["tokens"])[1] == {"prompt": "TOOLS clock"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a<|extra_0|>"}, "prompt"),
        ({"prompt": [5, 4096]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"4099": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [4099]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "<|extra_1|>"}]}, "messages"),
    ],
)
def test_a_token_without_a_row_is_refused_by_name(service, body, param):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer = ask(service, path, model="target", max_tokens=2, **body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_so_it_is_by_triton_s_models(service, model):
    status, answer = service.generate("a<|extra_2|>", 2, model)
    words = "text_input has the token '<|extra_2|>' of id 4098, but the model knows only ids below "
    assert (status, answer["error"]) == (400, f"{words}4096")
    for name, value in (("bad_words", ["<|extra_2|>"]), ("end_id", 4098)):
        status, answer = service.generate("a", 2, model, **{name: value})
        assert status == 400
        assert answer["error"].startswith(name)


def test_other_texts_are_served_with_the_draft(service):
    status, answer = chat(service, response_format={"type": "json_object"}, stop=["<|extra_0|>"])
    assert status == 200
    assert answer["choices"][0]["message"]["content"].startswith("{")
    _, answer = chat(service, "Once upon a time", max_tokens=24, ignore_eos=True)
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert service.metric("spindle_fallback_total", reason="draft_error") == 0
