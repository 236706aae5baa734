"""How much longer drafting and verifying take side by side than alone, on this machine: what a
batch in cohorts has to make up for.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter

from backend.config import ConfigError
from backend.engines.overlapped import Overlapped
from backend.engines.port import Engine, Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence

logger = logging.getLogger(__name__)

ROWS, CONTEXT_TOKENS, LENGTH, ROUNDS = 4, 4 * BLOCK_TOKENS - 8, 4, 5


def overlapped(target: Engine, drafts: Seq[Engine]) -> tuple[Engine, float | None]:
    """Return the target with a thread of its own, and the contention. Raises ConfigError where it
    cannot have one.
    """
    if not target.limits.overlaps:
        raise ConfigError(
            f"policy.cohorts must be 1: the engine of {target.name!r} runs no cohorts"
        )
    # Measured as it will run: on CUDA its workspaces belong to its thread and stream.
    threaded = Overlapped(target)
    contention = measure(threaded, drafts)
    logger.info(
        "contention of drafting and verifying: %s",
        "not measured" if contention is None else f"{contention:.2f}",
    )
    return threaded, contention


def measure(target: Engine, drafts: Seq[Engine]) -> float | None:
    """Return the worse of both phases' ratios, at least 1; None where no draft takes time. Before
    the loop runs: it uses any KV blocks.

    The slowest draft proposes for as long as the target verifies. Each figure is the median of
    ``ROUNDS``.
    """
    with ExitStack() as stack:
        verify = stack.enter_context(repeated(target, verifies=True))
        runs = [
            stack.enter_context(repeated(draft, verifies=False))
            for draft in drafts
            if not draft.limits.free
        ]
        if not runs:
            return None
        verify_s, *draft_s = (_seconds(run) for run in (verify, *runs))
        slowest = max(range(len(runs)), key=lambda d: draft_s[d])
        repeats = max(1, round(verify_s / max(draft_s[slowest], 1e-6)))

        def draft() -> None:
            for _ in range(repeats):
                runs[slowest]()

        alone = _seconds(verify), _seconds(draft)
        beside = _side_by_side(verify, draft)
    return max(1.0, *(busy / free for busy, free in zip(beside, alone, strict=True)))


def _side_by_side(verify: Callable[[], None], draft: Callable[[], None]) -> tuple[float, float]:
    """Return the medians of both, begun together."""
    verified: list[float] = []
    drafted: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        for _ in range(ROUNDS):
            beside = thread.submit(_timed, verify)
            drafted.append(_timed(draft))
            verified.append(beside.result())
    return median(verified), median(drafted)


def _seconds(run: Callable[[], None]) -> float:
    run()
    return median(_timed(run) for _ in range(ROUNDS))


def _timed(run: Callable[[], None]) -> float:
    started_s = perf_counter()
    run()
    return perf_counter() - started_s


@contextmanager
def repeated(engine: Engine, *, verifies: bool, rows: int = ROWS) -> Iterator[Callable[[], None]]:
    """Give a call that runs a step of ``rows``: a verification, or a free run of ``LENGTH``;
    nothing of them is kept.
    """
    rng = random.Random(0)
    limits, length = engine.limits, min(LENGTH, engine.limits.max_draft_tokens)
    tokens = max(1, min(CONTEXT_TOKENS, limits.max_context_tokens - length - 1))
    blocks = -(-(tokens + length + 1) // BLOCK_TOKENS)
    sequences = []
    for row in range(min(rows, limits.kv_blocks // blocks) if limits.kv_blocks else rows):
        text = [rng.randrange(limits.vocab_size) for _ in range(tokens)]
        table = {engine.name: list(range(row * blocks, (row + 1) * blocks))}
        sequences.append(Sequence(-1 - row, text, tokens, SamplingParams(), table))

    def run() -> None:
        turns = []
        for sequence in sequences:
            proposed = [rng.randrange(limits.vocab_size) for _ in range(length if verifies else 0)]
            proposal = Proposal.chain("", proposed) if proposed else None
            run = 1 if verifies else max(length, 1)
            turns.append(Turn(sequence, tokens, run, proposal, nodes=0 if verifies else run))
        engine.submit(turns)
        done: list[str | None] = []
        while len(done) < len(turns):
            done += [completion.error for completion in engine.poll(1.0)]
        if any(done):
            raise RuntimeError(f"contention could not be measured: {next(filter(None, done))}")

    try:
        yield run
    finally:
        engine.cancel([sequence.id for sequence in sequences])
