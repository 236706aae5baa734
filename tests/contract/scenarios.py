"""Requests to a deployment, its policy's choices, and how its work is cut: the space in
which no text may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from backend.core.session import Session
from backend.engines.lookup import LookupEngine
from backend.engines.models.spec import PlainLlama
from backend.engines.port import Engine, HiddenStates, Turn
from backend.engines.suffix import SuffixEngine
from backend.request import SamplingParams
from backend.sampling.distributions import Floats
from backend.sequence import BLOCK_TOKENS, Sequence
from policy import NO_DRAFT
from tests.contract.deployment import (
    K_MAX,
    MAX_CONTEXT_TOKENS,
    NODES,
    TAPS,
    VOCAB,
    Deployment,
    ForetoldDraft,
    Scripted,
    tiny_config,
    tiny_engine,
)
from tests.contract.reference import Reference

GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, seed=3)
PROMPTS: tuple[list[int], ...] = (
    [1, 2, 3],
    [7] * (BLOCK_TOKENS + 1),
    [5, 9, 11, 2, 0, 4],
    [20, 10, 10, 10, 16, 20, 10, 10, 10],
    [3, 21, 3, 21, 8, 3, 21],
    list(range(24)),
)
ALPHABET = [n % 24 for n in range(3 * BLOCK_TOKENS)]
PROMPTS += (
    ALPHABET,
    [*ALPHABET[:-4], 1, 1],
    ALPHABET[: 2 * BLOCK_TOKENS],
)  # one beginning of two blocks
SHORT = range(6)
DRAFTS = ("twin", "near", "shallow", "fp32", "lookup", "liar", "oracle", "bushy", "suffix")
"""The columns that a script may name: a copy of the target; others with noise, fewer layers, in
fp32; lookup; wrong tokens; right ones; trees that have them somewhere; what was answered before.
"""


@dataclass(frozen=True)
class Ask:
    """A request: ``prompt`` is a number of ``PROMPTS``; it arrives before step ``arrival`` and its
    client leaves before step ``leaves``.
    """

    prompt: int
    max_tokens: int = 12
    arrival: int = 0
    leaves: int | None = None
    salt: str = ""
    sampling: SamplingParams = GREEDY


Script = tuple[tuple[int, int], ...]
SCRIPT: Script = ((1, 4), (0, 2), (7, 4), (4, 3), (5, 3), (3, 3), (7, 2), (1, 1), (2, 4))
SCRIPT += ((NO_DRAFT, 0),)
SCRIPT += ((4, 2), (7, 3), (1, 3), (3, 4), (4, 4), (2, 2), (6, 4), (7, 1), (0, 3))
SCRIPT += ((8, 4), (8, 3), (8, 4), (8, 2))
"""Every draft, many lengths; of no length that divides a batch's, so that requests and steps meet
in ever new ways.
"""

TRIMS = (NODES, NODES, 3, NODES, 1, 5, NODES, 0, 2, 4, NODES)
"""Mostly whole trees, now and then a few of their nodes or none."""


@dataclass(frozen=True)
class Scenario:
    """Requests, the policy's script (``Scripted``), and the limits of the deployment.

    ``nodes`` as of ``Deployment``.
    """

    asks: tuple[Ask, ...]
    script: tuple[tuple[int, int], ...] = SCRIPT
    trims: tuple[int, ...] = TRIMS
    nodes: int = NODES
    chunk_tokens: int = 8
    max_active: int = 8
    kv_blocks: int = 64
    reuse: bool = True


class Served(NamedTuple):
    """The outcome of a scenario; ``sessions`` are in the order of its asks."""

    scenario: Scenario
    deployment: Deployment
    sessions: list[Session]


def asks_of(*samplings: SamplingParams) -> tuple[Ask, ...]:
    """Requests that come, queue and go."""
    return tuple(
        Ask(n % 6, 24, n, 4 if n == 2 else None, sampling=samplings[n % len(samplings)])
        for n in range(9)
    )


BUSY = Scenario(asks_of(GREEDY, SAMPLED), max_active=4)

TAILED = Scenario(
    tuple(Ask(n, 24, sampling=SamplingParams(0.35, seed=seed)) for n, seed in ((5, 17), (3, 27)))
)
"""Seeds by which a token of the tail is drawn."""

UNEVEN = Scenario(
    tuple(
        Ask(
            prompt,
            16,
            n // 2,
            6 if n == 3 else None,
            sampling=replace(SAMPLED, seed=n) if n % 3 else GREEDY,
        )
        for n, prompt in enumerate((7, 0, 1, 6, 2, 5, 8))
    ),
    max_active=5,
)
"""Long and short contexts in one batch."""

ALIKE = Scenario(
    (
        Ask(6, 28),
        Ask(6, 36, sampling=SAMPLED),
        Ask(7, 28, 1),
        Ask(8, 32, 1, 3),
        Ask(6, 25, 4),
        Ask(7, 28, 4, salt="b"),
        Ask(8, 32, 12),
        Ask(6, 28, 28),
    ),
    chunk_tokens=40,
    kv_blocks=20,
)
"""Requests that begin alike: at the same time, in the middle of another's prefill, after its end,
after a cancellation.
"""

CROWDED = replace(ALIKE, kv_blocks=7)
"""The same in a pool that is too small for them."""

BIGRAMS = tuple((first, last) for first in range(VOCAB) for last in (2, 7, 8, 10, 16, 18, 20))
CROSSED = (
    SamplingParams(presence_penalty=0.6, frequency_penalty=0.3, log_probs=True),
    SamplingParams(
        repetition_penalty=1.4,
        bias=((20, -1.5), (3, 0.8)),
        bad_words=((10,), *BIGRAMS[::2]),
        log_probs=True,
    ),
    SamplingParams(bad_words=BIGRAMS, log_probs=True),
    SamplingParams(min_tokens=3, end_ids=tuple(range(0, VOCAB, 2)), log_probs=True),
    SamplingParams(
        min_tokens=4, end_ids=tuple(range(0, VOCAB, 2)), frequency_penalty=0.2, log_probs=True
    ),
    SamplingParams(
        min_tokens=5,
        end_ids=tuple(range(1, VOCAB, 2)),
        presence_penalty=0.5,
        prompt_ignore_length=2**31 - 1,
        log_probs=True,
    ),
    SamplingParams(0.9, seed=5, log_probs=True),
    SamplingParams(
        1.2,
        top_k=6,
        top_p=0.9,
        seed=2**63 + 9,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        prompt_ignore_length=4,
        bad_words=BIGRAMS[1::3],
        log_probs=True,
    ),
    SamplingParams(
        0.8,
        seed=11,
        min_tokens=4,
        end_ids=tuple(range(0, VOCAB, 3)),
        repetition_penalty=0.8,
        log_probs=True,
    ),
    SamplingParams(
        0.8, seed=3, min_tokens=3, end_ids=(1, 4), frequency_penalty=0.4, top_p=0.8, log_probs=True
    ),
    SamplingParams(1.5, seed=4, min_p=0.1, bias=((5, 2.0),), bad_words=((5, 5),), log_probs=True),
)
"""All options, in greedy and in sampled requests."""

MIXED = Scenario(
    tuple(Ask(n % len(SHORT), 16, n // 4, sampling=s) for n, s in enumerate(CROSSED)), max_active=6
)

LONG = tuple(
    Ask(n, 80, n // 2, sampling=s)
    for n, s in enumerate((GREEDY, SAMPLED, CROSSED[0], CROSSED[10], CROSSED[2]))
)
CRAMPED = Scenario(LONG, kv_blocks=8)
"""Requests that each need three to five blocks in the end, and fewer at admission: some are
pre-empted.
"""


def greedily(scenario: Scenario) -> Scenario:
    return replace(scenario, asks=tuple(replace(ask, sampling=GREEDY) for ask in scenario.asks))


@cache
def reference() -> Reference:
    """The output of the target by itself."""
    return Reference(tiny_engine())


def new_drafts() -> list[Engine]:
    """Drafts in the order of ``DRAFTS``."""
    return [
        tiny_engine("twin"),
        tiny_engine("near", seed=1, noise=0.05),
        tiny_engine("shallow", config=tiny_config(layers=1), seed=2, noise=0.05),
        tiny_engine("fp32", seed=3, noise=0.05, dtype=torch.float32),
        LookupEngine("lookup", max_draft_tokens=K_MAX, vocab_size=VOCAB),
        ForetoldDraft("liar", lies=True),
        ForetoldDraft("oracle"),
        ForetoldDraft("bushy", bushy=True),
        SuffixEngine("suffix", max_draft_tokens=K_MAX, vocab_size=VOCAB, remembered_tokens=256),
    ]


def serve(scenario: Scenario, *watchers: Callable[[Deployment], None]) -> Served:
    """Run a scenario to its end."""
    deployment = Deployment(
        tiny_engine(),
        new_drafts(),
        Scripted(scenario.script, scenario.trims),
        chunk_tokens=scenario.chunk_tokens,
        max_active=scenario.max_active,
        kv_blocks=scenario.kv_blocks,
        nodes=scenario.nodes,
        reuse=scenario.reuse,
        watchers=list(watchers),
    )
    sessions: dict[int, Session] = {}
    for step in range(1 + max(max(ask.arrival, ask.leaves or 0) for ask in scenario.asks)):
        for number, ask in enumerate(scenario.asks):
            if ask.arrival == step:
                prompt = PROMPTS[ask.prompt]
                session = deployment.submit(prompt, ask.max_tokens, ask.sampling, ask.salt)
                sessions[number] = session
                for draft in deployment.drafts:
                    if isinstance(draft, ForetoldDraft):
                        draft.truth[session.id] = plain_text(ask)
            if ask.leaves == step:
                sessions[number].sink.cancelled = True
        deployment.step()
    deployment.run()
    return Served(scenario, deployment, [sessions[number] for number in range(len(scenario.asks))])


def hidden_states(sequence: Sequence, tokens: int, layers: tuple[int, ...] = TAPS) -> Floats:
    """The hidden states of the first ``tokens`` of a text, by a target that runs it at once."""
    return _states_of(tuple(sequence.tokens), tiny_config).of(layers)[:tokens]


@cache
def _states_of(tokens: tuple[int, ...], config: Callable[[], PlainLlama]) -> HiddenStates:
    """``config`` is that of the targets at the time."""
    target = tiny_engine(config=config())
    blocks = list(range(MAX_CONTEXT_TOKENS // BLOCK_TOKENS))
    text = Sequence(1, [*tokens], len(tokens), GREEDY, {"target": blocks})
    target.submit([Turn(text, len(tokens))])
    states: HiddenStates = target.poll(0.0)[0].hidden_states
    return states


def plain_text(ask: Ask) -> list[int]:
    """The tokens that an ask must have: those of plain decoding alone, by the book."""
    return reference().text(PROMPTS[ask.prompt], ask.max_tokens, ask.sampling)
