"""The simulator against what is known without it: queueing theory, closed forms, conservation."""

from dataclasses import replace

import numpy as np
import pytest

from backend.engines.openvino import width as engine
from backend.sequence import Proposal
from backend.speculation.step_log import StepLog
from policy import (
    AdaptivePlanner,
    FixedLength,
    LatencyCurve,
    LatencyModel,
    NoSpeculation,
    PlannerConfig,
    RandomChoice,
)
from policy.baselines import BASELINES
from policy.simulate import deployments
from policy.simulation.arms import WITHOUT, OraclePlanner, arm_of, make_policy
from policy.simulation.deployment import Deployment, PaddedWidth, Work, perturb, step_parts
from policy.simulation.experiments import Scenario, Task, run_once
from policy.simulation.fleet import least_outstanding, simulate, simulate_closed
from policy.simulation.presets import (
    CHAT,
    LLAMA_8B,
    MIXED,
    PREFILL_HEAVY,
    llama_8b_h100,
    llama_70b_h100,
)
from policy.simulation.workload import (
    Category,
    Drift,
    Mix,
    RequestLog,
    backlog,
    bursty,
    draw,
)

STEP_S, DRAFT_S = 0.010, 0.001


def flat(**changes) -> Deployment:
    """One draft; every verification takes 10 ms, every draft forward 1 ms."""
    model = LatencyModel(
        LatencyCurve(np.full(2, STEP_S), 0.0), (LatencyCurve(np.full(2, DRAFT_S), 0.0),)
    )
    return replace(Deployment("flat", "made up", ("a",), model, (False,), noise=0.0), **changes)


def mix(hazard=0.8, output=50, prompt=20, **changes) -> Mix:
    same = {"spread": 0.0, "draft_spread": 0.0, "length_spread": 0.0}
    return Mix(
        "same", (Category("same", 1.0, prompt, output, {"a": hazard}),), **{**same, **changes}
    )


def drawn(deployment, what, arrivals, seed=0):
    return draw(what, deployment.drafts, arrivals, seed, deployment.k_max, 10.0)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_one_at_a_time_every_request_waits_as_lindley_s_recursion_says(load):
    service_s = 5 * STEP_S
    deployment = flat(max_active=1)
    arrivals = bursty(300, load / service_s, 1.0, seed=1)
    run = simulate(deployment, drawn(deployment, mix(output=5), arrivals), NoSpeculation, 0)
    waiting_s = [0.0]
    for gap_s in np.diff(arrivals):
        waiting_s.append(max(0.0, waiting_s[-1] + service_s - gap_s))
    assert run.latency_s == pytest.approx(np.array(waiting_s) + service_s)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_in_a_closed_loop_each_place_is_taken_again_a_way_after_it_was_left(in_flight):
    """Ways are shorter than a step, so that a new request waits for the end of the step in
    progress; alone it does not wait.
    """
    way_s, count = 0.3 * STEP_S, 20
    run = simulate_closed(
        flat(), drawn(flat(), mix(output=4), backlog(count)), NoSpeculation(), 0, in_flight, way_s
    )
    whole_s = way_s + 4 * STEP_S if in_flight == 1 else 5 * STEP_S
    assert run.latency_s[:in_flight] == pytest.approx(way_s + 4 * STEP_S)
    assert run.latency_s[in_flight:] == pytest.approx(whole_s, rel=0.3)
    assert max(step.rows for step in run.steps) == in_flight
    if in_flight == 1:
        assert run.end_s == pytest.approx(count * whole_s)


@pytest.mark.parametrize("hazard", [0.8, 1e-6])
def test_planning_takes_its_time_in_every_step(hazard):
    plain, costly = flat(), flat(planning_s=((1, 0.2 * STEP_S),))
    took_s = []
    for deployment in (plain, costly):
        workload = drawn(deployment, mix(hazard=hazard, output=400), backlog(8))
        run = simulate_closed(
            deployment,
            workload,
            AdaptivePlanner(("a",), deployment.latency, PlannerConfig(k_max=1, explore_share=0.0)),
            0,
            8,
        )
        took_s.append(run.end_s / len(run.steps))
    assert took_s[1] - took_s[0] == pytest.approx(0.2 * STEP_S, rel=0.1)


