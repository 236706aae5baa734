"""The compiled loops: for which types, from which source, and what a bad cache folder costs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from policy.loops import acceptance, compiling
from tests.fakes.policies import RNG, latency, outcome, planner, view

ROOT = Path(__file__).resolve().parents[2]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
    ).stdout


def plans():
    """Some plans of a small batch, as JSON-able data."""
    p, rng = planner(latency((0.1, 0.15)), explore_share=0.05), np.random.default_rng(1)
    state, made = p.start(), []
    planner(whole_batch=True).plan(view(0), planner(whole_batch=True).start(), 0.0, RNG)
    for step in range(6):
        seen = view(3, request=np.arange(3) + step // 3)
        plan, state = p.plan(seen, state, float(step), RNG)
        made.append([plan.draft.tolist(), plan.length.tolist(), round(plan.predicted_s, 9)])
        over = seen.request[:1] if step % 3 == 2 else seen.request[:0]
        done = outcome(seen, plan, rng.integers(0, plan.length + 1), 1.2, finished=over)
        state = p.observe(done, state, float(step))
    return made


def test_the_same_source_decides_the_same_as_plain_python():
    code = "import json; from tests.unit.test_policy_loops import plans; print(json.dumps(plans()))"
    assert json.loads(run(code, NUMBA_DISABLE_JIT="1")) == plans()


def test_nothing_is_compiled_for_other_types_once_all_is_compiled():
    compiling.compile_all()
    with pytest.raises(TypeError, match="No matching definition"):
        acceptance.find_all(*np.zeros((4, 2)))


def test_the_cache_forgets_versions_that_no_longer_run(tmp_path):
    stale, used, foreign = (
        tmp_path / name for name in ("loops-00000000000000aa", "loops-00000000000000bb", "loops-x")
    )
    month_ago = time.time() - 31 * 86400
    for folder in (stale, used, foreign):
        (folder / "sub").mkdir(parents=True)
    for folder in (stale, foreign):
        os.utime(folder, (month_ago, month_ago))
    code = (
        "from policy.loops import compiling; compiling._folder().mkdir();"
        f"import os; os.utime(compiling._folder(), ({month_ago}, {month_ago}));"
        "compiling.compile_all(); print(compiling._folder().name)"
    )
    environment = {"SPINDLE_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    own = run(code, NUMBA_DISABLE_JIT="1", **environment).strip()
    assert {folder.name for folder in tmp_path.iterdir()} == {used.name, foreign.name, own}


def test_what_another_clone_has_compiled_is_not_in_the_cache(tmp_path):
    code = """
from pathlib import Path
from policy.loops import compiling, step
functions = [function for function, _ in compiling._entries]
elsewhere = [compiling._folder() / "another_clone"] * len(functions)
here = [Path(function.stats.cache_path) for function in functions]
for places in (elsewhere, here):
    for place, function in zip(places, functions, strict=True):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"module.{function.__name__}-1.py311.nbi").touch()
    print(compiling.is_cached())
"""
    assert run(code, SPINDLE_CACHE=str(tmp_path), NUMBA_CACHE_DIR="") == "False\nTrue\n"


def test_a_cache_that_cannot_be_written_is_reported_and_costs_no_more():
    code = "from policy.loops import compiling, step; print(compiling.problems)"
    assert run(code, NUMBA_CACHE_DIR="/proc/nowhere").startswith(
        "['the folder /proc/nowhere/loops-"
    )
    assert run(code) == "[]\n"
