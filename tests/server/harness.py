"""A real tritonserver, started by the launcher on free ports with the fake engine; and a bare gRPC
client that sees raw responses.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backend import PROJECT_ROOT
from backend.launcher.environment import RUN_PREFIX
from backend.launcher.processes import command_line, descendants
from backend.loopback import CHANNEL_OPTIONS, open_url
from backend.triton_adapter.admin_secret import VARIABLE
from backend.triton_adapter.fields import TEXT_INPUTS

MARK = "SPINDLE_TEST_MARK"
"""An environment variable by which all processes of a service are known."""
ADMIN_SECRET = "the secret of this run"
CONFIG = Path(__file__).parent / "serving.json"
START_LIMIT_S = 60
STOP_LIMIT_S = 20
END_LIMIT_S = 15
"""Time for all processes to end after their parent, in seconds."""
ROLES = {
    "launcher": "backend.cli serve",
    "preparation": "engines_build.prepare",
    "download": "-m pip ",
    "reader of bodies": "multiprocessing.spawn",
    "reader of grammars": "-m backend.sampling.reading",
    "tritonserver": "bin/tritonserver --",
    "engine": "backend.engine_process",
    "front end": "backend.openai_frontend",
    "stub of spindle": "/spindle/1/model.py",
    "stub of ensemble": "/ensemble/1/model.py",
}
"""Words in the command line of each of our processes."""
PACK = {"INT32": "<i", "BOOL": "<?", "FP32": "<f", "UINT64": "<Q"}
DTYPES = {field.name: field.dtype for field in TEXT_INPUTS}


_ports_in_use: set[int] = set()


def free_ports(count):
    """Return ports that are free now, none of them a second time."""
    ports: list[int] = []
    sockets: list[socket.socket] = []
    while len(ports) < count:
        sockets.append(socket.socket())
        sockets[-1].bind(("127.0.0.1", 0))
        port = sockets[-1].getsockname()[1]
        if port not in _ports_in_use:
            _ports_in_use.add(port)
            ports.append(port)
    for each in sockets:
        each.close()
    return ports


def write_engine_python(path, module):
    """Write a Python interpreter that runs a module instead of the engine process; return its
    path.
    """
    replace = f'if [ "$2" = backend.engine_process ]; then shift 2; set -- -m {module} "$@"; fi'
    path.write_text(f'#!/bin/sh\n{replace}\nexec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def write_config(folder, chat_template, **options):
    """Write the tests' ``serving.json`` with a chat template and options of the front end."""
    (folder / "chat.jinja").write_text(chat_template)
    raw = {**json.loads(CONFIG.read_text()), "openai": {"chat_template": "chat.jinja", **options}}
    (folder / "serving.json").write_text(json.dumps(raw))
    return folder / "serving.json"


