"""Every kernel compiles for an H100, without a GPU, and spills nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backend.config import PROJECT_ROOT

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_compile_and_spill_nothing() -> None:
    # The tests' own process has Triton's interpreter in the place of its compiler.
    result = subprocess.run(
        [sys.executable, "-m", "bench.cuda.compile"],
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
    assert [line for line in lines if "stack 0" not in line or "local 0" not in line] == []
