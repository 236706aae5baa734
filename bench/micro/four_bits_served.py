"""A folder of 4 bits served by Triton against llama.cpp's library on a file of the same shape:
``python -m bench.micro.four_bits_served --libs FOLDER --bindings FILE --out FILE`` (the first two
as for ``bench.micro.four_bits``).

Random weights accept nothing by themselves, so arms of a ``script`` have a draft that is right with
the probability that gives 2.0 or 2.5 tokens a step (``bench.micro.scripted_draft``); the passes
that verify are the real ones. ``suffix`` is the real draft and the adaptive policy, on the texts
that these weights write. llama.cpp decodes greedily without a server. A run is ``--requests``
requests, each of a prompt and ``--tokens`` tokens; arms run in turn, the first run is not counted.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from backend.engine_config import EMBEDDED_MODEL
from backend.storage import cache
from backend.tokenizer import load_tokenizer
from bench import records
from bench.micro.four_bits import SHAPES, Llama, write_folder, write_gguf
from bench.micro.scripted_draft import THOUSAND
from bench.servers import OfferedLoad, ServerArm

PROMPT_WORDS = 24
IN_FLIGHT = (1, 4)
SCRIPTS = {1: {"2.0": (4, 0.519), "2.5": (4, 0.645)}, 4: {"2.0": (2, 0.618), "2.5": (2, 0.823)}}
"""By requests in flight and tokens a step: how many tokens are proposed, and how often one is
right where all before it are.
"""


class Greedy(Llama):
    """llama.cpp decoding greedily, as many texts at a time as are in flight."""

    def __init__(self, args: argparse.Namespace, file: Path) -> None:
        super().__init__(args, file)
        self._vocab = SHAPES[args.shape]["vocab_size"]

    def write(self, prompts: list[list[int]], tokens: int, in_flight: int) -> float:
        """Return the tokens a second of writing ``tokens`` after each prompt."""
        started = time.perf_counter()
        for at in range(0, len(prompts), in_flight):
            some = prompts[at : at + in_flight]
            self._lib.llama_memory_seq_rm(self._memory, -1, -1, -1)
            last = self._step([(row, 0, prompt) for row, prompt in enumerate(some)])
            for more in range(tokens - 1):
                turns = [(row, len(some[row]) + more, [last[row]]) for row in range(len(some))]
                last = self._step(turns)
        return len(prompts) * tokens / (time.perf_counter() - started)

    def _step(self, turns: list[tuple[int, int, list[int]]]) -> list[int]:
        """Run tokens of sequences from their places on; return the likeliest after each."""
        batch, count, ends = self._batch, 0, []
        for sequence, start, tokens in turns:
            for place, token in enumerate(tokens, start):
                batch.token[count], batch.pos[count] = token, place
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = place == start + len(tokens) - 1
                count += 1
            ends.append(count - 1)
        batch.n_tokens = count
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp ran no pass")
        rows = (self._lib.llama_get_logits_ith(self._context, end) for end in ends)
        buffers = (self._ffi.buffer(row, 4 * self._vocab) for row in rows)
        return [int(np.frombuffer(buffer, np.float32).argmax()) for buffer in buffers]


def config_of(folder: Path, threads: int, draft: str, policy: dict[str, Any]) -> Any:
    """Return a server's configuration."""
    target = {"engine": "openvino", "model": str(folder), "dtype": "int4", "lm_head": "int4"}
    return {
        "target": target,
        "drafts": [{"name": policy.get("draft", draft), "engine": draft}],
        "policy": policy,
        "threads": threads,
        "limits": {"max_active_requests": 4, "kv_cache_tokens": 4096},
    }


def offer(
    texts: list[str], args: argparse.Namespace, in_flight: int, run: str, **more: Any
) -> OfferedLoad:
    """Return a run's requests, whose KV no other run shares."""
    common = {"max_tokens": args.tokens, "cache_salt": run, **more}
    return OfferedLoad([{"text_input": text, **common} for text in texts], in_flight)


