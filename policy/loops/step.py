"""A step's choice, from what is seen and known: the problem, the search, perhaps a trial."""

from typing import NamedTuple

import numpy as np

from .acceptance import CONSTANTS, ESTIMATES, Constants, Estimates, set_hazards
from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, record
from .device import SUPPLY, Supply, best_for_batch, offer_of
from .problem import BATCH, LIMITS, Limits, StepProblem, ViewRows, build, node_s, score
from .search import best_priced
from .times import TIMES, VERIFY, Times, change_left_s, verify_s
from .trials import find_trial
from .trim import COUNTS, KINDS, PLACES, Counts, TrimShares, expect_kept, kind_of


class Knowledge(NamedTuple):
    """The planner's learned state."""

    estimates: Estimates
    constants: Constants
    counts: Counts
    hazard: Floats
    """[K, D, N] instead of what the evidence says, by ``Batch.rows``; empty: none."""
    supply: Supply


KNOWN = record(Knowledge, ESTIMATES, CONSTANTS, COUNTS, FLOATS[3], SUPPLY)


class Mode(NamedTuple):
    """How a step is planned; 1 is yes, 0 no."""

    goodput: float
    """The step before's, in tokens per second without prefill; 0: unknown."""
    waits: int
    """Whether the price of time counts the requests in prefill, which wait for the step."""
    explore_share: float
    credit_s: float
    """Time saved for trials."""
    next_trial_s: float
    """The credit at which a trial is looked for again."""
    optimism: float
    reads_unread: int
    """Whether a draft that catches up is scored on what it reads."""


MODE = record(Mode, FLOATS[0], INTS[0], *[FLOATS[0]] * 4, INTS[0])
_LOOK_STEPS = 16  # steps between looks for a trial: one takes as long as the search
_FIRST_STEPS = 2.0  # steps of credit to begin with: nothing is known yet
_IDLE_SHARES = 5.0  # of a step without speculation, where only a trial can show that it pays


class StepChoice(NamedTuple):
    """The choice for a batch, its drafts and lengths apart."""

    price: float
    goodput: float
    value: float
    """Expected tokens."""
    step_s: float
    gain: float
    """Goodput over that without speculation; 0: nothing decodes."""
    credit_s: float
    next_trial_s: float
    trial: int
    """Rows that try something."""
    nodes: int
    """As ``policy.plan.Plan``."""


@helper
def evidence_of(batch: ViewRows) -> Ints:
    """Return the evidence [N, D] of the rows of a batch, in its order."""
    evidence = np.empty(batch.ceiling.shape, np.int64)
    for i in range(len(batch.rows)):
        evidence[i] = batch.evidence[batch.rows[i]]
    return evidence


@helper
def _hazards(knowledge: Knowledge, batch: ViewRows, k_max: int) -> Floats:
    """Return the hazards [K, D, N] of whole proposals."""
    hazard = np.empty((k_max, batch.ceiling.shape[1], len(batch.rows)))
    if knowledge.hazard.size:
        hazard[:] = knowledge.hazard
    else:
        set_hazards(knowledge.estimates, batch.slot, evidence_of(batch), hazard)
    return hazard


@entry(TIMES, KNOWN, BATCH, INTS[0], FLOATS[0])
def expect(
    times: Times, knowledge: Knowledge, batch: ViewRows, k_max: int, price: float
) -> tuple[Floats, Floats]:
    """Return what is expected of the rows of a batch at about this price, [K, D, N] each: the
    hazards of what the trim leaves of proposals, and the nodes that it leaves at each place.
    """
    b = batch
    everyone, drafts = b.ceiling.shape
    hazard = _hazards(knowledge, b, k_max)
    nodes = np.empty((k_max, drafts, everyone))
    of_columns = np.empty((4, len(knowledge.counts.nodes), 2, KINDS, PLACES))
    shares = TrimShares(of_columns[0], of_columns[1], of_columns[2], of_columns[3])
    is_known = np.zeros(of_columns.shape[1:4], np.int64)
    context = 0
    for i in range(everyone):
        context += b.context[i]
    mean = context / max(everyone, 1)
    cost = price * (node_s(times, everyone) + times.factor[VERIFY] * times.node_context_s * mean)
    for i in range(everyone):
        first = max(knowledge.estimates.tenant[b.slot[i]], 0) * drafts
        is_sampled = b.sampled[b.rows[i]] if len(b.sampled) else 0
        for d in range(drafts):
            at = first + d, is_sampled, kind_of(hazard[0, d, i]) if k_max else 0
            if not is_known[at]:
                is_known[at] = 1
                expect_kept(knowledge.counts, *at, cost, shares)
            reached, path = 1.0, 1.0
            for j in range(k_max):
                place = min(j, PLACES - 1)
                share = shares.accepted[at][place]
                hazard[j, d, i] = min(hazard[j, d, i] * share * path, 1.0)
                nodes[j, d, i] = reached * shares.nodes[at][place]
                path = shares.path[at][place] / share
                reached *= shares.reached[at][place]
    return hazard, nodes


@helper
def _unread(knowledge: Knowledge, batch: ViewRows, members: Ints, reads: int) -> Ints:
    """Return the tokens [D, n] emitted without each draft that its catch-up reads."""
    n, drafts = len(members), batch.ceiling.shape[1]
    unread = np.zeros((drafts, n), np.int64)
    if reads:
        for place in range(n):
            i = members[place]
            emitted = int(knowledge.estimates.request_tokens[batch.slot[i]])
            for d in range(drafts):
                unread[d, place] = min(batch.catchup[batch.rows[i], d] - 1, emitted)
    return unread


