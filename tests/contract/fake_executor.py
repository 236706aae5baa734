"""A fake of ``tensorrt_llm.bindings.executor`` without model or GPU, written from the description
of the API and of its C++ decoder.

``tensorrt_llm_executor_api.json`` says where that description comes from, and its signatures are
bound as nanobind binds them. Differences from a step engine are here: requests wait in a queue, run
iteration by iteration in one batch, and are answered late, out of order or in parts; a prompt's KV
is found by blocks or is not; a request with draft tokens is over after one verification; every
request is a new one, whose seed starts its stream of numbers again. An iteration has a budget of
tokens, against which every context counts whole, found or not.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from tests.contract.fake_decoder import Decoder, Forward
from tests.contract.fake_executor_types import *  # noqa: F403 the module stands for the bindings
from tests.contract.fake_executor_types import (
    ExecutorConfig,
    FinishReason,
    InflightBatchingStats,
    IterationStats,
    KvCacheMetrics,
    KvCacheStats,
    ModelType,
    Request,
    RequestPerfMetrics,
    Response,
    Result,
    as_recorded,
)

DRAFT_TOKENS_EXTERNAL = 2
"""The mode as the engine's ``config.json`` has it."""


@dataclass
class Behaviour:
    """An executor's behaviour towards its users. Chances are per response, request or iteration;
    ``seed`` draws them.
    """

    seed: int = 0
    late: float = 0.0  # a finished response waits for a later call
    shuffled: bool = False
    evicts: float = 0.0  # an iteration empties the cache of prefixes
    refuses: float = 0.0  # a request ends in an error
    dies_at: int | None = None  # iteration from which on every call raises
    mute: bool = False  # requests are taken and never answered
    iteration_s: float = 0.0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


@dataclass
class Model:
    """The model that an engine folder stands for: logits [vocab] after tokens, and how its executor
    behaves.
    """

    forward: Forward
    behaviour: Behaviour = field(default_factory=Behaviour)
    kv_blocks: int = 64


@dataclass
class _Running:
    id: int
    request: Request
    decoder: Decoder
    metrics: RequestPerfMetrics = field(
        default_factory=lambda: RequestPerfMetrics(kv_cache_metrics=KvCacheMetrics())
    )
    finish: FinishReason = FinishReason.NOT_FINISHED
    computed: int = 0  # of the prompt

    @property
    def remaining(self) -> int:
        """Tokens of the prompt that are yet to be computed: 0 in the generation phase."""
        return len(self.request.input_token_ids) - self.computed


