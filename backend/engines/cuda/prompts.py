"""Attention of prompts, by a kept library where one gives the right result on this device.

Torch's ``varlen_attn`` reads the pages themselves or, in older versions of torch, gathered keys and
values. Its ``scaled_dot_product_attention``, row by row, is what that is compared with, and serves
elsewhere.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

import torch
from torch.nn import functional

from backend.engines.cuda.stream import to_device

logger = logging.getLogger(__name__)

PAGE = 32
"""Tokens of a KV page."""


class Scoring(NamedTuple):
    """How scores are made: their scale, a sliding window in tokens and a cap (0: none)."""

    scale: float
    window: int = 0
    softcap: float = 0.0


class PromptPass:
    """The rows of a pass of prompts, which is causal, of any length, and is not captured."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        table: torch.Tensor,  # int32[rows, blocks]
        first: torch.Tensor,  # int32[rows + 1]
    ) -> None:
        self.spans = spans
        """Each row's committed and new tokens."""
        self.table, self.first = table, first
        """int32[rows, blocks] and int32[rows + 1], as ``pages.PassLayout`` has them."""
        self.most_new = max(new for _, new in spans)
        self.most_keys = max(committed + new for committed, new in spans)

    @cached_property
    def keys(self) -> torch.Tensor:
        """int32[rows]: tokens of each row, committed and new."""
        counts = [committed + new for committed, new in self.spans]
        return to_device(counts, torch.int32, self.table.device)

    @cached_property
    def first_key(self) -> torch.Tensor:
        """int32[rows + 1]: where each row's keys begin if all rows' lie in one piece."""
        return functional.pad(self.keys.cumsum(0), (1, 0)).int()

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[keys of all rows]: block and offset of each key."""
        device = self.table.device
        total = sum(committed + new for committed, new in self.spans)  # else the host would wait
        row = torch.arange(len(self.spans), device=device)
        row = row.repeat_interleave(self.keys, output_size=total)
        position = torch.arange(len(row), device=device) - self.first_key[:-1].long()[row]
        return self.table[row, position // PAGE].long(), position % PAGE


Attend = Callable[[torch.Tensor, torch.Tensor, PromptPass, Scoring], torch.Tensor]
"""Computes attention, of the queries' shape, from queries [tokens, heads, dim], pages [blocks, 2,
kv_heads, PAGE, dim], rows and scoring.
"""


def _to_pages(
    kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
) -> list[torch.Tensor]:
    """Return keys and values as the libraries have pages: [blocks, PAGE, kv_heads, dim]."""
    return [kv[:, which].transpose(1, 2) for which in (0, 1)]


def _window(scoring: Scoring) -> tuple[int, int]:
    return (scoring.window - 1 if scoring.window else -1, 0)


def of_torch(*, reads_pages: bool) -> Attend:
    """Return torch's ``varlen_attn``, over pages or over gathered keys and values. Raises
    ImportError.
    """
    run = import_module("torch.nn.attention.varlen").varlen_attn
    options = {"enable_gqa": True, "num_splits": 1}
    parameters = inspect.signature(run).parameters
    options = {name: value for name, value in options.items() if name in parameters}

    def attend(
        q: torch.Tensor,  # [tokens, heads, dim]
        kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
        rows: PromptPass,
        scoring: Scoring,
    ) -> torch.Tensor:
        if scoring.softcap:
            raise ValueError("varlen_attn has no softcap")
        if reads_pages:
            kv_pair, first_key = _to_pages(kv), None
            pages = {"seqused_k": rows.keys, "block_table": rows.table}
        else:
            block, offset = rows.places
            kv_pair, first_key = [kv[block, which, :, offset] for which in (0, 1)], rows.first_key
            pages = {}
        lengths = rows.first, first_key, rows.most_new, rows.most_keys
        shape = {"scale": scoring.scale, "window_size": _window(scoring)}
        out: torch.Tensor = run(q, *kv_pair, *lengths, **shape, **pages, **options)
        return out

    return attend


def by_row(
    q: torch.Tensor,  # [tokens, heads, dim]
    kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
    rows: PromptPass,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend row by row over gathered pages, by torch's ``scaled_dot_product_attention``."""
    kv_heads, dim = kv.shape[2], kv.shape[4]
    at, out = 0, torch.empty_like(q)
    for row, (committed, new) in enumerate(rows.spans):
        keys = committed + new
        pages = kv[rows.table[row, : -(-keys // PAGE)].long()]
        k, v = (
            pages[:, which].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :keys] for which in (0, 1)
        )
        position = torch.arange(committed, keys, device=q.device)
        age = position[:, None] - torch.arange(keys, device=q.device)
        is_visible = (age >= 0) & (age < (scoring.window or keys))
        queries = q[at : at + new].transpose(0, 1)
        out[at : at + new] = _attend_over(queries, k, v, is_visible, scoring).transpose(0, 1)
        at += new
    return out


def _attend_over(
    q: torch.Tensor,  # [heads, new, dim]
    k: torch.Tensor,  # [kv_heads, keys, dim]
    v: torch.Tensor,  # [kv_heads, keys, dim]
    is_visible: torch.Tensor,  # bool[new, keys]
    scoring: Scoring,
) -> torch.Tensor:
    """Return the attention [heads, new, dim] of one row."""
    if not scoring.softcap:
        return functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=is_visible, scale=scoring.scale, enable_gqa=True
        )[0]
    group = len(q) // len(k)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(1, 2) * (scoring.scale / scoring.softcap))
    weights = (scores.float() * scoring.softcap).masked_fill(~is_visible, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v


BY_ROW = "scaled_dot_product_attention, row by row"

LIBRARIES: dict[str, Callable[[], Attend]] = {
    "varlen_attn over pages": lambda: of_torch(reads_pages=True),
    "varlen_attn over gathered keys": lambda: of_torch(reads_pages=False),
}
"""By name what makes them, the best first."""

_LARGEST_ERROR = 1e-2
_choices: dict[tuple[object, ...], tuple[str, Attend]] = {}


def choose(
    kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
    heads: int,
    scoring: Scoring,
) -> tuple[str, Attend]:
    """Return the name and function of the first library that gives the right result for such pages
    and scores; once for a process.
    """
    key = (kv.device, kv.dtype, heads, *kv.shape[2:], scoring)
    if key not in _choices:
        # The libraries have kernels of GPUs only.
        libraries = LIBRARIES if kv.device.type == "cuda" else {}
        _choices[key] = first_right(libraries, kv, heads, scoring)
    return _choices[key]


@torch.inference_mode()
def first_right(
    libraries: Mapping[str, Callable[[], Attend]],
    kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
    heads: int,
    scoring: Scoring,
) -> tuple[str, Attend]:
    """Return the first library whose result is near to that of ``by_row``, else that."""
    for name, make in libraries.items():
        try:
            attend = make()
            error = error_of(attend, kv, heads, scoring)
        except (ImportError, RuntimeError, TypeError, ValueError, AttributeError) as reason:
            logger.info(
                "attention of prompts by %s refused: %s", name, str(reason).partition("\n")[0]
            )
            continue
        if error < _LARGEST_ERROR:
            return name, attend
        logger.warning("attention of prompts by %s refused: its error is %.2g", name, error)
    return BY_ROW, by_row


def error_of(
    attend: Attend,
    kv: torch.Tensor,  # [blocks, 2, kv_heads, PAGE, dim]
    heads: int,
    scoring: Scoring,
) -> float:
    """Return the relative error of a function over random pages shaped as ``kv``: a whole prompt, a
    chunk after committed tokens, and one of a single token.
    """
    spans = [(0, 2 * PAGE + 5), (PAGE + 3, PAGE), (70, 1)]
    generator = torch.Generator(kv.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=kv.device, dtype=kv.dtype)

    need = [-(-(committed + new) // PAGE) for committed, new in spans]
    numbers = torch.randperm(sum(need), generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(len(spans), max(need), dtype=torch.int32)
    for row, row_pages in enumerate(numbers.split(need)):
        table[row, : len(row_pages)] = row_pages
    news = torch.tensor([0, *(new for _, new in spans)])
    rows = PromptPass(spans, table.to(kv.device), news.cumsum(0).int().to(kv.device))
    pages = random(sum(need), *kv.shape[1:])
    q = random(int(news.sum()), heads, kv.shape[4])
    wanted = by_row(q, pages, rows, scoring).double()
    output = attend(q, pages, rows, scoring).double()
    return float((output - wanted).norm() / wanted.norm())
