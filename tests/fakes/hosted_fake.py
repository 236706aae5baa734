"""A hosted engine without a model: the chain of the fake engine, some tokens at a time. It has the
texts of ``tests.fakes.fake``, so that what is tested on that is tested on the hosted loop too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any

from backend.engine_config import EngineConfig
from backend.engines.hosted import HostedLimits, HostedRequest, HostedService, NewTokens
from backend.kinds import Kind
from backend.sequence import BLOCK_TOKENS
from tests.fakes.markov import VOCAB_SIZE, MarkovChain

KIND = Kind(__name__, model=False, tokenizer=False, hosted=True)
REFUSES = {
    "return_context_logits": "the hosted fake has none",
    "return_generation_logits": "the hosted fake has none",
    "return_prompt_log_probs": "the hosted fake has none",
}
DRAFT, K_MAX = "own", 2


def drafter(engine: EngineConfig) -> tuple[str, int]:
    """Return the drafter, which is there unless ``options`` say otherwise."""
    return (DRAFT, K_MAX) if engine.options.get("drafts", True) else ("", 0)


async def start(engine: EngineConfig, service: HostedService) -> HostedFake:
    """Return the engine; ``options``: ``seed``, and ``step_s``, the seconds of a step."""
    return HostedFake(engine, service)


class HostedFake:
    """Every generation steps for itself: 1, 2 and 3 tokens at a time, as in accepted runs."""

    def __init__(self, engine: EngineConfig, service: HostedService) -> None:
        limits = service.config.limits
        draft, k_max = drafter(engine)
        self.name = engine.name
        self.limits = HostedLimits(
            VOCAB_SIZE, limits.max_context_tokens, limits.kv_cache_tokens, draft, k_max
        )
        self.running: set[int] = set()
        """The ids of the generations that have begun and not ended."""
        self._chain = MarkovChain(engine.options.get("seed", 0))
        self._starts: set[tuple[str, tuple[int, ...]]] = set()
        self._step_s = engine.step_s
        self._stepped_s = 0.0
        self._service = service

    async def generate(self, ask: HostedRequest) -> AsyncGenerator[NewTokens, None]:
        """Yield runs of tokens."""
        self.running.add(ask.id)
        try:
            async for part in self._runs(ask):
                yield part
        finally:
            self.running.discard(ask.id)

    async def _runs(self, ask: HostedRequest) -> AsyncGenerator[NewTokens, None]:
        text, left, accepted, steps = list(ask.tokens), ask.max_tokens, -1, []
        cached = self._cache(ask)
        while left:
            await asyncio.sleep(self._step_s)
            self.step(ask)
            most = self._most(ask)
            accepted = min((accepted + 1) % (most + 1), left - 1)
            part = NewTokens([], [] if ask.sampling.log_probs else None, cached_tokens=cached)
            for _ in range(accepted + 1):
                self._draw(ask, text, part)
                left -= 1
                if text[-1] in ask.sampling.end_ids:
                    left = 0
                    break
            if most:
                steps.append((most, len(part.tokens) - 1))
            self._count(most, len(part.tokens))
            part.verified_steps = [] if left else steps
            yield part

    def step(self, ask: HostedRequest) -> None:
        """Note that a step of a generation is over; subclasses may raise."""
        del ask
        self._stepped_s = monotonic()

    def _cache(self, ask: HostedRequest) -> int:
        """Keep a prompt, and return how many of its first tokens were kept before."""
        ends = range(BLOCK_TOKENS, ask.prompt_tokens, BLOCK_TOKENS)
        starts = [(ask.salt, ask.tokens[:end]) for end in ends]
        cached = sum(start in self._starts for start in starts) * BLOCK_TOKENS
        self._starts.update(starts)
        return cached

    def _most(self, ask: HostedRequest) -> int:
        """Return how many tokens are proposed for a request."""
        switches = self._service.switches()
        most = self.limits.k_max if ask.most_drafted is None else ask.most_drafted
        if switches.speculation == "off" or ask.control:
            most = 0
        return min(most, self.limits.k_max)

    def _draw(self, ask: HostedRequest, text: list[int], part: NewTokens) -> None:
        token, scores = self._chain.next(text, ask.prompt_tokens, ask.sampling)
        text.append(token)
        part.tokens.append(token)
        if part.log_probs is not None and scores is not None:
            part.log_probs.append(float(scores[token]))
        if ask.sampling.top_log_probs and scores is not None:
            best = (-scores).argsort(kind="stable")[: ask.sampling.top_log_probs]
            part.top.append([(int(one), float(scores[one])) for one in best])

    def _count(self, drafted: int, emitted: int) -> None:
        count, draft = self._service.meters.count, DRAFT if drafted else "none"
        count("spindle_steps_total")
        self._service.meters.observe("spindle_step_seconds", self._step_s)
        count("spindle_emitted_tokens_total", emitted, draft=draft, arm="planner")
        if drafted:
            count("spindle_draft_tokens_total", drafted, draft=draft, arm="planner")
            count("spindle_accepted_tokens_total", emitted - 1, draft=draft, arm="planner")

    def stepped_s(self) -> float:
        """Return when a step last ended."""
        return self._stepped_s

    def usage(self) -> dict[str, int]:
        """Return no blocks: there is no KV."""
        return {}

    def explain(self) -> dict[str, Any]:
        """Return that nothing plans."""
        return {"age_s": None, "step": "the hosted fake plans nothing", "requests": []}

    def learned_state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    async def close(self) -> None:
        """Do nothing."""
