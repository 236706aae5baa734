"""Guided decoding under speculation: texts are those of plain decoding under the same grammar,
checked by a hand-written automaton.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest

from backend.sampling import processing
from backend.sampling.guides import Grammars
from tests.contract import checks
from tests.contract.guided import END, SCENARIO, ByTheBook, Letters, automaton, guide
from tests.contract.scenarios import DRAFTS, PROMPTS, SCRIPT, reference


@pytest.mark.parametrize(
    "script", [SCRIPT, ((6, 4),), ((0, 4), (4, 3))], ids=["trees", "oracle", "twin, lookup"]
)
def test_texts_are_those_of_plain_decoding_under_the_grammar(script):
    scenario = replace(SCENARIO, script=script)
    served = checks.exact(scenario, checks.texts, checks.log_probs, checks.counts)
    for ask, session in zip(SCENARIO.asks, served.sessions, strict=True):
        prompt, output = PROMPTS[ask.prompt], session.sequence.tokens[len(PROMPTS[ask.prompt]) :]
        automaton("".join(chr(ord("a") + token) for token in output if token != END))
        by_the_book = replace(ask.sampling, guide=ByTheBook())
        assert session.sequence.tokens == reference().text(prompt, ask.max_tokens, by_the_book)
    assert (
        sum(int(outcome.rows.accepted.sum()) for outcome in served.deployment.policy.outcomes) > 20
    )


def test_what_lookup_proposes_is_cut_where_the_grammar_ends_it():
    lookup = replace(SCENARIO, script=((DRAFTS.index("lookup"), 4),))
    recorded = [
        row for row in checks.exact(lookup).deployment.drafting.recorded if row.proposals.drafted
    ]
    for sequence, tokens, _, row in recorded:
        for path in checks.paths(row.drafted):
            assert guide().count_allowed(tokens[sequence.prompt_tokens :], path) == len(path)
    assert recorded


@pytest.mark.slow
def test_the_first_three_tokens_follow_the_target_s_distribution_under_the_grammar():
    tokens = Letters(
        checks.SAMPLED_VOCAB,
        (*(bytes([ord("a") + n]) for n in range(checks.SAMPLED_VOCAB - 1)), b""),
        checks.SAMPLED_VOCAB - 1,
        frozenset({checks.SAMPLED_VOCAB - 1}),
    )
    made = Grammars(tokens).guide("regex", "(a[bc]|b[a-c]*d|c)+", tokens.end_ids)
    checks.texts_follow_the_target_s_distribution(
        replace(checks.WIDE, guide=made, end_ids=tuple(tokens.end_ids))
    )


def test_a_wrong_mask_would_be_noticed():
    """That of the place before."""
    forbid, masks = processing._forbid, []

    def forbid_late(logits, mask, columns):
        masks.append(mask)
        forbid(logits, masks[-2:][0], columns)

    with patch.object(processing, "_forbid", forbid_late), pytest.raises(AssertionError):
        test_texts_are_those_of_plain_decoding_under_the_grammar(SCRIPT)
