"""How the launcher runs the Dynamo worker, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from backend import PROJECT_ROOT
from backend.config import parse_config
from backend.launcher.environment import LaunchError, read_settings
from backend.launcher.processes import DynamoWorker, import_folder

TINY = Path(__file__).parents[2] / "engines_build" / "drafts" / "tiny-target"
CONFIG = parse_config({"target": {"model": str(TINY)}, "limits": {"kv_cache_tokens": 4096}})


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("DYNAMO_NAMESPACE", "My Fleet", "DYNAMO_NAMESPACE .* may contain only a-z, 0-9, - and _"),
        ("KV_EVENTS", "5557", "KV_EVENTS .* must be an endpoint like tcp://.*, got '5557'"),
    ],
)
def test_a_wrong_variable_is_named(variable, value, sentence):
    with pytest.raises(LaunchError, match=sentence):
        read_settings({variable: value})


def test_a_worker_needs_a_model_and_a_python():
    settings = read_settings({"DYNAMO_NAMESPACE": "fleet"})
    with pytest.raises(LaunchError, match="--dynamo needs a model"):
        DynamoWorker(settings, parse_config({"target": {"engine": "tests.fakes.fake"}}), Path())
    with pytest.raises(LaunchError, match=r"/nowhere/python lacks: make fleet"):
        DynamoWorker(settings, CONFIG, Path(), environment={"DYNAMO_PYTHON": "/nowhere/python"})


def test_a_worker_is_started_with_what_it_registers_and_ended(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase $1 in -I) exec {sys.executable} "$@";; esac\n'
        f'printf "%s\\n" "$@" "$PWD" > {tmp_path}/started.new\n'
        f"mv {tmp_path}/started.new {tmp_path}/started\nexec sleep 60\n"
    )
    python.chmod(0o755)
    settings = read_settings({"DYNAMO_NAMESPACE": "fleet", "KV_EVENTS": "tcp://*:5557"})
    folder = import_folder(tmp_path)
    worker = DynamoWorker(settings, CONFIG, folder, environment={"DYNAMO_PYTHON": str(python)})
    worker.start()
    try:
        while not (tmp_path / "started").exists():
            pass
        module, *options, where = (tmp_path / "started").read_text().splitlines()[1:]
    finally:
        worker.stop()
    assert (module, where) == ("backend.fleet", str(folder))
    assert [path.name for path in folder.iterdir()] == ["backend"]
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    assert given == {
        "address": "127.0.0.1:8001",
        "folder": str(TINY),
        "name": "tiny-target",
        "namespace": "fleet",
        "block-tokens": "32",
        "kv-blocks": "128",
        "max-requests": "64",
        "drain-s": "30.0",
        "kv-events": "tcp://127.0.0.1:5557",
    }


def test_what_the_worker_imports_needs_no_fastapi():
    """Its environment has Dynamo and what ``requirements-fleet.txt`` lists."""
    names = [
        line.split()[1]
        for line in (PROJECT_ROOT / "backend/fleet/worker.py").read_text().splitlines()
        if line.startswith("from backend.")
    ]
    code = f"import sys; sys.modules['fastapi'] = None; import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT_ROOT)
