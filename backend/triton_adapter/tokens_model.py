"""The models ``preprocessing`` and ``postprocessing``: the engine process's tokenizer for clients
that call it by themselves; text and words as token ids, and ids as text.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from msgspec.structs import replace

from backend.ipc.messages import Decode, DecodeReply, Encode, EncodeReply, ErrorReply, IpcMessage
from backend.limits import MOST_ELEMENTS, PromptLimits, check_words
from backend.request import ErrorCode, RequestError
from backend.triton_adapter.codec import Array, invalid, meanings
from backend.triton_adapter.fields import POSTPROCESSING_INPUTS, PREPROCESSING_INPUTS
from backend.triton_adapter.link import EngineLink
from backend.triton_adapter.responder import Responder, inputs_of
from backend.triton_adapter.stub import set_up_stub, socket_path

logger = logging.getLogger(__name__)

Outputs = Callable[[Any], dict[str, Array]]


class TritonPythonModel:
    """Triton's interface. ``execute`` never raises: one bad request is answered by its own
    error.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine process."""
        set_up_stub(args)
        self._texts = args["model_name"] == "preprocessing"
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[Responder, Outputs]] = {}
        self._link = EngineLink(socket_path(args), self._receive, self._engine_lost)
        self._link.start()

    def execute(self, requests: list[Any]) -> None:
        """Forward requests to the engine process."""
        for request in requests:
            responder = Responder(pb_utils, request.get_response_sender())
            request_id = next(self._ids)
            try:
                encode, message = self._decode(inputs_of(request))
                self._pending[request_id] = responder, encode
                self._link.send(replace(message, id=request_id))
            except RequestError as error:
                self._pending.pop(request_id, None)
                responder.fail(error.code, error.message)
            except Exception as error:
                logger.exception("a request could not be read")
                self._pending.pop(request_id, None)
                responder.fail(
                    ErrorCode.INTERNAL, f"the request could not be read ({type(error).__name__})"
                )

    def finalize(self) -> None:
        """End the connection."""
        self._link.close()

    def _decode(
        self,
        inputs: dict[str, Array],  # [batch, ...] by name
    ) -> tuple[Outputs, Encode | Decode]:
        if self._texts:
            rows, texts = decode_texts(inputs)
            limits = PromptLimits.from_info(self._link.info)
            for text in texts.prompts:
                limits.check_text("QUERY", text)
            return partial(encode_ids, rows), texts
        shape, tokens = decode_tokens(inputs)
        return partial(encode_texts, shape), tokens

    def _receive(self, message: IpcMessage) -> None:
        responder, encode = self._pending.pop(message.id, (None, None))
        if responder is None or encode is None:
            return
        try:
            if isinstance(message, ErrorReply):
                responder.fail(message.code, message.message)
            else:
                responder.send(encode(message), final=True)
        except RequestError as error:
            responder.fail(error.code, error.message)
        except Exception as error:  # the link's thread must live on
            logger.exception("a reply could not be sent")
            responder.fail(
                ErrorCode.INTERNAL, f"the reply could not be sent ({type(error).__name__})"
            )

    def _engine_lost(self) -> None:
        for request_id in list(self._pending):
            responder, _ = self._pending.pop(request_id, (None, None))
            if responder is not None:
                responder.fail(
                    ErrorCode.UNAVAILABLE, "the engine process has ended: it is being restarted"
                )


_WORDS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")


def decode_texts(inputs: Mapping[str, Array]) -> tuple[list[dict[str, Any]], Encode]:
    """Return what each element of a batch for ``preprocessing``, tensors [batch, ...] by name,
    says, and the message that asks for its ids.

    Raises RequestError naming the field.
    """
    rows = [meanings(row, PREPROCESSING_INPUTS) for row in _rows(inputs)]
    for row in rows:
        words, weights = row.get("EMBEDDING_BIAS_WORDS", ()), row.get("EMBEDDING_BIAS_WEIGHTS", ())
        if len(words) != len(weights):
            raise invalid(
                f"EMBEDDING_BIAS_WEIGHTS must be as many as EMBEDDING_BIAS_WORDS ({len(words)}), "
                f"got {len(weights)}"
            )
    for row in rows:
        for name in _WORDS:
            check_words(name, row.get(name, ()))
    words = [word for row in rows for name in _WORDS for word in row.get(name, ())]
    special = [row.get("add_special_tokens") for row in rows]
    prompts = [row["QUERY"] for row in rows]
    return rows, Encode(prompts=prompts, add_special_tokens=special, words=words)


def encode_ids(rows: Seq[dict[str, Any]], reply: EncodeReply) -> dict[str, Array]:
    """Return the outputs of ``preprocessing``. Rows are padded: ids with the pad id, word lists as
    NVIDIA's (ends with -1).
    """
    words = iter(reply.words)
    ids = [{name: [next(words) for _ in row.get(name, ())] for name in _WORDS} for row in rows]
    end_ids = [row.get("END_ID", reply.end_id) for row in rows]
    pad_ids = [row.get("PAD_ID", reply.end_id) for row in rows]
    longest = max(map(len, reply.prompts))
    columns = {
        "REQUEST_INPUT_LEN": [len(prompt) for prompt in reply.prompts],
        "DECODER_INPUT_ID": pad_ids,
        "REQUEST_DECODER_INPUT_LEN": [1 for _ in rows],
        "REQUEST_OUTPUT_LEN": [row["REQUEST_OUTPUT_LEN"] for row in rows],
        "OUT_END_ID": end_ids,
        "OUT_PAD_ID": pad_ids,
    }
    padded = [
        prompt + [pad] * (longest - len(prompt))
        for prompt, pad in zip(reply.prompts, pad_ids, strict=True)
    ]
    return {
        "INPUT_ID": np.array(padded, np.int32),
        **{name: np.array(values, np.int32)[:, None] for name, values in columns.items()},
        "BAD_WORDS_IDS": _word_lists([row["BAD_WORDS_DICT"] for row in ids]),
        "STOP_WORDS_IDS": _word_lists([row["STOP_WORDS_DICT"] for row in ids]),
        "EMBEDDING_BIAS": _bias(
            [(row["EMBEDDING_BIAS_WORDS"]) for row in ids], rows, reply.vocab_size
        ),
        "OUT_PROMPT_TABLE_EXTRA_IDS": np.empty((len(rows), 0), np.uint64),
    }


def decode_tokens(inputs: Mapping[str, Array]) -> tuple[tuple[int, int], Decode]:
    """Return (batch, beams) of the tokens given to ``postprocessing``, int32[batch, beams, tokens],
    and the message that asks for their texts.

    Raises RequestError naming the field.
    """
    tokens, lengths = (inputs[field.name] for field in POSTPROCESSING_INPUTS)
    if tokens.ndim != 3 or tokens.dtype != np.int32:
        raise invalid(
            f"TOKENS_BATCH must be INT32 of shape [batch, beams, tokens], got {tokens.dtype} of "
            f"{list(tokens.shape)}"
        )
    if (
        lengths.shape != tokens.shape[:2]
        or not ((lengths >= 0) & (lengths <= tokens.shape[2])).all()
    ):
        raise invalid(
            f"SEQUENCE_LENGTH must be [batch, beams] lengths of at most {tokens.shape[2]}, got "
            f"{lengths.tolist()}"
        )
    if tokens.size > MOST_ELEMENTS:
        raise invalid(f"TOKENS_BATCH must have at most {MOST_ELEMENTS} ids, got {tokens.size}")
    beams = tokens.reshape(-1, tokens.shape[2])
    ids = [row[:length].tolist() for row, length in zip(beams, lengths.reshape(-1), strict=True)]
    return (tokens.shape[0], tokens.shape[1]), Decode(tokens=ids)


def encode_texts(shape: tuple[int, int], reply: DecodeReply) -> dict[str, Array]:
    """Return the output of ``postprocessing``."""
    return {"OUTPUT": np.array([text.encode() for text in reply.texts], np.object_).reshape(shape)}


def _rows(
    inputs: Mapping[str, Array],  # [batch, ...] by name
) -> list[dict[str, Array]]:
    batch = max(map(len, inputs.values()))
    return [{name: array[row : row + 1] for name, array in inputs.items()} for row in range(batch)]


def _word_lists(rows: Seq[list[list[int]]]) -> Array:
    """Return [batch, 2, n]: the ids of all words in a row, and where each of them ends."""
    words_kept = [[word for word in words if word] for words in rows]
    if not any(words_kept):
        return np.empty((len(rows), 2, 0), np.int32)
    lists = np.stack(
        [np.zeros((len(rows), max(sum(map(len, words)) for words in words_kept)), np.int32)] * 2,
        axis=1,
    )
    lists[:, 1] = -1
    for row, words in enumerate(words_kept):
        flat = [token for word in words for token in word]
        lists[row, 0, : len(flat)] = flat
        lists[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return lists


def _bias(words: Seq[list[list[int]]], rows: Seq[dict[str, Any]], vocab_size: int) -> Array:
    if not any(words):
        return np.empty((len(rows), 0), np.float32)
    bias = np.zeros((len(rows), vocab_size), np.float32)
    for at, (row, ids) in enumerate(zip(rows, words, strict=True)):
        for word, weight in zip(ids, row.get("EMBEDDING_BIAS_WEIGHTS", ()), strict=True):
            if (highest := max(word, default=0)) >= vocab_size:
                raise invalid(
                    f"EMBEDDING_BIAS_WORDS must contain token ids below {vocab_size}, got {highest}"
                )
            np.add.at(bias[at], word, weight)
    return bias
