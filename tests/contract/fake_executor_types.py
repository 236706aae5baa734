"""The plain values of a fake ``tensorrt_llm.bindings.executor``, made of
``tensorrt_llm_executor_api.json``.

A constructor binds its arguments by the recorded names, order, defaults and types, and raises what
nanobind does where they do not fit, defaults included: ``std::string`` with the default none is a
TypeError where it is left out. Anything else that a constructor of C++ refuses is a RuntimeError.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

RECORD = json.loads((Path(__file__).parent / "tensorrt_llm_executor_api.json").read_text())
_INTEGERS = {"int32": (-(2**31), 2**31), "uint64": (0, 2**64)}
_PLAIN = {
    "bool": bool,
    "float": (int, float),
    "str": str,
    "path": (str, PathLike),
    "timedelta": timedelta,
    "Tensor": torch.Tensor,
}
_NAMES: dict[str, Any] = {name: Enum(name, values) for name, values in RECORD["enums"].items()}


def fits(value: object, kind: str) -> bool:
    """Whether a value can be passed as a recorded type."""
    outer, _, inner = kind.removesuffix("]").partition("[")
    if outer == "Optional":
        return value is None or fits(value, inner)
    if outer == "list" and isinstance(value, (list, tuple)):
        if inner in _INTEGERS and value:
            return (
                set(map(type, value)) == {int}
                and fits(min(value), inner)
                and fits(max(value), inner)
            )
        return all(fits(item, inner) for item in value)
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return type(value) is int and low <= value < high
    allowed: Any = _PLAIN.get(kind) or _NAMES.get(kind, ())
    return isinstance(value, allowed)


class Declared:
    """One recorded signature."""

    def __init__(self, name: str, parameters: list[dict[str, Any]]) -> None:
        self.name = name
        self.kinds = {p["name"]: p["type"] for p in parameters}
        self.signature = inspect.Signature([_parameter(p) for p in parameters])

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name. Raises TypeError."""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}(): incompatible function arguments: {error}") from None
        bound = {}
        for name, kind in self.kinds.items():
            default = self.signature.parameters[name].default
            bound[name] = value = given[name] if name in given else _made(default)
            if not (name not in given and isinstance(value, str) and kind != "str") and not fits(
                value, kind
            ):
                raise TypeError(
                    f"{self.name}(): incompatible function arguments: {name} must be {kind}, got "
                    f"{value!r:.80}"
                )
        return bound


