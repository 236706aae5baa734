"""An EAGLE-3 head as a kind of draft: its memory, what it is refused for, and texts with it."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import PolicyConfig, parse_config
from backend.engine_config import EngineConfig
from backend.engines.eagle.engine import HeadRows
from backend.engines.eagle.folder import load
from backend.engines.eagle.kind import footprint, make, taps
from backend.engines.eagle.model import TorchModel
from backend.engines.eagle.openvino import OpenvinoModel
from backend.engines.registry import Service, module_of
from backend.kinds import KINDS, automatic
from backend.machine import machine
from backend.model_folders import check_folders, check_pairs, model_path
from backend.request import GenerationRequest
from bench.in_process import generate
from policy import LatencyTable
from tests.fakes.eagle import TINY_TARGET as TARGET
from tests.fakes.eagle import converted, published, random_head, read, write

TABLES = {
    "target": LatencyTable.synthetic("target", {1: 0.004, 8: 0.005, 64: 0.02}),
    "eagle": LatencyTable.synthetic("eagle", {1: 0.0003, 64: 0.001}),
}
NONE = PolicyConfig(kind="none")


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def folder(tmp_path, target_sha256="", **changes):
    return converted(tmp_path / "eagle", target_sha256, **changes)


def config(head, target=None, **settings):
    own = {"name": "eagle", "engine": "eagle", "model": str(head), "dtype": "fp32"}
    return parse_config(
        {
            "target": target or {"engine": "torch", "model": str(TARGET), "dtype": "fp32"},
            "drafts": [own | settings],
            "policy": {"kind": "fixed", "draft": "eagle", "length": 3, "guard": False},
        }
    )


def test_a_folder_is_known_by_its_architecture(tmp_path):
    own = {"name": "eagle", "model": str(folder(tmp_path)), "device": "auto"}
    target = {"engine": "torch", "model": str(TARGET), "device": "cuda:1"}
    draft = parse_config({"target": target, "drafts": [own]}).drafts[0]
    assert (draft.engine, draft.device) == ("eagle", "cuda:1")


def test_auto_means_only_targets_that_give_states():
    assert all(KINDS[name].gives_states for on in ("cpu", "cuda") for name in automatic(on))


@pytest.mark.parametrize("own", [True, False], ids=["own matrices", "the target's"])
def test_its_memory_is_that_of_its_tensors(tmp_path, own):
    made = config(folder(tmp_path, own_embedding=own, own_head=own), dtype="fp64")
    service = Service(made, 1, model_path)
    draft = made.drafts[0]
    engine = make(draft, service)
    planned = footprint(draft, made, model_path(draft))
    model = engine._model
    assert planned.kv == pytest.approx(model._pool.numel() * 8, rel=0.01)
    whole = sum(tensor.numel() * 8 for name, tensor in model._weights.items() if name != "kv")
    whole += model._embedding.numel() * (8 if own else 2)
    assert planned.weights == pytest.approx(whole, rel=0.1)


def test_a_text_is_the_target_s_own_and_its_states_are_asked_for(tmp_path):
    made = config(folder(tmp_path))
    check_pairs(made)
    asked = [GenerationRequest(f"Write {n} words.", 24, end_id=-1) for n in range(3)]
    assert Service(made, 1, model_path).taps == taps(tmp_path / "eagle") == (1, 2, 3)
    texts = []
    for drafts in (made.drafts, ()):
        app = build(replace(made, drafts=drafts, policy=made.policy if drafts else NONE), TABLES)
        texts.append([session.sequence.tokens for session in generate(app, asked, 3)])
        counters = {(n, *labels.values()): v for n, labels, v in app.stats.drain().counters}
        drafted = ("spindle_draft_tokens_total", "planner", "eagle") in counters
        assert drafted == bool(drafts)
        app.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 4160}, "vocabulary of 4160 tokens, its target .* 4096"),
        ({"target_hidden_size": 128, "own_embedding": True}, "target_hidden_size is 128, .* 256"),
        ({"hidden_size": 128}, "hidden_size is 128, its target .* has 256"),
        ({"layers": (1, 2, 5)}, "layers go to 5, its target .* has 4"),
    ],
)
def test_a_head_of_another_target_is_refused(tmp_path, changes, words):
    made = config(folder(tmp_path, **changes))
    with pytest.raises(ConfigError, match=words):
        served(made)


def served(made):
    check_pairs(made)
    return make(made.drafts[0], Service(made, 1, model_path))


def test_a_head_that_was_prepared_for_other_weights_is_a_warning(tmp_path, caplog):
    made = config(folder(tmp_path, target_sha256="1" * 64))
    with caplog.at_level(logging.WARNING):
        make(made.drafts[0], Service(made, 1, model_path))
    assert "prepared for a target of the weights 111111111111" in caplog.text


def test_targets_without_states_for_the_host_are_refused_by_name(tmp_path):
    head, cuda = folder(tmp_path), {"engine": "cuda", "model": str(TARGET), "dtype": "fp32"}
    assert config(head, cuda).drafts[0].tree_width == 1
    with pytest.raises(ConfigError, match=r"target\.lookahead must be 0 with .*'eagle'.* got 1"):
        config(head, cuda | {"lookahead": 1})
    with pytest.raises(ConfigError, match="'eagle' reads the target, whose engine must be"):
        config(head, {"engine": "tests.fakes.fake"})


def test_a_published_head_is_refused_where_another_kind_is_to_load_it(tmp_path):
    head = str(write(tmp_path / "head", "flat", *published("flat", *random_head())))
    with pytest.raises(ConfigError, match=r"target\.model: .*/head is a draft head: name it in dr"):
        check_folders(parse_config({"target": {"engine": "torch", "model": head}}))
    words = r"drafts\[0\]\.engine must be 'eagle' or left out for .*/head, got 'torch'"
    with pytest.raises(ConfigError, match=words):
        check_folders(config(head, engine="torch"))


def test_every_head_may_read_layers_of_its_own(tmp_path):
    one = config(folder(tmp_path))
    other = folder(tmp_path / "other", layers=(4, 2))
    drafts = (*one.drafts, replace(one.drafts[0], name="more", model=str(other)))
    assert Service(replace(one, drafts=drafts), 1, model_path).taps == (1, 2, 3, 4)


def test_the_kind_answers_for_latencies():
    assert KINDS["eagle"].measured
    cases = module_of(EngineConfig("eagle")).latency_cases(target=False)
    assert {case.new for case in cases} == {1}


def test_a_processor_runs_it_in_int8_where_openvino_is_installed(tmp_path, monkeypatch):
    head = str(folder(tmp_path, own_embedding=True))
    raw = {"target": {"engine": "torch", "model": str(TARGET)}, "drafts": [{"model": head}]}
    raw["drafts"][0]["name"] = "eagle"
    assert parse_config(raw).drafts[0].dtype == "int8"
    absent = replace(KINDS["eagle"], int8_package=("no-such-package", "1.0"))
    with monkeypatch.context() as without:
        without.setitem(KINDS, "eagle", absent)
        narrow = "bf16" if machine.multiplies_bf16() else "fp32"
        assert parse_config(raw).drafts[0].dtype == narrow
    wide, made = (config(head, raw["target"], dtype=dtype) for dtype in (narrow, "int8"))
    one, other = (make(c.drafts[0], Service(c, 1, model_path)) for c in (wide, made))
    kv = [engine._model._pool.nbytes for engine in (one, other)]
    assert kv[0] == kv[1]
    assert footprint(made.drafts[0], made, model_path(made.drafts[0])).kv == pytest.approx(
        kv[0], rel=0.01
    )
    assert footprint(wide.drafts[0], wide, model_path(wide.drafts[0])) == footprint(
        made.drafts[0], made, model_path(made.drafts[0])
    )


@pytest.mark.parametrize(("rounded", "least"), [(False, 0.999999), (True, 0.999)])
def test_openvino_computes_nearly_what_torch_does(rounded, least, tmp_path):
    head = converted(tmp_path, draft_vocab_size=1024, head_dim=64)
    (shape, arrays), (_, tensors) = load(head), read(head)
    states = 20 * np.random.default_rng(0).standard_normal((5, 3, 256)).astype(np.float32)
    table = np.random.default_rng(1).standard_normal((4096, 256)).astype(np.float32)
    tables = {"embedding": table, "lm_head": table}
    room = {"positions": 64, "slots": 64}
    how = {"rounded": rounded, "narrow": False, "threads": 1}
    near = OpenvinoModel(shape, arrays, **tables, **room, **how)
    tables = {name: torch.from_numpy(one) for name, one in tables.items()}
    exact = TorchModel(shape, tensors, **tables, **room)
    places, mask = np.arange(1, 6), np.ones((5, 1, 2), np.bool_)
    outputs = []
    for model in (exact, near):
        hidden = model.fuse(states).copy()
        rows = HeadRows(places, hidden, places)
        model.write(rows, places)
        model.begin(places[:, None], 1)
        outputs.append(model.run(rows, mask))
    for wide, narrow in zip(*outputs, strict=True):
        products = (wide * narrow).sum(-1)
        lengths = np.linalg.norm(wide, axis=-1) * np.linalg.norm(narrow, axis=-1)
        assert (products / lengths).min() > least
