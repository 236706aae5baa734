"""TensorRT-LLM's LLM API as its recorded sources have it (``tensorrt_llm_llm_api.json``), in three
versions: it refuses what they refuse, ignores what they ignore, and has no other attributes. The
model is the chain of the fake engine. With a drafter of ours, ``fake_tensorrt_llm`` is its loop.
"""

# mypy: disable-error-code="attr-defined,union-attr"
from __future__ import annotations

import asyncio
import inspect
import json
import sys
from functools import partial
from operator import setitem
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from backend.request import SamplingParams as ChainParams
from tests.contract import fake_tensorrt_llm
from tests.fakes.markov import MarkovChain

API = json.loads(Path(__file__).with_name("tensorrt_llm_llm_api.json").read_text("utf-8"))
VERSIONS = tuple(API["versions"])
_TYPES: dict[str, Any] = {
    "int": lambda v: type(v) is int,
    "float": lambda v: type(v) in (int, float),
    "bool": lambda v: type(v) is bool,
    "ints": lambda v: type(v) is list and all(type(one) is int for one in v),
    "strings": lambda v: isinstance(v, str | list),
    "guide": lambda v: False,
    "tensor": lambda v: isinstance(v, torch.Tensor) and v.dtype is torch.float32,
    "object": lambda v: True,
}
_EMITTED = (1, 2, 3)
"""Tokens of an output, by turns."""


class RequestError(RuntimeError):
    """One request went wrong (``tensorrt_llm.executor.utils``)."""


class SamplingParams:
    """Parameters of a version, checked as its dataclass and the bindings check them."""

    fields: dict[str, str]
    """Type by name."""

    def __init__(self, **words):
        for name, value in words.items():
            if name not in self.fields:
                raise TypeError(f"unexpected keyword argument {name!r}")
            if value is not None and not _TYPES[self.fields[name]](value):
                raise TypeError(f"{name} must be {self.fields[name]}, got {value!r}")
        given = {name: value for name, value in words.items() if value is not None}
        if not 0 <= given.get("top_p", 0) <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={given['top_p']}")
        if given.get("top_k", 0) < 0 or given.get("temperature", 0) < 0:
            raise ValueError("require top_k >= 0 and temperature >= 0")
        self.given = given


class CompletionOutput:
    """The recorded attributes of one, and no more."""

    __slots__ = tuple(API["CompletionOutput"])


class RequestOutput:
    """A request's handle, which is its asynchronous iterator."""

    def __init__(self, llm, request_id, prompt, params):
        self.request_id, self.prompt_token_ids = request_id, prompt
        self.finished, self._llm, self._params, self._aborted = False, llm, params, False
        self._logits: list[Any] = []
        self._text, self._tokens, self._turn = list(prompt), [], 0
        self._request = llm._begin(self)

    def __getattr__(self, name):
        if name == "cached_tokens" and self._llm.version != "main":
            return 0
        raise AttributeError(name)

    def abort(self):
        """Abort the request; the last output of it says so."""
        assert not self._llm.is_shutdown, "an LLM that is gone cannot be asked"
        self._aborted = True
        self._llm.running.discard(self.request_id)

    def aborted(self):
        """Return whether it was aborted."""
        return self._aborted

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(self._llm.step_s)
        self._llm._raise_background_error(self.request_id)
        begun, logits_begun = len(self._tokens), len(self._logits)
        reason = self._llm._advance(self)
        shown = self._tokens
        if reason == "end_id" and self._llm.is_engine:  # its decoder takes the end token back
            shown = self._tokens[:-1]
        self.finished = reason is not None
        if self.finished:
            self._llm.running.discard(self.request_id)
        one = CompletionOutput()
        one.index, one.text, one.token_ids = 0, "", list(shown)
        one.token_ids_diff = one.token_ids[begun:]
        one.finish_reason = {"end_id": "stop", "stop_word": "stop"}.get(reason, reason)
        one.stop_reason = self._tokens[-1] if reason == "stop_word" else None
        wants = self._params.given.get("logprobs")
        one.logprobs = self._logits if wants is not None else None
        one.logprobs_diff = self._logits[logits_begun:] if wants is not None else []
        self.outputs = [one]
        return self

    def _take(self, token):
        """Emit a token; return why the text ends with it, if it does."""
        given = self._params.given
        scores = self._llm.chain.logits(self._text)
        self._tokens.append(token)
        self._text.append(token)
        if (most := given.get("logprobs")) is not None:
            logprobs = scores - np.log(np.exp(scores).sum())
            top = np.argsort(-logprobs, kind="stable")[:most].tolist()
            self._logits.append({t: _Logprob(float(logprobs[t])) for t in {*top, token}})
        if token == given["end_id"]:
            return "end_id"
        if len(self._tokens) == given["max_tokens"]:
            return "length"
        return "stop_word" if token in given.get("stop_token_ids", ()) else None