def _parameter(p: dict[str, Any]) -> inspect.Parameter:
    kind = (
        inspect.Parameter.KEYWORD_ONLY
        if p.get("keyword_only")
        else inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    return inspect.Parameter(p["name"], kind, default=p.get("default", inspect.Parameter.empty))


def _made(default: object) -> object:
    """Return a default as C++ has it; what this project never passes stays a name."""
    if isinstance(default, str):
        name, _, value = default.partition(".")
        if name in RECORD["enums"]:
            return _NAMES[name][value]
        if (cls := _NAMES.get(default.removesuffix("()"))) is not None:
            return cls()
    return default


def as_recorded(method: Callable) -> Callable:
    """Let a method of ``Executor`` take what the record says, in its first signature."""
    entry = RECORD["classes"]["Executor"]
    name = method.__name__
    declared = Declared(
        f"Executor.{name}",
        (entry["constructors"] if name == "__init__" else entry["methods"][name])[0],
    )

    @functools.wraps(method)
    def checked(self, *args, **kwargs):
        return method(self, **declared.bind(args, kwargs))

    return checked


def _given(name: str, check: Callable[[Any], None] = lambda made: None) -> Any:
    """Make a class of values that its users construct; ``check`` raises what C++ does."""
    entry = RECORD["classes"][name]
    declared, attributes = Declared(name, entry["constructors"][0]), {*entry["attributes"]}

    def __init__(self, *args, **kwargs):
        values = declared.bind(args, kwargs)
        vars(self).update(
            {"request_type" if key == "type" else key: value for key, value in values.items()}
        )
        check(self)

    def __setattr__(self, key, value):
        if key not in attributes:
            raise AttributeError(f"{name} has no attribute {key!r}")
        vars(self)[key] = value

    made = type(name, (), {"__init__": __init__, "__setattr__": __setattr__})
    _NAMES[name] = made
    return made


def _reported(name: str, default: object = 0) -> Any:
    """Make a class of values that the executor reports; ``default`` is that of every attribute."""
    attributes = RECORD["classes"][name]["attributes"]

    def __init__(self, **values):
        assert set(values) <= set(attributes), (
            f"{name} has no {sorted(set(values) - set(attributes))}"
        )
        vars(self).update({key: values.get(key, default) for key in attributes})

    return type(name, (), {"__init__": __init__})


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {message}")


def _check_sampling(made) -> None:
    _check(made.temperature is None or made.temperature > 0, f"temperature {made.temperature}")
    _check(made.top_k is None or made.top_k >= 0, f"top_k {made.top_k}")
    _check(made.top_p is None or 0 < made.top_p <= 1, f"top_p {made.top_p}")
    _check(
        made.repetition_penalty is None or made.repetition_penalty > 0,
        f"repetition_penalty {made.repetition_penalty}",
    )
    _check(
        made.prompt_ignore_length is None or made.prompt_ignore_length >= 0,
        f"prompt_ignore_length {made.prompt_ignore_length}",
    )


def _check_draft(made) -> None:
    _check(len(made.tokens) > 0, "draft tokens must not be empty")
    _check(made.logits is None or made.logits.dim() == 2, "draft logits must have two dimensions")
    _check(
        made.logits is None or len(made.logits) == len(made.tokens),
        "as many rows of draft logits as draft tokens",
    )


def _check_request(made) -> None:
    _check(len(made.input_token_ids) > 0, "input token ids must not be empty")
    _check(made.max_tokens > 0, f"max_tokens {made.max_tokens}")
    _check(0.0 <= made.priority <= 1.0, f"priority {made.priority}")
    _check(
        made.cache_salt_id is None or made.cache_salt_id > 0, f"cache_salt_id {made.cache_salt_id}"
    )


CommunicationMode, KvCacheTransferMode = _NAMES["CommunicationMode"], _NAMES["KvCacheTransferMode"]
SamplingConfig = _given("SamplingConfig", _check_sampling)
OutputConfig = _given("OutputConfig")
ExternalDraftTokensConfig = _given("ExternalDraftTokensConfig", _check_draft)
TokenRangeRetentionConfig = _given("TokenRangeRetentionConfig")
KvCacheRetentionConfig = _given("KvCacheRetentionConfig")
KvCacheRetentionConfig.TokenRangeRetentionConfig = TokenRangeRetentionConfig
SchedulerConfig = _given("SchedulerConfig")
KvCacheConfig = _given("KvCacheConfig")
OrchestratorConfig = _given("OrchestratorConfig")
ParallelConfig = _given("ParallelConfig")
Result = _reported("Result", None)
KvCacheMetrics = _reported("KvCacheMetrics")
KvCacheStats = _reported("KvCacheStats")
if TYPE_CHECKING:  # names of types; their attributes are those of the record

    class ModelType(Any): ...

    class FinishReason(Any): ...

    class Request(Any): ...

    class ExecutorConfig(Any): ...

    class RequestPerfMetrics(Any): ...

    class InflightBatchingStats(Any): ...

    class IterationStats(Any): ...

else:
    ModelType, FinishReason = _NAMES["ModelType"], _NAMES["FinishReason"]
    Request = _given("Request", _check_request)
    ExecutorConfig = _given("ExecutorConfig")
    RequestPerfMetrics = _reported("RequestPerfMetrics", None)
    InflightBatchingStats = _reported("InflightBatchingStats")
    IterationStats = _reported("IterationStats", None)


class Response:
    """``result`` raises for a response with an error, and ``error_msg`` for one without."""

    def __init__(
        self,
        request_id: int,
        error_msg: str | None = None,
        result: Any = None,
        client_id: int | None = None,
    ) -> None:
        self.request_id, self.client_id = request_id, client_id
        self._error_msg, self._result = error_msg, result

    def has_error(self) -> bool:
        return self._error_msg is not None

    @property
    def error_msg(self) -> str:
        _check(self._error_msg is not None, "no error in this response")
        return self._error_msg or ""

    @property
    def result(self) -> Any:
        if self._result is None:
            raise RuntimeError(self._error_msg)
        return self._result
