"""The exactness suite as functions: each serves a tiny deployment and asserts one property of it, so that a mutant can be put to it too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from backend.engines import verification
from backend.engines.lookup import LookupEngine
from backend.engines.torch_engine import TorchEngine
from backend.ports import BLOCK_TOKENS, Engine
from backend.request import FinishReason, SamplingParams
from backend.session import Session
from policy import NO_DRAFT
from tests.contract.deployment import K_MAX, Deployment, ForetoldDraft, Scripted, kv, tiny_config, tiny_engine
from tests.contract.reference import Reference
from tests.contract.scenarios import ALIKE, BUSY, MIXED, PROMPTS, Scenario, new_drafts, plain_text, reference, serve

# -- texts, KV and proposals of a scenario


def texts_are_those_of_plain_decoding(scenario: Scenario) -> None:
    """Greedy and plan-invariant texts, as far as they came."""
    texts_are(scenario, serve(scenario)[1])


def texts_are(scenario: Scenario, sessions: Iterable[Session]) -> None:
    for ask, session in zip(scenario.asks, sessions, strict=True):
        expected, found = plain_text(ask), session.sequence.tokens
        if expected is not None:
            assert found == (expected[: len(found)] if session.sink.cancelled else expected), f"text of {ask}"


def greedy_texts_are_those_of_plain_decoding() -> None:
    texts_are_those_of_plain_decoding(BUSY)


def texts_with_options_are_those_of_plain_decoding() -> None:
    texts_are_those_of_plain_decoding(MIXED)
    texts_are_those_of_plain_decoding(replace(MIXED, script=((6, 4),)))


def log_probs_are_those_of_the_text(scenario: Scenario = MIXED, tolerance: float = 1e-9) -> None:
    """One for each token, of its law behind all tokens before it, whether it was proposed or not."""
    for session in serve(scenario)[1]:
        tokens, prompt_tokens, sampling = session.sequence.tokens, session.sequence.prompt_tokens, session.sequence.sampling
        if sampling.log_probs and not session.sink.cancelled:
            expected = [reference().log_probs(tokens[:at], prompt_tokens, sampling)[tokens[at]] for at in range(prompt_tokens, len(tokens))]
            found = session.sink.log_probs
            assert len(found) == len(expected)
            assert np.allclose(found, expected, rtol=0.0, atol=tolerance), f"log-probabilities under {sampling}"


def kv_is_that_of_a_fresh_prefill(scenario: Scenario = BUSY) -> None:
    """After every step, in the target and in every draft, for all that they claim to have seen."""
    serve(scenario, kv_watcher())


def kv_watcher() -> Callable[[Deployment], None]:
    fresh = {engine.name: Reference(engine) for engine in [tiny_engine(), *new_drafts()] if isinstance(engine, TorchEngine)}

    def watch(deployment: Deployment) -> None:
        for engine in deployment.engines:
            for session in deployment.live if engine.name in fresh else ():
                held = kv(engine, session.sequence)
                if held.shape[1]:
                    expected = fresh[engine.name].kv(session.sequence.tokens[: held.shape[1]])
                    tolerance = 1e-9 if held.dtype == torch.float64 else 1e-4
                    assert torch.allclose(held, expected, rtol=0.0, atol=tolerance), f"KV of {engine.name}"

    return watch


def the_target_lacks_one_token_behind_a_verification(scenario: Scenario = BUSY) -> None:
    """What was accepted is never run again."""

    def watch(deployment: Deployment) -> None:
        for session in deployment.live:
            if session.output_tokens:
                assert deployment.target.unseen(session.sequence) == 1

    serve(scenario, watch)


def drafts_propose_what_they_would_decode(scenario: Scenario = BUSY) -> None:
    """A draft that is behind, was rejected or has rested proposes as one that has just read the text; this moves speed only."""
    alone = {draft.name: Reference(draft) for draft in new_drafts() if draft.name in ("twin", "near", "fp32")}
    compared = Counter()
    for sequence, tokens, proposal in serve(scenario)[0].drafting.recorded:
        if proposal.draft in alone and sequence.sampling.greedy:
            text = [*tokens, *proposal.tokens]
            for at in range(len(tokens), len(text)):
                scores = alone[proposal.draft].log_probs(text[:at], sequence.prompt_tokens, sequence.sampling)
                assert text[at] == scores.argmax(), f"proposal of {proposal.draft}"
            compared[proposal.draft] += 1
    assert min(compared[name] for name in alone) > 2


def a_copy_of_the_target_is_never_rejected() -> None:
    """Whatever the options: a draft applies them as the target does, and p / q is 1."""
    rows = serve(replace(MIXED, script=((0, 3), (0, 1), (0, 4))))[0].policy.outcomes
    assert all((o.accepted == o.scored).all() for o in rows)
    assert sum(int(o.accepted.sum()) for o in rows) > 50


# -- prefix reuse


def texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding(scenario: Scenario = ALIKE) -> None:
    """Blocks in several tables are of one text and one tenant, keys are those of committed text, and all KV is that of a fresh prefill."""
    together = Counter()
    compare_kv = kv_watcher()

    def watch(deployment: Deployment) -> None:
        compare_kv(deployment)
        owners = {}
        for sequence in (session.sequence for session in deployment.live):
            fresh = replace(sequence, keys=[])
            deployment.ledger._name_blocks(fresh)
            assert sequence.keys == fresh.keys[: len(sequence.keys)], "a key of other tokens than the committed ones"
            for index, block in enumerate(sequence.blocks.get("target", ())):
                text = (sequence.salt, sequence.tokens[: (index + 1) * BLOCK_TOKENS])
                together["blocks"] += block in owners
                assert owners.setdefault(block, text) == text, "a block of two texts"

    deployment, sessions = serve(scenario, watch)
    texts_are(scenario, sessions)
    assert together["blocks"] > 20
    assert deployment.counters()["spindle_kv_reused_tokens_total",] >= 4 * BLOCK_TOKENS


def texts_that_begin_alike_share_a_pool_that_is_too_small() -> None:
    texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding(replace(ALIKE, kv_blocks=7))


def reused_tokens(*salts: str) -> list[int]:
    """How many tokens of one prompt after another the target had KV of; each request ends before the next begins."""
    deployment, found = Deployment(tiny_engine(), new_drafts()[:2], Scripted([(0, 3), (1, 2)])), []
    for salt in salts:
        deployment.submit(PROMPTS[6], 12, salt=salt)
        deployment.run()
        found.append(int(deployment.counters().get(("spindle_kv_reused_tokens_total",), 0)))
    return found


def tenants_share_nothing() -> None:
    assert reused_tokens("", "", "a", "b", "a") == [0, 32, 0, 0, 32]


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


def totals_agree(deployment: Deployment, sessions: Iterable[Session]) -> None:
    """Goodput is counted once: replies, the policy's outcomes and the metrics say the same."""
    counters = Counter()
    for (name, *_), value in deployment.counters().items():
        counters[name] += value
    told = np.array([figures(deployment, session) for session in sessions]).sum(0).tolist()
    replied = [session.sink.usage for session in sessions]
    assert told[1] == sum(usage.drafted for usage in replied) == counters["spindle_draft_tokens_total"]
    assert told[2] == sum(usage.accepted for usage in replied) == counters["spindle_accepted_tokens_total"]
    assert told[3] == sum(usage.output_tokens for usage in replied) == counters["spindle_emitted_tokens_total"]


