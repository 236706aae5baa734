"""A kind of engine is its module and its entry: nothing outside compares kinds by name."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from backend import PROJECT_ROOT, model_folders
from backend.checked_settings import ConfigError
from backend.config import load_config, parse_config
from backend.engine_config import EngineConfig, with_auto_resolved
from backend.engines import memory
from backend.engines.latency_cases import Case
from backend.engines.port import Footprint
from backend.engines.registry import Service, make_engine, module_of
from backend.kinds import KINDS, Kind, automatic
from backend.launcher import doctor

PRODUCT = [
    file
    for room in ("backend", "engines_build", "policy")
    for file in sorted((PROJECT_ROOT / room).rglob("*.py"))
]


def by_name(source):
    """Return the lines that compare a kind of engine, or look one up, by a name in the code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            about = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            about = [node.subject, *(case.pattern for case in node.cases)]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("KINDS"):
            about = [node.value, node.slice]
        else:
            continue
        words = {name for side in about for name in names(side)}
        texts = {leaf.value for side in about for leaf in ast.walk(side) if is_text(leaf)}
        if texts & {*KINDS} and words & {"engine", "kind", "KINDS"}:
            found.append(node.lineno)
    return found


def names(node):
    """The last words of what a side of a comparison reads."""
    for leaf in ast.walk(node):
        if isinstance(leaf, ast.Attribute):
            yield leaf.attr
        elif isinstance(leaf, ast.Name):
            yield leaf.id


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def owns(file):
    """Whether a file may know a kind by its name: it lies in that kind's folder, runs a model of
    OpenVINO's engine by itself, or names servers that others run.
    """
    return (
        file.name == "generate.py"
        or "advise" in file.parts
        or bool({*file.relative_to(PROJECT_ROOT).with_suffix("").parts} & {*KINDS})
    )


@pytest.mark.parametrize(
    "source",
    [
        'if engine.engine == "torch": pass',
        'missing = KINDS["openvino"].missing',
        'if draft.engine in ("head", "lookup"): pass',
        'match draft.engine:\n    case "suffix":\n        pass',
    ],
)
def test_a_comparison_by_name_is_seen(source):
    assert by_name(source) == [1]


def test_nothing_compares_kinds_by_name():
    found = {
        str(file.relative_to(PROJECT_ROOT)): lines
        for file in PRODUCT
        if not owns(file) and (lines := by_name(file.read_text()))
    }
    assert found == {}


ANSWERS = """
from backend.checked_settings import ConfigError
from tests.fakes.fake_engine import FakeEngine
from backend.engines.latency_cases import Case
from backend.engines.port import Footprint

def make(engine, service):
    return FakeEngine(engine.name, seed=7, **service.sizes)

def check_folder(key, engine, config, path):
    raise ConfigError(f"{key} of a new kind, got {path(engine).name!r}")

def footprint(engine, config, folder):
    return Footprint(engine.device, 1, 2, 3)

def latency_cases(*, target):
    return [Case(1, 64, length=3)]
"""


@pytest.fixture
def new(tmp_path, monkeypatch):
    """A kind whose module lies elsewhere."""
    (tmp_path / "kind_of_tomorrow.py").write_text(ANSWERS)
    monkeypatch.syspath_prepend(tmp_path)
    kind = Kind(
        "kind_of_tomorrow",
        architectures=("NewForCausalLM",),
        automatic=("cpu", "cuda"),
        dtypes=("bf16", "fp32"),
        behaviour=1,
    )
    monkeypatch.setitem(KINDS, "new", kind)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NewForCausalLM"]}')
    target = EngineConfig(engine="new", model=str(tmp_path / "model"), dtype="fp32")
    return replace(parse_config({"target": {"engine": "tests.fakes.fake"}}), target=target)


def test_a_new_kind_answers_for_itself(new, tmp_path):
    assert memory.plan(new, {"target": tmp_path}) == {"target": Footprint("cpu", 1, 2, 3)}
    assert module_of(new.target).latency_cases(target=True) == [Case(1, 64, length=3)]
    with pytest.raises(ConfigError, match=r"target\.model of a new kind, got 'model'"):
        model_folders.check_folders(new)
    engine = make_engine(new.target, Service(new, 1, lambda engine: tmp_path))
    assert engine.limits.max_context_tokens == new.limits.max_context_tokens


