"""The network of a head: it continues the target's own state, token by token, without attention.

Once the target has drawn a token, its residual stream at a few layers is most of
what it knows of the text. ``begin`` makes a state of it; ``step`` moves the state on by one token
and returns the vector whose products with rows of the target's own head are the logits after that
token. It has no KV and nothing to catch up on. (Hydra, arXiv 2402.05109, and ReDrafter, arXiv
2403.09919, are of this kind; several layers' states are EAGLE-3's, arXiv 2503.01840.)
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from backend.engines.head.folder import HeadConfig, read_head
from backend.engines.models.arrays import to_array
from backend.engines.weights import DTYPES
from backend.sampling.distributions import Floats

FIRST_SCALE = 0.3
"""Scale of the last norm at first: a frozen head on vectors of full size begins 9 to 17 nats off.
"""


class TorchHead:
    """A head on torch (``engine.Head``)."""

    def __init__(
        self,
        network: HeadNetwork,
        rows: Floats,  # [static tokens, hidden]
    ) -> None:
        self._network = network
        self._rows = self._tensor(rows)

    @torch.inference_mode()
    def begin(
        self,
        hidden: Floats,  # [n, layers, hidden]
    ) -> Floats:
        """Return states [n, hidden] of the target's (``Head``)."""
        return to_array(self._network.begin(self._tensor(hidden)))

    @torch.inference_mode()
    def step(
        self,
        state: Floats,  # [n, hidden]
        token: Floats,  # [n, hidden]
    ) -> tuple[Floats, Floats, Floats]:
        """Move states on by tokens (``Head``)."""
        after, vectors = self._network.step(self._tensor(state), self._tensor(token))
        return to_array(after), to_array(vectors), to_array(vectors @ self._rows.T)

    def _tensor(self, rows: Floats) -> Tensor:
        """Return rows [n, ..., hidden] in the network's dtype, on its device."""
        weight = self._network.join.weight
        return torch.from_numpy(rows).to(weight.device, weight.dtype)


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

    def begin(self, hidden: Tensor) -> Tensor:
        """Return states [n, hidden] of the target's, ``hidden`` [n, layers, hidden]."""
        state: Tensor = self.join(self._norm(hidden, self.features_norm).flatten(1))
        return state

    def step(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Move states [n, hidden] on by tokens whose embeddings are ``token`` [n, hidden]; return
        the states after them, and the vectors [n, hidden] that the head multiplies.
        """
        read = [self._norm(state, self.state_norm), self._norm(token, self.token_norm)]
        state = state + self.mix(torch.cat(read, dim=1))
        gate, up = self.gate_up(self._norm(state, self.mlp_norm)).chunk(2, dim=1)
        state = state + self.down(functional.silu(gate) * up)
        return state, self._norm(state, self.norm)

    def _norm(
        self,
        rows: Tensor,  # [..., hidden]
        weight: Tensor,  # [hidden] or [layers, hidden]
    ) -> Tensor:
        shape = (self.config.hidden_size,)
        return functional.rms_norm(rows, shape, eps=self.config.rms_norm_eps) * weight


def load(folder: Path, dtype: str = "fp32", device: str = "cpu") -> tuple[HeadNetwork, Tensor]:
    """Return the network in a folder and the tokens int64[rows] that have rows in any case. Raises
    ConfigError for files that are missing or do not fit.
    """
    config, weights, token_ids = read_head(folder)
    network = HeadNetwork(config)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    network = network.to(device, DTYPES.get(dtype, torch.float32))
    return network.requires_grad_(requires_grad=False), torch.from_numpy(token_ids)