class _Logprob:
    def __init__(self, logprob):
        self.logprob = logprob


class LLM:
    """``tensorrt_llm.LLM`` of a version, or the one of ``_tensorrt_engine`` (``is_engine``)."""

    version = "1.2.1"
    is_engine = False
    step_s = 0.0
    made: ClassVar[list[LLM]] = []

    def __init__(self, model, **arguments):
        record = API["versions"][self.version]
        for name in arguments:
            if name not in record["engine_LLM" if self.is_engine else "LLM"]:
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")
        spec = arguments.get("speculative_config")
        if isinstance(spec, dict):
            raise ValueError("speculative_config: a dictionary is none of the classes")
        if isinstance(arguments.get("kv_cache_config"), dict):
            raise ValueError("kv_cache_config: from YAML it is a KvCacheConfig")
        backend = arguments.get("guided_decoding_backend")
        assert backend is None or not arguments.get("skip_tokenizer_init"), "no tokenizer"
        if self.is_engine and backend not in (None, "xgrammar"):
            raise ValueError(f"Unsupported guided decoding backend {backend}")
        self.model, self.arguments = Path(model), arguments
        config = json.loads((self.model / "config.json").read_text())
        assert ("build_config" in config) == self.is_engine
        self._most = config["build_config"]["max_seq_len"] if self.is_engine else None
        self.chain, self.running, self.is_shutdown = MarkovChain(), set(), False
        self._failures: dict[int | None, Exception] = {}
        self._ids, self._rng = 0, np.random.default_rng(0)
        self._loop = None
        if drafter := getattr(spec, "drafter", None):
            assert drafter.max_draft_len == spec.max_draft_len
            self._loop = fake_tensorrt_llm.Executor(
                speculative_config=spec,
                disable_overlap_scheduler=arguments.get("disable_overlap_scheduler", False),
                max_batch_size=arguments["max_batch_size"],
                version=self.version,
            )
        LLM.made.append(self)

    def generate_async(self, inputs, sampling_params=None, **words):
        """Enqueue a request (its parameters are those of the record)."""
        type(self).generate_async.__signature__.bind(self, inputs, sampling_params, **words)
        if self.is_shutdown:
            raise RuntimeError("LLM is shutting down")
        assert type(inputs) is list
        assert isinstance(inputs[0], int)
        assert isinstance(sampling_params, SamplingParams)
        given = sampling_params.given
        if "end_id" not in given:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        assert words.get("streaming"), "one output at the end is no stream"
        if self.is_engine and len(inputs) + given["max_tokens"] > self._most:
            raise ValueError("The sum of prompt length and max_tokens should not exceed it")
        if not self.is_engine and not self.arguments.get("enable_chunked_prefill"):
            assert len(inputs) <= 8192
        bias = given.get("embedding_bias")
        assert bias is None or bias.shape == (self.chain.vocab_size,)
        self._ids += 1
        self.running.add(self._ids)
        return RequestOutput(self, self._ids, inputs, sampling_params)

    def shutdown(self):
        """End it."""
        self.is_shutdown = True

    def fail(self, error, request_id=None):
        """Have an output raise an error: a request's own, or a worker's, which ends the LLM."""
        self._failures[request_id] = error

    # -- the model

    def _raise_background_error(self, request_id):
        if request_id in self._failures:
            self.running.discard(request_id)
            raise self._failures.pop(request_id)
        if None in self._failures:
            self.shutdown()
            raise self._failures[None]

    def _begin(self, output):
        if self._loop is None:
            return None
        truth, ends = list(output.prompt_token_ids), output._params.given
        while len(truth) - len(output.prompt_token_ids) < ends["max_tokens"]:
            truth.append(self._next(output, truth))
            if truth[-1] in (ends["end_id"], *ends.get("stop_token_ids", ())):
                break
        request = fake_tensorrt_llm.Request(output.request_id, truth, len(output.prompt_token_ids))
        request.py_client_id = output.request_id
        self._loop.active.append(request)
        return request

    def _advance(self, output):
        """Run a step; return why the request ended, if it did."""
        if output._aborted:
            return "cancelled"
        if self._loop is not None:
            self._loop.step()
            texts = output._request.text
            for token in texts[len(output._text) :]:
                if (reason := output._take(token)) is not None:
                    return reason
            return None
        output._turn += 1
        for _ in range(_EMITTED[output._turn % len(_EMITTED)]):
            if (reason := output._take(self._next(output, output._text))) is not None:
                return reason
        return None

    def _next(self, output, text):
        """Return a token as this flow draws it: of what it ignores nothing is passed on."""
        given = dict(output._params.given)
        if not self.is_engine:
            for name in API["versions"][self.version]["ignored_by_the_pytorch_flow"]:
                given.pop(name, None)
        greedy = given.get("top_k") == 1 or not given.get("temperature")
        bias = given.get("embedding_bias")
        least = given.get("min_tokens", 0)
        if least and not self.is_engine:
            least -= len(output.prompt_token_ids)  # its sampler counts them, too
        params = ChainParams(
            temperature=0.0 if greedy else given["temperature"],
            top_k=0 if greedy else given.get("top_k", 0),
            top_p=given.get("top_p", 1.0),
            seed=given.get("seed", int(self._rng.integers(1 << 31))),
            min_p=given.get("min_p", 0.0),
            repetition_penalty=given.get("repetition_penalty", 1.0),
            presence_penalty=given.get("presence_penalty", 0.0),
            frequency_penalty=given.get("frequency_penalty", 0.0),
            prompt_ignore_length=given.get("prompt_ignore_length", 0),
            min_tokens=max(0, least),
            end_ids=(given["end_id"],),
            bad_words=tuple((token,) for token in given.get("bad_token_ids", ())),
            bias=()
            if bias is None
            else tuple((int(t), float(bias[t])) for t in bias.nonzero().flatten()),
            top_p_decay=given.get("top_p_decay", 1.0),
            top_p_min=given.get("top_p_min", 0.0),
            top_p_reset_id=given.get("top_p_reset_ids", -1),
        )
        return self.chain.next(list(text), len(output.prompt_token_ids), params)[0]