@helper
def _choose_for_all(
    times: Times,
    batch: ViewRows,
    knowledge: Knowledge,
    problem: StepProblem,
    members: Ints,  # [n]
    goodput: float,
    waiting: float,
    prefill_s: float,
    draft: Ints,  # [n]
    length: Ints,  # [n]
) -> tuple[float, float, float, float, int]:
    """Choose one draft, depth and number of nodes for the ``chosen`` rows, into ``draft, length``.
    Return price, goodput, expected tokens, the step's seconds and the nodes of the batch.
    """
    b, n, drafts = batch, len(members), batch.ceiling.shape[1]
    column, is_sampled = np.empty(n, np.int64), np.zeros(n, np.int64)
    k_max = problem.gain.shape[0]
    every = _hazards(knowledge, b, k_max)
    hazard, context, fixed = np.empty((k_max, drafts, n)), 0, 0
    for place in range(n):
        i = members[place]
        column[place] = max(knowledge.estimates.tenant[b.slot[i]], 0) * drafts
        if len(b.sampled):
            is_sampled[place] = b.sampled[b.rows[i]]
        context += b.context[b.rows[i]]
        hazard[:, :, place] = every[:, :, i]
    offer = offer_of(
        knowledge.supply, knowledge.counts, column, is_sampled, problem.ceiling, hazard
    )
    price, goodput, best = best_for_batch(
        times, problem, offer, context, goodput, waiting, prefill_s
    )
    for place in range(n):
        length[place] = min(best.depth, problem.ceiling[best.draft, place]) if best.depth else 0
        draft[place] = best.draft if length[place] else -1
    for row in range(len(b.control_length)):
        fixed += max(b.control_length[row], 0)
    nodes = best.nodes + fixed if best.depth else 0
    return price, goodput, best.value, best.step_s, nodes


@entry(TIMES, BATCH, LIMITS, KNOWN, MODE, INTS[1], INTS[1])
def choose(
    times: Times,
    batch: ViewRows,
    limits: Limits,
    knowledge: Knowledge,
    mode: Mode,
    draft: Ints,  # [N]
    length: Ints,  # [N]
) -> tuple[float, float, float, float, float, float, float, int, int]:
    """Choose for a batch, into ``draft, length`` in the view's order. Returns ``StepChoice``."""
    b, m = batch, mode
    draft[:] = -1
    length[:] = 0
    everyone = len(b.rows)
    waiting = 1 + b.prefilling / max(everyone, 1) if m.waits else 1.0
    known_goodput = m.goodput if m.goodput else everyone / max(verify_s(times, everyone), 1e-12)
    hazard, nodes = expect(times, knowledge, b, limits.k_max, waiting * known_goodput)
    problem, members, prefill_s = build(times, b, limits, hazard, nodes)
    n = len(members)
    drafts, lengths = np.empty(n, np.int64), np.empty(n, np.int64)
    waited_s, verified = prefill_s if m.waits else 0.0, 0
    if limits.whole_batch:
        price, goodput, value, step_s, verified = _choose_for_all(
            times, b, knowledge, problem, members, m.goodput, waiting, waited_s, drafts, lengths
        )
    else:
        price, goodput, value, _, step_s = best_priced(
            problem, m.goodput, waiting, waited_s, drafts, lengths
        )
    gain = 0.0
    if problem.base_value:
        gain = goodput * (problem.undrafted_s[0] - prefill_s) / problem.base_value
    others = max(b.ceiling.shape[1] - 1, 1)
    share = m.explore_share * (others if lengths.sum() else _IDLE_SHARES)
    credit_s, next_trial_s = m.credit_s + share * step_s, m.next_trial_s
    if not m.goodput and m.explore_share:
        credit_s += _FIRST_STEPS * step_s
    trying = 0
    if m.explore_share and problem.gain.size and credit_s >= next_trial_s:
        slot, evidence = b.slot[members], evidence_of(b)[members]
        hazards = np.empty((limits.k_max, b.ceiling.shape[1], n))
        for place in range(n):
            hazards[:, :, place] = hazard[:, :, members[place]]
        unread = _unread(knowledge, b, members, m.reads_unread)
        planned_s, count = step_s, np.empty(problem.occupied.shape, np.int64)
        before, _, before_s = score(problem, drafts, lengths, count)
        trying, cost_s, after, after_s, pays = find_trial(
            problem, knowledge.estimates, knowledge.constants, slot, evidence, hazards, unread,
            m.optimism, price, credit_s, before, before_s, drafts, lengths,
        )  # fmt: skip
        value, step_s = value + after - before, step_s + after_s - before_s
        credit_s = credit_s - cost_s if trying else min(credit_s, max(cost_s, planned_s))
        affords_more = trying and pays and credit_s >= cost_s  # what pays need not wait
        next_trial_s = credit_s + (1 if affords_more else _LOOK_STEPS) * share * planned_s
    for place in range(n):
        i = members[place]
        draft[b.rows[i]], length[b.rows[i]] = drafts[place], lengths[place]
    fixed = np.maximum(b.control_length, 0).sum()
    tokens = b.prefill_tokens + everyone + fixed + lengths.sum()
    step_s += change_left_s(times, tokens, b.pass_tokens, b.change_tokens)
    return price, goodput, value, step_s, gain, credit_s, next_trial_s, trying, verified
