import os
import signal
import subprocess
import sys
import time

import grpc
import pytest

from backend.launcher.processes import is_running
from backend.triton_adapter.fields import MODELS
from tests.server.harness import CONFIG, Service, endless, infer_request, text_of


@pytest.fixture(scope="module")
def crashing(start_service, faulty_python):
    """A service that tests may hurt. It soon lets go of gRPC clients that answer no ping."""
    pings = ("--grpc-keepalive-time=1000", "--grpc-keepalive-timeout=3000")
    return start_service(CONFIG, *pings, SPINDLE_PYTHON=faulty_python).wait_ready()


def streams_when(service, action, count=4, limit_s=10):
    """Start endless streams on both names, act when all run, and return how each ended (an error
    message or a gRPC status).
    """
    with service.stub() as stub:
        names = ("ensemble", "tensorrt_llm_bls")
        requests = [endless(f"{i}", 2000, names[i % 2]) for i in range(count)]
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


def test_streams_get_an_error_and_the_engine_comes_back(crashing):
    victim = crashing.health()["pid"]
    endings = streams_when(crashing, lambda: os.kill(victim, signal.SIGKILL))
    assert all("engine process has ended" in ending for ending in endings)
    status, reply = crashing.generate("waits for it ", 4)  # within the grace period
    assert status == 200, reply
    assert crashing.health()["pid"] != victim
    assert (
        crashing.log.read_text().count("spindle: try: curl") == 1
    )  # the server itself never stopped


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "spindle"])
def test_a_dead_stub_is_noticed_and_the_service_comes_back(crashing, model):
    starts = crashing.log.read_text().count("spindle: try: curl")
    victim = crashing.pid_of("triton_python_backend_stub ", f"/{model}/")
    endings = streams_when(crashing, lambda: os.kill(victim, signal.SIGKILL))
    assert all(
        ending == grpc.StatusCode.UNAVAILABLE or "engine process has ended" in ending
        for ending in endings
    )
    crashing.wait_ready(starts + 1)
    log = (
        crashing.log.read_text()
    )  # Triton 2.51 aborts if the stub held a lock of the memory that they share
    assert f"of model {model} has died" in log or "tritonserver ended with status -6" in log
    assert crashing.works()


def test_a_request_that_the_engine_cannot_run_fails_alone(crashing, reference_text):
    engine = crashing.health()["pid"]
    with crashing.streaming("healthy ", 500) as finish:
        for _ in range(5):
            status, reply = crashing.generate("poison ", 5)
            assert (status, reply["error"]) == (400, "the engine failed (MemoryError)")
        assert finish() == reference_text("healthy ", 500)
    assert crashing.health()["pid"] == engine
    crashing.wait_until(
        lambda: crashing.metric("spindle_fallback_total", reason="target_error") >= 5, 5
    )


def test_an_engine_that_fails_for_good_is_started_again(crashing):
    engine = crashing.health()["pid"]
    for _ in range(3):  # nothing else runs: nothing succeeds in between
        assert "the engine failed" in crashing.generate("poison ", 5)[1]["error"]
    crashing.wait_until(crashing.works, 20)
    assert crashing.health()["pid"] != engine
    assert "the engine process ended with status 1" in crashing.log.read_text()


