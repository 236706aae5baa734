"""A step engine whose submissions run one after the other in a thread of their own, while the loop
plans and drafts for other rows.

On CUDA the thread queues on a stream of its own (``StreamsBeside``), each submission behind what
the loop had queued when it was made: the drafts' laws among it. Only those cross on the device. All
that comes back is on the host, and the KV is the target's alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from backend.engines.port import Completion, Engine, StreamsBeside, Turn
from backend.sequence import Sequence


class Overlapped:
    """An ``Engine`` over one that ``overlaps``: ``submit`` returns at once, ``poll`` waits for the
    oldest submission.

    ``took_s`` is how long the submission last polled has run. A sequence with a turn in flight is
    asked about or cancelled only when that has run; cancelling any other waits for nothing. All
    calls from one thread.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.limits.overlaps:
            raise ValueError(f"engine {engine.name!r} must be one that runs beside others' work")
        self.name, self.limits = engine.name, engine.limits
        self.took_s = 0.0
        self._engine = engine
        self._behind = (
            engine.side_stream() if isinstance(engine, StreamsBeside) else None
        ) or nullcontext
        self._thread = ThreadPoolExecutor(1, engine.name)
        self._in_flight: deque[tuple[set[int], Future[tuple[list[Completion], float]]]] = deque()

    def submit(self, turns: Seq[Turn]) -> None:
        """Start turns behind those that are in flight."""
        self._in_flight.append(
            (
                {turn.sequence.id for turn in turns},
                self._thread.submit(self._run, list(turns), self._behind()),
            )
        )

    def poll(self, timeout_s: float) -> list[Completion]:  # noqa: ARG002 (as long as a step engine takes)
        """Return the completions of the oldest submission. Raises what it raised; then all others
        are void too.
        """
        if not self._in_flight:
            return []
        wanted, running = self._in_flight.popleft()
        try:
            completions, self.took_s = running.result()
        except Exception:
            others = [other for _, other in self._in_flight if not other.cancel()]
            self._in_flight.clear()
            wait(others)
            raise
        return [completion for completion in completions if completion.sequence_id in wanted]

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; those in flight run to the end of their submission first, for
        nobody.
        """
        gone = set(sequence_ids)
        for wanted, running in self._in_flight:
            if wanted & gone:
                wait([running])
                wanted.difference_update(gone)
        self._engine.cancel(gone)

    def unseen(self, sequence: Sequence) -> int:
        """Return how many committed tokens a turn would first have to catch up on, once the one in
        flight has run.
        """
        wait([running for wanted, running in self._in_flight if sequence.id in wanted])
        return self._engine.unseen(sequence)

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed now."""
        return self._engine.available(sequence, length)

    def close(self) -> None:
        """End the thread, then the engine."""
        self._thread.shutdown()
        self._engine.close()

    def _run(
        self, turns: list[Turn], behind: AbstractContextManager[None]
    ) -> tuple[list[Completion], float]:
        started_s = perf_counter()
        with behind:
            self._engine.submit(turns)
            completions = self._engine.poll(0.0)
        return completions, perf_counter() - started_s
