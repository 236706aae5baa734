"""A whole serving core on tiny random models, stepped by hand: the loop and its real parts, shared
by the exactness suite and its mutants.

KV that no live sequence may use, and that is not kept for others, is filled with NaN before every
step: it may never be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engines.models.spec import PlainLlama
from backend.engines.port import Completion, Engine, EngineLimits, Turn
from backend.engines.stepping.engine import StepEngine
from backend.engines.torch.decoder import Decoder
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from backend.speculation.cycle import Cycle, DecodeStep
from backend.speculation.drafting import Drafting, Proposals
from policy import NO_DRAFT, DraftNodes, Outcome, Plan, Policy, View
from policy.plan import IntArray
from tests.fakes.clients import NoText, SureSink
from tests.fakes.llamas import llama, torch_engine

GREEDY = SamplingParams()
VOCAB, K_MAX, BLOCKS = 24, 4, 64
NODES = 7
"""Nodes of a tree, at most: more than its longest path."""
MAX_CONTEXT_TOKENS = 6 * BLOCK_TOKENS
TAPS = (1, 2)
"""The layers after which a target gives its hidden states."""

numbers = itertools.count(1)

make_engine: Callable[..., Any] = torch_engine
"""(name, description, weights, **sizes) to an engine: what ``tiny_engine`` makes."""


def tiny_config(vocab: int = VOCAB, *, layers: int = 2) -> PlainLlama:
    """A Llama of a few hundred weights with grouped heads."""
    return llama(vocab, 16, 24, layers, 4, 2, 4)


def tiny_engine(
    name: str = "target",
    *,
    config: PlainLlama | None = None,
    seed: int = 0,
    noise: float = 0.0,
    scale: float = 0.5,
    dtype: torch.dtype = torch.float64,
    kv_blocks: int = BLOCKS,
) -> Any:
    """An engine of random weights that are the same for every name, moved by ``noise`` of ``seed``:
    a draft that is right now and then.
    """
    config = config or tiny_config()
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    weights = {
        key: torch.randn(shape, generator=common, dtype=torch.float64)
        for key, shape in config.shapes().items()
    }
    weights = {
        key: (scale * (w + noise * torch.randn(w.shape, generator=own, dtype=torch.float64))).to(
            dtype
        )
        for key, w in weights.items()
    }
    return make_engine(
        name,
        config,
        weights,
        kv_blocks=kv_blocks,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_draft_tokens=K_MAX,
        taps=TAPS[: config.num_layers] if name == "target" else (),
    )


class Scripted(Policy[int]):
    """A policy that reads (draft column, length) off a script, another place of it in every step
    and for every request.

    ``trims`` are how many nodes of a row's tree are verified, step by step.
    """

    def __init__(
        self,
        script: Seq[tuple[int, int]] = ((NO_DRAFT, 0),),
        trims: Seq[int] = (NODES,),
    ) -> None:
        self.script, self.trims = list(script), trims
        self.outcomes: list[Outcome] = []
        self.trimmed: dict[tuple[int, int], int] = {}  # by request and context

    def start(self) -> int:
        return 0

    def plan(
        self, view: View, state: int, now: float, rng: np.random.Generator
    ) -> tuple[Plan, int]:
        chosen = [self.script[(state + row) % len(self.script)] for row in range(len(view))]
        return Plan.within(view, *np.array(chosen, np.int64).reshape(-1, 2).T), state + 1

    def trim(self, view: View, plan: Plan, drafted: DraftNodes, state: int) -> IntArray:
        nodes = [self.trims[(state + n) % len(self.trims)] for n in range(len(view))]
        for row in set(drafted.row.tolist()):
            self.trimmed[int(view.request[row]), int(view.context[row])] = nodes[row]
        return np.array(nodes)

    def observe(self, outcome: Outcome, state: int, now: float) -> int:
        self.outcomes.append(outcome)
        return state


class ForetoldDraft:
    """A draft that knows every text beforehand: it proposes the truth, or always something else,
    or (``bushy``) a tree in which the truth is somewhere, in part or not at all.
    """

    def __init__(self, name: str, *, lies: bool = False, bushy: bool = False) -> None:
        self.name, self.truth = name, dict[int, list[int]]()
        self.limits = EngineLimits(VOCAB, 2**31 - 1, K_MAX, K_MAX, kv_blocks=0, free=True)
        self._shift, self._bushy, self._done = int(lies), bushy, list[Completion]()

    def submit(self, turns: Seq[Turn]) -> None:
        for turn in turns:
            at = len(turn.sequence.tokens)
            truth = self.truth[turn.sequence.id][at : at + turn.run]
            if self._bushy:
                nodes = grown(truth, np.random.default_rng([at, *truth]))
                proposal = Proposal.best(self.name, nodes, turn.nodes)
            else:
                tokens = [(token + self._shift) % VOCAB for token in truth]
                proposal = Proposal.chain(self.name, tokens).first(turn.nodes)
            self._done.append(Completion(turn.sequence.id, [], proposal=proposal))

    def poll(self, timeout_s: float) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        pass

    def unseen(self, sequence: Sequence) -> int:
        return 0

    def available(self, sequence: Sequence, length: int) -> int:
        known = len(self.truth.get(sequence.id, ())) - len(sequence.tokens)
        return max(0, min(length, K_MAX, known))

    def close(self) -> None:
        pass


def grown(truth: Seq[int], rng: np.random.Generator) -> list[tuple[int, int, float]]:
    """Nodes (token, parent, confidence) of a tree, grown at random and often after what is true so
    far.

    Under whatever parent, a node's token is often the true one of its place; so equal tokens have
    different parents, and wrong siblings come before and after the right one.
    """
    nodes: list[tuple[int, int, float]] = []
    depth, children, tip = {ROOT: 0}, set[tuple[int, int]](), ROOT
    for _ in range(int(rng.integers(2, 6 * K_MAX))):
        parent = tip if rng.random() < 0.4 else int(rng.integers(ROOT, len(nodes)))
        place = depth[parent]
        if place == len(truth):
            continue
        token = truth[place] if rng.random() < 0.6 else int(rng.integers(VOCAB))
        if (parent, token) not in children:
            confidence = (nodes[parent][2] if parent != ROOT else 1.0) * rng.choice([1.0, 0.9, 0.4])
            children.add((parent, token))
            depth[len(nodes)] = place + 1
            tip = len(nodes) if parent == tip and token == truth[place] else tip
            nodes.append((token, parent, float(confidence)))
    return nodes or [(truth[0], ROOT, 1.0)]


class Recorded(NamedTuple):
    """A row of a step: the sequence and its tokens then, the draft that it was planned to have ("":
    none), and what the drafts proposed.
    """

    sequence: Sequence
    tokens: list[int]
    draft: str
    proposals: Proposals


class RecordedDrafting(Drafting):
    """Keeps all rows that were verified in ``recorded``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recorded: list[Recorded] = []

    def watch(self, cycle: Cycle) -> None:
        """Record the rows of a cycle."""
        note_verified = cycle.note_verified

        def recording(
            step: DecodeStep, sequence: Sequence, nodes: int, emitted: list[int], **options: bool
        ) -> None:
            row, name = step.proposals.get(sequence.id), ""
            if row is not None:
                draft = step.plan.draft[step.view.request.tolist().index(sequence.id)]
                name = step.log.drafts[draft] if draft != NO_DRAFT else ""
            tokens = sequence.tokens[: len(sequence.tokens) - len(emitted)]
            self.recorded.append(Recorded(sequence, tokens, name, row or Proposals()))
            note_verified(step, sequence, nodes, emitted, **options)

        cast(Any, cycle).note_verified = recording


