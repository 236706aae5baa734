"""The seam between the loop and the engines: one completion-based port for targets and drafts
alike.

A *turn* tells an engine to bring its KV cache up to ``tokens[:end]`` of a sequence, to verify a
proposal behind them and to run freely for ``run`` tokens. A prefill chunk is a turn with ``run =
0``, plain decoding has ``run = 1``, a draft proposes by ``run = k`` with ``nodes``. The target
draws every token by itself; of a proposal it follows what it has drawn. Asynchronous engines
(TensorRT-LLM's Executor) complete turns in any order; a step engine completes a whole submission at
the next ``poll``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from backend.request import SamplingParams

BLOCK_TOKENS = 16
"""Tokens in one KV block."""

ROOT = -1
"""The parent of a proposal's nodes right behind the text."""


UNTOLD = 0.8
"""The confidence in each token of a draft that tells none; it tells depths apart."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What engines may know of a request. ``tokens`` (prompt and committed) grows only by
    ``Session.commit`` and never shrinks.

    ``blocks[engine name]`` is that engine's KV block table, written by the ledger only: position p
    lives in block ``blocks[name][p // 16]`` at offset ``p % 16``. A table grows at its end only; a
    sequence that loses its table is cancelled in every engine before its blocks are used again.

    ``keys[i]``, the ledger's too, names the content of complete block i (``backend.block_pool``):
    sequences with the same key may have that block in common. Whether its KV is there is each
    engine's own knowledge. ``salt`` keeps tenants' blocks apart. ``new_blocks`` and
    ``reused_blocks`` count what the ledger gave it so far. ``context_logits``,
    ``generation_logits`` and ``prompt_log_probs`` (of which the log-probabilities of the prompt's
    tokens are kept) ask a target for ``Extras``.
    """

    id: int
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    blocks: dict[str, list[int]] = field(default_factory=dict)
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
    """A tree of tokens that a draft proposes behind a sequence's text, best first; a chain is its
    simplest case.

    ``tokens[n]`` continues node ``parents[n]`` < n, or the text (``ROOT``); no two children of a
    node have the same token. ``confidence[n]`` in [0, 1] is how likely the draft holds the whole
    path to node n to be what the target draws. It never rises from node to node, so every prefix is
    a tree. It decides what is verified, never what is accepted.
    """

    draft: str
    tokens: list[int]
    parents: list[int]
    confidence: list[float]

    @classmethod
    def chain(cls, draft: str, tokens: Seq[int], confidence: Seq[float] = ()) -> Proposal:
        """Return the chain of these tokens; a draft that tells no confidence gets one that
        falls.
        """
        parents = list(range(ROOT, len(tokens) - 1))
        told = list(confidence) or [UNTOLD ** (place + 1) for place in range(len(tokens))]
        return cls(draft, list(tokens), parents, told)

    @classmethod
    def best(cls, draft: str, nodes: Seq[tuple[int, int, float]], most: int) -> Proposal:
        """Return the ``most`` best of nodes (token, parent, confidence of the path).

        A parent comes before its children and is held for no less likely than they are.
        """
        order = sorted(range(len(nodes)), key=lambda node: -nodes[node][2])  # stable: parents first
        place = {ROOT: ROOT, **{node: n for n, node in enumerate(order)}}
        kept = [nodes[node] for node in order[:most]]
        parents = [place[parent] for _, parent, _ in kept]
        return cls(draft, [node[0] for node in kept], parents, [node[2] for node in kept])

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> Proposal:
        """Return the tree of the best nodes, at most so many."""
        if nodes >= len(self.tokens):
            return self
        columns = self.tokens[:nodes], self.parents[:nodes], self.confidence[:nodes]
        return Proposal(self.draft, *columns)

    def spine(self) -> Proposal:
        """Return the chain of each node's best child, for an engine that verifies chains only."""
        at, path = ROOT, []
        for node, parent in enumerate(self.parents):
            if parent == at:
                path.append(node)
                at = node
        if len(path) == len(self.tokens):
            return self
        chosen = [self.tokens[n] for n in path], [self.confidence[n] for n in path]
        return Proposal.chain(self.draft, *chosen)

    @property
    def depths(self) -> list[int]:
        """How many tokens the path to each node has, itself counted."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """The most of its tokens that can be accepted."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.parents == list(range(ROOT, len(self.tokens) - 1))

    def followed(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes of the longest start of ``tokens`` that is a path from the text."""
        nodes = enumerate(zip(self.parents, self.tokens, strict=True))
        children = {edge: node for node, edge in nodes}
        path: list[int] = []
        for token in tokens:
            found = children.get((path[-1] if path else ROOT, token))
            if found is None:
                break
            path.append(found)
        return path


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's share of a submission (see the module docstring).

    ``end <= len(sequence.tokens)``; with ``run > 0`` or a proposal, ``end ==
    len(sequence.tokens)``. ``nodes`` above 0 asks a draft for a ``Completion.proposal`` of at most
    so many nodes, no path of it longer than ``run``; a model makes it of ``run`` forward passes.
    ``streamed`` asks for the tokens of a free run as they come (``Completion.partial``), which
    asynchronous engines may heed. ``piece_tokens`` above 0 has an engine that pads cut the context
    into pieces of so many tokens, whole blocks.
    """

    sequence: Sequence
    end: int
    run: int = 1
    proposal: Proposal | None = None
    nodes: int = 0
    piece_tokens: int = 0
    streamed: bool = False


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


@dataclass(frozen=True, slots=True)
class Completion:
    """What a turn came to: ``tokens`` = accepted proposal tokens, then the freely run ones;
    ``accepted`` counts the former. An engine may stop behind an end token of the sequence.

    ``proposal`` is what a draft was asked for (``Turn.nodes``); then there are no ``tokens``.
    ``log_probs`` holds the natural logarithm of each token's probability where the sequence asks
    for it: of the model's law with the request's options and temperature, before top-k and top-p.
    ``scored`` tells of a draft that catches up on tokens emitted without it what it would have had
    accepted of them: (accepted, length) of the chains that it would have made, oldest first (as
    many tokens as the engine finds cheap). ``error`` is set, and everything else void, when this
    turn alone failed. ``partial``: the turn goes on, and has these tokens so far beyond those of
    the partial completions before; the last one has what is left.
    """

    sequence_id: int
    tokens: list[int]
    accepted: int = 0
    proposal: Proposal | None = None
    log_probs: list[float] | None = None
    scored: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    extras: Extras | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can do. ``kv_blocks`` is the size of its block pool (0 = it keeps no KV);
    tokens are counted, not bytes.

    ``free`` says that proposing costs next to nothing (lookup), so that the loop scores it on every
    step, chosen or not; ``tree`` that it verifies trees; as a draft, ``scores`` that it scores what
    it catches up on (``Completion.scored``). ``pads``: verified rows are padded to the longest
    context, or cut (``Turn.piece_tokens``). ``overlaps``: while one thread is in ``poll``, another
    may ask about, and cancel, sequences that have no turn in flight. ``asynchronous``: turns run in
    one in-flight batch and complete each in its time, not all with the next ``poll``.
    """

    vocab_size: int
    max_context_tokens: int
    max_draft_tokens: int
    max_run_tokens: int
    kv_blocks: int
    free: bool = False
    tree: bool = False
    scores: bool = False
    pads: bool = False
    overlaps: bool = False
    asynchronous: bool = False


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
        """Queue turns; at most one per sequence may be in flight."""
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
class StreamsBeside(Protocol):
    """What an engine that ``overlaps`` has besides where its work is queued on a device."""

    def side_stream(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a new queue beside the other engines', None on the host. Called, it gives what
        ``submit`` and ``poll`` run under, in whatever thread: their work is queued there, behind
        what the caller had queued at the call, and has run when it ends.
        """
        ...
