from backend.ports import Completion, Proposal
from backend.step_log import StepLog
from policy import Rule


def log():
    return StepLog(("small", "lookup"))


def test_a_row_that_ran_through_scores_all_its_positions():
    made = log()
    made.record(7, Proposal("lookup", [1, 2, 3]), Completion(7, [], accepted=1), taken=2, rule=Rule.SAMPLED)
    outcome = made.outcome()
    assert (outcome.request.tolist(), outcome.draft.tolist(), outcome.length.tolist()) == ([7], [1], [3])
    assert (outcome.accepted.tolist(), outcome.emitted.tolist(), outcome.scored.tolist()) == ([1], [2], [3])
    assert outcome.rule.tolist() == [Rule.SAMPLED]


def test_positions_behind_a_cut_are_no_evidence():
    made = log()
    made.record(7, Proposal("small", [1, 2, 3]), Completion(7, [], accepted=3), taken=2, rule=Rule.GREEDY)
    outcome = made.outcome()
    assert (outcome.accepted.tolist(), outcome.scored.tolist()) == ([2], [2])


def test_a_row_without_a_proposal_has_no_draft():
    made = log()
    made.record(7, None, Completion(7, [], accepted=0), taken=1, rule=Rule.GREEDY)
    assert (made.outcome().draft.tolist(), made.outcome().length.tolist()) == ([-1], [0])


def test_an_unused_proposal_is_scored_against_what_was_emitted():
    made = log()
    made.record_free(7, Proposal("lookup", [1, 2, 3, 4]), emitted=[1, 2, 9])
    made.record_free(8, Proposal("lookup", [1, 2]), emitted=[1, 2, 3])
    outcome = made.outcome()
    assert (outcome.free_accepted.tolist(), outcome.free_scored.tolist()) == ([2, 2], [3, 2])


def test_time_is_split_into_parts_of_which_planning_belongs_to_the_overhead():
    made = log()
    for part in ("planning", "verify", "draft:small"):
        with made.part(part):
            pass
    outcome = made.outcome()
    parts = outcome.parts_s
    assert set(parts) == {"planning", "verify", "draft:small", "overhead"}
    assert parts["overhead"] >= parts["planning"]
    assert abs(outcome.measured_s - parts["overhead"] - parts["verify"] - parts["draft:small"]) < 1e-9


def test_a_tree_tells_of_its_spine_of_the_sibling_that_ended_it_and_of_the_second_chain():
    made = log()
    tree = Proposal("small", [1, 2, 3], siblings=[[4], [5, 6], []])
    merged = Proposal("lookup", [1], others=(Proposal("small", [2, 3]),))
    made.record(1, tree, Completion(1, [], accepted=2, along=[1], rank=3), taken=3, rule=Rule.GREEDY)
    made.record(2, tree, Completion(2, [], accepted=2, along=[1], rank=3), taken=1, rule=Rule.GREEDY)  # cut behind its first token
    made.record(3, merged, Completion(3, [], accepted=2, along=[0, 2]), taken=3, rule=Rule.GREEDY)
    made.record(4, Proposal("small", [1, 2]), Completion(4, [], accepted=1), taken=2, rule=Rule.GREEDY)
    made.record(5, None, Completion(5, []), taken=1, rule=Rule.GREEDY)
    outcome = made.outcome()
    assert outcome.accepted.tolist() == [1, 1, 0, 1, 0]
    assert outcome.scored.tolist() == [3, 1, 1, 2, 0]
    assert outcome.rank.tolist() == [3, 0, 0, 0, 0]
    assert outcome.second_accepted.tolist() == [0, 0, 2, 0, 0]
    assert outcome.shape.width.tolist() == [[2, 3, 1], [2, 3, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert outcome.shape.second_draft.tolist() == [-1, -1, 0, -1, -1]
    assert outcome.shape.proposed(outcome.length).tolist() == [6, 6, 3, 2, 0]


def test_a_step_of_chains_has_no_shape():
    made = log()
    made.record(4, Proposal("small", [1, 2]), Completion(4, [], accepted=1), taken=2, rule=Rule.GREEDY)
    assert made.outcome().shape is None
