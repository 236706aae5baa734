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
"""What a grammar may be written in, by NVIDIA's names. ``ebnf_grammar`` is GBNF or Lark."""
IMPOSSIBLE = -1e30
"""The logit of a banned token: finite, so that softmax is defined where all tokens are banned."""


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

    def allowed(self, output: Seq[int], proposed: Seq[int]) -> int:
        """Return how many of the proposed tokens it takes."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: temperature 0 or top_k 1 is greedy; top_k 0, top_p 1.0 and min_p 0.0
    are off.

    Every token is a function of its distribution, ``seed`` and position alone. The options change
    the logits before the distribution is made of them: ``bias`` holds (token id, addend); the
    penalties count a token in prompt and output; ``end_ids`` are impossible for the first
    ``min_tokens`` of the output, and so is the last token of a bad word (token ids) after its
    others. ``log_probs`` asks for each emitted token's log-probability, ``top_log_probs`` for those
    of this many of the most likely tokens at its place (None: not asked). ``guide`` allows what its
    grammar does, whatever else bans it, and no more. ``top_p`` shrinks by the factor
    ``top_p_decay`` with every token of the output, down to ``top_p_min``, and is itself again after
    the token ``top_p_reset_id`` (factual-nucleus sampling, Lee et al., arXiv 2206.04624).

    Derived flags, computed once because they are read for every token: ``greedy``: each is
    the arg-max; ``penalised``: a token's logit depends on how often it has occurred;
    ``changes_logits``: an option changes the model's distribution; ``reads_log_probs``:
    log-probabilities are wanted, of the emitted tokens or of the likeliest; ``plain``: the arg-max
    of the model's own logits is all that is wanted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are left out, before top_k and top_p."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    log_probs: bool = False
    top_log_probs: int | None = None
    guide: Guide | None = None
    top_p_decay: float = 1.0
    top_p_min: float = 0.0
    top_p_reset_id: int = -1
    greedy: bool = field(init=False, repr=False, compare=False)
    penalised: bool = field(init=False, repr=False, compare=False)
    changes_logits: bool = field(init=False, repr=False, compare=False)
    reads_log_probs: bool = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)
    _endings: dict[int, dict[tuple[int, ...], list[int]]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, value in self._come_to().items():
            object.__setattr__(self, name, value)
        endings: dict[
            int, dict[tuple[int, ...], list[int]]
        ] = {}  # by length and tokens of what comes before a bad word's last token
        for *others, last in self.bad_words:
            endings.setdefault(len(others), {}).setdefault(tuple(others), []).append(last)
        object.__setattr__(self, "_endings", endings)

    def banned(self, tokens: Seq[int], end: int) -> list[int]:
        """Return the tokens that would complete a bad word after ``tokens[:end]``; the cost is
        that of those found, not of all.
        """
        found = (
            endings.get(tuple(tokens[end - length : end]), ())
            for length, endings in self._endings.items()
            if length <= end
        )
        return [last for lasts in found for last in lasts]

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

    def _come_to(self) -> dict[str, bool]:
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
    """One request as a stub sends it, already type-checked by the codec; absent options are None.

    ``num_draft_tokens`` is a ceiling on the speculation length (0 = no speculation, None = the
    policy decides). Only requests of one ``cache_salt`` share KV, and what drafts ``remember`` of
    their answers; what the policy learns of them moves no plan of other requests
    (``policy.tenants``). With ``input_ids`` the request is one of token ids, and gets token ids:
    ``text_input`` is empty then, and words and weights (token id, addend) come as ids as well. With
    ``prompt_token_ids`` only the prompt is one of ids, and the request gets text. ``timeout_s`` is
    the client's own limit on the request's life. ``guide`` is a grammar of the kind ``guide_type``
    that the output must follow. ``fit_max_tokens`` lowers ``max_tokens`` to what fits.
    """

    text_input: str
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
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    bad_words: tuple[str, ...] = ()
    embedding_bias_words: tuple[str, ...] = ()
    embedding_bias_weights: tuple[float, ...] = ()
    return_log_probs: bool = False
    top_log_probs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_prompt_log_probs: bool = False
    cache_salt: str | None = None
    input_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] = ()
    resumed_tokens: int = 0
    """The last tokens of a prompt of ids that were generated before: everything goes on after them
    as if the text had not been broken off.
    """
    stop_word_ids: tuple[tuple[int, ...], ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    timeout_s: float | None = None
    guide_type: str | None = None
    guide: str | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_id: int | None = None
    remember: bool = True
    fit_max_tokens: bool = False
    skip_special_tokens: bool = True
    """False: special tokens are text by their names."""
