"""A proposal as a tree of nodes: what a pass runs and a verification walks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from backend.engines.laws import Law
from backend.ports import Proposal

ROOT = -1
"""The parent of the nodes right behind the text."""


@dataclass(slots=True)
class Tree:
    """``tokens[n]`` continues node ``parents[n]``, an earlier one or ``ROOT``; a node's children are tested in the order of their numbers.

    ``laws[n]`` are the law that the token was drawn from, its row, and its probability there; None: a point mass. ``depth`` is the most
    tokens of which any path consists.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[tuple[Law, int, float] | None] = field(default_factory=list)
    depth: int = 0

    @classmethod
    def of(cls, proposal: Proposal, *, drawn: bool) -> Tree:
        """Return a proposal's nodes: spine, siblings by place, other drafts'. Without ``drawn`` laws do not matter: all are point masses.

        Drawn tokens are never merged: each draw is tested against what the ones before have left of the law. Point masses share equal
        prefixes: a token once rejected has no mass left. ValueError for a token that its law cannot have given, or siblings of no token.
        """
        tree = cls()
        tree._add(proposal, drawn, {})
        return tree

    def children(self, node: int) -> list[int]:
        """Return the candidates for the place behind a node, in the order of their test."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def ranks(self, path: Seq[int]) -> list[int]:
        """Return for each node of a path from the root which of the candidates of its place it is."""
        return [self.children(self.parents[node]).index(node) for node in path]

    def _add(self, proposal: Proposal, drawn: bool, point_masses: dict[tuple[int, int], int]) -> None:
        if len(proposal.siblings) > len(proposal.tokens):
            raise ValueError(f"siblings of {len(proposal.siblings)} places behind a spine of {len(proposal.tokens)} tokens")
        law: Law | None = proposal.probs if drawn else None
        places = [*range(len(proposal.tokens)), *(place for place, siblings in enumerate(proposal.siblings) for _ in siblings)]
        tokens = [*proposal.tokens, *(token for siblings in proposal.siblings for token in siblings)]
        chances = [] if law is None else law.of(tokens, places).tolist()
        spine = [ROOT]
        for number, (place, token) in enumerate(zip(places, tokens, strict=True)):
            node = point_masses.get((spine[place], token)) if law is None else None
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(spine[place])
                self.laws.append(None if law is None else (law, place, chances[number]))
                if law is None:
                    point_masses[spine[place], token] = node
            if number < len(proposal.tokens):
                spine.append(node)
        self.depth = max(self.depth, len(proposal.tokens))
        for other in proposal.others:
            self._add(other, drawn, point_masses)
