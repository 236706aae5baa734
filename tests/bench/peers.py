"""Other stacks as arms of the sweep, on the same weights: each a process in an environment of its own (``peer_worker``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from backend import machine
from backend.app import model_path
from backend.config import EMBEDDED_MODEL, parse_config
from backend.triton_adapter.paths import PROJECT_ROOT
from engines_build.convert import embedded_gguf
from tests.bench.arms import Arm, Offer, Reply, Served

PEERS = ("transformers-plain", "transformers-assisted", "transformers-lookup", "openvino-plain", "openvino-lookup")
WORKER = Path(__file__).with_name("peer_worker.py")


class PeerArm:
    """A worker process."""

    def __init__(self, command: list[str]) -> None:
        patient = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads that spin lose many times over where others use the cores
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=patient)
        self._read()

    def run(self, offer: Offer) -> Served:
        """Serve a closed loop. Raises ValueError for an open one, RuntimeError when the worker has ended."""
        if offer.at_s is not None:
            raise ValueError("a peer serves closed loops only")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"requests": list(offer.requests), "concurrency": offer.concurrency}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read())
        return Served([Reply(**reply, drafted=0, accepted=0, finish_reason="") for reply in answer["replies"]], answer["wall_s"], {})

    def close(self) -> None:
        """End the worker."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError(f"the peer ended with status {self._process.wait()}: {' '.join(self._process.args)}")


class Peers:
    """Gives the arms of the peers, each started when first asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(config)
        self._running: dict[str, PeerArm] = {}

    def missing(self, name: str) -> str:
        """Return why a peer cannot be run here, '' when it can."""
        if self._config.target.model != EMBEDDED_MODEL:
            return f"peers run {EMBEDDED_MODEL} only, not {self._config.target.model!r}"
        if name.endswith("-assisted") and not self._draft():
            return "no draft that runs a model"
        return "" if _python(name).is_file() else f"no environment: tests/bench/peers.sh {name.partition('-')[0]}"

    def arm(self, name: str) -> tuple[Arm, bool]:
        """Return the arm and whether it has just begun."""
        fresh = name not in self._running
        if fresh:
            self._running[name] = PeerArm(self._command(name))
        return self._running[name], fresh

    def close(self) -> None:
        """End all peers."""
        while self._running:
            self._running.popitem()[1].close()

    def _draft(self) -> str:
        """Return the folder of the largest draft."""
        folders = [model_path(draft) for draft in self._config.drafts if draft.engine == "torch"]
        return str(max(folders, key=lambda folder: sum(file.stat().st_size for file in folder.glob("*.safetensors")), default=""))

    def _command(self, name: str) -> list[str]:
        models = ["--model", str(model_path(self._config.target)), "--draft", self._draft(), "--gguf", str(embedded_gguf())]
        return [str(_python(name)), str(WORKER), name, *models, "--threads", str(machine.cores())]


def _python(name: str) -> Path:
    stack = name.partition("-")[0]
    return Path(sys.executable) if stack == "transformers" else PROJECT_ROOT / "build" / "peers" / stack / "bin" / "python"
