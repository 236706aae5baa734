"""Trees in the port's contract: a pass over all nodes accepts what passes over each path by itself would."""

import itertools
from dataclasses import replace

import pytest
import torch
from backend.engines.trees import Tree
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.lookup import LookupEngine
from backend.ports import Proposal, Sequence, Turn
from backend.request import SamplingParams
from policy import LatencyModel, LatencyTable, PlannerConfig
from policy.shaped import ShapedPlanner
from policy.shapes import Shapes
from tests.contract.deployment import K_MAX, VOCAB, Deployment, kv, tiny_config, tiny_engine
from tests.contract.scenarios import PROMPTS, reference
from tests.contract.test_rows import complete, sequence_of

numbers = itertools.count(1)


def new_sequence(tokens=(3, 1, 4, 1, 5), blocks=(5, 2, 7), sampling=None, name="target"):
    return Sequence(next(numbers), list(tokens), len(tokens), sampling or SamplingParams(), {name: list(blocks)})


def step(engine, sequence, **turn):
    engine.submit([Turn(sequence, len(sequence.tokens), **turn)])
    (completion,) = engine.poll(0.0)
    assert completion.error is None, completion.error
    return completion


def wrong(*tokens):
    return [(token + 1) % VOCAB for token in tokens]


def the_next(count):
    engine, sequence = tiny_engine(), new_sequence()
    for _ in range(count):
        sequence.tokens += step(engine, sequence).tokens
    return sequence.tokens[5:]


