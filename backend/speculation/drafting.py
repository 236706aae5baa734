"""The drafts' phase of a step: what each could propose, and the proposals that the plan asks
for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from backend.engines.port import (
    Completion,
    DeviceProposal,
    Engine,
    EngineLostError,
    HiddenStates,
    MissesStates,
    ReadsTarget,
    Remembers,
    ShowsEvidence,
    Turn,
)
from backend.ops.stats import StepStats
from backend.sequence import Proposal, Sequence
from backend.speculation.sleeping import Sleep
from backend.speculation.step_log import StepLog
from policy import DraftNodes, IntArray, Plan, View
from policy.evidence import share_evidence

logger = logging.getLogger(__name__)

COOLDOWN_S = 10.0
"""Seconds for which a draft that raised is not asked."""

SCORED_EVERY = 32
"""Steps that are plain in any case, for each in which free drafts are asked, to be scored."""

_EVERY_NODE = 256
"""More nodes than any proposal has: those that are not verified are evidence of a draft, too."""


@dataclass(slots=True)
class Proposals:
    """The drafts' proposals for one request in one step."""

    drafted: Proposal | None = None
    """The proposal of the planned draft."""
    to_verify: Proposal | None = None
    """The best nodes of ``drafted``, which the target verifies."""
    on_device: DeviceProposal | None = None
    """The chain that the target is to propose and verify by itself."""
    unused: list[Proposal] = field(default_factory=list)
    """Proposals of free drafts that are only scored."""
    scored: list[tuple[str, int, int]] = field(default_factory=list)
    """(draft, accepted, length) of chains that a draft would have made of earlier tokens, known
    after it has caught up.
    """
    evidence: list[int] = field(default_factory=list)
    """Evidence that each draft showed before it proposed, by its column; empty: nothing."""


