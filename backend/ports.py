"""The seam between the loop and the engines: one completion-based port for targets and drafts alike.

A *turn* tells an engine to bring its KV cache up to ``tokens[:end]`` of a sequence, to verify a proposal behind them and to run freely
for ``run`` tokens. A prefill chunk is a turn with ``run = 0``, plain decoding has ``run = 1``, a draft proposes k tokens by ``run = k``
with ``keep_probs``. Asynchronous engines (TensorRT-LLM's Executor) complete turns in any order; a step engine completes a whole
submission at the next ``poll``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from backend.request import SamplingParams

BLOCK_TOKENS = 16
"""Tokens in one KV block."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What engines may know of a request. ``tokens`` (prompt and committed) grows only by ``Session.commit`` and never shrinks.

    ``blocks[engine name]`` is that engine's KV block table, written by the ledger only: position p lives in block
    ``blocks[name][p // 16]`` at offset ``p % 16``. A table grows at its end only; a sequence that loses its table is cancelled in every
    engine before its blocks are used again. ``attempt`` counts the turns that drew tokens; with seed, position and purpose it keys the
    randomness, so that no discarded draw is used twice.

    ``keys[i]``, the ledger's too, names the content of complete block i (``backend.block_pool``): sequences with the same key may have that
    block in common. Whether its KV is there is each engine's own knowledge. ``salt`` keeps tenants' blocks apart. ``new_blocks`` and
    ``reused_blocks`` count what the ledger gave it so far. ``context_logits``, ``generation_logits`` and
    ``prompt_log_probs`` (of which the log-probabilities of the prompt's tokens are kept) ask a target for ``Extras``.
    """

    id: int
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    blocks: dict[str, list[int]] = field(default_factory=dict)
    attempt: int = 0
    keys: list[bytes] = field(default_factory=list)
    salt: str = ""
    new_blocks: int = 0
    reused_blocks: int = 0
    context_logits: bool = False
    generation_logits: bool = False
    prompt_log_probs: bool = False

    @property
    def reads_context(self) -> bool:
        """Whether a target is asked for ``Extras.context_logits``."""
        return self.context_logits or self.prompt_log_probs


@dataclass(frozen=True, slots=True)
class Proposal:
    """The tokens a draft proposes for a sequence and the law they were drawn from: a chain, or a tree for engines that verify trees.

    ``probs`` is the engines' own handle on q (rows = proposed positions), at the precision that it was sampled from; None means a point
    mass (greedy draft or lookup).

    A tree's spine is ``tokens``. ``siblings[j]`` are further candidates for the place of ``tokens[j]``, from the same law, behind which
    nothing is proposed. ``others`` are other drafts' proposals behind the same text, each with its own law (merged chains). At every place
    the candidates are tested in this order: the spine's, its siblings, then those of ``others`` in turn.
    """

    draft: str
    tokens: list[int]
    probs: Any = None
    siblings: Seq[Seq[int]] = ()
    others: tuple[Proposal, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether there is one candidate for every place."""
        return not any(self.siblings) and not self.others

    @property
    def nodes(self) -> int:
        """How many tokens are proposed in all."""
        return len(self.tokens) + sum(map(len, self.siblings)) + sum(other.nodes for other in self.others)


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's share of a submission (see the module docstring).

    ``end <= len(sequence.tokens)``; with ``run > 0`` or a proposal, ``end == len(sequence.tokens)``.
    ``keep_probs`` asks for the law of the freely run tokens (a draft's q), ``widths[j]`` with it for so many candidates for the place of
    the j-th of them, itself counted (1 behind their end). Engines that have no second choices ignore it.
    ``streamed`` asks for the tokens of a free run as they come (``Completion.partial``), which asynchronous engines may heed.
    ``piece_tokens`` above 0 has an engine that pads cut the context into pieces of so many tokens, whole blocks.
    """

    sequence: Sequence
    end: int
    run: int = 1
    proposal: Proposal | None = None
    keep_probs: bool = False
    widths: Seq[int] = ()
    piece_tokens: int = 0
    streamed: bool = False


@dataclass(slots=True)
class Extras:
    """What few requests ask for. ``top[i]``: the most likely (token, log-probability), best first, at the place of emitted token i.

    ``logits`` [tokens, vocab] (float32) are the model's own, without any option, behind which the emitted tokens were drawn;
    ``context_logits`` [rows, vocab] those behind the tokens of the text from number ``context_first`` on that the turn has run.
    """

    top: list[list[tuple[int, float]]] = field(default_factory=list)
    logits: npt.NDArray[np.float32] | None = None
    context_first: int = 0
    context_logits: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a turn came to: ``tokens`` = accepted proposal tokens, then the freely run ones; ``accepted`` counts the former. An engine may
    stop behind an end token of the sequence.

    ``probs`` is the handle on the law of the tokens where ``keep_probs`` was asked (None = point mass). ``log_probs`` holds the natural
    logarithm of each token's probability where the sequence asks for it: of the model's law with the request's options and temperature,
    before top-k and top-p.
    ``siblings`` are the further candidates that ``widths`` asked for, place by place. Of a tree, ``along`` counts the accepted tokens that
    are on the spine and on that of each of ``others``, and ``rank`` says which candidate of its draft was accepted where the spine ended
    (2: the first sibling; 0: none).
    ``scored`` tells of a draft that catches up on tokens emitted without it what it would have had accepted of them: (accepted, length) of
    the chains that it would have made, oldest first (greedy and plan-invariant sequences; as many tokens as the engine finds cheap).
    ``error`` is set, and everything else void, when this turn alone failed. ``partial``: the turn goes on, and has these tokens so far
    beyond those of the partial completions before; the last one has what is left.
    """

    sequence_id: int
    tokens: list[int]
    accepted: int = 0
    probs: Any = None
    log_probs: list[float] | None = None
    siblings: list[list[int]] = field(default_factory=list)
    along: list[int] = field(default_factory=list)
    rank: int = 0
    scored: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    extras: Extras | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can do. ``kv_blocks`` is the size of its block pool (0 = it keeps no KV); tokens are counted, not bytes.

    ``free`` says that proposing costs next to nothing (lookup), so that the loop scores it on every step, chosen or not; ``tree`` that it
    verifies trees; as a draft, ``scores`` that it scores what it catches up on (``Completion.scored``), ``siblings`` that it names
    second choices (``Turn.widths``). ``pads``: verified rows are padded to the longest context, or cut (``Turn.piece_tokens``).
    ``overlaps``: while one thread is in ``poll``, another may ask about, and cancel, sequences that have no turn in flight.
    ``asynchronous``: turns run in one in-flight batch and complete each in its time, not all with the next ``poll``.
    """

    vocab_size: int
    max_context_tokens: int
    max_draft_tokens: int
    max_run_tokens: int
    kv_blocks: int
    free: bool = False
    tree: bool = False
    scores: bool = False
    siblings: bool = False
    pads: bool = False
    overlaps: bool = False
    asynchronous: bool = False


class Engine(Protocol):
    """A target or a draft. Every engine rolls back what was rejected and catches up lazily on tokens that it has not seen.

    An exception from ``submit`` or ``poll`` voids all turns in flight: none of them completes, and each may be submitted again, with the
    outcome that it would have had. A turn that is wrong in itself completes with ``Completion.error`` instead and harms no other.
    """

    name: str
    limits: EngineLimits

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns; at most one per sequence may be in flight."""
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return completed turns, waiting up to ``timeout_s`` for the first; empty when nothing is in flight."""
        ...

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences (finished or cancelled): their turns complete no more and their KV is free at return."""
        ...

    def unseen(self, sequence: Sequence) -> int:
        """Return how many committed tokens a turn of this sequence would first have to catch up on."""
        ...

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens, at most ``length``, this engine could propose for the sequence now (lookup: the match it found)."""
        ...

    def close(self) -> None:
        """Release memory and processes."""
        ...


@runtime_checkable
class StreamsBeside(Protocol):
    """What an engine that ``overlaps`` has besides where its work is queued on a device."""

    def side_stream(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a new queue beside the other engines', None on the host. Called, it gives what ``submit`` and ``poll`` run under, in
        whatever thread: their work is queued there, behind what the caller had queued at the call, and has run when it ends.
        """
        ...
