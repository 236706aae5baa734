"""Types that the loop, the engines and the sampling rule have in common: a request's tokens, and
the tree of tokens that a draft proposes after them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from backend.request import SamplingParams

BLOCK_TOKENS = 32
"""Tokens in one KV block: as many as OpenVINO's attention reads at a time."""

ROOT = -1
"""The parent of a proposal's nodes right after the text."""

DEFAULT_CONFIDENCE = 0.8
"""The confidence in each token of a draft that reports none; it falls with depth."""


def child_of(tokens: Seq[int], parents: Seq[int], node: int, token: int) -> int:
    """Return the child of a proposal's node, or of the text, that is a token; ROOT: it has none."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return ROOT


@dataclass(slots=True, eq=False)
class Sequence:
    """The part of a request that engines may know.

    A sequence that loses its table of blocks is cancelled in every engine before these are used
    again.
    """

    id: int
    tokens: list[int]
    """Prompt and committed tokens; they grow only by ``Session.commit`` and never shrink."""
    prompt_tokens: int
    sampling: SamplingParams
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """KV block table by engine, written by the ledger only and growing at its end only: position p
    lives in block ``blocks[name][p // BLOCK_TOKENS]`` at offset ``p % BLOCK_TOKENS``.
    """
    keys: list[bytes] = field(default_factory=list)
    """Names of the contents of complete blocks (``backend.core.block_pool``), by the ledger:
    sequences with the same key may share that block. Each engine knows whether its KV is there.
    """
    salt: str = ""
    """Keeps tenants' blocks apart."""
    new_blocks: int = 0
    """Blocks that the ledger gave it so far, as are ``reused_blocks``."""
    reused_blocks: int = 0
    context_logits: bool = False
    """Asks a target for ``Extras``, as do the next two."""
    generation_logits: bool = False
    prompt_log_probs: bool = False
    """Only those of the prompt's own tokens are kept."""
    remember: bool = True
    """Whether drafts may use what is written for it for other sequences."""

    @property
    def reads_context(self) -> bool:
        """Whether a target is asked for ``Extras.context_logits``."""
        return self.context_logits or self.prompt_log_probs


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of tokens that a draft proposes after a sequence's text, best first; a chain is its
    simplest case.

    Confidence never rises from node to node, so every prefix is a tree.
    """

    draft: str
    tokens: list[int]
    """By node; no two children of a node have the same token."""
    parents: list[int]
    """The earlier node that each continues, or the text (``ROOT``)."""
    confidence: list[float]
    """How likely the draft takes the whole path to a node to be what the target draws, in [0, 1];
    it decides what is verified, never what is accepted.
    """

    @classmethod
    def chain(cls, draft: str, tokens: Seq[int], confidence: Seq[float] = ()) -> Proposal:
        """Return the chain of these tokens; a draft that reports no confidence gets one that
        falls.
        """
        parents = list(range(ROOT, len(tokens) - 1))
        confidences = list(confidence) or [
            DEFAULT_CONFIDENCE ** (place + 1) for place in range(len(tokens))
        ]
        return cls(draft, list(tokens), parents, confidences)

    @classmethod
    def best(cls, draft: str, nodes: Seq[tuple[int, int, float]], most: int) -> Proposal:
        """Return the ``most`` best of nodes (token, parent, confidence of the path).

        A parent comes before its children and is at least as likely as they are.
        """
        order = sorted(range(len(nodes)), key=lambda node: -nodes[node][2])  # stable: parents first
        place = {ROOT: ROOT, **{node: n for n, node in enumerate(order)}}
        best_nodes = [nodes[node] for node in order[:most]]
        parents = [place[parent] for _, parent, _ in best_nodes]
        return cls(
            draft, [node[0] for node in best_nodes], parents, [node[2] for node in best_nodes]
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> Proposal:
        """Return the tree of at most this many of the best nodes."""
        if nodes >= len(self.tokens):
            return self
        columns = self.tokens[:nodes], self.parents[:nodes], self.confidence[:nodes]
        return Proposal(self.draft, *columns)

    def below(self, vocab_size: int) -> Proposal:
        """Return the tree without tokens of this id or a higher one, and without what continues
        them.
        """
        places = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if token < vocab_size and parent in places:
                places[node] = len(places) - 1
        if len(places) > len(self.tokens):
            return self
        nodes = [node for node in places if node != ROOT]
        tokens, parents = ([column[n] for n in nodes] for column in (self.tokens, self.parents))
        confidence = [self.confidence[node] for node in nodes]
        return Proposal(self.draft, tokens, [places[parent] for parent in parents], confidence)

    def spine(self) -> Proposal:
        """Return the chain of each node's best child, for an engine that verifies chains only."""
        at, path = ROOT, []
        for node, parent in enumerate(self.parents):
            if parent == at:
                path.append(node)
                at = node
        if len(path) == len(self.tokens):
            return self
        columns = [self.tokens[n] for n in path], [self.confidence[n] for n in path]
        return Proposal.chain(self.draft, *columns)

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

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes of the longest start of ``tokens`` that is a path from the text."""
        path, node = list[int](), ROOT
        for token in tokens:
            if (node := child_of(self.tokens, self.parents, node, token)) == ROOT:
                break
            path.append(node)
        return path
