"""Loops of requests around an engine that runs without a server: a fixed number in flight, or
arrivals as they come.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.port import Engine
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Sequence as Text
from backend.speculation.drafting import Drafting
from policy import AnyPolicy

SEED = 0
K_MAX, NEW_TOKENS = 8, 200
PREFILL_CHUNK_TOKENS = 2048
_MOST_QUEUED = 100_000


class Silent:
    """A client that reads nothing, and a decoder of tokens without text."""

    def __init__(self) -> None:
        self.cancelled = self.has_ended = False

    def chunk(self, delta: Any) -> None:
        """Ignore."""

    def final(self, delta: Any, reason: Any, usage: Any) -> None:
        """Note the end."""
        self.has_ended = True

    def error(self, code: Any, message: str) -> None:
        """Note the end; an error of a request that was not cancelled is raised."""
        self.has_ended = True
        if not self.cancelled:
            raise RuntimeError(f"{code}: {message}")

    def push(self, token_id: int) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


_ids = itertools.count(1_000_000)


@dataclass
class OpenRequest:
    """A request, its client and when it arrived."""

    session: Session
    client: Silent
    since_s: float


class ClosedLoop:
    """A fixed number of requests in flight, each followed by the next; the n-th has the same prompt
    for every policy.
    """

    def __init__(
        self,
        target: LookaheadEngine,
        drafts: Sequence[Engine],
        policy: AnyPolicy,
        load: float,
        prompt_tokens: int,
        places: int,
    ) -> None:
        self.tokens = self.steps = 0
        self.latencies_s = list[float]()
        """From arrival to the last token, of the requests that ended in ``run``."""
        self.device_s = 0.0
        """Part of ``run``'s time in which the device was at work, by its own clock."""
        self._target = target
        self.load, self._prompt_tokens = load, prompt_tokens
        self._live = list[OpenRequest]()
        self._numbers = itertools.count(1)
        step_stats = StepStats(Stats())
        ledger = KVLedger(
            {engine.name: engine.limits.kv_blocks for engine in (target, *drafts)},
            2 * (K_MAX + 1),
            guaranteed=True,
        )
        self._loop = Orchestrator(
            target,
            Drafting(drafts, step_stats, time.monotonic),
            policy,
            ledger,
            Admission(ledger, places, _MOST_QUEUED),
            step_stats,
            time.monotonic,
            k_max=K_MAX,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            seed=SEED,
        )

    def run(self, seconds: float) -> float:
        """Serve for some seconds and return how many it took; ``tokens``, ``steps``,
        ``device_s`` and ``latencies_s`` are its.
        """
        self.device_s, self.steps, self.latencies_s = 0.0, 0, []
        before, ended = self._count_tokens(), 0
        start = time.monotonic()
        while (now := time.monotonic()) < start + seconds:
            self._arrive(now)
            if not self._live:
                time.sleep(0.0005)
                continue
            self._loop.step()
            self.device_s += sum(self._target.parts_s().values())
            self.steps += 1
            for one in (one for one in self._live if one.client.has_ended):
                ended += one.session.output_tokens
                self.latencies_s.append(time.monotonic() - one.since_s)
            self._live = [one for one in self._live if not one.client.has_ended]
        self.tokens = ended + self._count_tokens() - before
        return now - start

    def _count_tokens(self) -> int:
        return sum(one.session.output_tokens for one in self._live)

    def _arrive(self, now_s: float) -> None:
        while len(self._live) < self.load:
            self._submit(now_s)

    def _submit(self, since_s: float) -> None:
        number = next(self._numbers)
        vocab = self._target.limits.vocab_size
        prompt = random.Random(number).choices(range(vocab), k=self._prompt_tokens)
        sampling = SamplingParams(seed=number)
        sequence = Text(next(_ids), prompt, len(prompt), sampling)
        client = Silent()
        request = GenerationRequest("", NEW_TOKENS)
        session = Session(sequence, request, frozenset(), client, client)
        self._live.append(OpenRequest(session, client, since_s))
        self._loop.submit(session)

    def end(self) -> None:
        """Let go of every request."""
        for one in self._live:
            one.client.cancelled = True
        while self._loop.step():
            pass
        self._live.clear()


class OpenLoop(ClosedLoop):
    """Requests that arrive by a Poisson process, ``load`` a second, at the same times for every
    policy.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gaps = random.Random(SEED)
        self._next_s = time.monotonic()

    def _arrive(self, now_s: float) -> None:
        while self._next_s <= now_s:
            self._submit(self._next_s)
            self._next_s += self._gaps.expovariate(self.load)
