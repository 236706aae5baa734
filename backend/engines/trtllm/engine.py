"""TensorRT-LLM 1.2.1's Executor as an engine, a target or a draft. It has run so far on a
fake of the bindings only.

Each turn is a request of its own: the text so far as its prompt, whose KV the executor finds again
by content, and after it a draft to verify (which ends the request) or tokens to run. The engine
steps: it submits a batch of turns and waits for all of them. The module
``backend.engines.trtllm.requests`` translates turns for the executor and back.

The executor's iterations have a budget, and the whole text of every turn counts against it, though
most of each is found in the KV cache: past it turns wait for each other. So ``limits.kv_blocks``
are never more than one iteration takes, and a step is one iteration. Prompts are not run in chunks:
a prefill chunk without tokens to run completes at once and costs nothing; the turn that ends the
prompt runs all of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from backend.engines.port import Completion, EngineLimits, EngineLostError, Turn
from backend.engines.trtllm.folder import EngineFolder
from backend.engines.trtllm.requests import Ask, Requests, TurnError, completion
from backend.engines.trtllm.seen import Seen
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long the executor may take to answer a request that it is to cancel or whose time is
up.
"""

WAIT_S = 0.5
"""The longest wait for answers before late turns are looked for."""


class EngineDiedError(EngineLostError):
    """The executor is gone (a rank crashed, or it answers nothing): the process restarts."""


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """How an executor is created. ``gpus`` are device ids, one a rank; ``orchestrated`` runs the
    ranks in processes of their own (MPI).

    ``kv_fraction`` is of the memory that is free when it is created
    (``backend.engines.trtllm.memory``).
    """

    gpus: tuple[int, ...] = (0,)
    kv_fraction: float = 0.9
    orchestrated: bool = False
    worker: str = ""
    turn_timeout_s: float = 30.0


@dataclass(slots=True)
class _TurnInFlight:
    asked: Ask
    since_s: float
    cancelled: bool = False


