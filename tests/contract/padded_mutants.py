"""Deliberate faults in the attention of padded rows and cut contexts, as in ``tests.contract.mutants``."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.engines import padded
from backend.engines.padded import Padded
from tests.contract import padded_checks
from tests.contract.mutants import MUTANTS, Patch, killed_by, wrap

__all__ = ["MUTANTS"]


def afterwards(patch: Patch, change) -> None:
    """Change every pass's attention once it has been made."""

    def made(original, attention, *arguments, **options):
        original(attention, *arguments, **options)
        change(attention)

    wrap(patch, Padded, "__init__", made)


@killed_by(padded_checks.greedy_texts_of_cut_contexts_are_those_of_plain_decoding)
def weigh_all_pieces_alike(patch: Patch) -> None:
    wrap(patch, Padded, "_merged", lambda original, attention, outputs, sums: original(attention, outputs, torch.zeros_like(sums)))


@killed_by(padded_checks.greedy_texts_of_cut_contexts_are_those_of_plain_decoding)
def weigh_pieces_by_their_greatest_score(patch: Patch) -> None:
    def merged(original, attention, outputs, sums):
        return original(attention, outputs, sums.amax(-1, keepdim=True).expand_as(sums))

    wrap(patch, Padded, "_merged", merged)


@killed_by(padded_checks.greedy_texts_of_cut_contexts_are_those_of_plain_decoding)
def leave_out_the_last_piece(patch: Patch) -> None:
    def merged(original, attention, outputs, sums):
        last = torch.cat([attention._owner[1:] != attention._owner[:-1], torch.tensor([True])])
        alone = attention._owner.bincount()[attention._owner] == 1
        return original(attention, outputs, sums.masked_fill((last & ~alone)[:, None, None], padded.FAR))

    wrap(patch, Padded, "_merged", merged)


@killed_by(padded_checks.greedy_texts_of_padded_rows_are_those_of_plain_decoding)
def read_what_lies_behind_a_context(patch: Patch) -> None:
    def change(attention):
        attention._tiles = [replace(tile, unused=tile.unused[:0]) for tile in attention._tiles]

    afterwards(patch, change)


@killed_by(padded_checks.greedy_texts_of_padded_rows_are_those_of_plain_decoding)
def let_a_padded_row_see_the_next_proposed_token(patch: Patch) -> None:
    def change(attention):
        attention._tiles = [replace(tile, mask=tile.mask.roll(1, -1)) for tile in attention._tiles]

    afterwards(patch, change)


@killed_by(padded_checks.greedy_texts_of_cut_contexts_are_those_of_plain_decoding)
def let_a_padded_leaf_see_its_siblings(patch: Patch) -> None:
    patch.setattr(padded, "ancestors", lambda parents: torch.ones(len(parents), len(parents), dtype=torch.bool).tril())


@killed_by(padded_checks.kv_of_cut_contexts_is_that_of_a_fresh_prefill)
def take_the_blocks_of_the_first_piece_for_all(patch: Patch) -> None:
    wrap(patch, padded, "_blocks", lambda original, chunks, owner, begin, width: original(chunks, owner, 0 * begin, width))


@killed_by(padded_checks.outcomes_say_how_contexts_were_cut)
def forget_how_contexts_were_cut(patch: Patch) -> None:
    from backend.step_log import StepLog

    wrap(patch, StepLog, "outcome", lambda original, log: (setattr(log, "piece_tokens", None), original(log))[1])
