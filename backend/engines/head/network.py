"""The network of a head: it continues the target's own state, token by token, without attention.

Once the target has drawn a token, its residual stream at a few layers is most of
what it knows of the text. ``begin`` makes a state of it; ``step`` moves the state on by one token
and returns the vector whose products with rows of the target's own head are the logits after that
token. It has no KV and nothing to catch up on. (Hydra, arXiv 2402.05109, and ReDrafter, arXiv
2403.09919, are of this kind; several layers' states are EAGLE-3's, arXiv 2503.01840.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from backend.checked_settings import ConfigError
from backend.engines.checkpoint import DTYPES
from backend.engines.head.folder import WEIGHTS_FILE, HeadConfig, read_config

FIRST_SCALE = 0.3
"""Scale of the last norm at first: a frozen head on vectors of full size begins 9 to 17 nats off.
"""


class Head(Protocol):
    """A network with the target's rows of its static tokens, where it runs."""

    def begin(self, hidden: Tensor) -> Tensor:
        """Return states [n, hidden] of the target's, ``hidden`` [n, layers, hidden]."""
        ...

    def step(
        self,
        state: Tensor,  # [n, hidden]
        token: Tensor,  # [n, hidden]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states after tokens of these embeddings [n, hidden], the vectors that the
        target's head multiplies, and their products with the static rows.
        """
        ...


class TorchHead:
    """A head on torch."""

    def __init__(
        self,
        network: HeadNetwork,
        rows: Tensor,  # [static tokens, hidden]
    ) -> None:
        self._network, self._rows = network, rows

    def begin(self, hidden: Tensor) -> Tensor:
        """Return states [n, hidden] of the target's [n, layers, hidden] (``Head``)."""
        return self._network.begin(hidden)

    def step(
        self,
        state: Tensor,  # [n, hidden]
        token: Tensor,  # [n, hidden]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Move states on by tokens (``Head``)."""
        state, vectors = self._network.step(state, token)
        return state, vectors, vectors @ self._rows.T


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
    config, path = read_config(folder), folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    token_ids = tensors.pop("token_ids", torch.zeros(0)).long()
    ids = set(token_ids.tolist())
    if not len(ids) == len(token_ids) == config.rows or not ids <= set(range(config.vocab_size)):
        text = f"token_ids must be {config.rows} different ids below {config.vocab_size}"
        raise ConfigError(f"{path}: {text}")
    network = HeadNetwork(config)
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from error
    network = network.to(device, DTYPES.get(dtype, torch.float32))
    return network.requires_grad_(requires_grad=False), token_ids
