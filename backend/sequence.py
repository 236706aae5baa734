"""What the loop, the engines and the sampling rule have in common: a request's tokens, and the tree
of tokens that a draft proposes after them.
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
"""The confidence in each token of a draft that tells none; it tells depths apart."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What engines may know of a request. ``tokens`` (prompt and committed) grows only by
    ``Session.commit`` and never shrinks.

    ``blocks[engine name]`` is that engine's KV block table, written by the ledger only: position p
    lives in block ``blocks[name][p // BLOCK_TOKENS]`` at offset ``p % BLOCK_TOKENS``. A table grows
    at its end only; a sequence that loses its table is cancelled in every engine before its blocks
    are used again.

    ``keys[i]``, the ledger's too, names the content of complete block i
    (``backend.core.block_pool``): sequences with the same key may have that block in common.
    Whether its KV is there is each engine's own knowledge. ``salt`` keeps tenants' blocks apart.
    ``new_blocks`` and ``reused_blocks`` count what the ledger gave it so far. ``context_logits``,
    ``generation_logits`` and ``prompt_log_probs`` (only those of the prompt's own tokens are kept)
    ask a target for ``Extras``. What is written for one that drafts are not to
    ``remember`` is used for no other.
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
    remember: bool = True

    @property
    def reads_context(self) -> bool:
        """Whether a target is asked for ``Extras.context_logits``."""
        return self.context_logits or self.prompt_log_probs


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of tokens that a draft proposes after a sequence's text, best first; a chain is its
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
        kept = [nodes[node] for node in order[:most]]
        parents = [place[parent] for _, parent, _ in kept]
        return cls(draft, [node[0] for node in kept], parents, [node[2] for node in kept])

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> Proposal:
        """Return the tree of at most this many of the best nodes."""
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
