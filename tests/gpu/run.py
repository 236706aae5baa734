"""What wants a GPU, in parts of at most 9 minutes: ``python -m tests.gpu.run PART... --out
FOLDER``, or ``all``.

Each part is a process of its own and leaves FOLDER/PART.json, whatever becomes of it: a part that
fails, lacks a package, or is killed when its time is up says so there, with what it had found, and
the next one runs. Nothing is downloaded. Torch and NumPy suffice, but for the pytest suites of part
b and for part f. ``--rehearse`` runs small shapes on a CPU, in about a minute.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.job import SEED, Job, LackError

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "safetensors", "pytest", "tokenizers", "transformers")
MARGIN_S, MARGIN_SHARE = 30.0, 0.2
"""Before its limit a part should be done by itself, by the less of these (a share of the limit)."""


class Part(NamedTuple):
    """What a part does, its function, and seconds: ``expected_s`` on an H200 (an estimate),
    ``limit_s``, ``rehearsal_s``.
    """

    what: str
    function: str
    expected_s: int
    limit_s: int
    rehearsal_s: int = 60


PARTS = {
    "a": Part("versions, copy bandwidth, matrix products", "parts.machine", 30, 60),
    "b": Part("the engine against the host, and the tests on CUDA", "parts.tests", 180, 300),
    "c": Part("step times and launches, 8B and 1B", "parts.steps", 480, 540),
    "d": Part("share of the bytes-over-bandwidth floor", "parts.floor", 120, 180),
    "e1": Part("latency tables of 8B, 1B and 135M", "policies.tables", 510, 540),
    "e2": Part("no, fixed and adaptive speculation", "policies.policies", 480, 540),
}


def main() -> None:
    """Run parts one after the other; the exit status is 0, for what failed is in the files."""
    known = "\n".join(
        f"  {name:3} {part.what}: {part.expected_s} of {part.limit_s} s"
        for name, part in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"parts, with seconds expected on an H200 (an estimate) and the most they "
        f"take:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="+",
        choices=[*PARTS, "all"],
        metavar="PART",
        help=f"{', '.join(PARTS)} or all",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, metavar="S", help="at most so many seconds a part")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.limit is not None and args.limit <= 0:
        parser.error(f"--limit: must be positive, got {args.limit}")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = list(PARTS) if "all" in args.parts else args.parts
    for name in chosen:
        part, limit_s = PARTS[name], limit_of(name, args.limit, rehearse=args.rehearse)
        if args.inside:
            inside(name, args.out, limit_s, rehearse=args.rehearse)
            return
        print(
            f"{name}: {part.what}; about {part.expected_s} s on an H200, at most {limit_s} s",
            flush=True,
        )
        report = run(name, args.out, args.limit, rehearse=args.rehearse)
        path = args.out / f"{name}.json"
        path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print(
            f"{name}: {report['status']} {report.get('error', '')[-300:]} {report['wall_s']} s, "
            f"{path}",
            flush=True,
        )


def limit_of(name: str, most_s: int | None, *, rehearse: bool) -> int:
    """Return the most seconds that a part takes, where no part is to take more than ``most_s``."""
    part = PARTS[name]
    return min(part.rehearsal_s if rehearse else part.limit_s, most_s or part.limit_s)


def run(name: str, out: Path, most_s: int | None = None, *, rehearse: bool) -> dict[str, Any]:
    """Run a part in a process of its own and return its report."""
    part, start = PARTS[name], time.monotonic()
    limit_s = limit_of(name, most_s, rehearse=rehearse)
    found = out / f"{name}.part"
    found.unlink(missing_ok=True)
    command = [
        "-m",
        "tests.gpu.run",
        name,
        "--out",
        str(out),
        *(["--limit", str(most_s)] if most_s else []),
        *(["--rehearse"] if rehearse else []),
    ]
    child = subprocess.Popen(
        [sys.executable, *command, "--inside"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        errors="replace",
    )
    try:
        error = child.communicate(timeout=limit_s)[1]
        status = f"ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        error, status = child.communicate()[1], f"killed after {limit_s} s"
    report: dict[str, Any] = {"part": name, "what": part.what, "status": status}
    report |= {"command": ["python", *command], "seed": SEED, "rehearsal": rehearse}
    report |= {
        "expected_s_on_h200": part.expected_s,
        "limit_s": limit_s,
        "wall_s": round(time.monotonic() - start, 1),
    }
    if child.returncode:
        report["error"] = error[-2000:]
    if found.is_file():
        report |= json.loads(found.read_text("utf-8"))
        found.unlink()
    return report


def inside(name: str, out: Path, limit_s: int, *, rehearse: bool) -> None:
    """Do a part's work, in its own process, and leave what came of it in its file."""
    part, margin_s = PARTS[name], 0.0 if rehearse else min(MARGIN_S, MARGIN_SHARE * limit_s)
    end_s = time.monotonic() + limit_s - margin_s
    job = Job(name, out, "cpu" if rehearse else "cuda", rehearse, end_s)
    job.keep(versions=versions())
    try:
        job.keep(**hardware(job.device))
        function(part.function)(job)
        job.keep(status="ok")
    except LackError as error:
        job.keep(status="lacks packages", error=f"not installed here: {error}")
    except ModuleNotFoundError as error:
        job.keep(status="lacks packages", error=f"not installed here: {error.name}")
    except Exception:  # whatever it is, it is to be read in the file
        job.keep(status="failed", error=traceback.format_exc()[-2000:])


def function(name: str) -> Callable[[Job], None]:
    """Return a part's function; its module is imported only now, for it may lack a package."""
    module, _, attribute = name.partition(".")
    found: Callable[[Job], None] = getattr(
        importlib.import_module(f"tests.gpu.{module}"), attribute
    )
    return found


def versions() -> dict[str, str | None]:
    """Return what is installed of the packages that matter, None for what is not."""
    return {"python": sys.version.split()[0]} | {package: version(package) for package in PACKAGES}


def version(package: str) -> str | None:
    """Return a package's version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(device: str) -> dict[str, Any]:
    """Return processor and GPU. Raises RuntimeError where torch sees none and one is wanted."""
    import torch

    from backend.machine import machine

    found: dict[str, Any] = {
        "machine": machine.describe(),
        "device": device,
        "cuda": torch.version.cuda,
    }
    torch.set_num_threads(1)  # as the engine process has with a GPU
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                "torch sees no CUDA GPU here; --rehearse runs small shapes on the CPU"
            )
        seen = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": seen.name,
            "memory_gib": round(seen.total_memory / 2**30, 1),
            "capability": [seen.major, seen.minor],
        }
        found["gpu"] |= {"processors": seen.multi_processor_count}
    return found


if __name__ == "__main__":
    main()
