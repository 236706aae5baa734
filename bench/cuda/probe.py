"""Figures that decide the CUDA engine's design, measured on a GPU in a few minutes:
``python -m bench.cuda.probe PART... --out FOLDER``, or ``all``.

Every part leaves FOLDER/PART.json as soon as it is done. Parts share a process; one that breaks the
CUDA context is recorded, and the parts after it get a new process. ``--rehearse`` runs small
shapes on a CPU under Triton's interpreter (set TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PARTS = {
    "machine": ("kernel_parts", "copy bandwidth, bf16 products"),
    "products": ("kernel_parts", "the 8B's five products at 1 to 640 tokens: cuBLAS and ours"),
    "attention": ("kernel_parts", "paged attention over splits and tiles"),
    "draws": ("kernel_parts", "the draw"),
    "prefill": ("kernel_parts", "chunks of a prompt through a layer"),
    "steps": ("step_parts", "whole 8B steps by rows and tokens"),
    "table": ("step_parts", "8B steps by rows, tokens and context: a latency table"),
    "heads": ("step_parts", "steps of a draft head and of a 1B draft"),
    "bits": ("exactness_parts", "bits of rows alone, in batches and in chains"),
    "distributions": ("exactness_parts", "draws of 100,000 random rows, with top-k, top-p, min-p"),
    "model": ("exactness_parts", "transformers' 8B with fused leaves: step times, texts"),
    "proposals": ("exactness_parts", "a head's proposals, and steps over trees of them"),
    "kernels": ("exactness_parts", "what each kernel of a proposal and its verification takes"),
    "pipelining": ("step_parts", "two half batches in two streams against one batch"),
}
"""A part's module and what it measures."""

SEED = 20261126
PART_LIMIT_S = 60.0


def main() -> None:
    """Run parts in the order given; the exit status is 0: failures are in the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"], metavar="PART")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=420.0, metavar="S", help="for all parts")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = list(PARTS) if "all" in args.parts else args.parts
    for part in parts if not args.inside else ():
        (args.out / f"{part}.json").unlink(missing_ok=True)
    end_s = time.monotonic() + args.limit
    if args.inside:
        run_parts(parts, args.out, end_s, rehearse=args.rehearse)
        return
    while parts:
        left_s = end_s - time.monotonic()
        command = ["-m", "bench.cuda.probe", *parts, "--out", str(args.out)]
        command += ["--limit", f"{left_s:.0f}", "--inside"]
        if args.rehearse:
            command.append("--rehearse")
        child = subprocess.Popen([sys.executable, *command])
        _wait(child, parts, args.out, end_s)
        begun = [part for part in parts if (args.out / f"{part}.json").exists()]
        if not begun:
            return
        parts = parts[parts.index(begun[-1]) + 1 :]


def _wait(child: subprocess.Popen[bytes], parts: list[str], out: Path, end_s: float) -> None:
    """Wait for a process that runs parts; kill it where one of them takes too long."""
    part_s, begun, since = PART_LIMIT_S, 0, time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        count, now = sum((out / f"{part}.json").exists() for part in parts), time.monotonic()
        if count != begun:
            begun, since = count, now
        if now > since + part_s or now > end_s + 20:
            print("killed: a part took too long, or all of them", flush=True)
            child.kill()
            child.wait()


def run_parts(parts: list[str], out: Path, end_s: float, *, rehearse: bool) -> None:
    """Run parts one after the other; return early where the CUDA context is broken."""
    import torch

    from bench.cuda.measuring import Probe

    probe = Probe(end_s, rehearse=rehearse)
    for name in parts:
        start = time.monotonic()
        module, what = PARTS[name]
        path = out / f"{name}.json"
        report: dict[str, Any] = {
            "part": name,
            "what": what,
            "gpu": probe.gpu,
            "versions": versions(),
            "seed": SEED,
            "command": ["python", "-m", "bench.cuda.probe", *parts],
            "rehearsal": rehearse,
            "status": "begun",
        }
        path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print(f"--- {name}: {what} ({probe.left_s():.0f} s left)", flush=True)
        try:
            with torch.inference_mode():
                torch.manual_seed(SEED)
                functions = importlib.import_module(f"bench.cuda.{module}")
                found = getattr(functions, name)(probe)
            report |= {"status": "ok"} | found
        except Exception:
            report |= {"status": "failed", "error": traceback.format_exc()[-2500:]}
            print(report["error"], flush=True)
        report["wall_s"] = round(time.monotonic() - start, 1)
        path.write_text(json.dumps(report, indent=1, default=str) + "\n", "utf-8")
        try:
            probe.empty()
        except Exception:  # a sticky error of CUDA: the next parts need a new process
            print("the CUDA context is broken", flush=True)
            os._exit(1)


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")}
    return {"python": sys.version.split()[0]} | packages


if __name__ == "__main__":
    main()
