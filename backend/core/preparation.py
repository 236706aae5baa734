"""Preparation of a session from a request: its tokens, how it is sampled, and whether it can be
served.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from backend.config import ServingConfig
from backend.core.session import NO_SPECIAL_TOKENS, ReplySink, Session
from backend.limits import PromptLimits
from backend.request import ErrorCode, GenerationRequest, RequestError
from backend.sampling.guides import Grammars
from backend.sampling.options import sampling_params
from backend.sequence import BLOCK_TOKENS, Sequence
from backend.tokenizer import IncrementalDecoder, Tokenizer, named_token_bytes

NO_END_ID = -1


@dataclass(slots=True)
class Preparation:
    """Makes sessions (the tokeniser's thread). ``vocab_size`` is the target's,
    ``max_context_tokens`` the least of what engines and settings allow; ``in_control`` says whether
    a request of this id takes a canary's fixed choice.
    """

    config: ServingConfig
    tokenizer: Tokenizer
    vocab_size: int
    max_context_tokens: int
    in_control: Callable[[int], bool]
    grammars: Grammars
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _named_token_bytes: tuple[bytes, ...] = ()

    def session(self, request: GenerationRequest, sink: ReplySink) -> Session:
        """Tokenise and check a request. Raises RequestError naming the field and the value."""
        self.limits.check(request)
        check_ids(request, self.vocab_size)
        ids = request.input_ids or request.prompt_token_ids
        prompt = list(ids) or self.encode(request.text_input, request.add_special_tokens)
        self._check_known("text_input", prompt)
        request = self._fit_max_tokens(request, len(prompt))
        vocabulary = min(self.tokenizer.vocab_size, self.vocab_size)
        check_lengths(request, len(prompt), self.max_context_tokens, vocabulary)
        check_bias(request, self.tokenizer.vocab_size, self.vocab_size)
        check_served(request, self.config.target.kind.answer("REFUSES", {}))
        limit = self.config.limits.max_logits_bytes
        logits_bytes = _logits_bytes(request, len(prompt), self.vocab_size, limit)
        end_ids = self.tokenizer.end_ids
        if request.end_id is not None:
            end_ids = frozenset({request.end_id} - {NO_END_ID})
        end_ids |= frozenset(request.stop_token_ids)
        sampling = sampling_params(request, self.tokenizer, end_ids)
        self._check_known("bad_words", itertools.chain.from_iterable(sampling.bad_words))
        self._check_known("embedding_bias_words", (token for token, _ in sampling.bias))
        number, salt = next(self._ids), request.cache_salt or ""
        if request.guide_type is not None:
            guide = self.grammars.guide(request.guide_type, request.guide or "", end_ids, salt)
            sampling = replace(sampling, guide=guide)
        alone = request.return_context_logits or request.return_prompt_log_probs
        if alone:  # KV that was found would have no logits
            salt = f"{salt}/{number}/{secrets.token_hex(8)}"
        check_resumed(request, len(prompt))
        sequence = Sequence(
            number,
            prompt,
            len(prompt) - request.resumed_tokens,
            sampling,
            salt=salt,
            context_logits=request.return_context_logits,
            generation_logits=request.return_generation_logits,
            prompt_log_probs=request.return_prompt_log_probs,
            remember=request.remember and not alone,
        )
        decoder, special_tokens = self._decoding(request)
        session = Session(sequence, request, end_ids, decoder, sink, special_tokens)
        session.logits_bytes = logits_bytes
        session.control = self.in_control(session.id)
        return session

    def _fit_max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> GenerationRequest:
        """Return the request with no more ``max_tokens`` than there is room, where it asks so."""
        limits, k_max = self.config.limits, self.config.policy.k_max
        in_kv = limits.kv_cache_tokens // BLOCK_TOKENS * BLOCK_TOKENS - (k_max + 1)
        room = max(1, min(self.max_context_tokens, in_kv) - prompt_tokens)
        if not request.fit_max_tokens or request.max_tokens <= room:
            return request
        return replace(request, max_tokens=room)

    @property
    def limits(self) -> PromptLimits:
        """The sizes that the context allows."""
        return PromptLimits(self.max_context_tokens - 1)

    def _decoding(self, request: GenerationRequest) -> tuple[IncrementalDecoder, Mapping[str, int]]:
        """Return what makes text of tokens, and the special tokens that are no text of it."""
        if request.skip_special_tokens:
            decoder = IncrementalDecoder(self.tokenizer.token_bytes)
            return decoder, self.tokenizer.special_tokens
        return IncrementalDecoder(self._named_tokens()), NO_SPECIAL_TOKENS

    def _named_tokens(self) -> tuple[bytes, ...]:
        if not self._named_token_bytes:
            self._named_token_bytes = named_token_bytes(self.tokenizer)
        return self._named_token_bytes

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """Return a text's token ids; None: with special tokens if the deployment says so."""
        default = self.config.add_special_tokens
        return self.tokenizer.encode(
            text, default if add_special_tokens is None else add_special_tokens
        )

    def _check_known(self, name: str, tokens: Iterable[int]) -> None:
        """Raise RequestError for a token of a text for which the model has no row."""
        if self.tokenizer.vocab_size <= self.vocab_size:
            return
        unknown = next((token for token in tokens if token >= self.vocab_size), None)
        if unknown is not None:
            token = self._named_tokens()[unknown].decode("utf-8", "replace")
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} has the token {token!r} of id {unknown}, but the model knows only ids "
                f"below {self.vocab_size}",
            )