class Executor:
    """See the recorded API; ``models`` says what the engine folders stand for, ``created`` keeps
    every executor for the tests.
    """

    models: ClassVar[dict[str, Model]] = {}
    created: ClassVar[list[Executor]] = []

    @as_recorded
    def __init__(
        self, model_path: str | Path, model_type: ModelType, executor_config: ExecutorConfig
    ) -> None:
        assert model_type is ModelType.DECODER_ONLY
        config = json.loads((Path(model_path) / "config.json").read_text())
        self.build, self.pretrained = config["build_config"], config["pretrained_config"]
        self.plugins = self.build["plugin_config"]
        self.config = executor_config
        self.model_path = Path(model_path)
        self._model = self.models[str(model_path)]
        self._behaviour = self._model.behaviour
        self.external = self.build["speculative_decoding_mode"] == DRAFT_TOKENS_EXTERNAL
        reuse = (
            executor_config.kv_cache_config.enable_block_reuse
            and self.plugins["use_paged_context_fmha"]
        )
        if self.external and not reuse:
            raise RuntimeError(
                "KV cache block reuse must be enabled for speculative decoding target model"
            )
        if executor_config.max_beam_width > self.build.get("max_beam_width", 1):
            raise RuntimeError("max_beam_width exceeds that of the engine")
        self.budget = executor_config.max_num_tokens or self.build["max_num_tokens"]
        longest = min(self.build["max_seq_len"] - 1, self.build["max_input_len"])
        self.longest_prompt = (
            longest if executor_config.enable_chunked_context else min(longest, self.budget)
        )
        self.prefixes = _Prefixes(
            self._model.kv_blocks,
            self.plugins["tokens_per_block"],
            reuse,
            executor_config.kv_cache_config,
        )
        self.iterations = self.chunks = self.discarded = (
            0  # contexts left unfinished by an iteration; draft tokens never verified
        )
        self.requests: list[Request] = []
        self.live = True
        self._ids = 0
        self._queue: deque[_Running] = deque()
        self._active: list[_Running] = []
        self._ready: list[Response] = []
        self._stats: deque[IterationStats] = deque(maxlen=executor_config.iter_stats_max_iterations)
        self.created.append(self)

    # -- the API

    @as_recorded
    def enqueue_request(self, request: Request) -> int:
        (request_id,) = self.enqueue_requests([request])
        return request_id

    @as_recorded
    def enqueue_requests(self, requests: list[Request]) -> list[int]:
        self._check_alive()
        limit = self.config.max_queue_size
        if limit and len(self._queue) + len(requests) > limit:
            raise RuntimeError(
                f"Maximum queue size of {limit} has been reached, please try again later"
            )
        ids = []
        for request in requests:
            self._ids += 1
            self.requests.append(request)
            ids.append(self._ids)
            try:
                self._validate(request)
            except RuntimeError as error:
                self._ready.append(
                    Response(self._ids, error_msg=str(error), client_id=request.client_id)
                )
                continue
            decoder = Decoder(request, self._model.forward, int(self.pretrained["vocab_size"]))
            self._queue.append(_Running(self._ids, request, decoder))
        return ids

    @as_recorded
    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """Iterate until something is finished; the time is up when nothing can be."""
        self._check_alive()
        while not self._ready and (self._queue or self._active) and not self._behaviour.mute:
            self._iterate()
        if not self._ready and timeout is not None and (self._active or self._queue):
            time.sleep(min(0.02, timeout.total_seconds()))
        groups: dict[int, list[Response]] = {}
        for response in self._ready:
            groups.setdefault(response.request_id, []).append(response)
        answers = list(groups.values())  # those of one request stay in order
        late = [answer for answer in answers[1:] if self._behaviour.happens(self._behaviour.late)]
        now = [answer for answer in answers if answer not in late]
        if self._behaviour.shuffled:
            now = [now[i] for i in self._behaviour.rng.permutation(len(now))]
        self._ready = [response for answer in late for response in answer]
        return [response for answer in now for response in answer]

    @as_recorded
    def get_num_responses_ready(self, id: int | None = None) -> int:  # noqa: A002 the name in the API
        return sum(id in (None, response.request_id) for response in self._ready)

    @as_recorded
    def cancel_request(self, id: int | None = None) -> None:  # noqa: A002
        self._check_alive()
        for running in [r for r in (*self._queue, *self._active) if r.id == id]:
            running.finish = FinishReason.CANCELLED
            if running in self._queue:
                self._queue.remove(running)
            else:
                self._active.remove(running)
            self._respond(running, [])

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        self._check_alive()
        stats = list(self._stats)
        self._stats.clear()
        return stats

    def can_enqueue_requests(self) -> bool:
        return self.live

    def shutdown(self) -> None:
        self.live = False

    # -- one iteration of the batch

    def _check_alive(self) -> None:
        dies_at = self._behaviour.dies_at
        if not self.live or (dies_at is not None and self.iterations >= dies_at):
            raise RuntimeError("Executor worker has died")

    def _validate(self, request: Request) -> None:
        draft = request.external_draft_tokens_config
        tokens, most_draft = (
            len(request.input_token_ids),
            self.build["max_draft_len"] if self.external else 0,
        )
        if draft and len(draft.tokens) > most_draft:
            raise RuntimeError(
                f"Draft tokens length ({len(draft.tokens)}) exceeds maximum draft tokens length "
                f"({most_draft})."
            )
        if tokens + (len(draft.tokens) if draft else 0) > self.longest_prompt:
            raise RuntimeError(
                f"Prompt length ({tokens}) exceeds maximum input length ({self.longest_prompt})."
            )
        dtype = getattr(torch, self.pretrained["logits_dtype"])
        if draft and draft.logits is not None and draft.logits.dtype != dtype:
            raise RuntimeError(
                f"draft logits of {draft.logits.dtype} do not match the engine's logits of {dtype}"
            )
        if max(request.input_token_ids) >= self.pretrained["vocab_size"]:
            raise RuntimeError("a token id is out of range")
        gathered = (
            self.build.get("gather_generation_logits") or self.config.gather_generation_logits
        )
        if request.output_config.return_generation_logits and not gathered:
            raise RuntimeError("generation logits were not gathered")
        if request.sampling_config.beam_width != 1 and self.external:
            raise RuntimeError("beam width must be 1 with draft tokens")
        if self._behaviour.happens(self._behaviour.refuses):
            raise RuntimeError("injected failure")

    def _iterate(self) -> None:
        if self._behaviour.iteration_s:
            time.sleep(self._behaviour.iteration_s)
        self.iterations += 1
        self._check_alive()
        if self._behaviour.happens(self._behaviour.evicts):
            self.prefixes.evict()
        most = self.config.max_batch_size or self.build["max_batch_size"]
        while self._queue and len(self._active) < most:
            self._active.append(self._queue.popleft())
        scheduled = self._schedule()
        stats = InflightBatchingStats(num_scheduled_requests=len(scheduled))
        for running, chunk in scheduled:
            if chunk == 0:
                stats.num_gen_requests += 1
            else:
                self._prefill(running, chunk, stats)
        for running, _ in scheduled:
            if running.remaining == 0:
                self._finish(running, running.decoder.step())
        self._stats.append(self._iteration_stats(stats))

    def _schedule(self) -> list[tuple[_Running, int]]:
        """Return who runs now, and how much of its prompt (0: it generates):
        ``MicroBatchScheduler``, first come, first served.

        A context counts whole, for what is found of it is known only when it has its blocks.
        Without chunks a request that does not fit waits, and so do all after it. With chunks what
        does not fit is cut, and *then* draft tokens are discarded that would need room beyond it.
        """
        scheduled: list[tuple[_Running, int]] = []
        left, contexts = self.budget, []
        for running in self._active:
            need = (
                (running.remaining + len(running.decoder.draft_tokens)) if running.remaining else 1
            )
            if running.remaining and self.config.enable_chunked_context:
                contexts.append(running)
            elif need > left:
                break
            else:
                left -= need
                scheduled.append((running, running.remaining))
        needed = sum(running.remaining + len(running.decoder.draft_tokens) for running in contexts)
        sizes = (
            [running.remaining for running in contexts]
            if needed <= left
            else self._chunks(contexts, left)
        )
        return scheduled + [pair for pair in zip(contexts, sizes, strict=True) if pair[1]]

    def _chunks(self, contexts: list[_Running], budget: int) -> list[int]:
        unit, left, sizes = self.prefixes.tokens_per_block, budget, []
        for running in contexts:
            size = min(left, running.remaining)
            sizes.append(size if size == running.remaining else size // unit * unit)
            left -= sizes[-1]
        total = sum(sizes)
        for running, size in zip(contexts, sizes, strict=True):
            if size == running.remaining:
                room = min(-size % unit, budget - total)
                total += room
                self.discarded += max(0, len(running.decoder.draft_tokens) - room)
                del running.decoder.draft_tokens[room:]
        return sizes

    def _prefill(self, running: _Running, chunk: int, stats: InflightBatchingStats) -> None:
        """Compute a chunk of a prompt; what of it is found makes it reach further."""
        unit = self.prefixes.tokens_per_block
        if running.computed == 0:
            running.computed = self.prefixes.look_up(
                running.request, running.metrics.kv_cache_metrics
            )
            running.metrics.first_iter = self.iterations
            if chunk < running.remaining:
                chunk = (running.computed + chunk) // unit * unit - running.computed
        chunk = min(chunk, running.remaining)
        running.computed += chunk
        draft_tokens = 0 if running.remaining else len(running.decoder.draft_tokens)
        self.chunks += running.remaining > 0
        stats.num_context_requests += 1
        stats.num_ctx_tokens += chunk + draft_tokens

    def _finish(self, running: _Running, tokens: list[int]) -> None:
        request, decoder = running.request, running.decoder
        running.finish = decoder.finish_reason()
        if running.finish is FinishReason.NOT_FINISHED and decoder.verified:
            running.finish = (
                FinishReason.LENGTH
            )  # a request with draft tokens is over after its verification
        if running.finish is not FinishReason.NOT_FINISHED:
            self._active.remove(running)
            self.prefixes.store(request, decoder.tokens[:-1])  # the last token was never run
        if running.finish is not FinishReason.NOT_FINISHED or request.streaming:
            self._respond(running, tokens)

    def _respond(self, running: _Running, new: list[int]) -> None:
        request, decoder = running.request, running.decoder
        done = running.finish is not FinishReason.NOT_FINISHED
        output = (
            new if request.streaming and not request.return_all_generated_tokens else decoder.output
        )
        if not request.output_config.exclude_input_from_output and not request.streaming:
            output = request.input_token_ids + output
        result = Result(
            is_final=done,
            is_sequence_final=done,
            output_token_ids=[list(output)],
            finish_reasons=[running.finish],
            decoding_iter=self.iterations,
        )
        if request.output_config.return_generation_logits:
            rows = (
                decoder.rows[len(decoder.rows) - len(new) :] if request.streaming else decoder.rows
            )
            dtype = getattr(torch, self.pretrained["logits_dtype"])
            result.generation_logits = torch.tensor(
                np.array(rows).reshape(len(rows), int(self.pretrained["vocab_size"])), dtype=dtype
            )[None]
        if request.output_config.return_perf_metrics:
            running.metrics.last_iter = running.metrics.iter = self.iterations
            result.request_perf_metrics = running.metrics
        self._ready.append(Response(running.id, result=result, client_id=request.client_id))

    def _iteration_stats(self, stats: InflightBatchingStats) -> IterationStats:
        used = len(self.prefixes.blocks)
        kv = KvCacheStats(
            max_num_blocks=self.prefixes.size,
            free_num_blocks=self.prefixes.size - used,
            used_num_blocks=used,
            tokens_per_block=self.prefixes.tokens_per_block,
        )
        return IterationStats(
            iter=self.iterations,
            iter_latency_ms=1000 * self._behaviour.iteration_s,
            num_active_requests=len(self._active),
            num_queued_requests=len(self._queue),
            kv_cache_stats=kv,
            inflight_batching_stats=stats,
        )


class _Prefixes:
    """KV by content: complete blocks after the same text and salt, and (partial reuse) the head of
    one more; the least used go first.
    """

    def __init__(self, size: int, tokens_per_block: int, reuse: bool, config) -> None:
        self.size, self.tokens_per_block = size, tokens_per_block
        self._reuse, self._partial = reuse, config.enable_partial_reuse
        self.blocks: OrderedDict[int, tuple[int, tuple]] = (
            OrderedDict()
        )  # (the block before, tokens) by a hash of the whole text
        self.following: dict[int, set[tuple]] = {}  # the tokens of the blocks after each block

    def look_up(self, request: Request, metrics) -> int:
        """Return how many tokens need no computing, and account for the prompt's blocks."""
        tokens, per_block = request.input_token_ids, self.tokens_per_block
        usable = len(tokens) - 1  # the last token's logits are needed
        before, whole = hash(request.cache_salt_id), 0
        while self._reuse and (whole + 1) * per_block <= usable:
            key = hash((before, tuple(tokens[whole * per_block : (whole + 1) * per_block])))
            if key not in self.blocks:
                break
            self.blocks.move_to_end(key)
            before, whole = key, whole + 1
        reused = whole * per_block
        if self._reuse and self._partial:
            heads = self.following.get(before, ())
            reused += max((self._common(head, tokens[reused:usable]) for head in heads), default=0)
        metrics.num_reused_blocks = whole
        metrics.num_total_allocated_blocks = -(-len(tokens) // per_block)
        metrics.num_missed_blocks = metrics.num_new_allocated_blocks = (
            metrics.num_total_allocated_blocks - whole
        )
        metrics.kv_cache_hit_rate = whole / metrics.num_total_allocated_blocks
        return reused

    def store(self, request: Request, tokens: list[int]) -> None:
        before = hash(request.cache_salt_id)
        for start in range(0, len(tokens) - self.tokens_per_block + 1, self.tokens_per_block):
            block = tuple(tokens[start : start + self.tokens_per_block])
            key = hash((before, block))
            self.blocks[key] = before, block
            self.blocks.move_to_end(key)
            self.following.setdefault(before, set()).add(block)
            before = key
        while len(self.blocks) > self.size:
            _, (before, block) = self.blocks.popitem(last=False)
            self.following[before].discard(block)

    def evict(self) -> None:
        self.blocks.clear()
        self.following.clear()

    @staticmethod
    def _common(ours, theirs) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
