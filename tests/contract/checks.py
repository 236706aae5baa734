"""The exactness suite: what must hold of any scenario that is served, as functions, so that a
mutant can be put to them too.

``exact`` serves a scenario and asserts properties of it. Some are of a deployment after every step
(``WATCHED``), the others of what a scenario came to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import torch

from backend.core.session import Session
from backend.engines.lookup import LookupEngine
from backend.engines.port import Engine
from backend.engines.stepping.engine import StepEngine
from backend.engines.suffix import SuffixEngine
from backend.request import FinishReason, SamplingParams
from backend.sampling.draw import HEAD
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from backend.speculation.drafting import Proposals
from policy import NO_DRAFT, Outcome
from tests.contract.deployment import (
    K_MAX,
    Deployment,
    ForetoldDraft,
    Scripted,
    kv,
    sink,
    tiny_config,
    tiny_engine,
)
from tests.contract.reference import Reference
from tests.contract.scenarios import (
    BUSY,
    MIXED,
    PROMPTS,
    Scenario,
    Served,
    new_drafts,
    plain_text,
    reference,
    serve,
)

Property = Callable[..., None]


def exact(scenario: Scenario, *properties: Property) -> Served:
    """Serve a scenario and assert these properties of it."""
    served = serve(scenario, *(each for each in properties if each in WATCHED))
    for each in properties:
        if each not in WATCHED:
            each(served)
    return served


# -- of what a scenario came to


def texts(served: Served) -> None:
    """Every text, as far as it came, is that of plain decoding alone."""
    for ask, session in zip(served.scenario.asks, served.sessions, strict=True):
        expected, found = plain_text(ask), session.sequence.tokens
        so_far = expected[: len(found)] if sink(session).cancelled else expected
        assert found == so_far, f"text of {ask}"


def log_probs(served: Served, tolerance: float = 1e-9) -> None:
    """One for each token, of its distribution after all tokens before it, whether it was
    proposed or not.
    """
    for session in served.sessions:
        sequence, client = session.sequence, sink(session)
        if not sequence.sampling.log_probs or client.cancelled:
            continue
        tokens, prompt_tokens, sampling = sequence.tokens, sequence.prompt_tokens, sequence.sampling
        places = range(prompt_tokens, len(tokens))
        expected = [
            reference().log_probs(tokens[:at], prompt_tokens, sampling)[tokens[at]] for at in places
        ]
        found = client.log_probs or []
        assert len(found) == len(expected), "log-probabilities"
        same = np.allclose(found, expected, rtol=0.0, atol=tolerance)
        assert same, f"log-probabilities under {sampling}"


def proposals(served: Served) -> None:
    """A draft that has to catch up, was rejected or was not used proposes as one that has just
    read the text; this moves speed only.
    """
    for sequence, tokens, name, row in served.deployment.drafting.recorded:
        if name in fresh():
            assert row.drafted, f"no proposal of {name}"
            text = list(tokens)
            for token in row.drafted.spine().tokens:
                best = fresh()[name].guess(text, sequence.prompt_tokens, sequence.sampling)
                assert token == best, f"proposal of {name}"
                text.append(token)


def counts(served: Served) -> None:
    """Outcomes are what a recount of proposals and emitted tokens gives; replies and metrics
    agree.
    """
    deployment, texts = served.deployment, {s.id: s.sequence.tokens for s in served.sessions}
    done = {session.id: session.sequence.prompt_tokens for session in served.sessions}
    rows = {(s.id, len(tokens)): row for s, tokens, _, row in deployment.drafting.recorded}
    drafts, trimmed = deployment.drafting.names, deployment.policy.trimmed
    greedy = {session.id: session.sequence.sampling.greedy for session in served.sessions}
    steps: dict[int, list[tuple[int, int]]] = {session.id: [] for session in served.sessions}
    for outcome in deployment.policy.outcomes:
        nodes, unused = [], []
        for request, emitted in zip(
            outcome.rows.request.tolist(), outcome.rows.emitted.tolist(), strict=True
        ):
            at = done[request]
            done[request] += emitted
            row = rows.get((request, at), Proposals())
            tokens = texts[request][at : at + emitted]
            place = int(np.flatnonzero(outcome.rows.request == request)[0])
            trim = min(trimmed.get((request, at), 0), served.scenario.nodes or K_MAX)
            if row.on_device:
                trim = len(row.to_verify or ())
                assert 0 < trim <= row.on_device.nodes, "nodes verified on the device"
            expected = recounted(row.drafted, drafts, tokens, trim)
            found = {name: getattr(outcome.rows, name)[place].item() for name in expected}
            assert found == expected, f"counts of {row} that emitted {tokens}"
            for confidence, was_accepted in fates(row.drafted, tokens, trim):
                nodes.append((expected["draft"], confidence, not greedy[request], was_accepted))
            for proposal in row.unused:
                of_it = recounted(proposal, drafts, tokens, 0)
                unused.append((request, of_it["draft"], of_it["accepted"], of_it["scored"]))
            if expected["verified"]:
                steps[request].append((expected["verified"], expected["followed"]))
        draft = outcome.rows.draft[outcome.nodes.row]
        columns = draft, outcome.nodes.confidence, outcome.nodes.sampled, outcome.nodes.accepted
        assert [*zip(*(c.tolist() for c in columns), strict=True)] == nodes, "fates of nodes"
        assert Counter(unused) <= Counter(free_rows(outcome)), "what free drafts would have had"
    totals = Counter[str]()
    for (name, *labels), value in deployment.counters().items():
        totals[name] += int(value)
        assert name != "spindle_fallback_total", f"fallback: {labels}"
    every = [step for of_one in steps.values() for step in of_one]
    assert totals["spindle_verified_proposals_total"] == len(every), "metrics"
    assert totals["spindle_draft_tokens_total"] == sum(k for k, _ in every), "metrics"
    assert totals["spindle_accepted_tokens_total"] == sum(taken for _, taken in every), "metrics"
    committed = sum(done.values()) - sum(s.sequence.prompt_tokens for s in served.sessions)
    assert totals["spindle_emitted_tokens_total"] == committed, "metrics"
    for session in served.sessions:
        assert done[session.id] == len(session.sequence.tokens), "counts of tokens"
        # cancelled ones count what they drafted, too
        usage = sink(session).usage or session.usage()
        assert usage.output_tokens == len(session.sequence.tokens) - usage.input_tokens
        assert usage.verified_steps == steps[session.id], "steps of a request"
        sums = tuple(map(sum, zip(*usage.verified_steps, strict=True))) or (0, 0)
        assert (usage.drafted, usage.accepted) == sums, "usage"
        assert usage.k_max == K_MAX >= max((taken for _, taken in usage.verified_steps), default=0)


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """The tokens up to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