def check_served(request: GenerationRequest, refused: dict[str, str]) -> None:
    """Raise RequestError (UNIMPLEMENTED) for what the target's kind of engine does not serve:
    ``refused`` are reasons by attribute of the request.
    """
    for name, reason in refused.items():
        value = getattr(request, name)
        if value is not None and value is not False and value != NEUTRAL.get(name):
            option = NAMES.get(name, name)
            raise RequestError(
                ErrorCode.UNIMPLEMENTED, f"{option} is not supported: {reason}, got {value!r}"
            )


NEUTRAL = {"top_p_decay": 1.0, "resumed_tokens": 0}
NAMES = {
    "guide_type": "guided_decoding_guide_type",
    "top_p_decay": "runtime_top_p_decay",
    "top_log_probs": "return_top_log_probs",
}
"""Inputs of the models whose attribute has another name."""


def check_resumed(request: GenerationRequest, prompt_tokens: int) -> None:
    """Check the number of tokens that were generated before. Raises RequestError."""
    count, has_ids = request.resumed_tokens, request.input_ids or request.prompt_token_ids
    if count and not has_ids:
        refusal = "needs the prompt as token ids"
    elif count >= prompt_tokens:
        refusal = f"must be below the {prompt_tokens} tokens of the prompt"
    else:
        return
    raise RequestError(ErrorCode.INVALID_ARGUMENT, f"resumed_tokens {refusal}, got {count}")


def check_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Check what a request has as token ids. Raises RequestError naming the tensor and the id."""
    for name, ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("input_ids", request.input_ids or ()),
        ("stop_token_ids", request.stop_token_ids),
        ("stop_words_list", itertools.chain.from_iterable(request.stop_word_ids)),
        ("bad_words_list", itertools.chain.from_iterable(request.bad_word_ids)),
        (
            "logit_bias_ids" if request.input_ids is None else "embedding_bias",
            (token for token, _ in request.bias),
        ),
        (
            "runtime_top_p_reset_ids",
            () if request.top_p_reset_id in (None, NO_END_ID) else (request.top_p_reset_id,),
        ),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT,
                    f"{name} must contain token ids below {vocab_size}, got {token}",
                )


def check_bias(request: GenerationRequest, *sizes: int) -> None:
    """Check that the bias of a request of token ids has a number for every token: the tokenizer's
    or the model's. Raises RequestError.
    """
    count = request.bias[-1][0] + 1 if request.input_ids is not None and request.bias else 0
    if count and count not in sizes:
        must = " or ".join(map(str, sorted(set(sizes))))
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            f"embedding_bias must have {must} numbers, one for every token, got {count}",
        )


def check_lengths(
    request: GenerationRequest, prompt_tokens: int, max_context: int, vocab_size: int
) -> None:
    """Check what needs the tokenizer and the limits; types and ranges were checked where the
    tensors were decoded. Raises RequestError.
    """

    def refuse(message: str) -> None:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, message)

    prompt, length = (
        ("text_input", "max_tokens")
        if request.input_ids is None
        else ("input_ids", "request_output_len")
    )
    if prompt_tokens == 0:
        refuse(f"{prompt} has no tokens: {request.text_input!r}")
    if prompt_tokens >= max_context:
        refuse(f"{prompt} of {prompt_tokens} tokens is over the limit of {max_context - 1}")
    if prompt_tokens + request.max_tokens > max_context:
        refuse(
            f"{length} {request.max_tokens} and a prompt of {prompt_tokens} tokens exceed the "
            f"context of {max_context} tokens"
        )
    for name, value in (("end_id", request.end_id), ("pad_id", request.pad_id)):
        if value is not None and not NO_END_ID <= value < vocab_size:
            refuse(f"{name} must be -1 or a token id below {vocab_size}, got {value}")


def _logits_bytes(
    request: GenerationRequest, prompt_tokens: int, vocab_size: int, limit_bytes: int
) -> int:
    """Return what the logits that a request asks for take: they are kept in memory until it ends.
    Raises RequestError beyond the limit.
    """
    rows = (
        request.return_context_logits * prompt_tokens
        + request.return_generation_logits * request.max_tokens
    )
    if (size := rows * vocab_size * 4) > limit_bytes:
        name = (
            "return_context_logits" if request.return_context_logits else "return_generation_logits"
        )
        message = (
            f"{name}: {rows} rows of {vocab_size} logits are {size} bytes, over "
            f"limits.max_logits_bytes, {limit_bytes}"
        )
        raise RequestError(ErrorCode.INVALID_ARGUMENT, message)
    return size