class KvCacheConfig:
    """Takes what a YAML file says."""

    def __init__(self, **words):
        self.words = words


class DecodingConfig:
    """One of TensorRT-LLM's own drafters, with the schedule of its version."""

    def __init__(
        self, version, decoding_type, max_draft_len=None, draft_len_schedule=None, **words
    ):
        if decoding_type not in API["versions"][version]["speculative"]:
            raise ValueError(f"Invalid decoding type: {decoding_type}")
        self.decoding_type, self.max_draft_len, self.words = decoding_type, max_draft_len, words
        self.draft_len_schedule = dict(sorted((draft_len_schedule or {}).items()))
        self._is_from = API["versions"][version]["draft_len_schedule"] == "from"
        if self.draft_len_schedule:
            first = next(iter(self.draft_len_schedule))
            if self._is_from and first != 1:
                raise ValueError("draft_len_schedule must include batch_size=1")
            if self.draft_len_schedule[first] != max_draft_len:
                raise ValueError(f"draft_len_schedule[{first}] must equal max_draft_len")

    def length(self, rows):
        """Return the length of a step of this many rows."""
        schedule = self.draft_len_schedule
        if self._is_from:
            return [length for least, length in schedule.items() if least <= rows][-1]
        return next((length for most, length in schedule.items() if rows <= most), 0)


def _from_yaml(version, arguments, words):
    """``update_llm_args_with_extra_dict``: sections of YAML become objects."""
    made = dict(words)
    if "kv_cache_config" in made:
        made["kv_cache_config"] = KvCacheConfig(**made["kv_cache_config"])
    if "speculative_config" in made:
        made["speculative_config"] = DecodingConfig(version, **made["speculative_config"])
    return arguments | made


def modules(version):
    """Return the modules of a version by name, those of ``fake_tensorrt_llm`` included."""
    record = API["versions"][version]
    made = fake_tensorrt_llm.modules()
    llm = type("LLM", (LLM,), {"version": version})
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in ("self", *record["generate_async"])
    ]

    def generate_async(self, inputs, sampling_params=None, **words):
        return LLM.generate_async(self, inputs, sampling_params, **words)

    generate_async.__signature__ = inspect.Signature(parameters)
    llm.generate_async = generate_async
    params = type("SamplingParams", (SamplingParams,), {"fields": record["SamplingParams"]})
    params.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in record["SamplingParams"]
        ]
    )
    vars(made["tensorrt_llm"]).update(__version__=version, LLM=llm, SamplingParams=params)
    made["tensorrt_llm.llmapi"].RequestError = RequestError
    made["tensorrt_llm.llmapi.llm_utils"] = utils = ModuleType("tensorrt_llm.llmapi.llm_utils")
    utils.update_llm_args_with_extra_dict = partial(_from_yaml, version)
    if record["engine_backend"]:
        name = "tensorrt_llm._tensorrt_engine"
        made[name] = engine = ModuleType(name)
        engine.LLM = type("LLM", (llm,), {"is_engine": True})
    return made


ADAPTERS = (
    "backend.hosts.tensorrt_llm",
    "backend.engines.tensorrt_llm.engine",
    "backend.engines.tensorrt_llm.options",
)
"""Modules that import the library."""


def install(version, put=setitem):
    """Have a version of the fake imported in place of the library, and its adapters again."""
    for name, module in modules(version).items():
        put(sys.modules, name, module)
    for name in ADAPTERS:
        sys.modules.pop(name, None)
