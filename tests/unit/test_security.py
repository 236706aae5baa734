"""No code comes from a request or a model folder: what could run some is not used where requests
and checkpoints are read.
"""

import ast
import json
from pathlib import Path

import pytest
import torch

from backend.engines.checkpoint import CheckpointError, load
from backend.ipc.messages import Chunk
from backend.triton_adapter.codec import load_arrays

ROOT = Path(__file__).resolve().parents[2]
SERVED = [
    path
    for folder in ("backend", "policy", "model_repository")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
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
            elif name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
                yield node.lineno, f"{name} without allow_pickle=False"


@pytest.mark.parametrize("path", SERVED, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_served_unpickles_evaluates_or_starts_a_shell(path):
    assert list(wrong_in(ast.parse(path.read_text("utf-8")))) == []


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
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    torch.save(Trap(sprung), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load(tmp_path, "fp32", "cpu")
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
