"""The seam between the loop and the engines: one completion-based port for targets and drafts
alike.

A *turn* asks an engine to bring its KV cache up to ``tokens[:end]`` of a sequence, to verify a
proposal after them and to run freely for ``run`` tokens. A prefill chunk is a turn with ``run =
0``, plain decoding has ``run = 1``, a draft proposes by ``run = k`` with ``nodes``. The target
draws every token by itself and follows the proposal as far as that has the tokens drawn. A ``poll``
completes the oldest submission.

A target with ``lookahead`` takes a second turn of a sequence while the first runs (``AFTER``), and
proposals that a draft makes on its device (``DeviceProposal``): so the next submission is there
when one ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from backend.sequence import Proposal, Sequence

AFTER = -1
"""The end of a turn that begins where the sequence's turn in flight ends, whatever that emits."""


@dataclass(frozen=True, slots=True)
class DeviceProposal:
    """A proposal that a turn's engine makes and verifies itself: the host sees it with the
    completion.
    """

    draft: Engine  # one with ``limits.in_target``
    length: int  # of the longest path, in tokens
    nodes: int
    """The likeliest of them that are verified. An engine may share the sum of a submission's nodes
    out among its turns, where they are likeliest.
    """


@dataclass(slots=True)
class Turn:
    """One sequence's share of a submission. It and ``Completion`` never change; freezing them would
    take microseconds.
    """

    sequence: Sequence
    end: int
    """``AFTER``, or at most ``len(sequence.tokens)``, and that with ``run`` or a proposal."""
    run: int = 1
    """Tokens to run freely; of a draft, the most tokens of a path, and its forward passes."""
    proposal: Proposal | None = None
    """The proposal to verify."""
    nodes: int = 0
    """Above 0: a draft's proposal (``Completion.proposal``) has at most this many nodes."""
    device_proposal: DeviceProposal | None = None
    """The chain to propose and verify, in place of ``proposal``."""
    states: bool = True
    """Whether drafts of the host read the target's states of it (``Completion.hidden_states``)."""


@dataclass(slots=True)
class Extras:
    """Outputs that few requests ask for. Logits are the model's own, without any option."""

    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most likely (token, log-probability) at the place of each emitted token, best first."""
    logits: npt.NDArray[np.float32] | None = None
    """[tokens, vocab], from which the emitted tokens were drawn."""
    context_first: int = 0
    """The first token of the text that the turn has run."""
    context_logits: npt.NDArray[np.float32] | None = None
    """[rows, vocab] at that token and those after it."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A target's residual stream at consecutive tokens of a text."""

    first: int
    """The first of these tokens, counted from 0."""
    layers: tuple[int, ...]
    """The layers, counted from 1, after which it was taken."""
    rows: npt.NDArray[np.floating[Any]]
    """[tokens, layers, hidden], an array of its own."""

    @property
    def end(self) -> int:
        """The first token after them."""
        return self.first + len(self.rows)

    def of(self, layers: tuple[int, ...]) -> npt.NDArray[np.floating[Any]]:
        """Return the rows of some of the layers, in this order."""
        if layers == self.layers:
            return self.rows
        return self.rows[:, [self.layers.index(layer) for layer in layers]]


@dataclass(slots=True)
class Completion:
    """The result of a turn."""

    sequence_id: int
    tokens: list[int]
    """Accepted tokens, then those run freely. The engine may stop after an end token."""
    accepted: int = 0
    """How many of ``tokens`` were accepted."""
    proposal: Proposal | None = None
    """The proposal a draft was asked for (``Turn.nodes``); then there are no ``tokens``."""
    log_probs: list[float] | None = None
    """Natural logarithms of the tokens' probabilities, with the request's options and temperature,
    before top-k and top-p; None: the sequence does not ask.
    """
    scored: list[tuple[int, int]] = field(default_factory=list)
    """(accepted, length) of chains that a draft would have made of tokens that were emitted without
    it, oldest first: of as many tokens as it reads anyway.
    """
    error: str | None = None
    """Why this turn alone failed; then everything else is void."""
    extras: Extras | None = None
    hidden_states: HiddenStates | None = None
    """States of all tokens that the turn has run and that are in the text now, up to the one before
    the last of ``tokens``; None: no draft of the host reads them.
    """
    drafted: Proposal | None = None
    """The proposal that was made for ``Turn.device_proposal``."""
    verified: int = 0
    """How many of its nodes were verified, the first ones."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An engine's capabilities."""

    vocab_size: int
    max_context_tokens: int
    max_draft_tokens: int
    max_run_tokens: int
    kv_blocks: int
    """The size of its block pool; 0: it keeps no KV."""
    free: bool = False
    """As a draft, it costs next to nothing: the loop scores its proposals in every step."""
    tree: bool = False
    """As a target, it verifies trees."""
    scores: bool = False
    """As a draft, it scores what it catches up on (``Completion.scored``)."""
    invariant: bool = False
    """The logits of a text are the same bits whatever else is in a pass. Those of a prompt may
    differ from those of the same tokens generated: blocks with generated tokens have other keys.
    """
    lookahead: int = 0
    """Submissions that a target takes besides the one that runs; above 0 it is a ``LooksAhead``."""
    in_target: bool = False
    """As a draft, it proposes on the target's device (``DeviceProposal``), and nowhere else."""
    whole_batch: bool = False
    """As such a draft, it proposes for the whole batch, as deep as the longest path asked for, and
    the likeliest nodes of the batch are verified.
    """
    widths: tuple[int, ...] = ()
    """The counts of tokens, rising, that its passes are padded to; none: it pads nothing."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one engine on its device."""

    device: str
    weights: int
    kv: int
    passes: int  # of its largest pass, besides weights and KV

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.passes


