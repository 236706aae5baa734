"""The exactness suite as functions: each serves a tiny deployment and asserts one property of it, so that a mutant can be put to it too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from backend.engines.lookup import LookupEngine
from backend.engines.torch_engine import TorchEngine
from backend.ports import Engine
from backend.request import FinishReason, SamplingParams
from backend.session import Session
from policy import NO_DRAFT
from tests.contract.deployment import K_MAX, VOCAB, Deployment, ForetoldDraft, Scripted, kv, tiny_config, tiny_engine
from tests.contract.reference import Reference

GREEDY = SamplingParams()
PROMPTS = ([1, 2, 3], [7] * 17, [5, 9, 11, 2, 0, 4], [20, 10, 10, 10, 16, 20, 10, 10, 10], [3, 21, 3, 21, 8, 3, 21], list(range(24)))
DRAFTS = ("twin", "near", "short", "fp32", "lookup", "liar")
"""The columns that a scenario's script may name: a copy of the target, one with noise, one with a shortlist, one in fp32 ..."""


@dataclass(frozen=True)
class Ask:
    """A request: ``prompt`` is a number of ``PROMPTS``; it arrives before step ``arrival`` and its client leaves before step ``leaves``."""

    prompt: int
    max_tokens: int = 12
    arrival: int = 0
    leaves: int | None = None
    sampling: SamplingParams = GREEDY


@dataclass(frozen=True)
class Scenario:
    """What is asked, what the policy chooses (``Scripted``), and how the work is cut."""

    asks: tuple[Ask, ...]
    script: tuple[tuple[int, int], ...]
    chunk_tokens: int = 8
    max_active: int = 8
    kv_blocks: int = 64


BUSY = Scenario(
    asks=tuple(Ask(number, 16, arrival=number, leaves=4 if number == 2 else None) for number in range(len(PROMPTS))),
    script=((1, 4), (0, 2), (5, 3), (1, 1), (2, 4), (NO_DRAFT, 0), (1, 3), (3, 4), (4, 4), (2, 2), (1, 4)),
    max_active=4,
)
"""The scenario that mutants are put to: every draft, every length, arrivals and a departure, a queue."""


@cache
def reference() -> Reference:
    """What the target of ``serve`` says by itself."""
    return Reference(tiny_engine())


def drafts() -> list[Engine]:
    """New drafts, in the order of ``DRAFTS``."""
    return [
        tiny_engine("twin"),
        tiny_engine("near", seed=1, noise=0.05),
        tiny_engine("short", config=tiny_config(shortlist=15), seed=2, noise=0.05),
        tiny_engine("fp32", seed=3, noise=0.05, dtype=torch.float32),
        LookupEngine("lookup", max_draft_tokens=K_MAX, vocab_size=VOCAB),
        ForetoldDraft("liar", lies=True),
    ]


def serve(scenario: Scenario, *watchers) -> tuple[Deployment, list[Session]]:
    """Run a scenario to its end; the sessions are in the order of its asks."""
    deployment = Deployment(
        tiny_engine(),
        drafts(),
        Scripted(scenario.script),
        chunk_tokens=scenario.chunk_tokens,
        max_active=scenario.max_active,
        kv_blocks=scenario.kv_blocks,
        watchers=list(watchers),
    )
    sessions: dict[Ask, Session] = {}
    for step in range(1 + max(max(ask.arrival, ask.leaves or 0) for ask in scenario.asks)):
        for ask in scenario.asks:
            if ask.arrival == step:
                session = sessions[ask] = deployment.submit(PROMPTS[ask.prompt], ask.max_tokens, ask.sampling)
                deployment.drafts[-1].truth[session.id] = reference().greedy(PROMPTS[ask.prompt], ask.max_tokens)
            if ask.leaves == step:
                sessions[ask].sink.cancelled = True
        deployment.step()
    deployment.run()
    return deployment, [sessions[ask] for ask in scenario.asks]


# -- texts


def greedy_texts_are_those_of_plain_decoding(scenario: Scenario = BUSY) -> None:
    deployment, sessions = serve(scenario)
    for ask, session in zip(scenario.asks, sessions, strict=True):
        expected = reference().greedy(PROMPTS[ask.prompt], ask.max_tokens)
        found = session.sequence.tokens
        assert found == (expected[: len(found)] if session.sink.cancelled else expected), f"text of {ask}"


