"""Guided decoding under speculation: texts are those of plain decoding under the same grammar, held against a hand-written automaton."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest

from backend.engines import processing
from backend.guides import Grammars
from backend.request import SamplingParams
from tests.contract import checks
from tests.contract.deployment import VOCAB
from tests.contract.scenarios import DRAFTS, PROMPTS, SCRIPT, TREE_SCRIPT, Ask, Scenario, reference, serve

END = VOCAB - 1
PATTERN = "(a[b-h]*i|j[k-p]+q)+"
STATES = {0: "aj", 1: "bcdefghi", 2: "klmnop", 3: "klmnopq"}


def automaton(text: str) -> int:
    """Return the state behind a text of ``PATTERN``: between two groups (0), in the first kind (1), in the second (2, then 3)."""
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

    def masks(self, output, proposed):
        text = "".join(chr(ord("a") + token) for token in output)
        allowed = [ord(letter) - ord("a") for letter in STATES[automaton(text)]]
        mask = np.zeros(VOCAB, bool)
        mask[allowed + ([END] if text and automaton(text) == 0 else [])] = True
        return [mask]


def guide():
    return Grammars(Letters()).guide("regex", PATTERN, frozenset({END}))


def options(**more):
    return SamplingParams(end_ids=(END,), guide=guide(), log_probs=True, **more)


KINDS = (
    options(),
    options(min_tokens=6, presence_penalty=0.4),
    options(bad_words=((8,), (16,)), bias=((END, 3.0),)),
    options(temperature=0.9, seed=5, coupled=True),
    options(temperature=1.3, top_p=0.9, seed=6, coupled=True, frequency_penalty=0.3),
    options(temperature=0.8, seed=7),
)
SCENARIO = Scenario(tuple(Ask(n % 6, 16, n // 4, sampling=s) for n, s in enumerate([*KINDS, *KINDS])), SCRIPT, max_active=6)


@pytest.mark.parametrize("script", [SCRIPT, TREE_SCRIPT, ((6, 4),), ((0, 4), (4, 3))], ids=["chains", "trees", "oracle", "twin, lookup"])
def test_texts_are_those_of_plain_decoding_under_the_grammar(script):
    deployment, sessions = serve(replace(SCENARIO, script=script))
    checks.texts_are(SCENARIO, sessions)
    for ask, session in zip(SCENARIO.asks, sessions, strict=True):
        prompt, output = PROMPTS[ask.prompt], session.sequence.tokens[len(PROMPTS[ask.prompt]) :]
        automaton("".join(chr(ord("a") + token) for token in output if token != END))
        if ask.sampling.greedy:
            by_the_book = replace(ask.sampling, guide=ByTheBook())
            assert session.sequence.tokens == reference().text(prompt, ask.max_tokens, by_the_book)
    assert sum(int(outcome.accepted.sum()) for outcome in deployment.policy.outcomes) > 20


def test_log_probabilities_are_those_of_the_law_under_the_grammar():
    checks.log_probs_are_those_of_the_text(SCENARIO)


def test_what_lookup_proposes_is_cut_where_the_grammar_ends_it():
    deployment, _ = serve(replace(SCENARIO, script=((DRAFTS.index("lookup"), 4),)))
    for sequence, tokens, proposal in deployment.drafting.recorded:
        allowed = guide().allowed(tokens[sequence.prompt_tokens :], proposal.tokens)
        assert 0 < len(proposal.tokens) == allowed
    assert deployment.drafting.recorded


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True], ids=["sampled", "plan-invariant"])
def test_the_first_three_tokens_follow_the_target_s_law_under_the_grammar(coupled):
    tokens = Letters(
        checks.LAW_VOCAB, (*(bytes([ord("a") + n]) for n in range(checks.LAW_VOCAB - 1)), b""), frozenset({checks.LAW_VOCAB - 1})
    )
    made = Grammars(tokens).guide("regex", "(a[bc]|b[a-c]*d|c)+", tokens.end_ids)
    checks.texts_follow_the_target_s_law(replace(checks.WIDE, guide=made, coupled=coupled, end_ids=tuple(tokens.end_ids)))


FAULTS = {
    "no mask behind the first row": lambda logits, masks, columns: WHOLE(logits, masks[:1], columns),
    "each row has the next one's mask": lambda logits, masks, columns: WHOLE(logits, masks[1:] or masks, columns),
}
WHOLE = processing._guide


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mask_would_be_noticed(fault):
    with patch.object(processing, "_guide", FAULTS[fault]), pytest.raises((AssertionError, IndexError)):
        test_texts_are_those_of_plain_decoding_under_the_grammar(SCRIPT)