def test_a_draft_s_engine_is_known_by_its_folder_or_that_of_a_target_without_one(new, monkeypatch):
    def kind_of(target, device="cpu"):
        draft = EngineConfig(name="draft", model=new.target.model, device=device)
        return with_auto_resolved(draft, target=EngineConfig(engine=target, model="m")).engine

    assert (kind_of("torch"), kind_of("cuda", "cuda")) == ("openvino", "torch")
    assert (kind_of("trt_graph"), kind_of("tests.fakes.fake")) == ("trt_graph", "openvino")
    monkeypatch.setitem(KINDS, "new", replace(KINDS["new"], automatic=()))
    assert kind_of("torch") == "new"


def test_auto_is_the_first_kind_that_can_run_on_the_device(new, monkeypatch):
    assert (automatic("cpu"), automatic("cuda:0")) == (
        ["openvino", "torch", "new"],
        ["cuda", "torch", "new"],
    )
    absent = replace(KINDS["openvino"], package=("no-such-package", "1.0"))
    monkeypatch.setitem(KINDS, "openvino", absent)
    assert with_auto_resolved(EngineConfig(model="folder")).engine == "torch"
    assert "pip install no-such-package==1.0" in doctor.kernels().text


CHECKED = """
import sys
from pathlib import Path
from backend.config import parse_config
from backend.engine_config import EngineConfig
from backend.engines.registry import module_of
from backend.kinds import KINDS
from backend.launcher import doctor, serving
from backend.triton_adapter import stub
from dataclasses import replace
for name, kind in KINDS.items():
    fake = {"target": {"engine": "tests.fakes.fake"}}
    config = replace(parse_config(fake), target=EngineConfig(name))
    if kind.model:
        try:
            module_of(config.target).check_folder("m", config.target, config, lambda e: Path("no"))
        except ValueError:
            pass
heavy = {"torch", "openvino", "transformers", "tensorrt_llm", "numba"} & {*sys.modules}
assert not heavy, heavy
"""


@pytest.mark.medium
def test_folders_are_checked_without_a_tensor_library():
    subprocess.run([sys.executable, "-c", CHECKED], check=True, timeout=60)


WITHOUT_OPENVINO = """
import sys
sys.modules["openvino"] = None  # its import fails
import backend.app, backend.ipc.process
import backend.engines.cuda.lookahead, backend.engines.head.engine, backend.engines.torch.engine
"""


@pytest.mark.medium
def test_a_machine_of_a_gpu_needs_no_openvino():
    subprocess.run([sys.executable, "-c", WITHOUT_OPENVINO], check=True, timeout=60)


OWN = """
from backend.kinds import Kind
KIND = Kind(__name__, model=False, tokenizer=False, known_s=1e-6)
from tests.fakes.fake import make
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A serving.json with an engine of a user's own next to it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_engine").mkdir()
    (tmp_path / "my_engine" / "first.py").write_text(OWN)
    file = tmp_path / "serving.json"
    target = {"engine": "my_engine.first", "options": {"step_s": 0.5}}
    file.write_text(json.dumps({"target": target}))
    yield file
    sys.modules.pop("my_engine.first", None)
    sys.modules.pop("my_engine", None)


def test_an_engine_of_one_s_own_is_named_by_its_path_and_gets_its_options(own):
    config = load_config(own)
    engine = make_engine(config.target, Service(config, 1, lambda engine: own.parent))
    assert (engine.name, engine.step_s) == ("target", 0.5)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"engine": "my_engine.second"}, "target.engine 'my_engine.second' cannot be imported"),
        ({"engine": "backend.limits"}, "target.engine 'backend.limits' cannot be imported"),
        ({"engine": "none"}, "a dotted path like 'my_package.my_engine', got 'none'"),
        ({"engine": "lookup", "options": {"a": 1}}, "options must be empty"),
    ],
)
def test_a_kind_that_there_is_not_is_an_error_of_the_setting(own, engine, words):
    draft = {"name": "d", **engine}
    raw = {"drafts": [draft]} if engine["engine"] == "lookup" else {"target": engine}
    own.write_text(json.dumps({"target": {"engine": "my_engine.first"}, **raw}))
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(own)
