import json
import os
import re
import socket

import pytest

from backend import machine
from backend.config import DEFAULT_CONFIG
from backend.launcher import doctor
from backend.launcher import settings as launch
from tests.server.harness import free_ports


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
    return {finding.name: finding.state for finding in doctor.findings()}


def test_a_machine_that_can_serve_is_told_what_is_not_prepared(a_good_machine, capsys):
    assert doctor.report(as_json=False) == 0
    shown = capsys.readouterr().out
    assert "not converted yet: the first start does it, or spindle prepare" in shown
    assert shown.endswith("spindle serve can work\n")


def test_the_same_as_json(a_good_machine, capsys):
    assert doctor.report(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {
        "name": "model",
        "state": "warning",
        "text": "not converted yet: the first start does it, or spindle prepare",
    } in found


def test_a_missing_shared_library_is_named_with_its_package_and_ends_with_1(
    a_good_machine, monkeypatch, capsys
):
    def missing():
        raise launch.LaunchError(
            "libpython3.11.so.1.0 is missing: on Debian the package libpython3.11"
        )

    monkeypatch.setattr(launch, "python_library_folder", missing)
    assert doctor.report(as_json=False) == 1
    shown = capsys.readouterr().out
    assert (
        "python         missing  libpython3.11.so.1.0 is missing: on Debian the package "
        "libpython3.11" in shown
    )
    assert shown.endswith("spindle serve cannot work: mend what is missing\n")


def test_a_package_that_is_missing_or_another_is_named_with_the_pinned_version(monkeypatch):
    monkeypatch.setattr(
        doctor,
        "pinned",
        lambda: [("numpy", "1.0"), ("no-such-package", "2.0"), ("pytest", "9.2.0")],
    )
    found = doctor.packages()
    assert found.state == "missing"
    assert found.text.startswith("pip install numpy==1.0 no-such-package==2.0: ")


def test_what_is_pinned_is_read_with_and_without_a_clone(monkeypatch, tmp_path):
    of_the_clone = doctor.pinned()
    assert ("torch", "2.13.0") in of_the_clone
    assert ("tritonclient", "2.51.0") in of_the_clone
    lines = ["torch==2.13.0", "tritonclient[grpc,http]==2.51.0"]
    monkeypatch.setattr(doctor, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    assert doctor.pinned() == [("torch", "2.13.0"), ("tritonclient", "2.51.0")]


@pytest.mark.parametrize(
    ("flags", "state", "words"),
    [
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni",
            "ok",
            "AVX512-BF16.*, int8 products: dtype auto is bf16",
        ),
        ("avx2 fma f16c", "ok", "AVX2.*, no int8 products: dtype auto is fp32"),
        ("sse2", "warning", "no AVX2, so dtype auto is fp32"),
    ],
)
def test_the_processor_says_what_auto_means(monkeypatch, tmp_path, flags, state, words):
    (tmp_path / "cpuinfo").write_text(f"model name : A Processor\nflags : {flags}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    found = doctor.processor()
    assert found.state == state
    assert re.search(words, found.text)


def test_a_gpu_that_the_installed_torch_cannot_use_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(
        doctor.subprocess, "check_output", lambda *_, **__: "NVIDIA H100, 81559 MiB\n"
    )
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0+cpu")
    assert (doctor.gpu().state, doctor.gpu().text) == (
        "warning",
        "NVIDIA H100, 81559 MiB: not used, the installed torch is a CPU build",
    )
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0")
    assert doctor.gpu().state == "ok"


def test_a_port_in_use_is_missing_and_says_by_whom(a_good_machine, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("METRICS_PORT", str(port))
        found = {finding.name: finding for finding in doctor.findings()}
        assert found["metrics port"].state == "missing"
        assert f"by process {os.getpid()} (" in found["metrics port"].text
        assert found["metrics port"].text.endswith("Choose another with --metrics-port")
        assert found["http port"].state == "ok"


def test_too_little_room_is_a_warning_and_a_folder_that_cannot_be_written_is_missing(
    monkeypatch, tmp_path
):
    assert doctor.disk("cache", tmp_path / "deep" / "down", 0.0, "").state == "ok"
    assert doctor.disk("cache", tmp_path, 1e9, "choose another").text.endswith(
        "1e+09 GB may be needed: choose another"
    )
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert doctor.disk("cache", tmp_path, 0.0, "choose another").state == "missing"


def test_a_configuration_that_cannot_be_served_is_missing(a_good_machine, monkeypatch, tmp_path):
    file = tmp_path / "serving.json"
    file.write_text('{"target": {"engine": "torch", "model": "org/name"}}')
    monkeypatch.setenv("SPINDLE_CONFIG", str(file))
    assert states()["configuration"] == "missing"
    monkeypatch.setenv("HTTP_PORT", "x")
    assert states()["ports"] == "missing"
