"""Whether the CUDA engine writes the same texts whatever is in flight, before any figure:
``python -m bench.cuda.gate --out FILE``.

Random weights in the shape of eight layers of an 8B; prompts of 20 to 5,000 tokens, alone and among
others, greedy, sampled and with top-p. Each text is written four times: drawn by the host, drawn by
the device one submission at a time, with a turn of lookahead, and with proposals of random lengths
that are right four times out of five. The device's must all be equal: with
``invariant`` everywhere, without it where a request is alone. The exit status is 1 where one
differs, and no price is measured then; else those of chunks of a prompt and of top-p are.

``--rehearse`` runs small shapes on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.lookup import Continuation, LookupEngine
from backend.engines.port import Engine, Turn
from backend.machine import machine
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import BLOCK_TOKENS
from backend.sequence import Sequence as Text
from backend.speculation.drafting import Drafting
from bench import records
from bench.cuda import PLANNER
from bench.cuda.random_models import SHAPES, random_llama
from bench.cuda.request_loops import Silent
from policy import AnyPolicy, NoSpeculation
from policy.baselines import RandomChoice

K_MAX = 8
SEED = 1
SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}


class GatedEngine(LookaheadEngine):
    """An engine whose tokens the host draws where ``by_host``."""

    by_host = False

    def _takes(self, turn: Turn) -> bool:
        return not self.by_host and super()._takes(turn)


@dataclass(frozen=True)
class GateRequest:
    """A request: its prompt, its options and how many tokens it wants."""

    prompt: list[int]
    options: dict[str, float]
    tokens: int


class Knowing(LookupEngine):
    """A draft that knows the texts, by the requests' seeds, but for every fifth token."""

    KIND = "knowing"

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int) -> None:
        super().__init__(self.KIND, max_draft_tokens=K_MAX, vocab_size=vocab)
        self._texts = texts

    def _has_match(self, sequence: Text) -> bool:
        return bool(self._rest(sequence))

    def _paths(self, sequence: Text, length: int) -> list[Continuation]:
        return [Continuation(1, 1, self._rest(sequence)[:length])]

    def _rest(self, sequence: Text) -> list[int]:
        output_tokens = len(sequence.tokens) - sequence.prompt_tokens
        text = self._texts[sequence.sampling.seed or 0]
        vocab = self.limits.vocab_size
        return [
            (token + (at % 5 == 4)) % vocab for at, token in enumerate(text) if at >= output_tokens
        ]


_ids = itertools.count()

Watch = Callable[[Sequence[Session]], None]
"""Is called before every step of the loop."""


def serve(
    target: LookaheadEngine,
    asks: Sequence[GateRequest],
    *,
    lookahead: int,
    chunk: int = 256,
    drafts: Sequence[Engine] = (),
    policy: AnyPolicy | None = None,
    watch: Watch | None = None,
    most_active: int = 64,
) -> list[list[int]]:
    """Return the texts of requests that arrive together; no prefix of one is used for another."""
    target.limits = replace(target.limits, lookahead=lookahead)
    stats = StepStats(Stats())
    pools = {engine.name: engine.limits.kv_blocks for engine in (target, *drafts)}
    ledger = KVLedger(pools, 2 * (K_MAX + 1))
    loop = Orchestrator(
        target,
        Drafting(drafts, stats, time.monotonic),
        policy or NoSpeculation(),
        ledger,
        Admission(ledger, most_active, len(asks) + 1),
        stats,
        time.monotonic,
        k_max=K_MAX,
        prefill_chunk_tokens=chunk,
    )
    sessions = []
    for number, ask in enumerate(asks):
        options: dict[str, Any] = {"seed": number, **ask.options}
        text = Text(next(_ids), [*ask.prompt], len(ask.prompt), SamplingParams(**options))
        client = Silent()
        request = GenerationRequest("", ask.tokens)
        sessions.append(Session(text, request, frozenset(), client, client))
        loop.submit(sessions[-1])
    while not all(session.finish_reason or session.sink.cancelled for session in sessions):
        if watch is not None:
            watch(sessions)
        loop.step()
    while loop.step():
        pass
    return [each.sequence.tokens[each.sequence.prompt_tokens :] for each in sessions]


