"""Domain types of one generation request: what was asked, how it may end, and the error that names
what was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")
"""Formats that a grammar may be written in, by NVIDIA's names. ``ebnf_grammar`` is GBNF or Lark."""
IMPOSSIBLE = -1e30
"""The logit of a banned token: finite, so that softmax is defined where all tokens are banned."""


LEAST_TEMPERATURE = 1e-5
"""Below it a temperature counts as 0: logits divided by it would leave the range of fp32."""


class ErrorCode(str, Enum):
    """Why a request was refused or failed; the Triton adapter maps these one to one to TritonError
    codes.
    """

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"
    UNIMPLEMENTED = "UNIMPLEMENTED"


class RequestError(Exception):
    """A request that cannot be served: a code and one sentence for the client, naming the field and
    the value.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FinishReason(str, Enum):
    """How a successful generation ended."""

    LENGTH = "length"
    END_ID = "end_id"
    STOP_WORDS = "stop_words"


class Guide(Protocol):
    """A grammar that a request's output must follow (``backend.sampling.guides``). ``failure`` says
    why it cannot be followed any further.
    """

    failure: str | None

    def mask(self, output: Seq[int]) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may follow the output; None where that has left the grammar."""
        ...

    def count_allowed(self, output: Seq[int], proposed: Seq[int]) -> int:
        """Return how many of the proposed tokens it takes."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: each is a function of its distribution, ``seed`` and position alone.

    Penalties, ``bias``, ``min_tokens``, ``bad_words`` and ``guide`` change the logits before the
    distribution is made of them. The flags from ``greedy`` on are derived, once, because they are
    read for every token.
    """

    temperature: float = 0.0
    """0: greedy."""
    top_k: int = 0
    """0: off; 1: greedy."""
    top_p: float = 1.0
    """1: off."""
    seed: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are left out, before top_k and top_p."""
    repetition_penalty: float = 1.0
    """This and the next two count a token in prompt and output."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    """First tokens of the prompt that those two do not count; beyond it: all of it."""
    min_tokens: int = 0
    """Tokens of the output before which ``end_ids`` are impossible."""
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of words; the last token of each is impossible after its others."""
    bias: tuple[tuple[int, float], ...] = ()
    """(Token id, addend)."""
    log_probs: bool = False
    """Asks for each emitted token's log-probability."""
    top_log_probs: int | None = None
    """Asks for those of this many of the most likely tokens at its place."""
    guide: Guide | None = None
    """Allows what its grammar does, whatever else bans it, and no more."""
    top_p_decay: float = 1.0
    """Factor on ``top_p`` with every token of the output (Lee et al., arXiv 2206.04624)."""
    top_p_min: float = 0.0
    """The least value of that."""
    top_p_reset_id: int = -1
    """The token after which ``top_p`` is itself again."""
    greedy: bool = field(init=False, repr=False, compare=False)
    """Each token is the arg-max."""
    penalised: bool = field(init=False, repr=False, compare=False)
    """A token's logit depends on how often it has occurred."""
    changes_logits: bool = field(init=False, repr=False, compare=False)
    """An option changes the model's distribution."""
    reads_log_probs: bool = field(init=False, repr=False, compare=False)
    """Log-probabilities are wanted, of the emitted tokens or of the likeliest."""
    plain: bool = field(init=False, repr=False, compare=False)
    """The arg-max of the model's own logits is all that is wanted."""
    _endings: dict[int, dict[tuple[int, ...], list[int]]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, value in self._derive().items():
            object.__setattr__(self, name, value)
        # by length and tokens of what comes before a bad word's last token
        endings: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *others, last in self.bad_words:
            endings.setdefault(len(others), {}).setdefault(tuple(others), []).append(last)
        object.__setattr__(self, "_endings", endings)

    def find_banned(self, tokens: Seq[int], end: int) -> list[int]:
        """Return the tokens that would complete a bad word after ``tokens[:end]``; the cost is
        that of those found, not of all.
        """
        endings_here = (
            endings.get(tuple(tokens[end - length : end]), ())
            for length, endings in self._endings.items()
            if length <= end
        )
        return [last for lasts in endings_here for last in lasts]

    def after(self, output: Seq[int]) -> SamplingParams:
        """Return the same with the ``top_p`` that applies after the tokens ``output``."""
        if self.top_p_decay == 1.0 or not output:
            return self
        since = next(
            (n for n, token in enumerate(reversed(output)) if token == self.top_p_reset_id),
            len(output),
        )
        return (
            self
            if since == 0
            else replace(self, top_p=max(self.top_p * self.top_p_decay**since, self.top_p_min))
        )

    def _derive(self) -> dict[str, bool]:
        greedy = self.temperature == 0.0 or self.top_k == 1
        penalised = (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
        changes_logits = (
            penalised
            or bool(self.bias or self.bad_words or (self.min_tokens and self.end_ids))
            or self.guide is not None
        )
        reads_log_probs = self.log_probs or bool(self.top_log_probs)
        return {
            "greedy": greedy,
            "penalised": penalised,
            "changes_logits": changes_logits,
            "reads_log_probs": reads_log_probs,
            "plain": greedy and not changes_logits and not reads_log_probs,
        }


def tenant_id(cache_salt: str | None) -> int:
    """Return the tenant of a salt as the policy knows it, 64 bits that are the same in every
    process; 0 without one.
    """
    if not cache_salt:
        return 0
    digest = blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request as a stub sends it, type-checked by the codec; absent options are None."""

    text_input: str
    """Empty where the prompt is one of token ids."""
    max_tokens: int
    stream: bool = False
    stop_words: tuple[str, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    end_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """More tokens that end the text and are no part of it."""
    pad_id: int | None = None
    exclude_input_in_output: bool = False
    num_draft_tokens: int | None = None
    """A ceiling on the speculation length; 0: no speculation, None: the policy decides."""
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    bad_words: tuple[str, ...] = ()
    embedding_bias_words: tuple[str, ...] = ()
    embedding_bias_weights: tuple[float, ...] = ()
    return_log_probs: bool = False
    top_log_probs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_prompt_log_probs: bool = False
    cache_salt: str | None = None
    """Only requests of one salt share KV, and what drafts ``remember`` of their answers; what the
    policy learns of them moves no plan of other requests (``policy.tenants``).
    """
    input_ids: tuple[int, ...] | None = None
    """The prompt of a request that gets token ids; words and bias come as ids, too."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt of a request that gets text."""
    resumed_tokens: int = 0
    """The last tokens of a prompt of ids that were generated before: everything goes on after them
    as if the text had not been broken off.
    """
    stop_word_ids: tuple[tuple[int, ...], ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    timeout_s: float | None = None
    """The client's own limit on the request's life."""
    guide_type: str | None = None
    guide: str | None = None
    """A grammar of the kind ``guide_type`` that the output must follow."""
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_id: int | None = None
    remember: bool = True
    fit_max_tokens: bool = False
    """Lowers ``max_tokens`` to what fits."""
    skip_special_tokens: bool = True
    """False: special tokens are text by their names."""
    add_special_tokens: bool | None = None
    """Whether the prompt gets the tokenizer's special tokens; None: as the deployment says."""
