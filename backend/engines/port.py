"""The seam between the loop and the engines: one completion-based port for targets and drafts
alike.

A *turn* tells an engine to bring its KV cache up to ``tokens[:end]`` of a sequence, to verify a
proposal behind them and to run freely for ``run`` tokens. A prefill chunk is a turn with ``run =
0``, plain decoding has ``run = 1``, a draft proposes by ``run = k`` with ``nodes``. The target
draws every token by itself; of a proposal it follows what it has drawn. Every engine completes a
whole submission at the next ``poll``.

A target with ``lookahead`` takes a second turn of a sequence while the first runs (``AFTER``), and
proposals that a draft makes on its device (``DeviceProposal``): so the next submission is there
when one ends. Every ``poll`` completes the oldest submission.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

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
    nodes: int  # verified at most, the likeliest of them


@dataclass(slots=True)
class Turn:
    """One sequence's share of a submission (see the module docstring). Nobody changes one, or a
    ``Completion``: that they are not frozen saves the microseconds that freezing takes.

    ``end <= len(sequence.tokens)``, or ``AFTER``; with ``run > 0`` or a proposal, ``end ==
    len(sequence.tokens)``. ``nodes`` above 0 asks a draft for a ``Completion.proposal`` of at most
    so many nodes, no path of it longer than ``run``; a model makes it of ``run`` forward passes.
    """

    sequence: Sequence
    end: int
    run: int = 1
    proposal: Proposal | None = None
    nodes: int = 0
    device_proposal: DeviceProposal | None = None


@dataclass(slots=True)
class Extras:
    """What few requests ask for. ``top[i]``: the most likely (token, log-probability), best first,
    at the place of emitted token i.

    ``logits`` [tokens, vocab] (float32) are the model's own, without any option, behind which the
    emitted tokens were drawn; ``context_logits`` [rows, vocab] those behind the tokens of the text
    from number ``context_first`` on that the turn has run.
    """

    top: list[list[tuple[int, float]]] = field(default_factory=list)
    logits: npt.NDArray[np.float32] | None = None
    context_first: int = 0
    context_logits: npt.NDArray[np.float32] | None = None


@dataclass(slots=True)
class Completion:
    """What a turn came to: ``tokens`` = accepted proposal tokens, then the freely run ones;
    ``accepted`` counts the former. An engine may stop behind an end token of the sequence.

    ``proposal`` is what a draft was asked for (``Turn.nodes``); then there are no ``tokens``.
    ``log_probs`` holds the natural logarithm of each token's probability where the sequence asks
    for it: of the model's law with the request's options and temperature, before top-k and top-p.
    ``features`` float32[layers, hidden] are the target's own states, behind the layers that a draft
    reads, at the row that the last of ``tokens`` was drawn from; None where no draft asks.
    ``scored`` says of a draft that catches up on tokens emitted without it what it would have had
    accepted of them: (accepted, length) of the chains that it would have made, oldest first (as
    many tokens as the engine finds cheap). ``error`` is set, and everything else void, when this
    turn alone failed. ``drafted`` is what came of a ``DeviceProposal``, of which the first
    ``verified`` nodes were verified.
    """

    sequence_id: int
    tokens: list[int]
    accepted: int = 0
    proposal: Proposal | None = None
    log_probs: list[float] | None = None
    scored: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    extras: Extras | None = None
    features: npt.NDArray[np.float32] | None = None
    drafted: Proposal | None = None
    verified: int = 0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can do. ``kv_blocks`` is the size of its block pool (0 = it keeps no KV);
    tokens are counted, not bytes.

    ``free`` says that proposing costs next to nothing (lookup, suffix), so that the loop scores it
    on every step, chosen or not; ``tree`` that it verifies trees; as a draft, ``scores`` that it
    scores what it catches up on (``Completion.scored``). ``invariant``: the logits behind a text
    are the same bits whatever else is in a pass, while those of a prompt may differ from those of
    the same tokens when they were generated: blocks with generated tokens have other keys.
    ``lookahead``: how many submissions a target takes besides the one that runs; above 0 it is a
    ``LooksAhead``. ``in_target``: as a draft, it proposes on the target's device, and never here.
    """

    vocab_size: int
    max_context_tokens: int
    max_draft_tokens: int
    max_run_tokens: int
    kv_blocks: int
    free: bool = False
    tree: bool = False
    scores: bool = False
    invariant: bool = False
    lookahead: int = 0
    in_target: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one engine on ``device``: its weights, its KV pool, and what its largest pass takes
    besides.
    """

    device: str
    weights: int
    kv: int
    passes: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.passes


class Engine(Protocol):
    """A target or a draft. Every engine rolls back what was rejected and catches up lazily on
    tokens that it has not seen.

    An exception from ``submit`` or ``poll`` voids all turns in flight: none of them completes, and
    each may be submitted again, with the outcome that it would have had. A turn that is wrong in
    itself completes with ``Completion.error`` instead and harms no other.
    """

    name: str
    limits: EngineLimits

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns; at most ``1 + lookahead`` per sequence may be in flight."""
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return completed turns, waiting up to ``timeout_s`` for the first; empty when nothing is
        in flight.
        """
        ...

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences (finished or cancelled): their turns complete no more and their KV is
        free at return.
        """
        ...

    def unseen(self, sequence: Sequence) -> int:
        """Return how many committed tokens a turn of this sequence would first have to catch up
        on.
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
class KeepsWidth(Protocol):
    """A target whose pass is quicker where the one before had as many tokens."""

    def width(self) -> tuple[int, int]:
        """Return how many tokens the last pass had, and how many more take as long as a change of
        that number does (0: it takes no time).
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """What a draft has besides that proposes from the answers to earlier requests."""

    name: str

    def ended(self, sequence: Sequence) -> None:
        """Take the answer of a request that has ended, however it did, and that may be remembered;
        its ``cancel`` follows.
        """
        ...