def random_prompt(tokens: int, vocab: int, seed: int) -> list[int]:
    """Return a prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (tokens,), generator=generator).tolist()


class Gate:
    """The engine, its prompts and the record."""

    def __init__(self, out: Path, *, rehearse: bool, invariant: bool) -> None:
        self._out, self._rehearse = out, rehearse
        self._shape = SHAPES["tiny"] if rehearse else replace(SHAPES["8b"], layers=8)
        self.lengths = (20, 300, 1500) if rehearse else (20, 60, 300, 1500, 5000)
        self._tokens, self._many = (6, 4) if rehearse else (40, 48)
        device, dtype = ("cpu", torch.float32) if rehearse else ("cuda", torch.bfloat16)
        context = max(self.lengths) + self._tokens + 1
        started = time.monotonic()
        self.target = GatedEngine(
            "target",
            random_llama(self._shape, device, dtype),
            vocab_size=self._shape.vocab,
            sequences=64,
            invariant=invariant,
            kv_blocks=8 * (context // BLOCK_TOKENS + 3) + 700,
            max_context_tokens=context,
            max_draft_tokens=K_MAX,
        )
        loaded = time.monotonic()
        self.target.prepare([], 4 if rehearse else 64)
        self.record: dict[str, Any] = {
            "invariant": invariant,
            "loading_s": round(loaded - started, 1),
            "capturing_s": round(time.monotonic() - loaded, 1),
            "graphs": self.target.graphs,
            "memory": self._memory(),
            "cases": [],
        }

    def compare(self) -> int:
        """Write every text in every way; return how many differ from the host's."""
        alone = {
            f"{n} tokens, {name}": [self._ask(n, options)]
            for n in self.lengths
            for name, options in SAMPLINGS.items()
        }
        together = [ask for asks in alone.values() for ask in asks]
        short = [self._ask(40 + 61 * n % 300, {}, seed=n) for n in range(self._many)]
        differ = sum(self._case(case, asks, 256) for case, asks in alone.items())
        if self.record["invariant"]:  # else near ties may part in another batch
            for chunk in (256, 2048):
                differ += self._case(f"all lengths, chunks of {chunk}", together, chunk)
            differ += self._case(f"{self._many} short prompts", short, 256)
        return differ

    def price(self) -> None:
        """Note what chunks of a prompt and top-p cost."""
        longest = self._ask(max(self.lengths), {})
        for chunk in (64, 256, 512, 1024, 2048, 4096)[: 2 if self._rehearse else None]:
            seconds = min(self._time([longest], chunk) for _ in range(2))
            self._note(case=f"a prompt of {max(self.lengths)} tokens", chunk=chunk, seconds=seconds)
        for name, options in SAMPLINGS.items():
            asks = [self._ask(60, options, seed=n) for n in range(self._many)]
            seconds = min(self._time(asks, 2048) for _ in range(2))
            self._note(case=f"{self._many} rows, {name}", seconds=seconds)

    def _case(self, case: str, asks: Sequence[GateRequest], chunk: int) -> int:
        ways: dict[str, tuple[bool, int, bool]] = {
            "by the host": (True, 0, False),
            "by the device": (False, 0, False),
            "with lookahead": (False, 1, False),
            "with proposals": (False, 1, True),
        }
        texts: dict[str, list[list[int]]] = {}
        for way, (by_host, lookahead, proposes) in ways.items():
            self.target.by_host = by_host
            drafts = [Knowing(texts["by the device"], self._shape.vocab)] if proposes else []
            texts[way] = serve(
                self.target,
                asks,
                lookahead=lookahead,
                chunk=chunk,
                drafts=drafts,
                policy=RandomChoice() if proposes else None,
            )
        wanted = texts["by the host"]
        differ = {
            way: [n for n, (a, b) in enumerate(zip(wanted, text, strict=True)) if a != b]
            for way, text in texts.items()
        }
        self._note(
            case=case, chunk=chunk, texts=len(asks), differ=differ, graphs=self.target.graphs
        )
        return sum(map(len, differ.values()))

    def _ask(self, tokens: int, options: dict[str, float], *, seed: int = SEED) -> GateRequest:
        return GateRequest(random_prompt(tokens, self._shape.vocab, seed), options, self._tokens)

    def _time(self, asks: Sequence[GateRequest], chunk: int) -> float:
        start_s = time.monotonic()
        serve(self.target, asks, lookahead=1, chunk=chunk)
        return round(time.monotonic() - start_s, 4)

    def _memory(self) -> dict[str, int]:
        if self._rehearse:
            return {}
        free, whole = torch.cuda.mem_get_info()
        allocated = torch.cuda.memory_allocated()
        return {"used_mib": (whole - free) >> 20, "allocated_mib": allocated >> 20}

    def _note(self, **case: Any) -> None:
        self.record["cases"].append(case)
        print(case, flush=True)
        records.write(self._out, self.record)


def main() -> int:
    """Compare texts, then note prices; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "gpu": [str(gpu) for gpu in machine.gpus()],
        "planner": PLANNER,
        "seed": SEED,
        "rehearsal": args.rehearse,
        "runs": [],
    }
    differ = 0
    for invariant in (True, False):
        gate = Gate(args.out, rehearse=args.rehearse, invariant=invariant)
        differ += gate.compare()
        if not differ and not invariant:
            gate.price()
        record["runs"].append(gate.record)
        gate.target.close()
        if differ:
            break
    record["differ"] = differ
    records.write(args.out, record)
    print(f"{differ} texts differ" if differ else "all texts are equal", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
