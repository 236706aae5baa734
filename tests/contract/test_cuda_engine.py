"""The exactness suite over the CUDA engine's passes, on a CPU in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from backend.engines.cuda.lookahead import LookaheadEngine, _SubmittedTurns
from backend.engines.head.folder import HeadConfig
from backend.engines.head.in_target import HeadInTarget
from backend.engines.head.network import HeadNetwork
from backend.engines.port import AFTER, Turn
from backend.request import SamplingParams
from tests.contract import checks, deployment, heads
from tests.contract.cuda_engines import on_cuda_engine
from tests.contract.deployment import K_MAX, TAPS, VOCAB
from tests.contract.heads import HEAD
from tests.contract.scenarios import (
    ALIKE,
    BUSY,
    CRAMPED,
    CROWDED,
    MIXED,
    NO_DRAFT,
    TAILED,
    Scenario,
    asks_of,
)

SETTLED = (*checks.ALL, checks.one_token_is_unseen)
SCENARIOS: dict[str, tuple[Scenario, tuple[checks.Property, ...]]] = {
    "busy": (BUSY, SETTLED),
    "options": (MIXED, SETTLED),
    "chains only": (replace(MIXED, nodes=0), SETTLED),
    "tokens of the tail": (TAILED, SETTLED),
    "plain": (replace(MIXED, script=((-1, 0),)), SETTLED),
    "oracle": (replace(MIXED, script=((6, 4),)), SETTLED),
    "alike": (ALIKE, checks.ALL),
    "crowded": (CROWDED, checks.ALL),
    "little KV": (CRAMPED, checks.ALL),
}


EVERY_DAY = ("busy", "options")


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow)
        for name in SCENARIOS
    ],
)
def test_it_is_exact(name: str) -> None:
    scenario, properties = SCENARIOS[name]
    with on_cuda_engine(scenario):
        checks.exact(scenario, *properties)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["options", "alike", "crowded", "little KV"])
def test_it_is_exact_at_the_sizes_of_graphs(name: str) -> None:
    scenario, properties = SCENARIOS[name]
    with on_cuda_engine(scenario, padded=True):
        checks.exact(scenario, *properties)


WITH_HEAD = ((HEAD, 4), (4, 3), (7, 4), (6, 4), (5, 2), (HEAD, 2), (NO_DRAFT, 0), (7, 4), (6, 3))

ON_DEVICE = (
    SamplingParams(),
    SamplingParams(0.9, seed=5),
    SamplingParams(1.2, top_k=6, top_p=0.9, seed=8),
    SamplingParams(1.0, min_p=0.1, seed=4),
)
BOTH = replace(MIXED, asks=(*MIXED.asks, *asks_of(*ON_DEVICE)))
"""Rows that the device decides alongside rows that need the host."""

AHEAD = SCENARIOS | {"options": (BOTH, ()), "plain": (replace(BOTH, script=((NO_DRAFT, 0),)), ())}


def head_in_target() -> HeadInTarget:
    torch.manual_seed(0)
    hidden = deployment.tiny_config().hidden_size
    network = HeadNetwork(HeadConfig(VOCAB, hidden, 8, TAPS, rows=15)).double()
    network.norm.data.fill_(3.0)
    token_ids = torch.randperm(VOCAB)[:15].sort().values
    return HeadInTarget(
        "near",
        network.requires_grad_(requires_grad=False),
        token_ids,
        max_draft_tokens=K_MAX,
    )


@pytest.mark.parametrize("name", [name for name in AHEAD if name not in ("chains only", "oracle")])
def test_it_is_exact_with_lookahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, _ = AHEAD[name]
    ways: Counter[str] = Counter()
    launch = LookaheadEngine._launch

    def noted(engine: LookaheadEngine, turns: Sequence[Turn]) -> _SubmittedTurns:
        submission = launch(engine, turns)
        ways["after"] += sum(job.turn.end == AFTER for job in submission.jobs)
        ways["head"] += sum(job.turn.device_proposal is not None for job in submission.jobs)
        ways["host's proposal"] += sum(job.turn.proposal is not None for job in submission.jobs)
        ways["by host"] += len(submission.by_host)
        return submission

    monkeypatch.setattr(LookaheadEngine, "_launch", noted)
    if name != "plain":
        scenario = replace(scenario, script=WITH_HEAD)
    with on_cuda_engine(scenario, lookahead=True):
        heads.patch_in(monkeypatch, head_in_target)
        checks.exact(scenario, checks.texts)
    expected = {"after"} if name == "plain" else {"after", "head", "host's proposal"}
    if name in ("options", "plain", "little KV"):
        expected.add("by host")
    assert {way for way, times in ways.items() if times} >= expected, ways
