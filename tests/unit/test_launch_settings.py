"""Settings of a service: addresses, ports, names and times as users write them."""

import dataclasses
import ipaddress
import os
import re
import socket

import pytest

from backend.cli import main
from backend.config import OpenaiConfig, parse_config
from backend.launcher.doctor import exposure
from backend.launcher.environment import (
    MOVED,
    PORTS,
    LaunchError,
    model_names,
    name_of,
    port_trouble,
    read_settings,
)
from backend.launcher.server import flags
from backend.launcher.serving import example_command

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("bind", "address", "at", "http", "grpc"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1:8000", "0.0.0.0", "0.0.0.0"),
        ("localhost", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1", "127.0.0.1"),
        ("LocalHost", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "[::1]:8000", "ipv6:::1", "[::1]"),
        ("[::1]", "::1", "[::1]:8000", "ipv6:::1", "[::1]"),
        ("0:0:0:0:0:0:0:1", "::1", "[::1]:8000", "ipv6:::1", "[::1]"),
        ("::", "::", "[::1]:8000", "ipv6:::", "[::]"),
        ("::ffff:127.0.0.1", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_an_address_is_written_as_each_program_reads_it(bind, address, at, http, grpc):
    if ":" in address and port_trouble("::1", 0):
        pytest.skip("this machine has no IPv6")
    settings = read_settings({"BIND": bind})
    assert (settings.bind, settings.at(8000)) == (address, at)
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags(settings, "secret"))
    assert given["http-address"] == given["metrics-address"] == http
    assert given["grpc-address"] == grpc
    assert f"http://{at}/v2/models" in example_command(settings)


@pytest.mark.parametrize(
    ("bind", "is_open"),
    [("127.0.0.1", False), ("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True)],
)
def test_an_address_that_others_reach_is_open(bind, is_open):
    assert read_settings({"BIND": bind}).is_open is is_open
    assert (exposure(read_settings({"BIND": bind})).state == "warning") is is_open


def test_a_name_of_this_machine_is_served_by_its_number():
    try:
        numbers = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        pytest.skip("this machine's name does not resolve")
    try:
        bind = read_settings({"BIND": socket.gethostname()}).bind
    except LaunchError:
        assert all(ipaddress.ip_address(number).is_link_local for number in numbers)
    else:
        assert bind in numbers


@pytest.mark.parametrize(
    "bind",
    [
        "no-such-host.invalid",
        "192.0.2.77",  # for documentation: no machine's
        "2001:db8::77",
        "http://localhost",
        "127.0.0.1:8000",
        "[::1",
        "[localhost]",
        "a b",
        "*",
        "fe80::1",
        "fe80::1%lo",
        "ff02::1",
        "224.0.0.1",
        "255.255.255.255",
        "é.invalid",
        "a" * 300,
    ],
)
def test_an_address_of_no_service_here_is_refused_by_name_and_value(bind):
    with pytest.raises(LaunchError) as raised:
        read_settings({"BIND": bind})
    text = f"BIND (--bind) must be an address or a name of this machine, got {bind!r}: "
    assert str(raised.value).startswith(text)


def test_an_unusable_address_ends_a_start_at_once(monkeypatch, capsys):
    monkeypatch.setenv("BIND", "set back at the end")
    assert main(["serve", "--bind", "no-such-host.invalid"]) == 1
    assert "spindle: error: BIND (--bind) must be" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, _, _ in PORTS])
@pytest.mark.parametrize("value", ["tcp://10.0.0.5:9000", "udp://10.96.0.1:53"])
def test_a_service_link_of_kubernetes_is_said_to_be_one(name, value):
    with pytest.raises(LaunchError, match=f"{name} .*'{value}', which Kubernetes sets") as said:
        read_settings({name: value})
    assert "enableServiceLinks: false" in str(said.value)
    assert f"a Service named {name.removesuffix('_PORT').lower()}:" in str(said.value)


@pytest.mark.parametrize("name", MOVED)
def test_a_variable_that_is_now_a_key_of_the_file_is_refused_with_its_place(name):
    with pytest.raises(LaunchError, match=f"^{name} is no longer read") as raised:
        read_settings({name: "1", "SPINDLE_CONFIG": "/etc/serving.json"})
    key = re.search(r"set the key '(\w+)' of 'openai' in /etc/serving.json$", str(raised.value))[1]
    assert key in {field.name for field in dataclasses.fields(OpenaiConfig)}
    assert read_settings({name: ""}) == read_settings({})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/llama-1b", "llama-1b"),
        (f"/c/hub/models--org--My-Model/snapshots/{COMMIT}", "org/My-Model"),
        (f"/c/models--org--My--Model/snapshots/{COMMIT}", "org/My--Model"),
        (f"/c/models--gpt2/snapshots/{COMMIT}", "gpt2"),
        (f"/mine/snapshots/{COMMIT}", COMMIT),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("", ""),
    ],
)
def test_a_model_is_named_as_its_folder_or_its_hub_names_it(model, name):
    assert name_of(model) == name


def test_public_names_take_the_place_of_the_folder_s():
    config = parse_config({"target": {"engine": "tests.fakes.fake"}})
    assert model_names(read_settings({}), config) == ("fake",)
    named = read_settings({"SERVED_MODEL_NAME": "org/model, model,org/model"})
    assert model_names(named, config) == ("org/model", "model")


@pytest.mark.parametrize("value", [",", "a,,b", "a,", "a\nb", " "])
def test_a_name_that_is_none_is_refused(value):
    with pytest.raises(LaunchError, match=r"SERVED_MODEL_NAME \(--served-model-name\)"):
        read_settings({"SERVED_MODEL_NAME": value})


def test_the_option_takes_names_as_vllm_s_does(monkeypatch):
    monkeypatch.setenv("SERVED_MODEL_NAME", "set back at the end")
    served = []
    monkeypatch.setattr(
        "backend.launcher.serving.serve",
        lambda *_, **__: served.append(read_settings(os.environ)) or 0,
    )
    names = ["--served-model-name", "org/model", "model"]
    assert main(["serve", *names, "--", "--log-verbose=1"]) == 0
    assert served[0].model_names == ("org/model", "model")
