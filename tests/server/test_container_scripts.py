"""The scripts of the containers, as far as they run without one: their start, the healthcheck and
the smoke test, on a real tritonserver.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from backend.launcher.checks import python_library_folder
from backend.launcher.processes import command_line, descendants, is_running
from backend.launcher.run_folder import packaged_libraries, packaged_triton, write_backend
from backend.launcher.server import STUB_NAME
from tests.server.harness import CONFIG, MARK, PROJECT_ROOT, Service, free_ports

pytestmark = pytest.mark.slow


class Container(Service):
    """The command of the image of ``docker/trtllm.Dockerfile``, with this machine's tritonserver;
    stubs and engine run on this environment's Python.
    """

    def __init__(self, folder, config=CONFIG):
        self.http, self.grpc, self.metrics, self.openai = free_ports(4)
        self.log = folder / "log"
        self.environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith("SPINDLE_")
            },
            "LD_LIBRARY_PATH": f"{python_library_folder()}:{packaged_libraries()}",
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT_ROOT),
            "TMPDIR": str(folder),
            "SPINDLE_CONFIG": str(config),
            "TRITONSERVER": str(packaged_triton() / "bin" / "tritonserver"),
            "HTTP_PORT": str(self.http),
            "GRPC_PORT": str(self.grpc),
            "METRICS_PORT": str(self.metrics),
            "OPENAI_PORT": str(self.openai),
            "FRONT_END_PYTHON": sys.executable,
            "PROBE_PERIOD_S": "1",
            MARK: str(folder),
        }
        addresses = [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")]
        command = [
            sys.executable,
            "-m",
            "backend.launcher.container",
            f"--backend-directory={write_backend(folder)}",
            *addresses,
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=PROJECT_ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *command):
        return subprocess.run(
            command,
            cwd=PROJECT_ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def healthy(self):
        return self.run(sys.executable, "docker/healthcheck.py").returncode == 0

    def lists_models(self):
        """Return whether the OpenAI front end answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.openai}/v1/models", timeout=5
            ) as reply:
                return json.load(reply)["object"] == "list"
        except OSError:
            return False

    def front_end(self):
        """Return the pid of the OpenAI front end, None while there is none."""
        pids = [
            p
            for p in descendants(self.process.pid)
            if "backend.openai_frontend" in (command_line(p) or [])
        ]
        return pids[0] if pids else None

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
        assert self.left() == {}


@pytest.fixture
def container(tmp_path):
    made = Container(tmp_path)
    yield made
    made.end()


def test_the_smoke_test_passes_item_by_item_and_a_dead_stub_ends_the_container(container):
    container.wait_until(container.healthy)
    found = container.run("bash", "docker/smoke.sh", "--running")
    lines = found.stdout.splitlines()
    assert [line for line in lines if not line.startswith("PASS  ")] == [], found.stderr
    assert (found.returncode, len(lines)) == (0, 8)
    stubs = [
        p for p in descendants(container.process.pid) if STUB_NAME in (command_line(p) or [""])[0]
    ]
    stub = next(p for p in stubs if "model_repository/postprocessing/" in " ".join(command_line(p)))
    os.kill(stub, signal.SIGKILL)
    container.wait_until(lambda: not container.healthy())
    assert container.process.wait(90) == 1
    assert "3 probes in a row have failed" in container.log.read_text(errors="replace")


def test_a_container_that_is_stopped_ends_in_good_order(container):
    container.wait_until(container.healthy)
    container.wait_until(container.lists_models)
    front_end = container.front_end()
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(30) == 0
    assert not is_running(front_end)


@pytest.mark.parametrize("role", ["container", "tritonserver"])
def test_whatever_ends_a_container_leaves_no_process(container, role):
    container.wait_until(container.healthy)
    container.wait_until(container.lists_models)
    os.kill(
        container.process.pid if role == "container" else container.pids(role)[0], signal.SIGKILL
    )
    container.process.wait(30)
    assert container.left() == {}


def test_an_openai_front_end_that_dies_is_started_again(container):
    container.wait_until(container.healthy)
    container.wait_until(container.lists_models)
    first = container.front_end()
    os.kill(first, signal.SIGKILL)
    container.wait_until(
        lambda: container.front_end() not in (None, first) and container.lists_models()
    )
    assert container.healthy()


def test_a_full_queue_is_no_illness(tmp_path):
    settings = json.loads(CONFIG.read_text())
    settings["target"]["options"] = {"step_s": 0.05}
    settings["limits"] = {"max_active_requests": 1, "max_queued_requests": 1}
    config = tmp_path / "serving.json"
    config.write_text(json.dumps(settings))
    container = Container(tmp_path, config)
    try:
        container.wait_until(container.healthy)
        with ThreadPoolExecutor(3) as pool:
            replies = [pool.submit(container.generate, "abc", 400) for _ in range(3)]
            container.wait_until(lambda: any(reply.done() for reply in replies))
            refused = next(reply.result() for reply in replies if reply.done())
            assert "Exceeds maximum queue size" in refused[1]["error"]
            assert container.healthy()
            assert sum(reply.done() for reply in replies) == 1, "the queue was not full any more"
    finally:
        container.end()


def test_the_smoke_test_fails_where_nothing_serves():
    http, metrics = free_ports(2)
    environment = {**os.environ, "HTTP_PORT": str(http), "METRICS_PORT": str(metrics)}
    command = ["bash", "docker/smoke.sh", "--running"]
    found = subprocess.run(
        command,
        cwd=PROJECT_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert re.findall("^(?:PASS|FAIL)", found.stdout, re.M) == ["FAIL"] * 8
