"""Compile the CUDA engine's kernels on a machine without a GPU, for an H100 or another one:
``python -m bench.cuda.compile [CAPABILITY]``, 90 or, say, 120.

Steps of an 8B call their kernels as they do in serving, and each launch is compiled by the ptxas of
Triton's wheel instead of run. Code that it refuses is found before GPU minutes are spent; a line
for each kernel has its registers, the bytes that it keeps in local memory because they are too few,
and the shared memory that a launch asks for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from backend.engines.cuda import attention, bounds, candidates, draw, layers, trees

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def steps() -> None:
    """Call every kernel but the product, which takes descriptors, in an 8B's sizes."""
    rows, vocab, columns, tokens, pages = 64, 128256, 16, 256, 64

    def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    bf16, fp32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    logits, noise = of(bf16, rows, vocab), of(i64, rows)
    heat, bound = of(fp32, rows), of(fp32, rows)
    bounds.bounds(logits, heat, of(i32, rows), of(fp32, rows), of(fp32, rows))
    draw.draw(logits, heat, bound, noise)
    candidates.candidates(of(bf16, rows, 32512), of(i64, rows, 32512), heat, bound, noise)
    q, kv, table = of(bf16, tokens, 32, 128), of(bf16, 2, 2, 8, 32, 128), of(i32, rows, pages)
    start, first, words = of(i32, rows), of(i32, rows + 1), of(i64, tokens)
    for most in (1, 5, 17):
        attention.attention(q, kv, table, start, first, words, most=most, scale=128**-0.5)
    x, weight, place = of(bf16, tokens, 4096), of(bf16, 4096), of(i32, tokens)
    layers.add_rms_norm(x, x, weight, 1e-5, x)
    qkv, angles = of(bf16, tokens, 48 * 128), of(bf16, tokens, 128)
    layers.rotate_and_store(qkv, q, kv, angles, angles, place)
    layers.apply_gate(of(bf16, tokens, 2 * 14336), of(bf16, tokens, 14336))
    for wide in (columns, 63):
        nodes = of(i32, rows, wide), of(i64, rows, wide), of(i32, rows, wide)
        long = [of(i64, tokens) for _ in range(3)]
        short = [of(i32, tokens) for _ in range(3)]
        trees.pack(*nodes, noise, noise, table, first, *long, *short, page=32, scratch=0)
    path, count = of(i32, rows, 9), of(i64, rows)
    drawn_tokens, ids = of(i32, tokens), of(i64, tokens)
    trees.walk(drawn_tokens, ids, place, first, of(i64, rows, 9), path, count, places=17)
    trees.move(kv.expand(32, *kv.shape), table, start, path, count)


def compile_launches(launch: Callable[[], None], capability: int) -> list[tuple[str, str]]:
    """Return the kernels that ``launch`` launches and what ptxas says of each. Raises what Triton
    does for a kernel that cannot be compiled.
    """
    target = GPUTarget("cuda", capability, 32)
    launches: dict[tuple[Any, ...], tuple[str, str]] = {}

    def instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        values = dict(zip(kernel.arg_names, args, strict=False)) | {
            name: options.pop(name) for name in list(options) if name in kernel.arg_names
        }
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        types = {name: _type(value) for name, value in values.items() if name not in constants}
        key = (kernel.fn.__name__, *types.items(), *constants.items(), *options.items())
        if key in launches:
            return
        source = ASTSource(
            fn=kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={
                (at,): [["tt.divisibility", 16]]
                for at, name in enumerate(kernel.arg_names)
                if types.get(name, "").startswith("*")
            },
        )
        compiled = triton.compile(source, target=target, options=options)
        usage = f"{resources(compiled.asm['cubin'])}, launch {compiled.metadata.shared}"
        launches[key] = kernel.fn.__name__, usage

    original = JITFunction.run
    JITFunction.run = instead
    try:
        launch()
    finally:
        JITFunction.run = original
    return list(launches.values())


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def resources(cubin: bytes) -> str:
    """Return what cuobjdump says that a kernel uses."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text.stdout + text.stderr))
    return ", ".join(f"{name.lower()} {count}" for name, count in counts.items())


def main() -> None:
    """Compile everything and print a line for each kernel."""
    capability = int(sys.argv[1]) if sys.argv[1:] else 90
    for name, usage in compile_launches(steps, capability):
        print(f"{name}: {usage}")


if __name__ == "__main__":
    main()
