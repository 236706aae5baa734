"""The parts of the probe: each prints a table and returns what its record keeps."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.engines.cuda.attention import PagedAttention
from backend.engines.cuda.attention_words import ancestor_words
from backend.engines.cuda.draw import Draw
from backend.engines.cuda.layers import add_rms_norm, gated
from backend.engines.cuda.linear import Tiling, linear, tiling_for
from bench.cuda.step import PAGE, SHAPES, Shape, Step, Weights, new_kv


def tilings(rows: int) -> list[Tiling]:
    """Return the tilings that are tried for a number of rows."""
    tile = max(16, triton.next_power_of_2(rows))
    if rows <= 64:
        few = [(64, 128, 5, 4, 1), (128, 128, 4, 4, 1), (64, 128, 5, 4, 2), (64, 128, 4, 4, 2)]
        few += [(128, 64, 6, 4, 2), (128, 128, 4, 4, 2)]
        return [Tiling(n, k, tile, stages, warps, parts) for n, k, stages, warps, parts in few]
    return [
        Tiling(64, 128, 64, 5, 4),
        Tiling(128, 64, 64, 6, 4),
        Tiling(128, 64, 128, 5, 8),
        Tiling(256, 64, 64, 5, 8),
        Tiling(256, 64, 128, 4, 8),
        Tiling(128, 64, 256, 4, 8),
        Tiling(64, 128, 64, 5, 4, 2),
        Tiling(128, 64, 64, 6, 4, 2),
        Tiling(128, 64, 128, 5, 8, 2),
        Tiling(256, 64, 128, 4, 8, 2),
        Tiling(128, 64, 256, 4, 8, 2),
    ]


ATTENTIONS = ((512, 128, 4), (128, 128, 4), (256, 128, 4), (256, 64, 4), (512, 128, 8))
"""Tokens of a split, tokens of a tile, warps."""

MIB = 1 << 20
MOST_COLUMNS_OF_PARTS = 8192
"""Weights of more columns fill the device without being split."""


class Probe:
    """The machine a part runs on, its time, and what earlier parts found."""

    def __init__(self, end_s: float, *, rehearse: bool) -> None:
        self.end_s, self.rehearse = end_s, rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.gpu = "none" if rehearse else torch.cuda.get_device_name()
        self.shape = SHAPES["tiny" if rehearse else "8b"]
        self.copy_gb_s = 3000.0
        self.tilings: dict[int, dict[str, Tiling]] = {}
        self.attention = (512, 128, 4)

    def left_s(self) -> float:
        """Return the seconds left for all parts."""
        return self.end_s - time.monotonic()

    def empty(self) -> None:
        """Give memory back. Raises RuntimeError where the CUDA context is broken."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def graph(
        self, launch: Callable[[], object], stream: torch.cuda.Stream | None = None
    ) -> Callable[[], None]:
        """Capture launches in a CUDA graph and return its replay.

        Graphs that run at once need streams of their own: cuBLAS has a workspace for each, and two
        kernels that share one wait for each other without end.
        """
        if self.rehearse:
            return launch  # type: ignore[return-value]
        stream = stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        replay: Callable[[], None] = graph.replay
        return replay

    def time_ms(self, launch: Callable[[], object], rounds: int = 11) -> float:
        """Return the median of the device's milliseconds for a launch."""
        if self.rehearse:
            start = time.perf_counter()
            launch()
            return (time.perf_counter() - start) * 1e3
        launch()
        torch.cuda.synchronize()
        found = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            launch()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return statistics.median(found)

    def floor_ms(self, read_bytes: float) -> float:
        """Return the least time to read bytes, at the bandwidth of a copy."""
        return read_bytes / self.copy_gb_s / 1e6


def warm(probe: Probe) -> dict[str, Any]:
    """Compile what later parts launch, in 14 processes."""
    from bench.cuda.probe import warm_in_parallel

    shards = 1 if probe.rehearse else 14
    return {"seconds": warm_in_parallel(shards, rehearse=probe.rehearse), "shards": shards}


