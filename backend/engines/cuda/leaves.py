"""Fused forms of a decoder's leaves: products, norms, gated units and attention blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backend.engines.cuda.kernels import Kernels
from backend.engines.cuda.pages import Pages


class Product(nn.Module):
    """One or more linear layers of the same input as one weight [columns, inner]."""

    def __init__(self, linears: list[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        weights, biases = [x.weight.data for x in linears], [x.bias for x in linears]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            parts = [
                weight.new_zeros(len(weight)) if bias is None else bias.data
                for weight, bias in zip(weights, biases, strict=True)
            ]
            self.bias = torch.cat(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` [..., inner]."""
        rows = x.reshape(-1, x.shape[-1])
        out = self._kernels.linear(rows, self.weight, self.bias)
        return out.view(*x.shape[:-1], len(self.weight))


class Norm(nn.Module):
    """An RMS norm. ``shift`` is added to its weight (Gemma: 1); ``wide`` as ``layers`` says."""

    def __init__(self, norm: nn.Module, kernels: Kernels, *, shift: int, wide: bool) -> None:
        super().__init__()
        self._kernels, self._wide = kernels, wide
        self._weight, self._eps = _weight(norm) + shift, _eps(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` [..., hidden]."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        self._kernels.add_rms_norm(None, rows, self._weight, self._eps, out, wide=self._wide)
        return out.view(x.shape)


class Unit(nn.Module):
    """A gated unit: one product for gate and up, the activation, and the product down."""

    def __init__(self, unit: nn.Module, kernels: Kernels, *, gelu: bool) -> None:
        super().__init__()
        self._kernels, self._gelu = kernels, gelu
        self._gate_up = Product(
            _linears(unit, ("gate_up_proj",), ("gate_proj", "up_proj")), kernels
        )
        self._down = Product(_linears(unit, ("down_proj",)), kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the unit's output for ``x`` [1, tokens, hidden]."""
        both = self._gate_up(x[0])
        inner = both.new_empty(len(both), both.shape[1] // 2)
        self._kernels.apply_gate(both, inner, gelu=self._gelu)
        out: torch.Tensor = self._down(inner)
        return out[None]


class Attention(nn.Module):
    """An attention block: one product, one kernel to rotate and store, attention, one product.

    ``block`` has run once, so that its pages know its scoring. ``shift`` is added to the weights of
    its norms. Raises ValueError for norms that are not of each head.
    """

    def __init__(self, block: nn.Module, kernels: Kernels, *, shift: int) -> None:
        super().__init__()
        pages = block.pages
        assert isinstance(pages, Pages)
        self._kernels, self._pages = kernels, pages
        packed, apart = ("qkv_proj",), ("q_proj", "k_proj", "v_proj")
        self._qkv = Product(_linears(block, packed, apart), kernels)
        self._o = Product(_linears(block, ("o_proj",)), kernels)
        self._norms: dict[str, Any] = {}
        if isinstance(block.q_norm if hasattr(block, "q_norm") else None, nn.Module):
            weights = {name: _weight(getattr(block, name)) for name in ("q_norm", "k_norm")}
            if any(weight.numel() != pages.kv.shape[-1] for weight in weights.values()):
                raise ValueError("norms of whole queries and keys")
            self._norms = {name: weight + shift for name, weight in weights.items()}
            self._norms["eps"] = _eps(getattr(block, "q_norm"))  # noqa: B009 (mypy)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # [1, tokens, rotary]
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the block's output for ``hidden_states`` [1, tokens, hidden]."""
        pages, qkv = self._pages, self._qkv(hidden_states[0])
        q = qkv.new_empty(len(qkv), pages.heads, pages.kv.shape[-1])
        cos, sin = (angle[0].contiguous() for angle in position_embeddings)
        place = pages.layout().place
        self._kernels.rotate_and_store(qkv, q, pages.kv, cos, sin, place, **self._norms)
        attended = pages.attend(q, pages.scoring)
        return self._o(attended.view(len(qkv), -1))[None], None


def _linears(module: nn.Module, *choices: tuple[str, ...]) -> list[nn.Linear]:
    """Return the linear layers of the first names that a module has; ValueError for none."""
    for names in choices:
        modules = [getattr(module, name, None) for name in names]
        linears = [x for x in modules if type(x) is nn.Linear]
        if len(linears) == len(names):
            return linears
    raise ValueError(f"{type(module).__name__} has no linear layers {choices}")


def _weight(norm: nn.Module) -> torch.Tensor:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight.data


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