def sink(session: Session) -> SureSink:
    """The client of a session of this suite."""
    assert isinstance(session.sink, SureSink)
    return session.sink


@dataclass
class Deployment:
    """One target, drafts, and the loop over them; ``watchers`` are called after every step,
    ``live`` sessions have not ended.

    Trees have at most ``nodes``; 0: the target verifies chains only. ``poisons`` false: nothing is
    poisoned.
    """

    target: Engine
    drafts: list[Engine] = field(default_factory=list)
    policy: Scripted = field(default_factory=Scripted)
    chunk_tokens: int = 8
    max_active: int = 8
    kv_blocks: int = BLOCKS
    nodes: int = NODES
    reuse: bool = True
    poisons: bool = True
    seed: int = 0
    watchers: list[Callable[[Deployment], None]] = field(default_factory=list)
    live: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stats = Stats()
        step_stats, clock = StepStats(self.stats), itertools.count().__next__
        self.engines = [self.target, *self.drafts]
        pools = {
            engine.name: min(self.kv_blocks, engine.limits.kv_blocks) for engine in self.engines
        }
        target = self.target if self.reuse else None
        nodes = self.nodes if self.target.limits.tree else 0
        # admitted too soon, and therefore pre-empted often
        headroom = (max(nodes, K_MAX) + 1) * (1 + self.target.limits.lookahead)
        self.ledger = KVLedger(pools, headroom, growth_blocks=0, target=target)
        vocab = self.target.limits.vocab_size
        self.drafting = RecordedDrafting(
            self.drafts, step_stats, clock, most_nodes=nodes, vocab_size=vocab
        )
        self.loop = Orchestrator(
            self.target,
            self.drafting,
            self.policy,
            self.ledger,
            Admission(self.ledger, self.max_active, 10**6),
            step_stats,
            clock,
            k_max=K_MAX,
            prefill_chunk_tokens=self.chunk_tokens,
            seed=self.seed,
        )
        self.drafting.watch(self.loop.cycle)

    def submit(
        self,
        prompt: Seq[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        salt: str = "",
        **options: Any,
    ) -> Session:
        """Hand a request to the loop and return its session."""
        sequence = Sequence(next(numbers), list(prompt), len(prompt), sampling, salt=salt)
        session = Session(
            sequence,
            GenerationRequest("", max_tokens, **options),
            frozenset(sampling.end_ids),
            NoText(),
            SureSink(),
        )
        self.live.append(session)
        self.loop.submit(session)
        return session

    def step(self) -> bool:
        """Poison what is not committed, take a step, and let the watchers look."""
        for engine in self.engines if self.poisons else ():
            # Tokens that a turn in flight has written are committed later.
            if isinstance(engine, StepEngine) and not engine.limits.lookahead:
                poison(engine, [session.sequence for session in self.live])
        worked = self.loop.step()
        self.live = [session for session in self.live if not sink(session).has_ended]
        for watch in self.watchers:
            watch(self)
        return worked

    def run(self, most_steps: int = 2_000) -> None:
        """Step until everything has ended and been released; a loop that does not end fails."""
        while self.step():
            most_steps -= 1
            assert most_steps > 0, "the requests do not end"
        assert not self.live
        assert self.ledger.usage()["used"] == 0

    def counters(self) -> dict[tuple[str, ...], float]:
        """The metrics' counters since the last call, by name and label values."""
        return {
            (name, *labels.values()): value for name, labels, value in self.stats.drain().counters
        }


def slots(engine: StepEngine, sequence: Sequence, tokens: int) -> list[int]:
    """Places in the pool of the first ``tokens`` positions of a sequence."""
    blocks = sequence.blocks[engine.name] if tokens else []
    return [blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(tokens)]


def seen(engine: StepEngine, sequence: Sequence) -> int:
    """How many committed tokens the engine claims to have KV of."""
    return len(sequence.tokens) - engine.unseen(sequence) if sequence.blocks.get(engine.name) else 0


def usable(engine: StepEngine, sequence: Sequence) -> int:
    """The committed tokens with KV, and what a draft ran beyond the text when its proposal was
    dropped: it may still come true.
    """
    count = seen(engine, sequence)
    return len(engine.caches.of(sequence).ran) if count == len(sequence.tokens) else count


def cells(engine: StepEngine) -> list[torch.Tensor]:
    """Views of an engine's keys and values, in the order of layers, keys before values where they
    lie apart [blocks, BLOCK_TOKENS, heads, ...].
    """
    model: Any = engine.model
    if isinstance(model, Decoder):
        pools = [pool for layer in model.pools.values() for pool in layer]
        return [pool.unflatten(0, (-1, BLOCK_TOKENS)) for pool in pools]
    if hasattr(model, "pools"):  # OpenVINO's, which is not installed on every GPU machine
        kinds = {"int16": torch.bfloat16, "float32": torch.float32}
        pools = [torch.from_numpy(pool).view(kinds[pool.dtype.name]) for pool in model.pools]
        layers = [layer for pool in pools for layer in pool.unflatten(0, (-1, 2))]
        return [layer.permute(1, 3, 0, 2, 4) for layer in layers]
    if hasattr(model, "kv"):  # the CUDA engine's
        return [kv.permute(0, 3, 1, 2, 4) for kv in model.kv]
    size = engine.limits.kv_blocks * BLOCK_TOKENS  # of compiled networks there is one more
    return [pool[:size].unflatten(0, (-1, BLOCK_TOKENS)) for pool in model.pool]


def poison(engine: StepEngine, sequences: Iterable[Sequence]) -> None:
    """Fill everything but the usable KV of the live sequences, and the blocks whose content the
    engine knows, with NaN.

    So rejected tokens, headroom and blocks without content are.
    """
    live = {slot for s in sequences for slot in slots(engine, s, usable(engine, s))}
    known = {
        block * BLOCK_TOKENS + offset
        for block in engine.caches.contents
        for offset in range(BLOCK_TOKENS)
    }
    kept = torch.tensor(sorted(live | known), dtype=torch.int64)
    with torch.inference_mode():
        for pool in cells(engine):
            committed = pool[kept // BLOCK_TOKENS, kept % BLOCK_TOKENS]
            pool.fill_(torch.nan)
            pool[kept // BLOCK_TOKENS, kept % BLOCK_TOKENS] = committed


def kv(engine: StepEngine, sequence: Sequence) -> torch.Tensor:
    """The keys and values of the committed tokens [seen, numbers], layer by layer."""
    places = torch.tensor(slots(engine, sequence, seen(engine, sequence)), dtype=torch.int64)
    found = [pool[places // BLOCK_TOKENS, places % BLOCK_TOKENS] for pool in cells(engine)]
    return torch.cat([part.flatten(1) for part in found], 1)