def kv_is_that_of_a_fresh_prefill(scenario: Scenario = BUSY) -> None:
    """After every step, in the target and in every draft, for all that they claim to have seen; and they claim as much as they can."""
    fresh = {}

    def watch(deployment: Deployment) -> None:
        for engine in deployment.engines:
            if not isinstance(engine, TorchEngine):
                continue
            if engine.name not in fresh:
                fresh[engine.name] = Reference(next(e for e in [tiny_engine(), *drafts()] if e.name == engine.name))
            for session in deployment.live:
                held = kv(engine, session.sequence)
                expected = fresh[engine.name].kv(session.sequence.tokens[: held.shape[1]]) if held.shape[1] else held
                tolerance = 1e-9 if held.dtype == torch.float64 else 1e-4
                assert torch.allclose(held, expected, rtol=0.0, atol=tolerance), f"KV of {engine.name} at {len(session.sequence.tokens)}"

    serve(scenario, watch)


# -- drafts that are known beforehand


def foretold(lies: bool, k: int, max_tokens: int = 14) -> tuple[Deployment, list[Session]]:
    """Serve three requests with a draft that knows their texts, always asked for k tokens."""
    draft = ForetoldDraft("foretold", lies=lies)
    deployment = Deployment(tiny_engine(), [draft], Scripted([(0, k)]), chunk_tokens=64)
    sessions = [deployment.submit(prompt, max_tokens) for prompt in PROMPTS[:3]]
    for session, prompt in zip(sessions, PROMPTS, strict=False):
        draft.truth[session.id] = reference().greedy(prompt, max_tokens)
    deployment.run()
    return deployment, sessions


def an_always_wrong_draft_gives_one_token_a_step(k: int = 3) -> None:
    deployment, sessions = foretold(lies=True, k=k)
    for session in sessions:
        steps, drafted, accepted, emitted = figures(deployment, session)
        assert (steps, accepted, emitted) == (14, 0, 14)
        assert drafted == sum(min(k, 14 - done - 1) for done in range(1, 14))
    totals_agree(deployment, sessions)


def an_oracle_gives_k_plus_one_tokens_a_step(k: int = 3) -> None:
    deployment, sessions = foretold(lies=False, k=k)
    for outcome in deployment.policy.outcomes:
        assert (outcome.accepted == outcome.length).all()
        assert (outcome.emitted == outcome.length + 1).all()
    for session in sessions:
        steps, drafted, accepted, emitted = figures(deployment, session)
        assert steps == 1 + math.ceil(13 / (k + 1))  # the first token comes with the prefill
        assert (drafted, accepted, emitted) == (14 - steps, 14 - steps, 14)
    totals_agree(deployment, sessions)


def figures(deployment: Deployment, session: Session) -> tuple[int, int, int, int]:
    """Steps, drafted, accepted and emitted tokens of a session, from the outcomes that the policy was told."""
    rows = [(o.length[r], o.accepted[r], o.emitted[r]) for o in deployment.policy.outcomes for r in np.flatnonzero(o.request == session.id)]
    drafted, accepted, emitted = np.array(rows).sum(0).tolist()
    return len(rows), drafted, accepted, emitted


def totals_agree(deployment: Deployment, sessions: list[Session]) -> None:
    """Goodput is counted once: replies, the policy's outcomes and the metrics say the same."""
    counters = Counter()
    for (name, *_), value in deployment.counters().items():
        counters[name] += value
    told = np.array([figures(deployment, session) for session in sessions]).sum(0).tolist()
    replied = [session.sink.usage for session in sessions]
    assert told[1] == sum(usage.drafted for usage in replied) == counters["spindle_draft_tokens_total"]
    assert told[2] == sum(usage.accepted for usage in replied) == counters["spindle_accepted_tokens_total"]
    assert told[3] == sum(usage.output_tokens for usage in replied) == counters["spindle_emitted_tokens_total"]


def drafts_propose_what_they_would_decode(scenario: Scenario = BUSY) -> None:
    """A draft that is behind, was rejected or has rested proposes as one that has just read the text; this moves speed only."""
    alone = {draft.name: Reference(draft) for draft in drafts() if draft.name in ("twin", "near", "fp32")}
    compared = Counter()
    for tokens, proposal in serve(scenario)[0].drafting.recorded:
        if proposal.draft in alone:
            expected = alone[proposal.draft].greedy(tokens, len(proposal.tokens))
            assert [*tokens, *proposal.tokens] == expected, f"proposal of {proposal.draft}"
            compared[proposal.draft] += 1
    assert min(compared[name] for name in alone) > 2


