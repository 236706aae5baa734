"""The head that training begins with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from backend.engines.head.folder import HeadConfig
from backend.engines.head.network import HeadNetwork, load
from backend.engines.models.spec import PlainLlama
from engines_build.distill.head import HeadSample
from engines_build.distill.train import choose_shortlist

_DEPTHS = (0.1, 0.5, 0.9, 1.0)
"""Depths, from bottom to top, of the layers that a head reads by default."""

_INNER_STEP = 64


def taps_of(wanted: Sequence[int], config: PlainLlama) -> tuple[int, ...]:
    """Return the layers to read, counted from 1: those wanted, or where none is, the default.
    Raises ValueError for one that is not there.
    """
    if not wanted:
        return tuple(sorted({max(1, round(depth * config.num_layers)) for depth in _DEPTHS}))
    taps = tuple(sorted(set(wanted)))
    if taps[0] < 1 or taps[-1] > config.num_layers:
        raise ValueError(f"--taps: must lie in 1..{config.num_layers}, got {list(taps)}")
    return taps


def first_head(
    start: Path | None,
    config: PlainLlama,
    taps: Sequence[int],
    samples: Sequence[HeadSample],
    rows: int,
    always: set[int],
) -> tuple[HeadNetwork, Tensor]:
    """Return the network that training begins with, and its static tokens: those of ``start``, or
    an untrained one and the ``rows`` tokens that the target says most.
    """
    if start:
        network, shortlist = load(start)
        if network.config.layers != tuple(taps):
            read = f"reads the layers {list(network.config.layers)}, not {list(taps)}"
            raise ValueError(f"--start: {start} {read}")
        return network.requires_grad_(), shortlist
    rows = min(rows, config.vocab_size)
    inner = -(-config.hidden_size * 4 // 3 // _INNER_STEP) * _INNER_STEP
    hidden, eps = config.hidden_size, config.rms_norm_eps
    head_config = HeadConfig(config.vocab_size, hidden, inner, tuple(taps), rows, eps)
    targets = ((s.top_ids, s.top_logprobs) for s in samples)
    device = str(samples[0].top_ids.device)
    return HeadNetwork(head_config), choose_shortlist(
        targets, rows, config.vocab_size, always, device
    )
