"""Exactness by enumeration on tiny vocabularies, and by chi-square through the real draws."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.engines import verification
from backend.engines.laws import Law, acceptance, arg_max, draw, normalised, residual, target_laws
from backend.engines.verification import Request, Verdict, sample, verify
from backend.ports import Proposal, Sequence
from backend.randomness import Purpose
from backend.request import SamplingParams

VOCAB = 4
SAMPLED = SamplingParams(temperature=1.0)


def random_laws(rng, prefixes, columns=VOCAB):
    """A law for each prefix: sharp, flat, and with zeros."""
    return {
        prefix: torch.tensor(rng.dirichlet([0.5] * columns) * (rng.random(columns) > 0.2) + [1e-3, *[0.0] * (columns - 1)])
        for prefix in prefixes
    }


def all_prefixes(longest):
    return [prefix for length in range(longest + 1) for prefix in itertools.product(range(VOCAB), repeat=length)]


def emitted_law(target, proposals, length):
    """The joint law of the first ``length`` tokens when a step verifies the proposals and plain decoding goes on behind it."""
    joint = torch.zeros([VOCAB] * length, dtype=torch.float64)

    def extend(prefix, chance):
        if chance == 0.0:
            return
        if len(prefix) >= length:
            joint[prefix[:length]] += chance
            return
        for token, p in enumerate(normalised(target[prefix][None])[0].tolist()):
            extend((*prefix, token), chance * p)

    for chain, chance, law in proposals:
        rows = torch.stack([target[chain[:i]] for i in range(len(chain) + 1)])[:-1]
        survival = chance
        for i, a in enumerate(acceptance(rows, chain, law).clamp(max=1.0).tolist()):
            rest = normalised(residual(normalised(rows[i : i + 1])[0], chain[i], law, i)[None])[0]
            for token, p in enumerate(rest.tolist()):
                extend((*chain[:i], token), survival * (1.0 - a) * p)
            survival *= a
        extend(chain, survival)
    return joint


def plain_law(target, length):
    return emitted_law(target, [((), 1.0, None)], length)


def sampled_proposals(drafts, k, token_ids=None):
    """Every chain of k tokens that the draft can draw, with its chance and the law kept for it."""
    columns = range(len(token_ids)) if token_ids is not None else range(VOCAB)
    ids = token_ids.tolist() if token_ids is not None else list(range(VOCAB))
    for chain in itertools.product(columns, repeat=k):
        tokens = tuple(ids[column] for column in chain)
        rows = torch.stack([drafts[tokens[:i]] for i in range(k)])
        chance = float(torch.tensor([normalised(rows)[i, column] for i, column in enumerate(chain)]).prod())
        if chance > 0.0:
            yield tokens, chance, Law(rows, token_ids)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2])
def test_a_sampled_chain_leaves_the_target_s_law_exactly(k, seed):
    rng = np.random.default_rng(seed)
    target, drafts = random_laws(rng, all_prefixes(k + 1)), random_laws(rng, all_prefixes(k))
    joint = emitted_law(target, sampled_proposals(drafts, k), k + 1)
    assert (joint - plain_law(target, k + 1)).abs().max() < 1e-12


@pytest.mark.parametrize("k", [1, 2])
def test_a_shortlisted_draft_leaves_the_target_s_law_exactly(k):
    rng = np.random.default_rng(5)
    ids = torch.tensor([3, 1])
    target, drafts = random_laws(rng, all_prefixes(k + 1)), random_laws(rng, all_prefixes(k), columns=2)
    joint = emitted_law(target, sampled_proposals(drafts, k, ids), k + 1)
    assert (joint - plain_law(target, k + 1)).abs().max() < 1e-12


@pytest.mark.parametrize("chain", [(0,), (3,), (1, 2), (2, 2)])
def test_a_point_mass_leaves_the_target_s_law_exactly(chain):
    target = random_laws(np.random.default_rng(6), all_prefixes(3))
    joint = emitted_law(target, [(chain, 1.0, None)], 3)
    assert (joint - plain_law(target, 3)).abs().max() < 1e-12


def test_a_law_stored_in_fp32_is_the_law_that_counts():
    rng = np.random.default_rng(7)
    target = random_laws(rng, all_prefixes(2))
    drafts = {prefix: law.float() for prefix, law in random_laws(rng, all_prefixes(1)).items()}
    joint = emitted_law(target, sampled_proposals(drafts, 1), 2)
    assert (joint - plain_law(target, 2)).abs().max() < 1e-12


def test_a_length_chosen_after_the_tokens_were_seen_changes_the_law_and_enumeration_shows_it():
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    target = dict.fromkeys(all_prefixes(1), p)
    honest = list(sampled_proposals({(): q}, 1))
    peeking = [(chain, chance, law) if chance >= 0.25 else ((), chance, None) for chain, chance, law in honest]
    assert torch.allclose(emitted_law(target, honest, 1), p)
    assert torch.allclose(emitted_law(target, peeking, 1), torch.tensor([0.55, 0.19, 0.195, 0.065], dtype=torch.float64))


def test_equal_laws_always_accept_and_their_residual_is_not_divided_by_zero():
    law = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=torch.float64)
    assert acceptance(law[None], [1], Law(law[None])).tolist() == [1.0]
    assert torch.equal(residual(law, 1, Law(law[None]), 0), law)
    certain = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert acceptance(certain[None], [1], None).tolist() == [1.0]
    assert torch.equal(residual(certain, 1, None, 0), certain)


def test_a_token_that_its_law_cannot_have_given_is_refused():
    law = torch.tensor([[0.5, 0.5, 0.0]])
    with pytest.raises(ValueError, match=r"\[2\] have probability 0"):
        Law(law).of([2])
    with pytest.raises(ValueError, match="probability 0"):
        Law(law[:, :2], torch.tensor([7, 9])).of([1])


def chi_square(counts, law):
    expected = law * counts.sum()
    seen = expected > 0
    assert counts[~seen].sum() == 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())


@pytest.mark.parametrize("kind", ["sampled", "point mass", "none", "reduced"])
def test_what_verify_emits_follows_the_target_jointly_over_two_tokens(kind):
    trials = 6_000
    rng = np.random.default_rng(11)
    target = random_laws(rng, all_prefixes(2))
    likely = int(target[()].argmax())
    q = torch.tensor(rng.dirichlet([1.0] * VOCAB))
    params = [
        SamplingParams(temperature=0.7 if kind == "reduced" else 1.0, top_k=3 if kind == "reduced" else 0, seed=seed)
        for seed in range(trials)
    ]
    drafted = sample(q.expand(trials, -1), [Request(param, 5, 2, []) for param in params], Purpose.PROPOSE)
    tokens = [[] if kind == "none" else [likely] if kind == "point mass" else [token] for token in drafted]
    law = None if kind in ("point mass", "none") else Law(q[None])
    requests = [Request(param, 5, 2, chain, law if chain else None) for param, chain in zip(params, tokens, strict=True)]
    logits = torch.stack([target[tuple(chain[:i])].log() for chain in tokens for i in range(len(chain) + 1)])
    laws = {prefix: target_laws(target[prefix].log()[None], params[:1])[0] for prefix in all_prefixes(1)}
    first, second = np.zeros(VOCAB), np.zeros(VOCAB)
    for chain, verdict in zip(tokens, verify(logits, requests), strict=True):
        emitted = [*chain[: verdict.accepted], verdict.column]
        first[emitted[0]] += 1
        if len(emitted) > 1 and emitted[0] == likely:
            second[emitted[1]] += 1
    assert chi_square(first, laws[()].numpy()) < 31  # 3 degrees of freedom: passed once in 1e6
    if kind != "none":
        assert second.sum() > 50
        assert chi_square(second, laws[(likely,)].numpy()) < 31


def test_no_uniform_decides_twice(monkeypatch):
    keys = []
    real = verification.uniforms

    def recorded(seed, position, purpose, attempt, lane=0):
        keys.extend((*map(int, key), purpose) for key in np.broadcast(seed, position, attempt))
        return real(seed, position, purpose, attempt, lane)

    monkeypatch.setattr(verification, "uniforms", recorded)
    laws = torch.full((3, VOCAB), 0.25, dtype=torch.float64)
    sample(laws[:1], [Request(SAMPLED, 9, 4, [])], Purpose.PROPOSE)
    (verdict,) = verify(laws.log(), [Request(SAMPLED, 9, 4, [1, 2], Law(laws[:2]))])
    assert verdict.accepted == 2
    assert keys == [(0, 9, 4, Purpose.PROPOSE), (0, 9, 4, Purpose.ACCEPT), (0, 10, 4, Purpose.ACCEPT), (0, 11, 4, Purpose.EMIT)]


def test_greedy_and_sampled_requests_of_one_batch_do_not_disturb_each_other():
    torch.manual_seed(0)
    logits = torch.randn(8, VOCAB, dtype=torch.float64)
    best = logits.argmax(-1).tolist()
    wrong = (best[1] + 1) % VOCAB
    greedy = Request(SamplingParams(), 3, 0, [best[0], wrong])
    plain = Request(SamplingParams(), 8, 0, [])
    sampled = Request(SamplingParams(1.0, seed=5), 4, 1, [1], Law(torch.full((1, VOCAB), 0.25)))
    top_k_1 = Request(SamplingParams(1.0, top_k=1), 4, 1, [best[6]])
    together = verify(logits, [greedy, sampled, plain, top_k_1])
    assert together[0] == Verdict(1, best[1])
    assert together[1] == verify(logits[3:5], [sampled])[0]
    assert together[2] == Verdict(0, best[5])
    assert together[3] == Verdict(1, best[7])


def test_a_law_is_temperature_then_top_k_then_top_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()

    def law(**options):
        return [round(value, 6) for value in normalised(target_laws(logits, [SamplingParams(**options)]))[0].tolist()]

    assert law(temperature=1.0) == [0.4, 0.3, 0.2, 0.1]
    assert law(temperature=0.5) == [round(v, 6) for v in (16 / 30, 9 / 30, 4 / 30, 1 / 30)]
    assert law(temperature=1.0, top_k=2) == [round(4 / 7, 6), round(3 / 7, 6), 0.0, 0.0]
    assert law(temperature=1.0, top_k=9) == [0.4, 0.3, 0.2, 0.1]
    assert law(temperature=1.0, top_p=0.5) == [round(4 / 7, 6), round(3 / 7, 6), 0.0, 0.0]  # 0.3 crosses the threshold and stays
    assert law(temperature=1.0, top_p=0.01) == [1.0, 0.0, 0.0, 0.0]
    assert law(temperature=1.0, top_k=3, top_p=0.75) == [round(4 / 7, 6), round(3 / 7, 6), 0.0, 0.0]  # 7/9 of the top 3 is enough


def test_rows_with_different_options_are_processed_as_if_alone():
    torch.manual_seed(1)
    logits = torch.randn(5, 50)
    params = [
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=5),
        SamplingParams(1.3, top_p=0.8),
        SamplingParams(1.0, 3, 0.5),
        SamplingParams(2.0, top_k=50),
    ]
    together = target_laws(logits, params)
    for row, param in enumerate(params):
        assert torch.allclose(together[row], target_laws(logits[row : row + 1], [param])[0], rtol=1e-6, atol=0)
    assert (together[1] > 0).sum() == 5


def test_laws_agree_with_transformers_processors():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    logits = torch.randn(3, 40, dtype=torch.float64)
    chain = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(0.8), transformers.TopKLogitsWarper(12), transformers.TopPLogitsWarper(0.7)]
    )
    expected = chain(torch.zeros(3, 1, dtype=torch.long), logits.clone()).softmax(-1)
    assert torch.allclose(normalised(target_laws(logits, [SamplingParams(0.8, 12, 0.7)] * 3)), expected)


def test_a_draw_inverts_the_distribution_function_and_never_picks_a_column_without_probability():
    laws = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    below = [0.0, 0.2499999, 0.25, 0.9, 1.0 - 2.0**-53]
    assert draw(laws.expand(5, -1), torch.tensor(below, dtype=torch.float64)).tolist() == [1, 1, 3, 3, 3]
    scaled = laws.double().expand(5, -1) * 0.3  # u x total rounds up to the total here
    assert draw(scaled, torch.tensor(below, dtype=torch.float64)).tolist() == [1, 1, 3, 3, 3]


def test_the_first_of_equal_logits_is_the_arg_max_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert arg_max(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], dtype=dtype)) == [1, 0]


def test_a_greedy_request_needs_no_law_and_a_sampled_one_keeps_it():
    law = Law(torch.ones(1, VOCAB))

    def request(sampling, proposal=None):
        return Request.of(Sequence(1, [0], 1, sampling), proposal)

    assert request(SamplingParams(), Proposal("d", [1], law)).law is None
    assert request(replace(SAMPLED, coupled=True), Proposal("d", [1], law)).law is None
    assert request(SAMPLED, Proposal("d", [1], law)).law is law
    assert request(SAMPLED).tokens == []


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_a_nucleus_is_the_smallest_set_of_most_probable_tokens_that_reaches_top_p(scale):
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * scale
    params = [SamplingParams(1.0, top_p=top_p) for top_p in (0.3, 0.9, 0.999)]
    for law, full, param in zip(target_laws(logits, params), logits.softmax(-1), params, strict=True):
        kept = law > 0
        assert full[kept].sum() >= param.top_p
        assert full[kept].sum() - full[kept].min() < param.top_p
        assert full[kept].min() > full[~kept].max()
        assert torch.equal(law[kept], full[kept])