def measure(args: argparse.Namespace, place: Path) -> Iterator[dict[str, Any]]:
    """Serve every arm in turn; yield medians of tokens a second, and of the ratio's of runs."""
    folder = place / f"{args.shape}-0"
    if not folder.exists():
        write_folder(dict(SHAPES[args.shape]), folder)
    shipped = cache.model_folder(EMBEDDED_MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder / name)
    file = place / f"{args.shape}-0-{args.kind}.gguf"
    if not file.exists():
        write_gguf(dict(SHAPES[args.shape]), args.kind, file)
    rng = random.Random(args.seed)
    texts = [
        " ".join("".join(rng.choices(ascii_lowercase, k=6)) for _ in range(PROMPT_WORDS))
        for _ in range(args.requests)
    ]
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in texts]
    with tempfile.TemporaryDirectory() as run_folder:
        config = config_of(folder, args.threads, "suffix", {"kind": "adaptive", "k_max": 8})
        real = ServerArm(config, Path(run_folder) / "real")
        try:
            script = {"kind": "fixed", "draft": "script", "length": 4, "k_max": 4}
            other = config_of(folder, args.threads, "bench.micro.scripted_draft", script)
            scripted_server = ServerArm(other, Path(run_folder) / "scripted")
            try:
                llama = Greedy(args, file)
                yield from compare(args, texts, prompts, real, scripted_server, llama)
            finally:
                scripted_server.close()
        finally:
            real.close()


def compare(
    args: argparse.Namespace,
    texts: list[str],
    prompts: list[list[int]],
    real: ServerArm,
    knowing: ServerArm,
    llama: Greedy,
) -> Iterator[dict[str, Any]]:
    """Run the arms in turn, alone and together."""
    for in_flight in IN_FLIGHT:
        arms: dict[str, tuple[ServerArm, dict[str, Any]]] = {
            "plain": (real, {"num_draft_tokens": 0}),
            "suffix": (real, {}),
        }
        for name, (length, rate) in SCRIPTS[in_flight].items():
            seed = round(rate * THOUSAND)
            arms[f"script {name}"] = (knowing, {"num_draft_tokens": length, "seed": seed})
        speeds: dict[str, list[float]] = {name: [] for name in ("llama.cpp", *arms)}
        steps: dict[str, float] = {}
        for repeat in range(args.repeats + 1):
            speeds["llama.cpp"].append(llama.write(prompts, args.tokens, in_flight))
            for name, (server, more) in arms.items():
                requests = offer(texts, args, in_flight, f"{in_flight} {name} {repeat}", **more)
                result = server.run(requests)
                emitted = sum(reply.output_tokens for reply in result.replies)
                accepted = sum(reply.accepted for reply in result.replies)
                speeds[name].append(emitted / result.wall_s)
                steps[name] = emitted / (emitted - accepted)
            print(in_flight, {name: round(s[-1], 1) for name, s in speeds.items()}, flush=True)
        for name, values in speeds.items():
            ratios = [a / b for a, b in zip(values, speeds["llama.cpp"], strict=True)][1:]
            row = {"in_flight": in_flight, "arm": name, "threads": args.threads}
            row |= {"tokens_per_s": round(statistics.median(values[1:]), 2)}
            row |= {"over_llama_cpp": round(statistics.median(ratios), 3)}
            row |= {"runs": [round(ratio, 3) for ratio in ratios]}
            yield row | {"tokens_a_step": round(steps.get(name, 1.0), 2)}


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--libs", type=Path, required=True)
    parser.add_argument("--bindings", type=Path, required=True)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--kind", default="Q4_0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=192, help="tokens of a text")
    parser.add_argument("--place", type=Path, help="where folders are written (default: temporary)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for row in measure(args, args.place or Path(temporary)):
            rows.append(row)
            records.write(args.out, {"seed": args.seed, "rows": rows})


if __name__ == "__main__":
    main()