def variants(probe: Probe) -> Iterator[Callable[[], object]]:
    """Yield one launch for every kernel that later parts compile, over small tensors."""
    device, dtype = probe.device, probe.dtype
    for rows in (1, 16, 32, 64, 128):
        for tiling in tilings(rows):
            for pdl in (False,) if probe.rehearse else (False, True):
                x = torch.zeros(rows, 1024, device=device, dtype=dtype)
                weight = torch.zeros(256, 1024, device=device, dtype=dtype)
                out = torch.zeros(rows, 256, device=device, dtype=dtype)
                yield partial(linear, x, weight, out, tiling=tiling, pdl=pdl)
    for tokens in () if probe.rehearse else (1, 5, 8, 32, 40, 64, 96, 128, 160, 320):
        for columns in (256, 16384):
            x = torch.zeros(tokens, 1024, device=device, dtype=dtype)
            weight = torch.zeros(columns, 1024, device=device, dtype=dtype)
            out = torch.zeros(tokens, columns, device=device, dtype=dtype)
            tiling = tiling_for(columns, 1024, tokens)
            yield partial(linear, x, weight, out, tiling=tiling)
    for most in (1, 5, 3, 2, 9):
        for choice in ATTENTIONS:
            yield attention_case(probe, probe.shape, 2, most, 40, 1)[0](*choice)


def machine(probe: Probe) -> dict[str, Any]:
    """Measure the two ceilings, and what a kernel costs in a row of dependent small ones."""
    size = MIB if probe.rehearse else 2048 * MIB
    x = torch.empty(size, dtype=torch.uint8, device=probe.device)
    y = torch.empty_like(x)
    probe.copy_gb_s = 2 * size / probe.time_ms(lambda: y.copy_(x)) / 1e6
    n = 128 if probe.rehearse else 8192
    a, b, c = (torch.randn(n, n, device=probe.device, dtype=probe.dtype) for _ in range(3))
    tflop_s = 2 * n**3 / probe.time_ms(lambda: torch.mm(a, b, out=c)) / 1e9
    found: dict[str, Any] = {"copy_gb_s": probe.copy_gb_s, "bf16_tflop_s": tflop_s}
    row = torch.zeros(4096, device=probe.device)
    for name, pdl in (("plain", False), ("pdl", True)):
        if probe.rehearse:
            continue

        def chain(pdl: bool = pdl) -> None:
            for _ in range(200):
                _increment[(1,)](row, BLOCK=4096, PDL=pdl, launch_pdl=pdl, num_warps=4)

        replay = probe.graph(chain)
        row.zero_()
        replay()
        torch.cuda.synchronize()
        correct = bool((row == 200).all())
        found[f"chain_us {name}"] = probe.time_ms(replay) / 200 * 1e3
        found[f"chain_correct {name}"] = correct
    print({k: round(v, 2) for k, v in found.items()}, flush=True)
    return found


@triton.jit
def _increment(x_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1)


def products(probe: Probe) -> dict[str, Any]:
    """Time the five products of a layer and the head, weights rotating beyond every cache."""
    shape, device, dtype = probe.shape, probe.device, probe.dtype
    sizes = {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.dim),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocab, shape.hidden),
    }
    found: dict[str, Any] = {}
    for name, (n, k) in sizes.items():
        copies = 2 if probe.rehearse else max(2, int(600e6 / (2 * n * k)) + 1)
        weights = [torch.randn(n, k, device=device, dtype=dtype) for _ in range(copies)]
        for m in (1, 2) if probe.rehearse else (1, 16, 32, 64, 128, 192, 320, 640):
            x = torch.randn(m, k, device=device, dtype=dtype)
            out = torch.empty(m, n, device=device, dtype=dtype)

            def all_of(product: Callable[[torch.Tensor], object]) -> float:
                replay = probe.graph(lambda: [product(weight) for weight in weights])
                return probe.time_ms(replay, 5) / copies

            cells: dict[str, float | None] = {
                "cublas": all_of(lambda w: torch.mm(x, w.t(), out=out))
            }
            for tiling in tilings(m)[: 1 if probe.rehearse else None]:
                if n % tiling.columns or k % (tiling.inner * tiling.parts):
                    continue
                if tiling.parts == 2 and n > MOST_COLUMNS_OF_PARTS:
                    continue
                key = "/".join(map(str, tiling))
                try:
                    cells[key] = all_of(lambda w: linear(x, w, out, tiling=tiling))
                except Exception as error:
                    cells[key] = None
                    print(name, m, tiling, type(error).__name__, str(error)[:80], flush=True)
            found[f"{name} {m}"] = cells
            ours = {key: v for key, v in cells.items() if v and key != "cublas"}
            best = min(ours, key=ours.__getitem__, default=None)
            line = f"{name:8s} M {m:4d}: cublas {_product_line(cells['cublas'], n, k, m)}"
            if best:
                line += f" | {best} {_product_line(ours[best], n, k, m)}"
                tiling = Tiling(*map(int, best.split("/")))
                probe.tilings.setdefault(m, {})[name] = tiling
            print(line, flush=True)
        del weights
        probe.empty()
    return {"ms": found, "best": {m: _shown(t) for m, t in probe.tilings.items()}}


