"""The models ``preprocessing`` and ``postprocessing``: the engine process's tokenizer for those who
call it by themselves.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils
from msgspec.structs import replace

from backend.ipc.messages import Decode, Encode, Failed, Message
from backend.limits import Limits
from backend.request import ErrorCode, RequestError
from backend.triton_adapter.codec import Array
from backend.triton_adapter.link import EngineLink
from backend.triton_adapter.responder import Responder, inputs_of
from backend.triton_adapter.stub import set_up_stub, socket_path
from backend.triton_adapter.tokens_codec import (
    decode_texts,
    decode_tokens,
    encode_ids,
    encode_texts,
)

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

    def _decode(self, inputs: dict[str, Array]) -> tuple[Outputs, Encode | Decode]:
        if self._texts:
            rows, texts = decode_texts(inputs)
            limits = Limits.from_info(self._link.info)
            for text in texts.prompts:
                limits.check_text("QUERY", text)
            return partial(encode_ids, rows), texts
        shape, tokens = decode_tokens(inputs)
        return partial(encode_texts, shape), tokens

    def _receive(self, message: Message) -> None:
        responder, encode = self._pending.pop(message.id, (None, None))
        if responder is None or encode is None:
            return
        try:
            if isinstance(message, Failed):
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
