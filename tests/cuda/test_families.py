"""Every dense family of transformers is admitted by the comparison of 64 tokens at each start."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.config import parse_config
from backend.engines.checkpoint import CheckpointError
from backend.engines.cuda import plain
from backend.engines.cuda.engine import CudaEngine
from backend.engines.cuda.kernels import plain_kernels
from backend.engines.registry import Service, make_engine
from backend.kinds import KINDS
from backend.storage.manifest import read_model_config
from tests.models.families import SERVED, make_folder

EXPERTS = [family for family in SERVED if any(word in family for word in ("moe", "mixtral", "oss"))]
DENSE = [family for family in SERVED if family not in EXPERTS]
EVERY_DAY = ("mistral, windows",)


def made(folder: Path, **options: Any) -> CudaEngine:
    target = {"engine": "cuda", "model": str(folder), "dtype": "fp32", **options}
    limits = {"kv_cache_tokens": 512, "max_context_tokens": 128, "max_active_requests": 2}
    config = parse_config({"target": target, "limits": limits, "threads": 1})
    engine = make_engine(config.target, Service(config, 1, lambda _: folder))
    assert isinstance(engine, CudaEngine)
    return engine


@pytest.mark.parametrize(
    "family",
    [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in DENSE],
)
def test_a_dense_family_is_admitted(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(family, tmp_path)
    assert KINDS["cuda"].misfit(read_model_config(folder)) == ""
    with caplog.at_level(logging.INFO):
        made(folder, lookahead=1).close()
    assert "standard deviations from transformers' own forward" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_left_to_another_engine(family: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path)
    assert "experts" in KINDS["cuda"].misfit(read_model_config(folder))


def test_an_engine_that_would_answer_wrongly_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, attention = make_folder("mistral, windows", tmp_path), plain.attention

    def without_windows(*given: Any, window: int, **options: Any) -> Any:
        del window
        return attention(*given, window=0, **options)

    monkeypatch.setattr(
        "backend.engines.cuda.engine.plain_kernels",
        lambda: replace(plain_kernels(), attention=without_windows),
    )
    with pytest.raises(CheckpointError, match=r"target: .*logits of 64 tokens are .* at most"):
        made(folder)
