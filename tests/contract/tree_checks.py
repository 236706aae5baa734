"""The exactness suite of trees: a whole deployment whose plans have siblings and second drafts, and the multi-draft rule by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
from backend.engines.trees import Tree

from backend.engines import verification
from backend.engines.laws import Law, normalised
from backend.engines.verification import Request, verify
from backend.ports import Proposal
from backend.request import SamplingParams
from policy import NO_DRAFT
from tests.contract import checks
from tests.contract.checks import LAW_DRAFTS, LAW_PROMPT, SHARP, WIDE, chi_square, law_engine, marginal
from tests.contract.deployment import Deployment, Scripted
from tests.contract.reference import Reference
from tests.contract.scenarios import MIXED, TREE_SCRIPT, TREES, serve

# -- whole deployments

CROSSED_TREES = replace(MIXED, script=TREE_SCRIPT)


def greedy_texts_of_trees_are_those_of_plain_decoding() -> None:
    checks.texts_are_those_of_plain_decoding(TREES)


def texts_of_trees_with_options_are_those_of_plain_decoding() -> None:
    checks.texts_are_those_of_plain_decoding(CROSSED_TREES)


def log_probs_of_trees_are_those_of_the_text() -> None:
    checks.log_probs_are_those_of_the_text(CROSSED_TREES)


def kv_of_trees_is_that_of_a_fresh_prefill() -> None:
    checks.kv_is_that_of_a_fresh_prefill(TREES)


def the_target_lacks_one_token_behind_a_tree() -> None:
    checks.the_target_lacks_one_token_behind_a_verification(TREES)


def second_choices_are_accepted_and_counted() -> None:
    """A scenario in which nothing but spines were accepted would show nothing; outcomes, replies and metrics say the same of it."""
    asks = [replace(ask, leaves=None) for ask in TREES.asks + CROSSED_TREES.asks]
    deployment, sessions = serve(replace(CROSSED_TREES, asks=tuple(asks)))
    outcomes = [outcome for outcome in deployment.policy.outcomes if outcome.shape is not None]
    ranks = np.concatenate([outcome.rank for outcome in outcomes])
    beyond = np.concatenate([np.maximum(o.second_accepted - o.accepted - (o.rank > 0), 0) for o in outcomes])
    assert (ranks == 2).sum() > 4
    assert (ranks > 2).any()
    assert (beyond > 0).sum() > 4
    proposed = sum(int((o.shape.proposed(o.length) if o.shape else o.length).sum()) for o in deployment.policy.outcomes)
    accepted = sum(int(o.accepted.sum()) for o in deployment.policy.outcomes) + int((ranks > 0).sum() + beyond.sum())
    counters = deployment.counters()
    for name, told in (("spindle_draft_tokens_total", proposed), ("spindle_accepted_tokens_total", accepted)):
        assert sum(value for (counter, *_), value in counters.items() if counter == name) == told
    assert sum(session.sink.usage.drafted for session in sessions) == proposed
    assert sum(session.sink.usage.accepted for session in sessions) == accepted


# -- laws


def law_deployment(script: Iterable[tuple], drafts: Iterable[str]) -> Deployment:
    return Deployment(law_engine(), [LAW_DRAFTS[name]() for name in drafts], Scripted(script), chunk_tokens=200, max_active=64)


def texts_follow_the_target_s_law(sampling: SamplingParams, script: Iterable[tuple], drafts: Iterable[str], rounds: int = 3_000) -> None:
    """The first three tokens jointly, over seeds, against enumeration. A correct engine fails it three times in a million."""
    deployment = law_deployment(script, drafts)
    sessions = [deployment.submit(LAW_PROMPT, 4, replace(sampling, seed=seed)) for seed in range(rounds)]
    deployment.run(rounds)
    texts = checks.Counter(tuple(session.sequence.tokens[len(LAW_PROMPT) :][:3]) for session in sessions)
    law = Reference(law_engine()).joint(LAW_PROMPT, sampling, 3)
    for length in (1, 2, 3):
        statistic, bound = chi_square(marginal(texts, length), marginal(law, length))
        assert statistic < bound, f"law of the first {length} tokens: {statistic:.0f} is beyond {bound:.0f}"


def texts_sampled_with_siblings_follow_the_target_s_law() -> None:
    texts_follow_the_target_s_law(WIDE, [(0, 2, (3, 2)), (0, 1, (5,)), (0, 2, (2, 3)), (NO_DRAFT, 0)], ["other"])


def texts_sampled_with_merged_chains_follow_the_target_s_law() -> None:
    script = [(0, 2, (1, 2), (1, 2)), (2, 2, (1, 1), (3, 2)), (3, 1, (1,), (0, 2)), (1, 2, (2, 1), (2, 2))]
    texts_follow_the_target_s_law(SHARP, script, LAW_DRAFTS)


def no_number_of_a_tree_decides_twice(rounds: int = 60) -> None:
    """Nor do two candidates of a place, two drafts, or two tests share one."""
    drawn: list[float] = []
    uniforms = verification.uniforms

    def recorded(*arguments):
        numbers = uniforms(*arguments)
        drawn.extend(numbers.tolist())
        return numbers

    script = [(0, 2, (2, 2), (1, 1)), (1, 2, (3, 2)), (2, 2, (1, 2), (0, 2))]
    deployment = law_deployment(script, ["other", "short", "fp32"])
    with patch.object(verification, "uniforms", recorded):
        for seed in range(rounds):
            deployment.submit(LAW_PROMPT, 12, SamplingParams(1.0, seed=seed))
        deployment.run()
    assert len(drawn) > 20 * rounds
    assert len(set(drawn)) == len(drawn)


# -- the multi-draft rule by enumeration

SIZE = 3
Laws = dict[tuple[int, ...], torch.Tensor]


class Number:
    """A uniform number of which nothing is known but how a comparison with it ends; the chance of that is noted."""

    def __init__(self, ends: Iterator[bool], chances: list[float]) -> None:
        self._ends, self._chances = ends, chances

    def __lt__(self, bound: float) -> bool:
        below, chance = next(self._ends), min(bound, 1.0)
        self._chances.append(chance if below else 1.0 - chance)
        return below


def all_verdicts(request: Request, logits: torch.Tensor) -> Iterator[tuple[float, list[int], torch.Tensor]]:
    """Run a verification once for every way in which its tests may end: (probability, tokens accepted, law of the token behind them)."""
    scripts: list[list[bool]] = [[]]
    while scripts:
        script, chances, finals = scripts.pop(), list[float](), list[torch.Tensor]()
        ends = itertools.chain(script, itertools.repeat(False))

        def uniforms(seed, position, purpose, attempt, lane=0, ends=ends, chances=chances):
            return np.array([Number(ends, chances) for _ in lane], dtype=object)

        def sample(laws, requests, purpose, finals=finals):
            finals.append(laws[0])
            return [0]

        with patch.object(verification, "uniforms", uniforms), patch.object(verification, "sample", sample):
            (verdict,) = verify(logits, [request])
        yield float(np.prod(chances)), [request.tree.tokens[node] for node in verdict.path], finals[0]
        # what was not looked at has no other end
        scripts += [[*script, *[False] * (test - len(script)), True] for test in range(len(script), len(chances))]


def emitted_law(target: Laws, proposals: Iterable[tuple[Proposal, float]], length: int) -> torch.Tensor:
    """The joint law of the first tokens when a step verifies a proposal and plain decoding goes on behind it."""
    joint = torch.zeros([SIZE] * length, dtype=torch.float64)

    def extend(prefix: tuple[int, ...], chance: float, law: torch.Tensor) -> None:
        if len(prefix) >= length:
            joint[prefix[:length]] += chance
            return
        for token, p in enumerate(normalised(law[None])[0].tolist()):
            if p > 0.0 and chance > 0.0:
                extend((*prefix, token), chance * p, target.get((*prefix, token), law))

    for proposal, chance in proposals:
        request = Request(SamplingParams(1.0), 0, 0, [], tree=Tree.of(proposal, drawn=True))
        request = replace(request, tokens=request.tree.tokens)
        logits = torch.stack([target[path] for path in paths(request.tree)]).log()
        for p, accepted, final in all_verdicts(request, logits):
            extend(tuple(accepted), chance * p, final)
    return joint


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens up to each row of a tree's logits."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def random_laws(rng: np.random.Generator, longest: int) -> Laws:
    prefixes = [prefix for size in range(longest + 1) for prefix in itertools.product(range(SIZE), repeat=size)]
    return {prefix: torch.tensor(rng.dirichlet([0.7] * SIZE)) for prefix in prefixes}


def drawn_trees(one: Laws, other: Laws) -> Iterator[tuple[Proposal, float]]:
    """Every tree of a spine of two, a sibling at each place, and another draft's chain of two, with its probability."""
    for a, b, c, d, e, f in itertools.product(range(SIZE), repeat=6):
        rows = torch.stack([one[()], one[a,]]), torch.stack([other[()], other[e,]])
        chance = rows[0][0, [a, c]].prod() * rows[0][1, [b, d]].prod() * rows[1][[0, 1], [e, f]].prod()
        second = Proposal("other", [e, f], Law(rows[1]))
        yield Proposal("one", [a, b], Law(rows[0]), [[c], [d]], (second,)), float(chance)


