"""The rule of acceptance, and the distributions that it draws by."""

import itertools

import numpy as np
import pytest

from backend.request import SamplingParams
from backend.sampling.distributions import target_probs
from backend.sampling.draw import draw
from backend.sampling.processing import WHOLE_VOCABULARY, Columns
from backend.sampling.randomness import word
from backend.sampling.verification import VerifyRequest, candidates, verify
from backend.sequence import Proposal, Sequence

VOCAB = 4


def all_paths(longest):
    return [path for n in range(longest + 1) for path in itertools.product(range(VOCAB), repeat=n)]


def random_trees(rng, nodes):
    """Trees of distinct siblings, as (tokens, parents)."""
    edges = []
    while len(edges) < nodes:
        edge = int(rng.integers(VOCAB)), int(rng.integers(-1, len(edges)))
        if edge not in edges:
            edges.append(edge)
    return [token for token, _ in edges], [parent for _, parent in edges]


@pytest.mark.parametrize("seed", range(20))
def test_of_a_tree_is_accepted_what_is_drawn_path_by_path(seed):
    rng = np.random.default_rng(seed)
    of_path = {path: rng.normal(size=VOCAB) for path in all_paths(6)}
    samplings = [SamplingParams(), *(SamplingParams(0.8, seed=n) for n in range(3))]
    requests, rows, expected = [], [], []
    for sampling in samplings:
        tokens, parents = random_trees(rng, int(rng.integers(0, 7)))
        paths = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent + 1], token))
        rows += [of_path[path] for path in paths]
        requests.append(VerifyRequest(sampling, 5, [1] * 5, 2, (), tokens, parents))
        text = ()
        while text in paths:
            text += (one_draw(of_path[text], sampling, 5 + len(text)),)
        expected.append(text)
    for request, verdict, text in zip(
        requests, verify(np.stack(rows), requests), expected, strict=True
    ):
        assert (*(request.tokens[node] for node in verdict.path), verdict.column) == text
        parents = [request.parents[node] for node in verdict.path]
        assert parents == [-1, *verdict.path][: len(parents)]


def one_draw(logits, sampling, position):
    if sampling.greedy:
        return int(logits.argmax())
    words = np.array([word(sampling.seed, position)], np.uint64)
    return draw(lambda row: target_probs(logits, sampling), words)[0]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, seed=4)])
def test_a_draft_s_first_candidate_is_what_a_target_like_it_draws(sampling):
    logits = np.random.default_rng(1).normal(size=(30, VOCAB))
    places = [VerifyRequest(sampling, at, [0] * 30, 0) for at in range(30)]
    found = candidates(logits, places, 3, WHOLE_VOCABULARY)
    drawn = [verdict.column for verdict in verify(logits, places)]
    assert [row[0][0] for row in found] == drawn
    for row in found:
        chances = [chance for _, chance in row]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) <= 1 + 1e-9


def test_a_shortlist_s_candidates_are_those_of_the_whole_vocabulary():
    rng = np.random.default_rng(1)
    ids = rng.permutation(300)[:200]
    shortlisted, whole = 2 * rng.normal(size=(50, 200)), np.full((50, 300), -np.inf)
    whole[:, ids] = shortlisted
    places = [VerifyRequest(SamplingParams(0.9, seed=n), 5 + n) for n in range(50)]
    columns = Columns(ids)
    found = candidates(shortlisted, places, 1, columns)
    assert [columns.token(best[0]) for (best,) in found] == [
        best[0] for (best,) in candidates(whole, places, 1)
    ]


def test_a_request_takes_a_proposal_s_nodes_and_refuses_what_is_no_tree():
    sequence = Sequence(1, [0, 1], 1, SamplingParams())
    assert VerifyRequest.of(sequence, None).rows == 1
    assert VerifyRequest.of(sequence, Proposal.chain("d", [3, 2])).rows == 3
    with pytest.raises(ValueError, match="earlier node"):
        VerifyRequest.of(sequence, Proposal("d", [3, 2], [-1, 1], [1.0, 1.0]))