SHAPES = {
    "a sibling at the root": (lambda t: Proposal("d", wrong(t[0], 7), siblings=[[9, t[0]], [3]]), 1, [0], 3),
    "a sibling behind the spine": (lambda t: Proposal("d", [t[0], *wrong(t[1])], siblings=[[9], [9, t[1]]]), 2, [1], 3),
    "the whole spine": (lambda t: Proposal("d", t[:3], siblings=[wrong(*t[:1]), [], wrong(*t[2:3])]), 3, [3], 0),
    "nothing": (lambda t: Proposal("d", wrong(*t[:2]), siblings=[wrong(*wrong(t[0]))]), 0, [0], 0),
    "another draft's chain": (lambda t: Proposal("d", wrong(*t[:2]), others=(Proposal("e", t[:3]),)), 3, [0, 3], 0),
    "another's behind a shared sibling": (
        lambda t: Proposal(
            "d", wrong(t[0]), siblings=[[9, t[0]]], others=(Proposal("e", [*t[:2], *wrong(t[2])], siblings=[[], [], [t[2]]]),)
        ),
        3,
        [0, 2],
        3,
    ),
    "another's behind a shared spine": (lambda t: Proposal("d", [t[0], *wrong(t[1])], others=(Proposal("e", t[:2]),)), 2, [1, 2], 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_accepted_has_the_kv_of_a_fresh_prefill_and_text_goes_on_as_without(shape):
    make, accepted, along, rank = SHAPES[shape]
    expected = the_next(8)
    engine, sequence = tiny_engine(), new_sequence()
    completion = step(engine, sequence, proposal=make(expected))
    assert (completion.accepted, completion.along, completion.rank) == (accepted, along, rank)
    assert completion.tokens == expected[: accepted + 1]
    sequence.tokens += completion.tokens
    assert engine.unseen(sequence) == 1
    fresh = new_sequence(sequence.tokens, blocks=(12, 13))
    step(engine, fresh)
    assert torch.allclose(kv(engine, sequence), kv(engine, fresh)[:, :-1], atol=1e-12)
    while len(sequence.tokens) < 5 + 8:
        sequence.tokens += step(engine, sequence).tokens
    assert sequence.tokens[5:] == expected


def test_trees_and_chains_and_prompts_share_a_pass():
    expected = the_next(4)
    engine = tiny_engine()
    made = {name: make(expected) for name, (make, *_) in SHAPES.items()} | {"chain": Proposal("d", expected[:2]), "none": None}
    rows = {name: new_sequence(blocks=(2 * i, 2 * i + 1)) for i, name in enumerate(made)}
    engine.submit([Turn(rows[name], 5, proposal=made[name]) for name in made])
    found = {completion.sequence_id: completion for completion in engine.poll(0.0)}
    for name, proposal in made.items():
        alone = step(tiny_engine(), new_sequence(), proposal=proposal)
        together = found[rows[name].id]
        assert (together.tokens, together.along, together.rank) == (alone.tokens, alone.along, alone.rank)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_decision_in_a_tree_is_the_one_that_is_made_alone(data):
    target = tiny_engine("target")
    sequence = sequence_of(data, range(VOCAB), False)
    guesses = st.integers(0, VOCAB - 1)

    def tokens(behind, count):
        found = []
        for _ in range(count):
            right = data.draw(st.booleans(), label="right")
            found += (
                complete(target, sequence, [*sequence.tokens, *behind, *found]).tokens if right else [data.draw(guesses, label="guess")]
            )
        return found

    def proposal(**others):
        spine = tokens([], data.draw(st.integers(1, 3), label="k"))
        siblings = [data.draw(st.lists(guesses, max_size=2)) for _ in spine]
        siblings = [[*s, *tokens(spine[:j], data.draw(st.integers(0, 1)))] for j, s in enumerate(siblings)]
        return Proposal("d", spine, siblings=siblings, **others)

    proposed = proposal(others=(proposal(),) if data.draw(st.booleans(), label="merged") else ())
    drawn = not sequence.sampling.greedy and not sequence.sampling.coupled
    tree = Tree.of(proposed, drawn=drawn)
    together = complete(target, sequence, sequence.tokens, proposal=proposed)
    assert len(together.tokens) == len(together.log_probs) == together.accepted + 1
    path, node = [], -1
    for row, (token, log_prob) in enumerate(zip(together.tokens, together.log_probs, strict=True)):
        before = [*sequence.tokens, *together.tokens[:row]]
        candidates = tree.children(node)
        spread = Proposal("d", [tree.tokens[candidates[0]]], siblings=[[tree.tokens[n] for n in candidates[1:]]]) if candidates else None
        alone = complete(target, sequence, before, proposal=spread)
        assert (alone.tokens[0], alone.accepted) == (token, int(row < together.accepted))
        assert alone.log_probs[0] == pytest.approx(log_prob, abs=1e-9)
        if row < together.accepted:
            node = candidates[max(alone.rank - 1, 0)]
            path.append(node)
            assert tree.tokens[node] == token
        if not drawn:
            assert complete(target, sequence, before).tokens == [token]
    assert (together.along, together.rank) == (([], 0) if proposed.is_chain else tree.followed(path))


@pytest.mark.parametrize("shortlist", [0, 15])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, seed=3, coupled=True)], ids=["greedy", "coupled"])
def test_siblings_of_a_point_mass_are_what_the_draft_would_choose_next(sampling, shortlist):
    draft = tiny_engine("draft", config=tiny_config(shortlist=shortlist))
    run = step(draft, new_sequence(sampling=sampling, name="draft"), run=3, keep_probs=True, widths=(3, 1, 2))
    plain = step(draft, new_sequence(sampling=sampling, name="draft"), run=3, keep_probs=True)
    assert run.tokens == plain.tokens
    assert [len(siblings) for siblings in run.siblings] == [2, 0, 1]
    banned = []
    for token in [run.tokens[0], *run.siblings[0]]:  # with the ones before it banned, each is the draft's own choice
        again = new_sequence(
            sampling=SamplingParams(sampling.temperature, seed=3, coupled=sampling.coupled, bad_words=tuple(banned)), name="draft"
        )
        assert step(draft, again, run=1, keep_probs=True).tokens == [token]
        banned.append((token,))


