"""No code comes from a request or a model folder: what could run some is not used where requests
and checkpoints are read.
"""

import ast
import contextlib
import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from backend import cli
from backend.checked_settings import ConfigError
from backend.engines.models.configuration import read_decoder_config
from backend.engines.weights import read_weights
from backend.ipc import process as engine_process
from backend.ipc.messages import Chunk
from backend.storage.manifest import read_manifest
from backend.triton_adapter.codec import load_arrays
from engines_build import prepare

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "engines_build" / "drafts" / "tiny-target"
SERVED = [
    path
    for folder in ("backend", "policy", "model_repository")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
BUILT = sorted((ROOT / "engines_build").rglob("*.py"))
COMPUTED = {
    "backend/cli.py": "a command's module, of its own table",
    "backend/engines/registry.py": "a kind's module, of its own table",
    "backend/kinds.py": "an operator's own kind, which serving.json names",
    "backend/engines/trt_graph/runtime.py": "a library of its own list",
    "policy/baselines/registry.py": "a module in its own folder",
    "policy/custom.py": "the user's policy: code that serving.json names",
    "engines_build/trt_graph/library.py": "a library of its own list",
}
"""Files that import modules whose names are computed."""
MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.jit.load",
    "yaml.load",
    "yaml.unsafe_load",
}


COMPUTES = "imports a module of a computed name"


def wrong_in(tree):
    """Return what a module does that it must not, as (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[0] in MODULES
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            only_weights = name == "torch.load" and options.get("weights_only") == "True"
            if (
                (name in CALLS and not only_weights)
                or options.get("shell") == "True"
                or options.get("trust_remote_code") == "True"
            ):
                yield node.lineno, name
            elif (
                re.fullmatch(r"Auto\w+\.from_\w+", name)
                and options.get("trust_remote_code") != "False"
            ):
                yield node.lineno, f"{name} without trust_remote_code=False"
            elif name.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
                yield node.lineno, COMPUTES
            elif name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
                yield node.lineno, f"{name} without allow_pickle=False"


@pytest.mark.parametrize("path", [*SERVED, *BUILT], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_served_or_built_runs_code_from_files(path):
    wrong = [what for _, what in wrong_in(ast.parse(path.read_text("utf-8")))]
    computes = wrong.count(COMPUTES)
    assert bool(computes) == (str(path.relative_to(ROOT)) in COMPUTED)
    assert len(wrong) == computes


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "eval(x)",
        "np.load(p)",
        "run(a, shell=True)",
        "f(trust_remote_code=True)",
        "AutoConfig.from_pretrained(f)",
        "AutoTokenizer.from_pretrained(f, trust_remote_code=trust)",
        "import_module(name)",
        "importlib.import_module(manifest.library)",
    ],
)
def test_what_must_not_be_is_recognised(code):
    assert list(wrong_in(ast.parse(code)))


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_not_opened(tmp_path):
    sprung = tmp_path / "sprung"
    shutil.copyfile(TINY / "config.json", tmp_path / "config.json")
    torch.save(Trap(sprung), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="is a pickle, which Spindle does not read"):
        read_weights(tmp_path)
    assert not sprung.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert sprung.exists(), "the trap would have been noticed"


def test_logits_files_are_read_without_unpickling(tmp_path):
    import numpy as np

    sprung = tmp_path / "sprung"
    np.save(tmp_path / "a.npy", np.array([Trap(sprung)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        load_arrays(Chunk(context_logits=str(tmp_path / "a.npy")))
    assert not sprung.exists()


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Plant a module where a user's policy may lie: next to serving.json and where the command was
    started. Return a function that writes serving.json, and what shows that the module ran.
    """
    sprung = tmp_path / "sprung"
    for place in ("config", "start"):
        (tmp_path / place).mkdir()
        trap = f"from pathlib import Path\nPath({str(sprung)!r}).touch()\nclass Mine: pass\n"
        (tmp_path / place / "planted_optional.py").write_text(trap)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setenv("SPINDLE_POLICY_PATH", str(tmp_path / "start"))
    monkeypatch.chdir(tmp_path / "start")

    def serving(kind):
        file = tmp_path / "config" / "serving.json"
        raw = {"target": {"engine": "tests.fakes.fake"}, "drafts": [], "policy": {"kind": kind}}
        file.write_text(json.dumps(raw))
        return file

    return serving, sprung


class EndedError(RuntimeError):
    """Everything was imported that is looked for."""


def look_for_an_optional_module(*_):
    """Import what a library may use if it is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("planted_optional")
    raise EndedError


def start_engine(file, monkeypatch):
    monkeypatch.setattr(engine_process, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_process, "build", look_for_an_optional_module)
    assert engine_process.main(["--config", str(file), "--socket", "socket"]) == 1


def start_preparation(file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prepare", "--config", str(file)])
    monkeypatch.setattr(prepare, "set_up_messages", lambda **_: None)
    monkeypatch.setattr(prepare.signal, "signal", lambda *_: None)
    monkeypatch.setattr(prepare, "check_policy", look_for_an_optional_module)
    with pytest.raises(EndedError):
        prepare.main()


def start_command(file, monkeypatch):
    del file
    monkeypatch.setitem(cli.DELEGATED_COMMANDS, "simulate", ("policy.simulate", "sim", ""))
    monkeypatch.setattr("policy.simulate.main", look_for_an_optional_module)
    with pytest.raises(EndedError):
        cli.main(["simulate", "compare", "--rates", "0.5,8", "--arms", "none,fixed:eagle:2"])


@pytest.mark.parametrize("start", [start_engine, start_preparation, start_command])
def test_a_planted_module_does_not_run(start, planted, monkeypatch):
    serving, sprung = planted
    start(serving("adaptive"), monkeypatch)
    assert not sprung.exists()


@pytest.mark.parametrize("start", [start_engine, start_preparation])
def test_a_policy_of_the_user_s_own_is_found(start, planted, monkeypatch):
    serving, sprung = planted
    start(serving("planted_optional.Mine"), monkeypatch)
    assert sprung.exists()


@pytest.mark.parametrize("read", [read_manifest, read_decoder_config])
def test_a_folder_with_code_asks_nothing_on_the_terminal(read, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Mine"]}))
    (tmp_path / "mine.py").write_text("raise SystemExit('the code of the folder ran')\n")
    with pytest.raises(ConfigError):
        read(tmp_path)
    assert not asked
