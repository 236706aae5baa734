"""Time steps of the engine on a device: ``python -m tests.gpu.bench_steps --out FILE`` (random weights in bf16; a GPU needs no checkpoint).

Arms, interleaved (ABBA): plain passes (``tiled``), static shapes (``graphs``), and transformers' eager forward with its own cache. An
engine's step is a whole ``submit`` and ``poll`` of decoding or verifying behind ``--context`` tokens; transformers' a bare forward, waited
for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from backend import machine
from backend.engines.checkpoint import LlamaConfig
from backend.engines.torch_engine import TorchEngine
from backend.ports import BLOCK_TOKENS
from tests.bench.bench_dtypes import stepper

SHAPES = {
    "tiny": LlamaConfig(4096, 64, 128, 2, 4, 2, 16, tied=True),
    "135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "1b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128),
}
STEPS = ((1, 0), (1, 4), (1, 8), (4, 0), (4, 4), (16, 0), (16, 4), (64, 0), (64, 4))
"""(sequences, proposed tokens of each)"""


def weights_of(config: LlamaConfig, device: str) -> dict[str, torch.Tensor]:
    """Make random weights on the device, the same every time."""
    generator = torch.Generator(device).manual_seed(0)
    scale = config.hidden_size**-0.5
    made = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            made[name] = torch.ones(shape, dtype=torch.bfloat16, device=device)
        else:
            made[name] = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) * scale
    return made


def transformers_step(config: LlamaConfig, weights: dict[str, torch.Tensor], sequences: int, rows: int, context: int) -> Callable[[], None]:
    """Return a forward of transformers' own model with these weights."""
    from transformers import DynamicCache, LlamaForCausalLM
    from transformers import LlamaConfig as Config

    device = weights["model.norm.weight"].device
    theirs = Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tied,
    )
    with torch.device(device):
        model = LlamaForCausalLM(theirs).to(torch.bfloat16).eval()
    model.load_state_dict(weights, strict=False)
    cache, ids = DynamicCache(), torch.ones(sequences, context, dtype=torch.int64, device=device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def step() -> None:
        model(ids[:, :rows], past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()
        cache.crop(-rows)

    return step


def compared(name: str, device: str, context: int, rounds: int) -> list[dict[str, object]]:
    """Return medians in ms of every step and arm."""
    config, rows = SHAPES[name], []
    weights = weights_of(config, device)
    most = max(n * (-(-(context + 1 + k) // BLOCK_TOKENS)) for n, k in STEPS)
    engines = {
        arm: TorchEngine.from_weights(arm, config, weights, kv_blocks=most, max_context_tokens=context + 16, attention=arm)
        for arm in ("tiled", "graphs")
    }
    for sequences, proposed in STEPS:
        arms = {arm: stepper(engine, sequences, proposed, context) for arm, engine in engines.items()}
        arms["transformers"] = transformers_step(config, weights, sequences, 1 + proposed, context)
        taken: dict[str, list[float]] = {arm: [] for arm in arms}
        for index in range(rounds + 2):
            for arm in [*arms, *reversed(arms)]:
                start = time.perf_counter()
                arms[arm]()
                if index >= 2:
                    taken[arm].append(1e3 * (time.perf_counter() - start))
        for engine in engines.values():
            engine.cancel(range(sequences))
        rows.append({"sequences": sequences, "proposed": proposed, "ms": {arm: median(values) for arm, values in taken.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1b", "8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, object] = {
        "command": ["python", "-m", "tests.gpu.bench_steps", *sys.argv[1:]],
        "seed": 0,
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "cuda": torch.version.cuda,
        "context": args.context,
        "results": {},
    }
    with torch.inference_mode():
        for name in args.shapes:
            report["results"][name] = {"shape": asdict(SHAPES[name]), "steps": compared(name, args.device, args.context, args.rounds)}
            args.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps({name: found["steps"] for name, found in report["results"].items()}))


if __name__ == "__main__":
    main()
