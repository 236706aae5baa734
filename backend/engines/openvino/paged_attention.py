"""OpenVINO's paged attention as a node of a graph.

The operation is private to OpenVINO: it had 13, 16, 25 and 28 inputs in successive releases. So the
version is pinned (``requirements.txt``), and another one is refused at start-up. The public routes
end at the same operation: ``paged_attention_transformation`` lies in
``openvino._offline_transformations``, and needs a stateful model exported by another library.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from openvino import Output, opset13
from openvino._pyopenvino.op import _PagedAttentionExtension

from backend.kinds import KINDS


class OpenvinoVersionError(RuntimeError):
    """Another OpenVINO than the one this was written for."""


class HeadShape(NamedTuple):
    """The shape of a layer's keys and values."""

    kv_heads: int
    head_dim: int
    """Numbers of a key."""
    v_dim: int
    """Numbers of a value."""


def check_version() -> None:
    """Raise OpenvinoVersionError for another release than the one whose inputs these are."""
    if missing := KINDS["openvino"].missing:
        raise OpenvinoVersionError(
            f"the engine needs another version of OpenVINO: install {missing}, or set engine to "
            f"'torch'"
        )


def paged_attention(
    qkv: tuple[Output, Output, Output],
    caches: tuple[Output, Output],
    layout: dict[str, Output],
    heads: HeadShape,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Output | None = None,
) -> Output:
    """Return attention's output [rows, heads x v_dim] of queries, keys and values [rows, heads
    (kv_heads) x dim], which are written to ``caches`` first.

    ``layout`` holds ``past_lens`` i32[n], ``subsequence_begins`` i32[n + 1], ``block_indices``
    i32[m], ``block_indices_begins`` i32[n + 1] and ``max_context_len`` i32. ``scale`` of scores is
    the root of ``head_dim`` by default; a token sees ``window`` tokens, itself among them (0: all);
    ``sinks`` are [1, heads, 1, 1].
    """
    whole, real = _none(np.int32), _none(np.float32)
    zero = _scalar(0)
    inputs = [
        *qkv,
        *caches,
        layout["past_lens"],
        layout["subsequence_begins"],
        layout["block_indices"],
        layout["block_indices_begins"],
        _scalar(1.0 / math.sqrt(heads.head_dim) if scale is None else scale, np.float32),
        _scalar(window),
        real,  # alibi slopes
        layout["max_context_len"],
        whole,  # score aggregation window: of no elements, a scalar fails with two sequences
        *(whole, whole, real),  # rotated blocks, deltas, table
        *(real, _scalar(64), _scalar(8)),  # sparse attention: threshold, block size, stride
        real if sinks is None else sinks,
        zero,  # adaptive eviction: start size
        *(whole, whole, whole),  # and its evictable sizes, block sets, their begins
        whole,  # token types
        _none(np.uint8),  # masks of trees: their rows would not have a chain's bits
        whole,
    ]
    node = _PagedAttentionExtension(inputs)
    sizes = {
        "num_k_heads": heads.kv_heads,
        "k_head_size": heads.head_dim,
        "num_v_heads": heads.kv_heads,
        "v_head_size": heads.v_dim,
    }
    for name, size in sizes.items():
        node.set_rt_info(size, name)
    return node.output(0)


def _scalar(value: float, dtype: type = np.int32) -> Output:
    return opset13.constant(np.array(value, dtype)).output(0)


def _none(dtype: type) -> Output:
    return opset13.constant(np.zeros(0, dtype)).output(0)
