"""A configuration of TensorRT-LLM engines, wired by the composition root over the fake executor,
from settings to a reply.
"""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backend import app
from backend.config import parse_config
from backend.engines.latency_cases import Case
from backend.engines.trtllm import deployment as trtllm_deployment
from backend.engines.trtllm import engine as trtllm
from backend.engines.trtllm.engine import ExecutorSettings, TrtllmEngine
from backend.engines.trtllm.folder import read_engine_folder
from backend.request import GenerationRequest
from backend.sequence import BLOCK_TOKENS
from backend.settings import ConfigError
from engines_build.trtllm.measure_executor import (
    _fits,
    measure_executors,
)
from policy import LatencyTable
from tests.contract import fake_executor
from tests.contract.fake_executor import Executor
from tests.contract.trtllm_folders import TOKENIZER, folder, settings


@pytest.fixture(autouse=True)
def faked(monkeypatch):
    monkeypatch.setattr(trtllm, "load_bindings", lambda: fake_executor)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (40 << 30, 80 << 30))
    trtllm_deployment._kv_plan.cache_clear()


class Reply:
    cancelled = False

    def __init__(self):
        self.text = None

    def final(self, delta, reason, usage):
        self.text, self.reason, self.usage = delta.text, reason, usage

    def error(self, code, message):
        raise AssertionError(message)


def test_a_request_is_served_with_drafts_of_another_engine(tmp_path):
    made = app.build(parse_config(settings(tmp_path)))
    reply = Reply()
    made.orchestrator.submit(
        made.session(GenerationRequest("ab", 12, exclude_input_in_output=True), reply)
    )
    while made.orchestrator.step():
        pass
    made.close()
    assert reply.text == "cdefghabcdef"
    assert reply.usage.accepted > 0
    target, small = (
        executor.config.kv_cache_config.free_gpu_memory_fraction
        for executor in Executor.created[-2:]
    )
    assert 0.2 < target < small < 1.0  # each takes its fraction of what the one before has left


def test_as_many_requests_as_the_engine_takes_are_in_flight_at_once(tmp_path):
    raw = settings(tmp_path)
    long = 4 * BLOCK_TOKENS  # so that each has room to grow
    raw["limits"] |= {"max_context_tokens": long, "prefill_chunk_tokens": long}
    for name, drafted in (("target", 4), ("small", 0)):
        folder(tmp_path, name, max_draft_len=drafted, max_seq_len=8 * BLOCK_TOKENS)
    made = app.build(parse_config(raw))
    replies = [Reply() for _ in range(10)]
    for reply in replies:
        made.orchestrator.submit(made.session(GenerationRequest("ab", 40), reply))
    made.orchestrator.step()
    assert made.orchestrator.counts() == (8, 2)
    while made.orchestrator.step():
        pass
    made.close()
    steps = np.array([step for reply in replies for step in reply.usage.verified_steps])
    counted = Counter()
    for name, _, value in made.stats.drain().counters:
        counted[name] += value
    assert counted["spindle_verified_proposals_total"] == len(steps) > 10
    assert counted["spindle_draft_tokens_total"] == steps[:, 0].sum()
    assert counted["spindle_accepted_tokens_total"] == steps[:, 1].sum() > 0