class Service:
    """A launcher process and what it serves; ``root`` is the folder that it runs in, by default a
    checkout, ``inside`` a command that runs it.
    """

    def __init__(
        self,
        log,
        config,
        *arguments,
        root=PROJECT_ROOT,
        inside=(),
        python=sys.executable,
        **environment,
    ):
        self.http, self.grpc, self.metrics = free_ports(3)
        self.log, self.config = log, config
        ports = {
            "HTTP_PORT": str(self.http),
            "GRPC_PORT": str(self.grpc),
            "METRICS_PORT": str(self.metrics),
        }
        environment = {
            **os.environ,
            **ports,
            "OPENAI_PORT": "0",
            "SPINDLE_CONFIG": str(config),
            "OMP_NUM_THREADS": "1",
            VARIABLE: ADMIN_SECRET,
            "TMPDIR": str(log.parent),
            MARK: log.parent.as_posix(),
            **environment,
        }
        self.openai = int(environment["OPENAI_PORT"])
        with log.open("wb") as output:
            command = [python, "-m", "backend.cli", "serve", "--verbose", "--", *arguments]
            self.process = subprocess.Popen(
                [*inside, *command],
                cwd=root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until(self, condition, limit_s=START_LIMIT_S):
        """Return the condition's first true value; fails with the log after the limit or when the
        launcher has ended.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if value := condition():
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        log = self.log.read_text(errors="replace")[-4000:] if self.log.is_file() else ""
        pytest.fail(f"the service did not get there in {limit_s} s:\n{log}")

    def wait_ready(self, starts=1, limit_s=START_LIMIT_S):
        """Wait until the launcher has announced this many starts."""
        self.wait_until(
            lambda: self.log.read_text(errors="replace").count("spindle: try: curl") >= starts,
            limit_s,
        )
        return self

    def wait_for_front_end(self):
        """Wait until the OpenAI front end answers."""

        def answers():
            try:
                with socket.create_connection(("127.0.0.1", self.openai), timeout=1):
                    return True
            except OSError:
                return False

        self.wait_until(answers)

    def works(self):
        """Return whether the service answers a request."""
        try:
            return self.generate("again ", 4)[0] == 200
        except OSError:
            return False

    def stop(self):
        """SIGTERM the launcher and return its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S)

    # -- HTTP

    def post(self, path, body, timeout=30):
        """Return (status, body as text) of a POST; ``body`` is bytes or a JSON-able object."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with open_url(request, timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, text_input, max_tokens, model="ensemble", **inputs):
        """Return (status, reply) of /generate; no end token ends the text early unless asked
        for.
        """
        body = {"text_input": text_input, "max_tokens": max_tokens, "end_id": -1, **inputs}
        status, text = self.post(f"/v2/models/{model}/generate", body)
        return status, json.loads(text)

    def command(self, command, **more):
        """Return (status, body as text) of an administrative command."""
        body = {"command": command, "secret": ADMIN_SECRET, **more}
        return self.post("/v2/models/spindle/generate", body)

    def health(self):
        """Return the engine process's health."""
        status, text = self.command("health")
        assert status == 200, text
        return json.loads(json.loads(text)["reply"])

    def metric(self, name, **labels):
        """Return the sum of the series of a metric that have the labels."""
        with open_url(f"http://127.0.0.1:{self.metrics}/metrics", 10) as response:
            lines = response.read().decode().splitlines()
        series = [re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line) for line in lines]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(found[2])
            for found in series
            if found and all(pair in (found[1] or "") for pair in wanted)
        )

    # -- gRPC

    @contextmanager
    def stub(self) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
        """A gRPC client on a channel of its own."""
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc}", CHANNEL_OPTIONS) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)

    @contextmanager
    def streaming(self, prompt, max_tokens):
        """Stream a text and wait for its beginning; yields a function that returns all of it."""
        request = endless(prompt, max_tokens)
        with self.stub() as stub:
            stream = iter(stub.ModelStreamInfer(iter([request]), timeout=120))
            first = text_of(next(stream).infer_response)
            yield lambda: first + "".join(text_of(message.infer_response) for message in stream)

    # -- processes

    def tree(self):
        """Return the pids of everything below the launcher."""
        return descendants(self.process.pid)

    def running(self):
        """Return {pid: command line} of everything that the service has started and that runs,
        whichever process is its parent now.
        """
        mark = f"{MARK}={self.log.parent}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = " ".join(command_line(int(folder.name)))
        return found

    def pids(self, role):
        """Return the running processes of a role, without those that are still to become it."""
        return [
            pid
            for pid, command in self.running().items()
            if ROLES[role] in command and not re.search(r"lifeline\.py|pty\.spawn", command)
        ]

    def left(self):
        """Wait for the end of everything; return what still runs after the limit."""
        deadline = time.monotonic() + END_LIMIT_S
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return running

    def run_folders(self):
        """Return the run folders in this service's TMPDIR."""
        return list(self.log.parent.glob(f"{RUN_PREFIX}*"))

    def shared_memory(self):
        """Return the shared memory of the service: Triton's log says what its run folder, and so
        its regions, are called.
        """
        folders = re.findall(
            r"model_repository_path\[0\]\s*\|\s*(\S+)/model_repository",
            self.log.read_text(errors="replace"),
        )
        names = {Path(folder).name for folder in (*folders, *self.run_folders())}
        return [region for name in names for region in Path("/dev/shm").glob(f"{name}_*")]

    def pid_of(self, *words):
        """Return the process of the tree whose command line has all the words."""
        found = [
            pid for pid in self.tree() if all(word in " ".join(command_line(pid)) for word in words)
        ]
        assert len(found) == 1, (words, found)
        return found[0]


def infer_request(model, request_id="", empty_final=True, **inputs):
    """Return a raw gRPC request of one text request."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if empty_final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        dtype = DTYPES[name]
        request.inputs.add(
            name=name, datatype="BYTES" if dtype == "STRING" else dtype, shape=[1, 1]
        )
        raw = value if isinstance(value, bytes) else str(value).encode()
        request.raw_input_contents.append(
            struct.pack("<I", len(raw)) + raw
            if dtype == "STRING"
            else struct.pack(PACK[dtype], value)
        )
    return request


def endless(prompt, max_tokens, model="ensemble"):
    """Return a raw request of a stream that nothing but ``max_tokens`` ends."""
    asked = {"max_tokens": max_tokens, "stream": True, "end_id": -1}
    return infer_request(model, text_input=prompt, empty_final=False, **asked)


def text_of(response):
    """Return the text_output of a raw gRPC response, '' when it has none."""
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "text_output":
            return raw[4:].decode()
    return ""
