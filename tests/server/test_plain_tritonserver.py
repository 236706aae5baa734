import os
import signal
import subprocess
import sys
import time

import pytest

from backend.triton_adapter.launcher.package import packaged_libraries, packaged_triton
from backend.triton_adapter.launcher.processes import descendants, is_running
from backend.triton_adapter.launcher.run_folder import write_backend
from backend.triton_adapter.launcher.settings import python_library_folder
from tests.server.harness import CONFIG, PROJECT_ROOT, Service, free_ports

pytestmark = pytest.mark.slow


class PlainServer(Service):
    """tritonserver on the committed model repository, as an operator with a Triton of his own
    starts it: no launcher.
    """

    def __init__(self, folder):
        self.http, self.grpc, self.metrics = free_ports(3)
        self.log = folder / "log"
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
        }
        command = [str(part) for part in (packaged_triton() / "bin" / "tritonserver", *options)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def answers(self):
        try:
            return self.generate("ping ", 1)[0] == 200
        except OSError:
            return False


@pytest.fixture
def plain(tmp_path):
    server = PlainServer(tmp_path)
    yield server
    if server.process.poll() is None:
        server.stop()


def test_the_committed_repository_serves_without_the_launcher(plain, reference_text):
    plain.wait_until(plain.answers)
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert plain.generate("plain ", 20, model)[1]["text_output"] == "plain " + reference_text(
            "plain ", 20
        )
    tree = descendants(plain.process.pid)
    plain.process.send_signal(signal.SIGTERM)
    assert plain.process.wait(20) == 0
    time.sleep(0.5)
    assert [pid for pid in tree if is_running(pid)] == []