class EngineLostError(RuntimeError):
    """Raised by an engine that can run nothing more in this process."""


class Engine(Protocol):
    """A target or a draft. Every engine rolls back what was rejected and catches up lazily on
    tokens that it has not seen.

    An exception from ``submit`` or ``poll`` voids all turns in flight: none of them completes, and
    each may be submitted again with the same outcome. An invalid turn completes with
    ``Completion.error`` instead. After EngineLostError only ``cancel`` may be called.
    """

    name: str
    limits: EngineLimits

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns; at most ``1 + lookahead`` per sequence may be in flight."""
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """Wait for the oldest submission and return its completions; none when nothing is in
        flight.
        """
        ...

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences (finished or cancelled): their turns complete no more and their KV is
        free at return.
        """
        ...

    def unseen(self, sequence: Sequence) -> int:
        """Return how many committed tokens a turn of this sequence would first have to catch up on,
        by the turns that were polled.
        """
        ...

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens, at most ``length``, this engine could propose for the sequence
        now (lookup: the match it found).
        """
        ...

    def close(self) -> None:
        """Release memory and processes."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A target with ``limits.lookahead``. It runs submissions in order, each from its own state
    after the one before, and after a cancellation as if there had been none.

    A turn that follows may run past the end of its text, by the tokens of two turns: its sequence's
    block table covers them, and nothing of it is used.
    """

    def can_follow(self, sequence: Sequence) -> bool:
        """Return whether a turn of a sequence may follow one in flight: between them it needs
        nothing of the host.
        """
        ...

    def parts_s(self) -> dict[str, float]:
        """Return the seconds that the device worked on the submission polled last, by part of the
        step (``verify``, ``draft:<name>``); those of two submissions never overlap.
        """
        ...


@runtime_checkable
class Prepares(Protocol):
    """An engine that has something to do before the first request, so that none waits for it."""

    def prepare(self, drafts: Seq[Engine], rows: int) -> None:
        """Make ready for up to ``rows`` requests at once, with these drafts of the deployment."""
        ...


@runtime_checkable
class KeepsWidth(Protocol):
    """A target whose pass is quicker where the one before had as many tokens."""

    def width(self) -> tuple[int, int]:
        """Return how many tokens the last pass had, and how many more take as long as a change of
        that number does (0: it takes no time).
        """
        ...


@runtime_checkable
class ShowsEvidence(Protocol):
    """A draft that shows, before it proposes, how promising its proposal would be. Others share
    what such drafts show for the request (``policy.evidence.shared``).
    """

    name: str

    def evidence(self, sequence: Sequence) -> int:
        """Return the bin (``policy.evidence``) of a proposal for the sequence as it is now; 0: it
        shows nothing. This is asked after ``available``, for the same text.
        """
        ...


@runtime_checkable
class ReadsTarget(Protocol):
    """A draft that proposes from the target's hidden states."""

    name: str
    limits: EngineLimits

    def absorb(self, states: Seq[tuple[Sequence, HiddenStates]]) -> None:
        """Take the states that a submission of the target has computed. The texts are committed:
        they have one token more than those that have states, or are in a chunk of their prompt.
        """
        ...


@runtime_checkable
class MissesStates(Protocol):
    """Additional methods of a draft that proposes nothing for a text whose states are missing."""

    name: str

    def holes(self) -> int:
        """Return how many texts in flight have states missing (any thread)."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """Additional methods of a draft that proposes from the answers to earlier requests."""

    name: str

    def remember(self, sequence: Sequence) -> None:
        """Take the answer of a request that has ended, however it did, and that may be remembered;
        its ``cancel`` follows.
        """
        ...
