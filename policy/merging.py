"""Several drafts' chains verified as one tree: what it emits, when it pays, and which tokens may share a node.

Chains branch at the root and are tested in order: chain i + 1 is looked at where the first token of chain i was rejected. With hazards
c_ij, the chance of position j of chain i given that it was reached (so c_i1 is given that the first tokens of all chains before were
rejected), a step emits

    E = 1 + sum_i prod_{i' < i} (1 - c_i'1) sum_{j <= k_i} c_i1 .. c_ij

tokens by the multi-step rule of SpecInfer (arXiv 2305.09781). Where point-mass chains share tokens the tree emits at least that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .plan import FloatArray, IntArray


class Tree(NamedTuple):
    """A tree to verify: ``token[m]``, and ``parent[m]`` the node that it continues (-1: the sequence itself), parents first."""

    token: IntArray
    parent: IntArray


def merged_tokens(chains: Sequence[FloatArray]) -> float:
    """Return the expected emitted tokens of chains with the given hazards (float64[k_i] each), in the order of their test."""
    tokens, missed = 1.0, 1.0
    for hazard in chains:
        if len(hazard):
            tokens += missed * float(np.cumprod(hazard).sum())
            missed *= 1.0 - float(hazard[0])
    return tokens


def second_worth(first: FloatArray, rescue: FloatArray, second: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the weighted tokens that each position of a second chain adds to a row's first one, float64[n, K].

    ``first[n]`` is the hazard of the first chain's first token, ``rescue[n]`` the second's where that was rejected, ``second[n, K]`` the
    second draft's hazards, of which those from the second position on count as they are.
    """
    chain = second.copy()
    chain[:, :1] = (weight * (1.0 - first) * rescue)[:, None]
    worth: FloatArray = np.cumprod(chain, axis=1)
    return worth


def merge(proposals: Sequence[Sequence[int]], drawn: Sequence[bool]) -> Tree:
    """Return the proposals as one tree, in their order.

    ``drawn[i]``: chain i was drawn from a law and is judged by it (rejection sampling). Its tokens have nodes of their own even where
    another chain has the same: each draw is tested against the law that is left by the ones before, and to drop a second draw because
    it equals the first would change the law of what is emitted. Point-mass chains (greedy, lookup, plan-invariant) share equal prefixes:
    a token once rejected has no mass left, so its second test could only fail.
    """
    tokens: list[int] = []
    parents: list[int] = []
    shared: dict[tuple[int, int], int] = {}
    for proposal, own in zip(proposals, drawn, strict=True):
        node = -1
        for token in proposal:
            twin = None if own else shared.get((node, token))
            if twin is None:
                tokens.append(token)
                parents.append(node)
                twin = len(tokens) - 1
            if not own:
                shared[node, token] = twin
            node = twin
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64))