def test_texts_in_flight_fit_an_iteration_of_every_engine(tmp_path):
    raw = settings(tmp_path)
    folder(tmp_path, "small", max_num_tokens=10 * BLOCK_TOKENS)
    made = app.build(parse_config(raw))
    for _ in range(8):
        made.orchestrator.submit(made.session(GenerationRequest("ab", 40), Reply()))
    made.orchestrator.step()
    # Ten blocks, and each text has to have room to grow by two.
    assert made.orchestrator.counts() == (4, 4)
    while made.orchestrator.step():
        assert made.orchestrator._ledger.usage()["used"] <= 10
    made.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"drafts": [{"name": "t", "engine": "torch", "model": "x"}]},
            r"drafts\[0\].engine must be 'trtllm' or 'lookup'",
        ),
        (
            {"limits": {"max_active_requests": 9, "max_context_tokens": 64}},
            "max_active_requests must be at most the target's max_batch_size 8, got 9",
        ),
        (
            {"limits": {"max_active_requests": 8, "max_context_tokens": 512}},
            "prefill_chunk_tokens must be at least max_context_tokens 512",
        ),
        (
            {
                "limits": {
                    "max_active_requests": 8,
                    "max_context_tokens": 1100,
                    "prefill_chunk_tokens": 1100,
                }
            },
            "max_context_tokens 1100 with policy.k_max 4 needs engines with a max_num_tokens of "
            "at least 1120, got 1056",
        ),
        ({"policy": {"k_max": 5}}, "k_max 5 is over its max_draft_len 4"),
    ],
)
def test_settings_that_the_engines_cannot_keep_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        app.build(parse_config(settings(tmp_path, **change)))


def test_another_vocabulary_is_refused_with_its_first_difference(tmp_path):
    raw = settings(tmp_path)
    other = json.loads(json.dumps(TOKENIZER).replace('"c": 3', '"x": 3'))
    (tmp_path / "small" / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match='id 3 is "x" in the draft, "c" in the target'):
        app.build(parse_config(raw))


def test_gpus_are_as_many_as_ranks(tmp_path):
    raw = settings(tmp_path)
    shutil.rmtree(tmp_path / "small")
    folder(tmp_path, "small", tp_size=2)
    with pytest.raises(ConfigError, match=r"small\.gpus must name 2 GPUs, got \[0\]"):
        app.build(parse_config(raw))
    assert read_engine_folder(tmp_path / "small").ranks == 2


def test_what_a_turn_takes_is_measured_through_the_executor(tmp_path):
    raw = settings(tmp_path)
    for engine in ("target", "small"):
        (tmp_path / engine / "latency.json").unlink()
    config = parse_config(
        raw
        | {
            "policy": {"k_max": 4},
            "limits": raw["limits"] | {"max_context_tokens": 128, "prefill_chunk_tokens": 128},
        }
    )
    for engine in ("target", "small"):
        folder(tmp_path, engine, max_draft_len=4 if engine == "target" else 0, max_seq_len=160)
    tables = measure_executors(config, budget_s=0.0, most=3)
    for name, table in tables.items():
        assert (
            LatencyTable.from_dict(json.loads((tmp_path / name / "latency.json").read_text()))
            == table
        )
    assert (
        max(tables["target"].tokens) == 8 * 4
    )  # eight rows of three proposed tokens and the last one
    assert max(tables["small"].rows) == 8
    assert all(tokens <= 8 * 160 for table in tables.values() for tokens in table.context_tokens)


def test_no_case_is_measured_past_the_token_budget(tmp_path):
    made = folder(tmp_path, "target", max_draft_len=4, max_num_tokens=160)
    engine = TrtllmEngine(
        "target",
        read_engine_folder(made),
        ExecutorSettings(),
        max_context_tokens=64,
        bindings=fake_executor,
    )
    config = parse_config(settings(tmp_path))
    rows = [rows for rows in range(1, 6) if _fits(Case(rows, 62), engine, config)]
    assert rows == [1, 2]  # three of 64 tokens are past it


def test_activations_take_their_part_of_the_memory(tmp_path):
    config = parse_config(settings(tmp_path))
    engines = tuple(trtllm_deployment.trtllm_engines(config))
    folders = tuple(read_engine_folder(Path(engine.model)) for engine in engines)
    more = (
        replace(folders[0], activation_bytes=folders[0].activation_bytes + (10 << 30)),
        *folders[1:],
    )
    tokens = [trtllm_deployment._kv_plan(engines, some).tokens for some in (folders, more)]
    per_token = sum(folder.kv_bytes_per_token for folder in folders)
    assert tokens[0] - tokens[1] == pytest.approx(
        (10 << 30) / per_token * min(engine.kv_share for engine in engines), rel=1e-6
    )
