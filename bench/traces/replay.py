"""One policy over the traces: continuous batching with every slot full, step by step.

A policy sees what a server's would: ceilings, contexts, what a draft has not read, what the
look-up's match shows. It learns what was accepted, and how look-ups that were not used would have
fared. Prompts take no time, for all policies alike; a request is limited to ``LIMIT`` tokens, which
says nothing of where it ends.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Any

import numpy as np

from backend.sequence import DEFAULT_CONFIDENCE
from bench.traces.costs import DRAFTS, EAGLE, SUFFIX, Costs
from bench.traces.world import DEEPEST, World
from policy.evidence import share_evidence
from policy.plan import (
    NO_DRAFT,
    AnyPolicy,
    DraftNodes,
    FloatArray,
    FreeChains,
    IntArray,
    Outcome,
    Plan,
    Policy,
    StepNodes,
    StepRows,
    StepTimes,
    View,
)
from policy.simulation.deployment import Work

LIMIT = 1 << 14
"""Tokens that a request may emit."""
MEASURED = "measured"
"""As ``planning``: the CPU time of plan, trim and observe."""
HEAD_TOKENS, LOOKUP_TOKENS = 8, 16


class HindsightPolicy(Policy[None]):
    """A choice that knows what would be accepted."""

    @abstractmethod
    def choose_known(self, accepted: IntArray, view: View) -> Plan:
        """Choose by what each draft would have accepted, int64[n, drafts], at most its ceiling."""
        ...

    def plan(self, view: View, state: None, now: float, rng: np.random.Generator) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class ReplayOptions:
    """How a policy is run."""

    drafts: tuple[str, ...] = DRAFTS
    """The columns of the view."""
    looks: bool | None = True
    """Whether a look-up is charged in every step, used or not; None: if the policy uses any in the
    run. Without the look-up among the drafts it never is.
    """
    head_tokens: int = HEAD_TOKENS
    """The most that the head proposes."""
    lookup_tokens: int = LOOKUP_TOKENS
    """The most that the look-up proposes, up to ``DEEPEST``."""
    head_claims: FloatArray | None = None
    """[positions, head_tokens] the head's confidence in each path (``made_up``); None: it tells
    none.
    """
    least_confidence: float = 0.0
    """The head goes on, as deep for all of its rows, while the mean confidence of their paths is at
    least this, however long the plan is; 0: it is as long as the plan says.
    """
    evidence: bool = True
    """Whether views and outcomes say what the look-up's match shows."""
    planning: float | str = 0.0
    """Seconds that are charged for each step, or ``MEASURED``."""
    begin: int = 1
    """The first token that a step emits. The prompt's pass emits token 0, where the head of these
    traces never has a token accepted.
    """
    seed: int = 1
    """Seed of what the policy draws."""


@dataclass
class ReplayRun:
    """A run's record, by step."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Emitted."""
    nodes: list[int] = field(default_factory=list)
    """Verified."""
    drafting: list[IntArray] = field(default_factory=list)
    """[drafts] rows that each proposed for."""
    planning_s: list[float] = field(default_factory=list)
    """CPU time of plan, trim and observe."""
    state: Any = None
    """The policy's, at the end."""

    @property
    def speed(self) -> float:
        """Return the tokens per second."""
        return sum(self.tokens) / sum(self.seconds)


def made_up(world: World, quality: float, seed: int = 5) -> FloatArray:
    """Return a made-up confidence of the head in its paths, [positions, HEAD_TOKENS]: it sees,
    through noise, whether each token is accepted.

    As ``policy.simulation.workload.Acceptance.confidence``: the logit of the depth's mean hazard
    plus 2 q x, where x is normal around q (accepted) or -q. A quality q of 0 tells no more than the
    depth; one of 0.7 ranks the accepted token of a pair above the other in 84 of 100.
    """
    rng, depth = np.random.default_rng(seed), np.arange(HEAD_TOKENS)
    holds = world.eagle[:, None] > depth
    reached = world.eagle[:, None] >= depth
    hazard = holds.sum(0) / np.maximum(reached.sum(0), 1)
    hazard = hazard.clip(1e-3, 1 - 1e-3)
    # after a token that is not accepted the head goes on, as sure as it is: by its hazard
    holds |= ~reached & (rng.random(holds.shape) < hazard)
    x = np.where(holds, quality, -quality) + rng.standard_normal(holds.shape)
    logit = np.log(hazard / (1 - hazard)) + 2 * quality * x
    paths: FloatArray = (1 / (1 + np.exp(-logit))).cumprod(1)
    return paths


