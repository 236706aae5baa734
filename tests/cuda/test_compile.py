"""Every kernel but our own product compiles for an H100, where it spills nothing, and for an RTX
5090, without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backend import PROJECT_ROOT

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), [(90, 227), (120, 99)])
def test_kernels_compile_and_fit(capability: int, shared_kib: int) -> None:
    # The tests' own process has Triton's interpreter in the place of its compiler.
    result = subprocess.run(
        [sys.executable, "-m", "bench.cuda.compile", str(capability)],
        cwd=PROJECT_ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.splitlines()
    assert {line.split(":")[0] for line in lines} >= {"_pack", "_walk", "_move", "_attend_split"}
    assert all(int(line.rpartition("launch ")[2]) <= shared_kib << 10 for line in lines)
    if capability == 90:
        assert [line for line in lines if "stack 0" not in line or "local 0" not in line] == []
