import json
import os
import re
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError
from backend.cli import main
from backend.config import DEFAULT_CONFIG, parse_config
from backend.engine_config import EMBEDDED_MODEL
from backend.engines.models.reading import read_spec
from backend.engines.openvino.graph_cache import bring_graph
from backend.launcher import doctor, model_report
from backend.storage import cache
from engines_build.prepare import prepare
from tests.fakes.checkpoints import LFS_POINTER, folder
from tests.fakes.machine import AVX2_FLAGS, BF16_FLAGS, CUDA_PACKAGES, H100, V100, FakeMachine
from tests.server.harness import free_ports


def tiny(tmp_path, **config):
    """Copy a tiny model's folder, with changed settings."""
    model = shutil.copytree(PROJECT_ROOT / "engines_build/drafts/tiny-target", tmp_path / "model")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | config))
    return model


@pytest.fixture
def a_good_machine(monkeypatch, tmp_path):
    """Free ports, an empty cache."""
    ports = dict(
        zip(
            ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "OPENAI_PORT"),
            map(str, free_ports(4)),
            strict=True,
        )
    )
    for name, value in {
        **ports,
        "SPINDLE_CACHE": str(tmp_path / "cache"),
        "SPINDLE_CONFIG": str(DEFAULT_CONFIG),
    }.items():
        monkeypatch.setenv(name, value)


def states():
    return {finding.name: finding.state for finding in doctor.check_everything()}


def test_a_machine_that_can_serve_learns_what_is_not_prepared(a_good_machine, capsys):
    assert doctor.report(as_json=False) == 0
    shown = capsys.readouterr().out
    assert "not converted yet: the first start or `spindle prepare` converts it" in shown
    assert shown.endswith("`spindle serve` will work\n")


