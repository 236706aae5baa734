"""The CUDA engine's step in virtual time: what it takes by the H200's record, and which tokens a
script of acceptance lets through.

A head proposes as deep as the longest path of the step for all rows, and so does every other head
that a row uses; the likeliest nodes of the whole batch are verified, as many as the captured width
has room for. The next step is planned before the last one is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policy.latency import LatencyCurve, LatencyModel, LatencyTable
from policy.plan import (
    NO_DRAFT,
    AnyPolicy,
    BoolArray,
    FloatArray,
    IntArray,
    Outcome,
    Plan,
    StepNodes,
    StepRows,
    StepTimes,
    View,
)

RECORD = Path(__file__).resolve().parents[2] / "docs/results/cuda-h200.json"
CANDIDATES = 4
"""Nodes that a head proposes at each place."""
HARD_SHARE, SECOND_SHARE = 0.3, 0.4
"""As in ``bench.cuda.script``."""
K_MAX = 8
NEW_TOKENS = 200
ROOM = 8
"""Nodes of a row that are verified at most."""
_CONTEXT = 1000  # tokens of a prompt
_PRICED_STEPS = 50  # steps that say what a second is worth
_LAST = NEW_TOKENS + 2 * K_MAX - 1  # the last place that a text has


class DeviceRecord(NamedTuple):
    """The times of passes, and the script, by the H200's record."""

    drafts: tuple[str, ...]
    rates: FloatArray
    """[D, 2] how often a head's first node is right in requests of each class."""
    tables: dict[str, LatencyTable]
    head_s: dict[int, FloatArray]
    """By rows [D], the seconds of a head's forward."""
    pass_s: dict[int, FloatArray]
    """By rows [widths], the seconds of the target's pass and what goes with it;
    widths that no cell has lie on the line between their neighbours.
    """
    widths: IntArray  # [widths]

    @classmethod
    def read(cls, path: Path = RECORD) -> DeviceRecord:
        """Read the record: a cell's device time, less what the heads took, is the pass's."""
        parts = [part for run in json.loads(path.read_text())["runs"] for part in run["parts"]]
        part = next(part for part in parts if part["part"] == "scripted")
        tables = {name: LatencyTable.from_dict(table) for name, table in part["tables"].items()}
        target, *drafts = tables
        widths = np.array(tables[target].widths)
        head_s = {
            rows: np.array([tables[d].seconds[tables[d].rows.index(rows)] for d in drafts])
            for rows in sorted({cell["in_flight"] for cell in part["cells"]})
        }
        rates = np.array(
            [[part["acceptance"][d][kind] for kind in ("even", "odd")] for d in drafts]
        )
        pass_s = {}
        for rows, each_s in head_s.items():
            samples: dict[int, list[float]] = {}
            for cell in part["cells"]:
                name, _, length = cell["policy"].partition(" ")
                if cell["in_flight"] != rows or not (name == "none" or length.isdigit()):
                    continue
                depth, d = (int(length), drafts.index(name)) if length else (0, 0)
                at = widths.searchsorted(rows * (1 + depth)).clip(max=len(widths) - 1)
                samples.setdefault(int(at), []).append(1e-3 * cell["device_ms"] - depth * each_s[d])
            places = sorted(samples)
            slope_s = (min(samples[places[-1]]) - min(samples[places[-2]])) / np.diff(
                widths[places]
            )[-1]
            least_s = np.interp(widths, widths[places], [min(samples[place]) for place in places])
            pass_s[rows] = least_s + max(slope_s, 0.0) * (widths - widths[places[-1]]).clip(min=0)
        return cls(tuple(drafts), rates, tables, head_s, pass_s, widths)

    def width(self, tokens: int) -> int:
        """Return the place of the narrowest width that is wide enough, or the widest one."""
        return int(self.widths.searchsorted(tokens).clip(max=len(self.widths) - 1))

    def exact(self, rows: int) -> LatencyModel:
        """Return a model that has the very times at this many rows; a wider pass is never thought
        to be quicker.
        """
        counts = np.maximum(np.arange(self.widths[-1] + 1), rows)
        base_s = np.maximum.accumulate(self.pass_s[rows][self.widths.searchsorted(counts)])
        heads = tuple(LatencyCurve(np.full(2, seconds), 0.0) for seconds in self.head_s[rows])
        return LatencyModel(LatencyCurve(base_s, 0.0), heads)

    def fit_latency(self) -> LatencyModel:
        """Return the model that the measured tables give."""
        (target, *_), tables = self.tables, dict(self.tables)
        return LatencyModel.from_tables(tables.pop(target), tables, 5e-4, 3e-4)


