"""Parts of the probe that measure single kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from backend.engines.cuda.ancestors import ancestor_words
from backend.engines.cuda.attention import attention as attend
from backend.engines.cuda.draw import draw
from backend.engines.cuda.layers import add_rms_norm, gated
from backend.engines.cuda.linear import Tiling, linear
from backend.engines.cuda.prompts import (
    BY_ROW,
    LIBRARIES,
    PAGE,
    Prompts,
    Scoring,
    by_row,
    error_of,
)
from bench.cuda.measuring import Probe
from bench.cuda.step import Shape, Weights

ATTENTIONS = ((512, 128, 4), (128, 128, 4), (256, 128, 4), (256, 64, 4), (512, 128, 8))
"""Tokens of a split, tokens of a tile, warps."""

CACHE_BYTES = 600e6
"""Weights and contexts of at least this size rotate, so that no cache holds them."""


def tilings(tokens: int) -> list[Tiling]:
    """Return the tilings that are tried for a number of tokens."""
    if tokens <= 64:
        rows = max(16, triton.next_power_of_2(tokens))
        return [
            Tiling(64, 128, rows, 5, 4),
            Tiling(64, 256, rows, 3, 4),
            Tiling(128, 128, rows, 4, 4),
            Tiling(128, 64, rows, 8, 4),
        ]
    return [
        Tiling(64, 128, 64, 5, 4),
        Tiling(128, 64, 64, 6, 4),
        Tiling(256, 64, 64, 5, 8),
        Tiling(128, 64, 128, 5, 8),
        Tiling(256, 64, 128, 4, 8),
        Tiling(128, 64, 256, 4, 8),
    ]


def machine(probe: Probe) -> dict[str, Any]:
    """Measure the two ceilings: bandwidth of a copy, and bf16 products."""
    size, n = probe.of((2 << 30, 8192), (1 << 20, 128))
    x = torch.empty(size, dtype=torch.uint8, device=probe.device)
    y = torch.empty_like(x)
    probe.copy_gb_s = 2 * size / probe.time_ms(lambda: y.copy_(x)) / 1e6
    a, b, c = (torch.randn(n, n, device=probe.device, dtype=probe.dtype) for _ in range(3))
    tflop_s = 2 * n**3 / probe.time_ms(lambda: torch.mm(a, b, out=c)) / 1e9
    print(f"copy {probe.copy_gb_s:.0f} GB/s, products {tflop_s:.0f} TFLOP/s", flush=True)
    return {"copy_gb_s": probe.copy_gb_s, "bf16_tflop_s": tflop_s}


def products(probe: Probe) -> dict[str, Any]:
    """Time the four products of a layer and the head: cuBLAS and our tilings."""
    shape, found = probe.shape, {}
    sizes = {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.dim),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocab, shape.hidden),
    }
    for name, (n, k) in sizes.items():
        copies = probe.of(int(CACHE_BYTES / (2 * n * k)) + 2, 2)
        weights = [torch.randn(n, k, device=probe.device, dtype=probe.dtype) for _ in range(copies)]
        for tokens in probe.of((1, 16, 32, 64, 128, 160, 192, 320, 640), (1, 20)):
            cells = found[f"{name} {tokens}"] = _product_cells(probe, weights, tokens)
            best = min(cells, key=cells.__getitem__)
            gb_s = 2 * n * k / cells[best] / 1e6
            print(
                f"{name:8s} {tokens:4d} tokens: cuBLAS {cells['cublas'] * 1e3:7.1f} us, best "
                f"{best} {cells[best] * 1e3:7.1f} us, {gb_s:.0f} GB/s",
                flush=True,
            )
        del weights
        probe.empty()
    return {"ms": found}


def _product_cells(probe: Probe, weights: list[torch.Tensor], tokens: int) -> dict[str, float]:
    n, k = weights[0].shape
    x = torch.randn(tokens, k, device=probe.device, dtype=probe.dtype)
    out = torch.empty(tokens, n, device=probe.device, dtype=probe.dtype)

    def time_ms(product: Callable[[torch.Tensor], object]) -> float:
        replay = probe.graph(lambda: [product(weight) for weight in weights])
        return probe.time_ms(replay, 5) / len(weights)

    cells = {"cublas": time_ms(lambda weight: torch.mm(x, weight.t(), out=out))}
    for tiling in tilings(tokens):
        if not n % tiling.columns and not k % tiling.inner:
            product = partial(linear, x, out=out, tiling=tiling)
            cells["/".join(map(str, tiling))] = time_ms(product)
    return cells


class AttentionCase:
    """Chains of ``most`` tokens after ``context`` committed ones, in some layers' pages."""

    def __init__(
        self, probe: Probe, shape: Shape, rows: int, most: int, context: int, layers: int
    ) -> None:
        device, dtype = probe.device, probe.dtype
        self.shape, self.rows, self.most, self.context = shape, rows, most, context
        self.device = device
        need = -(-(context + most) // PAGE)
        size = (rows * need, 2, shape.kv_heads, PAGE, shape.dim)
        self.kvs = [torch.randn(size, device=device, dtype=dtype) for _ in range(layers)]
        self.q = torch.randn(rows * most, shape.heads, shape.dim, device=device, dtype=dtype)
        self.table = torch.zeros(rows, -(-need // 16) * 16, dtype=torch.int32, device=device)
        blocks = torch.randperm(rows * need, device=device).view(rows, need)
        self.table[:, :need] = blocks.int()
        self.start = torch.full((rows,), context, dtype=torch.int32, device=device)
        self.first = torch.arange(rows + 1, dtype=torch.int32, device=device) * most
        words = ancestor_words(list(range(-1, most - 2))) * rows
        self.words = torch.tensor(words, device=device)

    def run(self, split: int, tile: int, warps: int, max_lanes: int = 32) -> torch.Tensor:
        """Attend in every layer, so cut; return the last one's result."""
        for kv in self.kvs:
            out = attend(
                self.q,
                kv,
                self.table,
                self.start,
                self.first,
                self.words,
                most=self.most,
                keys=self.context + 64,
                scale=self.shape.dim**-0.5,
                split=split,
                tile=tile,
                warps=warps,
                max_lanes=max_lanes,
            )
        return out


def attention(probe: Probe) -> dict[str, Any]:
    """Time the attention of a layer, contexts rotating beyond every cache."""
    shape, found = probe.shape, {}
    cases = [(1, 1000), (8, 1000), (64, 1000), (128, 1000), (64, 4000), (1, 16000)]
    for rows, context in probe.of(cases, [(2, 70)]):
        for most in (1, 5, 9):
            layer_bytes = rows * context * shape.kv_bytes / shape.layers
            layers = probe.of(max(2, min(12, int(2e9 / layer_bytes))), 2)
            case = AttentionCase(probe, shape, rows, most, context, layers)
            cells = {}
            for cut in probe.of(ATTENTIONS, ATTENTIONS[:1]):
                replay = probe.graph(partial(case.run, *cut))
                cells["/".join(map(str, cut))] = probe.time_ms(replay, 7) / layers
            key, floor_ms = f"{rows} x {context}, {most} tokens", probe.floor_ms(layer_bytes)
            found[key] = {"floor_ms": floor_ms, "ms": cells}
            shown = ", ".join(f"{cut} {ms * 1e3:.1f}" for cut, ms in cells.items())
            print(f"{key}: floor {floor_ms * 1e3:.1f} us; {shown}", flush=True)
            del case
            probe.empty()
    return {"cases": found}


def draws(probe: Probe) -> dict[str, Any]:
    """Time the draw from logits as of text, torch's arg-max, and a copy that the host waits for."""
    vocab, found = probe.of(128256, 3000), {}
    for rows in probe.of((1, 64, 320), (2,)):
        rank = torch.stack([torch.randperm(vocab, device=probe.device) for _ in range(rows)]) + 1
        logits = (rank.float().log() * -1.3).to(probe.dtype)
        words = torch.randint(0, 2**62, (rows,), device=probe.device)
        bound = torch.full((rows,), float("-inf"), device=probe.device)
        for chunk in probe.of((1024, 2048, 4096), (1024,)):
            for temperature in (0.0, 1.0):
                heat = torch.full((rows,), temperature, device=probe.device)
                replay = probe.graph(partial(draw, logits, heat, bound, words, chunk=chunk))
                found[f"{rows} rows at {temperature}, chunks of {chunk}"] = probe.time_ms(replay)
        found[f"{rows} rows, arg-max"] = probe.time_ms(probe.graph(partial(logits.argmax, -1)))
    print({key: round(ms, 4) for key, ms in found.items()}, flush=True)
    return {"ms": found}


def prefill(probe: Probe) -> dict[str, Any]:
    """Time a layer over a chunk of a prompt, with torch's attention."""
    shape, device, dtype, found = probe.shape, probe.device, probe.dtype, {}
    layer = Weights(shape, device, dtype).layers[0]
    for tokens in probe.of((256, 512, 1024, 2048, 4096), (16,)):
        x = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
        inner = torch.empty(tokens, shape.inner, device=device, dtype=dtype)
        q, k, v = (
            torch.randn(1, heads, tokens, shape.dim, device=device, dtype=dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention,
            q,
            k,
            v,
            is_causal=True,
            enable_gqa=True,
        )
        run = partial(_layer, layer, x, inner, attend)
        ms, attention_ms = probe.time_ms(run, 7), probe.time_ms(attend, 7)
        found[str(tokens)] = {
            "layer_ms": ms,
            "attention_ms": attention_ms,
            "pass_ms": ms * shape.layers,
        }
        print(tokens, found[str(tokens)], flush=True)
    return {"chunks": found, "libraries": _prompt_libraries(probe)}


def _prompt_libraries(probe: Probe) -> dict[str, Any]:
    """Time the attention of a prompt's chunk over pages by each library, and its error against
    torch's own.
    """
    shape = probe.shape
    found: dict[str, Any] = {}
    chunks = probe.of([(0, 512), (1000, 256), (0, 2048), (3000, 512)], [(5, 70)])
    blocks = -(-max(map(sum, chunks)) // PAGE)
    size = (blocks, 2, shape.kv_heads, PAGE, shape.dim)
    kv = torch.randn(size, device=probe.device, dtype=probe.dtype)
    table = torch.randperm(blocks, device=probe.device).int()[None]
    scoring = Scoring(shape.dim**-0.5)
    for name in (*LIBRARIES, BY_ROW):
        try:
            attend_to = LIBRARIES[name]() if name in LIBRARIES else by_row
            found[name] = cells = {"error": error_of(attend_to, kv, shape.heads, scoring)}
            for committed, new in chunks:
                first = torch.tensor([0, new], dtype=torch.int32, device=probe.device)
                rows = Prompts([(committed, new)], table, first)
                q = torch.randn(new, shape.heads, shape.dim, device=kv.device, dtype=kv.dtype)
                run = partial(attend_to, q, kv, rows, scoring)
                cells[f"{new} tokens after {committed}, ms"] = probe.time_ms(run, 7)
        except Exception as error:
            found[name] = {"failed": str(error).partition("\n")[0]}
        print(name, found[name], flush=True)
    return found


def _layer(
    layer: dict[str, torch.Tensor],
    x: torch.Tensor,
    inner: torch.Tensor,
    attend: Callable[[], torch.Tensor],
) -> None:
    residual, y = x.clone(), torch.empty_like(x)
    add_rms_norm(x, residual, layer["norm1"], 1e-5, y)
    torch.mm(y, layer["qkv"].t())
    attended = attend().transpose(1, 2).reshape(len(x), -1)
    torch.mm(attended, layer["o"].t(), out=y)
    add_rms_norm(y, residual, layer["norm2"], 1e-5, y)
    gated(torch.mm(y, layer["gate_up"].t()), inner)
    torch.mm(inner, layer["down"].t(), out=y)
