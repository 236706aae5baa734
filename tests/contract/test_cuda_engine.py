"""The exactness suite over the CUDA engine's passes, on a CPU in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.engines.cuda.forward import PagedForward
from tests.contract import checks
from tests.contract.cuda_engines import on_cuda_engine
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, CROWDED, MIXED, TAILED, Scenario

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


def test_a_size_whose_graph_cannot_be_captured_runs_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons: list[str] = []

    def fail(forward: PagedForward, run: object) -> None:
        forward._count = reasons.append
        raise RuntimeError("operation not permitted when stream is capturing")

    with on_cuda_engine(BUSY, padded=True):
        monkeypatch.setattr(PagedForward, "_record", fail)
        checks.exact(BUSY, checks.texts)
    assert reasons
    assert {*reasons} == {"cuda_graph"}