# -- ends


def nothing_is_committed_beyond_an_end(k: int = K_MAX) -> None:
    """End ids and ``max_tokens`` hold inside an accepted run."""
    draft = ForetoldDraft("oracle", lies=False)
    deployment = Deployment(tiny_engine(), [draft], Scripted([(0, k)]), chunk_tokens=64)
    expected = []
    for prompt in PROMPTS[:3]:
        truth = reference().greedy(prompt, 20)
        for at in range(len(prompt) + 1, len(prompt) + 8):
            session = deployment.submit(prompt, 12, end_ids=[truth[at]])
            draft.truth[session.id] = truth
            end = truth.index(truth[at], len(prompt))
            expected.append((session, truth[: end + 1], FinishReason.END_ID))
        for max_tokens in range(1, 8):
            session = deployment.submit(prompt, max_tokens)
            draft.truth[session.id] = truth
            expected.append((session, truth[: len(prompt) + max_tokens], FinishReason.LENGTH))
    deployment.run()
    for session, tokens, reason in expected:
        assert session.sequence.tokens == tokens
        assert session.sink.reason == reason
        assert session.sink.usage.output_tokens == len(tokens) - session.sequence.prompt_tokens
    totals_agree(deployment, [session for session, _, _ in expected])


# -- laws


def chi_square(counts: Mapping, law: Mapping) -> tuple[float, float]:
    """Pearson's statistic, cells expected less than five times taken together, and the bound it passes once in a million."""
    total = sum(counts.values())
    assert set(counts) <= {cell for cell, p in law.items() if p > 0}, "a text that has no probability"
    big = {cell: p for cell, p in law.items() if p * total >= 5}
    rest = total * (1 - sum(big.values())), total - sum(counts[cell] for cell in big)
    cells = [(total * p, counts[cell]) for cell, p in big.items()] + ([rest] if rest[0] >= 5 else [])
    freedom = len(cells) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    return sum((found - expected) ** 2 / expected for expected, found in cells), quantile


LAW_PROMPT = [1, 2, 3]
LAW_VOCAB = 5
LAW_SCALE = 0.4


def law_engine(name: str = "target", **options) -> TorchEngine:
    """An engine whose law is wide, on a vocabulary that can be enumerated."""
    shortlist = options.pop("shortlist", 0)
    return tiny_engine(name, config=tiny_config(LAW_VOCAB, layers=1, shortlist=shortlist), scale=LAW_SCALE, **options)


def sampled_texts_follow_the_target_s_law(sampling: SamplingParams = SamplingParams(1.0), rounds: int = 2_000) -> None:
    """The first three tokens jointly: drafts unlike the target, with a shortlist, in fp32, and lookup, in batches and any plan."""
    drafts = [
        law_engine("other", seed=1, noise=1.5),
        law_engine("short", seed=2, noise=1.0, shortlist=3),
        law_engine("fp32", seed=3, noise=1.0, dtype=torch.float32),
        LookupEngine("lookup", max_draft_tokens=K_MAX, vocab_size=LAW_VOCAB, min_ngram=1),
    ]
    script = [(0, 2), (1, 1), (2, 2), (3, 2), (0, 1), (NO_DRAFT, 0), (1, 2), (3, 1), (2, 1)]
    deployment = Deployment(law_engine(), drafts, Scripted(script), chunk_tokens=200, max_active=64)
    prompt = [*LAW_PROMPT, *LAW_PROMPT]
    sessions = [deployment.submit(prompt, 4, replace(sampling, seed=seed)) for seed in range(rounds)]
    deployment.run(rounds)
    texts = Counter(tuple(session.sequence.tokens[len(prompt) : len(prompt) + 3]) for session in sessions)
    law = Reference(law_engine()).joint(prompt, sampling, 3)
    for length in (1, 2, 3):
        statistic, bound = chi_square(marginal(texts, length), marginal(law, length))
        assert statistic < bound, f"law of the first {length} tokens"


def marginal(weights: Mapping, length: int) -> Counter:
    """The weights of the first ``length`` tokens."""
    shares = Counter()
    for text, weight in weights.items():
        shares[text[:length]] += weight
    return shares
