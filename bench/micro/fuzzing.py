"""Malformed requests for every door, by Hypothesis, and what a service may answer to them."""

from __future__ import annotations

import http.client
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backend.openai_frontend.schema import ChatRequest, CompletionRequest
from backend.triton_adapter.fields import MODELS, NUMPY_TYPES, Field
from tests.server.harness import Service

ANSWER_LIMIT_S = 60.0
MOST_TOKENS = 24
"""Limit of a request that turns out to be well-formed; a longer answer shows nothing more."""
LEAKS = re.compile(r"Traceback|File \"|\.py\b|site-packages|/tmp/|/root/|/home/|0x[0-9a-f]{8,}")
"""Texts that no client may read."""
GENERATORS = {model.name: model for model in MODELS[:3]}
NUMBERS = (
    0,
    1,
    -1,
    2,
    255,
    256,
    257,
    1e9,
    -(2**31),
    2**31 - 1,
    2**31,
    2**63,
    2**64 - 1,
    2**64,
    1e-30,
    1e308,
    float("nan"),
    float("inf"),
    0.5,
)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.builds(str.__mul__, st.sampled_from(["a", "é", "[", "(a|"]), st.integers(0, 5000)),
    st.sampled_from(
        [
            "",
            "a",
            "\x00",
            "\ud800",
            "\ufeff",
            "{}",
            "[",
            '{"type":"object"}',
            "(((",
            "a{9999}",
            "json",
            "regex",
        ]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.integers(), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@dataclass(frozen=True, slots=True)
class FuzzReply:
    """The reply to a request: ``kind`` is an HTTP status or a gRPC status' name (``OK``);
    ``problem`` is what must not be, if anything.
    """

    kind: str
    problem: str = ""


def judge(kind: str, text: str, allowed: bool) -> FuzzReply:
    """Return an answer whose text or kind may be a violation."""
    leak = LEAKS.search(text)
    problem = (
        f"it tells {leak[0]!r}: {text[:300]}"
        if leak
        else ""
        if allowed
        else f"it must not come: {text[:300]}"
    )
    return FuzzReply(kind, problem)


# -- bodies of JSON: Triton's generate and infer, and the OpenAI routes


def _bodies(start: dict[str, Any], names: list[str]) -> st.SearchStrategy[bytes]:
    """Return bodies that begin as a good one and have some members spoilt, lost or added; now and
    then no JSON at all.
    """
    spoilt = st.dictionaries(
        st.one_of(st.sampled_from(names), st.text(max_size=12)), JSON, min_size=0, max_size=4
    )
    missing = st.sets(st.sampled_from(sorted(start)), max_size=2) if start else st.just(set())
    bodies = st.tuples(spoilt, missing).map(
        lambda pair: {
            name: value for name, value in {**start, **pair[0]}.items() if name not in pair[1]
        }
    )
    encoded = st.one_of(bodies, JSON).map(
        lambda body: json.dumps(body).encode("utf-8", "surrogatepass")
    )
    cut = st.tuples(encoded, st.integers(0, 60)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(encoded, encoded, encoded, cut, st.binary(max_size=80))


def _infer_bodies() -> st.SearchStrategy[bytes]:
    tensor = st.fixed_dictionaries(
        {
            "name": st.one_of(st.sampled_from([field.name for field in MODELS[0].inputs]), TEXTS),
            "shape": st.one_of(st.lists(st.integers(-2, 5), max_size=4), JSON),
            "datatype": st.one_of(
                st.sampled_from(["BYTES", "INT32", "BOOL", "FP32", "UINT64", "x"]), JSON
            ),
            "data": JSON,
        }
    )
    return st.fixed_dictionaries({"inputs": st.lists(tensor, max_size=4)}).map(
        lambda body: json.dumps(body).encode("utf-8", "surrogatepass")
    )


def _http_cases() -> st.SearchStrategy[tuple[str, bytes]]:
    cases = []
    for model in GENERATORS.values():
        start: dict[str, Any] = {"text_input": "ab", "max_tokens": 4, "end_id": -1}
        if model.name == "tensorrt_llm":
            start = {"input_ids": [97, 98], "input_lengths": 2, "request_output_len": 4}
        bodies = _bodies(start, [field.name for field in model.inputs])
        cases += [
            st.tuples(st.just(f"/v2/models/{model.name}/{route}"), bodies)
            for route in ("generate", "generate_stream")
        ]
        cases.append(st.tuples(st.just(f"/v2/models/{model.name}/infer"), _infer_bodies()))
    commands = [
        "health",
        "switches",
        "learned",
        "explain",
        "set",
        "set a",
        "set speculation=sideways",
        "",
    ]
    command = st.fixed_dictionaries({"command": st.one_of(JSON, TEXTS, st.sampled_from(commands))})
    encoded = command.map(lambda body: json.dumps(body).encode("utf-8", "surrogatepass"))
    return st.one_of(*cases, st.tuples(st.just("/v2/models/spindle/generate"), encoded))


_OPTIONS = list({**CompletionRequest.model_fields, **ChatRequest.model_fields})


def _openai_cases() -> st.SearchStrategy[tuple[str, bytes]]:
    common = {"model": "fake", "max_tokens": 4}
    return st.one_of(
        st.tuples(st.just("/v1/completions"), _bodies({**common, "prompt": "ab"}, _OPTIONS)),
        st.tuples(
            st.just("/v1/chat/completions"),
            _bodies({**common, "messages": [{"role": "user", "content": "ab"}]}, _OPTIONS),
        ),
    )


HTTP_CASES, OPENAI_CASES = _http_cases(), _openai_cases()


def small(body: bytes, *names: str) -> bytes:
    """Return a body whose lengths are bounded, should it be good."""
    try:
        value = json.loads(body)
        for name in names:
            if (
                isinstance(value, dict)
                and isinstance(value.get(name), int)
                and value[name] > MOST_TOKENS
            ):
                value[name] = MOST_TOKENS if value[name] <= 4096 else value[name]
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return body


def post(port: int, path: str, body: bytes) -> tuple[int, str]:
    """Return (status, text) of a POST. Raises OSError where no answer comes in time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def send_http(service: Service, case: tuple[str, bytes]) -> FuzzReply:
    """Send a case to Triton's HTTP interface; 500 is Triton's own word for a wrong JSON type."""
    path, body = case
    status, text = post(
        service.http, path, small(body, "max_tokens", "request_output_len", "num_return_sequences")
    )
    own_parser = status == 500 and "Traceback" not in text
    return judge(str(status), text, status in (200, 400, 404, 501) or own_parser)


def send_openai(service: Service, case: tuple[str, bytes]) -> FuzzReply:
    """Send a case to the OpenAI front end."""
    path, body = case
    status, text = post(
        service.openai, path, small(body, "max_tokens", "max_completion_tokens", "n")
    )
    return judge(str(status), text, status in (200, 400, 404))


# -- tensors over gRPC


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One input as it is sent, whatever its type and shape say."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


def _good(field: Field, value: Any) -> RawTensor:
    if field.dtype == "STRING":
        raw = str(value).encode("utf-8", "surrogatepass")
        return RawTensor(field.name, "BYTES", (1, 1), len(raw).to_bytes(4, "little") + raw)
    kind = np.dtype(NUMPY_TYPES[field.dtype])
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            raw = np.array([value], np.float64).astype(kind).tobytes()
    else:
        whole = int(value) if math.isfinite(value) else 0
        raw = (
            (whole % 2 ** (8 * kind.itemsize)).to_bytes(kind.itemsize, "little")
            if kind.kind != "b"
            else bytes([whole % 2])
        )
    return RawTensor(field.name, field.dtype, (1, 1), raw)


def _spoilt(fields: tuple[Field, ...]) -> st.SearchStrategy[RawTensor]:
    shapes = st.one_of(
        st.just((1, 1)), st.just((1,)), st.lists(st.integers(0, 4), max_size=4).map(tuple)
    )
    wild = st.builds(
        RawTensor,
        st.one_of(st.sampled_from([field.name for field in fields]), st.text(max_size=10)),
        st.sampled_from(
            ["BYTES", "INT32", "FP32", "BOOL", "UINT64", "FP16", "UINT8", "INT64", "", "X"]
        ),
        shapes,
        st.binary(max_size=32),
    )
    values = st.one_of(
        st.sampled_from([number for number in NUMBERS if abs(number) < 1e300]), st.integers(-5, 5)
    )
    typed = [
        (TEXTS if field.dtype == "STRING" else values).map(
            lambda value, field=field: _good(field, value)  # type: ignore[misc]
        )
        for field in fields
        if field.dims in ((1,), (-1,))
    ]
    return st.one_of(wild, *typed)


def _grpc_cases() -> st.SearchStrategy[tuple[str, list[RawTensor]]]:
    cases = []
    for model in MODELS[:5]:
        fields = {field.name: field for field in model.inputs}
        start = [_good(fields[name], value) for name, value in _STARTS[model.name].items()]
        spoilt = st.lists(_spoilt(model.inputs), max_size=4)
        merged = st.tuples(spoilt, st.integers(0, 2**6)).map(
            lambda pair, start=start: _merge(start, *pair)  # type: ignore[misc]
        )
        cases.append(st.tuples(st.just(model.name), merged))
    return st.one_of(*cases)


_STARTS: dict[str, dict[str, Any]] = {
    "ensemble": {"text_input": "ab", "max_tokens": 4},
    "tensorrt_llm_bls": {"text_input": "ab", "max_tokens": 4},
    "tensorrt_llm": {"input_ids": 97, "input_lengths": 1, "request_output_len": 4},
    "preprocessing": {"QUERY": "ab", "REQUEST_OUTPUT_LEN": 4},
    "postprocessing": {"TOKENS_BATCH": 97, "SEQUENCE_LENGTH": 1},
}


def _merge(start: list[RawTensor], spoilt: list[RawTensor], missing: int) -> list[RawTensor]:
    named = {tensor.name: tensor for tensor in (*start, *spoilt)}
    tensors = [
        tensor
        for index, tensor in enumerate(named.values())
        if missing % 7 != index or index >= len(start)
    ]
    return [_bound(tensor) for tensor in tensors]


def _bound(tensor: RawTensor) -> RawTensor:
    if (
        tensor.name in ("max_tokens", "request_output_len", "num_return_sequences")
        and tensor.datatype == "INT32"
        and len(tensor.raw) == 4
    ):
        value = int.from_bytes(tensor.raw, "little", signed=True)
        if MOST_TOKENS < value <= 4096:
            return RawTensor(tensor.name, "INT32", tensor.shape, MOST_TOKENS.to_bytes(4, "little"))
    return tensor


GRPC_CASES = _grpc_cases()


def send_grpc(channel: grpc.Channel, case: tuple[str, list[RawTensor]]) -> FuzzReply:
    """Send a case on a stream of its own and read it to its end.

    Without the header ``triton_grpc_error``: with it Triton 2.51 itself crashes (signal 11) within
    some hundreds of these.
    """
    model, tensors = case
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.raw)
    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
        iter([request]), timeout=ANSWER_LIMIT_S
    )
    finals, refusals, text = 0, 0, ""
    try:
        for message in call:
            final = message.infer_response.parameters["triton_final_response"].bool_param
            finals += final
            # what Triton's core refuses has no final flag
            refusals += bool(message.error_message) and not final
            text += message.error_message
    except grpc.RpcError as error:
        return judge(error.code().name, error.details() or "", allowed=False)
    return judge(
        "refused by Triton" if refusals else "refused" if text else "OK",
        text,
        finals + refusals == 1,
    )
