import json
import platform
import socket

import numpy as np
import pytest

from backend import machine


def test_the_description_is_json_and_names_neither_host_nor_missing_packages(monkeypatch):
    monkeypatch.setattr(machine, "_PACKAGES", ("numpy", "no-such-package-anywhere"))
    text = json.dumps(machine.describe())
    assert machine.versions() == {"python": platform.python_version(), "numpy": np.__version__}
    assert socket.gethostname() not in text
    assert machine.describe()["cores"] >= 1


def test_a_machine_without_cpuinfo_still_has_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    assert machine.processor()
    assert machine.instructions() == ""


@pytest.mark.parametrize(
    ("flags", "name", "bf16"),
    [
        ("sse2 avx f16c fma avx2", "Some CPU (AVX2)", False),
        ("f16c fma avx2 avx512f avx512bw avx512vl avx512dq", "Some CPU (AVX512)", False),
        (
            "f16c fma avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16",
            "Some CPU (AVX512-BF16)",
            True,
        ),
        (
            "f16c fma avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_bf16",
            "Some CPU (AMX-BF16)",
            True,
        ),
        ("sse2 avx", "Some CPU", False),
    ],
)
def test_processors_of_one_name_differ_by_what_they_multiply_in(
    monkeypatch, tmp_path, flags, name, bf16
):
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nmodel\t\t: 1\nmodel name\t: Some CPU\nflags\t\t: "
        f"{flags}\n\nprocessor\t: 1\n"
    )
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.processor() == name
    assert machine.multiplies_bf16() == bf16
