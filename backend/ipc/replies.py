"""Replies as messages: what a request has produced and how it ended, and texts and token ids for
clients that tokenise by themselves.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from backend.core.extras import FloatArray, GatheredOutputs
from backend.core.preparation import Preparation
from backend.core.session import Delta
from backend.ipc.messages import (
    Chunk,
    Decode,
    DecodeReply,
    Encode,
    EncodeReply,
    Final,
    PromptScores,
)
from backend.ops.stats import Usage
from backend.request import ErrorCode, FinishReason, RequestError
from backend.tokenizer import Tokenizer


class Replies:
    """Makes messages of replies (any thread). Logits are too large for the socket: they go by files
    in ``folder``, which their reader removes.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._token_bytes = tokenizer.token_bytes
        self._names = {token: name.encode() for name, token in tokenizer.special_tokens.items()}
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)  # an earlier process's

    def chunk(self, request_id: int, delta: Delta) -> Chunk:
        """Return what is new of a request; what few ask for only where it was asked for."""
        return Chunk(id=request_id, **self._fields(delta))

    def final(self, request_id: int, delta: Delta, reason: FinishReason, usage: Usage) -> Final:
        """Return a request's end."""
        return Final(
            id=request_id,
            finish_reason=reason,
            seed=usage.seed,
            num_input_tokens=usage.input_tokens,
            num_output_tokens=usage.output_tokens,
            draft_tokens=usage.drafted,
            accepted_draft_tokens=usage.accepted,
            drafts=[(name, *counts) for name, counts in usage.drafts.items()],
            times_s=usage.times_s,
            kv_blocks=(usage.new_blocks, usage.reused_blocks),
            verified_steps=usage.verified_steps,
            k_max=usage.k_max,
            **self._fields(delta),
        )

    def close(self) -> None:
        """Remove what has not been read."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        produced: dict[str, Any] = {"text": delta.text, "tokens": delta.tokens}
        if delta.log_probs is not None:
            produced |= {"log_probs": delta.log_probs, "cum_log_prob": delta.cum_log_prob}
        return produced if delta.extras is None else produced | self._extras(delta.extras)

    def _extras(self, extras: GatheredOutputs) -> dict[str, Any]:
        outputs: dict[str, Any] = {
            "context_logits": self._save(extras.context_logits),
            "generation_logits": self._save(extras.logits),
        }
        if extras.top is not None:
            outputs["token_bytes"] = [self._bytes(token) for token in extras.tokens]
            outputs["top"] = self._likeliest(extras.top)
        if extras.prompt is not None:
            tokens = [self._bytes(token) for token in extras.prompt.tokens]
            top = self._likeliest(extras.prompt.top)
            outputs["prompt"] = PromptScores(tokens, extras.prompt.log_probs, top)
        return outputs

    def _save(
        self,
        array: FloatArray | None,  # [tokens, vocab]
    ) -> str | None:
        if array is None:
            return None
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{next(self._numbers)}.npy"
        np.save(path, array)
        return str(path)

    def _likeliest(self, rows: Seq[Seq[tuple[int, float]]]) -> list[list[tuple[bytes, float]]]:
        return [[(self._bytes(token), log_prob) for token, log_prob in row] for row in rows]

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of one that is no text."""
        data = self._token_bytes[token] if token < len(self._token_bytes) else b""
        return data or self._names.get(token) or b"<token %d>" % token


def encode_texts(preparation: Preparation, message: Encode) -> EncodeReply:
    """Return the ids of texts and words; words have no special tokens. Raises RequestError."""
    tokenizer = preparation.tokenizer
    for text in message.prompts:
        preparation.limits.check_text("QUERY", text)
    texts = zip(message.prompts, message.add_special_tokens, strict=True)
    return EncodeReply(
        id=message.id,
        prompts=[preparation.encode(text, special) for text, special in texts],
        words=[tokenizer.encode(word, add_special_tokens=False) for word in message.words],
        end_id=tokenizer.end_id,
        vocab_size=min(tokenizer.vocab_size, preparation.vocab_size),
    )


def decode_tokens(preparation: Preparation, message: Decode) -> DecodeReply:
    """Return the texts of ids; those that only the model's padded vocabulary has are no text.
    Raises RequestError.
    """
    table, rows, texts = preparation.tokenizer.token_bytes, preparation.vocab_size, []
    for tokens in message.tokens:
        unknown = next((token for token in tokens if not 0 <= token < rows), None)
        if unknown is not None:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"TOKENS_BATCH must contain token ids below {rows}, got {unknown}",
            )
        data = b"".join(table[token] for token in tokens if token < len(table))
        texts.append(data.decode("utf-8", "replace"))
    return DecodeReply(id=message.id, texts=texts)
