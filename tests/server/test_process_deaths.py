"""When a process dies, no process outlives its parent, and what is to be restarted serves again."""

import json
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from backend.config import DEFAULT_CONFIG
from tests.server.harness import (
    CONFIG,
    ROLES,
    Service,
    free_ports,
    infer_request,
    write_engine_python,
)

REAL = pytest.param(DEFAULT_CONFIG, id="real", marks=pytest.mark.slow)
FAKE = pytest.param(CONFIG, id="fake")
SERVING = set(ROLES) - {"preparation", "download", "reader of bodies", "reader of grammars"}
TERMINAL = (sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])")


@pytest.fixture
def start(tmp_path_factory):
    """Return a function that starts services with a front end; all that is left is killed."""
    services = []

    def begin(config, **options):
        (port,) = free_ports(1)
        log = tmp_path_factory.mktemp("service") / "log"
        services.append(Service(log, config, OPENAI_PORT=str(port), **options))
        return services[-1]

    yield begin
    for service in services:
        service.process.kill()
        service.process.wait()
        for pid in service.running():
            os.kill(pid, signal.SIGKILL)
        for region in service.shared_memory():
            region.unlink()


def wait_ready(service, starts=1):
    service.wait_ready(starts, limit_s=300)  # the first start of the real model prepares it
    service.wait_for_front_end()


def start_readers(service):
    """Have the front end start the process that reads bodies, and the engine that for
    grammars.
    """
    body = json.dumps({"model": "any", "prompt": "a" * 100_000}).encode()
    url = f"http://127.0.0.1:{service.openai}/v1/completions"
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=30)
    assert service.pids("reader of bodies")
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}
    assert service.generate("a", 2, end_id=0, **guide)[0] == 200
    assert service.pids("reader of grammars")


def kill_launcher(service):
    service.process.kill()
    service.process.wait()


@pytest.mark.parametrize("config", [FAKE, REAL])
def test_a_killed_launcher_leaves_no_process_and_its_files_until_the_next_start(start, config):
    service = start(config)
    wait_ready(service)
    start_readers(service)
    assert all(service.pids(role) for role in SERVING)
    kill_launcher(service)
    assert service.left() == {}
    (folder,) = service.run_folders()
    following = start(config, TMPDIR=str(service.log.parent))
    wait_ready(following)
    assert not folder.exists()
    assert list(Path("/dev/shm").glob(f"{folder.name}*")) == []
    assert following.stop() == 0
    assert following.left() == {}
    assert service.run_folders() == service.shared_memory() == following.shared_memory() == []


@pytest.mark.slow
@pytest.mark.parametrize("config", [FAKE, REAL])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_launcher_that_is_asked_to_end_leaves_nothing(start, config, number):
    service = start(config)
    wait_ready(service)
    service.process.send_signal(number)
    assert service.left() == {}
    assert service.process.wait() == 0
    assert service.run_folders() == service.shared_memory() == []


@pytest.mark.slow
@pytest.mark.parametrize("config", [FAKE, REAL])
def test_a_launcher_ends_with_its_terminal(start, config):
    service = start(config, inside=TERMINAL)
    wait_ready(service)
    kill_launcher(service)  # the process that has the terminal
    assert service.left() == {}
    assert service.run_folders() == service.shared_memory() == []


@pytest.mark.slow
@pytest.mark.parametrize("config", [FAKE, REAL])
@pytest.mark.parametrize(
    "role", ["tritonserver", "engine", "front end", "stub of spindle", "stub of ensemble"]
)
def test_what_dies_serves_again_and_ends_with_the_launcher(start, config, role):
    service = start(config)
    wait_ready(service)
    start_readers(service)
    (victim,) = service.pids(role)
    os.kill(victim, signal.SIGKILL)
    starts = 1 if role in ("engine", "front end") else 2
    service.wait_until(lambda: service.pids(role) not in ([], [victim]))
    wait_ready(service, starts)
    service.wait_until(service.works)
    assert all(len(service.pids(each)) == 1 for each in SERVING)
    log = service.log.read_text(errors="replace")
    assert log.count("spindle: try: curl") == starts
    engines = 1 if role == "front end" else 2
    assert len(re.findall(r"engine process \d+ started", log)) == engines
    kill_launcher(service)
    assert service.left() == {}


