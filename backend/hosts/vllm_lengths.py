"""The policy in vLLM where vLLM's own drafter proposes: its scheduler sets how many tokens the
drafter proposes for each request, down to none.

    speculative_config={"method": "draft_model", "model": ..., "num_speculative_tokens": 5}
    scheduler_cls="spindle_vllm.SpindleLengthScheduler"
    async_scheduling=False

vLLM drafts one length for a batch (``num_spec_tokens_to_schedule``), the longest that is planned;
each request's proposal is then cut to its own length before it is verified.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from backend.config import ConfigError
from backend.hosts.adapter import Row
from backend.hosts.calibration import Calibration
from backend.hosts.lengths import Lengths
from backend.hosts.settings import HostConfig
from backend.hosts.vllm import SpindleScheduler, _read, _save, _settings
from policy import LatencyTable


class SpindleLengthScheduler(SpindleScheduler):
    """vLLM's scheduler with planned lengths for vLLM's own drafter. It plans the next step while
    it schedules the present one, whose pass ends with drafting for the next.
    """

    _own_drafter = True
    _host: Lengths

    def _settings(self) -> HostConfig:
        speculation = self.vllm_config.speculative_config
        if speculation is None or speculation.method == "custom_class":
            raise ConfigError("SpindleLengthScheduler needs a speculative_config of vLLM's own")
        return _settings(self.vllm_config, str(speculation.method))

    def _make_host(self) -> Lengths:
        self._lengths: dict[Any, int] = {}
        return Lengths(self._spindle, self._stats)

    def _plan_by_file(self) -> bool:
        saved = _read(self._spindle.latency_file)
        if saved is not None:
            forward_s = {int(rows): seconds for rows, seconds in saved["drafter_s"].items()}
            self._host.plan_by_passes(LatencyTable.from_dict(saved["target"]), forward_s)
        return saved is not None

    def _plan_by(self, table: LatencyTable, calibration: Calibration) -> None:
        forward_s = calibration.drafter_s()
        _save(self._spindle.latency_file, {"target": table.to_dict(), "drafter_s": forward_s})
        self._host.plan_by_passes(table, forward_s)

    def _proposed(self, decoding: dict[str, Any]) -> dict[str, list[int]]:
        """Return nothing: vLLM's drafter has proposed."""
        del decoding
        return {}

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Plan what is drafted in the pass of this step for the next one."""
        super()._update_after_schedule(scheduler_output)
        if self._calibration is not None:
            shape = self._calibration.shape
            scheduler_output.num_spec_tokens_to_schedule = 0 if shape is None else shape.drafted
            return
        scheduled = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
        rows = [self._row(request) for request in scheduled if not request.is_prefill_chunk]
        prefilling = [request for request in self.running if request.is_prefill_chunk]
        tokens = sum(one.num_tokens - one.num_computed_tokens for one in prefilling)
        most = max(self.max_num_scheduled_tokens - len(rows), 0)
        self._lengths = self._host.plan_lengths(rows, min(tokens, most), len(prefilling))
        longest = max(self._lengths.values(), default=0)
        scheduler_output.num_spec_tokens_to_schedule = longest

    def _row(self, request: Any) -> Row:
        """Return a request of the next step, which this one leaves a token nearer to its end."""
        return Row(
            request.request_id,
            request.all_token_ids,
            request.num_prompt_tokens,
            max(1, self._remaining(request) - 1),
            request.sampling_params.temperature > 0,
            request.cache_salt or "",
        )

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Cut what was drafted to the planned lengths."""
        if self._calibration is not None:
            return
        names = draft_token_ids.req_ids
        cut = [
            [*tokens[: self._lengths.get(name, 0)]]
            for name, tokens in zip(names, draft_token_ids.draft_token_ids, strict=True)
        ]
        for name, tokens in zip(names, cut, strict=True):
            self._host.drafted(name, tokens)
        Scheduler.update_draft_token_ids(self, DraftTokenIds([*names], cut))
