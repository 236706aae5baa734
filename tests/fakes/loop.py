"""A loop over fake engines, without processes or models: the smallest whole deployment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Sequence as TokenSequence
from backend.speculation.drafting import Drafting
from policy import Policy, RandomChoice
from tests.fakes.clients import Characters, Sink
from tests.fakes.clock import Clock
from tests.fakes.engines import FaultyEngine

EOS = 256


class World:
    """A target, drafts that agree with it in these shares of places, and the loop over them.
    Looking ahead, every second draft proposes on the target's device.
    """

    lookahead = 0
    """That of worlds that are made without one."""

    def __init__(
        self,
        policy: Policy | None = None,
        drafts: Sequence[float] = (0.9, 0.2),
        *,
        blocks: int = 1000,
        chunk: int = 7,
        clock: Callable[[], float] | None = None,
        growth_blocks: int = 2,
        guaranteed: bool = False,
        k_max: int = 8,
        max_active: int = 8,
        max_queued: int = 1000,
        max_request_s: float = math.inf,
        reuse: bool = True,
        seed: int = 0,
        lookahead: int | None = None,
    ) -> None:
        ahead = self.lookahead if lookahead is None else lookahead
        self.target = FaultyEngine("target", kv_blocks=blocks, lookahead=ahead)
        self.drafts = [
            FaultyEngine(f"draft{i}", seed=i + 1, agreement=share, in_target=True)
            if ahead and not i % 2
            else FaultyEngine(f"draft{i}", seed=i + 1, agreement=share, kv_blocks=blocks)
            for i, share in enumerate(drafts)
        ]
        self.stats, self.steps, self.ids = Stats(), 0, itertools.count(1)
        step_stats, clock = StepStats(self.stats), clock or Clock(tick_s=1.0)
        self.ledger = KVLedger(
            {engine.name: blocks for engine in (self.target, *self.drafts)},
            headroom_tokens=(k_max + 1) * (1 + ahead),
            guaranteed=guaranteed,
            growth_blocks=growth_blocks,
            target=self.target if reuse else None,
        )
        self.loop = Orchestrator(
            self.target,
            Drafting(self.drafts, step_stats, clock),
            policy or RandomChoice(),
            self.ledger,
            Admission(self.ledger, max_active, max_queued),
            step_stats,
            clock,
            k_max=k_max,
            prefill_chunk_tokens=chunk,
            max_request_s=max_request_s,
            seed=seed,
        )

    def start(
        self,
        prompt: str | Iterable[int],
        max_tokens: int = 20,
        temperature: float = 0.0,
        *,
        end_ids: Iterable[int] = (EOS,),
        seed: int = 7,
        **options: Any,
    ) -> Session:
        """Submit a request and return its session, whose ``sink`` is a ``Sink``."""
        tokens = list(prompt.encode() if isinstance(prompt, str) else prompt)
        request = GenerationRequest(
            prompt if isinstance(prompt, str) else "", max_tokens, stream=True, **options
        )
        sampling = SamplingParams(temperature, seed=seed)
        sequence = TokenSequence(next(self.ids), tokens, len(tokens), sampling)
        session = Session(sequence, request, frozenset(end_ids), Characters(), Sink())
        self.loop.submit(session)
        return session

    def submit(self, prompt: str, max_tokens: int = 20, **options: Any) -> Sink:
        """Submit a request and return its client."""
        sink = self.start(prompt, max_tokens, **options).sink
        assert isinstance(sink, Sink)
        return sink

    def step(self) -> bool:
        """Take a step and check the invariants; return whether there was anything to do."""
        worked = self.loop.step()
        self.steps += 1
        self.loop.check()
        return worked

    def run(self) -> None:
        """Step until every request has ended and given its KV blocks back."""
        most_steps = self.steps + 10_000
        while self.step():
            assert self.steps < most_steps, "the requests do not end"
        assert self.loop.counts() == (0, 0)
        assert self.ledger.usage()["used"] == 0

    def counters(self) -> dict[tuple[str, ...], float]:
        """Return the counters since the last call, by name and label values."""
        return {
            (name, *labels.values()): value for name, labels, value in self.stats.drain().counters
        }
