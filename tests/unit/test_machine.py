import json
import platform
import socket

import numpy as np
import pytest
import torch

from backend.machine import Machine, _nvidia_smi, machine
from tests.fakes.machine import AVX2_FLAGS, BF16_FLAGS, H100, V100, FakeMachine


def test_the_description_is_json_and_does_not_name_the_host():
    description = machine.describe()
    assert socket.gethostname() not in json.dumps(description)
    assert description["cores"] >= 1


def test_versions_are_those_of_the_packages_that_are_installed():
    class WithoutTorch(Machine):
        def package_version(self, name):
            return super().package_version("no-such-package" if name == "torch" else name)

    versions = WithoutTorch().versions()
    assert (versions["python"], versions["numpy"]) == (platform.python_version(), np.__version__)
    assert "torch" not in versions
    assert "torch" in machine.versions()


def test_a_machine_without_cpuinfo_still_has_a_name():
    bare = FakeMachine(flags="")
    assert bare.processor()
    assert bare.instructions() == ""


@pytest.mark.parametrize(
    ("flags", "name", "bf16"),
    [
        (f"sse2 avx {AVX2_FLAGS}", "A Processor (AVX2)", False),
        (f"{AVX2_FLAGS} avx512f avx512bw avx512vl avx512dq", "A Processor (AVX512)", False),
        (BF16_FLAGS, "A Processor (AVX512-BF16)", True),
        (f"{BF16_FLAGS} amx_bf16", "A Processor (AMX-BF16)", True),
        ("sse2 avx", "A Processor", False),
    ],
)
def test_processors_of_one_name_differ_by_what_they_multiply_in(flags, name, bf16):
    processor = FakeMachine(flags=flags)
    assert processor.processor() == name
    assert processor.multiplies_bf16() == bf16


@pytest.mark.parametrize(("quota", "is_busy"), [(float("inf"), True), (0.01, False)])
def test_a_machine_is_busy_if_it_gives_less_than_its_cores_or_its_quota(
    monkeypatch, quota, is_busy
):
    """Any machine gives at most a tenth of ten times its cores."""
    crowded = FakeMachine(core_count=10 * machine.cores())
    monkeypatch.setattr(FakeMachine, "cpu_quota", lambda self: quota)
    assert crowded.is_busy() == is_busy


def test_a_library_that_is_nowhere_has_no_folder():
    assert machine.library_folder("libno-such-thing.so.9") is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"]),
        ("1", ["Tesla V100-SXM2-16GB"]),
        ("0, 1", ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"]),
        ("GPU-5a", ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_shows_the_process(monkeypatch, visible, names):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = FakeMachine(gpu_lines=[H100, V100, "No devices were found"]).gpus()
    assert [gpu.name for gpu in found] == names


def test_nvidia_smi_is_asked_once(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\necho "{H100}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _nvidia_smi.cache_clear()
    try:
        assert Machine().gpus() == Machine().gpus() != []
    finally:
        _nvidia_smi.cache_clear()
    query = "--query-gpu=index,name,memory.total,driver_version,compute_cap\n"
    assert (tmp_path / "asked").read_text() == query


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_cannot_be_used_is_an_error_with_advice():
    with pytest.raises(ValueError, match=r"device 'cuda' cannot be used: .*Set it to 'cpu' or"):
        Machine().device_name("cuda")
