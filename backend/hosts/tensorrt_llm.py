"""The policy in TensorRT-LLM's PyTorch backend: a drafter for ``UserProvidedDecodingConfig``.

Written against recorded sources of 1.2.1 and later (``tests/contract/tensorrt_llm_drafter_api
.json``) and tested on a fake that enforces what they do; **it has never run on the real thing**.
The executor's work in a step, and where this takes part:

1. ``get_draft_len_for_batch_size``: the policy plans; 0, and the step has no drafts at all, or all
   of ``max_draft_len``, for the executor pads every row to it. Then it reserves KV for the drafts
   of rows that are not marked as out of speculation.
2. ``prepare_draft_tokens``: the proposals go into ``py_draft_tokens``.
3. The target verifies; without draft logits the sampler keeps what it would have drawn itself.
4. ``free_resources`` of the resource manager for requests that are over: in 1.2.1 before 5, in
   later versions after it.
5. ``update_resources``, which is called in steps without drafts too: the policy learns from the
   emitted tokens, and the requests that decode next are known.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import tensorrt_llm
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequestState
from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
from tensorrt_llm._torch.speculative.drafter import Drafter
from tensorrt_llm.llmapi import UserProvidedDecodingConfig

from backend.checked_settings import ConfigError
from backend.hosts.adapter import Host, HostRow, VerifiedRow
from backend.hosts.settings import TARGET, HostConfig, host_config
from backend.ops.stats import Stats, StepStats
from backend.sequence import Proposal
from backend.speculation.explaining import explain_last
from policy import LatencyTable

logger = logging.getLogger(__name__)

_LOOKUP = [{"engine": "lookup", "name": "lookup"}]
"""The default draft, which remembers no answers: requests here name no tenant."""

_GUESSED_S = {1: 0.01, 64: 0.0105, 256: 0.014, 1024: 0.04, 4096: 0.15}
"""Seconds of a GPU's passes by tokens without a measured table; measured steps correct them."""


