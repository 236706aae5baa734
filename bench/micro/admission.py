"""Admission on a small KV cache: ``python -m bench.micro.admission [--seed 0]`` prints one
JSON object.

The real ``Admission`` and ``KVLedger`` in a simulation of steps: 200 requests of 100 prompt tokens
and ``max_tokens`` 512, all waiting from the start, one token a request and step. A step takes 27
ms, 3.5 ms for each decoding row and 1.5 ms for each prefill token, about what SmolLM2 takes in bf16
on one CPU core. Texts end early (exponential, mean 100) or never before ``max_tokens``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.session import Session
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence

REQUESTS, PROMPT_TOKENS, MAX_TOKENS, HEADROOM_TOKENS, CHUNK_TOKENS, MAX_ACTIVE = (
    200,
    100,
    512,
    9,
    256,
    64,
)
STEP_S, ROW_S, PREFILL_TOKEN_S = 0.027, 0.0035, 0.0015
POOLS_TOKENS = (4096, 8192, 16384)
MEAN_TOKENS = {"ending early": 100, "full length": None}
ARMS = {
    "guaranteed_no_evict": None,
    **{f"max_utilization, {blocks} blocks to grow": blocks for blocks in (0, 2, 4, 8, 16)},
}


class _Client:
    cancelled = False


class Simulation:
    """A batch that only counts tokens; ``growth_blocks`` None reserves whole lives."""

    def __init__(
        self, pool_tokens: int, growth_blocks: int | None, mean_tokens: int | None, seed: int
    ) -> None:
        rng = random.Random(seed)
        pools = {"target": pool_tokens // BLOCK_TOKENS}
        self.ledger = KVLedger(
            pools,
            HEADROOM_TOKENS,
            guaranteed=growth_blocks is None,
            growth_blocks=growth_blocks or 0,
        )
        self.admission = Admission(self.ledger, MAX_ACTIVE, REQUESTS)
        self.left: dict[int, int] = {}
        self.unseen: dict[int, int] = {}
        self.active: dict[int, Session] = {}
        self.time_s, self.preemptions, self.recomputed_tokens, self.steps, self.rows = (
            0.0,
            0,
            0,
            0,
            0,
        )
        for number in range(REQUESTS):
            sequence = Sequence(number, [0] * PROMPT_TOKENS, PROMPT_TOKENS, SamplingParams())
            request = GenerationRequest("", MAX_TOKENS)
            self.left[number] = (
                MAX_TOKENS
                if mean_tokens is None
                else min(MAX_TOKENS, 1 + int(rng.expovariate(1 / mean_tokens)))
            )
            self.admission.offer(Session(sequence, request, frozenset(), None, _Client()))  # type: ignore[arg-type]

    def run(self) -> dict[str, float]:
        """Serve everything; return seconds and counts."""
        while self.active or len(self.admission):
            self._step()
        return {
            "seconds": round(self.time_s, 1),
            "rows_per_step": round(self.rows / self.steps, 1),
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
        }

    def _step(self) -> None:
        for session in self.admission.make_room(self.active.values()):
            del self.active[session.id]
            self.preemptions += 1
            self.recomputed_tokens += len(session.sequence.tokens) - self.unseen[session.id]
        for session in self.admission.admit(len(self.active)):
            self.active[session.id] = session
            self.unseen[session.id] = len(session.sequence.tokens)
        rows, budget = 0, CHUNK_TOKENS
        for session in list(self.active.values()):
            chunk = min(self.unseen[session.id], budget) if self.unseen[session.id] > 1 else 0
            self.unseen[session.id] -= chunk
            budget -= chunk
            rows += chunk == 0
            if self.unseen[session.id] <= 1:
                self._emit(session)
        self.time_s += STEP_S + ROW_S * rows + PREFILL_TOKEN_S * (CHUNK_TOKENS - budget)
        self.steps += 1
        self.rows += rows

    def _emit(self, session: Session) -> None:
        session.sequence.tokens.append(0)
        self.unseen[session.id] = 1
        self.left[session.id] -= 1
        if not self.left[session.id]:
            self.ledger.release(session.sequence)
            del self.active[session.id]


def main() -> None:
    """Simulate every arm and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    figures = [
        {
            "pool_tokens": pool,
            "texts": texts,
            "arm": arm,
            **Simulation(pool, growth, mean, seed).run(),
        }
        for pool in POOLS_TOKENS
        for texts, mean in MEAN_TOKENS.items()
        for arm, growth in ARMS.items()
    ]
    print(
        json.dumps(
            {
                "command": f"python -m bench.micro.admission --seed {seed}",
                "seed": seed,
                "runs": figures,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
