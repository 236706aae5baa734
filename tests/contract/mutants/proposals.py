"""Faults of the tree in a pass, of proposals and of trims."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backend.engines.stepping import engine as stepping
from backend.engines.stepping.chunks import PassChunk
from backend.engines.torch import decoder
from backend.sequence import Proposal
from backend.speculation.drafting import Drafting
from backend.speculation.step_log import StepLog
from tests.contract import checks
from tests.contract.mutants.planting import Patch, killed_by, wrap
from tests.contract.scenarios import BUSY

# -- the tree in a pass


@killed_by(checks.texts, BUSY)
def let_a_node_see_its_siblings(patch: Patch) -> None:
    def ancestors(original, parents):
        seen = original(parents)
        for node, parent in enumerate(parents):
            seen[node] |= np.array([other == parent for other in parents])
        return seen

    wrap(patch, decoder, "ancestors", ancestors)


@killed_by(checks.texts, BUSY)
def let_a_node_see_all_before_it(patch: Patch) -> None:
    def ancestors(parents):
        return np.tril(np.ones((len(parents), len(parents)), bool))

    patch.setattr(decoder, "ancestors", ancestors)


@killed_by(checks.texts, BUSY)
def let_a_row_see_the_next_proposed_token(patch: Patch) -> None:
    def attend(original, spec, queries, keys, values, mask, sinks):
        shifted = mask if mask is None else mask.roll(-1, 0)
        return original(spec, queries, keys, values, shifted, sinks)

    wrap(patch, decoder, "attend", attend)


def move_nodes(patch: Patch, positions: Callable) -> None:
    original = vars(PassChunk)["positions"].fget

    def moved(chunk):
        first = len(chunk.tokens) - len(chunk.parents)
        return positions(original(chunk), first, chunk.parents)

    patch.setattr(PassChunk, "positions", property(moved))


@killed_by(checks.texts, BUSY)
def put_leaves_one_position_too_far(patch: Patch) -> None:
    def positions(right, first, parents):
        beyond = [row > first and row - first not in parents for row in range(len(right))]
        return [at + far for at, far in zip(right, beyond, strict=True)]

    move_nodes(patch, positions)


@killed_by(checks.kv_is_fresh, BUSY)
def give_nodes_the_positions_of_their_rows(patch: Patch) -> None:
    move_nodes(patch, lambda right, first, parents: [*range(right[0], right[0] + len(right))])


@killed_by(checks.kv_is_fresh, BUSY)
def count_positions_of_a_run_one_too_high(patch: Patch) -> None:
    def chunk(original, tokens, start, *others, **options):
        return original(tokens, start + (len(tokens) > 2), *others, **options)

    wrap(patch, stepping, "PassChunk", chunk)


# -- proposals and trims


@killed_by(checks.counts, BUSY)
def cut_a_parent_before_its_child(patch: Patch) -> None:
    """The last nodes of a tree are verified, not the best: each gets what is left of its path."""

    def first(original, proposal, nodes):
        if nodes >= len(proposal):
            return proposal
        away = len(proposal) - nodes
        parents = [max(parent - away, -1) for parent in proposal.parents[away:]]
        return Proposal(proposal.draft, proposal.tokens[away:], parents, proposal.confidence[away:])

    wrap(patch, Proposal, "first", first)


@killed_by(checks.counts, BUSY)
def verify_all_that_was_proposed(patch: Patch) -> None:
    """Costs time, never exactness: a trim that is not heard."""
    wrap(
        patch,
        Drafting,
        "choose",
        lambda original, drafting, drafted, nodes: original(drafting, drafted, 99),
    )


@killed_by(checks.counts, BUSY)
def forget_what_was_cut(patch: Patch) -> None:
    """Outcomes tell of verified nodes only."""

    def record(original, log, request, drafted, verified, emitted, **options):
        cut = (drafted and drafted.first(verified)) or None
        original(log, request, cut, verified, emitted, **options)

    wrap(patch, StepLog, "record", record)


@killed_by(checks.counts, BUSY)
def count_all_emitted_but_the_last_as_accepted(patch: Patch) -> None:
    """The last may be a node that was not verified."""

    def record(original, log, *arguments, **options):
        original(log, *arguments, **options)
        row = list(log.rows[-1])
        row[3] = min(row[2], row[4] - 1)
        log.rows[-1] = tuple(row)

    wrap(patch, StepLog, "record", record)