def _product_line(ms: float | None, n: int, k: int, m: int) -> str:
    assert ms is not None
    return f"{ms * 1e3:7.1f} us {2 * n * k / ms / 1e6:6.0f} GB/s {2 * m * n * k / ms / 1e9:5.0f} TFLOP/s"


def _shown(tilings: dict[str, Tiling]) -> dict[str, list[int]]:
    return {name: [int(v) for v in tiling] for name, tiling in tilings.items()}


def attention_case(
    probe: Probe, shape: Shape, rows: int, most: int, context: int, layers: int
) -> tuple[
    Callable[..., Callable[[], object]], torch.Tensor, list[torch.Tensor], list[torch.Tensor]
]:
    """Return what makes the launch of some layers' attention for a cut, its result, the layers' KV
    and the other inputs.
    """
    device, dtype = probe.device, probe.dtype
    need = -(-(context + most) // PAGE)
    size = (rows * need, 2, shape.kv_heads, PAGE, shape.dim)
    kvs = [torch.randn(size, device=device, dtype=dtype) for _ in range(layers)]
    q = torch.randn(rows * most, shape.heads, shape.dim, device=device, dtype=dtype)
    out = torch.empty_like(q)
    table = torch.zeros(rows, -(-need // 16) * 16, dtype=torch.int32, device=device)
    table[:, :need] = torch.randperm(rows * need, device=device).view(rows, need).int()
    start = torch.full((rows,), context, dtype=torch.int32, device=device)
    first = torch.arange(rows + 1, dtype=torch.int32, device=device) * most
    words = torch.tensor(ancestor_words(list(range(-1, most - 2))) * rows, device=device)

    def cut(split: int, tile: int, warps: int, max_lanes: int = 32) -> Callable[[], object]:
        attend = PagedAttention(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.dim,
            page=PAGE,
            max_tokens=-(-rows * most // 16) * 16,
            max_keys=context + 64,
            device=device,
            split=split,
            tile=tile,
            warps=warps,
            max_lanes=max_lanes,
        )
        return lambda: [
            attend(q, kv, table, start, first, words, out, most=most, scale=shape.dim**-0.5)
            for kv in kvs
        ]

    return cut, out, kvs, [q, table, start, words]


def attention(probe: Probe) -> dict[str, Any]:
    """Time the attention of a layer, contexts rotating beyond every cache."""
    shape = probe.shape
    cases = [(1, 1000), (8, 1000), (64, 1000), (128, 1000), (64, 4000), (1, 16000)]
    sums: dict[tuple[int, int, int], float] = {}
    found: dict[str, Any] = {}
    for rows, context in [(2, 70)] if probe.rehearse else cases:
        for most in (1, 5, 9):
            layer_bytes = rows * context * shape.kv_bytes / shape.layers
            layers = 2 if probe.rehearse else max(2, min(12, int(2e9 / layer_bytes)))
            case = attention_case(probe, shape, rows, most, context, layers)
            cells = {}
            for choice in ATTENTIONS[:1] if probe.rehearse else ATTENTIONS:
                try:
                    launch = probe.graph(case[0](*choice))
                    cells[choice] = probe.time_ms(launch, 7) / layers
                except Exception as error:
                    print(choice, type(error).__name__, str(error)[:80], flush=True)
                    continue
                floor = probe.floor_ms(layer_bytes)
                sums[choice] = sums.get(choice, 0.0) + cells[choice] / max(floor, 5e-3)
            best = min(cells, key=cells.__getitem__)
            floor = probe.floor_ms(layer_bytes)
            found[f"{rows} x {context} most {most}"] = {
                "floor_ms": floor,
                "ms": {"/".join(map(str, choice)): ms for choice, ms in cells.items()},
            }
            shown = " ".join(f"{'/'.join(map(str, c))}:{v * 1e3:.1f}" for c, v in cells.items())
            print(
                f"attention {rows:3d} x {context:5d} most {most}: best {best} "
                f"{cells[best] * 1e3:.1f} us, floor {floor * 1e3:.1f} | {shown}",
                flush=True,
            )
            del case
            probe.empty()
    whole = {choice: s for choice, s in sums.items() if s == s}
    probe.attention = min(whole, key=whole.__getitem__)
    print("best over all cases:", probe.attention, flush=True)
    return {"ms": found, "best": list(probe.attention)}


def _step_options(probe: Probe, product: str, tokens: int) -> dict[str, Any]:
    split, tile, warps = probe.attention
    options: dict[str, Any] = {"split": split, "tile": tile, "warps": warps}
    if "ours" in product:
        sizes = [m for m in probe.tilings if m >= min(tokens, max(probe.tilings))]
        options["tilings"] = {
            name: tiling._replace(stages=max(2, tiling.stages - 1)) if "pdl" in product else tiling
            for name, tiling in probe.tilings[min(sizes)].items()
        }
    return options | {"pdl": "pdl" in product}


def steps(probe: Probe) -> dict[str, Any]:
    """Time whole steps in graphs, and say their share of the floor of bytes."""
    weights, kv, context = _weights_and_kv(probe, 128, 1100)
    found: dict[str, Any] = {}
    for rows in (2,) if probe.rehearse else (1, 8, 32, 64, 128):
        for most in (1, 3, 5, 9):
            arms = ["cublas", "ours", "cublas, pdl", "ours, pdl"]
            for product in arms[:1] if probe.rehearse else arms:
                if probe.left_s() < 30:
                    continue
                options = _step_options(probe, product, rows * most)
                step = Step(weights, kv, rows, most, context + 100, **options)
                step.fill(context)
                before, start = _reserved(probe), time.monotonic()
                replay = probe.graph(step.run)
                capture_s = time.monotonic() - start
                ms = probe.time_ms(replay)
                read = weights.pass_bytes + rows * (context + most) * weights.shape.kv_bytes
                floor = probe.floor_ms(read)
                found[f"{rows} rows, {most} tokens, {product}"] = {
                    "ms": ms,
                    "floor_ms": floor,
                    "capture_s": capture_s,
                    "reserved_bytes": _reserved(probe) - before,
                }
                print(
                    f"8B step {rows:3d} rows x {most} {product}: {ms:6.2f} ms, floor {floor:5.2f} "
                    f"({floor / ms:.2f}), captured in {capture_s:.2f} s",
                    flush=True,
                )
                del step, replay
    parts = _step_parts(probe, weights, kv, context)
    return {"steps": found, "context": context, "parts_ms": parts}


def _step_parts(
    probe: Probe, weights: Weights, kv: list[torch.Tensor], context: int
) -> dict[str, Any]:
    """Time a step with one kind of kernel left out, which is what that kind costs in place."""
    found: dict[str, Any] = {}
    for rows, most in ((2, 1),) if probe.rehearse else ((1, 1), (64, 1), (64, 5)):
        arm = "cublas" if probe.rehearse else "ours, pdl"
        step = Step(
            weights, kv, rows, most, context + 100, **_step_options(probe, arm, rows * most)
        )
        step.fill(context)
        cells = {"whole": probe.time_ms(probe.graph(step.run))}
        nothing: Any = lambda *args, **options: None  # noqa: E731
        for name in ("attend", "draw"):
            kept = getattr(step, name)
            setattr(step, name, nothing)
            cells[f"without {name}"] = probe.time_ms(probe.graph(step.run))
            setattr(step, name, kept)
        product = step.product
        step.product = nothing  # type: ignore[method-assign]
        cells["without products"] = probe.time_ms(probe.graph(step.run))
        step.product = product  # type: ignore[method-assign]
        found[f"{rows} x {most}"] = cells
        print(rows, most, {k: round(v, 3) for k, v in cells.items()}, flush=True)
    return found


def _weights_and_kv(
    probe: Probe, rows: int, tokens: int
) -> tuple[Weights, list[torch.Tensor], int]:
    weights = Weights(probe.shape, probe.device, probe.dtype)
    if probe.rehearse:
        return weights, new_kv(probe.shape, 64, probe.device, probe.dtype), 70
    blocks = rows * (-(-tokens // PAGE) + 1)
    return weights, new_kv(probe.shape, blocks, probe.device, probe.dtype), 1000


def _reserved(probe: Probe) -> int:
    return 0 if probe.rehearse else torch.cuda.memory_reserved()


def bits(probe: Probe) -> dict[str, Any]:
    """Compare a row's logits alone and in a batch, and a chain's with decoding its tokens."""
    from dataclasses import replace

    shape = replace(probe.shape, layers=2 if probe.rehearse else 4)
    weights = Weights(shape, probe.device, probe.dtype)
    kv = new_kv(shape, 256 if probe.rehearse else 64 * 40, probe.device, probe.dtype)
    context, whole_rows = (40, 4) if probe.rehearse else (1000, 64)
    names = ("qkv", "o", "gate_up", "down", "head")
    ours = Tiling(32, 32, 16, 3) if probe.rehearse else Tiling()
    arms: dict[str, dict[str, Any]] = {
        "cublas": {},
        "ours": {"tilings": dict.fromkeys(names, ours)},
    }
    if not probe.rehearse:
        arms["ours, pdl"] = arms["ours"] | {"pdl": True}
    found: dict[str, Any] = {}
    for name, options in arms.items():
        many = Step(weights, kv, whole_rows, 1, 2048, **options)
        many.fill(context)
        many.run()
        together = many.logits.clone()
        for rows in (1, 2) if probe.rehearse else (1, 2, 8, 17, 33):
            one = Step(weights, kv, rows, 1, 2048, **options)
            for field in ("ids", "position", "place", "table", "start"):
                target = getattr(one, field)
                target.copy_(getattr(many, field)[: len(target)])
            one.run()
            found[f"{name}: {rows} of {whole_rows}"] = bool(
                torch.equal(one.logits, together[:rows])
            )
        chain = Step(weights, kv, 4, 4, 2048, **options)
        chain.fill(context)
        chain.run()
        verified = chain.logits.view(4, 4, -1).clone()
        same = []
        for at in range(4):
            one = Step(weights, kv, 4, 1, 2048, **options)
            one.table.copy_(chain.table)
            one.start.fill_(context + at)
            for field in ("ids", "position", "place"):
                getattr(one, field).copy_(getattr(chain, field).view(4, 4)[:, at])
            one.run()
            same.append(bool(torch.equal(one.logits, verified[:, at])))
        found[f"{name}: chain"] = same
    if not probe.rehearse:
        found |= _same_products(probe) | _same_attention(probe)
    print(found, flush=True)
    return {"same": found}


def _same_products(probe: Probe) -> dict[str, Any]:
    """Compare our product over all tilings and numbers of rows with that of a row alone."""
    found: dict[str, Any] = {}
    for n, k in ((6144, 4096), (4096, 14336)):
        weight = torch.randn(n, k, device="cuda", dtype=probe.dtype) * k**-0.5
        x = torch.randn(320, k, device="cuda", dtype=probe.dtype)
        alone = torch.cat(
            [linear(x[r : r + 1], weight, x.new_empty(1, n), tiling=Tiling()) for r in range(320)]
        )
        halves = torch.cat(
            [
                linear(x[r : r + 1], weight, x.new_empty(1, n), tiling=Tiling(parts=2))
                for r in range(320)
            ]
        )
        exact = x.double() @ weight.double().T
        found[f"product {n} error"] = float((alone.double() - exact).norm() / exact.norm())
        for rows in (16, 32, 64, 128, 320):
            for tiling in tilings(rows):
                for pdl in (False, True):
                    try:
                        out = linear(x[:rows], weight, x.new_empty(rows, n), tiling=tiling, pdl=pdl)
                    except triton.runtime.errors.OutOfResources:
                        continue
                    key = f"product {n}, {rows} rows, {'/'.join(map(str, tiling))} pdl {int(pdl)}"
                    wanted = alone if tiling.parts == 1 else halves
                    found[key] = bool(torch.equal(out, wanted[:rows]))
    return found


def _same_attention(probe: Probe) -> dict[str, Any]:
    """Compare the attention of chains with that of their tokens one by one."""
    found: dict[str, Any] = {}
    shape, rows, context = probe.shape, 4, 1000
    for most in (2, 4, 5, 9):
        cut, out, kv, inputs = attention_case(probe, shape, rows, most, context, 1)
        q, table, _, _ = inputs
        queries = q.view(rows, most, shape.heads, shape.dim)
        first = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        itself = torch.ones(rows, dtype=torch.int64, device="cuda")
        for lanes in (16, 32, 64):
            for split, tile, warps in ATTENTIONS:
                cut(split, tile, warps, lanes)()
                chain = out.clone().view_as(queries)
                attend = PagedAttention(
                    heads=shape.heads,
                    kv_heads=shape.kv_heads,
                    dim=shape.dim,
                    page=PAGE,
                    max_tokens=16,
                    max_keys=context + 64,
                    device="cuda",
                    split=split,
                    tile=tile,
                    warps=warps,
                    max_lanes=lanes,
                )
                same = []
                for at in range(most):
                    one = queries[:, at].contiguous()
                    start = torch.full((rows,), context + at, dtype=torch.int32, device="cuda")
                    alone = attend(
                        one,
                        kv[0],
                        table,
                        start,
                        first,
                        itself,
                        torch.empty_like(one),
                        most=1,
                        scale=shape.dim**-0.5,
                    )
                    same.append(bool(torch.equal(alone, chain[:, at])))
                key = f"attention {split}/{tile}/{warps} of {lanes} lanes, chain of {most}"
                found[key] = all(same)
    return found


def draws(probe: Probe) -> dict[str, Any]:
    """Time the draw, torch's arg-max, and what the host pays for a replay and a copy."""
    found: dict[str, Any] = {}
    vocab = 3000 if probe.rehearse else 128256
    for rows in (2,) if probe.rehearse else (1, 64, 320):
        rank = torch.stack([torch.randperm(vocab, device=probe.device) for _ in range(rows)]) + 1
        logits = (rank.float().log() * -1.3).to(
            probe.dtype
        )  # a law as of text: a few dozen in the head
        words = torch.randint(0, 2**62, (rows,), device=probe.device)
        bound = torch.full((rows,), float("-inf"), device=probe.device)
        tokens = torch.zeros(rows, dtype=torch.int32, device=probe.device)
        for chunk in (1024,) if probe.rehearse else (1024, 2048, 4096):
            draw = Draw(rows, vocab, probe.device, chunk=chunk)
            for temperature in (0.0, 1.0):
                heat = torch.full((rows,), temperature, device=probe.device)
                replay = probe.graph(lambda: draw(logits, heat, bound, words, tokens))
                found[f"{rows} rows at {temperature}, {chunk}"] = probe.time_ms(replay)
        found[f"{rows} rows arg-max"] = probe.time_ms(probe.graph(lambda: logits.argmax(-1)))
    if not probe.rehearse:
        pinned = torch.empty(4096, dtype=torch.int32, pin_memory=True)
        source = torch.zeros(4096, dtype=torch.int32, device="cuda")
        start = time.perf_counter()
        for _ in range(200):
            pinned.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        found["copy of 16 KB and wait"] = (time.perf_counter() - start) / 200 * 1e3
    print({k: round(v, 4) for k, v in found.items()}, flush=True)
    return {"ms": found}


def table(probe: Probe) -> dict[str, Any]:
    """Time steps by rows, tokens a row, and context."""
    weights, kv, _ = _weights_and_kv(probe, 128, 1100)
    found = []
    contexts = (70,) if probe.rehearse else (250, 1000, 3000)
    for rows in (2,) if probe.rehearse else (1, 2, 4, 8, 16, 32, 64, 128):
        for context in contexts:
            if rows * (context + 64) > len(kv[0]) * PAGE:
                continue
            for most in (1, 2, 3, 5, 9):
                if probe.left_s() < 25:
                    return {"cells": found, "status": "out of time"}
                options = _step_options(probe, "cublas", 0)
                step = Step(weights, kv, rows, most, context + 100, **options)
                step.fill(context)
                ms = probe.time_ms(probe.graph(step.run), 5)
                found.append({"rows": rows, "tokens": most, "context": context, "ms": ms})
            shown = " ".join(f"{cell['ms']:.2f}" for cell in found[-5:])
            print(f"{rows:3d} rows, context {context}: {shown} ms for 1, 2, 3, 5, 9", flush=True)
    return {"cells": found}


def heads(probe: Probe) -> dict[str, Any]:
    """Time one step of a draft head and of a 1B draft."""
    found: dict[str, Any] = {}
    for name in ("tiny",) if probe.rehearse else ("head", "1b"):
        shape = SHAPES[name]
        weights = Weights(shape, probe.device, probe.dtype)
        kv = new_kv(shape, 128 * 36, probe.device, probe.dtype)
        for rows in (2,) if probe.rehearse else (1, 8, 32, 64, 128):
            context = 70 if probe.rehearse else 1000
            step = Step(weights, kv, rows, 1, context + 100, split=512)
            step.fill(context)
            replay = probe.graph(step.run)
            read = weights.pass_bytes + rows * context * shape.kv_bytes
            found[f"{name} {rows}"] = {
                "ms": probe.time_ms(replay),
                "floor_ms": probe.floor_ms(read),
            }
            print(name, rows, found[f"{name} {rows}"], flush=True)
        del weights, kv
        probe.empty()
    return {"steps": found}


def prefill(probe: Probe) -> dict[str, Any]:
    """Time a chunk's layer: four products, torch's flash attention, norms; times 32."""
    shape, device, dtype = probe.shape, probe.device, probe.dtype
    weights = Weights(shape, device, dtype)
    layer = weights.layers[0]
    found: dict[str, Any] = {}
    for tokens in (16,) if probe.rehearse else (256, 512, 1024, 2048, 4096):
        x = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
        residual = torch.randn_like(x)
        y = torch.empty_like(x)
        q, k, v = (
            torch.randn(1, heads, tokens, shape.dim, device=device, dtype=dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        inner = torch.empty(tokens, shape.inner, device=device, dtype=dtype)

        def attend() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

        def run() -> None:
            add_rms_norm(x, residual, layer["norm1"], 1e-5, y)
            torch.mm(y, layer["qkv"].t())
            out = attend().transpose(1, 2).reshape(tokens, -1)
            torch.mm(out, layer["o"].t(), out=y)
            add_rms_norm(y, residual, layer["norm2"], 1e-5, y)
            gated(torch.mm(y, layer["gate_up"].t()), inner)
            torch.mm(inner, layer["down"].t(), out=y)

        ms, attention_ms = probe.time_ms(run, 7), probe.time_ms(attend, 7)
        flops = 2 * tokens * sum(m.numel() for m in layer.values() if m.dim() == 2)
        found[str(tokens)] = {
            "layer_ms": ms,
            "attention_ms": attention_ms,
            "pass_ms": ms * shape.layers,
            "products_tflop_s": flops / (ms - attention_ms) / 1e9,
        }
        print(tokens, {k: round(v, 3) for k, v in found[str(tokens)].items()}, flush=True)
    return {"chunks": found}


def pipelining(probe: Probe) -> dict[str, Any]:
    """Time rounds of drafting (4 steps of a 1B) and verifying (5 tokens a row of the 8B): one batch
    of all rows in one stream, against two half batches in two streams.
    """
    names = ("tiny", "tiny") if probe.rehearse else ("8b", "1b")
    context = 70 if probe.rehearse else 1000
    target, draft = (Weights(SHAPES[name], probe.device, probe.dtype) for name in names)
    blocks = 64 if probe.rehearse else 64 * 36
    kv = [new_kv(w.shape, blocks, probe.device, probe.dtype) for w in (target, draft)]
    found: dict[str, Any] = {}
    for rows in (2,) if probe.rehearse else (8, 16, 32, 64):
        alive = []

        def turn(
            rows: int, stream: torch.cuda.Stream | None
        ) -> tuple[Callable[[], None], Callable[[], None]]:
            verify = Step(target, kv[0], rows, 5, context + 100, split=512)
            propose = Step(draft, kv[1], rows, 1, context + 100, split=512)
            verify.fill(context)
            propose.fill(context)
            alive.extend((verify, propose))
            return (
                probe.graph(lambda: [propose.run() for _ in range(4)], stream),
                probe.graph(verify.run, stream),
            )

        streams = [None if probe.rehearse else torch.cuda.Stream() for _ in range(3)]
        whole, *halves = (turn(rows // (1 if n == 0 else 2), streams[n]) for n in range(3))
        if probe.rehearse:
            found[str(rows)] = {}
            continue
        rounds = 20
        one_ms = _timed(lambda: [run() for _ in range(rounds) for run in whole]) / rounds

        def two() -> None:
            main = torch.cuda.current_stream()
            for stream in streams[1:]:
                stream.wait_stream(main)
            for n in range(rounds):
                for which, stream in enumerate(streams[1:]):
                    with torch.cuda.stream(stream):
                        order = halves[which] if which == 0 or n else halves[which][1:]
                        for run in order:
                            run()
            for stream in streams[1:]:
                main.wait_stream(stream)

        two_ms = _timed(two) / rounds
        halved = {
            "draft": probe.time_ms(halves[0][0]),
            "verify": probe.time_ms(halves[0][1]),
        }
        found[str(rows)] = {"one_batch_ms": one_ms, "two_halves_ms": two_ms, "half_ms": halved}
        found[str(rows)]["draft_ms"] = probe.time_ms(whole[0])
        found[str(rows)]["verify_ms"] = probe.time_ms(whole[1])
        print(rows, found[str(rows)], flush=True)
    return {"rounds": found}


def _timed(launch: Callable[[], object]) -> float:
    """Return the median milliseconds of 3 runs, as the host sees them."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[1:])


def model(probe: Probe) -> dict[str, Any]:
    """Time steps of transformers' 8B with fused leaves, and compare texts between plans."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from backend.engines.cuda import plain
    from backend.engines.cuda.chain import ChainStep, Slots
    from backend.engines.cuda.model import ATTENTION, PagedModel

    shape, rows_most = probe.shape, 3 if probe.rehearse else 128
    config = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        initializer_range=shape.hidden**-0.5,
    )
    start = time.monotonic()
    with torch.device(probe.device):
        lm = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=probe.dtype
        ).eval()
    context, room = (40, 100) if probe.rehearse else (1000, 1150)
    need = -(-room // PAGE)
    paged = PagedModel(
        lm,
        blocks=rows_most * need,
        max_tokens=rows_most * 5,
        max_keys=room,
        fast=not probe.rehearse,
    )
    paged.fuse()
    found: dict[str, Any] = {
        "seconds_to_load_and_fuse": time.monotonic() - start,
        "fused": paged.fused,
        "refused": paged.refused,
    }
    print(found, flush=True)
    for kv in paged.kv:
        kv.normal_().mul_(0.1)
    slots = Slots(rows_most, -(-need // 16) * 16, paged.device)
    blocks = torch.randperm(rows_most * need, device=paged.device).view(rows_most, need).int()
    slots.table[:, :need] = blocks
    slots.seed.copy_(torch.randint(-(2**62), 2**62, (rows_most,)))
    first = torch.randint(0, shape.vocab, (rows_most,)).to(probe.device)
    draw = plain.draw if probe.rehearse else Draw(rows_most * 5, shape.vocab, probe.device)
    buckets: dict[tuple[int, int], tuple[ChainStep, Callable[[], None]]] = {}

    def bucket(rows: int, most: int) -> tuple[ChainStep, Callable[[], None]]:
        if (rows, most) not in buckets:
            step = ChainStep(paged, slots, rows, most, draw=draw)  # type: ignore[arg-type]
            buckets[rows, most] = step, probe.graph(step.run)
        return buckets[rows, most]

    found["steps"] = {}
    for rows in (2,) if probe.rehearse else (1, 8, 32, 64, 128):
        for most in (1, 3, 5):
            begun = time.monotonic()
            slots.length.fill_(context)
            _, replay = bucket(rows, most)
            capture_s = time.monotonic() - begun
            slots.length.fill_(context)
            ms = probe.time_ms(replay)
            begun = time.perf_counter()
            replay()
            host_us = (time.perf_counter() - begun) * 1e6
            found["steps"][f"{rows} rows, {most} tokens"] = {
                "ms": ms,
                "capture_s": capture_s,
                "replay_host_us": host_us,
            }
            print(rows, most, found["steps"][f"{rows} rows, {most} tokens"], flush=True)
    found["texts"] = {}
    texts: dict[tuple[int, float], torch.Tensor] = {}
    for temperature in (0.0, 0.8):
        for rows in (3, 2, 1) if probe.rehearse else (64, 8, 1):
            slots.temperature.fill_(temperature)
            text, steps = _text(slots, first, context, bucket(rows, 1), None)
            texts[rows, temperature] = text
            widest = texts[max(r for r, t in texts if t == temperature), temperature]
            same = {"alone as in the batch": bool(torch.equal(text, widest[:rows]))}
            again, steps = _text(slots, first, context, bucket(rows, 5), text)
            same["proposed itself, same text"] = bool(torch.equal(again, text))
            same["all proposed accepted"] = steps == -(-TEXT_TOKENS // 5)
            wrong = text.clone()
            wrong[:, 3::4] = 7
            wrong[::3] = 9
            again, steps = _text(slots, first, context, bucket(rows, 3), wrong)
            same["proposed wrongly, same text"] = bool(torch.equal(again, text))
            found["texts"][f"{rows} rows at temperature {temperature}"] = same | {
                "distinct_tokens": int(text.unique().numel())
            }
            print(rows, temperature, found["texts"][f"{rows} rows at temperature {temperature}"])
    return found


TEXT_TOKENS = 40


def _text(
    slots: Any,
    first: torch.Tensor,
    context: int,
    bucket: tuple[Any, Callable[[], None]],
    guess: torch.Tensor | None,
) -> tuple[torch.Tensor, int]:
    """Return the texts [rows, tokens] that a bucket writes after the same contexts, and its steps.
    ``guess`` [rows, tokens] are proposed at their places.
    """
    step, replay = bucket
    rows, most, device = step.rows, step.most, first.device
    slots.length.fill_(context)
    slots.last.copy_(first)
    text = torch.full((rows, TEXT_TOKENS + 8), -1, dtype=torch.int64, device=device)
    done = torch.zeros(rows, dtype=torch.int64, device=device)
    offset, steps = torch.arange(most, device=device), 0
    padded = None
    if guess is not None:
        padded = torch.cat((guess, guess.new_full((rows, 16), -1)), 1)
    while int(done.min()) < TEXT_TOKENS:
        if padded is not None:
            step.proposal.copy_(
                padded.gather(1, (done[:, None] + offset[:-1]).clamp(max=TEXT_TOKENS))
            )
        replay()
        steps += 1
        at = (done[:, None] + offset).clamp(max=TEXT_TOKENS + 7)
        is_text = offset < step.count[:, None]
        text.scatter_(1, at, torch.where(is_text, step.emitted, text.gather(1, at)))
        done += step.count
        done.clamp_(max=TEXT_TOKENS)
    return text[:, :TEXT_TOKENS], steps
