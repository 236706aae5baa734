"""Texts and token ids for those who tokenise by themselves."""

from __future__ import annotations

from backend.ipc.messages import Decode, Decoded, Encode, Encoded
from backend.limits import Limits
from backend.request import ErrorCode, RequestError
from backend.tokenizer import Tokenizer


def encoded(
    tokenizer: Tokenizer, asked: Encode, add_special_tokens: bool, limits: Limits
) -> Encoded:
    """Return the ids of texts and words; words have no special tokens. Raises RequestError."""
    for text in asked.prompts:
        limits.check_text("QUERY", text)
    return Encoded(
        id=asked.id,
        prompts=[tokenizer.encode(text, add_special_tokens) for text in asked.prompts],
        words=[tokenizer.encode(word, add_special_tokens=False) for word in asked.words],
        end_id=tokenizer.end_id,
        vocab_size=tokenizer.vocab_size,
    )


def decoded(tokenizer: Tokenizer, asked: Decode, model_vocab_size: int) -> Decoded:
    """Return the texts of ids; those that only the model's padded vocabulary has are no text.
    Raises RequestError.
    """
    table, texts = tokenizer.token_bytes, []
    for tokens in asked.tokens:
        unknown = next((token for token in tokens if not 0 <= token < model_vocab_size), None)
        if unknown is not None:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"TOKENS_BATCH must be of token ids below {model_vocab_size}, got {unknown}",
            )
        data = b"".join(table[token] for token in tokens if token < len(table))
        texts.append(data.decode("utf-8", "replace"))
    return Decoded(id=asked.id, texts=texts)