@dataclass(slots=True, eq=False)
class DeviceRequest:
    """A request: how far it is, and where each head knows its text."""

    number: int
    rate: FloatArray
    """[D, places] how likely a head's first node is right."""
    rank: IntArray
    """[D, places] which of its nodes is: the first, the second, or none (``CANDIDATES``)."""
    emitted: int = 0
    turns: int = 0
    """Turns under way."""


class DeviceChoice(NamedTuple):
    """A draft and a length by row, and how many nodes of the batch a step verifies at most."""

    draft: IntArray  # [n]
    length: IntArray  # [n]
    nodes: int


class SubmittedStep(NamedTuple):
    """A step under way, of these rows."""

    texts: list[DeviceRequest]
    view: View
    plan: Plan


class DeviceStep(NamedTuple):
    """A step that ran."""

    rows: int
    depth: int
    nodes: int
    """Verified."""
    width: int
    emitted: int
    seconds: float
    promised_tokens: float
    promised_s: float
    applied: str
    """The level that the guard applied; empty: the policy's own plan."""


class Nodes(NamedTuple):
    """The nodes of a batch, the likeliest ``ROOM`` of each row, best first: [n, ROOM] each."""

    chance: FloatArray
    """How likely the whole path to it is right; 0: there is none."""
    depth: IntArray
    """The nodes before it on its path."""
    candidate: IntArray

    @classmethod
    def of(cls, rate: FloatArray, length: IntArray) -> Nodes:
        """Return the nodes of rows with a proposal of ``length`` int64[n] places, where the first
        node of each place is right with ``rate`` [n, K].
        """
        second = (1 - rate) * SECOND_SHARE
        rest = 0.1 * (1 - rate - second)
        path = np.concatenate([np.ones((len(rate), 1)), rate.cumprod(1)[:, :-1]], 1)
        chance = path[:, :, None] * np.stack([rate, second, rest, 0.5 * rest], 2)
        chance[np.arange(K_MAX) >= length[:, None]] = 0.0
        flat = chance.reshape(len(rate), -1)
        order = (-flat).argsort(1, kind="stable")[:, :ROOM]
        return cls(np.take_along_axis(flat, order, 1), order // CANDIDATES, order % CANDIDATES)

    def likeliest(self, nodes: int) -> BoolArray:
        """Return which nodes of the batch are its likeliest ones, bool[n, ROOM]."""
        flat = self.chance.ravel()
        mask = np.zeros(flat.shape, np.bool_)
        mask[(-flat).argsort(kind="stable")[:nodes]] = True
        return (mask & (flat > 0)).reshape(self.chance.shape)

    def follow(self, among: BoolArray, rank: IntArray) -> tuple[IntArray, BoolArray]:
        """Return how many of the nodes ``among`` these the text follows, int64[n], and whether its
        path ends at a leaf, bool[n].
        """
        at = np.zeros((2, *rank.shape), np.bool_)
        row, place = np.nonzero(among & (self.candidate < 2))
        at[self.candidate[row, place], row, self.depth[row, place]] = True
        spine = (at[0] & (rank == 0)).cumprod(1).sum(1)
        end = spine.clip(max=K_MAX - 1)[:, None]
        ends = np.take_along_axis(at[1] & (rank == 1), end, 1)[:, 0] & (spine < K_MAX)
        return spine + ends, ends


class DeviceRun:
    """A closed loop of requests on the device, a step planned ahead."""

    def __init__(
        self,
        recorded: DeviceRecord,
        policy: AnyPolicy,
        rows: int,
        kind_of: Callable[[int, np.random.Generator], int],
        seed: int,
    ) -> None:
        """``kind_of`` returns the class of a request by its number."""
        self._recorded, self._policy, self._rows, self._kind_of = recorded, policy, rows, kind_of
        self._state = policy.start()
        self._seed, self._rng = seed, np.random.default_rng([seed, 1])
        self._texts: list[DeviceRequest] = []
        self._ahead: SubmittedStep | None = None
        self.now_s, self.tokens, self.arrived = 0.0, 0, 0
        self.steps: list[DeviceStep] = []

    def run(self, until: Callable[[], bool]) -> float:
        """Run until this holds, and return the tokens a second."""
        tokens, began_s = self.tokens, self.now_s
        while not until():
            submitted, self._ahead = self._ahead, self._submit()
            if submitted is not None:
                self._collect(submitted)
        return (self.tokens - tokens) / (self.now_s - began_s)

    def _arrive(self) -> DeviceRequest:
        self.arrived += 1
        rng = np.random.default_rng([self._seed, 2, self.arrived])  # the same for every policy
        rates = self._recorded.rates[:, self._kind_of(self.arrived, rng), None]
        rate = np.where(rng.random(NEW_TOKENS + 2 * K_MAX) < HARD_SHARE, 0.5 * rates, rates)
        coin, second = rng.random(rate.shape), rate + (1 - rate) * SECOND_SHARE
        rank = np.where(coin < rate, 0, np.where(coin < second, 1, CANDIDATES))
        return DeviceRequest(self.arrived, rate, rank)

    def _submit(self) -> SubmittedStep | None:
        """Plan and submit a step of the rows that may still emit; None: there are none."""
        while len(self._texts) < self._rows:
            self._texts.append(self._arrive())
        texts = [t for t in self._texts if NEW_TOKENS - t.emitted > t.turns]
        if not texts:
            return None
        emitted, follows = np.array([(t.emitted, t.turns) for t in texts]).T
        remaining, drafts = NEW_TOKENS - emitted - follows, self._recorded.drafts
        ceiling = np.minimum(K_MAX, remaining - 1)[:, None].repeat(len(drafts), 1)
        request = np.array([t.number for t in texts])
        context = _CONTEXT + emitted
        view = View(drafts, request, context, remaining, ceiling, np.ones_like(ceiling))
        plan, self._state = self._policy.plan(view, self._state, self.now_s, self._rng)
        for text in texts:
            text.turns += 1
        return SubmittedStep(texts, view, plan)

    def _choice(self, submitted: SubmittedStep) -> DeviceChoice:
        """Return what a submission asks for."""
        draft, length = submitted.plan.draft, submitted.plan.length
        return DeviceChoice(draft.clip(0), length, submitted.plan.nodes or int(length.sum()))

    def _collect(self, submitted: SubmittedStep) -> None:
        """Run a step, and let the policy learn from it."""
        texts, view, plan = submitted
        at = np.array([t.emitted for t in texts])[:, None] + np.arange(K_MAX)
        draft, length, most = self._choice(submitted)
        index = np.arange(len(texts))[:, None], draft[:, None], at.clip(max=_LAST)
        rate, rank = (
            np.stack(c)[index] for c in ([t.rate for t in texts], [t.rank for t in texts])
        )
        width = self._recorded.width(len(texts) + most)
        nodes = Nodes.of(rate, length)
        likeliest = nodes.likeliest(int(self._recorded.widths[width]) - self._rows if most else 0)
        remaining = NEW_TOKENS - at[:, 0]
        accepted, _ = nodes.follow(likeliest, rank)
        emitted = np.minimum(accepted + 1, remaining)
        head_s = length.max(initial=0) * self._recorded.head_s[self._rows]
        drafts = np.unique(draft[length > 0])
        parts = {f"draft:{view.drafts[d]}": float(head_s[drafts].mean()) for d in drafts}
        parts["verify"] = float(self._recorded.pass_s[self._rows][width])
        seconds = sum(parts.values())
        self.now_s += seconds
        lives = remaining > 0
        for text, tokens in zip(texts, emitted.clip(min=0).tolist(), strict=True):
            text.turns -= 1
            text.emitted += tokens
        self._texts = [t for t in self._texts if t.emitted < NEW_TOKENS]
        self.tokens += int(emitted[lives].sum())
        self.steps.append(
            DeviceStep(
                *(len(texts), int(length.max(initial=0)), int(likeliest.sum())),
                *(int(self._recorded.widths[width]), int(emitted[lives].sum()), seconds),
                *(plan.predicted_tokens, plan.predicted_s),
                str(plan.notes.get("experiment") or plan.notes.get("guard") or ""),
            )
        )
        rows, evidence = _learnt(view, plan, nodes, likeliest, rank, emitted, lives)
        over = np.array([t.number for t in texts if t.emitted >= NEW_TOKENS], np.int64)
        times = StepTimes(seconds, parts)
        outcome = Outcome(rows, times, nodes=evidence, finished=over, view=view, plan=plan)
        self._state = self._policy.observe(outcome, self._state, self.now_s)


class OracleRun(DeviceRun):
    """A run that knows how likely every node is before heads propose, but not which are right."""

    def _choice(self, submitted: SubmittedStep) -> DeviceChoice:
        """Return the best head, depth and width for all rows, time priced at the goodput of the
        last steps.
        """
        texts, recorded = submitted.texts, self._recorded
        n, remaining = len(texts), NEW_TOKENS - np.array([t.emitted for t in texts])
        at = (NEW_TOKENS - remaining)[:, None] + np.arange(K_MAX)
        lives = remaining > 0
        last = self.steps[-_PRICED_STEPS:]
        price = n / recorded.pass_s[self._rows][recorded.width(n)]
        if last:
            price = sum(step.emitted for step in last) / sum(step.seconds for step in last)
        room = recorded.widths - self._rows
        fits = (room > 0) & (room <= ROOM * n)
        seconds = recorded.pass_s[self._rows]
        best, choice = (
            -price * seconds[recorded.width(n)],
            DeviceChoice(remaining * 0, remaining * 0, 0),
        )
        for d, head_s in enumerate(recorded.head_s[self._rows].tolist()):
            rate = np.stack([t.rate[d] for t in texts])[np.arange(n)[:, None], at.clip(max=_LAST)]
            for depth in range(1, K_MAX + 1):
                length = np.minimum(depth, remaining - 1).clip(0)
                flat = -np.sort(-Nodes.of(rate, length).chance[lives].ravel())
                gains = np.append(0.0, flat.cumsum())[room[fits].clip(max=len(flat))]
                net = gains - price * (seconds[fits] + depth * head_s)
                if length.max() == depth and net.max() > best:
                    best, nodes = net.max(), int(room[fits][net.argmax()])
                    choice = DeviceChoice(np.full(n, d), length, nodes)
        return choice


def _learnt(
    view: View,
    plan: Plan,
    nodes: Nodes,
    likeliest: BoolArray,
    rank: IntArray,
    emitted: IntArray,
    lives: BoolArray,
) -> tuple[StepRows, StepNodes]:
    """Return what a policy sees of the rows that were not over, as ``backend.speculation`` has
    it.
    """
    exists = nodes.chance > 0
    path, ends = nodes.follow(exists, rank)
    accepted, verified = np.minimum(path, emitted), likeliest.sum(1)
    right = exists & (np.take_along_axis(rank, nodes.depth, 1) == nodes.candidate)
    right &= nodes.depth < accepted[:, None]
    length = np.where(exists, nodes.depth + 1, 0).max(1)
    parent = np.full((len(rank), K_MAX + 1), ROOM)  # the place of the spine's node of each depth
    row, place = np.nonzero(exists & (nodes.candidate == 0))
    parent[row, nodes.depth[row, place] + 1] = place
    parent[:, 0] = -1
    is_evidence = exists & (np.take_along_axis(parent, nodes.depth, 1) < verified[:, None])
    goes_on = (accepted == emitted) & ~(ends & (path == accepted))
    is_evidence &= ~(goes_on[:, None] & (nodes.depth >= emitted[:, None]))
    is_evidence &= lives[:, None]
    followed = (right & (np.arange(ROOM) < verified[:, None])).sum(1)
    drafted = np.where(length > 0, plan.draft, NO_DRAFT)
    scored = np.minimum(emitted, length)
    columns = view.request, drafted, length, accepted, emitted, scored, verified, followed
    row, place = np.nonzero(is_evidence)
    return StepRows(*(column[lives] for column in columns)), StepNodes(
        (lives.cumsum() - 1)[row],
        nodes.chance[row, place],
        np.zeros(len(row), np.bool_),
        right[row, place],
        nodes.depth[row, place],
    )
