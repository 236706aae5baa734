import os
import signal
import time
from pathlib import Path

import grpc
import pytest

from backend.triton_adapter.launcher.processes import is_running
from tests.server.harness import CONFIG, Service, infer_request, text_of


@pytest.fixture(scope="module")
def crashing(start_service):
    """A service that tests may hurt."""
    return start_service().wait_ready()


def streams_when(service, action, count=4, limit_s=10):
    """Start endless streams on both names, act when all run, and return how each ended (an error message or a gRPC status)."""
    with service.stub() as stub:
        names = ("ensemble", "tensorrt_llm_bls")
        requests = [
            infer_request(names[i % 2], text_input=f"{i}", max_tokens=2000, stream=True, end_id=-1, empty_final=False) for i in range(count)
        ]
        streams = [stub.ModelStreamInfer(iter([request]), timeout=30) for request in requests]
        for stream in streams:
            assert text_of(next(stream).infer_response)
        action()
        acted = time.monotonic()
        endings = [ending(stream) for stream in streams]
    assert time.monotonic() - acted < limit_s, "a stream was left to its deadline"
    return endings


def ending(stream):
    try:
        return next(message.error_message for message in stream if message.error_message)
    except grpc.RpcError as error:
        return error.code()


def works_again(service):
    try:
        return service.generate("again ", 4)[0] == 200
    except OSError:
        return False


def test_streams_get_an_error_and_the_engine_comes_back(crashing):
    victim = crashing.health()["pid"]
    endings = streams_when(crashing, lambda: os.kill(victim, signal.SIGKILL))
    assert all("engine process has ended" in ending for ending in endings)
    status, reply = crashing.generate("waits for it ", 4)  # within the grace period
    assert status == 200, reply
    assert crashing.health()["pid"] != victim
    assert crashing.log.read_text().count("spindle: try: curl") == 1  # the server itself never stopped


@pytest.mark.parametrize("model", ["ensemble", "spindle"])
def test_a_dead_stub_is_noticed_and_the_service_comes_back(crashing, model):
    starts = crashing.log.read_text().count("spindle: try: curl")
    victim = crashing.pid_of("triton_python_backend_stub ", f"/{model}/")
    endings = streams_when(crashing, lambda: os.kill(victim, signal.SIGKILL))
    assert all(ending == grpc.StatusCode.UNAVAILABLE or "engine process has ended" in ending for ending in endings)
    crashing.wait_ready(starts + 1)
    assert f"of model {model} has died" in crashing.log.read_text()
    assert works_again(crashing)


def test_a_dead_server_is_started_again(crashing):
    starts = crashing.log.read_text().count("spindle: try: curl")
    os.kill(crashing.pid_of("bin/tritonserver"), signal.SIGKILL)
    crashing.wait_ready(starts + 1)
    assert works_again(crashing)


def left_by(service, tree):
    """Return the processes, shared memory and files that a service has left."""
    shm = list(Path("/dev/shm").glob(f"spindle_{service.process.pid}_*"))
    return [pid for pid in tree if is_running(pid)] + shm + list(service.log.parent.glob("spindle-*"))


def test_sigterm_drains_and_leaves_nothing_behind(crashing, reference_text):
    tree = crashing.tree()
    assert len(tree) == 5  # tritonserver, three stubs, the engine
    with crashing.stub() as stub:
        request = infer_request("ensemble", text_input="last ", max_tokens=400, stream=True, end_id=-1, empty_final=False)
        stream = iter(stub.ModelStreamInfer(iter([request])))
        first = text_of(next(stream).infer_response)
        crashing.process.send_signal(signal.SIGTERM)
        text = first + "".join(text_of(message.infer_response) for message in stream)
    assert text == reference_text("last ", 400)
    assert crashing.process.wait(15) == 0
    assert left_by(crashing, tree) == []


def test_a_request_that_does_not_end_in_time_gets_an_error_at_shutdown(start_service, tmp_path):
    config = tmp_path / "serving.json"
    config.write_text('{"target": {"engine": "fake", "step_s": 0.05}, "policy": {"kind": "none"}}')
    service = start_service(config).wait_ready()
    tree = service.tree()
    endings = streams_when(service, lambda: service.process.send_signal(signal.SIGTERM), count=1, limit_s=15)
    assert endings[0] == grpc.StatusCode.UNAVAILABLE or isinstance(endings[0], str)
    assert service.process.wait(15) == 0
    assert left_by(service, tree) == []


def test_a_killed_launcher_takes_everything_with_it(start_service):
    service = start_service().wait_ready()
    tree = service.tree()
    service.process.kill()
    service.process.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, tree)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in tree if is_running(pid)] == []
    for region in Path("/dev/shm").glob(f"spindle_{service.process.pid}_*"):
        region.unlink()  # nobody was left to do it


def test_a_hanging_engine_is_killed_and_started_again(start_service):
    service = start_service().wait_ready()
    victim = service.health()["pid"]
    endings = streams_when(service, lambda: os.kill(victim, signal.SIGSTOP), limit_s=25)
    assert all("engine process has ended" in ending for ending in endings)
    assert works_again(service)
    assert service.health()["pid"] != victim
    assert service.log.read_text().count("spindle: try: curl") == 1
    assert service.stop() == 0


def test_a_port_in_use_is_named(service, tmp_path):
    second = Service(tmp_path / "log", CONFIG, GRPC_PORT=str(service.http))
    assert second.process.wait(30) == 1
    assert f"GRPC_PORT {service.http} cannot be used" in second.log.read_text()


def test_an_engine_that_cannot_start_ends_the_launcher_with_its_reason(tmp_path):
    config = tmp_path / "serving.json"
    config.write_text('{"target": {"engine": "fake"}, "drafts": [{"name": "d", "engine": "torch", "model": "nowhere"}]}')
    service = Service(tmp_path / "log", config)
    assert service.process.wait(60) == 1
    assert "spindle: error:" in service.log.read_text()
