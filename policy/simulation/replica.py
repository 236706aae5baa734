"""One simulated server: admission, chunked prefill, and steps whose View, Plan and Outcome are
those of the real loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policy.plan import (
    AnyPolicy,
    DraftNodes,
    FloatArray,
    FreeChains,
    IntArray,
    Outcome,
    Plan,
    StepNodes,
    StepRows,
    StepTimes,
    View,
)

from .deployment import BLOCK_TOKENS, Deployment, PaddedWidth, Work, blocks, step_time
from .workload import Workload

_NONE = np.zeros(0, np.int64)
# The most tokens that a draft in use has to read: after a chain accepted whole, its last and the
# bonus token.
_READ_TOKENS = 2
_SPARE_BLOCKS = 2  # for every active request, else the newcomer would be pre-empted at once


class StepRecord(NamedTuple):
    """A step as it is remembered: begin and duration, decoding rows, proposed, accepted, emitted
    and prompt tokens, requests waiting.
    """

    start_s: float
    seconds: float
    rows: int
    proposed: int
    accepted: int
    emitted: int
    prefill_tokens: int
    queued: int
    verified: int
    """Nodes that the target verified."""
    drafted: int
    """Tokens that drafts with a model proposed."""


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of all requests so far, shared by the replicas: tokens emitted, tokens that
    each draft has seen, and times.
    """

    emitted: IntArray  # [N]
    read_tokens: IntArray  # [N, D]
    first_token_s: FloatArray  # [N]
    finish_s: FloatArray  # [N]

    @classmethod
    def of(cls, requests: int, drafts: int) -> Progress:
        """Return the state before anything has happened."""
        unknown = np.full(requests, np.nan)
        return cls(
            np.zeros(requests, np.int64),
            np.zeros((requests, drafts), np.int64),
            unknown,
            unknown.copy(),
        )


class _Pending(NamedTuple):
    """A step in progress: what it will have done when it ends, and for which decoding rows it was
    planned.
    """

    outcome: Outcome
    rows: IntArray  # [n]
    plan: Plan


@dataclass(slots=True)
class _Prefill:
    request: int
    tokens: int
    done_tokens: int = 0


