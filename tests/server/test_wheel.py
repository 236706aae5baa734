"""The wheel alone: built, installed into an empty environment, serving from an unrelated folder."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from backend import PROJECT_ROOT
from backend.launcher.processes import command_line
from tests.fakes.eagle import converted
from tests.server.harness import Service, free_ports

PACKAGES = ("policy", "backend", "engines_build", "model_repository")
FAMILY = "engines_build/drafts/tiny"


class Installed(Service):
    """``spindle serve`` of an environment, in a folder of its own with an empty cache."""

    def __init__(self, spindle, folder, config):
        self.http, self.grpc, self.metrics, self.openai = free_ports(4)
        self.log = folder / "log"
        names = ("port", "grpc-port", "metrics-port", "openai-port")
        numbers = (self.http, self.grpc, self.metrics, self.openai)
        ports = [f"--{name}={port}" for name, port in zip(names, numbers, strict=True)]
        kept = ("HOME", "LANG", "PATH")
        environment = {
            "TMPDIR": str(folder),
            **{name: os.environ[name] for name in kept if name in os.environ},
        }
        command = [spindle, "serve", "--config", config, "--cache", folder / "cache", *ports]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def run(*command, **options):
    """Run a command and return what it printed; fails with what it said."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources():
    """Return the files of the packages in the source tree."""
    found = (path for package in PACKAGES for path in (PROJECT_ROOT / package).rglob("*"))
    names = (path.relative_to(PROJECT_ROOT).as_posix() for path in found if path.is_file())
    return {name for name in names if "__pycache__" not in name}


def mentions_the_source(pid):
    """Return whether a process has the source tree in its arguments, environment or folder."""
    proc = Path("/proc", str(pid))
    words = [
        *command_line(pid),
        proc.joinpath("environ").read_text(errors="replace"),
        os.readlink(proc / "cwd"),
    ]
    # not that of a folder with a longer name
    inside = re.compile(re.escape(str(PROJECT_ROOT)) + r"(?![\w.-])")
    return any(map(inside.search, words))


@pytest.mark.slow
def test_the_wheel_serves_in_an_empty_environment(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("wheel")  # a short path: a socket lies in it
    run(sys.executable, "-m", "build", "--outdir", tmp_path, PROJECT_ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        assert {name for name in package.namelist() if name.split("/")[0] in PACKAGES} == sources()
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    run(programs / "pip", "install", "--quiet", f"{wheel}[serve]")  # no torch
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    eagle = converted(folder / "eagle")
    drafts = [
        {"name": "eagle", "model": str(eagle)},
        {"name": "small", "engine": "openvino", "model": f"{FAMILY}-0.9m", "dtype": "fp32"},
        {"name": "head", "engine": "head", "model": f"{FAMILY}-head", "dtype": "int8"},
    ]
    config = folder / "serving.json"
    target = {"engine": "openvino", "model": f"{FAMILY}-target", "dtype": "fp32"}
    config.write_text(json.dumps({"target": target, "drafts": drafts}))
    service = Installed(programs / "spindle", folder, config)
    assert service.process.wait(600) == 1
    assert "install spindle[convert]" in service.log.read_text()
    environment = {**os.environ, "SPINDLE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "engines_build.prepare", "--config", config]
    run(*command, cwd=PROJECT_ROOT, env=environment)
    service = Installed(programs / "spindle", folder, config)
    try:
        service.wait_ready(limit_s=600)
        assert not any(map(mentions_the_source, [service.process.pid, *service.tree()]))
        status, reply = service.generate("SELECT name FROM", 8)
        assert (status, reply["finish_reason"]) == (200, "length")
        assert "spindle: its answer: " in service.log.read_text()
    finally:
        assert service.stop() == 0
    command = [programs / "spindle", "bench"]
    bench = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert b"is not in the installed package" in bench.stderr
