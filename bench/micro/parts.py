"""Where a step's time goes: ``python -m bench.micro.parts --model FOLDER --out FILE`` (CPU).

Steps behind ``--context`` tokens with a clock around each kind of call, in CPU time of the one
thread; medians. ``other`` is what no clock is around: residual sums, rotation, KV writes, and
Python.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from backend.engines.torch.fp16 import Fp16Linear
from backend.engines.torch.int8 import Int8Linear
from torch.nn import functional

from backend import machine
from backend.engines.checkpoint import DTYPES
from backend.engines.stepping.chunks import KVTable
from backend.engines.torch import engine as torch_engine
from backend.engines.torch import padded
from backend.engines.torch.engine import TorchEngine
from backend.engines.torch.llama import Linear
from bench.micro.dtypes import stepper

STEPS = ((1, 0), (4, 0), (16, 0), (1, 4))
"""(sequences, proposed tokens of each)"""
HEAD_OUTPUTS = 10_000
"""A product with so many columns or more is the head's."""


class Clock:
    """Sums the CPU seconds of the functions that it is put around."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            head = name == "matrices" and result.shape[1] >= HEAD_OUTPUTS
            self.parts["head" if head else name] += time.thread_time() - start
            return result

        return timed


def parts(
    engine: TorchEngine, sequences: int, proposed: int, context: int, rounds: int
) -> dict[str, float]:
    """Return the median CPU ms of a step's parts, and of the step without clocks inside
    (``step``).
    """
    step, found = stepper(engine, sequences, proposed, context), defaultdict(list)
    for _ in range(rounds):
        start = time.thread_time()
        step()
        found["step"].append(1e3 * (time.thread_time() - start))
        clock = Clock()
        clocks = (
            *((kind, "__call__", "matrices") for kind in (Linear, Fp16Linear, Int8Linear)),
            (functional, "rms_norm", "norms"),
            (functional, "scaled_dot_product_attention", "attention"),
            (KVTable, "read", "keys_and_values_copied"),
            (padded, "_kv", "keys_and_values_copied"),
            (torch_engine, "verify", "verification"),
        )
        with ExitStack() as patches:
            for where, function, part in clocks:
                patches.enter_context(
                    patch.object(where, function, clock.around(part, getattr(where, function)))
                )
            start = time.thread_time()
            step()
            whole = time.thread_time() - start
        clock.parts["other"] = whole - sum(clock.parts.values())
        for name, seconds in clock.parts.items():
            found[name].append(1e3 * seconds)
    engine.cancel(range(sequences))
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = {
        "dtype": args.dtype,
        "kv_blocks": 300,
        "max_context_tokens": args.context + 16,
        "threads": 1,
    }
    engine = TorchEngine("parts", args.model, attention="tiled", **options)
    rows = [
        {"sequences": n, "proposed": k, "cpu_ms": parts(engine, n, k, args.context, args.rounds)}
        for n, k in STEPS
    ]
    words = ["python", "-m", "bench.micro.parts", *sys.argv[1:]]
    command = [args.model.name if word == str(args.model) else word for word in words]
    report = {
        "command": command,
        "seed": 0,
        "context": args.context,
        "machine": machine.describe(),
        "steps": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