class Drafting:
    """Runs the drafts. A draft that fails costs a step its speculation, never a request."""

    def __init__(
        self,
        drafts: Seq[Engine],
        stats: StepStats,
        clock: Callable[[], float],
        *,
        most_nodes: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        """``most_nodes`` is the most nodes of a tree that the target verifies; 0: it verifies
        chains only. ``vocab_size`` is the target's: a draft whose vocabulary is padded otherwise
        proposes no other tokens, and nothing after those that it does not know. None: all have the
        same.
        """
        self.names = tuple(draft.name for draft in drafts)
        self.engines = tuple(drafts)
        self._stats = stats
        self._clock = clock
        self._most_nodes, self._vocab_size = most_nodes, vocab_size
        self._highest: dict[int, tuple[int, int]] = {}  # by sequence: tokens read, the highest id
        self._reading = [draft for draft in drafts if isinstance(draft, ReadsTarget)]
        with_kv = [draft.name for draft in self._reading if draft.limits.kv_blocks]
        self._reads_all = bool(with_kv)
        self._sleep = {name: Sleep(name) for name in with_kv}
        self._remembering = [draft for draft in drafts if isinstance(draft, Remembers)]
        self._showing = [
            (d, draft) for d, draft in enumerate(drafts) if isinstance(draft, ShowsEvidence)
        ]
        self._resting_until_s = dict.fromkeys(self.names, float("-inf"))
        self._plain_steps = 0

    def with_engines(self, drafts: Seq[Engine]) -> Drafting:
        """Return the same with these drafts."""
        most, vocab = self._most_nodes, self._vocab_size
        return Drafting(drafts, self._stats, self._clock, most_nodes=most, vocab_size=vocab)

    def ceilings(
        self, sequences: Seq[Sequence], most: Seq[int], *, is_plain: bool = False
    ) -> tuple[IntArray, IntArray, IntArray | None]:
        """Return by sequence and draft how many tokens the draft could propose now, at most
        ``most`` of each sequence, how many committed ones it has not seen, and the evidence that it
        shows or shares (``View.evidence``; None: none shows any), int64[n, D] each.

        The first two are 0 for a draft that rests. If ``is_plain``, the step has no proposals in
        any case: only free drafts are asked, and those in one such step in ``SCORED_EVERY``.
        """
        self._plain_steps += is_plain
        if is_plain and self._plain_steps % SCORED_EVERY != 1:
            nothing = np.zeros((len(sequences), len(self.engines)), np.int64)
            return nothing, nothing, nothing if self._showing else None
        return self._ceilings(sequences, most, only_free=is_plain)

    def _ceilings(
        self, sequences: Seq[Sequence], most: Seq[int], *, only_free: bool
    ) -> tuple[IntArray, IntArray, IntArray | None]:
        now = self._clock()
        ceiling, unseen, evidence = np.zeros((3, len(sequences), len(self.engines)), np.int64)
        for d, draft in enumerate(self.engines):
            if self._resting_until_s[draft.name] <= now and (draft.limits.free or not only_free):
                lengths = [
                    (one, k if k > 0 and self._knows(draft, one) else 0)
                    for one, k in zip(sequences, most, strict=True)
                ]
                ceiling[:, d] = [draft.available(one, k) if k > 0 else 0 for one, k in lengths]
                unseen[:, d] = [draft.unseen(one) if k > 0 else 0 for one, k in lengths]
        for d, shows in self._showing:
            able = zip(sequences, ceiling[:, d].tolist(), strict=True)
            evidence[:, d] = [shows.evidence(one) if k > 0 else 0 for one, k in able]
        return ceiling, unseen, share_evidence(evidence) if self._showing else None

    def reads_states(self, *, is_plain: bool) -> bool:
        """Return whether a draft takes the target's states of a step. One without KV goes on from
        the last of them, so it takes none while steps are plain in any case (``is_plain``).
        """
        return self._reads_all or (bool(self._reading) and not is_plain)

    def propose(
        self, sequences: Seq[Sequence], view: View, plan: Plan, log: StepLog
    ) -> dict[int, Proposals]:
        """Return proposals by sequence id. Row i of view and plan belongs to ``sequences[i]``."""
        proposals = {
            sequence.id: Proposals(evidence=bins)
            for sequence, bins in zip(
                sequences, _evidence_rows(view.evidence, sequences), strict=True
            )
        }
        wanted = set(plan.draft[plan.length > 0].tolist())
        for d, draft in enumerate(self.engines):
            if d not in wanted and not draft.limits.free:
                continue
            lengths = _lengths_by_sequence(sequences, plan.draft, plan.length, d)
            if draft.limits.in_target:
                shares = shared_out(plan.nodes, [*lengths.values()], plan.length)
                for nodes, (sequence_id, length) in zip(shares, lengths.items(), strict=True):
                    proposals[sequence_id].on_device = DeviceProposal(draft, length, nodes)
                continue
            runs = lengths
            if draft.limits.free:
                ceiling = zip(sequences, view.ceiling[:, d].tolist(), strict=True)
                runs = {s.id: lengths.get(s.id, most) for s, most in ceiling if most > 0}
            turns = [
                Turn(s, len(s.tokens), run=runs[s.id], nodes=_EVERY_NODE)
                for s in sequences
                if s.id in runs
            ]
            for completion in self._complete(draft, turns, log):
                row, proposal = proposals[completion.sequence_id], completion.proposal
                row.scored += [(draft.name, *chain) for chain in completion.scored]
                if proposal and self._vocab_size is not None and not draft.limits.free:
                    proposal = proposal.below(self._vocab_size)
                if not proposal:
                    continue
                if not self._most_nodes:
                    proposal = proposal.spine()
                if completion.sequence_id in lengths:
                    row.drafted = proposal
                else:
                    row.unused.append(proposal)
        return proposals

    def propose_unused(
        self,
        sequences: Seq[Sequence],
        most: Seq[int],
        proposals: dict[int, Proposals],
        log: StepLog,
    ) -> None:
        """Add to ``proposals`` what free drafts would have proposed for sequences whose tokens are
        still to be committed, at most ``most`` for each.
        """
        ceiling, _, evidence = self._ceilings(sequences, most, only_free=True)
        ids = [sequence.id for sequence in sequences]
        bins = dict(zip(ids, _evidence_rows(evidence, sequences), strict=True))
        for d, draft in enumerate(self.engines):
            if not draft.limits.free:
                continue
            runs = zip(sequences, ceiling[:, d].tolist(), strict=True)
            turns = [Turn(s, len(s.tokens), run=k, nodes=_EVERY_NODE) for s, k in runs if k > 0]
            for completion in self._complete(draft, turns, log):
                if completion.proposal:
                    row_bins = bins[completion.sequence_id]
                    row = proposals.setdefault(completion.sequence_id, Proposals(evidence=row_bins))
                    row.unused.append(completion.proposal)
                    if row.evidence:
                        row.evidence[d] = row_bins[d]

    def nodes(self, sequences: Seq[Sequence], proposals: dict[int, Proposals]) -> DraftNodes | None:
        """Return the nodes that could be verified for the rows of a plan; None: there are none."""
        rows = [
            (row, sequence, proposal.first(self._most_nodes or _EVERY_NODE))
            for row, sequence in enumerate(sequences)
            if (proposal := proposals[sequence.id].drafted) is not None
        ]
        if not rows:
            return None
        nodes = np.array([len(proposal) for _, _, proposal in rows])
        columns = np.array(
            [(row, self.names.index(p.draft), not s.sampling.greedy) for row, s, p in rows]
        )
        row, draft, sampled = columns.repeat(nodes, 0).T
        confidence = np.array([c for _, _, proposal in rows for c in proposal.confidence])
        depth = np.array([n - 1 for _, _, proposal in rows for n in proposal.depths])
        return DraftNodes(row, draft, confidence, sampled.astype(np.bool_), depth)

    def choose(self, drafted: Proposal | None, nodes: int) -> Proposal | None:
        """Return the proposal's best nodes, at most as many as the target verifies; None: none."""
        most = min(nodes, self._most_nodes or _EVERY_NODE)
        return drafted.first(most) if drafted and most > 0 else None

    def rest(self, names: Iterable[str]) -> None:
        """Leave drafts out for a while."""
        for name in names:
            self._resting_until_s[name] = self._clock() + COOLDOWN_S

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Make every draft forget sequences."""
        gone = [*sequence_ids]
        for draft in self.engines:
            draft.cancel(gone)
        for sequence_id in gone:
            self._highest.pop(sequence_id, None)

    def end(self, sequence: Sequence) -> None:
        """Let drafts that remember answers take this one, before it is cancelled."""
        for draft in self._remembering if sequence.remember else ():
            self._remember(draft, sequence)

    def absorb(self, states: Seq[tuple[Sequence, HiddenStates]], log: StepLog) -> None:
        """Let drafts that read the target take its states (``ReadsTarget``), which is a part of its
        pass: every pass has it, whether they propose or not. One that fails rests; one that keeps
        KV and costs more than it brings sleeps (``Sleep``).
        """
        for draft in self._reading if states else ():
            sleep = self._sleep.get(draft.name)
            if sleep is not None and not sleep.takes(len(states)):
                continue
            before_s = log.parts_s.get("verify", 0.0)
            with log.part("verify"):
                self._absorb(draft, states)
            if sleep is not None:
                sleep.states_s += log.parts_s["verify"] - before_s

    def weigh(self, log: StepLog, price: float) -> None:
        """Let drafts that may sleep count a step, whose plan was made at this price."""
        for name, sleep in self._sleep.items():
            column = self.names.index(name)
            accepted = sum(row.followed for row in log.rows if row.draft == column)
            sleep.weigh(accepted, log.parts_s.get(f"draft:{name}", 0.0), price)

    def remarks(self) -> list[str]:
        """Return why drafts propose nothing for texts whose states they have missed (any
        thread).
        """
        asleep = [name for name, sleep in self._sleep.items() if sleep.asleep_for]
        words = [f"{name} sleeps: states cost more than its proposals bring" for name in asleep]
        holes = {d.name: d.holes() for d in self.engines if isinstance(d, MissesStates)}
        words += [f"{name} has missed states of {n} requests" for name, n in holes.items() if n]
        return words

    def _knows(self, draft: Engine, sequence: Sequence) -> bool:
        """Return whether a draft has a row for every token of a text."""
        if self._vocab_size is None or draft.limits.vocab_size >= self._vocab_size:
            return True
        read, highest = self._highest.get(sequence.id, (0, 0))
        highest = max(highest, max(sequence.tokens[read:], default=0))
        self._highest[sequence.id] = len(sequence.tokens), highest
        return highest < draft.limits.vocab_size

    def _absorb(self, draft: ReadsTarget, states: Seq[tuple[Sequence, HiddenStates]]) -> None:
        try:
            draft.absorb(states)
        except Exception:
            logger.exception("draft %s failed; disabled for %s s", draft.name, COOLDOWN_S)
            self._stats.fallback("draft_error")
            self.rest([draft.name])

    def _remember(self, draft: Remembers, sequence: Sequence) -> None:
        """Let a draft take an answer; one that fails costs no request."""
        try:
            draft.remember(sequence)
        except Exception:
            logger.exception("draft %s could not store an answer", draft.name)
            self._stats.fallback("draft_error")

    def _complete(self, draft: Engine, turns: list[Turn], log: StepLog) -> list[Completion]:
        """Run turns until all are complete, as verification needs all; drop failed ones, with a
        metric. Raises EngineLostError.
        """
        if not turns:
            return []
        completions: list[Completion] = []
        try:
            with log.part(f"draft:{draft.name}"):
                draft.submit(turns)
                while len(completions) < len(turns):
                    completions += draft.poll(timeout_s=1.0)
        except EngineLostError:
            raise
        except Exception:
            logger.exception("draft %s failed; disabled for %s s", draft.name, COOLDOWN_S)
            self._stats.fallback("draft_error")
            self.rest([draft.name])
            draft.cancel([turn.sequence.id for turn in turns])
            return []
        for completion in completions:
            if completion.error is not None:
                logger.error(
                    "draft %s, sequence %d: %s",
                    draft.name,
                    completion.sequence_id,
                    completion.error,
                )
                self._stats.fallback("draft_error")
        return [completion for completion in completions if completion.error is None]


def _evidence_rows(evidence: IntArray | None, sequences: Seq[Sequence]) -> list[list[int]]:
    """Return the evidence int64[n, D] of each sequence by draft; empty lists where no draft shows
    any.
    """
    if evidence is None:
        return [[] for _ in sequences]
    bins: list[list[int]] = evidence.tolist()
    return bins


def shared_out(nodes: int, lengths: list[int], planned: IntArray) -> list[int]:
    """Return the nodes of rows with these lengths, of a plan that has ``nodes`` for the batch, in
    which every row is ``planned[n]`` for: alike but for one, for their sum counts. 0: their
    lengths.
    """
    if not nodes:
        return lengths
    rows = np.count_nonzero(planned)
    each, more = divmod(nodes, rows)
    return [each + (place < more) for place in range(len(lengths))]


def _lengths_by_sequence(
    sequences: Seq[Sequence],
    draft: IntArray,  # [n]
    length: IntArray,  # [n]
    column: int,
) -> dict[int, int]:
    """Return by sequence id the tokens (above 0) that the plan asks one draft for."""
    return {
        s.id: k
        for s, k in zip(sequences, np.where(draft == column, length, 0).tolist(), strict=True)
        if k > 0
    }
