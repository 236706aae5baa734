"""What one step did, row by row, until it becomes the policy's ``Outcome`` and the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from backend.ports import Completion, Proposal
from policy import NO_DRAFT, IntArray, Outcome, Ran, Rule, TurnShape


@dataclass(slots=True)
class StepLog:
    """A step in the making. ``rows`` are (request, draft, length, accepted, emitted, scored, rule); ``free`` (request, draft, accepted,
    scored) what a draft would have had accepted where it was not chosen; ``trees`` by the number of their row (widths, second draft, second
    length, rank, accepted along the second chain); ``piece_tokens`` how contexts were cut; ``parts_s`` wall times by part (``planning`` and
    ``learning`` from the step before, belong to ``overhead``). Of a cohort, ``waited_s`` is how long its turns were in flight and did not
    run, and the step is counted from ``since_s`` on, when the cohort before it landed. ``ran`` as in ``Outcome``.
    """

    drafts: tuple[str, ...]
    batch_size: int = 0
    decoding: int = 0
    prefill_tokens: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    free: list[tuple[int, int, int, int]] = field(default_factory=list)
    trees: dict[int, tuple[list[int], int, int, int, int]] = field(default_factory=dict)
    piece_tokens: int | None = None
    control: list[bool] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    cohort: bool = False
    ran: Ran | None = None
    waited_s: float = 0.0
    since_s: float = 0.0
    started_s: float = field(default_factory=perf_counter)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to ``parts_s[name]``."""
        started = perf_counter()
        try:
            yield
        finally:
            self.parts_s[name] = self.parts_s.get(name, 0.0) + perf_counter() - started

    def overlapped(self, flown_s: float, ran_s: float, since_s: float) -> None:
        """Note that the target was given the turns ``flown_s`` ago and ran them for ``ran_s`` beside other work."""
        self.parts_s["verify"] = self.parts_s.get("verify", 0.0) + ran_s
        self.waited_s, self.since_s = flown_s - ran_s, since_s

    def record(self, request: int, proposal: Proposal | None, completion: Completion, taken: int, rule: Rule) -> None:
        """Note one verified row of which ``taken`` tokens were committed (fewer than accepted + 1 when an end cut the run).

        Positions behind such a cut are no evidence: nobody will ever know whether the text would have gone on there. Of a tree, the row
        tells of its spine.
        """
        length = len(proposal.tokens) if proposal else 0
        draft = self.drafts.index(proposal.draft) if proposal else NO_DRAFT
        accepted = completion.along[0] if completion.along else completion.accepted
        cut = taken <= accepted
        if proposal and not proposal.is_chain:
            self.trees[len(self.rows)] = self._tree(proposal, completion, taken, 0 if cut else completion.rank)
        self.rows.append((request, draft, length, min(accepted, taken), taken, taken if cut else length, rule))

    def _tree(self, proposal: Proposal, completion: Completion, taken: int, rank: int) -> tuple[list[int], int, int, int, int]:
        widths = [1 + len(siblings) for siblings in proposal.siblings] or [1] * len(proposal.tokens)
        if not proposal.others:
            return widths, NO_DRAFT, 0, rank, 0
        (second,) = proposal.others
        return widths, self.drafts.index(second.draft), len(second.tokens), rank, min(completion.along[1], taken)

    def record_free(self, request: int, proposal: Proposal, emitted: list[int]) -> None:
        """Note how an unused proposal would have fared against the tokens that were emitted instead."""
        scored = min(len(proposal.tokens), len(emitted))
        accepted = next((j for j in range(scored) if proposal.tokens[j] != emitted[j]), scored)
        self.free.append((request, self.drafts.index(proposal.draft), accepted, scored))

    def record_scored(self, request: int, chains: Iterable[tuple[str, int, int]]) -> None:
        """Note (draft, accepted, length) of chains that a draft would have made of tokens emitted without it."""
        self.free += [(request, self.drafts.index(draft), accepted, length) for draft, accepted, length in chains]

    def outcome(self) -> Outcome:
        """Return the step as the policy learns it; call it last, it closes the clock."""
        now_s = perf_counter()
        engines_s = sum(seconds for part, seconds in self.parts_s.items() if part not in ("planning", "learning"))
        request, draft, length, accepted, emitted, scored, rule = np.array(self.rows, np.int64).reshape(-1, 7).T
        free = np.array(self.free, np.int64).reshape(-1, 4).T
        return Outcome(
            request=request,
            draft=draft,
            length=length,
            accepted=accepted,
            emitted=emitted,
            scored=scored,
            rule=rule,
            measured_s=now_s - max(self.started_s, self.since_s),
            parts_s={**self.parts_s, "overhead": max(0.0, now_s - self.started_s - engines_s - self.waited_s)},
            prefill_tokens=self.prefill_tokens,
            free_request=free[0],
            free_draft=free[1],
            free_accepted=free[2],
            free_scored=free[3],
            finished=np.array(self.finished, np.int64),
            ran=self.ran,
            **self._shape(length),
        )

    def _shape(self, length: IntArray) -> dict[str, Any]:
        """Return the fields of the outcome that tell of more than chains; a row without a tree is one of width 1."""
        cohort = np.zeros(len(length), np.int64) if self.cohort else None
        if not self.trees:
            told = self.piece_tokens or self.cohort
            return {"shape": TurnShape(cohort=cohort, piece_tokens=self.piece_tokens)} if told else {}
        width = (np.arange(int(length.max())) < length[:, None]).astype(np.int64)
        second = np.tile(np.array([NO_DRAFT, 0, 0, 0]), (len(length), 1))
        for row, (widths, *others) in self.trees.items():
            width[row, : len(widths)] = widths
            second[row] = others
        return {
            "shape": TurnShape(width, second[:, 0], second[:, 1], cohort, self.piece_tokens),
            "rank": second[:, 2],
            "second_accepted": second[:, 3],
        }