def matches(path: tuple[int, ...], emitted: list[int]) -> bool:
    return list(path) == emitted[: len(path)]


def recounted(
    drafted: Proposal | None, drafts: tuple[str, ...], emitted: list[int], trim: int
) -> dict[str, int]:
    """A row of an outcome, path by path."""
    whole = paths(drafted) if drafted else []
    length = max(map(len, whole), default=0)
    return {
        "draft": drafts.index(drafted.draft) if drafted else NO_DRAFT,
        "length": length,
        "accepted": max((len(path) for path in whole if matches(path, emitted)), default=0),
        "scored": min(length, len(emitted)),
        "verified": min(trim, len(whole)),
        "followed": sum(matches(path, emitted) for path in whole[:trim]),
    }


def fates(drafted: Proposal | None, emitted: list[int], trim: int) -> list[tuple[float, bool]]:
    """(confidence, accepted) of the first nodes not verified, if the text reaches them."""
    found = []
    if drafted is None:
        return []
    for node, path in enumerate(paths(drafted)):
        reached = len(path) <= len(emitted) or path[: len(emitted)] != tuple(emitted)
        if drafted.parents[node] < trim and reached:
            found.append((drafted.confidence[node], matches(path, emitted)))
    return found


def free_rows(outcome: Outcome) -> list[tuple[int, ...]]:
    columns = outcome.free.request, outcome.free.draft, outcome.free.accepted, outcome.free.scored
    return [*zip(*(column.tolist() for column in columns), strict=True)]


