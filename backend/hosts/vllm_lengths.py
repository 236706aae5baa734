"""The policy in vLLM where vLLM's own drafter proposes: its scheduler sets how many tokens the
drafter proposes for each request, down to none.

    speculative_config={"method": "eagle3", "model": ..., "num_speculative_tokens": 5}
    scheduler_cls="spindle_vllm.SpindleAsyncLengthScheduler"

vLLM drafts one length for a batch (``num_spec_tokens_to_schedule``), the longest that is planned;
of each request's proposal no more than its own length is verified. Without asynchronous scheduling
(``async_scheduling=False``; n-grams and CPUs do not have it) it is ``SpindleLengthScheduler``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from backend.checked_settings import ConfigError
from backend.hosts.calibration import StepCalibration
from backend.hosts.lengths import Lengths
from backend.hosts.settings import HostConfig
from backend.hosts.vllm import ScheduledStep, SpindleScheduler
from backend.hosts.vllm_config import read_latencies, save_latencies, settings_of
from policy import LatencyTable


class SpindleLengthScheduler(SpindleScheduler):
    """vLLM's scheduler with planned lengths for vLLM's own drafter. It plans the next step while
    it schedules the present one, whose pass ends with drafting for the next.
    """

    _asynchronous = False
    _own_drafter = True
    _host: Lengths

    def _settings(self) -> HostConfig:
        speculation = self.vllm_config.speculative_config
        if speculation is None or speculation.method == "custom_class":
            raise ConfigError("this scheduler needs a speculative_config of vLLM's own")
        method = str(speculation.method)
        return settings_of(self.vllm_config, method, asynchronous=self._asynchronous)

    def _make_host(self) -> Lengths:
        self._lengths: dict[Any, int] = {}
        return Lengths(self._spindle, self._stats)

    def _plan_by_file(self) -> bool:
        saved = read_latencies(self._spindle.latency_file)
        if saved is not None:
            forward_s = {int(rows): seconds for rows, seconds in saved["drafter_s"].items()}
            self._host.plan_by_passes(LatencyTable.from_dict(saved["target"]), forward_s)
        return saved is not None

    def _plan_by(self, table: LatencyTable, calibration: StepCalibration) -> None:
        forward_s = calibration.drafter_s()
        measured = {"target": table.to_dict(), "drafter_s": forward_s}
        save_latencies(self._spindle.latency_file, measured)
        self._host.plan_by_passes(table, forward_s)

    def _propose(self, decoding: dict[str, Any]) -> dict[str, list[int]]:
        """Return nothing: vLLM's drafter has proposed."""
        del decoding
        return {}

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Plan what is drafted in the pass of this step for the next one."""
        super()._update_after_schedule(scheduler_output)
        if self._calibration is not None:
            self._ask_for(scheduler_output, *self._calibration_lengths(scheduler_output))
            return
        scheduled = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
        # Each step that is not over leaves a request at least a token nearer to its end.
        rows = [
            self._row(request, max(1, self._remaining(request) - len(self._steps) - 1))
            for request in scheduled
            if not request.is_prefill_chunk
        ]
        prefilling = [request for request in self.running if request.is_prefill_chunk]
        tokens = sum(one.num_tokens - one.num_computed_tokens for one in prefilling)
        most = max(self.max_num_scheduled_tokens - len(rows), 0)
        self._lengths = self._host.plan_lengths(rows, min(tokens, most), len(prefilling))
        self._ask_for(scheduler_output, max(self._lengths.values(), default=0), self._lengths)

    def _ask_for(self, scheduler_output: Any, drafted: int, lengths: dict[Any, int]) -> None:
        """Have this many tokens drafted for each request, and these verified in the next step."""
        del lengths  # ``update_draft_token_ids`` cuts the drafts
        scheduler_output.num_spec_tokens_to_schedule = drafted

    def _calibration_lengths(self, scheduler_output: Any) -> tuple[int, dict[Any, int]]:
        """Return how many tokens are drafted in a step that is measured, and those of them that
        the next one verifies.
        """
        del scheduler_output
        assert self._calibration is not None
        shape = self._calibration.shape
        return (0 if shape is None else shape.drafted), {}

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Cut what was drafted to the planned lengths."""
        if self._calibration is not None:
            return
        names = draft_token_ids.req_ids
        cut = [
            [*tokens[: self._lengths.get(name, 0)]]
            for name, tokens in zip(names, draft_token_ids.draft_token_ids, strict=True)
        ]
        Scheduler.update_draft_token_ids(self, DraftTokenIds([*names], cut))


class SpindleAsyncLengthScheduler(SpindleLengthScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same under vLLM's asynchronous scheduling. A step is scheduled before the one before it
    is over: its lengths are planned without those tokens, and drafts stay on the device.
    """

    _asynchronous = True

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Learn from a step whose drafts are known by the tokens that it emitted only."""
        step, sampled = self._steps[0], model_runner_output.sampled_token_ids
        for name, (request, drafts) in step.decoding.items():
            self._host.catch_up(name, request.all_token_ids)
            if drafts and sampled:
                accepted = sampled[model_runner_output.req_id_to_index[name]][:-1]
                drafts[: len(accepted)] = accepted
        return super().update_from_output(scheduler_output, model_runner_output)

    def _ask_for(self, scheduler_output: Any, drafted: int, lengths: dict[Any, int]) -> None:
        """As above; the next step has placeholders. A request that this step does not run has no
        drafts on the device.
        """
        super()._ask_for(scheduler_output, drafted, lengths)
        scheduled = scheduler_output.num_scheduled_tokens
        for request in self.running:
            name = request.request_id
            has_drafts = name in scheduled and not request.is_prefill_chunk
            request.spec_token_ids = [-1] * lengths.get(name, 0) if has_drafts else []

    # Only what was drafted can be verified here: where a length is measured, every other step
    # drafts, and the steps between verify.

    def _calibration_lengths(self, scheduler_output: Any) -> tuple[int, dict[Any, int]]:
        assert self._calibration is not None
        shape = self._calibration.shape
        if shape is None or not shape.length or scheduler_output.scheduled_spec_decode_tokens:
            return super()._calibration_lengths(scheduler_output)
        return shape.length, dict.fromkeys(self._made_up, shape.length)

    def _calibration_tokens(self, decoding: dict[str, Any], shape: Any) -> dict[str, list[int]]:
        """Return nothing: vLLM's drafter proposes."""
        del decoding, shape
        return {}

    def _note_calibration(self, step: ScheduledStep, verify_s: float) -> None:
        verifies = any(drafts for _, drafts in step.decoding.values())
        if step.shape is not None and verifies == (step.shape.length > 0):
            super()._note_calibration(step, verify_s)
