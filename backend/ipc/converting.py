"""Texts and token ids for those who tokenise by themselves."""

from __future__ import annotations

from backend.core.preparation import Preparation
from backend.ipc.messages import Decode, Decoded, Encode, Encoded
from backend.request import ErrorCode, RequestError


def encoded(preparation: Preparation, asked: Encode) -> Encoded:
    """Return the ids of texts and words; words have no special tokens. Raises RequestError."""
    tokenizer = preparation.tokenizer
    for text in asked.prompts:
        preparation.limits.check_text("QUERY", text)
    texts = zip(asked.prompts, asked.add_special_tokens, strict=True)
    return Encoded(
        id=asked.id,
        prompts=[preparation.encoded(text, special) for text, special in texts],
        words=[tokenizer.encode(word, add_special_tokens=False) for word in asked.words],
        end_id=tokenizer.end_id,
        vocab_size=min(tokenizer.vocab_size, preparation.vocab_size),
    )


def decoded(preparation: Preparation, asked: Decode) -> Decoded:
    """Return the texts of ids; those that only the model's padded vocabulary has are no text.
    Raises RequestError.
    """
    table, rows, texts = preparation.tokenizer.token_bytes, preparation.vocab_size, []
    for tokens in asked.tokens:
        unknown = next((token for token in tokens if not 0 <= token < rows), None)
        if unknown is not None:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"TOKENS_BATCH must contain token ids below {rows}, got {unknown}",
            )
        data = b"".join(table[token] for token in tokens if token < len(table))
        texts.append(data.decode("utf-8", "replace"))
    return Decoded(id=asked.id, texts=texts)
