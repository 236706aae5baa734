"""TensorRT-LLM's loop about a drafter, as its recorded sources have it (``tensorrt_llm_drafter_api
.json``): what they call, in which order, and what they demand. No tensor, no model: a request's
text is known beforehand. Versions differ in two ways that a drafter sees: 1.2.1 frees a request
before managers learn of its last step, and has KV for no draft that was not announced.
"""

from __future__ import annotations

import enum
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

API = json.loads(Path(__file__).with_name("tensorrt_llm_drafter_api.json").read_text("utf-8"))


class LlmRequestState(enum.Enum):
    CONTEXT_INIT = 0
    GENERATION_IN_PROGRESS = 1
    GENERATION_COMPLETE = 2


class Request:
    """A request with the recorded attributes and no others."""

    __slots__ = (*API["LlmRequest"]["attributes"], "truth", "reserved", "_chunk", "_written")

    def __init__(self, number, text, prompt, chunk=64):
        self.py_request_id = self.request_id = number
        self.py_client_id, self.reserved = 100 + number, 0
        self.truth, self._written, self._chunk = text, prompt, chunk
        self.py_orig_prompt_len, self.py_max_new_tokens = prompt, len(text) - prompt
        self.py_draft_tokens, self.py_num_accepted_draft_tokens = [], 0
        self.py_disable_speculative_decoding, self.is_dummy = False, False
        self.state, self.context_chunk_size = LlmRequestState.CONTEXT_INIT, min(chunk, prompt)

    def get_tokens(self, beam):
        assert beam == 0
        return self.truth[: self._written]

    @property
    def text(self):
        return self.truth[: self._written]


def _as_recorded(cls, methods):
    """Fail for a method whose parameters are not those that the sources call it with."""
    for name, parameters in methods.items():
        own = [*inspect.signature(getattr(cls, name)).parameters][1:]
        assert own == parameters, f"{cls.__name__}.{name}{own} is called with {parameters}"


class Drafter:
    def __init__(
        self,
        max_draft_len=None,
        max_total_draft_tokens=None,
        max_concurrency=None,
        draft_len_schedule=None,
    ):
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = self._static_max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency, self.draft_len_schedule = max_concurrency, draft_len_schedule

    _needs_padding_kv_extension = False

    def __init_subclass__(cls):
        for name in API["Drafter"]["final"]:
            assert name not in vars(cls), f"{name} is final"
        _as_recorded(cls, API["Drafter"]["abstract"])
        _as_recorded(cls, {"get_draft_len_for_batch_size": ["batch_size"]})

    def get_draft_len_for_batch_size(self, batch_size):
        return self.draft_len_schedule[max(n for n in self.draft_len_schedule if n <= batch_size)]

    def update_max_total_draft_tokens(self, new_max_total_draft_tokens):
        self.max_total_draft_tokens = self.max_draft_len = new_max_total_draft_tokens

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        raise NotImplementedError

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests, resource_manager=None):
        for request in scheduled_requests.generation_requests:
            missing = self._static_max_total_draft_tokens - len(request.py_draft_tokens)
            request.py_draft_tokens.extend([0] * missing)
            assert self._needs_padding_kv_extension, "the KV of padding has no room"


class BaseResourceManager:
    def __init_subclass__(cls):
        _as_recorded(cls, API["BaseResourceManager"]["methods"])


class UserProvidedDecodingConfig:
    def __init__(self, *, max_draft_len, drafter, resource_manager=None):
        self.max_draft_len, self.drafter = max_draft_len, drafter
        self.resource_manager = resource_manager


def modules(ranks=1):
    """Return what ``backend.hosts.tensorrt_llm`` imports, by name."""
    found: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"mpi_world_size": lambda: ranks},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.pyexecutor": {},
        "tensorrt_llm._torch.pyexecutor.llm_request": {"LlmRequestState": LlmRequestState},
        "tensorrt_llm._torch.pyexecutor.resource_manager": {
            "BaseResourceManager": BaseResourceManager
        },
        "tensorrt_llm._torch.speculative": {},
        "tensorrt_llm._torch.speculative.drafter": {"Drafter": Drafter},
        "tensorrt_llm.llmapi": {"UserProvidedDecodingConfig": UserProvidedDecodingConfig},
    }
    made = {}
    for name, values in found.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(values, __path__=[])
    return made


