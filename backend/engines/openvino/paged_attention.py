"""OpenVINO's paged attention as a node of a graph.

The operation is private to OpenVINO: it had 13, 16, 25 and 28 inputs in successive releases. So the
version is pinned (``requirements.txt``), and another one is refused at start-up. The public routes
end at the same operation: ``paged_attention_transformation`` lies in
``openvino._offline_transformations``, and needs a stateful model exported by another library.
"""

from __future__ import annotations

import math

import numpy as np
from openvino import Output, opset13
from openvino._pyopenvino.op import _PagedAttentionExtension

from backend.kinds import KINDS


class VersionError(RuntimeError):
    """Another OpenVINO than the one this was written for."""


def check_version() -> None:
    """Raise VersionError for another release than the one whose inputs these are."""
    if missing := KINDS["openvino"].missing:
        raise VersionError(
            f"paged attention is known here of one OpenVINO: install {missing}, or set engine to "
            f"'torch'"
        )


def paged_attention(
    qkv: tuple[Output, Output, Output],
    caches: tuple[Output, Output],
    layout: dict[str, Output],
    heads: tuple[int, int],
) -> Output:
    """Return attention's output [rows, heads x head_dim] of queries, keys and values [rows, heads
    (kv_heads) x head_dim], which are written to ``caches`` first.

    ``layout`` holds ``past_lens`` i32[n], ``subsequence_begins`` i32[n + 1], ``block_indices``
    i32[m], ``block_indices_begins`` i32[n + 1] and ``max_context_len`` i32; ``heads`` are
    ``kv_heads`` and ``head_dim``.
    """
    kv_heads, head_dim = heads
    whole, real = _none(np.int32), _none(np.float32)
    zero = _scalar(0)
    inputs = [
        *qkv,
        *caches,
        layout["past_lens"],
        layout["subsequence_begins"],
        layout["block_indices"],
        layout["block_indices_begins"],
        _scalar(1.0 / math.sqrt(head_dim), np.float32),
        zero,  # sliding window
        real,  # alibi slopes
        layout["max_context_len"],
        whole,  # score aggregation window: of no elements, a scalar fails with two sequences
        *(whole, whole, real),  # rotated blocks, deltas, table
        *(real, _scalar(64), _scalar(8)),  # sparse attention: threshold, block size, stride
        real,  # sinks
        zero,  # adaptive eviction: start size
        *(whole, whole, whole),  # and its evictable sizes, block sets, their begins
        whole,  # token types
        _none(np.uint8),  # masks of trees: their rows would not have a chain's bits
        whole,
    ]
    node = _PagedAttentionExtension(inputs)
    sizes = {
        "num_k_heads": kv_heads,
        "k_head_size": head_dim,
        "num_v_heads": kv_heads,
        "v_head_size": head_dim,
    }
    for name, size in sizes.items():
        node.set_rt_info(size, name)
    return node.output(0)


def _scalar(value: float, dtype: type = np.int32) -> Output:
    return opset13.constant(np.array(value, dtype)).output(0)


def _none(dtype: type) -> Output:
    return opset13.constant(np.zeros(0, dtype)).output(0)
