"""A draft that its target runs: its proposals need nothing of the host."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from backend.engines.port import Completion, EngineLimits, Turn
from backend.sequence import Sequence

_UNLIMITED = 2**31 - 1


class InTarget:
    """A draft of the plan whose proposals are made and verified in the target's own pass
    (``port.DeviceProposal``).
    """

    def __init__(self, name: str, *, max_draft_tokens: int, vocab_size: int = _UNLIMITED) -> None:
        self.name = name
        most = max_draft_tokens, max_draft_tokens
        self.limits = EngineLimits(vocab_size, _UNLIMITED, *most, kv_blocks=0, in_target=True)

    def submit(self, turns: Seq[Turn]) -> None:
        """Raise ValueError for any turn: the target proposes."""
        if turns:
            raise ValueError(f"draft {self.name!r} proposes in its target, got {len(turns)} turns")

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
        """Do nothing: the target holds what it needs, too."""
