"""The model ``spindle``: it owns the engine process, exports its metrics and passes administrative
commands on.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from time import monotonic
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend import lifeline
from backend.ipc.messages import (
    SWITCHES_SUFFIX,
    Admin,
    AdminReply,
    ErrorReply,
    IpcMessage,
    StatsUpdate,
    Subscribe,
)
from backend.request import ErrorCode, RequestError
from backend.triton_adapter.admin_secret import check_secret
from backend.triton_adapter.codec import decode_command
from backend.triton_adapter.engine_child import EngineChild
from backend.triton_adapter.link import EngineLink
from backend.triton_adapter.metrics import MetricExporter
from backend.triton_adapter.responder import Responder, inputs_of
from backend.triton_adapter.stub import config_path, set_up_stub, socket_path

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 9.0
"""How long the engine may take to end: Triton unloads models once every request has ended."""
SILENCE_LIMIT_S = 12.0
"""An engine process reports twice a second; one that has not for so long hangs."""


class TritonPythonModel:
    """Triton's interface. The model is ready when the engine is loaded and warmed up."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine process and wait for it. Raises RuntimeError when it ends instead."""
        set_up_stub(args)
        self._ids = itertools.count(1)
        self._pending: dict[int, Responder] = {}
        self._metrics = MetricExporter(pb_utils)
        self._closing = threading.Event()
        self._heard_s = monotonic()
        path = socket_path(args)
        path.unlink(missing_ok=True)
        path.with_suffix(SWITCHES_SUFFIX).unlink(missing_ok=True)
        self._link = EngineLink(path, self._receive, self._engine_lost, greeting=(Subscribe(),))
        self._child = EngineChild(config_path(args), path, give_up=lifeline.die)
        self._child.start()
        self._link.start()
        while not self._link.wait(0.1):
            if self._child.failed_to_start:
                raise RuntimeError(
                    "the engine process ended before it was ready; its own log lines say why"
                )
        self._child.ready()
        threading.Thread(target=self._watch_silence, name="engine-watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Pass commands on to the engine process."""
        for request in requests:
            request_id = next(self._ids)
            self._pending[request_id] = Responder(pb_utils, request.get_response_sender())
            try:
                command, secret = decode_command(inputs_of(request))
                check_secret(command, secret)
                self._link.send(Admin(id=request_id, command=command))
            except RequestError as error:
                self._fail(request_id, error)

    def finalize(self) -> None:
        """Let the engine finish what is in flight, then end it."""
        self._closing.set()
        self._child.stop(STOP_LIMIT_S)
        self._link.close()

    def _receive(self, message: IpcMessage) -> None:
        self._heard_s = monotonic()
        try:
            if isinstance(message, StatsUpdate):
                self._child.ready()
                if restarts := self._child.take_restarts():
                    message.counters.append(("spindle_engine_restarts_total", {}, restarts))
                self._metrics.update(message)
            elif isinstance(message, ErrorReply):
                self._fail(message.id, RequestError(message.code, message.message))
            elif (
                isinstance(message, AdminReply)
                and (responder := self._pending.pop(message.id, None)) is not None
            ):
                reply = json.dumps(message.reply, ensure_ascii=False)
                responder.send({"reply": np.array([reply.encode()], dtype=np.object_)}, final=True)
        except Exception:  # the link's thread must live on
            logger.exception("a message of type %s could not be handled", type(message).__name__)

    def _engine_lost(self) -> None:
        for request_id in list(self._pending):
            self._fail(
                request_id,
                RequestError(
                    ErrorCode.UNAVAILABLE, "the engine process has ended: it is being restarted"
                ),
            )

    def _fail(self, request_id: int, error: RequestError) -> None:
        if (responder := self._pending.pop(request_id, None)) is not None:
            responder.fail(error.code, error.message)

    def _watch_silence(self) -> None:
        """Kill an engine process that is connected but says nothing, so that it is restarted."""
        while not self._closing.wait(1.0):
            if not self._link.wait(0.0):
                self._heard_s = monotonic()
            elif monotonic() - self._heard_s > SILENCE_LIMIT_S:
                logger.error(
                    "the engine process has been silent for %.0f s: killed", SILENCE_LIMIT_S
                )
                self._child.kill()
                self._heard_s = monotonic()
