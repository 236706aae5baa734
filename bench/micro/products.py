"""Products with matrices in each number format, in turn: ``python -m bench.micro.products --out
FILE``.

A pass multiplies its rows by ``MATRICES`` random matrices of 8,192 x 2,048 on one thread. A format
is the matrices', the activations' (those of int8 and 4 bits are rounded again for the product, in
groups of columns with one scale), and that group. ``same_bits``: each row has the bits that it has
alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino
import torch
from openvino import Model, Output, Type, op, opset13

from backend.engines.openvino.parts import compile_graph, half_matrix, int8, ints, round_to_int8
from bench import records

MATRICES, WIDTH, COLUMNS = 6, 8192, 2048
ROWS = (1, 2, 4, 5, 8, 24)


class Format(NamedTuple):
    """How products are computed."""

    weights: str
    activations: str
    group: int | None = None
    """Columns of a group, of both; None: none."""


FORMATS = {
    "bf16": Format("bf16", "bf16"),
    "int8, bf16 activations": Format("int8", "bf16"),
    "int8 in 32": Format("int8", "f32", 32),
    "int8 in 128": Format("int8", "f32", 128),
    "int4, bf16 activations": Format("int4", "bf16", 128),
    "int4 in 128": Format("int4", "f32", 128),
    "int4 in 64": Format("int4", "f32", 64),
    "int4 in 32": Format("int4", "f32", 32),
}


def weight(form: Format, rng: np.random.Generator) -> Output:
    """Return a random matrix in the form that kernels read."""
    if form.weights != "int4":
        numbers = rng.standard_normal((WIDTH, COLUMNS), np.float32) * np.float32(0.02)
        if form.weights == "bf16":
            return half_matrix(numbers).output(0)
        return int8(*round_to_int8(numbers))
    groups = COLUMNS // (form.group or 0)
    tensor = openvino.Tensor(Type.i4, [WIDTH, groups, COLUMNS // groups])
    halves = tensor.data.view(np.uint8).reshape(-1)
    halves[...] = np.frombuffer(rng.bytes(halves.size), np.uint8)
    scale = (rng.uniform(0.5, 1.5, (WIDTH, groups, 1)) * 0.004).astype(np.float32)
    wide = opset13.multiply(opset13.convert(op.Constant(tensor), "f32"), opset13.constant(scale))
    return opset13.reshape(wide, ints([WIDTH, COLUMNS]), False).output(0)


def request(form: Format, seed: int) -> openvino.InferRequest:
    """Compile the products of a format."""
    rng = np.random.default_rng(seed)
    rows = opset13.parameter([-1, COLUMNS], Type.f32)
    products = [opset13.matmul(rows, weight(form, rng), False, True) for _ in range(MATRICES)]
    model = Model([*map(opset13.result, products)], [rows], "products")
    return compile_graph(model, form.activations, 1, form.group).create_infer_request()


def first(run: openvino.InferRequest, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the first product."""
    result: npt.NDArray[Any] = run.infer([rows])[0].copy()
    return result


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {name: request(form, args.seed) for name, form in FORMATS.items()}
    rows = np.random.default_rng(args.seed).standard_normal((max(ROWS), COLUMNS), np.float32)
    alone = {
        name: np.concatenate([first(run, row[None]) for row in rows]) for name, run in runs.items()
    }
    cells = []
    for count in ROWS:
        some = rows[:count]
        same = {
            name: bool((first(r, some) == alone[name][:count]).all()) for name, r in runs.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.repeats):
            for name, run in runs.items():
                run.infer([some], share_outputs=True)  # the others' matrices were in the caches
                started = time.perf_counter()
                run.infer([some], share_outputs=True)
                seconds[name].append(1e3 * (time.perf_counter() - started))
        medians = {name: round(statistics.median(times), 2) for name, times in seconds.items()}
        cells.append({"rows": count, "ms": medians, "same_bits": same})
        print(json.dumps(cells[-1]), flush=True)
    record = {
        "cells": cells,
    }
    records.write(args.out, record)


if __name__ == "__main__":
    main()