def test_a_distribution_is_temperature_then_min_p_then_top_k_then_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1])

    def probs(**options):
        return target_probs(logits, SamplingParams(**options)).round(6).tolist()

    assert probs(temperature=1.0) == [0.4, 0.3, 0.2, 0.1]
    assert probs(temperature=0.5) == [round(v, 6) for v in (16 / 30, 9 / 30, 4 / 30, 1 / 30)]
    assert probs(temperature=1.0, top_k=2) == [round(4 / 7, 6), round(3 / 7, 6), 0.0, 0.0]
    assert probs(temperature=1.0, top_k=9) == [0.4, 0.3, 0.2, 0.1]
    assert probs(temperature=1.0, top_p=0.5) == [
        round(4 / 7, 6),
        round(3 / 7, 6),
        0.0,
        0.0,
    ]  # 0.3 crosses the threshold and stays
    assert probs(temperature=1.0, top_p=0.01) == [1.0, 0.0, 0.0, 0.0]
    assert probs(temperature=1.0, top_k=3, top_p=0.75) == [
        round(4 / 7, 6),
        round(3 / 7, 6),
        0.0,
        0.0,
    ]  # 7/9 of the top 3 is enough
    assert probs(temperature=1.0, min_p=0.5) == [
        *(round(v, 6) for v in (4 / 9, 3 / 9, 2 / 9)),
        0.0,
    ]  # 0.2 is half of 0.4
    assert probs(temperature=0.5, min_p=0.5) == [round(v, 6) for v in (0.64, 0.36, 0.0, 0.0)]
    assert probs(temperature=1.0, min_p=1.0) == [1.0, 0.0, 0.0, 0.0]
    assert probs(temperature=1.0, min_p=0.6, top_p=0.55) == [1.0, 0.0, 0.0, 0.0]  # 4/7 is enough
    assert probs(temperature=1.0, min_p=0.3, top_k=2) == probs(temperature=1.0, top_k=2)


OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 400, "log_probs": True, "top_log_probs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.2, "bad_words": ((3,),)},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((3 * len(OPTIONS), 1003)) * 4).astype(dtype)
    places = [
        VerifyRequest(SamplingParams(seed=number, **options), 40 + number, range(40 + number), 9)
        for number, options in enumerate(3 * OPTIONS)
    ]
    order = rng.permutation(len(places))
    some = [places[number] for number in order]
    verdicts, nodes = verify(logits[order], some), candidates(logits[order], some, 4)
    wide = np.zeros((len(places), 1200), dtype)  # rows of another stride, other alignments
    wide[:, 5 : 5 + logits.shape[1]] = logits
    for verdict, ones, number in zip(verdicts, nodes, order, strict=True):
        alone = wide[number : number + 1, 5 : 5 + logits.shape[1]]
        assert verify(alone, [places[number]]) == [verdict]
        assert candidates(alone, [places[number]], 4) == [ones]


def test_logits_that_are_no_numbers_are_refused_and_change_no_other_row():
    logits = np.random.default_rng(1).normal(size=(2, 50))
    places = [
        VerifyRequest(SamplingParams(0.8, top_k=9, top_p=0.9, seed=seed), 1) for seed in range(2)
    ]
    (wanted,) = verify(logits[1:], places[1:])
    logits[0, 7] = np.nan
    assert verify(logits[1:], places[1:]) == [wanted]
    with pytest.raises(ValueError, match="not numbers"):
        verify(logits, places)


def test_distributions_agree_with_transformers_processors():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(2).normal(size=(3, 40))
    chain = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopKLogitsWarper(12),
            transformers.TopPLogitsWarper(0.7),
        ]
    )
    changed = chain(torch.zeros(3, 1, dtype=torch.long), torch.from_numpy(logits.copy()))
    for row, expected in zip(logits, changed.softmax(-1).numpy(), strict=True):
        assert np.allclose(target_probs(row, SamplingParams(0.8, 12, 0.7)), expected)


def test_the_first_of_equal_logits_is_drawn():
    logits = np.array([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], np.float32)
    for options in ({}, {"bad_words": ((7, 1),)}):
        places = [VerifyRequest(SamplingParams(**options), 1, [4], 1)] * 2
        assert [verdict.column for verdict in verify(logits, places)] == [1, 0]


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_a_nucleus_is_the_smallest_set_of_most_probable_tokens_that_reaches_top_p(scale):
    rows = np.random.default_rng(3).normal(size=(3, 1000)) * scale
    for logits, top_p in zip(rows, (0.3, 0.9, 0.999), strict=True):
        full = np.exp(logits) / np.exp(logits).sum()
        probs = target_probs(logits, SamplingParams(1.0, top_p=top_p))
        kept = probs > 0
        assert full[kept].sum() >= top_p
        assert full[kept].sum() - full[kept].min() < top_p
        assert full[kept].min() > full[~kept].max()
        assert np.allclose(probs[kept], full[kept] / full[kept].sum())


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [1, 3, 200, 999, 1000])
def test_top_k_keeps_the_greatest_and_ties_with_the_last(scale, top_k):
    logits = (np.random.default_rng(4).normal(size=1000) * scale).round(2)
    kept = target_probs(logits, SamplingParams(1.0, top_k=top_k)) > 0
    least = np.sort(logits)[-top_k]
    assert np.array_equal(kept, logits >= least)
