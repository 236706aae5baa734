"""The front end's errors for bodies that it refuses, without a server to ask."""

import gzip
import json
import threading

import pytest
from starlette.testclient import TestClient

from backend.config import OpenaiConfig
from backend.openai_frontend.access import Keys
from backend.openai_frontend.app import create_app
from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.routes import completion_of
from backend.openai_frontend.template import ChatTemplate
from tests.server.harness import free_ports

KEY = "schlüssel"
HALF = "\\ud83d"
CHAT = '"model":"m","messages":[{"role":"user","content":"hi"}]'
TEXT = '"model":"m","prompt":"hi"'
TOOL = '"type":"function","function":{"name":"f"}'


@pytest.fixture(scope="module")
def client():
    """A client of the front end; no server answers it."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = OpenaiConfig(cors_origins=("http://page.example",))
    app = create_app(FrontEnd(address, ("m",), template, options, Keys((KEY,))))
    app.add_api_route("/broken", broken)
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


def broken():
    raise RuntimeError("a fault")


def post(client, path, body, **headers):
    data = body.encode() if isinstance(body, str) else body
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {KEY}".encode(),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return client.post(path, content=data, headers=headers)


CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
SURROGATES = [
    (CHATS, f'{{{CHAT},"temperature":"{HALF}"}}', "temperature"),
    (CHATS, f'{{{CHAT},"{HALF}":1}}', HALF),
    (CHATS, f'{{{CHAT},"max_tokens":["{HALF}"]}}', "max_tokens"),
    (CHATS, f'{{{CHAT},"stop":"{HALF}"}}', "stop"),
    (CHATS, f'{{{CHAT},"stop":["a","x\\udc00"]}}', "stop[1]"),
    (CHATS, f'{{{CHAT},"stop":{{"{HALF}":1}}}}', "stop"),
    (CHATS, f'{{{CHAT},"cache_salt":"{HALF}"}}', "cache_salt"),
    (CHATS, f'{{{CHAT},"logit_bias":{{"{HALF}":1}}}}', f"logit_bias.{HALF}"),
    (CHATS, f'{{{CHAT},"response_format":{{"type":"{HALF}"}}}}', "response_format.type"),
    (
        CHATS,
        f'{{{CHAT},"response_format":{{"type":"json_schema","json_schema":'
        f'{{"schema":{{"enum":["{HALF}"]}}}}}}}}',
        "response_format.json_schema.schema.enum[0]",
    ),
    (CHATS, f'{{{CHAT},"tools":[{{"type":"{HALF}"}}]}}', "tools[0].type"),
    (
        CHATS,
        f'{{{CHAT},"tools":[{{"type":"function","function":{{"name":"{HALF}"}}}}]}}',
        "tools[0].function.name",
    ),
    (CHATS, f'{{{CHAT},"tools":[{{{TOOL}}}],"tool_choice":"{HALF}"}}', "tool_choice.type"),
    (
        CHATS,
        f'{{{CHAT},"tools":[{{{TOOL}}}],"tool_choice":'
        f'{{"type":"function","function":{{"name":"{HALF}"}}}}}}',
        "tool_choice",
    ),
    (CHATS, f'{{"model":"m","messages":[{{"role":"{HALF}","content":"a"}}]}}', "messages[0].role"),
    (
        CHATS,
        f'{{"model":"m","messages":[{{"role":"user","content":"cut {HALF}"}}]}}',
        "messages[0].content",
    ),
    (
        CHATS,
        f'{{"model":"m","messages":[{{"role":"user","content":'
        f'[{{"type":"text","text":"{HALF}"}}]}}]}}',
        "messages[0].content[0].text",
    ),
    (
        CHATS,
        f'{{"model":"m","messages":[{{"role":"user","content":[{{"type":"{HALF}"}}]}}]}}',
        "messages[0].content[0].type",
    ),
    (
        CHATS,
        f'{{"model":"m","messages":[{{"role":"user","content":"a","{HALF}":{{}}}}]}}',
        f"messages[0].{HALF}",
    ),
    (CHATS, f'{{{CHAT},"stream_options":{{"{HALF}":true}}}}', f"stream_options.{HALF}"),
    (CHATS, f'{{"model":"{HALF}","messages":[]}}', "messages"),
    (TEXTS, f'{{"model":"m","prompt":"{HALF}"}}', "prompt"),
    (TEXTS, f'{{"model":"m","prompt":["a","b {HALF}"]}}', "prompt[1]"),
    (TEXTS, f'{{{TEXT},"echo":"{HALF}"}}', "echo"),
    (TEXTS, f'{{{TEXT},"suffix":"{HALF}"}}', "suffix"),
    ("/tokenize", f'{{"prompt":"{HALF}"}}', "prompt"),
    ("/tokenize", f'{{"prompt":"a","{HALF}":1}}', HALF),
    ("/detokenize", f'{{"tokens":["{HALF}"]}}', "tokens[0]"),
    ("/detokenize", f'{{"tokens":"{HALF}"}}', "tokens"),
    (TEXTS, b'{"model":"m","prompt":"\xed\xa0\xbd"}', "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), SURROGATES)
def test_half_an_emoji_is_refused_where_it_is(client, caplog, path, body, param):
    reply = post(client, path, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not caplog.records


def test_half_an_emoji_may_be_in_a_label_and_in_headers(client):
    label = post(client, "/v1/completions", f'{{{TEXT},"user":"{HALF}"}}')
    assert label.status_code == 503, "a field that nothing depends on is not looked at"
    odd = "a\ud83d".encode("utf-8", "surrogatepass")
    for name in ("x_request_id", "origin", "content_type", "content_encoding"):
        given = {name: odd, "authorization": "Bearer x"}
        assert post(client, "/v1/completions", "{}", **given).status_code == 401
    assert post(client, "/v1/completions", "{}", authorization=b"Bearer " + odd).status_code == 401


BODIES = [
    (b"{", "is not JSON: Expecting property name enclosed in double quotes at character 1"),
    (b'{"prompt":"\xff"}', "it is not UTF-8, byte 0xff at offset 11"),
    (gzip.compress(b"{}", mtime=0), "compressed (gzip), which is unsupported"),
    (b'{"a":' * 2000, "nested too deeply: more than 500 levels"),
    (b'{"a":' + b"[" * 700 + b"]" * 700 + b"}", "nested too deeply: more than 500 levels"),
    (b'{"a":' + b"1" * 5000 + b"}", "an integer of more than 4300 digits"),
    (b"[]", "must be a JSON object, with Content-Type"),
    (b"", "must be a JSON object, with Content-Type"),
]


@pytest.mark.parametrize(("body", "words"), BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_each_body_that_cannot_be_read_has_its_own_sentence(client, path, body, words):
    reply = post(client, path, body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_a_compressed_body_is_named_by_its_header(client):
    reply = post(client, "/v1/completions", b"\x00", content_encoding="br")
    assert "compressed (br)" in reply.json()["error"]["message"]


def test_a_body_that_a_page_may_send_unasked_is_refused(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        assert post(client, "/tokenize", '{"prompt":"a"}', content_type=kind).status_code == 400
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.a+json"):
        assert post(client, "/tokenize", '{"prompt":"a"}', content_type=kind).status_code == 503


SENTENCES = [
    (
        f'{{{CHAT},"tools":[{{"type":"function","function":{{"name":"get weather"}}}}]}}',
        "Invalid 'tools[0].function.name': expected a string that matches "
        '^[A-Za-z0-9_.-]{1,64}$, but got "get weather"',
    ),
    (
        f'{{{CHAT},"stop":5}}',
        "Invalid type for 'stop': expected a string or an array of strings, but got 5",
    ),
    (
        '{"model":"m","messages":[{"role":"user","content":5}]}',
        "Invalid type for 'messages[0].content': expected a string or an array of content parts, "
        "but got 5",
    ),
    (
        f'{{{CHAT},"tool_choice":5}}',
        "Invalid type for 'tool_choice': expected a string or an object, but got 5",
    ),
]


@pytest.mark.parametrize(("body", "sentence"), SENTENCES)
def test_what_is_wrong_is_said_in_one_sentence(client, body, sentence):
    assert post(client, "/v1/chat/completions", body).json()["error"]["message"] == sentence


def test_a_key_matches_by_its_bytes_whatever_the_case_of_its_scheme(client):
    for scheme in ("Bearer", "bearer", "BEARER"):
        given = {"authorization": f"{scheme} {KEY}".encode()}
        assert post(client, "/v1/completions", "{}", **given).status_code == 400
    for wrong in (KEY, f"Basic {KEY}", "Bearer", "", f"Bearer {KEY}x"):
        given = {"authorization": wrong.encode()}
        reply = post(client, "/v1/completions", b"{", **given)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


def test_every_answer_has_an_id(client):
    named = {"x_request_id": "mine-1"}
    for path, body in (("/v1/completions", "{"), ("/none", "{}"), ("/tokenize", '{"prompt":"a"}')):
        assert post(client, path, body, **named).headers["x-request-id"] == "mine-1"
        first, second = (post(client, path, body).headers["x-request-id"] for _ in "ab")
        assert first.startswith("req_")
        assert first != second
    too_long = post(client, "/tokenize", "{", x_request_id="x" * 300)
    assert too_long.headers["x-request-id"].startswith("req_")
    refused = client.post("/tokenize", headers={"x-request-id": "mine-2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine-2")


def test_an_unavailable_service_says_when_to_try_again(client):
    reply = post(client, "/tokenize", '{"prompt":"a"}')
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "retry-after" not in post(client, "/tokenize", "{").headers


def test_a_server_that_drains_takes_no_requests_and_tells_probes():
    draining = threading.Event()
    app = create_app(FrontEnd("127.0.0.1:1", ("m",), keys=Keys((KEY,))), draining)
    with TestClient(app) as client:
        assert client.get("/").status_code == 200
        draining.set()
        for reply in (client.get("/health"), post(client, "/v1/completions", "{")):
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.json()["error"]["message"] == "the server is shutting down"
        assert client.post("/v1/completions").status_code == 401


def test_a_model_answers_to_each_of_its_names():
    with TestClient(create_app(FrontEnd("127.0.0.1:1", ("org/m", "m")))) as client:
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert listed == ["org/m", "m"]
        for name in listed:
            assert client.get(f"/v1/models/{name}").json()["id"] == name
            reply = client.post("/v1/completions", json={"model": name, "prompt": "a"})
            assert reply.status_code == 503  # the model is right, Triton is not there
        refused = client.post("/v1/completions", json={"model": "0123", "prompt": "a"})
        assert refused.status_code == 404
        text = "The model '0123' does not exist; there is 'org/m' and 'm'"
        assert refused.json()["error"]["message"] == text


def test_an_answer_has_the_first_name_of_its_model():
    settings = FrontEnd("", ("org/m", "m"))
    body = b'{"model": "m", "prompt": "a"}'
    answer = completion_of(settings, body, {"content-type": "application/json"})
    assert answer.body.model == "org/m"


def test_a_fault_is_answered_logged_and_readable_by_the_site_s_page(client, caplog):
    given = {"Origin": "http://page.example", "Authorization": f"Bearer {KEY}".encode()}
    reply = client.get("/broken", headers={**given, "x-request-id": "mine"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "internal error")
    assert reply.headers["access-control-allow-origin"] == "http://page.example"
    other = client.get("/broken", headers={**given, "Origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "retry-after" in reply.headers["access-control-expose-headers"].lower()
    assert reply.headers["x-request-id"] == "mine"
    assert caplog.records[0].getMessage() == "request mine failed"


def test_an_event_has_no_character_that_ends_a_line_for_some_clients():
    from backend.openai_frontend.answers import _event

    text = "a\u2028b\u2029c\u0085d"
    event = _event({"text": text})
    assert event.splitlines() == [event.rstrip("\n"), ""]
    assert json.loads(event.removeprefix("data: ")) == {"text": text}
