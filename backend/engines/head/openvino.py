"""A head on OpenVINO's kernels: in int8, a third of torch's time on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

from openvino import Model, Output, Type, opset13

from backend.engines.head.folder import HeadConfig
from backend.engines.openvino.paged_attention import check_version
from backend.engines.openvino.parts import (
    RowGraph,
    half_matrix,
    ints,
    matrix,
    name_graph,
    norm_rows,
    parameter,
)
from backend.sampling.distributions import Floats

Weights = Mapping[str, Floats]  # by name, [...] as HeadConfig.shapes says


class OpenvinoHead:
    """A network whose matrices are in ``dtype``; its activations are in bf16 if it is ``narrow``,
    else in fp32. The next call overwrites what it returns.
    """

    def __init__(
        self,
        config: HeadConfig,
        weights: Weights,
        rows: Floats,  # [static tokens, hidden]
        *,
        dtype: str,
        narrow: bool,
        threads: int,
    ) -> None:
        check_version()
        precision = "bf16" if narrow else "f32"
        self._begin = RowGraph(_begin(config, weights, dtype), precision, threads)
        self._step = RowGraph(_step(config, weights, rows, dtype), precision, threads)

    def begin(
        self,
        hidden: Floats,  # [n, layers, hidden]
    ) -> Floats:
        """Return states [n, hidden] of the target's (``Head``)."""
        return self._begin.run(hidden=hidden.reshape(len(hidden), -1))["state"]

    def step(
        self,
        state: Floats,  # [n, hidden]
        token: Floats,  # [n, hidden]
    ) -> tuple[Floats, Floats, Floats]:
        """Move states on by tokens (``Head``)."""
        outputs = self._step.run(before=state, token=token)
        return outputs["state"], outputs["vectors"], outputs["logits"]


def _matrix(
    weight: Floats,  # [rows, columns]
    dtype: str,
) -> Output:
    return half_matrix(weight) if dtype == "bf16" else matrix(weight, rounded=dtype == "int8")


def _begin(config: HeadConfig, weights: Weights, dtype: str) -> Model:
    taps, hidden = len(config.layers), config.hidden_size
    states = parameter("hidden", [-1, taps * hidden], Type.f32)
    apart = opset13.reshape(states, ints([-1, taps, hidden]), False)
    rows = norm_rows(apart.output(0), weights["features_norm"], config.rms_norm_eps)
    flat = opset13.reshape(rows, ints([-1, taps * hidden]), False)
    state = opset13.matmul(flat, _matrix(weights["join.weight"], dtype), False, True)
    return name_graph({"state": state.output(0)}, [states], "begin")


def _step(
    config: HeadConfig,
    weights: Weights,
    rows: Floats,  # [static tokens, hidden]
    dtype: str,
) -> Model:
    eps = config.rms_norm_eps
    before, token = (parameter(n, [-1, config.hidden_size], Type.f32) for n in ("before", "token"))

    def product(values: Output, weight: Floats) -> Output:
        """Return the product of ``values`` [n, columns] and ``weight`` [rows, columns]."""
        return opset13.matmul(values, _matrix(weight, dtype), False, True).output(0)

    read = [
        norm_rows(before.output(0), weights["state_norm"], eps),
        norm_rows(token.output(0), weights["token_norm"], eps),
    ]
    state = opset13.add(before, product(opset13.concat(read, 1).output(0), weights["mix.weight"]))
    both = product(norm_rows(state.output(0), weights["mlp_norm"], eps), weights["gate_up.weight"])
    gate, up = opset13.variadic_split(
        both, ints(-1), ints([config.intermediate_size] * 2)
    ).outputs()
    inner = opset13.multiply(opset13.swish(gate), up)
    state = opset13.add(state, product(inner.output(0), weights["down.weight"]))
    vectors = norm_rows(state.output(0), weights["norm"], eps)
    outputs = {"state": state.output(0), "vectors": vectors.output(0)}
    outputs["logits"] = product(vectors.output(0), rows)
    return name_graph(outputs, [before, token], "step")
