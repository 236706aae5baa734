"""Parts (a) to (d) and (f): the machine, the tests, step times, their share of the floor,
training.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.gpu.job import Job, LackError
from tests.gpu.models import (
    SHAPES,
    blocks_of,
    copy_bandwidth,
    engine_of,
    launches,
    read_bytes,
    seconds_of,
    stepper,
    timed,
)

ROOT = Path(__file__).parents[2]
LONGEST = 8
"""Proposed tokens at the most."""


def machine(job: Job) -> None:
    """Part a: copy bandwidth and the matrix product's ceiling."""
    device, size = job.device, 1 << (22 if job.rehearse else 31)
    job.result["copy_gb_s"] = round(copy_bandwidth(device, size) / 1e9, 1)
    job.keep()
    side = 256 if job.rehearse else 8192
    square = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    job.result["matmul_tflops"] = {
        str(side): round(2 * side**3 / seconds_of(lambda: square @ square, device) / 1e12, 3)
    }
    inner, outer = (128, 256) if job.rehearse else (4096, 14336)
    weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16)
    job.result["weight_gb_s"] = {}
    for rows in (1, 8, 64, 256):
        few = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        seconds = seconds_of(lambda few=few: torch.nn.functional.linear(few, weight), device, 30)
        job.result["weight_gb_s"][str(rows)] = round(2 * weight.numel() / seconds / 1e9, 1)
        job.keep()


def tests(job: Job) -> None:
    """Part b: a product of the engine on the device against the host's, then the suites that want a
    GPU, by pytest.
    """
    job.result["difference"] = difference(job.device)
    job.keep()
    need("pytest")
    suites = ["tests/gpu/test_cuda.py"]
    if not job.rehearse:
        suites.append("tests/contract/test_device.py")
    command = [
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        *suites,
    ]
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=job.left_s,
        check=False,
    )
    job.result["pytest"] = {
        "command": ["python", *command],
        "exit_status": ended.returncode,
        "tail": ended.stdout[-3000:],
    }
    if ended.returncode not in (0, 5):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-600:]}")


def difference(device: str) -> float:
    """Return the greatest difference of logits in fp64 between a verification on the device and one
    on the host.
    """
    from backend.engines.stepping.chunks import Chunk, KVTable
    from backend.engines.torch.engine import TorchEngine

    config, found = SHAPES["tiny"], []
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in config.shapes().items()
    }
    for where in (device, "cpu"):
        here = {name: weight.to(where) for name, weight in weights.items()}
        engine = TorchEngine.from_weights(
            "target", config, here, kv_blocks=16, max_context_tokens=64
        )
        chunks = [
            Chunk(
                list(range(1, rows + 1)),
                0,
                KVTable([4 * n, 4 * n + 1], where),
                rows,
            )
            for n, rows in enumerate((5, 2, 9))
        ]
        with torch.inference_mode():
            found.append(engine._model.forward(chunks).cpu())
    return float((found[0] - found[1]).abs().max())


def sizes(job: Job) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], int]:
    """Return shapes, batches, contexts and the prefill chunk."""
    if job.rehearse:
        return ("tiny", "tinier"), (1, 3), (40, 100), 32
    return ("8b", "1b"), (1, 2, 4, 8, 16, 32, 64), (1000, 232, 4000), 256


def lengths_of(kind: str, batch: int) -> list[int]:
    """Return the proposed tokens of every row."""
    return (
        list(itertools.islice(itertools.cycle((0, 2, 4, LONGEST)), batch))
        if kind == "mixed"
        else [int(kind)] * batch
    )


def cells(job: Job) -> Iterator[dict[str, Any]]:
    """Yield the steps of part c, the most telling first."""
    _, batches, contexts, chunk = sizes(job)
    for context in contexts:
        for kind, batch in itertools.product(("0", "4", "mixed", str(LONGEST)), batches):
            yield {"context": context, "batch": batch, "k": kind, "chunk": 0}
        for kind, batch in itertools.product(
            ("0", "mixed"), batches if context == contexts[0] else ()
        ):
            yield {"context": context, "batch": batch, "k": kind, "chunk": chunk}


def steps(job: Job) -> None:
    """Part c: step times and launch counts, engine by engine; a cell that fails says so in its
    place.
    """
    shapes, batches, contexts, chunk = sizes(job)
    blocks = max(batches) * blocks_of(max(contexts), 1 + LONGEST) + blocks_of(max(contexts), chunk)
    job.result |= {"steps": [], "launches": [], "left_out": 0}
    for number, shape in enumerate(shapes):
        share_s = job.left_s / (len(shapes) - number)
        end_s = job.left_s - share_s
        engine = engine_of(shape, job.device, blocks, max(contexts) + chunk)
        for kind, batch, beside in [
            *itertools.product(("0", "4"), (batches[0], batches[-1]), (0,)),
            ("4", batches[-1], chunk),
        ]:
            cell = {"context": contexts[0], "batch": batch, "k": kind, "chunk": beside}
            attempt(job, "launches", engine, shape, cell, profiled=True)
        for cell in cells(job):
            if job.left_s < end_s:
                job.result["left_out"] += 1
            else:
                attempt(job, "steps", engine, shape, cell)
        engine.close()
        del engine
        release(job.device)


def attempt(
    job: Job,
    kind: str,
    engine: Any,
    shape: str,
    cell: dict[str, Any],
    *,
    profiled: bool = False,
) -> None:
    """Measure one step (its time; ``profiled`` what it launches, too) and keep what came of it, if
    only the error.
    """
    row = {"shape": shape, **cell}
    try:
        step = stepper(engine, cell["context"], lengths_of(cell["k"], cell["batch"]), cell["chunk"])
        with torch.inference_mode():
            row |= timed(step, 0.02 if job.rehearse else 0.25) | (
                launches(step, job.device) if profiled else {}
            )
    except RuntimeError as error:  # out of memory is one
        row["error"] = str(error)[:300]
        release(job.device)
    job.result[kind].append(row)
    job.keep()


def floor(job: Job) -> None:
    """Part d: the time of a step against what it takes to read its bytes once, and against the time
    that the device works.
    """
    shapes, batches, contexts, _ = sizes(job)
    bandwidth = copy_bandwidth(job.device, 1 << (22 if job.rehearse else 31))
    job.result |= {"bandwidth_gb_s": round(bandwidth / 1e9, 1), "steps": []}
    some = [batch for batch in batches if batch in (1, 3, 8, 32, 64)]
    blocks = max(some) * blocks_of(max(contexts), 1 + LONGEST)
    for number, shape in enumerate(shapes):
        end_s = job.left_s * (1 - 1 / (len(shapes) - number))
        engine = engine_of(shape, job.device, blocks, max(contexts))
        for context, kind, batch in itertools.product(contexts, ("0", "4"), some):
            if job.left_s < end_s:
                break
            cell = {"context": context, "batch": batch, "k": kind, "chunk": 0}
            attempt(job, "steps", engine, shape, cell, profiled=True)
            row = job.result["steps"][-1]
            row["floor_ms"] = round(1e3 * read_bytes(SHAPES[shape], batch * context) / bandwidth, 4)
            if "ms" in row:
                row["share"] = round(row["floor_ms"] / row["ms"], 6)
        engine.close()
        del engine
        release(job.device)


def need(*packages: str) -> None:
    """Raise LackError naming what is not installed."""
    lacking = [name for name in packages if not installed(name)]
    if lacking:
        raise LackError(", ".join(lacking))


def installed(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def release(device: str) -> None:
    """Give memory back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
