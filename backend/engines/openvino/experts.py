"""The experts of a mixture, grouped by expert in operations that OpenVINO's front end knows."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "spindle_grouped"
"""The name under which transformers knows the function."""


def _run_grouped(
    self: Any,
    hidden_states: torch.Tensor,  # [tokens, hidden]
    top_k_index: torch.Tensor,  # int64 [tokens, count]
    top_k_weights: torch.Tensor,  # [tokens, count]
) -> torch.Tensor:
    """Return what the chosen experts make of ``hidden_states``: [tokens, hidden].

    transformers' own grouped form counts with ``histc``, which the front end does not translate.
    """
    count = top_k_index.size(-1)
    order = torch.sort(top_k_index.reshape(-1))[1]
    ids = top_k_index.reshape(-1)[order]
    ends = (ids[:, None] <= torch.arange(self.num_experts, dtype=ids.dtype)[None]).sum(0)

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply ``rows`` [tokens x count, columns], sorted by expert, by their matrices."""
        weight = getattr(self, name)
        weight = weight if self.is_transposed else weight.transpose(-2, -1)
        output = torch._grouped_mm(rows, weight, offs=ends.to(torch.int32))
        return output + getattr(self, f"{name}_bias")[ids] if self.has_bias else output

    inner = product(hidden_states[order // count], "gate_up_proj" if self.has_gate else "up_proj")
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    rows = product(inner, "down_proj") * top_k_weights.reshape(-1)[order][:, None]
    together = rows[torch.argsort(order)].view(-1, count, rows.shape[-1]).sum(1)
    return together.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _run_grouped)
