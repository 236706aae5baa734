"""The exactness suite's deployments over the fake engine with a device of its own and two
submissions in flight: targets and drafts keep their distributions, so that every check and every
reference text stays as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backend.engines.port import AFTER, Engine
from backend.engines.torch.engine import TorchEngine
from backend.request import SamplingParams
from backend.sampling.draw import HEAD
from backend.sampling.randomness import exponentials, word
from policy import FixedLength
from tests.contract import checks, scenarios
from tests.contract.deployment import K_MAX, MAX_CONTEXT_TOKENS, Deployment
from tests.contract.reference import Reference
from tests.contract.scenarios import Scenario, Served
from tests.fakes.clients import Sink
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.loop import World
from tests.fakes.markov import MarkovChain


class ReferenceModel(MarkovChain):
    """The model of a torch engine, for a fake one."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__()
        self._reference = Reference(engine)
        self.vocab_size = engine.limits.vocab_size

    def next(self, context, prompt_tokens, sampling):
        token = self._reference.next(context, prompt_tokens, sampling)
        if not sampling.reads_log_probs:
            return token, None
        return token, self._reference.log_probs(context, prompt_tokens, sampling)

    def chances(self, context, prompt_tokens: int, sampling: SamplingParams):
        scores = self._reference.log_probs(context, prompt_tokens, sampling)
        if sampling.greedy:
            return np.exp(scores), scores
        probs = self._reference.probs(context, prompt_tokens, sampling)
        place = np.uint64(word(sampling.seed, len(context)))
        noise = exponentials(place ^ np.arange(len(probs), dtype=np.uint64))
        speeds = np.where(probs < HEAD, 0.0, probs) / noise
        return speeds / speeds.sum(), scores

    def logits(self, context):
        return self._reference.logits(context)


class AheadEngine(FakeEngine):
    """Counts the turns that followed one in flight."""

    following = 0

    def submit(self, turns):
        self.following += sum(turn.end == AFTER for turn in turns)
        super().submit(turns)


def on_device(engine: Engine) -> Engine:
    """A draft on the target's device instead of a torch one; others stay as they are."""
    if not isinstance(engine, TorchEngine):
        return engine
    return FakeEngine(
        engine.name,
        model=ReferenceModel(engine),
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_draft_tokens=K_MAX,
        in_target=True,
    )


def deployment(target: TorchEngine, drafts=(), *arguments, **options) -> Deployment:
    """A deployment that looks ahead in place of another."""
    ahead = AheadEngine(
        target.name,
        model=ReferenceModel(target),
        kv_blocks=target.limits.kv_blocks,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_draft_tokens=K_MAX,
        lookahead=1,
    )
    return Deployment(ahead, [on_device(draft) for draft in drafts], *arguments, **options)


def serve_ahead(patch: pytest.MonkeyPatch) -> None:
    """Make the suite's deployments look ahead."""
    for module in (checks, scenarios):
        patch.setattr(module, "Deployment", deployment)


def exactly_ahead(scenario: Scenario, *properties: checks.Property) -> Served:
    """Serve a scenario looking ahead and assert these properties of it."""
    with pytest.MonkeyPatch.context() as patch:
        serve_ahead(patch)
        return checks.exact(scenario, *properties)


def texts_ahead() -> None:
    """A busy batch has the texts of plain decoding."""
    exactly_ahead(scenarios.BUSY, checks.texts)


def stop_words_end_texts_ahead() -> None:
    """A text ends before its first stop word, be that inside a turn or across two."""
    plain = run_ahead("once upon", 24, lookahead=0).text
    for size in (1, 2, 3, 5):
        for at in range(1, len(plain) - size + 1):
            word = plain[at : at + size]
            sink = run_ahead("once upon", 24, stop_words=(word,))
            assert sink.text == plain[: plain.index(word)], f"stop word {word!r}"
            assert sink.reason == "stop_words"


def run_ahead(prompt: str, tokens: int, lookahead: int = 1, **options: Any) -> Sink:
    """Return the client of a request alone, whose draft on the device is mostly right."""
    world = World(FixedLength("draft0", 3), drafts=(0.9,), lookahead=lookahead)
    sink = world.submit(prompt, tokens, **options)
    world.run()
    return sink
