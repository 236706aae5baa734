"""The thin models ``ensemble``, ``tensorrt_llm_bls`` and ``tensorrt_llm``: decode, forward, return
at once; the senders reply.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
from time import monotonic
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.ipc.messages import Cancel, Submit
from backend.limits import PromptLimits
from backend.request import ErrorCode, RequestError
from backend.triton_adapter.codec import Part, WantedOutputs, asks_to_stop, check_parameters, decode
from backend.triton_adapter.fields import MODELS
from backend.triton_adapter.link import EngineLink
from backend.triton_adapter.responder import (
    ERRORS_AS_OUTPUTS,
    Responder,
    inputs_of,
    parameters_of,
    trace_context_of,
)
from backend.triton_adapter.sender import Group, PendingReply, ResponseSender, Senders
from backend.triton_adapter.stub import set_up_stub, socket_path

logger = logging.getLogger(__name__)

DEADLINE_GRACE_S = 15.0
"""How much later than the engine the stub ends a request that has lived too long."""


class TritonPythonModel:
    """Triton's interface. ``execute`` never raises: one bad request is answered by its own
    error.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Start the threads; the engine process is waited for by the model ``spindle``."""
        set_up_stub(args)
        config = json.loads(args["model_config"])
        self._decoupled: bool = pb_utils.using_decoupled_model_transaction_policy(config)
        self._inputs = next(model.inputs for model in MODELS if model.name == args["model_name"])
        self._ids = itertools.count(1)
        self._registering = threading.Lock()
        self._senders = Senders(self._cancel)
        self._link = EngineLink(socket_path(args), self._senders.deliver, self._engine_lost)
        self._link.start()

    def execute(self, requests: list[Any]) -> None:
        """Forward requests to the engine process."""
        for request in requests:
            parameters = parameters_of(request)
            as_outputs = bool(parameters.get(ERRORS_AS_OUTPUTS))
            sender = Responder(
                pb_utils, request.get_response_sender(), errors_as_outputs=as_outputs
            )
            try:
                check_parameters(parameters)
                self._forward(request, sender)
            except RequestError as error:
                self._refuse(sender, error.code, error.message)
            except Exception as error:
                logger.exception("a request could not be read")
                self._refuse(
                    sender,
                    ErrorCode.INTERNAL,
                    f"the request could not be read ({type(error).__name__})",
                )

    def finalize(self) -> None:
        """End the threads; Triton has waited for the requests in flight."""
        self._link.close()
        self._senders.fail_all(ErrorCode.UNAVAILABLE, "the server is shutting down")
        self._senders.close()

    def _forward(self, request: Any, sender: Responder) -> None:
        inputs, client_id = inputs_of(request), request.request_id()
        if asks_to_stop(inputs):
            if not client_id:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT,
                    "A request id must be provided for request cancellation. Got stop true",
                )
            self._senders.stop(client_id)
            sender.send({}, final=True)
            return
        timeout_us = request.timeout()
        parts = decode(
            inputs,
            self._inputs,
            decoupled=self._decoupled,
            timeout_s=timeout_us / 1e6 if timeout_us else None,
        )
        limits = PromptLimits.from_info(self._link.info)
        for body, _ in parts:
            limits.check(body)
        context = trace_context_of(request)
        shared = sender if len(parts) == 1 else Group(sender, len(parts))
        for part in parts:
            self._submit(part, shared, client_id, context)

    def _submit(
        self, part: Part, sender: ResponseSender, client_id: str, context: dict[str, str] | None
    ) -> None:
        body, wanted = part
        request_id = next(self._ids)
        # a connection is lost before or after, never between: see _engine_lost
        with self._registering:
            # Before the first hello the limit is unknown; the link answers what it holds.
            limit_s = self._link.info.get("max_request_s", math.inf)
            self._senders.open(
                PendingReply(
                    request_id,
                    sender,
                    wanted,
                    monotonic() + limit_s + DEADLINE_GRACE_S,
                    client_id=client_id,
                )
            )
            try:
                self._link.send(Submit(id=request_id, request=body, trace=context))
            except RequestError as error:
                self._senders.fail(request_id, error.code, error.message)

    def _refuse(self, sender: Responder, code: ErrorCode, message: str) -> None:
        request_id = next(self._ids)
        self._senders.open(PendingReply(request_id, sender, WantedOutputs()))
        self._senders.fail(request_id, code, message)

    def _engine_lost(self) -> None:
        with self._registering:
            self._senders.fail_all(
                ErrorCode.UNAVAILABLE,
                "the engine process has ended: it is being restarted, or the server shuts down",
            )

    def _cancel(self, request_id: int) -> None:
        try:
            self._link.send(Cancel(id=request_id))
        except RequestError as error:
            logger.info("request %d was cancelled without an engine: %s", request_id, error)