def install(monkeypatch, ranks=1):
    """Have the fake imported in place of the library; return the plug-in's module."""
    for name, module in modules(ranks).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "backend.hosts.tensorrt_llm", raising=False)
    import backend.hosts.tensorrt_llm as plugin

    monkeypatch.delitem(sys.modules, "backend.hosts.tensorrt_llm")
    return plugin


class Executor:
    """The loop: ``steps`` has (draft length of the step, rows, tokens proposed) of each."""

    def __init__(
        self,
        *,
        speculative_config,
        disable_overlap_scheduler=False,
        max_batch_size=8,
        version="1.2.1",
    ):
        assert disable_overlap_scheduler, "drafts are read before the step before has drawn"
        config = speculative_config
        self._drafter, self._resources = config.drafter, config.resource_manager
        self._static = config.max_draft_len
        assert self._drafter._static_max_total_draft_tokens == self._static
        self._max_batch_size = max_batch_size
        self._is_old = version in API["frees_first"]
        self.active, self.steps = [], []

    def step(self):
        """Run one iteration, in the recorded order."""
        drafter, batch = self._drafter, self._schedule()
        length = self._static
        if drafter.draft_len_schedule is not None:
            length = drafter.get_draft_len_for_batch_size(len(self.active))
            assert type(length) is int
            drafter.update_max_total_draft_tokens(length)
        assert 0 <= length <= self._static
        for request in batch.generation_requests:  # the scheduler reserves KV for these
            is_out = request.py_disable_speculative_decoding
            request.py_draft_tokens = [] if is_out else [0] * length
            request.reserved = len(request.py_draft_tokens)
        if not length:
            for request in (*batch.context_requests, *batch.generation_requests):
                request.py_disable_speculative_decoding = True
        self._resources.prepare_resources(batch)
        proposed = []
        if length:
            drafter.prepare_draft_tokens(batch, None)
            proposed = [len(r.py_draft_tokens) for r in batch.generation_requests]
            drafter.pad_draft_tokens_for_cuda_graph(batch, None)
        lengths = {len(r.py_draft_tokens) for r in batch.generation_requests}
        assert lengths <= {self._static if length else 0}, "a CUDA graph has rows of one length"
        for request in batch.generation_requests if self._is_old else ():
            assert len(request.py_draft_tokens) <= request.reserved, "drafts beyond reserved KV"
        for request in batch.context_requests:
            self._prefill(request)
        for request in batch.generation_requests:
            self._verify(request)
        if self._is_old:
            self._free()
        self._resources.update_resources(batch)
        self.steps.append((length, len(batch.generation_requests), proposed))
        self._free()

    def _free(self):
        for request in [r for r in self.active if r.state is LlmRequestState.GENERATION_COMPLETE]:
            self.active.remove(request)
            self._resources.free_resources(request)

    def _schedule(self):
        now = self.active[: self._max_batch_size]
        context = [r for r in now if r.state is LlmRequestState.CONTEXT_INIT]
        decoding = [r for r in now if r.state is LlmRequestState.GENERATION_IN_PROGRESS]
        return SimpleNamespace(context_requests=context, generation_requests=decoding)

    def _prefill(self, request):
        request.context_chunk_size -= min(request._chunk, request.context_chunk_size)
        if not request.context_chunk_size:
            request.state = LlmRequestState.GENERATION_IN_PROGRESS
            self._emit(request, 1)

    def _verify(self, request):
        drafts = request.py_draft_tokens
        assert all(type(token) is int and token >= 0 for token in drafts)
        left, accepted = request.truth[request._written :], 0
        while accepted < min(len(drafts), len(left) - 1) and drafts[accepted] == left[accepted]:
            accepted += 1
        request.py_num_accepted_draft_tokens = accepted
        self._emit(request, accepted + 1)

    @staticmethod
    def _emit(request, tokens):
        request._written += tokens
        if request._written >= len(request.truth):
            request.state = LlmRequestState.GENERATION_COMPLETE
