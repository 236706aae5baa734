"""Everything that wants a GPU, in one command: ``python -m tests.gpu.run --out FOLDER`` (twenty minutes by default).

Writes ``tests.log`` (the engine on CUDA and the suites that it shares), ``steps.json`` (``bench_steps``), ``sweep-gpu.json`` and its page
(the load sweep in process, on the tiny family, which is in the repository; its latency tables are measured first) and ``run.json``: device,
versions, the commands and how each ended. Goes on behind a part that fails, and then exits with 1. Needs the packages of requirements.txt,
but no tritonserver and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from backend import machine

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def commands(out: Path, device: str, minutes: float) -> dict[str, list[str]]:
    """Return the parts, each a module and its arguments."""
    config = json.loads((HERE / "serving.json").read_text("utf-8"))
    for engine in (config["target"], *config["drafts"]):
        if "device" in engine:
            engine["device"] = device
    (out / "serving.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    suites = ["tests/gpu", "tests/contract/test_static.py", "tests/contract/test_device.py", "tests/contract/test_padded.py"]
    sweep = ["--in-process", "--config", str(out / "serving.json"), "--workloads", "sql", "--closed", "1", "8", "64"]
    sweep += ["--active", "64", "--shares", "0.7", "--arrivals", "poisson", "--lengths", "2", "6", "--limit-s", str(30.0 * minutes)]
    return {
        "tests": ["pytest", "-q", *suites],
        "steps": ["tests.gpu.bench_steps", "--device", device, "--out", str(out / "steps.json")],
        "sweep": ["tests.bench.sweep", *sweep, "--out", str(out / "sweep-gpu.json")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["tests", "steps", "sweep"])
    parser.add_argument("--device", default="cuda", help="another one tries the command out where there is no GPU")
    parser.add_argument("--minutes", type=float, default=20.0, help="a half of it for the sweep; no part runs longer than all of it")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA GPU here")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    report = {"device": device, "cuda": torch.version.cuda, "machine": machine.describe(), "seed": 0, "parts": {}}
    environment = {**os.environ, "SPINDLE_CACHE": str(out / "cache"), "PYTHONUNBUFFERED": "1"}
    for part, module in commands(out, args.device, args.minutes).items():
        if part not in args.parts:
            continue
        command = ["-m", *module]
        start = time.monotonic()
        with (out / f"{part}.log").open("w", encoding="utf-8") as log:
            try:
                ended = subprocess.run(
                    [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=60.0 * args.minutes, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                ended = 124
        report["parts"][part] = {"command": ["python", *command], "exit_status": ended, "wall_s": round(time.monotonic() - start, 1)}
        (out / "run.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print(f"{part}: exit status {ended}, {report['parts'][part]['wall_s']} s, {out / part}.log", flush=True)
    sys.exit(any(found["exit_status"] for found in report["parts"].values()))


if __name__ == "__main__":
    main()
