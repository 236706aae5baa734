"""Attacks on Triton's ports by neighbours on the machine, pages in browsers and other pods."""

import json
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from backend.launcher.processes import command_line

REFUSED = "restricted"


@pytest.fixture(scope="module")
def region(service):
    """The name of a region of shared memory in which a stub and tritonserver exchange texts."""
    return service.shared_memory()[0].name


def test_shared_memory_is_closed_to_other_users(service):
    regions = service.shared_memory()
    assert regions
    assert {oct(each.stat().st_mode & 0o777) for each in regions} == {"0o600"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("systemsharedmemory/region/stolen/register", {"offset": 0, "byte_size": 64}),
        ("systemsharedmemory/region/stolen/unregister", {}),
        ("systemsharedmemory/unregister", {}),
        ("cudasharedmemory/unregister", {}),
        ("logging", {"log_info": False}),
        ("logging", {"log_file": "stolen.log"}),
        ("trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}),
        ("models/ensemble/trace/setting", {"trace_file": "stolen.json"}),
        ("repository/index", {}),
        ("repository/models/spindle/unload", {}),
        ("repository/models/spindle/load", {"parameters": {"config": "{}"}}),
    ],
)
def test_an_api_that_no_client_needs_is_closed_over_http(service, region, path, body):
    if "offset" in body:
        body = {**body, "key": f"/{region}"}
    status, text = service.post(f"/v2/{path}", body)
    assert (status, REFUSED in json.loads(text)["error"]) == (403, True)


@pytest.mark.parametrize(
    "attack",
    [
        lambda client, region: client.register_system_shared_memory("stolen", f"/{region}", 64),
        lambda client, region: client.get_system_shared_memory_status(),
        lambda client, region: client.unregister_system_shared_memory(),
        lambda client, region: client.get_cuda_shared_memory_status(),
        lambda client, region: client.update_log_settings({"log_info": False}),
        lambda client, region: client.get_log_settings(),
        lambda client, region: client.update_trace_settings(settings={"trace_rate": "1"}),
        lambda client, region: client.get_trace_settings(),
        lambda client, region: client.get_model_repository_index(),
        lambda client, region: client.unload_model("spindle"),
        lambda client, region: client.load_model("spindle"),
    ],
)
def test_an_api_that_no_client_needs_is_closed_over_grpc(service, region, attack):
    with (
        InferenceServerClient(f"127.0.0.1:{service.grpc}") as client,
        pytest.raises(InferenceServerException, match=REFUSED),
    ):
        attack(client, region)


def test_what_clients_need_stays_open(service):
    with InferenceServerClient(f"127.0.0.1:{service.grpc}") as client:
        assert client.is_server_ready()
        assert client.is_model_ready("ensemble")
        assert client.get_model_config("ensemble").config.name == "ensemble"
        assert client.get_inference_statistics("ensemble").model_stats
    assert service.generate("abc", 3)[0] == 200


def test_every_run_has_a_secret_of_its_own(service):
    (command,) = [command_line(pid) for pid in service.pids("tritonserver")]
    closed = [word for word in command if word.startswith(("--http-restricted", "--grpc-restr"))]
    assert len(closed) == 2
    assert all(len(word.rpartition("=")[2]) >= 32 for word in closed)
    assert Path(command[0]).name == "tritonserver"