FROZEN = """
import sys, grpc
from tritonclient.grpc import service_pb2_grpc
from backend.triton_adapter.fields import MODELS
from tests.server.harness import infer_request
stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel("127.0.0.1:" + sys.argv[1]))
request = infer_request("ensemble", text_input="frozen ", max_tokens=2000, stream=True, end_id=-1)
streams = [stub.ModelStreamInfer(iter([request])) for _ in range(16)]
print([next(stream) for stream in streams] and "all run", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_frozen_reader_stalls_no_other_request_and_is_let_go(crashing, reference_text):
    client = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(crashing.grpc)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout.readline() == "all run\n"
    client.send_signal(signal.SIGSTOP)
    try:
        assert crashing.generate("others ", 200)[1]["text_output"] == "others " + reference_text(
            "others ", 200
        )
        crashing.wait_until(
            lambda: crashing.health()["active"] == 0, 7
        )  # at 4 ms a step they would have written for 8 s
    finally:
        client.kill()
        client.wait()


def left_by(service, tree):
    """Return the processes, shared memory and files that a service has left."""
    return (
        [pid for pid in tree if is_running(pid)] + service.run_folders() + service.shared_memory()
    )


def test_sigterm_drains_and_leaves_nothing_running(crashing, reference_text):
    crashing.wait_until(
        lambda: len(crashing.tree()) == 2 + len(MODELS)
    )  # tritonserver, stubs, the engine; no other process for long
    tree = crashing.tree()
    with crashing.streaming("last ", 400) as finish:
        crashing.process.send_signal(signal.SIGTERM)
        assert finish() == reference_text("last ", 400)
    assert crashing.process.wait(15) == 0
    assert left_by(crashing, tree) == []


@pytest.mark.slow
def test_sigterm_under_load_answers_all_64_streams(start_service, tmp_path):
    config = tmp_path / "serving.json"
    config.write_text(
        '{"target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.05}}, '
        '"policy": {"kind": "none"}, "limits": {"max_active_requests": 48, "drain_s": 8}}'
    )
    service = start_service(config).wait_ready()
    tree = service.tree()
    with service.stub() as stub:
        lengths = [
            60 if i % 2 else 500 for i in range(64)
        ]  # the long ones cannot end in time, and 16 still wait
        requests = [
            infer_request("ensemble", text_input=f"{i}", max_tokens=n, stream=True, end_id=-1)
            for i, n in enumerate(lengths)
        ]
        streams = [stub.ModelStreamInfer(iter([request]), timeout=30) for request in requests[:48]]
        for stream in streams:
            next(stream)
        streams += [stub.ModelStreamInfer(iter([request]), timeout=30) for request in requests[48:]]
        service.wait_until(lambda: service.health()["waiting"] == 16, 5)
        service.process.send_signal(signal.SIGTERM)
        endings = [final_or_error(stream) for stream in streams]
    assert [
        ending for ending, length in zip(endings[:48], lengths, strict=False) if length == 60
    ] == ["final"] * 24
    assert set(endings) <= {"final", "the server is shutting down", grpc.StatusCode.UNAVAILABLE}
    assert service.process.wait(15) == 0
    assert left_by(service, tree) == []


def final_or_error(stream):
    """Return how a stream's only request ended: ``final``, an error message or the stream's
    status.
    """
    endings = []
    try:
        for message in stream:
            if message.error_message:
                endings.append(message.error_message)
            elif message.infer_response.parameters["triton_final_response"].bool_param:
                endings.append("final")
    except grpc.RpcError as error:
        return endings[0] if endings else error.code()
    assert len(endings) == 1
    return endings[0]


@pytest.mark.slow
def test_a_hanging_engine_is_killed_and_started_again(start_service):
    service = start_service().wait_ready()
    victim = service.health()["pid"]
    endings = streams_when(service, lambda: os.kill(victim, signal.SIGSTOP), limit_s=25)
    assert all("engine process has ended" in ending for ending in endings)
    assert service.works()
    assert service.health()["pid"] != victim
    assert service.log.read_text().count("spindle: try: curl") == 1
    assert service.stop() == 0


def test_a_port_in_use_is_named(service, tmp_path):
    second = Service(tmp_path / "log", CONFIG, GRPC_PORT=str(service.http))
    assert second.process.wait(30) == 1
    assert f"grpc port {service.http} cannot be used" in second.log.read_text()


def test_an_engine_that_cannot_start_ends_the_launcher_with_its_reason(tmp_path):
    config = tmp_path / "serving.json"
    config.write_text(
        '{"target": {"engine": "tests.fakes.fake"}, '
        '"drafts": [{"name": "d", "engine": "torch", "model": "nowhere"}]}'
    )
    service = Service(tmp_path / "log", config)
    assert service.process.wait(60) == 1
    assert "spindle: error:" in service.log.read_text()
