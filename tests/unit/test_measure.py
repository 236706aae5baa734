import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from backend.config import parse_config
from backend.engines import latency_cases
from backend.engines.latency_cases import Case
from backend.kinds import KINDS
from backend.storage.tables import (
    load_tables,
    missing_tables,
    read_table,
    table_file,
    timed_engines,
)
from engines_build import measure
from policy.latency import SYNTHETIC, LatencyCurve, LatencyError
from tests.fakes.checkpoints import folder
from tests.fakes.machine import FakeMachine

pytestmark = pytest.mark.slow


def checkpoint(folder, width=16, layers=1, vocab=32):
    folder.mkdir()
    layer = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (width // 2, width),
        "self_attn.v_proj.weight": (width // 2, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (width, width),
        "mlp.up_proj.weight": (width, width),
        "mlp.down_proj.weight": (width, width),
    }
    shapes = {
        f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    save_file(
        {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": width // 2,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocabulary_sha256": "0" * 64,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    """A target and a draft of one layer, a cache of their own, and few cases."""
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        latency_cases,
        "target_cases",
        lambda: [Case(1, 64), Case(2, 16, length=2), Case(1, 16, new=32, run=0)],
    )
    monkeypatch.setattr(
        latency_cases,
        "draft_cases",
        lambda: [Case(1, 16, run=3), Case(2, 16, run=3), Case(1, 16, new=8)],
    )
    folders = {
        "target": checkpoint(tmp_path / "target"),
        "small": checkpoint(tmp_path / "small", width=8),
    }
    engines = {
        name: {"engine": "torch", "name": name, "model": str(folder), "dtype": "fp32"}
        for name, folder in folders.items()
    }
    config = {
        "target": engines["target"],
        "drafts": [engines["small"], {"engine": "lookup", "name": "lookup"}],
    }
    return config, folders


def test_a_chain_of_passes_counts_as_one_pass_of_its_share():
    table = measure.tabulate(
        "e",
        [Case(4, 64, run=6), Case(1, 64, new=10), Case(2, 8, length=3)],
        [0.6, 0.2, 0.3],
        SYNTHETIC,
    )
    assert table.rows == (4, 1, 2)
    assert table.tokens == (4, 10, 8)
    assert table.context_tokens == (256, 64, 16)
    assert table.seconds == pytest.approx((0.1, 0.2, 0.3))


@pytest.mark.parametrize("cases", [latency_cases.target_cases(), latency_cases.draft_cases()])
def test_the_cases_tell_tokens_rows_and_context_apart(cases):
    def cost(rows, tokens, context):
        return 0.02 + 0.001 * tokens + 0.002 * rows + 1e-5 * context

    seconds = [
        cost(case.rows, case.query_tokens, case.rows * case.context) * max(1, case.run)
        for case in cases
    ]
    curve = LatencyCurve.fit(measure.tabulate("e", cases, seconds, SYNTHETIC))
    for rows, tokens, context in [
        (1, 1, 100),
        (1, 10, 1000),
        (8, 8, 4000),
        (32, 40, 3000),
        (1, 256, 0),
    ]:
        assert curve.seconds(tokens, rows, context) == pytest.approx(
            cost(rows, tokens, context), rel=0.05
        )


def test_measured_tables_are_found_by_the_deployment_that_they_were_measured_for(deployment):
    raw, folders = deployment
    config = parse_config({**raw, "threads": 1})
    measure.measure(config, folders, budget_s=0.0)
    tables, threads = load_tables(config, folders)
    assert list(tables) == ["target", "small"]
    assert threads == 1
    origin = tables["target"].provenance
    assert (origin.dtype, origin.threads, origin.device, origin.model) == (
        "fp32",
        1,
        "cpu",
        str(folders["target"]),
    )
    assert all(second > 0 for second in tables["small"].seconds)


def test_with_threads_auto_the_target_decides_and_its_drafts_follow(deployment):
    raw, folders = deployment
    config = parse_config(raw)
    measure.measure(config, folders, budget_s=0.0, machine=FakeMachine(core_count=1))
    assert load_tables(config, folders)[1] == 1
    target, small = timed_engines(config)
    assert table_file(target, folders["target"], "auto").exists()
    assert table_file(small, folders["small"], 1).exists()


def test_a_draft_that_is_new_is_measured_alone_with_the_target_s_threads(deployment, caplog):
    raw, folders = deployment
    config, new = (
        parse_config(raw),
        parse_config(
            {
                **raw,
                "drafts": [{**raw["drafts"][0], "name": "new", "dtype": "bf16"}, *raw["drafts"]],
            }
        ),
    )
    assert missing_tables(config, folders) == ["target", "small"]
    measure.measure(config, folders, budget_s=0.0, machine=FakeMachine(core_count=1))
    target, draft, _ = timed_engines(new)
    folders["new"] = folders["small"]
    assert missing_tables(config, folders) == []
    assert missing_tables(new, folders) == ["new"]
    before = table_file(target, folders["target"], "auto").read_bytes()
    with caplog.at_level("INFO"):
        measure.measure(new, folders, ["new"], budget_s=0.0, machine=FakeMachine(core_count=2))
    assert "1 thread takes" not in caplog.text
    assert read_table(table_file(draft, folders["new"], 1)).engine == "new"
    assert table_file(target, folders["target"], "auto").read_bytes() == before
    assert missing_tables(new, folders) == []


def test_a_table_of_a_target_with_lookahead_and_of_its_head_is_another_one(tmp_path):
    model = folder(tmp_path, "model")
    drafts = [
        {"engine": "head", "name": "head", "model": str(model)},
        {"engine": "torch", "name": "small", "model": str(model)},
    ]
    files = []
    for lookahead in (0, 1):
        target = {"engine": "cuda", "model": str(model), "lookahead": lookahead}
        config = parse_config({"target": target, "drafts": drafts})
        files.append([table_file(engine, model, 1) for engine in timed_engines(config)])
    assert [one == other for one, other in zip(*files, strict=True)] == [False, False, True]


@pytest.mark.parametrize(("all_s", "chosen"), [(0.5, 4), (0.95, 1), (2.0, 1)])
def test_all_cores_are_chosen_where_they_save_a_tenth(all_s, chosen):
    asked = []

    def probe_s(config, folders, threads):
        asked.append(threads)
        return all_s if threads == 4 else 1.0

    config = parse_config({"target": {"engine": "torch", "model": "m"}})
    assert measure.choose_threads(config, {}, FakeMachine(core_count=4), probe_s) == chosen
    assert asked == [1, 4]


def test_one_core_or_a_gpu_leaves_no_choice():
    gpu = parse_config({"target": {"engine": "torch", "model": "m", "device": "cuda"}})
    assert measure.choose_threads(gpu, {}, FakeMachine(core_count=4)) == 1
    one = parse_config({"target": {"engine": "torch", "model": "m"}})
    assert measure.choose_threads(one, {}, FakeMachine(core_count=1)) == 1


def test_the_choice_of_threads_times_the_target(deployment):
    raw, folders = deployment
    assert measure.probe_s(parse_config(raw), folders, 1) > 0


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_what_is_measured_is_the_engine_that_serves(deployment, monkeypatch, engine):
    raw, folders = deployment
    folders["target"] = checkpoint(folders["target"].parent / "wide", width=32)
    target = {**raw["target"], "engine": engine, "model": str(folders["target"])}
    config, made = parse_config({"target": target, "threads": 1}), []
    real = measure.make_engine

    def noted(engine, service):
        made.append(real(engine, service))
        return made[-1]

    monkeypatch.setattr(measure, "make_engine", noted)
    measure.measure(config, folders, budget_s=0.0)
    names = {"torch": "TorchEngine", "openvino": "OpenvinoEngine"}
    assert [type(one).__name__ for one in made] == [names[engine]]
    assert load_tables(config, folders)[0]["target"].engine == "target"


def test_what_times_depend_on_names_the_file(deployment):
    raw, folders = deployment
    target, small = timed_engines(parse_config(raw))
    other_dtype = parse_config({**raw, "target": {**raw["target"], "dtype": "bf16"}}).target
    files = {
        table_file(target, folders["target"], 1),
        table_file(target, folders["target"], 2),
        table_file(target, folders["target"], "auto"),
        table_file(target, folders["small"], 1),
        table_file(other_dtype, folders["target"], 1),
    }
    assert len(files) == 5
    assert (
        table_file(small, folders["target"], 1) in files
    )  # the name of an engine is no matter of time


def test_another_version_of_what_passes_do_is_measured_again(deployment, monkeypatch):
    raw, folders = deployment
    target, _ = timed_engines(parse_config(raw))
    before = table_file(target, folders["target"], 1)
    newer = replace(KINDS["torch"], behaviour=KINDS["torch"].behaviour + 1)
    monkeypatch.setitem(KINDS, "torch", newer)
    assert table_file(target, folders["target"], 1) != before


def test_a_table_is_of_the_packages_that_run_its_engine(deployment):
    raw, folders = deployment
    fp32 = {**raw["target"], "dtype": "fp32"}
    files = {
        (engine, version): table_file(
            parse_config({**raw, "target": {**fp32, "engine": engine}}).target,
            folders["target"],
            1,
            FakeMachine(packages={"torch": version}),
        )
        for engine in ("openvino", "torch")
        for version in ("2.13.0", "2.14.0", None)
    }
    assert len({files["openvino", version] for version in ("2.13.0", "2.14.0", None)}) == 1
    assert len(set(files.values())) == 4


def test_a_table_of_a_gpu_is_for_gpus_of_its_name(deployment):
    raw, folders = deployment
    gpu = parse_config({**raw, "target": {**raw["target"], "device": "cuda"}}).target
    files = {
        table_file(gpu, folders["target"], 1, FakeMachine(device=name))
        for name in ("L4", "H200", "L4")
    }
    assert len(files) == 2


def test_a_missing_or_damaged_table_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(LatencyError, match=r"no latency table .*absent\.json.*spindle prepare"):
        read_table(tmp_path / "absent.json")
    for text in ("{", "[]", '{"schema": 2}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(LatencyError, match=r"bad\.json: "):
            read_table(tmp_path / "bad.json")
