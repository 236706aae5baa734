"""By which names the front end may be called: a page on the web whose name resolves to this machine
gets nothing.
"""

import socket

import pytest
from starlette.testclient import TestClient

from backend.checked_settings import ConfigError
from backend.config import OpenaiConfig, parse_config
from backend.launcher.environment import read_settings
from backend.openai_frontend.__main__ import hosts_of, keys_of
from backend.openai_frontend.access import Hosts, Keys
from backend.openai_frontend.app import create_app
from backend.openai_frontend.front_end import FrontEnd

ALWAYS = ["127.0.0.1", "127.0.0.1:9000", "10.2.3.4:80", "[::1]:9000", "[fd00::5]", "localhost"]
ALWAYS += ["LOCALHOST:9000", "localhost.", "a.localhost:1", "", socket.gethostname()]
NEVER = ["evil.example", "evil.example:9000", "127.0.0.1.evil.example", "localhost.evil.example"]
NEVER += ["evil.example.", "127.0.0.1@evil.example", "evil.example#localhost", "xlocalhost.de"]
PRIVATE = ["spindle", "spindle:9000", "gpu.lan", "gpu.local", "spindle.ns.svc", "a.internal"]
PRIVATE += ["spindle.ns.svc.cluster.local:9000"]


@pytest.mark.parametrize(
    ("environment", "names", "allowed", "refused"),
    [
        ({}, (), ALWAYS, NEVER + PRIVATE),
        ({"BIND": "0.0.0.0"}, (), ALWAYS + PRIVATE, NEVER),
        (
            {},
            ("LLM.example.com", "*.example.org"),
            [*ALWAYS, "llm.example.com:80", "a.example.org", "a.b.example.org"],
            [*NEVER, *PRIVATE, "x.llm.example.com", "example.org", "xexample.org", "example.com"],
        ),
        ({}, ("*",), ALWAYS + NEVER + PRIVATE, []),
        ({"OPENAI_API_KEY": "key"}, (), ALWAYS + NEVER + PRIVATE, []),
    ],
)
def test_the_names_of_a_server_depend_on_where_it_listens(environment, names, allowed, refused):
    options = OpenaiConfig(allowed_hosts=names)
    hosts = hosts_of(read_settings(environment), options, keys_of(environment))
    assert [name for name in allowed if not hosts.allow(name)] == []
    assert [name for name in refused if hosts.allow(name)] == []


def test_the_name_to_listen_on_is_one_of_the_server_s(monkeypatch):
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    settings = read_settings({"BIND": "llm.example"})
    assert settings.bind == "127.0.0.1"
    hosts = hosts_of(settings, OpenaiConfig(allowed_hosts=("other.example",)), Keys())
    assert all(map(hosts.allow, ("llm.example:9000", "other.example")))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/", "/health", "/explain", "/metrics", "/v1/models")),
        *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")),
        ("OPTIONS", "/v1/completions"),
    ],
)
@pytest.mark.parametrize("origins", [(), ("http://evil.example",)])
def test_a_page_with_a_name_of_its_own_gets_nothing(method, path, origins):
    options = OpenaiConfig(cors_origins=origins)
    front_end = FrontEnd("127.0.0.1:1", ("m",), options=options, hosts=Hosts(("llm.example",)))
    client = TestClient(create_app(front_end))
    reply = client.request(method, path, headers={"host": "evil.example:9000"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (403, "invalid_request_error")
    assert 'Host "evil.example"' in error["message"]
    assert "openai.allowed_hosts" in error["message"]
    served = client.get("/v1/models", headers={"host": "llm.example"})
    assert served.status_code == 200


@pytest.mark.parametrize("names", ["http://a.example", "a.example:80", "*.*", "a b", "[::1]"])
def test_a_name_that_is_none_is_refused_by_setting_and_value(names):
    with pytest.raises(ConfigError, match=r"openai\.allowed_hosts must be names") as raised:
        parse_config({"openai": {"allowed_hosts": ["ok.example", names]}})
    assert repr(names) in str(raised.value)


@pytest.mark.parametrize("site", ["page.example", "https://a.example/", "https://a.example, b"])
def test_a_site_that_no_browser_names_is_refused_by_setting_and_value(site):
    with pytest.raises(ConfigError, match=r"openai\.cors_origins must be sites") as raised:
        parse_config({"openai": {"cors_origins": ["http://localhost:3000", "*", site]}})
    assert repr(site) in str(raised.value)
