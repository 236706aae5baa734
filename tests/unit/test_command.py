"""The command's start: packages of the same names that are not Spindle's."""

import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from hashlib import sha256
from importlib import metadata

import pytest

from engines_build import command


def start(folder, *words):
    """Run the command where Python looks into a folder first."""
    return subprocess.run(
        [sys.executable, "-m", "engines_build.command", *words],
        cwd=command.ROOT.parent,
        env={**os.environ, "PYTHONPATH": f"{folder}:{command.ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("file", ["policy.py", "policy/__init__.py", "backend/__init__.py"])
def test_a_package_of_the_same_name_ends_the_start(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise AssertionError('imported')")
    done = start(tmp_path, "--version")
    name = file.partition("/")[0].removesuffix(".py")
    assert done.returncode == 1
    assert f"error: Python finds the package '{name}' at {tmp_path}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_without_code_hides_nothing(tmp_path):
    (tmp_path / "policy").mkdir()  # a namespace gives way to a package
    assert start(tmp_path, "--version").returncode == 0


def test_a_package_that_another_one_has_overwritten_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "ours_or_not" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    digest = urlsafe_b64encode(sha256(b"").digest()).rstrip(b"=").decode()
    (tmp_path / "spindle-1.dist-info").mkdir()
    (tmp_path / "spindle-1.dist-info" / "METADATA").write_text("Name: spindle\nVersion: 1\n")
    record = tmp_path / "spindle-1.dist-info" / "RECORD"
    record.write_text(f"ours_or_not/__init__.py,sha256={digest},0\n")
    assert metadata.distribution("spindle").version == "1"
    assert command.find_clash("ours_or_not") == ""
    file.write_text("from elsewhere import everything")
    assert command.find_clash("ours_or_not").startswith("another package has overwritten")
