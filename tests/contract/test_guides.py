"""Guided decoding under speculation: texts are those of plain decoding under the same grammar, held
against a hand-written automaton.
"""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest

from backend.request import SamplingParams
from backend.sampling import processing
from backend.sampling.guides import Grammars
from tests.contract import checks
from tests.contract.deployment import VOCAB
from tests.contract.scenarios import DRAFTS, PROMPTS, SCRIPT, Ask, Scenario, reference

END = VOCAB - 1
PATTERN = "(a[b-h]*i|j[k-p]+q)+"
STATES = {0: "aj", 1: "bcdefghi", 2: "klmnop", 3: "klmnopq"}


def automaton(text: str) -> int:
    """Return the state behind a text of ``PATTERN``: between two groups (0), in the first kind (1),
    in the second (2, then 3).
    """
    state = 0
    for letter in text:
        assert letter in STATES[state], f"{text} is none of {PATTERN}"
        state = {"a": 1, "i": 0, "j": 2, "q": 0}.get(letter, 3 if state in (2, 3) else 1)
    return state


@dataclass(frozen=True)
class Letters:
    """A tokenizer of single letters and one end token."""

    vocab_size: int = VOCAB
    token_bytes: tuple = (*(bytes([ord("a") + n]) for n in range(VOCAB - 1)), b"")
    end_ids: frozenset = frozenset({END})

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) - ord("a") for letter in text]


class ByTheBook:
    """The same grammar from the automaton."""

    failure = None

    def mask(self, output):
        text = "".join(chr(ord("a") + token) for token in output)
        allowed = [ord(letter) - ord("a") for letter in STATES[automaton(text)]]
        mask = np.zeros(VOCAB, bool)
        mask[allowed + ([END] if text and automaton(text) == 0 else [])] = True
        return mask


def guide():
    return Grammars(Letters()).guide("regex", PATTERN, frozenset({END}))


def options(**more):
    return SamplingParams(end_ids=(END,), guide=guide(), log_probs=True, **more)


KINDS = (
    options(),
    options(min_tokens=6, presence_penalty=0.4),
    options(bad_words=((8,), (16,)), bias=((END, 3.0),)),
    options(temperature=0.9, seed=5),
    options(temperature=1.3, top_p=0.9, seed=6, frequency_penalty=0.3),
    options(temperature=0.8, seed=7),
)
SCENARIO = Scenario(
    tuple(Ask(n % 6, 16, n // 4, sampling=s) for n, s in enumerate([*KINDS, *KINDS])), max_active=6
)


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
            assert guide().allowed(tokens[sequence.prompt_tokens :], path) == len(path)
    assert recorded


@pytest.mark.slow
def test_the_first_three_tokens_follow_the_target_s_law_under_the_grammar():
    tokens = Letters(
        checks.LAW_VOCAB,
        (*(bytes([ord("a") + n]) for n in range(checks.LAW_VOCAB - 1)), b""),
        frozenset({checks.LAW_VOCAB - 1}),
    )
    made = Grammars(tokens).guide("regex", "(a[bc]|b[a-c]*d|c)+", tokens.end_ids)
    checks.texts_follow_the_target_s_law(
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
