"""The network of a head: it continues the target's own state, token by token, without attention.

Where the target has drawn a token, its residual stream at a few layers (``features``) is most of
what it knows of the text. ``begin`` makes a state of it; ``step`` moves the state on by one token
and returns the vector whose products with rows of the target's own head are the logits behind that
token. It has no KV and nothing to catch up on. (Hydra, arXiv 2402.05109, and ReDrafter, arXiv
2403.09919, are of this kind; several layers' states are EAGLE-3's, arXiv 2503.01840.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

FIRST_SCALE = 0.3
"""Of the last norm at first: a frozen head on vectors of full size begins 9 to 17 nats off."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What a head is made of. ``layers``: the target's whose output it reads, counted from 1.
    ``rows``: how many tokens it can propose beside those of the request's own text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[int, ...]
    rows: int
    rms_norm_eps: float = 1e-5


class HeadNetwork(nn.Module):
    """The weights of a head, and its two functions."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.features_norm = nn.Parameter(torch.ones(len(config.layers), hidden))
        self.join = nn.Linear(len(config.layers) * hidden, hidden, bias=False)
        self.state_norm = nn.Parameter(torch.ones(hidden))
        self.token_norm = nn.Parameter(torch.ones(hidden))
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norm = nn.Parameter(torch.full((hidden,), FIRST_SCALE))

    def begin(self, features: Tensor) -> Tensor:
        """Return states [n, hidden] of ``features`` [n, layers, hidden]."""
        return self.join(self._normed(features, self.features_norm).flatten(1))

    def step(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Move states [n, hidden] on by tokens whose embeddings are ``token`` [n, hidden]; return
        the states behind them, and the vectors [n, hidden] that the head multiplies.
        """
        read = [self._normed(state, self.state_norm), self._normed(token, self.token_norm)]
        state = state + self.mix(torch.cat(read, dim=1))
        gate, up = self.gate_up(self._normed(state, self.mlp_norm)).chunk(2, dim=1)
        state = state + self.down(functional.silu(gate) * up)
        return state, self._normed(state, self.norm)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        shape = (self.config.hidden_size,)
        return functional.rms_norm(rows, shape, eps=self.config.rms_norm_eps) * weight
