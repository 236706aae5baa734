"""Imports keep to the contracts in pyproject.toml, installs to the pins."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
import tomllib

from backend import PROJECT_ROOT

CONTRACTS = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LINT = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"


def contract_of(room):
    """The contract that orders what lies in a package."""
    (one,) = (c for c in CONTRACTS["contracts"] if c.get("containers") == [room])
    return one


@pytest.fixture
def copy(tmp_path):
    """A tree of the engines alone, with the contract on them."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        PROJECT_ROOT / "backend" / "engines", tmp_path / "backend/engines", ignore=ignored
    )
    (tmp_path / "backend" / "__init__.py").touch()
    contract = contract_of("backend.engines")
    lines = [f"{key} =\n    " + "\n    ".join(contract[key]) for key in ("containers", "layers")]
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_packages =\n    backend\n"
        "[importlinter:contract:engines]\nname = engines\n"
        f"type = {contract['type']}\nexhaustive = {contract['exhaustive']}\n" + "\n".join(lines)
    )
    return tmp_path


def lint(tree: Path):
    """The errors of import-linter in a tree; none: it is content."""
    run = subprocess.run(
        [sys.executable, "-c", LINT], cwd=tree, capture_output=True, check=False, text=True
    )
    return run.stdout + run.stderr if run.returncode else ""


def test_a_new_engine_s_folder_is_in_the_contract_or_breaks_it(copy):
    assert lint(copy) == ""
    (copy / "backend/engines/tomorrow").mkdir()
    (copy / "backend/engines/tomorrow/__init__.py").touch()
    assert "backend.engines.tomorrow" in lint(copy)


def test_an_engine_knows_no_other_of_its_layer(copy):
    (copy / "backend/engines/torch/stray.py").write_text("import backend.engines.eagle.engine\n")
    assert "backend.engines.torch.stray -> backend.engines.eagle.engine" in lint(copy)


def test_the_loop_is_kept_from_all_engines_at_once():
    (loop,) = (c for c in CONTRACTS["contracts"] if "the loop knows" in c["name"])
    assert "backend.engines" in loop["forbidden_modules"]
    assert {edge.split(" -> ")[1] for edge in loop["ignore_imports"]} <= {
        "backend.engines.hosted",
        "backend.engines.port",
    }


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("backend", "policy", "engines_build", cache_dir=None)
    edges = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while leaves := {name for name, others in edges.items() if not others & edges.keys()}:
        edges = {name: others for name, others in edges.items() if name not in leaves}
    assert not edges


def test_tools_are_installed_together_with_the_pins_of_what_serves():
    """Else pip may replace a pinned package with a release that serving cannot use."""
    lines = (PROJECT_ROOT / "Makefile").read_text().splitlines()
    installs = [
        line
        for line in lines
        if "$(BIN)/pip install" in line and "--no-deps" not in line and "--editable" not in line
    ]
    assert len(installs) == 3
    for line in installs:
        assert re.search(r"-r requirements-dev\.txt|\$\(PINS:%=-r %\)", line), line
    (pins,) = (line.partition(" := ")[2].split() for line in lines if line.startswith("PINS := "))
    first = (PROJECT_ROOT / "requirements-dev.txt").read_text().splitlines()[: len(pins)]
    assert first == [f"-r {name}" for name in pins]
    tables = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tables["dynamic"]["optional-dependencies"]["convert"] == {"file": pins}
