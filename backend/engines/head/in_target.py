"""A head whose target runs it: there its proposal needs nothing of the host."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from backend.engines.head.network import HeadNetwork
from backend.engines.port import Completion, EngineLimits, Turn
from backend.sequence import Sequence

_UNLIMITED = 2**31 - 1


class HeadInTarget:
    """The weights of a head, for a target that proposes with them (``DeviceProposal``)."""

    def __init__(
        self, name: str, network: HeadNetwork, token_ids: torch.Tensor, *, max_draft_tokens: int
    ) -> None:
        self.name, self.network, self.token_ids = name, network, token_ids
        self.limits = EngineLimits(
            network.config.vocab_size,
            _UNLIMITED,
            max_draft_tokens,
            max_draft_tokens,
            kv_blocks=0,
            in_target=True,
        )
        self._static = frozenset(token_ids.tolist())

    def is_static(self, token: int) -> bool:
        """Return whether it can propose a token in every text."""
        return token in self._static

    def submit(self, turns: Seq[Turn]) -> None:
        """Raise ValueError for any turn: the target proposes."""
        if turns:
            raise ValueError(f"engine {self.name!r} proposes in its target, not by turns")

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return nothing."""
        del timeout_s
        return []

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Do nothing: it knows no sequence."""

    def unseen(self, sequence: Sequence) -> int:
        """Return 0: there is nothing to catch up on."""
        del sequence
        return 0

    def available(self, sequence: Sequence, length: int) -> int:
        """Return ``length``, at most ``max_draft_tokens``."""
        del sequence
        return max(0, min(length, self.limits.max_draft_tokens))

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """Do nothing: its target assumes its state, too."""

    def close(self) -> None:
        """Do nothing: the target holds the weights, too."""
