"""Deliberate faults in the verification of trees, as in ``tests.contract.mutants``."""

from __future__ import annotations

from dataclasses import replace

import torch
from backend.engines.trees import Tree

from backend.drafting import Drafting
from backend.engines import llama, torch_engine, verification
from backend.engines.chunks import Chunk
from backend.engines.torch_engine import TorchEngine
from backend.randomness import Purpose
from tests.contract import tree_checks
from tests.contract.mutants import MUTANTS, Patch, killed_by, wrap

# -- the pass


@killed_by(tree_checks.greedy_texts_of_trees_are_those_of_plain_decoding)
def let_a_leaf_see_its_siblings(patch: Patch) -> None:
    def ancestors(original, parents):
        seen = original(parents)
        for node, parent in enumerate(parents):
            seen[node] |= torch.tensor([other == parent for other in parents])
        return seen

    wrap(patch, llama, "ancestors", ancestors)


@killed_by(tree_checks.greedy_texts_of_trees_are_those_of_plain_decoding)
def let_a_leaf_see_the_whole_spine(patch: Patch) -> None:
    patch.setattr(llama, "ancestors", lambda parents: torch.ones(len(parents), len(parents), dtype=torch.bool).tril())


def move_leaves(patch: Patch, positions) -> None:
    original = Chunk.positions.fget

    def moved(chunk):
        first = len(chunk.tokens) - len(chunk.parents)
        return positions(original(chunk), first, chunk.parents)

    patch.setattr(Chunk, "positions", property(moved))


@killed_by(tree_checks.greedy_texts_of_trees_are_those_of_plain_decoding)
def put_leaves_one_position_too_far(patch: Patch) -> None:
    def positions(right, first, parents):
        return [at + (row >= first and row - first not in parents and row - first > 0) for row, at in enumerate(right)]

    move_leaves(patch, positions)


@killed_by(tree_checks.kv_of_trees_is_that_of_a_fresh_prefill)
def give_nodes_the_positions_of_their_rows(patch: Patch) -> None:
    move_leaves(patch, lambda right, first, parents: list(range(right[0], right[0] + len(right))))


# -- KV


@killed_by(tree_checks.kv_of_trees_is_that_of_a_fresh_prefill)
def leave_the_kv_of_the_spine_where_a_leaf_was_accepted(patch: Patch) -> None:
    patch.setattr(llama.Llama, "move", lambda model, sources, targets: None)


@killed_by(tree_checks.the_target_lacks_one_token_behind_a_tree)
def forget_the_kv_of_accepted_leaves(patch: Patch) -> None:
    """Costs time, never exactness."""
    wrap(
        patch, TorchEngine, "_compact", lambda original, engine, jobs: original(engine, [j for j in jobs if j.path[-1] == len(j.path) - 1])
    )


@killed_by(tree_checks.kv_of_trees_is_that_of_a_fresh_prefill)
def keep_the_kv_of_all_nodes(patch: Patch) -> None:
    """As if a tree were the chain of its nodes."""

    def compact(original, engine, jobs):
        for job in jobs:
            job.cache.ran += [job.request.tokens[node] for node in job.path]

    wrap(patch, TorchEngine, "_compact", compact)


# -- the rule


@killed_by(tree_checks.a_tree_of_two_drafts_leaves_the_target_s_law_exactly)
def leave_nothing_out_of_the_law_of_the_next_candidate(patch: Patch) -> None:
    patch.setattr(verification, "residual", lambda target, token, law, row: target)


@killed_by(tree_checks.texts_sampled_with_siblings_follow_the_target_s_law)
def test_siblings_against_the_whole_law(patch: Patch) -> None:
    """The same from its effect on texts."""
    leave_nothing_out_of_the_law_of_the_next_candidate(patch)


@killed_by(tree_checks.a_tree_of_two_drafts_leaves_the_target_s_law_exactly)
def merge_equal_siblings(patch: Patch) -> None:
    def children(original, tree, node):
        found = {}
        for child in original(tree, node):
            found.setdefault(tree.tokens[child], child)
        return list(found.values())

    wrap(patch, Tree, "children", children)


@killed_by(tree_checks.a_tree_of_two_drafts_leaves_the_target_s_law_exactly)
def test_the_likeliest_candidate_first(patch: Patch) -> None:
    """An order that depends on the target's law."""

    def test(original, law, here, tree, candidates):
        return original(law, here, tree, sorted(candidates, key=lambda node: -float(law[tree.tokens[node]])))

    wrap(patch, verification, "_test", test)


@killed_by(tree_checks.a_tree_of_two_drafts_leaves_the_target_s_law_exactly)
def judge_a_second_draft_by_the_first_one_s_law(patch: Patch) -> None:
    def add(original, tree, proposal, drawn, point_masses):
        original(
            tree, replace(proposal, others=tuple(replace(other, probs=proposal.probs) for other in proposal.others)), drawn, point_masses
        )

    wrap(patch, Tree, "_add", add)


@killed_by(tree_checks.a_tree_of_point_masses_leaves_the_target_s_law_exactly)
def judge_a_greedy_draft_s_second_choice_as_certain(patch: Patch) -> None:
    def test(original, law, here, tree, candidates):
        for node in candidates[1:]:
            if tree.laws[node] is None and float(law[tree.tokens[node]]) > 0.1:
                return node, tree.tokens[node]
        return original(law, here, tree, candidates)

    wrap(patch, verification, "_test", test)


@killed_by(tree_checks.texts_sampled_with_siblings_follow_the_target_s_law)
def keep_only_siblings_unlike_the_spine(patch: Patch) -> None:
    """A choice of candidates that looks at what was drawn (trap T2)."""

    def propose(original, drafting, *arguments):
        proposals = original(drafting, *arguments)
        for row in proposals.values():
            if row.chosen:
                kept = [[s for s in more if s != token] for token, more in zip(row.chosen.tokens, row.chosen.siblings, strict=False)]
                row.chosen = replace(row.chosen, siblings=kept)
        return proposals

    wrap(patch, Drafting, "propose", propose)


# -- randomness and counts


def without_lanes(patch: Patch, of: Purpose) -> None:
    def uniforms(original, seed, position, purpose, attempt, lane=0):
        return original(seed, position, purpose, attempt, [0 for _ in lane] if purpose is of and not isinstance(lane, int) else lane)

    wrap(patch, verification, "uniforms", uniforms)


@killed_by(tree_checks.no_number_of_a_tree_decides_twice)
def test_every_candidate_with_the_same_number(patch: Patch) -> None:
    without_lanes(patch, Purpose.ACCEPT)


@killed_by(tree_checks.no_number_of_a_tree_decides_twice)
def draw_every_sibling_with_the_same_number(patch: Patch) -> None:
    without_lanes(patch, Purpose.PROPOSE)


@killed_by(tree_checks.no_number_of_a_tree_decides_twice)
def let_drafts_share_their_numbers(patch: Patch) -> None:
    patch.setattr(torch_engine, "draft_lane", lambda draft: 0)


@killed_by(tree_checks.second_choices_are_accepted_and_counted)
def count_siblings_as_the_spine(patch: Patch) -> None:
    def followed(original, tree, path):
        along, _ = original(tree, path)
        return [len(path), *along[1:]], 0

    wrap(patch, Tree, "followed", followed)


__all__ = ["MUTANTS"]
