"""A proposal while it grows: from place to place along a draft's likeliest path, its other
candidates next to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.sequence import ROOT, Proposal

CANDIDATES = 4
"""Tokens of a draft's forward that may become nodes; a fifth is hardly ever worth one."""


@dataclass(slots=True)
class Spine:
    """A proposal in the making: its likeliest path, and side branches."""

    tokens: list[int] = field(default_factory=list)
    """The likeliest path so far."""
    nodes: list[tuple[int, int, float]] = field(default_factory=list)
    """All nodes: token, parent, confidence of the path."""
    last: int = ROOT
    """The node that the likeliest path ends in."""
    is_over: bool = False

    def extend(self, candidates: Iterable[tuple[int, float]]) -> None:
        """Go on by the first of these (token, probability), best first; none of them ends it."""
        parent, first = self.last, len(self.nodes)
        path = self.nodes[parent][2] if parent != ROOT else 1.0
        self.nodes += [(token, parent, path * p) for token, p in candidates]
        self.is_over = first == len(self.nodes)
        if not self.is_over:
            self.last = first
            self.tokens.append(self.nodes[first][0])

    def proposal(self, draft: str, nodes: int) -> Proposal:
        """Return at most this many of the best nodes."""
        return Proposal.best(draft, self.nodes, nodes)
