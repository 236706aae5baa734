"""A model and its head on the CUDA engine with a turn of lookahead, through the real tritonserver:
``python -m bench.cuda.served --model FOLDER --head FOLDER --out FILE``.

Texts are compared: alone without speculation, alone with it, and many in flight with it, greedy and
at temperature 0.8. ``--rehearse`` serves on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from backend.config import EMBEDDED_MODEL, PROJECT_ROOT
from backend.launcher.log_file import reasons
from backend.loopback import open_url
from backend.machine import machine

SEED = 7
PROMPTS = (
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,",
    "Once upon a time there was a little girl who",
    "The three most important things about the sea are",
    "A list of animals: cat, dog, horse, cow, sheep,",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "Water is made of",
    "One, two, three, four, five, six, seven,",
    "My favourite meal is soup, because",
)
IN_FLIGHT = 16
READY = "spindle: try: curl"
"""The launcher's line when the server answers."""


class Server:
    """A launcher, and the tritonserver that it starts on free ports."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self._log = folder / "log"
        (folder / "serving.json").write_text(json.dumps(config), "utf-8")
        http, grpc, metrics = _free_ports(3)
        self._url = f"http://127.0.0.1:{http}/v2/models/ensemble/generate"
        ports = {"HTTP_PORT": http, "GRPC_PORT": grpc, "METRICS_PORT": metrics, "OPENAI_PORT": 0}
        environment = os.environ | {name: str(port) for name, port in ports.items()}
        environment |= {"SPINDLE_CONFIG": str(folder / "serving.json"), "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "backend.cli", "serve", "--verbose"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=PROJECT_ROOT, env=environment, stdout=output, stderr=output
            )

    def wait(self, limit_s: float) -> None:
        """Wait until it answers. Raises RuntimeError with the end of its log."""
        end_s = time.monotonic() + limit_s
        while READY not in self.log():
            if self._process.poll() is not None or time.monotonic() > end_s:
                lines = "\n".join(reasons(self._log))
                raise RuntimeError(f"the server does not answer:\n{lines}")
            time.sleep(0.2)

    def log(self) -> str:
        """Return what it printed."""
        return self._log.read_text("utf-8", errors="replace")

    def ask(self, prompt: str, **options: Any) -> dict[str, Any]:
        """Return the reply to a request. Raises OSError."""
        body = {
            "text_input": prompt,
            "exclude_input_in_output": True,
            "return_num_output_tokens": True,
            "return_perf_metrics": True,
            "remember": False,
        }
        data = json.dumps(body | options).encode()
        request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        with open_url(request, 120) as response:
            reply: dict[str, Any] = json.load(response)
        return reply

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def config_of(model: str, head: str, *, rehearse: bool) -> dict[str, Any]:
    """Return the deployment: the head and ``suffix``, and the adaptive policy."""
    where = {"device": "cpu", "dtype": "fp32"} if rehearse else {"device": "cuda", "dtype": "bf16"}
    return {
        "target": {"engine": "cuda", "model": model, "lookahead": 1, **where},
        "drafts": [
            {"name": "head", "engine": "head", "model": head, **where},
            {"name": "suffix", "engine": "suffix"},
        ],
        "policy": {"kind": "adaptive", "k_max": 8, "keep_learned": False},
        "limits": {"max_active_requests": IN_FLIGHT},
        "threads": 1,
    }


def compare(server: Server, tokens: int, prompts: Sequence[str]) -> dict[str, Any]:
    """Ask every prompt in three ways at two temperatures; return what was the same and how fast."""
    found: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        options = {"max_tokens": tokens, "temperature": temperature, "seed": SEED}
        ways = {
            "plain, alone": (1, {"num_draft_tokens": 0}),
            "speculating, alone": (1, {}),
            f"speculating, {IN_FLIGHT} in flight": (IN_FLIGHT, {}),
            f"plain, {IN_FLIGHT} in flight": (IN_FLIGHT, {"num_draft_tokens": 0}),
        }
        expected: list[str] = []
        for way, (in_flight, more) in ways.items():
            asked = [*prompts] * (2 if in_flight > 1 else 1)
            begun = time.monotonic()
            with ThreadPoolExecutor(in_flight) as pool:
                asks = [pool.submit(server.ask, prompt, **options, **more) for prompt in asked]
                replies = [ask.result() for ask in asks]
            wall_s = time.monotonic() - begun
            texts = [reply["text_output"] for reply in replies]
            expected = expected or texts
            same = [text == expected[n % len(prompts)] for n, text in enumerate(texts)]
            written = sum(int(reply["num_output_tokens"]) for reply in replies)
            found[f"{way}, temperature {temperature}"] = {
                "same_texts": sum(same),
                "texts": len(texts),
                "tokens_per_s": round(written / wall_s, 1),
                "drafted": sum(int(reply["total_draft_tokens"]) for reply in replies),
                "accepted": sum(int(reply["total_accepted_draft_tokens"]) for reply in replies),
            }
    return found


def main() -> None:
    """Serve, compare, and write the record; the exit status is 1 where nothing was served."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help=f"a folder, or {EMBEDDED_MODEL}")
    parser.add_argument("--head", required=True, help="the folder of its head")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=240.0, help="until the server answers")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "command": [
            "python",
            "-m",
            "bench.cuda.served",
            "--model",
            args.model,
            "--head",
            args.head,
        ],
        "gpu": [str(gpu) for gpu in machine.gpus()],
        "machine": machine.describe(),
        "seed": SEED,
        "rehearsal": args.rehearse,
    }
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        config = config_of(args.model, args.head, rehearse=args.rehearse)
        begun, server = time.monotonic(), Server(config, Path(name))
        try:
            server.wait(args.seconds * (3 if args.rehearse else 1))
            record |= {"status": "ok", "ready_s": round(time.monotonic() - begun, 1)}
            prompts = PROMPTS[:2] if args.rehearse else PROMPTS
            record["found"] = compare(server, 12 if args.rehearse else 120, prompts)
        except (RuntimeError, OSError, KeyError) as error:
            record |= {"status": "failed", "error": str(error)[-4000:]}
        finally:
            server.close()
        log = server.log()
        record["log"] = log[:6000] + "\n...\n" + log[-6000:] if len(log) > 12000 else log
    args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(json.dumps({key: record.get(key) for key in ("status", "ready_s", "found", "error")}))
    sys.exit(record["status"] != "ok")


if __name__ == "__main__":
    main()
