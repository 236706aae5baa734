"""Serving on OpenVINO imports neither torch nor transformers once the target's graph is made."""

import json
import os
import subprocess
import sys

import pytest

from backend import PROJECT_ROOT
from backend.engines.openvino.graph_cache import bring_graph
from tests.fakes.eagle import converted, published, random_head, write

FOLDERS = PROJECT_ROOT / "engines_build/drafts"
HEAD = {"name": "head", "engine": "head", "model": str(FOLDERS / "tiny-head"), "dtype": "int8"}
CONFIG = {
    "target": {"engine": "openvino", "model": str(FOLDERS / "tiny-target"), "dtype": "fp32"},
    "drafts": [
        HEAD,
        HEAD | {"name": "wide", "dtype": "fp32"},
        {"name": "suffix", "engine": "suffix"},
    ],
    "limits": {"max_context_tokens": 256, "kv_cache_tokens": 1024, "max_active_requests": 4},
    "policy": {"kind": "random", "k_max": 4},
    "threads": 1,
}
SERVE = """
import json, sys
from dataclasses import replace
from pathlib import Path

sys.modules["torch"] = sys.modules["transformers"] = None  # their import fails

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines.registry import Service, module_of
from backend.model_folders import model_path
from backend.request import GenerationRequest
from bench.in_process import generate
from policy import LatencyTable, NoSpeculation

config = parse_config(json.loads(sys.argv[1]))
draft = replace(config.drafts[-1], model=sys.argv[2])
try:
    folder = Path(draft.model)
    refusal = module_of(draft).convert(draft, folder, Service(config, 1, model_path), print)
except ConfigError as error:
    refusal = str(error)
names = ("target", "head", "wide", "eagle")
tables = {name: LatencyTable.synthetic(name, {1: 0.001, 64: 0.01}) for name in names}
app = build(config, tables)
ways = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 9}]
ways += [{"frequency_penalty": 0.5, "return_log_probs": True, "temperature": 0.7}]
asks = [
    GenerationRequest("To be or not to be, or to be", 24, seed=3, end_id=-1, **way) for way in ways
]
speculated = generate(app, asks, together=4)
plain = generate(app, asks, policy=NoSpeculation())
drafted = [labels for name, labels, _ in app.stats.drain().counters if "draft_tokens" in name]
answers = [[s.sequence.tokens, s.accepted] for s in speculated + plain]
print(json.dumps([answers, refusal, sorted({one["draft"] for one in drafted})]))
app.close()
"""


@pytest.mark.medium
def test_requests_are_served_with_heads_and_the_same_texts_as_without(tmp_path):
    eagle = {"name": "eagle", "model": str(converted(tmp_path / "eagle"))}
    config = CONFIG | {"drafts": [*CONFIG["drafts"], eagle]}
    published_head = write(tmp_path / "published", "flat", *published("flat", *random_head()))
    environment = {**os.environ, "SPINDLE_CACHE": str(tmp_path), "NUMBA_DISABLE_JIT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPINDLE_CACHE", str(tmp_path))
        folder = FOLDERS / "tiny-target"
        bring_graph(folder, "fp32", (1, 2, 3, 4))
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(config), str(published_head)],
        cwd=PROJECT_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, refusal, drafted = json.loads(done.stdout)
    assert f"converting {published_head} needs the package torch: install spindle[conv" in refusal
    assert {"eagle", "head", "wide"} <= {*drafted}
    texts = [tokens for tokens, _ in answers]
    assert texts[:4] == texts[4:]
    assert len(set(map(tuple, texts))) == 4
    assert sum(accepted for _, accepted in answers[:4]) > 0
    assert sum(accepted for _, accepted in answers[4:]) == 0


def test_the_command_doctor_and_the_front_end_are_imported_without_torch():
    modules = "backend.cli, backend.launcher.doctor, backend.openai_frontend.__main__"
    code = (
        f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import {modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT_ROOT, timeout=300, check=True)