class SimulatedReplica:
    """A server's loop. ``advance`` ends the step in progress and begins the next; between two calls
    time stands still for it.
    """

    def __init__(
        self,
        deployment: Deployment,
        workload: Workload,
        progress: Progress,
        policy: AnyPolicy,
        seed: int,
        record: Callable[[StepRecord], None],
    ) -> None:
        self._deployment, self._workload, self._progress = deployment, workload, progress
        self._policy, self._state = policy, policy.start()
        self._policy_rng, self._noise_rng = (
            np.random.default_rng([seed, 6]),
            np.random.default_rng([seed, 7]),
        )
        self._record = record
        self._queue: deque[int] = deque()
        self._prefill: list[_Prefill] = []
        self._rows = _NONE
        self._pending: _Pending | None = None
        self._blocks = deployment.kv_tokens // BLOCK_TOKENS
        self._plans = bool(policy.drift(self._state))
        self._telling = np.array(deployment.telling or (0.0,) * len(deployment.drafts))
        self._showing = np.array(deployment.showing)
        self._all_found = bool((workload.acceptance.match_rate == 1).all())
        self._free = np.array(deployment.free, np.bool_)
        self._scored = self._free | deployment.full_information
        self._width = PaddedWidth(deployment.change_tokens)
        self.outstanding = 0
        self.preemptions = 0

    def offer(self, request: int) -> None:
        """Take a request. Raises ValueError for one that could never hold its KV."""
        life_tokens = (
            self._workload.prompt_tokens[request]
            + self._workload.max_tokens[request]
            + self._deployment.k_max
            + 1
        )
        if blocks(life_tokens) > self._blocks:
            raise ValueError(
                f"request {request} may need {life_tokens} tokens of KV, more than "
                f"kv_tokens={self._deployment.kv_tokens}"
            )
        self.outstanding += 1
        self._queue.append(request)

    def advance(self, now: float) -> float | None:
        """End the step in progress at ``now`` and begin the next; return when that ends, or None
        when there is nothing to do.
        """
        if self._pending is not None:
            self._end(self._pending, now)
        self._make_room()
        self._admit()
        if not len(self._rows) and not self._prefill:
            return None
        self._pending = self._begin(now)
        return now + self._pending.outcome.times.measured_s

    # -- begin

    def _blocks_of(self, request: IntArray) -> IntArray:
        """Return the KV blocks that requests need for their next step, int64[n]."""
        tokens = self._workload.prompt_tokens[request] + self._progress.emitted[request]
        return blocks(tokens + self._deployment.k_max + 1)

    def _active(self) -> IntArray:
        return np.concatenate(
            [self._rows, np.array([prefill.request for prefill in self._prefill], np.int64)]
        )

    def _make_room(self) -> None:
        """Pre-empt the latest requests while KV runs out: each becomes the first to wait, and its
        prompt and text are prefilled again.
        """
        active = np.sort(self._active())
        blocks = np.cumsum(self._blocks_of(active))
        for request in active[blocks > self._blocks][::-1].tolist():
            self._rows = self._rows[self._rows != request]
            self._prefill = [prefill for prefill in self._prefill if prefill.request != request]
            self._progress.read_tokens[request] = 0
            self._queue.appendleft(request)
            self.preemptions += 1

    def _admit(self) -> None:
        active = self._active()
        free = self._blocks - int(self._blocks_of(active).sum())
        count = len(active)
        while self._queue and count < self._deployment.max_active:
            request = self._queue[0]
            need = int(self._blocks_of(np.array([request]))[0])
            if need + _SPARE_BLOCKS * count > free:
                return  # the head waits, as in the real server
            free -= need
            count += 1
            prompt = int(self._workload.prompt_tokens[request] + self._progress.emitted[request])
            self._prefill.append(_Prefill(self._queue.popleft(), prompt))

    def _chunks(self) -> tuple[list[int], int, int, int]:
        """Return the requests whose prompts this step ends, and its prompt tokens, rows and their
        contexts.
        """
        budget, rows, context, done = self._deployment.prefill_chunk_tokens, 0, 0, []
        for prefill in self._prefill:
            chunk = min(prefill.tokens - prefill.done_tokens, budget)
            if chunk == 0:
                break
            context += prefill.done_tokens
            prefill.done_tokens += chunk
            budget -= chunk
            rows += 1
            if prefill.done_tokens == prefill.tokens:
                done.append(prefill.request)
        return done, self._deployment.prefill_chunk_tokens - budget, rows, context

    def _view(self, prefill_tokens: int, now: float) -> View:
        rows, workload, progress = self._rows, self._workload, self._progress
        emitted = progress.emitted[rows]
        context = workload.prompt_tokens[rows] + emitted
        remaining = workload.max_tokens[rows] - emitted
        ceiling = np.repeat(
            np.minimum(self._deployment.k_max, remaining - 1)[:, None], len(self._free), axis=1
        )
        if not self._all_found:
            ceiling = np.where(workload.acceptance.has_match(rows, emitted), ceiling, 0)
        catchup = np.where(self._free, 0, context[:, None] - progress.read_tokens[rows])
        names = self._deployment.drafts
        tenant = None if workload.tenant is None else workload.tenant[rows]
        columns = rows, context, remaining, ceiling, catchup
        prefill = prefill_tokens, len(self._prefill)
        evidence = None
        if self._showing.any():
            bins = workload.acceptance.evidence(rows, emitted, self._showing, now)
            evidence = np.where(ceiling > 0, bins, 0)
        return View(
            names,
            *columns,
            *prefill,
            tenant=tenant,
            evidence=evidence,
            pass_tokens=self._width.tokens,
            change_tokens=self._width.change_tokens,
        )

    def _begin(self, now: float) -> _Pending:
        ended, prefill_tokens, prefill_rows, prefill_context = self._chunks()
        view = self._view(prefill_tokens, now)
        plan, self._state = self._policy.plan(view, self._state, now, self._policy_rng)
        n = len(view)
        draft = np.where(plan.draft >= 0, plan.draft, 0)
        verified, confidence = self._trim(view, plan, now)
        free = np.flatnonzero(self._free).tolist() if n else []
        free_rows = {d: int((view.ceiling[:, d] > 0).sum()) for d in free}
        work = Work(
            plan.draft,
            plan.length,
            verified,
            view.catchup[np.arange(n), draft] if view.drafts else plan.length,
            rows=n + prefill_rows,
            context_tokens=int(view.context.sum()) + prefill_context,
            prefill_tokens=prefill_tokens,
            free_rows={d: rows for d, rows in free_rows.items() if rows},
        )
        noise = float(np.exp(self._deployment.noise * self._noise_rng.standard_normal()))
        parts_s = step_time(self._deployment, view, work, self._width)
        parts_s = {part: noise * s for part, s in parts_s.items()}
        step_s = sum(parts_s.values())
        planning_s = self._deployment.planned_s(n) if self._plans else 0.0
        parts_s |= {"planning": planning_s, "overhead": parts_s["overhead"] + planning_s}
        step_s += planning_s
        return self._decide(view, plan, verified, confidence, ended, parts_s, step_s, now)

    def _trim(self, view: View, plan: Plan, now: float) -> tuple[IntArray, FloatArray]:
        """Return how many nodes of each row's chain are verified, and what the drafts claim of
        their paths, float64[n, K].
        """
        drafting = np.flatnonzero(plan.length)
        claims = np.zeros((len(view), self._deployment.k_max))
        if not len(drafting) or not self._telling.any():
            return plan.length, claims
        request, draft, length = view.request[drafting], plan.draft[drafting], plan.length[drafting]
        position, telling = self._progress.emitted[request], self._telling[draft]
        acceptance = self._workload.acceptance
        paths = acceptance.confidence(request, position, draft, telling, now).cumprod(1)
        claims[drafting] = paths
        row = drafting.repeat(length)
        of = np.arange(paths.shape[1]) < length[:, None]
        drafted = DraftNodes(row, plan.draft[row], paths[of], np.zeros(len(row), np.bool_))
        nodes = self._policy.trim(view, plan, drafted, self._state)
        return np.minimum(nodes, plan.length), claims

    def _decide(
        self,
        view: View,
        plan: Plan,
        verified: IntArray,  # [n]
        claims: FloatArray,  # [n, K]
        ended: list[int],
        parts_s: dict[str, float],
        step_s: float,
        now: float,
    ) -> _Pending:
        """Return what the step does: acceptance by the truth, cut where a text ends."""
        rows, workload, length = view.request, self._workload, plan.length
        position, matched = self._progress.emitted[rows], np.zeros(len(rows), np.int64)
        if length.any():
            draft = np.where(plan.draft >= 0, plan.draft, 0)
            matched = workload.acceptance.draw_accepted(rows, position, draft, length, now)
        accepted = np.minimum(matched, verified)
        emitted = np.minimum(accepted + 1, workload.output_tokens[rows] - position)
        first = np.array(ended, np.int64)
        tail = np.zeros(len(first), np.int64)
        over = (
            position + emitted >= workload.output_tokens[rows],
            self._progress.emitted[first] + 1 >= workload.output_tokens[first],
        )
        evidence = view.evidence
        if evidence is not None:
            evidence = np.where(plan.draft >= 0, evidence[np.arange(len(rows)), plan.draft], 0)
        depth = np.arange(claims.shape[1])
        # As ``backend.speculation.step_log``: nodes after a rejection fail, and nothing is known
        # of those after the last token that was emitted.
        is_evidence = (depth < length[:, None]) & (depth <= verified[:, None])
        is_evidence &= (matched < emitted)[:, None] | (depth < emitted[:, None])
        is_evidence &= self._telling.any()
        node_row = np.nonzero(is_evidence)[0]
        outcome = Outcome(
            StepRows(
                request=np.concatenate([rows, first]),
                draft=np.concatenate([plan.draft, tail - 1]),
                length=np.concatenate([length, tail]),
                accepted=np.concatenate([np.minimum(matched, emitted), tail]),
                emitted=np.concatenate([emitted, tail + 1]),
                scored=np.concatenate([np.minimum(emitted, length), tail]),
                verified=np.concatenate([verified, tail]),
                followed=np.concatenate([np.minimum(accepted, emitted), tail]),
                evidence=None if evidence is None else np.concatenate([evidence, tail]),
            ),
            StepTimes(step_s, parts_s),
            self._free_evidence(view, plan, emitted, now),
            StepNodes(
                row=node_row,
                confidence=claims[is_evidence],
                sampled=np.zeros(len(node_row), np.bool_),
                accepted=(depth < matched[:, None])[is_evidence],
            ),
            prefill_tokens=view.prefill_tokens,
            pass_tokens=self._width.tokens,
            view=view,
            plan=plan,
            finished=np.concatenate([rows[over[0]], first[over[1]]]),
        )
        figures = int(length.sum()), int(accepted.sum()), int(outcome.rows.emitted.sum())
        queue, by_model = len(self._queue), np.append(~self._free, False)[plan.draft]
        drafted = int(verified.sum()), int((length * by_model).sum())
        self._record(
            StepRecord(now, step_s, len(rows), *figures, view.prefill_tokens, queue, *drafted)
        )
        return _Pending(outcome, rows, plan)

    def _free_evidence(
        self,
        view: View,
        plan: Plan,
        emitted: IntArray,  # [n]
        now: float,
    ) -> FreeChains:
        """Return the chains that are scored without a token of their own.

        Drafts without a model are scored in every step against the tokens that were emitted. A
        model that catches up reads tokens emitted without it, and so tells how it would have
        guessed them.
        """
        chains: list[tuple[int, int, int, int, int]] = []
        evidence = np.zeros_like(view.ceiling) if view.evidence is None else view.evidence
        for d in np.flatnonzero(self._scored).tolist():
            row = np.flatnonzero((view.ceiling[:, d] > 0) & (plan.draft != d))
            scored = np.minimum(view.ceiling[row, d], emitted[row])
            request = view.request[row]
            matched = self._workload.acceptance.draw_accepted(
                request, self._progress.emitted[request], np.full(len(row), d), scored, now
            )
            columns = request, np.full(len(row), d), matched, scored, evidence[row, d]
            chains += zip(*(column.tolist() for column in columns), strict=True)
        for row in np.flatnonzero(plan.length > 0).tolist():
            chains += self._caught_up(
                int(view.request[row]),
                int(plan.draft[row]),
                int(view.catchup[row, plan.draft[row]]),
                now,
            )
        return FreeChains(*np.array(chains, np.int64).reshape(-1, 5).T)

    def _caught_up(
        self, request: int, draft: int, catchup: int, now: float
    ) -> list[tuple[int, int, int, int, int]]:
        """Return what a draft's pass over ``catchup`` tokens shows of those that it had to guess;
        the first is read, not guessed.
        """
        end = int(self._progress.emitted[request])
        begin = max(end - catchup + 1, 0)
        if catchup <= _READ_TOKENS or begin >= end:
            return []
        chains = self._workload.acceptance.score_chains(
            request, draft, begin, end, self._deployment.k_max, now
        )
        return [(request, draft, *chain, 0) for chain in chains]

    # -- end

    def _end(self, pending: _Pending, now: float) -> None:
        progress, (outcome, rows, plan) = self._progress, pending
        drafted = np.flatnonzero(plan.length > 0)
        if len(drafted):
            valid = np.minimum(
                outcome.rows.accepted[drafted], plan.length[drafted] - 1
            )  # the last proposed token is never read by its draft
            context = self._workload.prompt_tokens[rows[drafted]] + progress.emitted[rows[drafted]]
            progress.read_tokens[rows[drafted], plan.draft[drafted]] = context + valid
        progress.emitted[outcome.rows.request] += outcome.rows.emitted
        first = outcome.rows.request[len(rows) :]
        progress.first_token_s[first] = np.fmin(progress.first_token_s[first], now)
        if outcome.finished.size:
            progress.finish_s[outcome.finished] = now
            self.outstanding -= len(outcome.finished)
        if len(first):
            begun = set(first.tolist())
            self._prefill = [prefill for prefill in self._prefill if prefill.request not in begun]
            self._rows = np.concatenate([rows, first])
        if outcome.finished.size:
            self._rows = self._rows[np.isnan(progress.finish_s[self._rows])]
        self._state = self._policy.observe(outcome, self._state, now)
        self._pending = None