def test_a_closed_loop_serves_all_even_when_there_are_fewer_than_places():
    run = simulate_closed(
        flat(), drawn(flat(), mix(output=3), backlog(2)), FixedLength("a", 2), 0, 8
    )
    assert np.isfinite(run.latency_s).all()


@pytest.mark.medium
def test_without_speculation_it_is_the_queue_m_d_1():
    load, service_s = 0.6, 2 * STEP_S
    deployment = flat(max_active=1)
    run = simulate(
        deployment,
        drawn(deployment, mix(output=2), bursty(4000, load / service_s, 1.0, seed=1)),
        NoSpeculation,
        0,
    )
    waiting_s = load * service_s / (2 * (1 - load))  # Pollaczek and Khinchine
    assert run.mean_latency_s == pytest.approx(service_s + waiting_s, rel=0.05)


@pytest.mark.medium
@pytest.mark.parametrize(("hazard", "length"), [(0.5, 1), (0.8, 4), (0.95, 8)])
def test_at_batch_one_a_fixed_length_has_the_goodput_of_the_closed_form(hazard, length):
    deployment = flat(max_active=1)
    run = simulate(
        deployment,
        drawn(deployment, mix(hazard, output=2000), backlog(4)),
        lambda: FixedLength("a", length),
        0,
    )
    tokens_per_step = (1 - hazard ** (length + 1)) / (1 - hazard)
    goodput = tokens_per_step / (STEP_S + length * DRAFT_S)
    assert 8000 / run.end_s == pytest.approx(goodput, rel=0.03)