def test_the_same_as_json(a_good_machine, capsys):
    assert doctor.report(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {
        "name": "model",
        "state": "warning",
        "text": "not converted yet: the first start or `spindle prepare` converts it",
    } in found


def test_a_missing_shared_library_is_named_with_its_package_and_ends_with_1(a_good_machine, capsys):
    assert doctor.report(as_json=False, machine=FakeMachine(has_python_library=False)) == 1
    shown = capsys.readouterr().out
    library = r"libpython3\.\d+\.so\.1\.0 is missing: .*the package libpython3\.\d+"
    assert re.search(rf"^python         missing  {library}", shown, re.MULTILINE)
    assert shown.endswith('`spindle serve` will not work: fix the items marked "missing"\n')


def test_a_package_that_is_missing_or_another_is_named_with_the_pinned_version():
    pins = [("numpy", "1.0"), ("no-such-package", "2.0"), ("pytest", "9.2.0")]
    found = doctor.packages(FakeMachine(packages={"pytest": "9.2.0+local"}), pins)
    assert found.state == "missing"
    command = "pip install numpy==1.0 no-such-package==2.0"
    assert found.text == f"{command} (installed now: numpy {metadata.version('numpy')})"


def test_what_is_pinned_is_read_with_and_without_a_clone(monkeypatch, tmp_path):
    assert ("torch", "2.13.0") in doctor.read_pins("convert")
    assert ("tritonclient", "2.51.0") in doctor.read_pins("serve")
    assert "torch" not in dict(doctor.read_pins("serve"))
    lines = [
        "tritonclient[grpc,http]==2.51.0; extra == 'serve'",
        'torch==2.13.0 ; extra == "convert"',
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    assert doctor.read_pins("serve", tmp_path) == [("tritonclient", "2.51.0")]
    assert doctor.read_pins("convert", tmp_path) == [("torch", "2.13.0")]


@pytest.mark.medium
def test_without_torch_only_models_that_were_served_before_will_be(
    a_good_machine, monkeypatch, tmp_path
):
    bare = FakeMachine(packages=dict.fromkeys(("torch", "transformers", "gguf")))
    found = {finding.name: finding for finding in doctor.check_everything(bare)}
    assert (found["packages"].state, found["conversion"].state) == ("ok", "warning")
    assert "torch, transformers, gguf not installed" in found["conversion"].text
    text = f"converting {EMBEDDED_MODEL} needs the package torch: install spindle[convert]"
    assert found["model"].state == "missing"
    assert found["model"].text.startswith(text)

    def look():
        model = {"model": str(tmp_path / "model"), "dtype": "fp32"}
        (tmp_path / "serving.json").write_text(json.dumps({"target": model}))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", None)
            patch.setitem(sys.modules, "transformers", None)
            for module in ("models.probe", "openvino.conversion"):  # imported by other tests
                patch.delitem(sys.modules, f"backend.engines.{module}", raising=False)
            found = doctor.deployment(tmp_path / "serving.json", bare)
        return [each.text for each in found if each.state == "missing"]

    model = tiny(tmp_path)
    (reason,) = look()
    assert f"reading {model} for the first time needs the package t" in reason
    read_spec(model)
    (reason,) = look()
    assert f"converting {model} to fp32 needs the package t" in reason
    bring_graph(model, "fp32")
    assert look() == []
    shutil.rmtree(cache.root() / "decoders")
    (reason,) = look()
    assert f"reading {model} for the first time needs the package t" in reason
    other = doctor.conversion(FakeMachine(packages={"torch": "2.14.0"}), [("torch", "2.13.0")])
    assert other.state == "missing"


@pytest.mark.parametrize(
    ("flags", "state", "words"),
    [
        (
            f"{BF16_FLAGS} avx512_vnni",
            "ok",
            "AVX512-BF16.*, int8 products: dtype auto is bf16",
        ),
        (AVX2_FLAGS, "ok", "AVX2.*, no int8 products: dtype auto is fp32"),
        ("sse2", "warning", "no AVX2, so dtype auto is fp32"),
    ],
)
def test_the_processor_says_what_auto_means(flags, state, words):
    found = doctor.processor(FakeMachine(flags=flags))
    assert found.state == state
    assert re.search(words, found.text)


@pytest.mark.parametrize(
    ("lines", "packages", "reason"),
    [
        ([H100], {"torch": "2.13.0+cpu"}, "the installed torch is a CPU build"),
        ([H100], {"torch": "2.13.0", "triton": None}, "triton is not installed"),
        (
            [H100, V100],
            CUDA_PACKAGES,
            "Tesla V100-SXM2-16GB has compute capability 7.0, below 8.0",
        ),
    ],
)
def test_a_gpu_that_the_engine_of_gpus_cannot_use_is_a_warning(lines, packages, reason):
    found = doctor.gpu(FakeMachine(gpu_lines=lines, packages=packages))
    assert found.state == "warning"
    assert found.text.endswith(f": {reason}, so engine auto is torch there, and slower")


def test_a_gpu_is_named_with_its_driver_and_compute_capability():
    found = doctor.gpu(FakeMachine(gpu_lines=[H100], packages=CUDA_PACKAGES))
    assert (found.state, found.text) == (
        "ok",
        "NVIDIA H100 80GB HBM3, 81559 MiB, compute capability 9.0, driver 580.65.06, "
        "triton 3.6.0: engine auto is cuda on device cuda",
    )
    assert doctor.gpu(FakeMachine(gpu_lines=[])).text == "none: the processor serves"


def test_a_port_in_use_is_missing_and_says_by_whom(a_good_machine, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("METRICS_PORT", str(port))
        found = {finding.name: finding for finding in doctor.check_everything()}
        assert found["metrics port"].state == "missing"
        assert f"by process {os.getpid()} (" in found["metrics port"].text
        assert found["metrics port"].text.endswith("Choose another with --metrics-port")
        assert found["http port"].state == "ok"


@pytest.mark.parametrize(
    "command",
    [
        ["tritonserver", "--model-repository", "/tmp/spindle-run-x1/model_repository"],
        ["python", "-m", "backend.openai_frontend"],
    ],
)
def test_a_port_of_a_running_spindle_ends_a_second_one_too(a_good_machine, monkeypatch, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("HTTP_PORT", str(port := taken.getsockname()[1]))
        monkeypatch.setattr(doctor, "command_line", lambda pid: command)
        found = {finding.name: finding for finding in doctor.check_everything()}["http port"]
    assert found.state == "missing"
    words = f"Spindle runs there, process {os.getpid()}; a second needs --port"
    assert found.text.startswith(f"{port} on ")
    assert found.text.endswith(words)


def test_too_little_room_is_a_warning_and_a_folder_that_cannot_be_written_is_missing(
    tmp_path,
):
    full, locked = FakeMachine(disk_bytes=400_000_000), FakeMachine(writable=False)
    deep = tmp_path / "deep" / "down"
    assert doctor.disk(full, "cache", deep, 0.3, "choose another").state == "ok"
    short = doctor.disk(full, "cache", deep, 0.5, "choose another")
    assert short.state == "warning"
    assert short.text.endswith("0.4 GB free, 0.5 GB may be needed: choose another")
    assert doctor.disk(locked, "cache", tmp_path, 0.0, "choose another").state == "missing"


@pytest.mark.parametrize(
    ("machine", "name", "words"),
    [
        (FakeMachine(folder=Path("/tmp/a b")), "run folder", "TMPDIR '/tmp/a b' cannot hold"),
        (FakeMachine(folder=Path("/tmp/é")), "run folder", "TMPDIR '/tmp/é' cannot hold"),
        (FakeMachine(runs_no_programs=True), "run folder", "is mounted noexec"),
        (FakeMachine(most_open_files=64), "open files", "the limit of open files .* is 64"),
    ],
)
def test_what_hinders_a_start_is_missing(a_good_machine, machine, name, words):
    (found,) = [each for each in doctor.check_everything(machine) if each.name == name]
    assert found.state == "missing"
    assert re.search(words, found.text)


def test_an_address_that_is_none_of_this_machine_is_missing(a_good_machine, monkeypatch):
    monkeypatch.setenv("BIND", "no-such-host.invalid")
    assert states()["ports"] == "missing"


def test_a_configuration_that_cannot_be_served_is_missing(a_good_machine, monkeypatch, tmp_path):
    file = tmp_path / "serving.json"
    file.write_text('{"target": {"engine": "torch", "model": "org/name"}}')
    monkeypatch.setenv("SPINDLE_CONFIG", str(file))
    assert states()["configuration"] == "missing"
    monkeypatch.setenv("HTTP_PORT", "x")
    assert states()["ports"] == "missing"


def on_gpu(tmp_path, *, engine="cuda", **facts):
    """Return what is said of a deployment of a small model on a GPU of such a machine."""
    model = tiny(tmp_path)
    file = tmp_path / "serving.json"
    target = {"engine": engine, "model": str(model), "device": "cuda"}
    file.write_text(json.dumps({"target": target}))
    known = {"gpu_lines": [H100], "packages": CUDA_PACKAGES, "cuda": "13.0"}
    known |= {"gpu_bytes": 80 * 2**30, "device": "NVIDIA H100"}
    machine = FakeMachine(**known | facts)
    return {finding.name: finding for finding in doctor.deployment(file, machine)}


def test_what_engines_on_a_gpu_would_run_on_is_named(tmp_path):
    found = on_gpu(tmp_path)
    assert (found["cuda"].state, found["cuda"].text) == (
        "ok",
        "driver 580.65.06, torch 2.13.0 for CUDA 13.0, triton 3.6.0, compute capability 9.0 "
        "(tested)",
    )
    assert found["memory plan"].state == "ok"
    assert "cuda has 80.00 GiB and " in found["memory plan"].text


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        ({"gpu_lines": []}, "missing", "no NVIDIA GPU is visible: set device to cpu or auto"),
        ({"cuda": ""}, "missing", "the installed torch is a CPU build"),
        ({"driver_is_new": False}, "missing", "cannot use the GPU: the driver may be too old"),
        ({"gpu_lines": [H100.replace("9.0", "8.6")]}, "warning", "8.6 (not tested, expected to"),
        (
            {"engine": "torch", "packages": {**CUDA_PACKAGES, "triton": None}},
            "warning",
            "; target is not run by cuda: triton is not installed",
        ),
    ],
)
def test_what_engines_on_a_gpu_lack_is_said(tmp_path, facts, state, words):
    found = on_gpu(tmp_path, **facts)
    assert found["cuda"].state == state
    assert words in found["cuda"].text
    assert ("memory plan" in found) is (state != "missing")


def test_a_plan_that_a_gpu_has_no_room_for_is_missing(tmp_path):
    found = on_gpu(tmp_path, gpu_bytes=2**20)["memory plan"]
    assert found.state == "missing"
    assert found.text.startswith("not enough memory: cuda has 0.00 GiB and ")
    assert "limits.kv_cache_tokens" in found.text


def test_a_folder_is_asked_of_every_engine(tmp_path, capsys):
    model = tiny(tmp_path)
    machine = FakeMachine(flags=BF16_FLAGS)
    assert model_report.report(str(model), as_json=True, machine=machine) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["openvino"]["text"].startswith("can, in bf16; memory: cpu has ")
    assert found["torch"]["state"] == "ok"
    assert found["cuda"]["text"] == "cannot: no NVIDIA GPU is visible"
    assert found["serve"]["text"] == f"spindle serve --model {model}: engine openvino"


def test_quantised_weights_are_named(tmp_path, capsys):
    quantization = {"quant_method": "gptq", "bits": 4}
    for more, text, dtype in (
        (
            {},
            "every engine widens them to bf16 when it loads them; openvino has no dtype int4 for "
            "it: its groups have None columns",
            "bf16",
        ),
        ({"group_size": 128}, "openvino keeps them on CPUs (dtype int4), other", "int4"),
    ):
        model = tiny(tmp_path / dtype, quantization_config=quantization | more)
        assert (
            model_report.report(str(model), as_json=True, machine=FakeMachine(flags=BF16_FLAGS))
            == 0
        )
        found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert found["weights"]["text"].startswith(f"quantised (gptq); {text}")
        assert found["openvino"]["text"].startswith(f"can, in {dtype}; memory")
    assert "with lm_head int8 (logits are off by about 1 %)" in found["weights"]["text"]
    assert "verify slowly" not in found["weights"]["text"]


def test_groups_that_verify_slowly_are_named(tmp_path):
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    model = tiny(tmp_path / "model", quantization_config=quantization)
    weights = model_report.check_engines(str(model), FakeMachine(flags=BF16_FLAGS))[0]
    assert "groups of 32 verify slowly with AMX" in weights.text


@pytest.mark.medium
def test_a_folder_that_no_engine_serves_has_the_reasons(tmp_path, capsys):
    model = folder(tmp_path, "model", architectures=["NewForCausalLM"], model_type="new")
    assert main(["doctor", "--model", str(model)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("has no such model (model_type 'new')") == 2  # of openvino and torch
    assert shown.endswith(f"no engine can serve {model} here\n")


def cut(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_a_tensor(model):
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors")


def without_ends(model):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        raw = json.loads((model / name).read_text())
        kept = {key: value for key, value in raw.items() if not key.startswith("eos_token")}
        (model / name).write_text(json.dumps(kept))


def with_an_index_of_a_missing_part(model):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"), "is a pickle, which"),
        (
            with_an_index_of_a_missing_part,
            "cannot read .*00001-of-00002.safetensors: No such",
        ),
        (lambda m: (m / "model.safetensors").rename(m / "a.safetensors"), "not found without the"),
        (
            lambda m: (m / "model.safetensors").write_text(LFS_POINTER),
            "model.safetensors is a Git LFS",
        ),
        (
            lambda m: (m / "tokenizer.json").write_text(LFS_POINTER),
            "tokenizer.json is a Git LFS",
        ),
        (lambda m: (m / "config.json").write_text(LFS_POINTER), "config.json is a Git LFS pointer"),
        (cut, "model.safetensors is damaged"),
        (without_a_tensor, "tensor model.norm.weight is missing"),
        (without_ends, "names no token that ends a text"),
        (lambda m: (m / "tokenizer.json").write_text("{}"), r"cannot .* \S*/tokenizer\.json: "),
    ],
)
def test_what_starting_would_refuse_is_refused(tmp_path, monkeypatch, capsys, damage, words):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    damage(model := tiny(tmp_path))
    assert (
        model_report.report(str(model), as_json=False, machine=FakeMachine(flags=BF16_FLAGS)) == 1
    )
    shown = capsys.readouterr().out
    assert "can, in" not in shown
    assert re.search(words, shown)
    assert shown.endswith(f"no engine can serve {model} here\n")
    (tmp_path / "serving.json").write_text(json.dumps({"target": {"model": str(model)}}))
    (found,) = doctor.deployment(tmp_path / "serving.json", FakeMachine(flags=BF16_FLAGS))
    assert (found.state, bool(re.search(words, found.text))) == ("missing", True)
    config = parse_config({"target": {"model": str(model)}})
    with pytest.raises(ConfigError, match=words):
        prepare(config, make_model=None, measure=None)