def run(
    world: World,
    order: IntArray,
    in_flight: int,
    policy: AnyPolicy,
    costs: Costs,
    options: ReplayOptions | None = None,
    state: Any = None,
) -> ReplayRun:
    """Run requests, in order, until a slot stays empty. ``state`` is the policy's to begin with;
    None: what it starts with.
    """
    options = options or ReplayOptions()
    if options.looks is None and SUFFIX in options.drafts:
        ran = run(world, order, in_flight, policy, costs, replace(options, looks=False), state)
        if not np.sum(ran.drafting, 0)[options.drafts.index(SUFFIX)]:
            return ran
    replay = _Replay(world, order, in_flight, policy, costs, options, state)
    while replay.fill():
        replay.step()
    return replay.ran


@dataclass(slots=True)
class _ReplayedStep:
    """The work of a step: by row, where the texts are, the plan, and what becomes of it."""

    at: IntArray  # [n]
    view: View
    plan: Plan
    claims: FloatArray  # [n, K], of the chosen draft
    accepts: IntArray
    """[n] tokens of the chosen draft's chain that would be accepted."""
    verified: IntArray  # [n]
    emitted: IntArray  # [n]


class _Replay:
    def __init__(
        self,
        world: World,
        order: IntArray,
        in_flight: int,
        policy: AnyPolicy,
        costs: Costs,
        options: ReplayOptions,
        state: Any,
    ) -> None:
        self._world, self._policy, self._costs, self._options = world, policy, costs, options
        self.ran = ReplayRun(state=policy.start() if state is None else state)
        self._queue, self._next_id, self._now = order.tolist()[::-1], 1, 0.0
        self._rng = np.random.default_rng(options.seed)
        self._request, self._id, self._position, self._cached = np.zeros((4, in_flight), np.int64)
        self._empty = np.ones(in_flight, np.bool_)
        self._rows = np.arange(in_flight)
        drafts, tokens = options.drafts, {EAGLE: options.head_tokens, SUFFIX: options.lookup_tokens}
        self._model = costs.model(drafts)
        self._free = np.array([name == SUFFIX for name in drafts], np.bool_)
        self._most = np.array([tokens[name] for name in drafts], np.int64)
        self._depth = np.arange(max(self._most.max(initial=0), 1))
        self._accepts = np.stack([getattr(world, name) for name in drafts], 1)
        self._evidence = self._claims = None
        if options.evidence:
            evidence = {EAGLE: np.zeros_like(world.evidence), SUFFIX: world.evidence}
            self._evidence = share_evidence(np.stack([evidence[name] for name in drafts], 1))
        untold = DEFAULT_CONFIDENCE ** np.arange(1, DEEPEST + 1)
        self._head_claims = np.broadcast_to(untold, (len(world.eagle), DEEPEST))
        if options.head_claims is not None:
            wider = ((0, 0), (0, DEEPEST - options.head_claims.shape[1]))
            self._head_claims = np.pad(options.head_claims, wider)
        kind = type(policy)
        self._trims = kind.trim is not Policy.trim
        self._learns = kind.observe is not Policy.observe
        self._learning_s = 0.0

    def fill(self) -> bool:
        """Give every empty slot the next request; return whether there were enough."""
        for slot in np.flatnonzero(self._empty).tolist():
            if not self._queue:
                return False
            request, begin = self._queue.pop(), self._options.begin
            # the head reads the prompt in the prompt's pass
            self._request[slot], self._id[slot] = request, self._next_id
            self._position[slot], self._cached[slot] = begin, self._world.prompt[request] + begin
            self._next_id += 1
        return True

    def step(self) -> None:
        """Plan and run one step."""
        view, at = self._view()
        began_s = thread_time()
        plan = self._plan(view, at)
        planned_s = thread_time() - began_s
        draft = np.maximum(plan.draft, 0)
        claims, accepts = self._of_drafts(at, draft)
        verified, trimmed_s = self._trim(view, plan, claims)
        accepted = np.minimum(np.minimum(accepts, plan.length), verified)
        remaining = self._world.size[self._request] - self._position
        emitted = np.minimum(accepted + 1, remaining)
        step = _ReplayedStep(at, view, plan, claims, accepts, verified, emitted)
        times = self._times(step, planned_s + trimmed_s)
        over = emitted >= remaining
        self._now += times.measured_s
        learnt_s = self._learn(step, times, over)
        self._note(step, times, planned_s + trimmed_s + learnt_s)
        is_drafting = (plan.length > 0) & ~self._free[draft]
        # the last proposed token is never read by its draft
        read = np.minimum(accepted, plan.length - 1)
        self._cached = np.where(is_drafting, view.context + read, self._cached)
        self._position, self._empty = self._position + emitted, over

    def _view(self) -> tuple[View, IntArray]:
        """Return what the policy sees, and where each row is in the flat arrays."""
        world, position = self._world, self._position
        at, context = world.at[self._request] + position, world.prompt[self._request] + position
        ceiling = np.minimum(self._most, (LIMIT - 1 - position)[:, None])
        ceiling = np.where(self._free & (world.evidence[at] == 0)[:, None], 0, ceiling)
        catchup = np.where(self._free, 0, (context - self._cached)[:, None])
        evidence = None if self._evidence is None else self._evidence[at]
        columns = self._id.copy(), context, LIMIT - position, ceiling, catchup
        return View(self._options.drafts, *columns, evidence=evidence), at

    def _plan(self, view: View, at: IntArray) -> Plan:
        policy = self._policy
        if isinstance(policy, HindsightPolicy):
            return policy.choose_known(np.minimum(self._accepts[at], view.ceiling), view)
        plan, self.ran.state = policy.plan(view, self.ran.state, self._now, self._rng)
        return self._going_on(plan, view, at) if self._options.least_confidence else plan

    def _going_on(self, plan: Plan, view: View, at: IntArray) -> Plan:
        """Return the plan whose head stopped by itself (``ReplayOptions.least_confidence``)."""
        draft = np.maximum(plan.draft, 0)
        heads = (plan.length > 0) & ~self._free[draft]
        if not heads.any():
            return plan
        paths = self._head_claims[at[heads]].mean(0)
        depth = 1 + int((paths >= self._options.least_confidence).cumprod().sum())
        most = view.ceiling[self._rows, draft]
        return replace(plan, length=np.where(heads, np.minimum(depth, most), plan.length))

    def _of_drafts(self, at: IntArray, draft: IntArray) -> tuple[FloatArray, IntArray]:
        """Return what the chosen drafts claim of their paths, and what would be accepted."""
        width, free = len(self._depth), self._free[draft]
        claims = np.where(free[:, None], self._world.claims[at], self._head_claims[at])[:, :width]
        return claims, self._accepts[at, draft]

    def _trim(self, view: View, plan: Plan, claims: FloatArray) -> tuple[IntArray, float]:
        """Return how many tokens of each row's chain are verified, and the seconds it took."""
        length = plan.length
        if not self._trims or not length.any():
            return length, 0.0
        row = self._rows.repeat(length)
        paths = claims[self._depth < length[:, None]].astype(np.float64)
        drafted = DraftNodes(row, plan.draft[row], paths, np.zeros(len(row), np.bool_))
        began_s = thread_time()
        nodes = self._policy.trim(view, plan, drafted, self.ran.state)
        return np.minimum(nodes, length), thread_time() - began_s

    def _times(self, step: _ReplayedStep, planned_s: float) -> StepTimes:
        """Return the step's seconds by part, with what planning is charged."""
        plan, n = step.plan, len(self._rows)
        context = int(step.view.context.sum())
        work = Work(
            plan.draft,
            plan.length,
            step.verified,
            step.view.catchup[self._rows, np.maximum(plan.draft, 0)],
            rows=n,
            context_tokens=context,
            free_rows={int(d): n for d in np.flatnonzero(self._free)},
        )
        nodes_context = int(step.verified @ step.view.context)
        parts = self._costs.parts_s(work, nodes_context, self._model, self._options.drafts)
        if self._options.looks is False and SUFFIX in self._options.drafts:
            parts[f"draft:{SUFFIX}"] = 0.0
        measured = self._options.planning == MEASURED
        planning_s = planned_s if measured else float(self._options.planning)
        learning_s = self._learning_s if measured else 0.0
        host_s = {"planning": planning_s, "learning": learning_s}
        parts["overhead"] += planning_s + learning_s
        return StepTimes(sum(parts.values()), parts | host_s)

    def _learn(self, step: _ReplayedStep, times: StepTimes, over: IntArray) -> float:
        """Let the policy learn the step; return the seconds it took."""
        if not self._learns:
            return 0.0
        outcome = self._outcome(step, times, over)
        began_s = thread_time()
        self.ran.state = self._policy.observe(outcome, self.ran.state, self._now)
        self._learning_s = thread_time() - began_s
        return self._learning_s

    def _outcome(self, step: _ReplayedStep, times: StepTimes, over: IntArray) -> Outcome:
        """Return what ``backend.speculation.step_log`` would."""
        plan, view, emitted, depth = step.plan, step.view, step.emitted, self._depth
        length, verified = plan.length, step.verified
        matched = np.minimum(step.accepts, length)
        # after a rejection every node fails; after the last token that was emitted nothing is known
        is_evidence = (depth < length[:, None]) & (depth <= verified[:, None])
        is_evidence &= (matched < emitted)[:, None] | (depth < emitted[:, None])
        node = np.nonzero(is_evidence)[0]
        evidence = None
        if view.evidence is not None:
            evidence = np.where(plan.draft >= 0, view.evidence[self._rows, plan.draft], 0)
        rows = StepRows(
            request=view.request,
            draft=np.where(length > 0, plan.draft, NO_DRAFT),
            length=length,
            accepted=np.minimum(matched, emitted),
            emitted=emitted,
            scored=np.minimum(emitted, length),
            verified=verified,
            followed=np.minimum(np.minimum(matched, verified), emitted),
            evidence=evidence,
        )
        nodes = StepNodes(
            row=node,
            confidence=step.claims[is_evidence].astype(np.float64),
            sampled=np.zeros(len(node), np.bool_),
            accepted=(depth < matched[:, None])[is_evidence],
        )
        ended = view.request[over.nonzero()[0]]
        return Outcome(
            rows, times, self._unused_lookups(step), nodes, finished=ended, view=view, plan=plan
        )

    def _unused_lookups(self, step: _ReplayedStep) -> FreeChains:
        """Return the look-ups that were not used, against what was emitted instead."""
        view = step.view
        draft_in_use = np.where(step.plan.length > 0, step.plan.draft, NO_DRAFT)
        unused = np.arange(len(self._free)) != draft_in_use[:, None]
        row, draft = np.nonzero(self._free & unused & (view.ceiling > 0))
        scored = np.minimum(view.ceiling[row, draft], step.emitted[row])
        accepted = np.minimum(self._accepts[step.at[row], draft], scored)
        evidence = None if view.evidence is None else view.evidence[row, draft]
        return FreeChains(view.request[row], draft, accepted, scored, evidence)

    def _note(self, step: _ReplayedStep, times: StepTimes, planning_s: float) -> None:
        draft, drafts = step.plan.draft[step.plan.length > 0], len(self._free)
        self.ran.seconds.append(times.measured_s)
        self.ran.tokens.append(int(step.emitted.sum()))
        self.ran.nodes.append(int(step.verified.sum()))
        self.ran.drafting.append(np.bincount(draft, minlength=drafts))
        self.ran.planning_s.append(planning_s)
