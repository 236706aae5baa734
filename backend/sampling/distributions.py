"""Distributions of the next token as tensors, made of logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from backend.request import SamplingParams

FAINT = 0.02
"""A candidate that a draft holds for so much less likely than its best is not worth a node."""

_HEADS = (
    1e-3,
    1e-5,
    0.0,
)  # a nucleus is looked for among the tokens above these, one after the other


def target_probs(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Return the distribution [rows, vocab] that each row's token is drawn from, of sum one:
    temperature first, then min-p, top-k, top-p (as vLLM does).

    fp64 logits give fp64 probabilities, all others fp32. Top-k keeps ties with the k-th token,
    top-p with the one that crosses the threshold, min-p with the threshold itself.
    """
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    device = logits.device
    temperature = torch.tensor([param.temperature for param in params], dtype=wide, device=device)
    scores = logits.to(wide)
    scores = (scores - scores.amax(-1, keepdim=True)).div_(
        temperature[:, None]
    )  # the greatest is 0: no temperature overflows it
    if any(param.min_p for param in params):
        shares = torch.tensor([param.min_p for param in params], dtype=wide, device=device)
        scores = scores.masked_fill(scores < shares.log()[:, None], -torch.inf)
    vocab = scores.shape[-1]
    limits = [min(param.top_k, vocab) or vocab for param in params]
    if min(limits) < vocab:
        last = torch.tensor(limits, device=device)[:, None] - 1
        widest = max((limit for limit in limits if limit < vocab), default=1)
        best = scores.topk(widest).values
        threshold = best.gather(1, last.clamp(max=widest - 1)).masked_fill(
            last >= vocab - 1, -torch.inf
        )
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    nuclei = [row for row, param in enumerate(params) if param.top_p < 1.0]
    probs = scores.softmax(-1)
    if nuclei:
        probs[nuclei] = _nucleus(
            probs[nuclei],
            torch.tensor([params[row].top_p for row in nuclei], dtype=wide, device=device),
        )
    return probs


def _nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the most probable tokens that together reach ``top_p`` [rows], and have them sum to one.

    A nucleus is mostly small, and sorting a whole vocabulary costs 30 times as much as its head.
    """
    if probs.device.type == "cpu":
        pairs = zip(probs.numpy(), top_p.tolist(), strict=True)
        thresholds = torch.tensor([_least(row, share) for row, share in pairs], dtype=probs.dtype)
    else:
        ordered = probs.sort(dim=-1, descending=True).values
        count = (ordered.cumsum(-1) - ordered < top_p[:, None]).sum(-1).clamp_(min=1)
        thresholds = ordered.gather(1, count[:, None] - 1)[:, 0]
    kept = probs.masked_fill_(probs < thresholds[:, None], 0.0)
    return kept.div_(kept.sum(-1, keepdim=True))


def _least(probs: npt.NDArray[np.floating[Any]], share: float) -> float:
    """Return the probability at which the greatest of a distribution [S] reach a share of it."""
    for bound in _HEADS:
        head = probs[probs >= bound]
        if head.sum() >= share:
            break
    ordered = np.sort(head)[::-1]
    return float(ordered[min(int(ordered.cumsum().searchsorted(share)), len(ordered) - 1)])


def arg_max(logits: torch.Tensor) -> list[int]:
    """Return the column of each row's greatest logit, the first of equals."""
    # On a processor NumPy's takes a quarter of torch's time, or less.
    columns: list[int] = (_array(logits) if logits.is_cpu else logits).argmax(-1).tolist()
    return columns


def row_arg_max(logits: torch.Tensor, *, every: bool) -> Callable[[int], int]:
    """Return what tells ``arg_max`` of a row. A processor looks only at the rows that it is asked
    for, unless that will be ``every`` one; a device is asked once, for all.
    """
    if every or not logits.is_cpu:
        return arg_max(logits).__getitem__
    rows = _array(logits)
    return lambda row: int(rows[row].argmax())


def likeliest(logits: torch.Tensor, most: int) -> list[list[tuple[int, float]]]:
    """Return by row of logits [n, S] the columns of the greatest and their probabilities, best
    first, the first of equals first: at most ``most``, none under ``FAINT`` of the first one's.
    """
    if logits.device.type != "cpu":
        best = logits.float().softmax(-1).topk(min(most, logits.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows = [list(zip(*pair, strict=True)) for pair in pairs]
        return [[one for one in row if one[1] >= FAINT * row[0][1]] for row in rows]
    found = []
    for row in _array(
        logits
    ):  # few columns are near the greatest: torch's topk takes 3 times as long
        masses = np.exp(row - row.max())
        near = np.flatnonzero(masses >= FAINT)
        near = near[np.argsort(-masses[near], kind="stable")[:most]]
        found.append(list(zip(near.tolist(), (masses[near] / masses.sum()).tolist(), strict=True)))
    return found


def _array(logits: torch.Tensor) -> npt.NDArray[np.floating[Any]]:
    return (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
