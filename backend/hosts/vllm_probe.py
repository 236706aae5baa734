r"""One running vLLM for all lengths: it drafts as many tokens as the requests of a step ask for.

    vllm serve MODEL --scheduler-cls spindle_vllm.ProbeScheduler --no-async-scheduling \
        --speculative-config '{..., "num_speculative_tokens": 6,
            "num_speculative_tokens_per_batch_size": [[1, 1024, 6]]}'

A body asks with ``"vllm_xargs": {"probe_k": 3}``. It is for ``spindle advise --url`` only: of
requests that ask for different lengths, the longest counts for all. The table makes vLLM look a
length up in each step; the probe rewrites what it looks up.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class ProbeScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with the length that requests ask for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.dynamic_sd_lookup is None:
            raise ValueError(
                "the probe scheduler needs num_speculative_tokens_per_batch_size in "
                "--speculative-config, such as [[1, 1024, 6]]"
            )

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Schedule a step at the longest length asked for."""
        extras = [request.sampling_params.extra_args or {} for request in self.requests.values()]
        lengths = [int(extra["probe_k"]) for extra in extras if "probe_k" in extra]
        if lengths:
            length = min(max(lengths), self.num_spec_tokens)
            self.dynamic_sd_lookup[:] = [length] * len(self.dynamic_sd_lookup)
        return super().schedule(*arguments, **options)


class AsyncProbeScheduler(ProbeScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same under asynchronous scheduling."""
