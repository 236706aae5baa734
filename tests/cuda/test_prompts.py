"""Attention of prompts: what the libraries are called with, and which of them is chosen. Their
kernels need a GPU; here each is a plain function with the same arguments.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from backend.engines.cuda import prompts
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.prompts import (
    BY_ROW,
    PAGE,
    Attend,
    Scoring,
    by_row,
    error_of,
    first_right,
)
from tests.cuda.families import models

HEADS, KV = 6, torch.zeros(1, 2, 2, PAGE, 16)
SCORINGS = [Scoring(0.25), Scoring(0.25, window=20), Scoring(0.25, softcap=3.0)]


def reference(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    first: torch.Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
    is_top_left: bool = False,
) -> torch.Tensor:
    """Attend, causally from the lower right corner, to each row's own keys [keys, kv_heads, dim].

    ``window`` is how far a query sees to the left (-1: all) and to the right.
    """
    assert window[1] == 0
    out, bounds = torch.empty_like(q), first.tolist()
    for k, v, begin, end in zip(keys, values, bounds, bounds[1:], strict=False):
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k.repeat_interleave(group, 1)) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        offset = 0 if is_top_left else len(k) - (end - begin)
        age = torch.arange(end - begin)[:, None] + offset - torch.arange(len(k))
        seen = (age >= 0) & ((age <= window[0]) | (window[0] < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    return out


def read(pages: torch.Tensor, table: torch.Tensor, used: torch.Tensor) -> list[torch.Tensor]:
    """Return each row's tokens of pages [blocks, PAGE, kv_heads, dim]."""
    assert pages.shape[1] == PAGE
    return [
        torch.cat([pages[block] for block in blocks.tolist()])[:count]
        for blocks, count in zip(table, used.tolist(), strict=True)
    ]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """As torch has it from 2.12 on."""
    assert (enable_gqa, num_splits) == (True, 1)
    assert scale is not None
    assert max_q == int(cu_seq_q.diff().max())
    if block_table is not None:
        assert cu_seq_k is None
        assert seqused_k is not None
        assert max_k == int(seqused_k.max())
        keys, values = (read(pages, block_table, seqused_k) for pages in (key, value))
    else:
        assert cu_seq_k is not None
        assert max_k == int(cu_seq_k.diff().max())
        keys, values = (list(x.split(cu_seq_k.diff().tolist())) for x in (key, value))
    return reference(query, keys, values, cu_seq_q, scale=scale, window=window_size)


def older_varlen_attn(  # without pages, splits, and heads that share keys by a flag
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    return varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        enable_gqa=True,
        num_splits=1,
    )


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = varlen_attn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def older(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.nn.attention.varlen"]
    monkeypatch.setattr(module, "varlen_attn", older_varlen_attn)


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("name", [*prompts.LIBRARIES])
def test_a_library_is_asked_for_the_same_attention(name: str, scoring: Scoring) -> None:
    attend = prompts.LIBRARIES[name]()
    if scoring.softcap:
        with pytest.raises(ValueError, match="no softcap"):
            error_of(attend, KV, HEADS, scoring)
    else:
        assert error_of(attend, KV, HEADS, scoring) < 1e-5


def test_an_older_torch_gets_gathered_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    older(monkeypatch)
    names = ("varlen_attn over pages", "varlen_attn over gathered keys")
    some = {name: prompts.LIBRARIES[name] for name in names}
    assert first_right(some, KV, HEADS, SCORINGS[1])[0] == names[1]


def test_the_first_library_that_is_right_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> Attend:
        raise ImportError("No module named 'vllm'")

    def broken() -> Attend:
        def attend(*_: object) -> torch.Tensor:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")

        return attend

    def top_left() -> Attend:
        def attend(q: Any, kv: Any, rows: Any, scoring: Scoring) -> torch.Tensor:
            pair = (read(kv[:, at].transpose(1, 2), rows.table, rows.keys) for at in (0, 1))
            options: dict[str, Any] = {"scale": scoring.scale, "window": (-1, 0)}
            return reference(q, *pair, rows.first, is_top_left=True, **options)

        return attend

    wrong = {"missing": missing, "broken": broken, "aligned otherwise": top_left}
    right = {"varlen": prompts.LIBRARIES["varlen_attn over pages"]}
    with caplog.at_level("INFO"):
        assert first_right(wrong | right, KV, HEADS, SCORINGS[0])[0] == "varlen"
        assert first_right(wrong, KV, HEADS, SCORINGS[0]) == (BY_ROW, by_row)
    assert "attention of prompts by broken refused: Paged KV cache block size" in caplog.text
    assert "attention of prompts by aligned otherwise refused: its error is" in caplog.text


def test_a_model_says_what_attends_for_its_prompts() -> None:
    paged: PagedModel = models("gemma2")[1]
    paged.fuse()
    assert paged.prompts_by == {BY_ROW}