def test_drafts_and_their_candidates_draw_independently():
    sampling = SamplingParams(3.0, seed=5)
    runs = [
        step(tiny_engine(name), new_sequence(sampling=sampling, name=name), run=4, keep_probs=True, widths=(4, 4, 4, 4))
        for name in ("a", "b")
    ]
    lanes = [run.tokens for run in runs] + [[siblings[r] for siblings in run.siblings] for run in runs for r in range(3)]
    assert len({tuple(lane) for lane in lanes}) == len(lanes)
    for run in runs:
        for place, siblings in enumerate(run.siblings):
            assert (run.probs.of(siblings, [place] * 3) > 0).all()


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"run": 1, "widths": (2,)}, "widths must be of"),
        ({"run": 2, "keep_probs": True, "widths": (1, 1, 2)}, "at most the 2 tokens"),
        ({"proposal": Proposal("d", [1], siblings=[[2], [3]])}, "siblings of 2 places behind a spine of 1 tokens"),
        ({"proposal": Proposal("d", [1], siblings=[[VOCAB]])}, "must lie in 0..23"),
        ({"proposal": Proposal("d", [1], siblings=[list(range(2, 13))])}, "needs KV for 17 tokens, has 16"),
    ],
)
def test_a_tree_that_makes_no_sense_is_an_error_that_says_why(turn, message):
    engine = tiny_engine()
    engine.submit([Turn(new_sequence(blocks=(3,)), 5, **turn)])
    (completion,) = engine.poll(0.0)
    assert message in completion.error


def test_a_sibling_that_its_law_cannot_have_given_is_an_error():
    draft, target, sampling = tiny_engine("draft"), tiny_engine(), SamplingParams(1.0, top_k=3)
    drafted = step(draft, new_sequence(sampling=sampling, name="draft"), run=1, keep_probs=True)
    other = int(drafted.probs.probs[0].argmin())
    target.submit([Turn(new_sequence(sampling=sampling), 5, proposal=Proposal("d", drafted.tokens, drafted.probs, [[other]]))])
    assert "probability 0" in target.poll(0.0)[0].error


def test_a_tree_may_end_beyond_the_context_as_deep_as_a_chain_may():
    engine = tiny_engine()
    sequence = new_sequence([1] * 96, blocks=range(8))
    assert len(step(engine, sequence, proposal=Proposal("d", [1] * K_MAX, siblings=[[2, 3]] * K_MAX)).tokens) >= 1


class Untimed(ShapedPlanner):
    """A planner that takes its tables at their word, so that no plan depends on how fast this machine is now; it keeps the outcomes."""

    def observe(self, outcome, state, now):
        self.outcomes = [*getattr(self, "outcomes", ()), outcome]
        return super().observe(replace(outcome, measured_s=0.0, parts_s={}), state, now)


@pytest.mark.parametrize("shapes", [{"tree_width": 3}, {"merges": True}, {"tree_width": 3, "merges": True}])
def test_what_the_planner_asks_for_by_itself_is_run_and_learnt_from(shapes):
    names = ("near", "lookup")
    tables = {"near": LatencyTable.synthetic("near", {1: 0.05, 64: 0.06}), "lookup": LatencyTable.synthetic("lookup", {1: 1e-3, 64: 1e-3})}
    latency = LatencyModel.from_tables(LatencyTable.synthetic("target", {1: 1.0, 64: 1.01}), tables, 1e-3, 1e-3)
    planner = Untimed(names, latency, PlannerConfig(k_max=K_MAX), Shapes(single_choice=(1,), most_nodes=K_MAX + 1, **shapes))
    drafts = [tiny_engine("near", seed=1, noise=0.2), LookupEngine("lookup", max_draft_tokens=K_MAX, vocab_size=VOCAB)]
    deployment = Deployment(tiny_engine(), drafts, planner, max_active=3)
    sessions = [deployment.submit(prompt, 24) for prompt in PROMPTS]
    deployment.run()
    assert [session.sequence.tokens for session in sessions] == [reference().text(p, 24) for p in PROMPTS]
    shaped = [outcome for outcome in planner.outcomes if outcome.shape is not None]
    ranks = deployment.loop.policy_state.ranks
    if "tree_width" in shapes:
        assert max(int(outcome.shape.width.max()) for outcome in shaped) == shapes["tree_width"]
        assert ranks.sibling_accepted[:, 0].sum() > 0
    if shapes == {"merges": True}:
        assert sum(int((outcome.shape.second_length > 0).sum()) for outcome in shaped) > 0
    assert not ranks.sibling_tested[:, 1].any()
