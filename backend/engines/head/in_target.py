"""A head whose target runs it."""

from __future__ import annotations

import torch

from backend.engines.head.network import HeadNetwork
from backend.engines.proposer import InTarget


class HeadInTarget(InTarget):
    """The weights of a head, for a target that proposes with them."""

    def __init__(
        self, name: str, network: HeadNetwork, token_ids: torch.Tensor, *, max_draft_tokens: int
    ) -> None:
        """Take the ``token_ids``, int64[rows], that have rows in any case."""
        vocab_size = network.config.vocab_size
        most = {"max_draft_tokens": max_draft_tokens, "vocab_size": vocab_size}
        super().__init__(name, **most, whole_batch=True)
        self.network, self.token_ids = network, token_ids
        self._static = frozenset(token_ids.tolist())

    def is_static(self, token: int) -> bool:
        """Return whether it can propose a token in every text."""
        return token in self._static