# -- of a deployment after every step


@cache
def fresh() -> dict[str, Reference]:
    """By name engines that have just read whatever they are asked about."""
    names = ("target", "twin", "near", "fp32", "shallow")
    engines: list[Any] = [tiny_engine(), *new_drafts()]
    return {
        engine.name: Reference(engine)
        for engine in engines
        if isinstance(engine, StepEngine) and engine.name in names
    }


def kv_is_fresh(deployment: Deployment) -> None:
    """KV of all that target and drafts claim to have seen is that of a fresh prefill."""
    for engine in deployment.engines:
        if not isinstance(engine, StepEngine) or engine.name not in fresh():
            continue
        for session in deployment.live:
            found = kv(engine, session.sequence)
            if len(found):
                expected = fresh()[engine.name].kv(session.sequence.tokens[: len(found)])
                tolerance = 1e-9 if found.dtype == torch.float64 else 1e-4
                same = torch.allclose(found, expected, rtol=0.0, atol=tolerance)
                assert same, f"KV of {engine.name}"


def one_token_is_unseen(deployment: Deployment) -> None:
    """After a verification the target lacks one token: what was accepted is never run again."""
    for session in deployment.live:
        if session.output_tokens:
            assert deployment.target.unseen(session.sequence) == 1, "unseen tokens"


def blocks_are_of_one_text(deployment: Deployment) -> None:
    """Blocks in several tables are of one text and one tenant; keys are those of committed text."""
    try:
        deployment.loop.check()
    except RuntimeError as error:
        raise AssertionError(str(error)) from error


WATCHED = (kv_is_fresh, one_token_is_unseen, blocks_are_of_one_text)
ENDS = (texts, log_probs, proposals, counts)
ALL = (*ENDS, kv_is_fresh, blocks_are_of_one_text)


# -- what scenarios are to show


def branches_are_taken_and_trees_are_trimmed(scenario: Scenario = BUSY) -> None:
    """A scenario in which nothing but spines was accepted, whole, would show nothing."""
    served, seen = exact(scenario), Counter[str]()
    for sequence, tokens, _, row in served.deployment.drafting.recorded:
        if row.drafted is not None:
            whole, rest = row.drafted, sequence.tokens[len(tokens) :]
            path, spine = whole.follow(rest), whole.spine()
            verified = len(row.to_verify) if row.to_verify else 0
            seen["matched off the spine"] += len(path) > len(spine.follow(rest))
            seen["leaves after inner nodes"] += any(n + 1 < m for n, m in pairwise(path))
            seen["none verified"] += verified == 0
            seen["cut from the path"] += any(node >= verified for node in path)
            seen["cut elsewhere"] += verified < len(whole) and all(n < verified for n in path)
            seen["of " + whole.draft] += 1
            by_token = {(whole.tokens[n], d) for n, d in enumerate(whole.depths)}
            seen["equal tokens in one depth"] += len(by_token) < len(whole)
    names = served.deployment.drafting.names
    few = {what: count for what, count in seen.items() if count < 2}
    assert not few, seen
    assert {"of " + name for name in names} < set(seen), seen


def a_copy_of_the_target_is_rejected_for_its_tail_only(scenario: Scenario = MIXED) -> None:
    """Whatever the options: a draft applies them as the target does, and draws by the same noise.
    It proposes from the head alone.
    """
    served = exact(replace(scenario, script=((0, 3), (0, 1), (0, 4)), trims=(K_MAX * 4,)))
    accepted = 0
    for sequence, tokens, _, row in served.deployment.drafting.recorded:
        if row.drafted is None:
            continue
        rest = sequence.tokens[len(tokens) :]
        path = row.drafted.follow(rest)
        accepted += len(path)
        if len(path) < min(row.drafted.depth, len(rest)):
            before = [*tokens, *rest[: len(path)]]
            sampling = sequence.sampling
            assert not sampling.greedy, "a copy rejected"
            probs = reference().probs(before, sequence.prompt_tokens, sampling)
            assert probs[rest[len(path)]] < HEAD, "a copy rejected"
    assert accepted > 50


