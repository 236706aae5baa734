import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.launcher.checks import python_library_folder
from backend.launcher.run_folder import packaged_libraries, packaged_triton, write_backend
from tests.server.harness import CONFIG, MARK, PROJECT_ROOT, Service, free_ports

pytestmark = pytest.mark.slow


class PlainServer(Service):
    """tritonserver on the committed model repository, as an operator with a Triton of his own
    starts it: no launcher.
    """

    def __init__(self, folder):
        self.http, self.grpc, self.metrics = free_ports(3)
        self.log = folder / "log"
        self.regions = f"spindle-plain-{self.http}-{os.getpid()}-"
        backends = write_backend(folder)
        options = [
            "--model-repository",
            PROJECT_ROOT / "model_repository",
            "--backend-directory",
            backends,
        ]
        options += [
            "--http-port",
            self.http,
            "--grpc-port",
            self.grpc,
            "--metrics-port",
            self.metrics,
            "--http-address",
            "127.0.0.1",
        ]
        options += [
            "--grpc-address",
            "127.0.0.1",
            "--metrics-address",
            "127.0.0.1",
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self.regions}",
        ]
        environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith("SPINDLE_")
            },
            "LD_LIBRARY_PATH": f"{python_library_folder()}:{packaged_libraries()}",
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT_ROOT),
            "TMPDIR": str(folder),
            "SPINDLE_CONFIG": str(CONFIG),
            MARK: str(folder),
        }
        command = [str(part) for part in (packaged_triton() / "bin" / "tritonserver", *options)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def shared_memory(self):
        return list(Path("/dev/shm").glob(f"{self.regions}*"))


@pytest.fixture
def plain(tmp_path):
    server = PlainServer(tmp_path)
    yield server
    if server.process.poll() is None:
        kill(server)
    server.left()


def test_the_committed_repository_serves_without_the_launcher(plain, reference_text):
    plain.wait_until(plain.works)
    assert {region.stat().st_mode & 0o777 for region in plain.shared_memory()} == {0o600}
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert plain.generate("plain ", 20, model)[1]["text_output"] == "plain " + reference_text(
            "plain ", 20
        )
    plain.process.send_signal(signal.SIGTERM)
    assert plain.process.wait(20) == 0
    assert plain.left() == {}
    assert plain.shared_memory() == []


def kill(plain):
    plain.process.kill()
    plain.process.wait()


@pytest.mark.parametrize("role", ["tritonserver", "engine", "stub of spindle", "stub of ensemble"])
def test_what_dies_leaves_no_process_after_tritonserver(plain, role):
    plain.wait_until(plain.works)
    (victim,) = plain.pids(role)
    os.kill(victim, signal.SIGKILL)
    if role == "engine":
        plain.wait_until(lambda: plain.pids("engine") not in ([], [victim]))
        plain.wait_until(plain.works)
    if role == "stub of spindle":
        plain.wait_until(lambda: plain.pids("engine") == [])
    kill(plain)
    assert plain.left() == {}
    regions = plain.shared_memory()
    for region in regions:
        region.unlink()
    # of a killed stub, and of one that waits for an answer of the killed tritonserver
    assert len(regions) <= role.startswith("stub") + 1


@pytest.mark.parametrize("role", ["stub of ensemble", "stub of spindle", "engine"])
def test_tritonserver_that_is_killed_while_it_starts_leaves_no_process(plain, role):
    plain.wait_until(lambda: plain.pids(role))
    kill(plain)
    assert plain.left() == {}
