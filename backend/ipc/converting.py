"""Texts and token ids for those who tokenise by themselves."""

from __future__ import annotations

from backend.ipc.messages import Decode, Decoded, Encode, Encoded
from backend.request import ErrorCode, RequestError
from backend.tokenizer import IncrementalDecoder, Tokenizer


def encoded(tokenizer: Tokenizer, asked: Encode, add_special_tokens: bool) -> Encoded:
    """Return the ids of texts and words; words have no special tokens. Raises RequestError."""
    return Encoded(
        id=asked.id,
        prompts=[tokenizer.encode(text, add_special_tokens) for text in asked.prompts],
        words=[tokenizer.encode(word, add_special_tokens=False) for word in asked.words],
        end_id=min(tokenizer.end_ids),
        vocab_size=tokenizer.vocab_size,
    )


def decoded(tokenizer: Tokenizer, asked: Decode) -> Decoded:
    """Return the texts of ids. Raises RequestError."""
    texts = []
    for tokens in asked.tokens:
        decoder = IncrementalDecoder(tokenizer.token_bytes)
        if tokens and min(tokens) < 0:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"TOKENS_BATCH must be of token ids, got {min(tokens)}"
            )
        texts.append("".join(map(decoder.push, tokens)) + decoder.finish())
    return Decoded(id=asked.id, texts=texts)
