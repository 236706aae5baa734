"""The one attention function of every engine: transformers' modules call it by ``ATTENTION``.

transformers makes no mask for a function that it has no mask for, so packed rows of many sequences
run as one row of its model, and an engine decides what each of them sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from backend.engines.models.spec import AttentionSpec

ATTENTION = "spindle"
"""The name under which transformers knows the attention function."""

_IRRELEVANT = frozenset(
    (
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)
"""Keywords that arrive with a call and change nothing that attention computes in inference."""


class AttentionError(ValueError):
    """An attention that no engine computes; the message names the layer and the reason."""


Attend = Callable[
    [AttentionSpec, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""(spec, query, key, value, sinks) to output. Query [1, heads, rows, key_dim], key and value
[1, kv_heads, rows, dim], sinks [heads]; output [1, rows, heads, value_dim].
"""

_current: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending_by(attend: Attend) -> Iterator[None]:
    """Let the modules of transformers that run inside attend by ``attend``."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def spec_of(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, rows, key_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, key_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
    scaling: float | None,
    options: Mapping[str, Any],
) -> AttentionSpec:
    """Return what a call asks. Raises AttentionError for an option that no engine knows."""
    layer = int(getattr(module, "layer_idx", -1))
    known_options = {"is_causal", "s_aux", "sliding_window", "softcap"}
    unknown = [
        name
        for name, option in options.items()
        if option is not None and name not in known_options | _IRRELEVANT
    ]
    if unknown:
        raise AttentionError(f"layer {layer} asks attention for {unknown[0]}")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise AttentionError(f"layer {layer} attends to later tokens, too")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return AttentionSpec(
        layer=layer,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=query.shape[-1],
        value_dim=value.shape[-1],
        scale=scale,
        window=int(options.get("sliding_window") or 0),
        softcap=float(options.get("softcap") or 0.0),
        sinks=options.get("s_aux") is not None,
    )


def _attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, rows, key_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, key_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it; return [1, rows, heads, value_dim]. Raises AttentionError,
    also for a mask of any shape.
    """
    spec = spec_of(module, query, key, value, scaling, options)
    if attention_mask is not None:
        raise AttentionError(f"layer {spec.layer} brings a mask of its own")
    return _current.get()(spec, query, key, value, options.get("s_aux")), None


AttentionInterface.register(ATTENTION, _attend)
