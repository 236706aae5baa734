"""A base for drafts that only propose: turns in a queue, refused or proposed for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from backend.engines.port import Completion, EngineLimits, Turn
from backend.sequence import Proposal, Sequence

UNLIMITED = 2**31 - 1
"""Tokens of a vocabulary or a context that are no limit."""


class Proposer:
    """A draft (``port.Engine``) that has nothing to catch up on and can verify nothing."""

    def __init__(self, name: str, limits: EngineLimits) -> None:
        self.name, self.limits = name, limits
        self._turns: list[Turn] = []

    @abstractmethod
    def _propose(self, turns: Seq[Turn]) -> Iterable[Proposal | None]:
        """Return a proposal for each turn; all of them ask for nodes."""

    def _missing(self, sequence: Sequence) -> str:
        """Return what a proposal for the sequence lacks; empty where it can be made."""
        del sequence
        return ""

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns, which run at the next ``poll``."""
        self._turns.extend(turns)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Propose for all queued turns; one that asks for something else completes with an
        error.
        """
        del timeout_s  # it never waits
        turns, self._turns = self._turns, []
        asking: list[Turn] = []
        completions: list[Completion] = []
        for turn in turns:
            error = self._refusal(turn)
            if turn.nodes and not error:
                asking.append(turn)
            else:
                completions.append(Completion(turn.sequence.id, [], error=error or None))
        proposals = self._propose(asking) if asking else ()
        for turn, proposal in zip(asking, proposals, strict=True):
            completions.append(Completion(turn.sequence.id, [], proposal=proposal))
        return completions

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences and their queued turns."""
        ids = set(sequence_ids)
        self._turns = [turn for turn in self._turns if turn.sequence.id not in ids]
        self._forget(ids)

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget what is known of sequences."""

    def unseen(self, sequence: Sequence) -> int:
        """Return 0: there is nothing to catch up on."""
        del sequence
        return 0

    def available(self, sequence: Sequence, length: int) -> int:
        """Return ``length``, at most ``max_draft_tokens``, where a proposal can be made, else 0."""
        most = max(0, min(length, self.limits.max_draft_tokens))
        return most if most and not self._missing(sequence) else 0

    def close(self) -> None:
        """Forget everything; the engine is of no use afterwards."""
        self._turns.clear()

    def _refusal(self, turn: Turn) -> str:
        """Return why a turn cannot be run; empty where it can."""
        reason = ""
        if turn.proposal is not None:
            reason = f"draft {self.name!r} cannot verify a proposal"
        elif turn.nodes and not 1 <= turn.run <= self.limits.max_run_tokens:
            reason = f"run must be in 1..{self.limits.max_run_tokens}, got {turn.run}"
        elif turn.nodes:
            reason = self._missing(turn.sequence)
        return f"turn of sequence {turn.sequence.id}: {reason}" if reason else ""


class InTarget(Proposer):
    """A draft of the plan whose proposals are made and verified in the target's own pass
    (``port.DeviceProposal``).
    """

    def __init__(
        self,
        name: str,
        *,
        max_draft_tokens: int,
        vocab_size: int = UNLIMITED,
        whole_batch: bool = False,
    ) -> None:
        """``whole_batch`` is as in ``EngineLimits``."""
        most = max_draft_tokens, max_draft_tokens
        sizes = vocab_size, UNLIMITED, *most, 0
        super().__init__(name, EngineLimits(*sizes, in_target=True, whole_batch=whole_batch))

    def submit(self, turns: Seq[Turn]) -> None:
        """Raise ValueError for any turn: the target proposes."""
        if turns:
            raise ValueError(f"draft {self.name!r} proposes in its target, got {len(turns)} turns")

    def _propose(self, turns: Seq[Turn]) -> Iterable[Proposal | None]:
        raise ValueError(f"draft {self.name!r} proposes in its target, got {len(turns)} turns")

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """Do nothing: its target assumes its state, too."""
