"""A decoder's own forward in transformers against an engine's, at the first pass of a folder."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import nn

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.attention import ATTENTION
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.sampling.distributions import Floats
from backend.sequence import BLOCK_TOKENS

TOKENS = 64
"""Tokens of the text that is compared."""

_FIRST, _OTHERS = 40, 24
"""Tokens of it in the first pass, and tokens of another text in the same pass."""

BLOCKS = -(-TOKENS // BLOCK_TOKENS) + 1
"""Blocks of KV that a comparison writes to."""

_MOST = {torch.bfloat16: 0.1}
"""The largest difference by dtype that is rounding, over the logits' standard deviation."""


def run_eagerly(lm: nn.Module) -> torch.Tensor:
    """Return the logits of the text that is compared, by transformers' own eager forward."""
    model: Any = lm
    text, _ = _texts(lm)
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        try:
            ids = torch.tensor([text], device=model.device)
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].double()
        finally:
            model.set_attn_implementation(ATTENTION)
    return logits


def compare(
    lm: nn.Module,
    forward: Callable[[Seq[PassChunk]], Floats],  # returns [rows, vocab]
    name: str,
    expected: torch.Tensor | None = None,  # [TOKENS, vocab]
) -> float:
    """Return how far ``forward`` is from transformers' own eager one on ``TOKENS`` tokens;
    ``expected`` are its logits (none: ``run_eagerly``).

    It runs them in two passes, the first with another text. How far is the median row's root mean
    square over the logits' standard deviation, of the worse pass.

    Raises CheckpointError beginning with the ``name`` where that is more than rounding.
    """
    model: Any = lm
    text, other = _texts(lm)
    table, others = KVTable([2, 0]), KVTable([1])
    passes = [
        forward(
            [PassChunk(text[:_FIRST], 0, table, _FIRST), PassChunk(other, 0, others, 0)]
        ).copy(),
        forward([PassChunk(text[_FIRST:], _FIRST, table, TOKENS - _FIRST)]).copy(),
    ]
    expected = run_eagerly(lm) if expected is None else expected
    wanted = expected.cpu().split((_FIRST, TOKENS - _FIRST))
    errors = (
        (torch.from_numpy(got).double() - want).square().mean(-1).sqrt().median()
        for got, want in zip(passes, wanted, strict=True)
    )
    difference = float(max(errors) / expected.std())
    most = _MOST.get(model.dtype, 1e-3)
    if not difference <= most:  # NaN is more, too
        raise CheckpointError(
            f"{name}: logits of {TOKENS} tokens are {difference:.2g} standard deviations away from "
            f"transformers' own forward, at most {most:g} is rounding: this engine would answer "
            "wrongly, so it does not serve the folder"
        )
    return difference


def _texts(lm: nn.Module) -> tuple[list[int], list[int]]:
    """Return the text that is compared, and another one."""
    model: Any = lm
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(vocabulary, (TOKENS + _OTHERS,), generator=generator).tolist()
    return ids[:TOKENS], ids[TOKENS:]
