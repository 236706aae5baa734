"""Deliberate faults in the attention of padded rows and cut contexts, as in
``tests.contract.mutants``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.engines.torch import padded
from backend.engines.torch.padded import Padded
from backend.sequence import BLOCK_TOKENS
from tests.contract import checks
from tests.contract.mutants import MUTANTS, Patch, killed_by, wrap
from tests.contract.scenarios import UNEVEN, greedily

__all__ = ["MUTANTS"]

PADDED, CUT = greedily(replace(UNEVEN, pieces=(0,))), replace(UNEVEN, pieces=(BLOCK_TOKENS,))


def afterwards(patch: Patch, change) -> None:
    """Change every pass's attention once it has been made."""

    def made(original, attention, *arguments, **options):
        original(attention, *arguments, **options)
        change(attention)

    wrap(patch, Padded, "__init__", made)


@killed_by(checks.texts, CUT)
def weigh_all_pieces_alike(patch: Patch) -> None:
    wrap(
        patch,
        Padded,
        "_merged",
        lambda original, attention, outputs, sums: original(
            attention, outputs, torch.zeros_like(sums)
        ),
    )


@killed_by(checks.texts, CUT)
def weigh_pieces_by_their_greatest_score(patch: Patch) -> None:
    def merged(original, attention, outputs, sums):
        return original(attention, outputs, sums.amax(-1, keepdim=True).expand_as(sums))

    wrap(patch, Padded, "_merged", merged)


@killed_by(checks.texts, CUT)
def leave_out_the_last_piece(patch: Patch) -> None:
    def merged(original, attention, outputs, sums):
        last = torch.cat([attention._owner[1:] != attention._owner[:-1], torch.tensor([True])])
        alone = attention._owner.bincount()[attention._owner] == 1
        return original(
            attention, outputs, sums.masked_fill((last & ~alone)[:, None, None], padded.FAR)
        )

    wrap(patch, Padded, "_merged", merged)


@killed_by(checks.texts, PADDED)
def read_what_lies_behind_a_context(patch: Patch) -> None:
    def change(attention):
        attention._unused = attention._unused[:0]

    afterwards(patch, change)


@killed_by(checks.texts, PADDED)
def let_a_padded_row_see_the_next_proposed_token(patch: Patch) -> None:
    def change(attention):
        attention._mask = attention._mask.roll(1, -1)

    afterwards(patch, change)


@killed_by(checks.texts, CUT)
def let_a_padded_leaf_see_its_siblings(patch: Patch) -> None:
    patch.setattr(
        padded,
        "ancestors",
        lambda parents: torch.ones(len(parents), len(parents), dtype=torch.bool).tril(),
    )


@killed_by(checks.kv_is_fresh, CUT)
def take_the_blocks_of_the_first_piece_for_all(patch: Patch) -> None:
    wrap(
        patch,
        padded,
        "_blocks",
        lambda original, chunks, owner, begin, width: original(chunks, owner, 0 * begin, width),
    )
