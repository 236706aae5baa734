"""The rule of acceptance, and the distributions that it draws by."""

import itertools

import numpy as np
import pytest
import torch

from backend.request import SamplingParams
from backend.sampling.distributions import arg_max, target_probs
from backend.sampling.draw import draw
from backend.sampling.processing import WHOLE_VOCABULARY, Columns
from backend.sampling.randomness import word
from backend.sampling.verification import Row, candidates, verify
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
    of_path = {path: torch.from_numpy(rng.normal(size=VOCAB)) for path in all_paths(6)}
    samplings = [SamplingParams(), *(SamplingParams(0.8, seed=n) for n in range(3))]
    requests, rows, expected = [], [], []
    for sampling in samplings:
        tokens, parents = random_trees(rng, int(rng.integers(0, 7)))
        paths = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent + 1], token))
        rows += [of_path[path] for path in paths]
        requests.append(Row(sampling, 5, [1] * 5, 2, (), tokens, parents))
        text = ()
        while text in paths:
            text += (one_draw(of_path[text], sampling, 5 + len(text)),)
        expected.append(text)
    for request, verdict, text in zip(
        requests, verify(torch.stack(rows), requests), expected, strict=True
    ):
        assert (*(request.tokens[node] for node in verdict.path), verdict.column) == text
        parents = [request.parents[node] for node in verdict.path]
        assert parents == [-1, *verdict.path][: len(parents)]


def one_draw(logits, sampling, position):
    if sampling.greedy:
        return int(logits.argmax())
    words = np.array([word(sampling.seed, position)], np.uint64)
    return draw(target_probs(logits[None], [sampling]), words)[0]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, seed=4)])
def test_a_draft_s_first_candidate_is_what_a_target_like_it_draws(sampling):
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(30, VOCAB)))
    places = [Row(sampling, at, [0] * 30, 0) for at in range(30)]
    found = candidates(logits, places, 3, WHOLE_VOCABULARY)
    drawn = [verdict.column for verdict in verify(logits, places)]
    assert [row[0][0] for row in found] == drawn
    for row in found:
        chances = [chance for _, chance in row]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) <= 1 + 1e-9


def test_a_shortlist_s_candidates_are_those_of_the_whole_vocabulary():
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:200]
    shortlisted, whole = 2 * torch.randn(50, 200), torch.full((50, 300), -torch.inf)
    whole[:, ids] = shortlisted
    places = [Row(SamplingParams(0.9, seed=n), 5 + n) for n in range(50)]
    columns = Columns(ids)
    found = candidates(shortlisted, places, 1, columns)
    assert [columns.token(best[0]) for (best,) in found] == [
        best[0] for (best,) in candidates(whole, places, 1)
    ]


def test_a_request_takes_a_proposal_s_nodes_and_refuses_what_is_no_tree():
    sequence = Sequence(1, [0, 1], 1, SamplingParams())
    assert Row.of(sequence, None).rows == 1
    assert Row.of(sequence, Proposal.chain("d", [3, 2])).rows == 3
    with pytest.raises(ValueError, match="earlier node"):
        Row.of(sequence, Proposal("d", [3, 2], [-1, 1], [1.0, 1.0]))


def test_a_distribution_is_temperature_then_min_p_then_top_k_then_top_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()

    def probs(**options):
        return [
            round(value, 6)
            for value in target_probs(logits, [SamplingParams(**options)])[0].tolist()
        ]

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


def test_rows_with_different_options_are_processed_as_if_alone():
    torch.manual_seed(1)
    logits = torch.randn(5, 50)
    params = [
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=5),
        SamplingParams(1.3, top_p=0.8),
        SamplingParams(1.0, 3, 0.5),
        SamplingParams(2.0, top_k=50, min_p=0.2),
    ]
    together = target_probs(logits, params)
    for row, param in enumerate(params):
        assert torch.allclose(
            together[row], target_probs(logits[row : row + 1], [param])[0], rtol=1e-6, atol=0
        )
    assert (together[1] > 0).sum() == 5


def test_distributions_agree_with_transformers_processors():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    logits = torch.randn(3, 40, dtype=torch.float64)
    chain = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopKLogitsWarper(12),
            transformers.TopPLogitsWarper(0.7),
        ]
    )
    expected = chain(torch.zeros(3, 1, dtype=torch.long), logits.clone()).softmax(-1)
    assert torch.allclose(target_probs(logits, [SamplingParams(0.8, 12, 0.7)] * 3), expected)


def test_the_first_of_equal_logits_is_the_arg_max_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert arg_max(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], dtype=dtype)) == [1, 0]


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_a_nucleus_is_the_smallest_set_of_most_probable_tokens_that_reaches_top_p(scale):
    logits = (
        torch.randn(3, 1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        * scale
    )
    params = [SamplingParams(1.0, top_p=top_p) for top_p in (0.3, 0.9, 0.999)]
    for probs, full, param in zip(
        target_probs(logits, params), logits.softmax(-1), params, strict=True
    ):
        kept = probs > 0
        assert full[kept].sum() >= param.top_p
        assert full[kept].sum() - full[kept].min() < param.top_p
        assert full[kept].min() > full[~kept].max()
        assert torch.allclose(probs[kept], full[kept] / full[kept].sum())
