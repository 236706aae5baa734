"""The exactness suite of a target that pads its rows to the longest context, and cuts contexts into pieces."""

from __future__ import annotations

from dataclasses import replace

from tests.contract import checks
from tests.contract.deployment import Deployment
from tests.contract.scenarios import MIXED, TREE_SCRIPT, UNEVEN, serve

CUT = replace(UNEVEN, pieces=(16,))
TILED = replace(UNEVEN, pieces=(), attention="tiled")
CUT_MIXED = replace(
    MIXED, asks=tuple(replace(ask, prompt=5 + n % 4) for n, ask in enumerate(MIXED.asks)), script=TREE_SCRIPT, pieces=(16, 32)
)


def greedy_texts_of_padded_rows_are_those_of_plain_decoding() -> None:
    checks.texts_are_those_of_plain_decoding(replace(UNEVEN, pieces=(0,)))


def greedy_texts_of_tiled_rows_are_those_of_plain_decoding() -> None:
    checks.texts_are_those_of_plain_decoding(TILED)


def kv_of_tiled_rows_is_that_of_a_fresh_prefill() -> None:
    checks.kv_is_that_of_a_fresh_prefill(TILED)


def greedy_texts_of_cut_contexts_are_those_of_plain_decoding() -> None:
    checks.texts_are_those_of_plain_decoding(CUT)


def texts_are_those_of_plain_decoding_however_contexts_are_cut() -> None:
    checks.texts_are_those_of_plain_decoding(UNEVEN)


def texts_of_cut_contexts_with_options_are_those_of_plain_decoding() -> None:
    checks.texts_are_those_of_plain_decoding(CUT_MIXED)


def log_probs_of_cut_contexts_are_those_of_the_text() -> None:
    checks.log_probs_are_those_of_the_text(CUT_MIXED)


def kv_of_cut_contexts_is_that_of_a_fresh_prefill() -> None:
    checks.kv_is_that_of_a_fresh_prefill(CUT)


def outcomes_say_how_contexts_were_cut() -> None:
    """By them the planner judges the time of a step."""
    planned: list[int | None] = []

    def watch(deployment: Deployment) -> None:
        outcomes = deployment.policy.outcomes
        if len(outcomes) > len(planned):
            planned.append(deployment.policy.pieces[(deployment.loop.policy_state - 1) % len(deployment.policy.pieces)] or None)
            assert (outcomes[-1].shape.piece_tokens if outcomes[-1].shape else None) == planned[-1]

    serve(UNEVEN, watch)
    assert None in planned
    assert 16 in planned


SUITE = [
    greedy_texts_of_padded_rows_are_those_of_plain_decoding,
    greedy_texts_of_tiled_rows_are_those_of_plain_decoding,
    kv_of_tiled_rows_is_that_of_a_fresh_prefill,
    greedy_texts_of_cut_contexts_are_those_of_plain_decoding,
    texts_are_those_of_plain_decoding_however_contexts_are_cut,
    texts_of_cut_contexts_with_options_are_those_of_plain_decoding,
    log_probs_of_cut_contexts_are_those_of_the_text,
    kv_of_cut_contexts_is_that_of_a_fresh_prefill,
    outcomes_say_how_contexts_were_cut,
]