@pytest.mark.parametrize("policy", [NoSpeculation, RandomChoice, lambda: FixedLength("eagle", 3)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_request_ends_once_with_all_of_its_tokens(policy, replicas):
    deployment = replace(llama_8b_h100(), max_active=8, kv_tokens=20_000)
    workload = drawn(deployment, MIXED, bursty(80, 40.0, 3.0, 2))
    run = simulate(deployment, workload, policy, 0, replicas=replicas)
    assert np.isfinite(run.latency_s).all()
    assert (run.first_token_s > 0).all()
    assert (run.latency_s >= run.first_token_s).all()
    assert sum(step.emitted for step in run.steps) == workload.output_tokens.sum()
    assert sum(step.prefill_tokens for step in run.steps) == workload.prompt_tokens.sum()
    assert max(step.rows for step in run.steps) <= 8


def test_a_request_waits_until_there_is_kv_for_its_next_steps():
    deployment = flat(
        kv_tokens=16 * 5
    )  # a request needs (20 + 9) / 16 = 2 blocks at first, its newcomer 2 to spare for it
    run = simulate(deployment, drawn(deployment, mix(output=2), backlog(5)), NoSpeculation, 0)
    assert max(step.rows for step in run.steps) == 1
    assert run.preemptions == 0
    with pytest.raises(ValueError, match="kv_tokens=64"):
        simulate(flat(kv_tokens=64), drawn(deployment, mix(), backlog(1)), NoSpeculation, 0)


def test_when_kv_runs_out_the_latest_request_gives_way_and_is_resumed_by_another_prefill():
    deployment = flat(
        kv_tokens=16 * 16
    )  # two prompts fit, two whole texts of 20 + 150 + 9 tokens do not
    workload = drawn(deployment, mix(output=150), backlog(3))
    workload = replace(workload, max_tokens=workload.output_tokens)
    run = simulate(deployment, workload, lambda: FixedLength("a", 3), 0)
    assert run.preemptions > 0
    assert sum(step.emitted for step in run.steps) == 450
    assert sum(step.prefill_tokens for step in run.steps) > 60
    assert np.argsort(run.latency_s, kind="stable").tolist() == [
        0,
        1,
        2,
    ]  # the oldest always goes on


def test_a_step_carries_at_most_a_chunk_of_prompts_and_a_prompt_s_end_emits_its_first_token():
    deployment = flat(prefill_chunk_tokens=8)
    run = simulate(deployment, drawn(deployment, mix(output=3), backlog(2)), NoSpeculation, 0)
    assert [step.prefill_tokens for step in run.steps] == [8, 8, 8, 8, 8, 0, 0]
    assert run.first_token_s.tolist() == pytest.approx([3 * STEP_S, 5 * STEP_S])
    assert run.latency_s.tolist() == pytest.approx([5 * STEP_S, 7 * STEP_S])


@pytest.mark.medium
def test_the_same_seed_is_the_same_run_and_arms_share_requests_and_luck():
    deployment = llama_8b_h100()
    workload = drawn(deployment, MIXED, bursty(15, 5.0, 1.0, 0))

    def adaptive():
        return AdaptivePlanner(deployment.drafts, perturb(deployment.latency, 0.2, 0))

    runs = [simulate(deployment, workload, adaptive, 0) for _ in range(2)]
    assert runs[0].latency_s.tolist() == runs[1].latency_s.tolist()
    again = drawn(deployment, MIXED, bursty(15, 50.0, 1.0, 0))
    assert again.output_tokens.tolist() == workload.output_tokens.tolist()
    assert (again.acceptance.uniform == workload.acceptance.uniform).all()
    assert again.arrival_s * 10 == pytest.approx(workload.arrival_s)


def test_acceptance_is_as_often_as_its_hazard_says_and_falls_with_depth():
    what = mix(0.7, output=20_000, decay={"a": 0.9})
    acceptance = drawn(flat(), what, backlog(1)).acceptance
    position = np.arange(0, 19_000)
    zero = np.zeros(len(position), np.int64)
    accepted = acceptance.draw_accepted(zero, position, zero, np.full(len(position), 3), 0.0)
    hazards = [(accepted > j).sum() / (accepted >= j).sum() for j in range(3)]
    assert hazards == pytest.approx([0.7, 0.63, 0.567], abs=0.015)


def test_drift_moves_acceptance_between_its_knots():
    drift = Drift(np.array([1.0, 3.0]), np.array([[[0.0]], [[2.0]]]))
    assert [float(drift.at(now)[0, 0]) for now in (0.0, 1.0, 2.0, 3.0, 9.0)] == pytest.approx(
        [0.0, 0.0, 1.0, 2.0, 2.0]
    )


def test_a_step_costs_the_catch_up_of_its_rows_each_depth_once_and_speculation_once():
    curve = LatencyCurve(np.arange(101.0), 1.0)  # a second a token
    model = LatencyModel(curve, (curve, curve), 0.5, 0.25)
    draft, length, unseen = (np.array(c) for c in ([0, 0, 1, -1], [1, 3, 2, 0], [1, 2, 10, 1]))
    work = Work(draft, length, length, unseen, rows=4, context_tokens=0, prefill_tokens=7)
    parts = step_parts(model, work, ("a", "b"))
    assert parts == {"verify": 4 + 6 + 7, "overhead": 0.75, "draft:a": 3 + 1 + 1, "draft:b": 10 + 1}


@pytest.mark.parametrize("change_tokens", [1, 4, 16])
def test_passes_are_as_wide_as_the_engine_makes_them(change_tokens):
    simulated, real = PaddedWidth(change_tokens), engine.PassWidth(change_tokens)
    for tokens in np.random.default_rng(change_tokens).integers(1, 40, 2000).tolist():
        last = simulated.tokens
        changed = simulated.widen(tokens)
        assert simulated.tokens == real.of(tokens)
        assert changed == (simulated.tokens != last)


class Misread(AdaptivePlanner):
    """A planner that reads ``factor`` times the price of a change of width, and what it learns."""

    factor: float
    change_s: list[float]

    def read(self, seen):
        return replace(seen, change_tokens=int(seen.change_tokens * self.factor))

    def plan(self, view, *rest):
        return super().plan(self.read(view), *rest)

    def trim(self, view, *rest):
        return super().trim(self.read(view), *rest)

    def observe(self, outcome, *rest):
        after = super().observe(replace(outcome, view=self.read(outcome.view)), *rest)
        self.change_s.append(after.correction.change[0])
        return after


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_wrong_price_of_a_change_of_width_is_learnt_within_a_hundred_steps(factor):
    made = replace(deployments()["smollm2-cpu"], change_tokens=15, noise=0.05)
    drift = Drift.none(len(MIXED.categories), len(made.drafts))
    work = draw(MIXED, made.drafts, backlog(12), 3, made.k_max, 1.0, drift)
    policy = Misread(made.drafts, made.latency)
    policy.factor, policy.change_s = factor, []
    simulate_closed(made, work, policy, 3, 8)
    target = made.latency.target
    assert len(policy.change_s) > 100
    assert np.mean(policy.change_s[80:100]) == pytest.approx(target.at(31) - target.at(16), rel=0.3)


def test_what_is_read_is_off_by_at_most_the_error_and_still_monotone():
    true = llama_8b_h100().latency
    read = perturb(true, 0.2, seed=3)
    ratio = read.target.base_s / true.target.base_s
    assert 0.79 < ratio.min() < ratio.max() < 1.21
    assert ratio.std() > 0.01
    assert (np.diff(read.target.base_s) >= 0).all()
    assert perturb(true, 0.0, seed=3).target.base_s == pytest.approx(true.target.base_s)


def test_the_repaired_coefficients_have_no_negative_term_and_keep_the_fit():
    repaired = LLAMA_8B.repair()
    assert min(repaired.fixed, repaired.token, repaired.row, repaired.context) >= 0
    for rows, context, k in [(1, 512, 0), (8, 512, 3), (64, 1024, 5)]:
        cell = np.array([1, rows * (k + 1), rows, rows * context])
        published = cell @ [LLAMA_8B.fixed, LLAMA_8B.token, LLAMA_8B.row, LLAMA_8B.context]
        assert cell @ [
            repaired.fixed,
            repaired.token,
            repaired.row,
            repaired.context,
        ] == pytest.approx(published, rel=0.15)


def test_routers_spread_requests():
    assert least_outstanding([2, 0, 1], 5) == 1
    assert {least_outstanding([0, 0, 0], i) for i in range(3)} == {0, 1, 2}


def test_two_replicas_serve_a_backlog_in_half_the_time():
    deployment = flat(max_active=1)
    workload = drawn(deployment, mix(), backlog(20))
    ends = [
        simulate(deployment, workload, NoSpeculation, 0, replicas=replicas).end_s
        for replicas in (1, 2)
    ]
    assert ends[0] == pytest.approx(2 * ends[1])


def test_recorded_requests_keep_their_times_and_lengths():
    recorded = RequestLog(
        np.array([0.0, 5.0]), np.array([10, 30]), np.array([4, 6]), np.array([0, 0])
    )
    workload = drawn(flat(), mix(), recorded)
    run = simulate(flat(), workload, NoSpeculation, 0)
    assert workload.prompt_tokens.tolist() == [10, 30]
    assert run.latency_s.tolist() == pytest.approx(
        [4 * STEP_S, 6 * STEP_S]
    )  # idle time between them is skipped


@pytest.mark.medium
def test_the_oracle_plans_with_the_true_hazards():
    deployment = llama_8b_h100()
    workload = drawn(deployment, MIXED, bursty(15, 2.0, 1.0, 0))
    oracle = OraclePlanner(
        deployment.drafts, deployment.latency, workload.acceptance.hazard, PlannerConfig()
    )
    blind = simulate(
        deployment,
        workload,
        lambda: AdaptivePlanner(deployment.drafts, deployment.latency, PlannerConfig()),
        0,
    )
    assert (
        simulate(deployment, workload, lambda: oracle, 0).mean_latency_s
        < 1.001 * blind.mean_latency_s
    )


@pytest.mark.parametrize(
    "arm",
    [
        *(arm_of(name, "eagle", 3) for name in BASELINES),
        *("adaptive", "oracle", "bench.baselines.nightjar.Nightjar:draft=eagle:length=3"),
    ],
)
def test_every_arm_serves_a_small_load(arm):
    deployment = llama_8b_h100()
    workload = drawn(deployment, MIXED, bursty(8, 4.0, 1.0, 0))
    policy = make_policy(arm, deployment, MIXED, workload, deployment.latency, 0)
    assert np.isfinite(simulate(deployment, workload, lambda: policy, 0).latency_s).all()


@pytest.mark.medium
def test_where_chunks_limit_a_backlog_it_is_those_in_prefill_that_keep_steps_short():
    """Every step moves one chunk, whatever its other tokens: those only make it longer."""
    deployment = replace(llama_8b_h100(), prefill_chunk_tokens=512, max_active=32)
    workload = drawn(deployment, PREFILL_HEAVY, backlog(80))

    def throughput(policy):
        return simulate(deployment, workload, lambda: policy, 0).tokens_per_s

    known = deployment.drafts, deployment.latency, workload.acceptance.hazard
    heeding = throughput(OraclePlanner(*known, PlannerConfig()))
    assert heeding > 1.05 * throughput(NoSpeculation())
    heedless = throughput(OraclePlanner(*known, PlannerConfig(waiting_price=False)))
    assert heedless < 0.95 * heeding


@pytest.mark.parametrize("arm", ["nothing", "fixed:big:3", "fixed:eagle:x", "spin"])
def test_an_unknown_arm_is_refused(arm):
    deployment = llama_8b_h100()
    workload = drawn(deployment, MIXED, bursty(1, 4.0, 1.0, 0))
    with pytest.raises(ValueError, match=arm):
        make_policy(arm, deployment, MIXED, workload, deployment.latency, 0)


def test_a_draft_that_catches_up_is_scored_by_the_chains_that_it_would_have_made():
    """The next chain begins from each one's first mismatch, which the target repairs; all chains
    share the positions' random numbers.
    """
    deployment = llama_8b_h100()
    truth = draw(MIXED, deployment.drafts, backlog(3), 0, deployment.k_max, 1.0).acceptance
    chains, at = truth.score_chains(1, 0, 5, 40, deployment.k_max, 0.0), 5
    for accepted, scored in chains:
        alone = truth.draw_accepted(
            np.array([1]), np.array([at]), np.array([0]), np.array([scored]), 0.0
        )
        assert accepted == alone[0]
        at += accepted + 1
    assert len(chains) > 3
    assert at in (40, 41)


def test_a_model_s_catch_up_over_emitted_tokens_is_evidence():
    deployment = llama_8b_h100()
    workload = draw(CHAT, deployment.drafts, backlog(1), 0, deployment.k_max, 1.0)
    seen = []

    class LateSwitch(FixedLength):
        def plan(self, view, state, now, rng):
            late = len(view) and view.context[0] > workload.prompt_tokens[0] + 20
            return (super() if late else NoSpeculation()).plan(view, state, now, rng)

        def observe(self, outcome, state, now):
            seen.append(outcome)
            return state

    simulate(deployment, workload, lambda: LateSwitch("1b", 2), 0)
    informed = [outcome for outcome in seen if len(outcome.free.request)]
    assert len(informed) == 1
    assert (informed[0].free.draft == deployment.drafts.index("1b")).all()
    assert informed[0].free.accepted.sum() + len(informed[0].free.accepted) in (21, 22, 23)


@pytest.mark.parametrize("arm", [f"without:{part}" for part in WITHOUT])
def test_without_any_part_the_same_requests_are_served(arm):
    scenario = Scenario("made up", llama_70b_h100(), MIXED, rate_hz=20.0, requests=8)
    run = run_once(scenario, Task(arm, 0.5, 0))
    assert np.isfinite(run.latency_s).all()
    assert sum(step.accepted for step in run.steps) > 0


@pytest.mark.parametrize("arm", ["ucb", "without:everything", "spin:never"])
def test_an_arm_that_is_not_there_is_named(arm):
    deployment = llama_70b_h100()
    with pytest.raises(ValueError, match=f"there is no arm .{arm}.: there are none, fixed"):
        make_policy(arm, deployment, MIXED, None, deployment.latency, 0)


def test_confidences_hold_as_often_as_they_claim_and_tell_what_holds():
    workload = draw(MIXED, ("eagle", "1b"), backlog(400), 1, 8, 10.0)
    request = np.arange(400)
    none, draft = np.zeros(400, np.int64), np.zeros(400, np.int64)
    truth = workload.acceptance
    accepted = truth.draw_accepted(request, none, draft, none + 1, 0.0) > 0
    lead = []
    for telling in (0.0, 0.7, 2.0):
        claims = truth.confidence(request, none, draft, np.full(400, telling), 0.0)[:, 0]
        for low, high in ((0.0, 0.5), (0.5, 0.8), (0.8, 1.0)):
            inside = (claims >= low) & (claims < high)
            if inside.sum() > 40:
                assert accepted[inside].mean() == pytest.approx(claims[inside].mean(), abs=0.12)
        lead.append(claims[accepted].mean() - claims[~accepted].mean())
    assert lead[0] < lead[1] < lead[2]


class Trimmed(RandomChoice):
    """Keeps what it sees and learns, and verifies about half of what is drafted."""

    def __init__(self):
        super().__init__()
        self.seen, self.steps = None, []

    def plan(self, view, state, now, rng):
        plan, state = super().plan(view, state, now, rng)
        self.seen = view, plan, np.zeros(0)
        return plan, state

    def trim(self, view, plan, drafted, state):
        self.seen = view, plan, drafted.confidence
        return (plan.length + view.request % 2) // 2

    def observe(self, outcome, state, now):
        self.steps.append((*self.seen, outcome))
        return state


def test_a_simulated_step_teaches_what_the_server_s_log_of_it_would():
    made = replace(llama_8b_h100(), telling=(1.0, 0.5), showing=(0.0, 1.0))
    policy = Trimmed()
    simulate(made, draw(CHAT, made.drafts, backlog(6), 0, made.k_max, 10.0), lambda: policy, 0)
    failed_after = 0
    for view, plan, claims, outcome in policy.steps:
        log, rows, at = StepLog(view.drafts), outcome.rows, 0
        for row, length in enumerate(plan.length.tolist()):
            chain, end = None, at + length
            if length:
                name = view.drafts[plan.draft[row]]
                chain = Proposal.chain(name, range(1, length + 1), claims[at:end])
            accepted, emitted = int(rows.accepted[row]), int(rows.emitted[row])
            tokens = [*range(1, accepted + 1), *[99] * (emitted - accepted)]
            shown, at = view.evidence[row].tolist(), end
            verified, request = int(rows.verified[row]), int(view.request[row])
            log.record(request, chain, verified, tokens, sampled=False, evidence=shown)
        served = log.outcome()
        drafted = np.flatnonzero(plan.length)
        for name in ("length", "accepted", "emitted", "scored", "verified", "followed", "evidence"):
            column, theirs = getattr(rows, name), getattr(served.rows, name)
            assert column[drafted].tolist() == theirs[drafted].tolist()
        for name in ("row", "confidence", "accepted"):
            ours, theirs = getattr(outcome.nodes, name), getattr(served.nodes, name)
            assert ours.tolist() == theirs.tolist()
        failed_after += len(outcome.nodes.row) > 0 and bool(
            (~outcome.nodes.accepted[1:] & ~outcome.nodes.accepted[:-1]).any()
        )
    assert failed_after > 10


def test_drafts_show_as_much_as_the_deployment_says():
    lead = []
    for showing in (0.0, 0.7, 2.0):
        made = replace(llama_8b_h100(), showing=(0.0, showing), full_information=True)
        policy, shown, accepted = Trimmed(), [], []
        simulate(
            made,
            draw(CHAT, made.drafts, backlog(6), 0, made.k_max, 10.0),
            lambda policy=policy: policy,
            0,
        )
        for view, _, _, outcome in policy.steps:
            if not showing:
                assert view.evidence is outcome.rows.evidence is None
                continue
            assert not view.evidence[:, 0].any()
            assert ((view.evidence[:, 1] > 0) == (view.ceiling[:, 1] > 0)).all()
            informed = (outcome.free.evidence > 0) & (outcome.free.scored > 0)
            shown += outcome.free.evidence[informed].tolist()
            accepted += (outcome.free.accepted[informed] > 0).tolist()
        bins = [
            np.array(shown or [0, 0])[np.array(accepted or [0, 1]) == right] for right in (0, 1)
        ]
        lead.append(bins[1].mean() - bins[0].mean())
    assert lead[0] < lead[1] < lead[2]


def test_what_is_not_verified_is_not_accepted_and_costs_no_time():
    """A policy that verifies at most one node of what is drafted."""

    class Halved(FixedLength):
        def trim(self, view, plan, drafted, state):
            assert (np.diff(drafted.row) >= 0).all()
            return np.minimum(plan.length, 1)

    made = replace(llama_8b_h100(), noise=0.0)
    workload = draw(CHAT, made.drafts, backlog(4), 0, made.k_max, 10.0)
    runs = [
        simulate(made, workload, lambda policy=policy: policy("eagle", 4), 0)
        for policy in (FixedLength, Halved)
    ]
    assert all(step.accepted <= step.rows for step in runs[1].steps)
    assert max(step.accepted / max(step.rows, 1) for step in runs[0].steps) > 1
    first = [next(step for step in run.steps if step.rows == 4) for run in runs]
    target = made.latency.target
    assert first[0].seconds - first[1].seconds == pytest.approx(target.at(20) - target.at(8))
