"""Parts of the probe that measure whole steps over random weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from backend.engines.cuda.kernels import triton_kernels
from backend.engines.cuda.pages import PAGE
from bench.cuda.measuring import Probe
from bench.cuda.step import SHAPES, Step, Weights, new_kv

ROWS = (1, 8, 32, 64, 128)


def steps(probe: Probe) -> dict[str, Any]:
    """Time whole steps in graphs by rows and tokens, with both choices of products."""
    weights = Weights(probe.shape, probe.device, probe.dtype)
    kv = new_kv(probe.shape, probe.of(128 * 36, 64), probe.device, probe.dtype)
    found: dict[str, Any] = {}
    for rows in probe.of(ROWS, (2,)):
        for most in (1, 3, 5, 9):
            for invariant in (False, True):
                if probe.left_s() < 20:
                    return {"steps": found, "status": "out of time"}
                kernels = triton_kernels(invariant=invariant)
                step = Step(weights, kv, rows, most, probe.context + 100, kernels)
                step.fill(probe.context)
                start = time.monotonic()
                replay = probe.graph(step.run)
                capture_s = time.monotonic() - start
                read = weights.pass_bytes + rows * probe.context * probe.shape.kv_bytes
                cell = {
                    "ms": probe.time_ms(replay),
                    "floor_ms": probe.floor_ms(read),
                    "capture_s": capture_s,
                }
                key = f"{rows} rows, {most} tokens, invariant {invariant}"
                found[key] = cell
                print(key, {name: round(value, 3) for name, value in cell.items()}, flush=True)
    return {"steps": found, "context": probe.context, "price_of_invariant": _prices(found)}


def _prices(cells: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return by rows and tokens the time with products of fixed order over that without."""
    found = {}
    for key in cells:
        size, is_invariant = key.rsplit(", invariant ", 1)
        if is_invariant == "True":
            without = cells[f"{size}, invariant False"]
            found[size] = round(cells[key]["ms"] / without["ms"], 3)
    return found


def table(probe: Probe) -> dict[str, Any]:
    """Time steps by rows, tokens a row and context: a latency table."""
    weights = Weights(probe.shape, probe.device, probe.dtype)
    kv = new_kv(probe.shape, probe.of(128 * 36, 64), probe.device, probe.dtype)
    kernels = triton_kernels(invariant=False)
    found: list[dict[str, Any]] = []
    for rows in probe.of((1, 2, 4, 8, 16, 32, 64, 128), (2,)):
        for context in probe.of((250, 1000, 3000), (70,)):
            if rows * (context + 64) > len(kv[0]) * PAGE:
                continue
            for most in (1, 2, 3, 5, 9):
                if probe.left_s() < 20:
                    return {"cells": found, "status": "out of time"}
                step = Step(weights, kv, rows, most, context + 100, kernels)
                step.fill(context)
                ms = probe.time_ms(probe.graph(step.run), 5)
                found.append({"rows": rows, "tokens": most, "context": context, "ms": ms})
            shown = " ".join(f"{cell['ms']:.2f}" for cell in found[-5:])
            print(f"{rows:3d} rows, context {context}: {shown} ms for 1, 2, 3, 5, 9", flush=True)
    return {"cells": found}


def heads(probe: Probe) -> dict[str, Any]:
    """Time one step of a draft head and of a 1B draft."""
    found: dict[str, Any] = {}
    for name in probe.of(("head", "1b"), ("tiny",)):
        shape = SHAPES[name]
        weights = Weights(shape, probe.device, probe.dtype)
        kv = new_kv(shape, probe.of(128 * 36, 64), probe.device, probe.dtype)
        for rows in probe.of(ROWS, (2,)):
            kernels = triton_kernels(invariant=False)
            step = Step(weights, kv, rows, 1, probe.context + 100, kernels)
            step.fill(probe.context)
            replay = probe.graph(step.run)
            read = weights.pass_bytes + rows * probe.context * shape.kv_bytes
            cell = {"ms": probe.time_ms(replay), "floor_ms": probe.floor_ms(read)}
            found[f"{name}, {rows} rows"] = cell
            print(name, rows, cell, flush=True)
        del weights, kv
        probe.empty()
    return {"steps": found}


class Turn:
    """Four steps of a draft and one pass over five tokens a row, each a graph."""

    def __init__(
        self,
        probe: Probe,
        models: list[tuple[Weights, list[torch.Tensor]]],
        rows: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        (target, target_kv), (draft, draft_kv) = models
        kernels, keys = triton_kernels(invariant=False), probe.context + 100
        self._verify = Step(target, target_kv, rows, 5, keys, kernels)
        self._propose = Step(draft, draft_kv, rows, 1, keys, kernels)
        self._verify.fill(probe.context)
        self._propose.fill(probe.context)
        self.draft = probe.graph(lambda: [self._propose.run() for _ in range(4)], stream)
        self.verify = probe.graph(self._verify.run, stream)


def pipelining(probe: Probe) -> dict[str, Any]:
    """Time rounds of drafting by a 1B and verifying by the 8B: one batch of all rows in one stream,
    against two half batches in two streams, one drafting while the other is verified.
    """
    names = probe.of(("8b", "1b"), ("tiny", "tiny"))
    blocks = probe.of(64 * 36, 64)
    models = [
        (
            Weights(SHAPES[name], probe.device, probe.dtype),
            new_kv(SHAPES[name], blocks, probe.device, probe.dtype),
        )
        for name in names
    ]
    found: dict[str, Any] = {}
    for rows in probe.of((8, 16, 32, 64), (2,)):
        streams = [None if probe.rehearse else torch.cuda.Stream() for _ in range(3)]
        whole = Turn(probe, models, rows, streams[0])
        halves = [Turn(probe, models, rows // 2, stream) for stream in streams[1:]]
        rounds = probe.of(20, 1)
        found[str(rows)] = {
            "one_batch_ms": probe.host_ms(_one_batch(whole, rounds)) / rounds,
            "two_halves_ms": probe.host_ms(_two_halves(halves, streams[1:], rounds)) / rounds,
            "draft_ms": probe.time_ms(whole.draft),
            "verify_ms": probe.time_ms(whole.verify),
            "half_draft_ms": probe.time_ms(halves[0].draft),
            "half_verify_ms": probe.time_ms(halves[0].verify),
        }
        print(rows, found[str(rows)], flush=True)
    return {"rounds": found}


def _one_batch(turn: Turn, rounds: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(rounds):
            turn.draft()
            turn.verify()

    return run


def _two_halves(
    halves: list[Turn], streams: list[torch.cuda.Stream | None], rounds: int
) -> Callable[[], None]:
    """Return what runs both halves' rounds, the second half a phase ahead."""

    def run() -> None:
        for n in range(rounds):
            for which, (turn, stream) in enumerate(zip(halves, streams, strict=True)):
                with torch.cuda.stream(stream):
                    if n or which == 0:
                        turn.draft()
                    turn.verify()

    return run
