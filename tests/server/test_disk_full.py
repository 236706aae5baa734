"""A full disk is a sentence at start, and no reason to end once the service runs. Files over a
limit (RLIMIT_FSIZE) stand for the disk.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import CONFIG, PROJECT_ROOT, free_ports

pytestmark = pytest.mark.slow

MIB = 2048  # in the 512-byte blocks of ulimit -f


def run_on_a_full_disk(command, folder, **environment):
    """Run a command that can write no file over 1 MiB; return (status, output, what it left in the
    folder).
    """
    shell = f"ulimit -f {MIB}; exec {shlex.join(command)}"
    environment = {**os.environ, "TMPDIR": str(folder), **environment}
    run = subprocess.run(
        ["sh", "-c", shell],
        cwd=PROJECT_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (
        run.returncode,
        run.stdout + run.stderr,
        sorted(path.name for path in folder.rglob("*") if path.name != ".lock"),
    )


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path):
    ports = dict(
        zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), map(str, free_ports(3)), strict=True)
    )
    command = [sys.executable, "-m", "backend.cli", "serve"]
    status, output, left = run_on_a_full_disk(
        command, tmp_path, SPINDLE_CONFIG=str(CONFIG), **ports
    )
    assert status == 1
    assert f"spindle: error: the run folder {tmp_path}" in output
    assert "Set TMPDIR to another folder" in output
    assert "Traceback" not in output
    assert left == []


def test_a_cache_that_cannot_be_written_is_named_and_holds_no_half_model(tmp_path):
    config = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"
    command = [sys.executable, "-m", "engines_build.prepare", "--config", str(config)]
    status, output, left = run_on_a_full_disk(command, tmp_path, SPINDLE_CACHE=str(tmp_path))
    assert status == 1
    assert "spindle: error:" in output
    assert "File too large" in output
    assert "Traceback" not in output
    assert left == ["models"]


@pytest.fixture
def unlogged(start_service, tmp_path):
    """A service whose log lines all fail: ``/dev/full`` has no space left."""
    return start_service(CONFIG, log=Path("/dev/full"), TMPDIR=str(tmp_path))


def test_a_full_log_costs_no_request_anything(unlogged):
    unlogged.wait_until(unlogged.works)
    engine = unlogged.health()["pid"]
    os.kill(engine, signal.SIGKILL)
    unlogged.wait_until(lambda: unlogged.works() and unlogged.health()["pid"] != engine)
    stub = unlogged.pid_of("triton_python_backend_stub ", "/ensemble/")
    os.kill(stub, signal.SIGKILL)
    unlogged.wait_until(
        lambda: (
            unlogged.works()
            and unlogged.pid_of("triton_python_backend_stub ", "/ensemble/") != stub
        )
    )
    assert unlogged.stop() == 0