def a_tree_of_two_drafts_leaves_the_target_s_law_exactly(seed: int = 0, kind: Callable[[Laws, Laws], Iterable] = drawn_trees) -> None:
    """Siblings are drawn with replacement, so that they may be equal to the spine and to the other draft's tokens."""
    rng = np.random.default_rng(seed)
    target, one, other = (random_laws(rng, 3) for _ in range(3))
    plain = torch.stack([target[()][a] * torch.stack([target[a,][b] * target[a, b] for b in range(SIZE)]) for a in range(SIZE)])
    found = emitted_law(target, kind(one, other), 3)
    assert (found - plain).abs().max() < 1e-12


def point_mass_trees(one: Laws, other: Laws) -> Iterator[tuple[Proposal, float]]:
    """A greedy draft's best two at each place and, at the root, a drawn chain beside them."""
    best = [one[()].argsort(descending=True).tolist()]
    best.append(one[best[0][0],].argsort(descending=True).tolist())
    for e in range(SIZE):
        second = Proposal("other", [e], Law(other[()][None]))
        yield Proposal("one", [best[0][0], best[1][0]], None, [best[0][1:2], best[1][1:2]], (second,)), float(other[()][e])


def a_tree_of_point_masses_leaves_the_target_s_law_exactly() -> None:
    for seed in range(4):
        a_tree_of_two_drafts_leaves_the_target_s_law_exactly(seed, point_mass_trees)


SUITE = (
    greedy_texts_of_trees_are_those_of_plain_decoding,
    texts_of_trees_with_options_are_those_of_plain_decoding,
    log_probs_of_trees_are_those_of_the_text,
    kv_of_trees_is_that_of_a_fresh_prefill,
    the_target_lacks_one_token_behind_a_tree,
    second_choices_are_accepted_and_counted,
    texts_sampled_with_siblings_follow_the_target_s_law,
    texts_sampled_with_merged_chains_follow_the_target_s_law,
    no_number_of_a_tree_decides_twice,
    a_tree_of_two_drafts_leaves_the_target_s_law_exactly,
    a_tree_of_point_masses_leaves_the_target_s_law_exactly,
)