def nothing_is_committed_beyond_an_end(k: int = K_MAX) -> None:
    """End ids and ``max_tokens`` hold inside an accepted run."""
    draft = ForetoldDraft("oracle", lies=False)
    deployment = Deployment(tiny_engine(), [draft], Scripted([(0, k)]), chunk_tokens=64)
    expected = []
    for prompt in PROMPTS[:3]:
        truth = reference().greedy(prompt, 20)
        for at in range(len(prompt) + 1, len(prompt) + 8):
            session = deployment.submit(prompt, 12, SamplingParams(end_ids=(truth[at],)))
            expected.append((session, truth, truth.index(truth[at], len(prompt)) + 1, FinishReason.END_ID))
        for max_tokens in range(1, 8):
            session = deployment.submit(prompt, max_tokens)
            expected.append((session, truth, len(prompt) + max_tokens, FinishReason.LENGTH))
    for session, truth, _, _ in expected:
        draft.truth[session.id] = truth
    deployment.run()
    for session, truth, length, reason in expected:
        assert session.sequence.tokens == truth[:length]
        assert session.sink.reason == reason
        assert session.sink.usage.output_tokens == length - session.sequence.prompt_tokens
    totals_agree(deployment, [session for session, *_ in expected])


# -- laws

LAW_PROMPT = [1, 2, 3, 1, 2, 3]
LAW_VOCAB = 5
WIDE, SHARP = SamplingParams(1.0), SamplingParams(0.5, top_k=4, top_p=0.9)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": -0.2}
OPTIONS = SamplingParams(1.3, **PENALTIES, min_tokens=2, end_ids=(4,), bad_words=((1, 2), (0, 0)), bias=((0, 0.5),))
LAW_DRAFTS: dict[str, Callable[[], Engine]] = {
    "other": lambda: law_engine("other", seed=1, noise=1.5),
    "short": lambda: law_engine("short", seed=2, noise=1.0, shortlist=3),
    "fp32": lambda: law_engine("fp32", seed=3, noise=1.0, dtype=torch.float32),
    "lookup": lambda: LookupEngine("lookup", max_draft_tokens=K_MAX, vocab_size=LAW_VOCAB, min_ngram=1),
}
"""Drafts unlike the target: one as precise, one with a shortlist, one in fp32 (its q is stored so), and a point mass."""


def law_engine(name: str = "target", shortlist: int = 0, **options) -> TorchEngine:
    """An engine whose law is wide, on a vocabulary that can be enumerated."""
    return tiny_engine(name, config=tiny_config(LAW_VOCAB, layers=1, shortlist=shortlist), scale=0.4, **options)


