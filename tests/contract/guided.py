"""A grammar for tiny models, a hand-written automaton of it, and requests that follow it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from backend.request import Guide, SamplingParams
from backend.sampling.guides import Grammars
from backend.tokenizer import Tokenizer
from tests.contract.deployment import VOCAB
from tests.contract.scenarios import Ask, Scenario

END = VOCAB - 1
PATTERN = "(a[b-h]*i|j[k-p]+q)+"
STATES = {0: "aj", 1: "bcdefghi", 2: "klmnop", 3: "klmnopq"}


def automaton(text: str) -> int:
    """Return the state after a text of ``PATTERN``: between two groups (0), in the first kind (1),
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
    end_id: int = END
    end_ids: frozenset = frozenset({END})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


class ByTheBook:
    """The same grammar from the automaton."""

    failure = None

    def mask(self, output: Sequence[int]) -> np.ndarray:
        text = "".join(chr(ord("a") + token) for token in output)
        allowed = [ord(letter) - ord("a") for letter in STATES[automaton(text)]]
        mask = np.zeros(VOCAB, bool)
        mask[allowed + ([END] if text and automaton(text) == 0 else [])] = True
        return mask


def guide() -> Guide:
    """The grammar."""
    return Grammars(cast(Tokenizer, Letters())).guide("regex", PATTERN, frozenset({END}))


def options(**more: Any) -> SamplingParams:
    """Options of a request that follows it to its end."""
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