# -- prefix reuse


def reused_tokens(*salts: str) -> list[int]:
    """How many tokens of one prompt after another the target had KV of; each request ends before
    the next begins.
    """
    deployment, found = Deployment(tiny_engine(), new_drafts()[:2], Scripted([(0, 3), (1, 2)])), []
    for salt in salts:
        deployment.submit(PROMPTS[6], 12, salt=salt)
        deployment.run()
        found.append(int(deployment.counters().get(("spindle_kv_reused_tokens_total",), 0)))
    return found


def tenants_share_nothing() -> None:
    assert reused_tokens("", "", "a", "b", "a") == [0, 2 * BLOCK_TOKENS, 0, 0, 2 * BLOCK_TOKENS]


# -- drafts that are known beforehand


def foretold(lies: bool, k: int) -> list[list[tuple[int, int, int]]]:
    """By request and step what was drafted, accepted and emitted where three texts of 14 tokens are
    known to a draft that is always asked for k.
    """
    draft = ForetoldDraft("foretold", lies=lies)
    deployment = Deployment(tiny_engine(), [draft], Scripted([(0, k)]), chunk_tokens=64)
    sessions = [deployment.submit(prompt, 14) for prompt in PROMPTS[:3]]
    for session, prompt in zip(sessions, PROMPTS, strict=False):
        draft.truth[session.id] = reference().text(prompt, 14)
    deployment.run()
    rows: dict[int, list[tuple[int, int, int]]] = {session.id: [] for session in sessions}
    for o in deployment.policy.outcomes:
        columns = o.rows.verified.tolist(), o.rows.accepted.tolist(), o.rows.emitted.tolist()
        for request, *row in zip(o.rows.request.tolist(), *columns, strict=True):
            rows[request].append(tuple(row))
    return list(rows.values())


def an_always_wrong_draft_gives_one_token_a_step(k: int = 3) -> None:
    steps = [(min(k, 14 - done - 1), 0, 1) for done in range(1, 14)]
    assert foretold(lies=True, k=k) == [[(0, 0, 1), *steps]] * 3


def an_oracle_gives_k_plus_one_tokens_a_step(k: int = 3) -> None:
    for rows in foretold(lies=False, k=k):
        assert len(rows) == 1 + math.ceil(13 / (k + 1))  # the first token comes with the prefill
        assert all(
            (accepted, emitted) == (drafted, drafted + 1) for drafted, accepted, emitted in rows
        )


def nothing_is_committed_beyond_an_end(k: int = K_MAX) -> None:
    """End ids and ``max_tokens`` hold inside an accepted run."""
    draft = ForetoldDraft("oracle")
    deployment = Deployment(tiny_engine(), [draft], Scripted([(0, k)]), chunk_tokens=64)
    expected: list[tuple[Session, list[int], int, FinishReason]] = []
    for prompt in PROMPTS[:3]:
        truth = reference().text(prompt, 20)
        for at in range(len(prompt) + 1, len(prompt) + 8):
            session = deployment.submit(prompt, 12, SamplingParams(end_ids=(truth[at],)))
            end = truth.index(truth[at], len(prompt)) + 1
            expected.append((session, truth, end, FinishReason.END_ID))
        for max_tokens in range(1, 8):
            session = deployment.submit(prompt, max_tokens)
            expected.append((session, truth, len(prompt) + max_tokens, FinishReason.LENGTH))
    for session, truth, _, _ in expected:
        draft.truth[session.id] = truth
    deployment.run()
    for session, truth, length, reason in expected:
        assert session.sequence.tokens == truth[:length]
        assert sink(session).reason == reason
        assert session.usage().output_tokens == length - session.sequence.prompt_tokens


# -- distributions

SAMPLED_PROMPT = [1, 2, 3, 1, 2, 3]
SAMPLED_VOCAB = 5
WIDE, SHARP = SamplingParams(1.0), SamplingParams(0.5, top_k=4, top_p=0.9)
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.2,
    "prompt_ignore_length": 4,
}
OPTIONS = SamplingParams(
    1.3, **PENALTIES, min_tokens=2, end_ids=(4,), bad_words=((1, 2), (0, 0)), bias=((0, 0.5),)
)


