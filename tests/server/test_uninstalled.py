"""A copy of the source that is installed nowhere, serving from another folder."""

import json
import os
import shutil
import subprocess
import sysconfig
import venv

import pytest

from backend import PROJECT_ROOT
from tests.server.harness import Service

PACKAGES = ("policy", "backend", "engines_build", "model_repository")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with the packages alone."""
    folder = tmp_path_factory.mktemp("copy")
    for name in PACKAGES:
        shutil.copytree(
            PROJECT_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with what serving needs, but without Spindle: a path in another environment's
    ``.pth`` file adds its packages, and not what that environment's own ``.pth`` files add.
    """
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    with open(f"{packages}/packages.pth", "w") as file:
        file.write(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    command = [python, "-I", "-c", "import msgspec, backend"]
    missing = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No module named 'backend'" in missing.stderr
    return python


@pytest.mark.slow
def test_a_copy_serves_from_another_folder(copy, python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    config = folder / "serving.json"
    model = copy / "engines_build" / "drafts" / "tiny-target"
    config.write_text(json.dumps({"target": {"engine": "torch", "model": str(model)}}))
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    service = Service(folder / "log", config, root=folder, python=str(python), PYTHONPATH=path)
    try:
        service.wait_ready(limit_s=600)
        status, reply = service.generate("SELECT name FROM", 8)
        assert (status, reply["finish_reason"]) == (200, "length")
    finally:
        assert service.stop() == 0
