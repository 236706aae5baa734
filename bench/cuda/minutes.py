"""The next minutes on a GPU, in the order in which they decide most:
``python -m bench.cuda.minutes PART... --out FOLDER``, or ``all``.

Each part is a process of its own with a time limit of its own, and FOLDER/minutes.json is written
after each. Nothing is measured after a part that found texts to differ. The policy's loops are
compiled meanwhile. ``--rehearse`` runs the same parts on a CPU (set TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend import PROJECT_ROOT
from backend.machine import machine
from bench import records

SEED = 20261126
_PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "llvmlite", "msgspec")
_PACKAGES_OF_SERVING = ("tokenizers", "safetensors")


@dataclass(frozen=True)
class TimedCommand:
    """A command, without its interpreter, and its time limit; FOLDER in it is the output's."""

    purpose: str
    command: tuple[str, ...]
    limit_s: float
    is_gate: bool = False
    """Whether nothing is measured after it unless it succeeds."""


PARTS = {
    "doctor": TimedCommand("what the machine has", ("backend.cli", "doctor", "--json"), 60.0),
    "gate": TimedCommand(
        "whether texts are the same whatever is in flight; what chunks and top-p cost",
        ("bench.cuda.gate", "--out", "FOLDER/gate.json"),
        240.0,
        is_gate=True,
    ),
    "served": TimedCommand(
        "the tiny family whole, in one process: texts alone and among sixteen",
        ("bench.cuda.served", "--out", "FOLDER/served.json"),
        120.0,
    ),
    "scripted": TimedCommand(
        "no speculation, two fixed lengths and the adaptive policy at 1, 8, 64 and 128 rows",
        (
            *("bench.cuda.scripted", "--loads", "1", "8", "64", "128", "--policies", "none"),
            *("large 2", "large 4", "adaptive", "--out", "FOLDER/scripted.json"),
        ),
        400.0,
    ),
    "open": TimedCommand(
        "the same in open loops, at half and nine tenths of the capacity",
        (
            *("bench.cuda.scripted", "--loads", "128", "--policies", "none", "large 4", "adaptive"),
            *("--open", "0.5", "0.9", "--out", "FOLDER/open.json"),
        ),
        180.0,
    ),
}
"""In their order."""

_LIMITED = {"bench.cuda.scripted": "--seconds"}
"""Programs that end by themselves, with what they have, and their option for that."""
_MARGIN_S = 15.0
_SLOWER = 4
"""How much more time a part has in a rehearsal."""


def main() -> None:
    """Run parts in their order; the exit status is 0: what failed is in the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"], metavar="PART")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=570.0, metavar="S", help="for all parts")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in PARTS if name in args.parts or "all" in args.parts]
    end_s = time.monotonic() + args.limit
    record: dict[str, Any] = {
        "gpu": [str(gpu) for gpu in machine.gpus()],
        "versions": versions(),
        "seed": SEED,
        "rehearsal": args.rehearse,
        "parts": {},
    }
    compiling = subprocess.Popen(
        [sys.executable, "-m", "policy.loops"], cwd=PROJECT_ROOT, stderr=subprocess.DEVNULL
    )
    for name in wanted:
        if name == "scripted":
            compiling.wait()
        left_s = end_s - time.monotonic()
        print(f"=== {name}: {PARTS[name].purpose} ({left_s:.0f} s left)", flush=True)
        record["parts"][name] = run(PARTS[name], args.out, left_s, rehearse=args.rehearse)
        records.write(args.out / "minutes.json", record)
        if PARTS[name].is_gate and record["parts"][name]["status"] != "exit status 0":
            print(f"=== nothing is measured after {name}: it did not succeed", flush=True)
            break
    compiling.kill()
    compiling.wait()


def run(part: TimedCommand, out: Path, left_s: float, *, rehearse: bool) -> dict[str, Any]:
    """Run a part within its limit and what is left; return what became of it."""
    limit_s = min(part.limit_s * (_SLOWER if rehearse else 1), left_s)
    words = [word.replace("FOLDER", str(out)) for word in part.command]
    if option := _LIMITED.get(words[0]):
        words += [option, f"{max(1.0, limit_s - _MARGIN_S):.0f}"]
    words += ["--rehearse"] if rehearse and words[0].startswith("bench.") else []
    report: dict[str, Any] = {"command": ["python", "-m", *words], "limit_s": round(limit_s, 1)}
    if limit_s < 2 * _MARGIN_S:
        return report | {"status": "no time left"}
    start_s, log = time.monotonic(), out / "log.txt"
    with log.open("w+b") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=PROJECT_ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            status = f"exit status {child.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = f"killed after {limit_s:.0f} s"
        output.seek(0)
        text = output.read().decode(errors="replace")
    log.unlink()
    print(text[-3000:], flush=True)
    report |= {"status": status, "wall_s": round(time.monotonic() - start_s, 1)}
    return report | {"output": text[-8000:]}


def versions() -> dict[str, str]:
    """Return the versions of what is measured and served; ``none`` of what is not installed."""
    names = (*_PACKAGES, *_PACKAGES_OF_SERVING)
    by_name = {name: machine.package_version(name) or "none" for name in names}
    return {"python": sys.version.split()[0]} | by_name


if __name__ == "__main__":
    main()
