"""Random-weight Llamas of known shapes, and timed steps of them: what the parts of
``tests.gpu.run`` measure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import prod
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from backend.engines.checkpoint import LlamaConfig
from backend.engines.port import Turn
from backend.engines.torch.engine import TorchEngine
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence

SHAPES = {
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128),
    "1b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "tiny": LlamaConfig(512, 64, 128, 2, 4, 2, 16, tied=True),
    "tinier": LlamaConfig(512, 32, 64, 1, 2, 2, 16, tied=True),
}
"""Llama 3.1 8B, Llama 3.2 1B, SmolLM2 135M; the last two are for rehearsals."""


def weights_of(config: LlamaConfig, device: str) -> dict[str, torch.Tensor]:
    """Make random bf16 weights on the device, the same every time."""
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in config.shapes().items():
        made[name] = torch.ones(shape, dtype=torch.bfloat16, device=device)
        if len(shape) > 1:
            made[name].normal_(generator=generator).mul_(config.hidden_size**-0.5)
    return made


def engine_of(
    shape: str,
    device: str,
    kv_blocks: int,
    context: int,
    *,
    name: str = "",
) -> TorchEngine:
    """Make an engine of a shape whose sequences hold up to ``context`` tokens."""
    config = SHAPES[shape]
    sizes = {"kv_blocks": kv_blocks, "max_context_tokens": context, "max_draft_tokens": 16}
    return TorchEngine.from_weights(name or shape, config, weights_of(config, device), **sizes)


def read_bytes(config: LlamaConfig, context_tokens: int) -> int:
    """Return what a step cannot help reading: every matrix once (of the embedding, the head) and
    the KV of the contexts.
    """
    numbers = sum(
        prod(shape)
        for name, shape in config.shapes().items()
        if "embed_tokens" not in name or config.tied
    )
    return 2 * (
        numbers + context_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    )


def blocks_of(context: int, new: int) -> int:
    """Return the KV blocks of a sequence."""
    return -(-(context + new) // BLOCK_TOKENS)


def stepper(
    engine: TorchEngine, context: int, lengths: Seq[int], chunk: int = 0
) -> Callable[[], float]:
    """Return a step that says how many seconds it took: a sequence for each of ``lengths``
    (proposed tokens) behind ``context`` tokens that are taken as run, and beside them a prefill of
    ``chunk`` tokens.
    """
    generator, turns, first = torch.Generator().manual_seed(len(lengths)), [], 0
    for number, (new, length) in enumerate(
        [*((1, length) for length in lengths), *([(chunk, 0)] if chunk else [])]
    ):
        tokens = torch.randint(
            0, engine.limits.vocab_size, (context + new + length,), generator=generator
        ).tolist()
        count = blocks_of(context, new + length)
        sequence = Sequence(
            number,
            tokens[: context + new],
            context,
            SamplingParams(),
            {engine.name: list(range(first, first + count))},
        )
        first += count
        proposal = Proposal.chain("random", tokens[context + new :]) if length else None
        turns.append(
            Turn(sequence, context + new, run=int(number < len(lengths)), proposal=proposal)
        )

    def step() -> float:
        for turn in turns:
            engine.assume(turn.sequence, context)
            engine.unseen(turn.sequence)  # compares the assumed tokens now, not within the time
        start = time.perf_counter()
        engine.submit(turns)
        completions = engine.poll(0.0)
        seconds = time.perf_counter() - start
        engine.cancel([turn.sequence.id for turn in turns])
        if error := next(
            (completion.error for completion in completions if completion.error), None
        ):
            raise RuntimeError(error)
        return seconds

    return step


def timed(step: Callable[[], float], budget_s: float = 0.25) -> dict[str, float]:
    """Return median and least of a step's times in ms: 2 rounds to warm up, then 5 to 15 within the
    budget.
    """
    for _ in range(2):
        step()
    taken, start = [], time.perf_counter()
    while len(taken) < 5 or (len(taken) < 15 and time.perf_counter() - start < budget_s):
        taken.append(1e3 * step())
    return {"ms": round(median(taken), 4), "least_ms": round(min(taken), 4), "rounds": len(taken)}


def launches(step: Callable[[], float], device: str) -> dict[str, float]:
    """Return what the host launches in one step, and how long the device was at work in it (0 on a
    CPU).
    """
    on_gpu = device == "cuda"
    step()
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as seen:
        step()  # has waited for its results
    events = list(seen.events())
    names = Counter(event.name for event in events)
    work = [event for event in events if event.device_type == DeviceType.CUDA]
    return {
        "kernel_launches": sum(count for name, count in names.items() if "LaunchKernel" in name),
        "waits": sum(count for name, count in names.items() if "Synchronize" in name),
        "operators": sum(count for name, count in names.items() if name.startswith("aten::")),
        "device_ms": round(sum(event.time_range.elapsed_us() for event in work) / 1e3, 4),
    }


def seconds_of(work: Callable[[], object], device: str, rounds: int = 10) -> float:
    """Return the median seconds of work on the device."""
    taken = []
    for _ in range(rounds + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def copy_bandwidth(device: str, size: int) -> float:
    """Return bytes a second of a copy of ``size`` bytes within the device's memory, read and
    written ones together.
    """
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)