def well_read() -> SuffixEngine:
    """A draft that has answers to propose from: texts of these checks are too short."""
    draft, rng = SuffixEngine("suffix", max_draft_tokens=K_MAX, remembered_tokens=512), Random(5)
    for number in range(100):
        tokens = [*SAMPLED_PROMPT, *rng.choices(range(SAMPLED_VOCAB), k=20)]
        draft.remember(Sequence(-1 - number, tokens, len(SAMPLED_PROMPT), SamplingParams()))
    return draft


SAMPLED_DRAFTS: dict[str, Callable[[], Engine]] = {
    "other": lambda: wide_engine("other", seed=1, noise=1.5),
    "fp32": lambda: wide_engine("fp32", seed=3, noise=1.0, dtype=torch.float32),
    "lookup": lambda: LookupEngine(
        "lookup", max_draft_tokens=K_MAX, vocab_size=SAMPLED_VOCAB, min_ngram=1
    ),
    "suffix": well_read,
}
"""Drafts unlike the target: one as precise, one in fp32, and two without a model; one of the two
has read the texts before.
"""


def wide_engine(name: str = "target", **options) -> Any:
    """An engine whose distribution is wide, on a vocabulary that can be enumerated."""
    return tiny_engine(name, config=tiny_config(SAMPLED_VOCAB, layers=1), scale=0.4, **options)


def texts_follow_the_target_s_distribution(
    sampling: SamplingParams,
    drafts: Iterable[str] = tuple(SAMPLED_DRAFTS),
    rounds: int = 1_500,
) -> None:
    """The first three tokens jointly, over seeds, against enumeration. A correct engine fails it
    three times in a million.

    Batches of 64 requests; every draft in turn, mostly for two tokens, which is all that four
    tokens a request leave room for; trees are cut now and then.
    """
    made = [SAMPLED_DRAFTS[name]() for name in drafts]
    script = [(column, k) for k in (2, 2, 1) for column in range(len(made))] + [(NO_DRAFT, 0)]
    policy = Scripted(script, trims=(7, 7, 2, 7, 3, 0))
    deployment = Deployment(wide_engine(), made, policy, chunk_tokens=200, max_active=64)
    sessions = [
        deployment.submit(SAMPLED_PROMPT, 4, replace(sampling, seed=seed)) for seed in range(rounds)
    ]
    deployment.run(rounds)
    found = Counter(
        tuple(session.sequence.tokens[len(SAMPLED_PROMPT) :][:3]) for session in sessions
    )
    joint = Reference(wide_engine()).joint(SAMPLED_PROMPT, sampling, 3)
    for length in (1, 2, 3):
        statistic, bound = chi_square(marginal(found, length), marginal(joint, length))
        assert statistic < bound, (
            f"distribution of the first {length} tokens: {statistic:.0f} is beyond {bound:.0f}"
        )


def chi_square(counts: Mapping, probs: Mapping) -> tuple[float, float]:
    """Pearson's statistic, cells expected less than five times taken together, and the bound that
    it passes once in a million.
    """
    total = sum(counts.values())
    assert set(counts) <= {cell for cell, p in probs.items() if p > 0}, (
        "a text that has no probability"
    )
    big = {cell: p for cell, p in probs.items() if p * total >= 5}
    rest = total * (1 - sum(big.values())), total - sum(counts[cell] for cell in big)
    cells = [(total * p, counts[cell]) for cell, p in big.items()] + (
        [rest] if rest[0] >= 5 else []
    )
    freedom = len(cells) - 1
    bound = (
        freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3
    )  # Wilson and Hilferty
    return sum((found - expected) ** 2 / expected for expected, found in cells), bound


def marginal(weights: Mapping, length: int) -> Counter:
    """The weights of the first ``length`` tokens."""
    shares = Counter[tuple]()
    for text, weight in weights.items():
        shares[text[:length]] += weight
    return shares