def law_deployment(drafts: Iterable[str], cohorts: tuple[int, ...] = ()) -> Deployment:
    """Batches of 64 requests; every draft in turn, mostly for two tokens, which is all that four tokens a request leave room for."""
    made = [LAW_DRAFTS[name]() for name in drafts]
    script = [(column, k) for k in (2, 2, 1) for column in range(len(made))] + [(NO_DRAFT, 0)]
    return Deployment(law_engine(), made, Scripted(script), chunk_tokens=200, max_active=64, cohorts=cohorts)


def texts_follow_the_target_s_law(
    sampling: SamplingParams, drafts: Iterable[str] = tuple(LAW_DRAFTS), rounds: int = 1_500, cohorts: tuple[int, ...] = ()
) -> None:
    """The first three tokens jointly, over seeds, against enumeration. A correct engine fails it three times in a million."""
    deployment = law_deployment(drafts, cohorts)
    sessions = [deployment.submit(LAW_PROMPT, 4, replace(sampling, seed=seed)) for seed in range(rounds)]
    deployment.run(rounds)
    texts = Counter(tuple(session.sequence.tokens[len(LAW_PROMPT) :][:3]) for session in sessions)
    law = Reference(law_engine()).joint(LAW_PROMPT, sampling, 3)
    for length in (1, 2, 3):
        statistic, bound = chi_square(marginal(texts, length), marginal(law, length))
        assert statistic < bound, f"law of the first {length} tokens: {statistic:.0f} is beyond {bound:.0f}"


def texts_sampled_with_a_draft_s_law_follow_the_target_s() -> None:
    texts_follow_the_target_s_law(WIDE, ["other"], rounds=3_000)


def texts_sampled_with_a_reduced_law_follow_the_target_s() -> None:
    texts_follow_the_target_s_law(SHARP, ["other", "fp32"])


def texts_sampled_with_a_shortlist_follow_the_target_s_law() -> None:
    texts_follow_the_target_s_law(WIDE, ["short"])


def texts_sampled_with_lookup_follow_the_target_s_law() -> None:
    texts_follow_the_target_s_law(WIDE, ["lookup"])


def plan_invariant_texts_follow_the_target_s_law() -> None:
    texts_follow_the_target_s_law(replace(SHARP, coupled=True), rounds=800)


def no_number_decides_twice(rounds: int = 100) -> None:
    """Every proposal, acceptance and emission has a number of its own, over all requests, steps and drafts."""
    drawn: list[float] = []
    uniforms = verification.uniforms

    def recorded(*arguments):
        numbers = uniforms(*arguments)
        drawn.extend(numbers.tolist())
        return numbers

    deployment = law_deployment(LAW_DRAFTS)
    with patch.object(verification, "uniforms", recorded):
        for seed in range(rounds):
            deployment.submit(LAW_PROMPT, 12, SamplingParams(1.0, seed=seed))
        deployment.run()
    assert len(drawn) > 20 * rounds
    assert len(set(drawn)) == len(drawn)


def chi_square(counts: Mapping, law: Mapping) -> tuple[float, float]:
    """Pearson's statistic, cells expected less than five times taken together, and the bound that it passes once in a million."""
    total = sum(counts.values())
    assert set(counts) <= {cell for cell, p in law.items() if p > 0}, "a text that has no probability"
    big = {cell: p for cell, p in law.items() if p * total >= 5}
    rest = total * (1 - sum(big.values())), total - sum(counts[cell] for cell in big)
    cells = [(total * p, counts[cell]) for cell, p in big.items()] + ([rest] if rest[0] >= 5 else [])
    freedom = len(cells) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    return sum((found - expected) ** 2 / expected for expected, found in cells), bound


def marginal(weights: Mapping, length: int) -> Counter:
    """The weights of the first ``length`` tokens."""
    shares = Counter()
    for text, weight in weights.items():
        shares[text[:length]] += weight
    return shares


SUITE = (
    greedy_texts_are_those_of_plain_decoding,
    texts_with_options_are_those_of_plain_decoding,
    log_probs_are_those_of_the_text,
    kv_is_that_of_a_fresh_prefill,
    the_target_lacks_one_token_behind_a_verification,
    drafts_propose_what_they_would_decode,
    a_copy_of_the_target_is_never_rejected,
    texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding,
    texts_that_begin_alike_share_a_pool_that_is_too_small,
    tenants_share_nothing,
    an_always_wrong_draft_gives_one_token_a_step,
    an_oracle_gives_k_plus_one_tokens_a_step,
    nothing_is_committed_beyond_an_end,
    texts_sampled_with_a_draft_s_law_follow_the_target_s,
    texts_sampled_with_a_reduced_law_follow_the_target_s,
    texts_sampled_with_a_shortlist_follow_the_target_s_law,
    texts_sampled_with_lookup_follow_the_target_s_law,
    plan_invariant_texts_follow_the_target_s_law,
    no_number_decides_twice,
)