def engine_args(
    settings: Mapping[str, Any],
    max_draft_len: int,
    max_seq_len: int,
    stats: Stats | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.LLM`` besides the model: drafter, resources, and no
    overlap scheduler, which excludes proposals. ``stats`` counts (None: its own). Raises
    ConfigError.
    """
    drafter = SpindleDrafter(settings, max_draft_len, max_seq_len, stats or Stats())
    decoding = UserProvidedDecodingConfig(
        max_draft_len=max_draft_len, drafter=drafter, resource_manager=drafter.resources
    )
    return {"speculative_config": decoding, "disable_overlap_scheduler": True}


@dataclass(slots=True)
class HostRequest:
    """A request in the words of the program that runs the LLM, and its steps so far."""

    most_drafted: Callable[[], int | None]
    """Returns a ceiling on the next proposal; 0: none, None: the planner decides."""
    salt: str = ""
    """Its tenant: learned estimates and remembered answers are kept apart by it."""
    verified_steps: list[tuple[int, int]] = field(default_factory=list)
    """(proposed, accepted) of each step that verified a proposal."""


class SpindleDrafter(Drafter):  # type: ignore[misc] # TensorRT-LLM is not there to be checked
    """Proposes what the policy chooses, for the executor's loop on one GPU."""

    _needs_padding_kv_extension = True  # its sampler rewinds by padded lengths

    def __init__(
        self,
        settings: Mapping[str, Any],
        max_draft_len: int,
        max_seq_len: int,
        stats: Stats,
    ) -> None:
        """Take settings as of ``backend.hosts.settings``. Raises ConfigError for them, or where the
        model spans several GPUs: each rank would time its steps and plan by itself.
        """
        super().__init__(
            max_draft_len=max_draft_len,
            max_total_draft_tokens=max_draft_len,
            max_concurrency=None,
            draft_len_schedule={1: max_draft_len},  # any at all, so that we are asked each step
        )
        if (ranks := tensorrt_llm.mpi_world_size()) > 1:
            raise ConfigError(f"SpindleDrafter needs a model on one GPU, got {ranks} ranks")
        options = {"drafts": _LOOKUP, **settings}
        config = host_config(options, max_draft_len, max_seq_len)
        self._host = Host(config, stats)
        self._host.plan_by(_table(config, stats), padded_tokens=max_draft_len)
        if config.metrics_port:
            from backend.hosts.metrics import Exporter

            self._exporter = Exporter(stats, config.metrics_port)
        self._proposals: dict[Any, Proposal] = {}
        self.requests: dict[Any, HostRequest] = {}
        """By client id. A program that submits a request holds ``lock`` until it is noted here."""
        self.lock = Lock()
        self.resources = SpindleResources(self._host, self._proposals, self.requests)

    def explain(self) -> dict[str, Any]:
        """Explain the last plan (any thread)."""
        return explain_last(self._host.cycle)

    def get_draft_len_for_batch_size(self, batch_size: int) -> int:
        """Plan the step of the requests that decode now; return 0 if none of them speculates."""
        del batch_size
        decoding = self.resources.decoding.values()
        with self.lock:
            rows = [_row(request, self.requests.get(request.py_client_id)) for request in decoding]
        self._proposals.clear()
        self._proposals.update(self._host.propose(rows))
        for request in decoding:  # a step without drafts has set it: KV would not be reserved
            request.py_disable_speculative_decoding = False
        return self._static_max_total_draft_tokens if self._proposals else 0

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Give each decoding request its proposal; the executor fills them up with zeros."""
        del resource_manager
        for request in scheduled_requests.generation_requests:
            proposal = self._proposals.get(request.py_request_id)
            request.py_draft_tokens = [] if proposal is None else [*proposal.tokens]


class SpindleResources(BaseResourceManager):  # type: ignore[misc]
    """No resources: the calls by which the executor tells of steps and ends.

    ``decoding`` are the requests that decode in the next step, by id.
    """

    def __init__(
        self, host: Host, proposals: Mapping[Any, Proposal], requests: Mapping[Any, HostRequest]
    ) -> None:
        self._host, self._proposals, self._requests = host, proposals, requests
        self._over: list[Any] = []
        self._runs = False  # a step that is yet to be learned from
        self._started_s, self._prefill_tokens = 0.0, 0
        self.decoding: dict[Any, Any] = {}

    def get_max_resource_count(self) -> int:
        """Return 0: admission does not depend on this one."""
        return 0

    def get_needed_resource_to_completion(self, request: Any) -> int:
        """Return 0, as above."""
        del request
        return 0

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Note when the step begins, and what of prompts is in it."""
        self._prefill_tokens = sum(r.context_chunk_size for r in scheduled_batch.context_requests)
        self._started_s, self._runs = perf_counter(), True

    def update_resources(self, scheduled_batch: Any) -> None:
        """Learn from the finished step, and note the requests that decode from now on."""
        step_s = perf_counter() - self._started_s
        rows = []
        for request in scheduled_batch.generation_requests:
            proposal = self._proposals.get(request.py_request_id)
            proposed = [] if proposal is None else proposal.tokens
            rows.append(VerifiedRow(request.py_request_id, proposed, request.get_tokens(0)))
            entry = self._requests.get(request.py_client_id)
            if proposed and entry is not None:
                accepted = min(request.py_num_accepted_draft_tokens, len(proposed))
                entry.verified_steps.append((len(proposed), accepted))
        self._host.ran(rows, verify_s=step_s, prefill_tokens=self._prefill_tokens)
        self._runs = False
        self._forget()
        for request in (*scheduled_batch.context_requests, *scheduled_batch.generation_requests):
            if request.state == LlmRequestState.GENERATION_IN_PROGRESS and not request.is_dummy:
                self.decoding[request.py_request_id] = request

    def free_resources(self, request: Any) -> None:
        """Forget a request that is over, or paused and to be restarted, once its last step has been
        learned from.
        """
        if self.decoding.pop(request.py_request_id, None) is not None:
            self._over.append(request.py_request_id)
        if not self._runs:
            self._forget()

    def _forget(self) -> None:
        self._host.end(self._over)
        self._over.clear()

    def shutdown(self) -> None:
        """Release the drafts."""
        self._host.close()


def _row(request: Any, entry: HostRequest | None) -> HostRow:
    tokens, prompt = request.get_tokens(0), request.py_orig_prompt_len
    remaining = max(1, int(prompt + request.py_max_new_tokens) - len(tokens))
    most = None if entry is None else entry.most_drafted()
    if most is not None:
        remaining = min(remaining, most + 1)  # a proposal leaves room for the target's own token
    salt = "" if entry is None else entry.salt
    return HostRow(request.py_request_id, tokens, prompt, remaining, salt=salt)


def _table(config: HostConfig, stats: Stats) -> LatencyTable:
    """Return the measured table, else a guess, which is counted. Raises LatencyError for a file
    that holds none.
    """
    file = Path(config.latency_file)
    if config.latency_file and file.exists():
        return LatencyTable.from_dict(json.loads(file.read_text("utf-8")))
    StepStats(stats).fallback("latency_guessed")
    logger.warning("spindle: no latency table: planning starts from a guess")
    return LatencyTable.synthetic(TARGET, _GUESSED_S)
