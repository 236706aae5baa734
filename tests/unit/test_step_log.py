from backend.sequence import ROOT, Proposal
from backend.speculation.step_log import StepLog

TREE = Proposal("small", [1, 4, 2, 5, 3], [ROOT, ROOT, 0, 1, 2], [0.8, 0.5, 0.4, 0.3, 0.2])
"""1 - 2 - 3 is the spine, 4 - 5 a branch."""


def log():
    return StepLog(("small", "lookup"))


def outcome_of(proposal, verified, emitted, *, sampled=False):
    made = log()
    made.record(7, proposal, verified, emitted, sampled=sampled)
    return made.outcome()


def test_a_row_tells_what_was_proposed_accepted_and_verified():
    outcome = outcome_of(Proposal.chain("lookup", [1, 2, 3]), 3, [1, 9])
    assert (
        outcome.rows.request.tolist(),
        outcome.rows.draft.tolist(),
        outcome.rows.length.tolist(),
    ) == (
        [7],
        [1],
        [3],
    )
    assert (
        outcome.rows.accepted.tolist(),
        outcome.rows.emitted.tolist(),
        outcome.rows.scored.tolist(),
    ) == (
        [1],
        [2],
        [2],
    )
    assert (outcome.rows.verified.tolist(), outcome.rows.followed.tolist()) == ([3], [1])


def test_positions_after_an_end_are_no_evidence():
    outcome = outcome_of(Proposal.chain("small", [1, 2, 3], [0.9, 0.8, 0.7]), 3, [1, 2])
    assert (outcome.rows.accepted.tolist(), outcome.rows.scored.tolist()) == ([2], [2])
    assert outcome.nodes.confidence.tolist() == [0.9, 0.8]
    assert outcome.nodes.accepted.tolist() == [True, True]


def test_a_row_without_a_proposal_has_no_draft():
    outcome = outcome_of(None, 0, [5])
    assert (
        outcome.rows.draft.tolist(),
        outcome.rows.length.tolist(),
        outcome.rows.verified.tolist(),
    ) == (
        [-1],
        [0],
        [0],
    )
    assert not len(outcome.nodes.accepted)


def test_a_tree_tells_of_the_path_that_was_emitted_on_whatever_branch():
    outcome = outcome_of(TREE, 5, [4, 5, 9])
    assert (
        outcome.rows.length.tolist(),
        outcome.rows.accepted.tolist(),
        outcome.rows.scored.tolist(),
    ) == (
        [3],
        [2],
        [3],
    )
    assert outcome.nodes.accepted.tolist() == [False, True, False, True, False]
    assert (outcome.rows.verified.tolist(), outcome.rows.followed.tolist()) == ([5], [2])


def test_nodes_that_were_not_verified_are_judged_by_the_tokens_emitted():
    outcome = outcome_of(TREE, 1, [1, 2])  # 2 is the target's own, and what the tree has there
    assert (
        outcome.rows.accepted.tolist(),
        outcome.rows.scored.tolist(),
        outcome.rows.followed.tolist(),
    ) == (
        [2],
        [2],
        [1],
    )
    assert outcome.nodes.confidence.tolist() == [0.8, 0.5, 0.4]  # of others only failures are seen
    assert outcome.nodes.accepted.tolist() == [True, False, True]


def test_a_row_without_a_verified_node_is_evidence_too():
    outcome = outcome_of(TREE, 0, [4], sampled=True)
    assert (
        outcome.rows.accepted.tolist(),
        outcome.rows.scored.tolist(),
        outcome.rows.followed.tolist(),
    ) == (
        [1],
        [1],
        [0],
    )
    assert outcome.nodes.accepted.tolist() == [False, True]
    assert outcome.nodes.sampled.all()


def test_an_unused_proposal_is_scored_against_what_was_emitted():
    made = log()
    made.record_free(7, Proposal.chain("lookup", [1, 2, 3, 4]), emitted=[1, 2, 9])
    made.record_free(8, Proposal.chain("lookup", [1, 2]), emitted=[1, 2, 3])
    outcome = made.outcome()
    assert (outcome.free.accepted.tolist(), outcome.free.scored.tolist()) == ([2, 2], [3, 2])


def test_rows_and_free_chains_carry_what_their_drafts_showed():
    made, shown = log(), [3, 7]
    made.record(7, Proposal.chain("lookup", [1, 2]), 0, [1], sampled=False, evidence=shown)
    made.record(8, TREE, 5, [4], sampled=False, evidence=shown)
    made.record(9, None, 0, [4], sampled=False, evidence=shown)
    made.record(10, TREE, 5, [4], sampled=False)
    made.record_free(9, Proposal.chain("lookup", [1, 2]), [4], shown)
    made.record_free(10, Proposal.chain("lookup", [1, 2]), [4])
    made.record_scored(9, [("small", 1, 2)])  # of earlier tokens
    outcome = made.outcome()
    assert outcome.rows.evidence.tolist() == [7, 3, 0, 0]
    assert outcome.free.evidence.tolist() == [7, 0, 0]
    assert log().outcome().rows.evidence.tolist() == []


def test_time_is_split_into_parts_and_planning_belongs_to_the_overhead():
    made = log()
    for part in ("planning", "verify", "draft:small"):
        with made.part(part):
            pass
    outcome = made.outcome()
    parts = outcome.times.parts_s
    assert set(parts) == {"planning", "verify", "draft:small", "overhead"}
    assert parts["overhead"] >= parts["planning"]
    times_s = parts["overhead"], parts["verify"], parts["draft:small"]
    assert abs(outcome.times.measured_s - sum(times_s)) < 1e-9
