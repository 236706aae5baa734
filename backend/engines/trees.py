"""A proposal as a tree of nodes: what a pass runs and a verification walks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from backend.engines.laws import Law
from backend.ports import Proposal

ROOT = -1
"""The parent of the nodes right behind the text."""


@dataclass(slots=True)
class Tree:
    """``tokens[n]`` continues node ``parents[n]``, an earlier one or ``ROOT``; a node's children are tested in the order of their numbers.

    ``laws[n]`` are the law that the token was drawn from, its row, and its probability there; None: a point mass. ``spines`` are the
    nodes of each draft's spine, ``siblings`` those of the first draft's further candidates, place by place.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[tuple[Law, int, float] | None] = field(default_factory=list)
    spines: list[list[int]] = field(default_factory=list)
    siblings: list[list[int]] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """The most tokens that could be accepted."""
        return max(map(len, self.spines))

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

    def followed(self, path: Seq[int]) -> tuple[list[int], int]:
        """Return ``Completion.along`` and ``Completion.rank`` of a path of nodes from the root."""
        along = [leading(node == spine_node for node, spine_node in zip(path, spine, strict=False)) for spine in self.spines]
        end = along[0]
        rest = self.siblings[end] if len(path) > end and end < len(self.siblings) else []
        return along, rest.index(path[end]) + 2 if rest and path[end] in rest else 0

    def _add(self, proposal: Proposal, drawn: bool, point_masses: dict[tuple[int, int], int]) -> None:
        if len(proposal.siblings) > len(proposal.tokens):
            raise ValueError(f"siblings of {len(proposal.siblings)} places behind a spine of {len(proposal.tokens)} tokens")
        law: Law | None = proposal.probs if drawn else None
        places = [*range(len(proposal.tokens)), *(place for place, siblings in enumerate(proposal.siblings) for _ in siblings)]
        tokens = [*proposal.tokens, *(token for siblings in proposal.siblings for token in siblings)]
        chances = [] if law is None else law.of(tokens, places).tolist()
        spine = [ROOT]
        siblings: list[list[int]] = [[] for _ in proposal.siblings]
        for number, (place, token) in enumerate(zip(places, tokens, strict=True)):
            node = point_masses.get((spine[place], token)) if law is None else None
            if node is None:
                node = self._append(token, spine[place], None if law is None else (law, place, chances[number]))
            if law is None:
                point_masses[spine[place], token] = node
            (spine if number < len(proposal.tokens) else siblings[place]).append(node)
        self.spines.append(spine[1:])
        if len(self.spines) == 1:
            self.siblings = siblings
        for other in proposal.others:
            self._add(other, drawn, point_masses)

    def _append(self, token: int, parent: int, law: tuple[Law, int, float] | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        return len(self.tokens) - 1


def leading(flags: Iterable[bool]) -> int:
    """Return how many flags are set before the first that is not."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