@pytest.mark.slow
@pytest.mark.parametrize("config", [FAKE, REAL])
@pytest.mark.parametrize("role", ["tritonserver", "engine", "front end", "stub of spindle"])
def test_a_restart_does_not_outlive_the_launcher(start, config, role):
    service = start(config)
    wait_ready(service)
    (victim,) = service.pids(role)
    os.kill(victim, signal.SIGKILL)
    service.wait_until(lambda: service.pids(role) not in ([], [victim]))
    kill_launcher(service)
    assert service.left() == {}


def said(service, text):
    return text in service.log.read_text(errors="replace")


MOMENTS = {
    "launcher runs": lambda service: True,
    "run folder is there": Service.run_folders,
    "models are prepared": lambda service: service.pids("preparation"),
    "tritonserver is about to start": lambda service: said(service, "spindle: starting"),
    "tritonserver runs": lambda service: service.pids("tritonserver"),
    "a stub runs": lambda service: service.pids("stub of spindle"),
    "the engine is about to start": lambda service: (
        "backend.engine_process" in str(service.running())
    ),
    "the engine runs": lambda service: service.pids("engine"),
    "the engine loads": lambda service: said(service, "engine INFO"),
    "the engine listens": lambda service: said(service, "engine INFO backend.ipc.process: ready"),
    "all models are loaded": lambda service: said(service, "Started HTTPService"),
    "the front end starts": lambda service: service.pids("front end"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "moment"),
    [(CONFIG, each) for each in MOMENTS if each != "models are prepared"]  # fakes need none
    + [(DEFAULT_CONFIG, each) for each in MOMENTS],
    ids=lambda value: value.parts[-3] if isinstance(value, Path) else value,
)
def test_a_launcher_that_is_killed_while_it_starts_leaves_no_process(start, config, moment):
    service = start(config)
    service.wait_until(lambda: MOMENTS[moment](service), limit_s=300)
    kill_launcher(service)
    assert service.left() == {}


@pytest.mark.slow
def test_a_download_ends_with_the_launcher(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as index:  # it never answers
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        pip = {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": ""}
        service = start(DEFAULT_CONFIG, SPINDLE_CACHE=str(tmp_path / "cache"), **pip)
        service.wait_until(lambda: service.pids("download"))
        kill_launcher(service)
        assert service.left() == {}


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_it_stops_leaves_no_process(start):
    service = start(CONFIG)
    wait_ready(service)
    with service.stub() as stub:
        request = infer_request("ensemble", text_input="a", max_tokens=2000, stream=True, end_id=-1)
        stream = stub.ModelStreamInfer(iter([request]), timeout=60)
        next(stream)
        service.process.send_signal(signal.SIGTERM)
        service.wait_until(lambda: said(service, "stopping: "))
        kill_launcher(service)
        assert service.left() == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_hangs_while_it_loads_ends_with_the_launcher(start, tmp_path, number):
    python = write_engine_python(tmp_path / "python", "tests.server.hanging_engine")
    service = start(CONFIG, SPINDLE_PYTHON=str(python))
    service.wait_until(lambda: said(service, "hangs"))
    service.process.send_signal(number)
    service.process.wait()
    assert service.left() == {}


@pytest.mark.slow
def test_restarts_of_an_engine_that_keeps_dying_are_counted_and_bounded(start):
    service = start(CONFIG)
    wait_ready(service)
    for restart in range(5):
        (engine,) = service.pids("engine")
        os.kill(engine, signal.SIGKILL)
        if restart < 4:
            service.wait_until(lambda: service.pids("engine") not in ([], [engine]))  # noqa: B023
            service.wait_until(
                lambda: service.metric("spindle_engine_restarts_total") == restart + 1  # noqa: B023
            )
    service.wait_until(lambda: said(service, "failure 5 in quick succession: giving up"))
    service.wait_until(lambda: said(service, "of model spindle has died: restarting"))
    wait_ready(service, 2)
    service.wait_until(service.works)
    assert service.metric("spindle_engine_restarts_total") == 0
    assert service.stop() == 0
    assert service.left() == {}
