"""The wheel of the vLLM plug-in: one import name, and all that it imports from itself."""

import ast
import json
import subprocess
import venv
import zipfile

import pytest

from engines_build import vllm_wheel

FOREIGN = "raise AssertionError('somebody else\\'s package was imported')\n"
PLAN = """
import json, sys
from spindle_vllm.backend.hosts.adapter import Host, HostRow
from spindle_vllm.backend.hosts.settings import host_config
from spindle_vllm.backend.ops.stats import Stats
from spindle_vllm.policy import LatencyTable

drafts = [{"engine": "lookup", "name": "lookup"}, {"engine": "suffix", "name": "suffix"}]
host = Host(host_config({"drafts": drafts}, 4, 512), Stats())
host.plan_by(LatencyTable.synthetic("target", {1: 0.02, 8: 0.021}))
proposals = host.propose([HostRow("a", [1, 2, 3, 4, 5] * 6, 30, 20)])
generic = sorted({name.partition(".")[0] for name in sys.modules} & {"backend", "policy"})
print(json.dumps([proposals["a"].tokens, generic]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    vllm_wheel.write_tree(folder)
    return folder


def imported(module):
    """Return the dotted names that a module's import statements have, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return names


def test_every_import_of_its_own_is_in_the_wheel(tree):
    files = [*tree.rglob("*.py")]
    modules = {
        ".".join(file.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")
        for file in files
    }
    for file in files:
        names = imported(file)
        assert not {name.partition(".")[0] for name in names} & {"policy", "backend"}, file
        own = {name for name in names if name.partition(".")[0] == vllm_wheel.NAME}
        assert own <= modules, file
    assert "spindle_vllm.backend.hosts.vllm" in modules


def test_modules_that_are_imported_by_name_are_renamed(tree):
    text = (tree / "spindle_vllm/backend/kinds.py").read_text()
    assert '"spindle_vllm.backend.engines.suffix"' in text
    assert '"backend.' not in text


@pytest.mark.parametrize("room", ["app.py", "cli.py", "ipc", "launcher", "triton_adapter"])
def test_our_own_server_is_not_in_it(tree, room):
    assert (vllm_wheel.ROOT / "backend" / room).exists()
    assert not (tree / "spindle_vllm/backend" / room).exists()


def test_an_import_that_cannot_be_renamed_is_an_error():
    with pytest.raises(ValueError, match="import backend as other"):
        vllm_wheel._rename("import backend as other\n", set())


@pytest.mark.slow
def test_it_plans_in_an_environment_with_packages_of_the_same_names(tmp_path):
    wheel = vllm_wheel.build(tmp_path / "dist")
    with zipfile.ZipFile(wheel) as package:
        tops = {name.partition("/")[0] for name in package.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {vllm_wheel.NAME}
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in ("backend", "policy"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(FOREIGN)
    pip = [programs / "pip", "install", "--quiet", wheel]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    planned = subprocess.run(
        [programs / "python", "-c", PLAN],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"NUMBA_DISABLE_JIT": "1", "HOME": str(tmp_path)},
    )
    assert planned.returncode == 0, planned.stderr
    tokens, generic = json.loads(planned.stdout)
    assert tokens
    assert tokens == [1, 2, 3, 4][: len(tokens)]
    assert generic == []