class TrtllmEngine:
    """One Executor: as a target it verifies chains, as a draft it proposes one of its likeliest
    tokens.

    Its decoder draws by numbers of its own, which a turn seeds with the request's seed and the
    place where it begins: every plan is lossless, but where a text is cut into turns decides which
    text is drawn.
    """

    def __init__(
        self,
        name: str,
        engine: EngineFolder,
        settings: ExecutorSettings,
        *,
        max_context_tokens: int,
        kv_blocks: int | None = None,
        bindings: Any = None,
        count: Callable[..., None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = name
        most = engine.max_draft_len if engine.verifies_drafts else engine.max_seq_len
        context = min(max_context_tokens, engine.max_context_tokens)
        budget_blocks = engine.max_num_tokens // BLOCK_TOKENS
        blocks = budget_blocks if kv_blocks is None else min(kv_blocks, budget_blocks)
        self.limits = EngineLimits(engine.vocab_size, context, most, engine.max_seq_len, blocks)
        self._engine, self._settings, self._count, self._clock = (
            engine,
            settings,
            count or _uncounted,
            clock,
        )
        self._trtllm = bindings or load_bindings()
        self._requests = Requests(self._trtllm, engine, settings.turn_timeout_s)
        self._waiting: deque[Turn] = deque()
        self._in_flight: dict[int, _TurnInFlight] = {}  # by the executor's request id
        self._done: list[Completion] = []
        self._seen = Seen()
        self._executor: Any = self._create()

    # -- the port

    def submit(self, turns: Seq[Turn]) -> None:
        """Queue turns. Raises EngineDiedError."""
        for turn in turns:
            if turn.run == 0 and turn.proposal is None:
                self._seen.ran(turn.sequence.id, turn.end, [])
                self._done.append(Completion(turn.sequence.id, []))
            else:
                self._waiting.append(turn)
        self._call(self._enqueue)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return all turns, complete; each ends within ``turn_timeout_s``. Raises
        EngineDiedError.
        """
        del timeout_s
        while self._in_flight or self._waiting:
            self._call(self._enqueue)
            self._call(self._await)
            self._call(self._time_out)
        done, self._done = self._done, []
        return done

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; an executor that has died meanwhile is noticed by the next turn."""
        gone = set(sequence_ids)
        self._waiting = deque(turn for turn in self._waiting if turn.sequence.id not in gone)
        self._done = [completion for completion in self._done if completion.sequence_id not in gone]
        for request_id in [
            i for i, running in self._in_flight.items() if running.asked.turn.sequence.id in gone
        ]:
            del self._in_flight[request_id]
            try:
                self._executor.cancel_request(request_id)
            except Exception:
                logger.exception("%s: request %d could not be cancelled", self.name, request_id)
        self._seen.forget(gone)

    def unseen(self, sequence: Sequence) -> int:
        """Return the committed tokens that were not run in the last turn; the executor may
        also recompute a part of a block.
        """
        return self._seen.unseen(sequence)

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed now: none of a dead executor."""
        if self._executor is None:
            return 0
        return max(
            0,
            min(
                length,
                self.limits.max_draft_tokens,
                self.limits.max_context_tokens - len(sequence.tokens),
            ),
        )

    def close(self) -> None:
        """End the executor and its ranks."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    # -- the executor

    def _create(self) -> Any:
        config = executor_config(self._trtllm, self._engine, self._settings)
        return self._trtllm.Executor(
            self._engine.folder, self._trtllm.ModelType.DECODER_ONLY, config
        )

    def _call(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do some work with the executor; whatever it raises is its death, which voids all
        turns.
        """
        try:
            if self._executor is None:
                raise EngineDiedError(f"{self.name} has failed already")
            work(*arguments)
        except Exception as error:
            self._in_flight.clear()
            self._waiting.clear()
            self._done.clear()
            self._seen.clear()
            if self._executor is not None:
                self._executor = None
                self._count("spindle_engine_deaths_total", engine=self.name)
            raise EngineDiedError(f"the executor of {self.name} failed: {error}") from error

    def _enqueue(self) -> None:
        """Hand over what waits, all at once: one by one the executor would begin an iteration with
        the first alone.

        A turn that its queue does not take goes on waiting.
        """
        asks = [asked for turn in self._waiting if (asked := self._ask_for(turn)) is not None]
        self._waiting.clear()
        if asks and not self._handed_over(asks):
            for i, asked in enumerate(asks):
                if not self._handed_over([asked]):
                    if not self._in_flight:
                        raise EngineDiedError("its queue takes no request")
                    self._count("spindle_fallback_total", reason="engine_queue_full")
                    self._waiting.extend(asked.turn for asked in asks[i:])
                    break

    def _ask_for(self, turn: Turn) -> Ask | None:
        """Return a turn's request; None for one that cannot be made, which completes with its
        error.
        """
        try:
            begun = self.unseen(turn.sequence) < len(turn.sequence.tokens)
            return self._requests.ask(turn, begun=begun)
        except (
            Exception
        ) as error:  # of the bindings' constructors too: RuntimeError of C++, TypeError of nanobind
            self._done.append(Completion(turn.sequence.id, [], error=f"{self.name}: {error}"))
            return None

    def _handed_over(self, asks: list[Ask]) -> bool:
        """Hand over requests; return whether the executor's queue has taken them."""
        try:
            request_ids = self._executor.enqueue_requests([asked.request for asked in asks])
        except RuntimeError as error:
            if "queue size" in str(error):
                return False
            raise
        now_s = self._clock()
        for request_id, asked in zip(request_ids, asks, strict=True):
            self._in_flight[request_id] = _TurnInFlight(asked, now_s)
            if asked.cut:
                self._count("spindle_fallback_total", reason="turn_cut_at_min_tokens")
        return True

    def _await(self) -> None:
        for response in self._executor.await_responses(timeout=timedelta(seconds=WAIT_S)):
            running = self._in_flight.get(response.request_id)
            if running is None:
                continue  # of a sequence that was cancelled
            if response.has_error():
                self._end(response.request_id, error=response.error_msg)
            else:
                self._complete(response.request_id, running, response.result)

    def _complete(self, request_id: int, running: _TurnInFlight, result: Any) -> None:
        reason, reasons = result.finish_reasons[0], self._trtllm.FinishReason
        if running.cancelled or reason in (reasons.CANCELLED, reasons.TIMED_OUT):
            self._end(
                request_id,
                error=f"the turn has not ended within {self._settings.turn_timeout_s:g} s",
            )
            return
        asked = running.asked
        try:
            tokens, logits = result.output_token_ids[0], result.generation_logits
            done = completion(asked, tokens, logits, self.limits.vocab_size)
        except (TurnError, IndexError, ValueError) as error:
            self._end(request_id, error=str(error))
            return
        del self._in_flight[request_id]
        self._requests.over(asked)
        self._seen.ran(done.sequence_id, asked.turn.end, done.tokens[:-1])
        if asked.turn.nodes:
            proposal = Proposal.chain(self.name, done.tokens)
            done = Completion(done.sequence_id, [], proposal=proposal)
        self._done.append(done)

    def _end(self, request_id: int, error: str) -> None:
        asked = self._in_flight.pop(request_id).asked
        self._requests.over(asked)
        self._done.append(Completion(asked.turn.sequence.id, [], error=f"{self.name}: {error}"))

    def _time_out(self) -> None:
        """Cancel what takes too long; an executor that does not even answer that is dead."""
        now = self._clock()
        for request_id, running in list(self._in_flight.items()):
            late_s = now - running.since_s - self._settings.turn_timeout_s
            if late_s > GRACE_S:
                raise EngineDiedError(
                    f"request {request_id} was not answered for {now - running.since_s:.0f} s"
                )
            if late_s > 0 and not running.cancelled:
                running.cancelled = True
                self._count("spindle_fallback_total", reason="engine_timeout")
                self._executor.cancel_request(request_id)


def executor_config(trtllm: Any, engine: EngineFolder, settings: ExecutorSettings) -> Any:
    """Return how an engine's executor is to be created."""
    mode = (
        trtllm.CommunicationMode.ORCHESTRATOR
        if settings.orchestrated
        else trtllm.CommunicationMode.LEADER
    )
    orchestrator = (
        trtllm.OrchestratorConfig(True, settings.worker) if settings.orchestrated else None
    )
    return trtllm.ExecutorConfig(
        1,
        kv_cache_config=trtllm.KvCacheConfig(
            enable_block_reuse=True, free_gpu_memory_fraction=settings.kv_fraction
        ),
        # Chunks would lose drafts past the token budget, and leave unfinished blocks to be found
        # where a text is cancelled.
        enable_chunked_context=False,
        max_batch_size=engine.max_batch_size,
        parallel_config=trtllm.ParallelConfig(
            communication_mode=mode,
            device_ids=list(settings.gpus),
            orchestrator_config=orchestrator,
        ),
        gather_generation_logits=engine.verifies_drafts,  # for log-probabilities
    )


def _uncounted(name: str, amount: float = 1, **labels: str) -> None:
    del name, amount, labels


def load_bindings() -> Any:
    """Import the real bindings, which only NVIDIA's container has."""
    try:
        import tensorrt_llm.bindings.executor as trtllm
    except ImportError as error:
        raise EngineDiedError(
            f"the engine 'trtllm' needs TensorRT-LLM 1.2.1, which cannot be imported here: {error}"
        ) from error
    return trtllm
