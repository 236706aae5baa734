"""Parts of OpenVINO graphs: weights, norms, inputs; how a graph is compiled, and run on rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import openvino
from openvino import CompiledModel, Model, Output, PartialShape, Tensor, Type, op, opset13

from backend.engines.checkpoint import StoredMatrix, narrow
from backend.sampling.distributions import Floats

Digits = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float16]

_ROWS = 4096
"""Rows of a matrix that are in fp32 at once while it is rounded."""

SMALL_WEIGHT = 1 << 17
"""Elements below which a matrix is not rounded to int8: its product takes no longer in fp32."""


def compile_graph(
    graph: Model, precision: str, threads: int, group: int | None = None
) -> CompiledModel:
    """Compile a graph whose activations and KV are stored in ``precision`` (``f32``, ``bf16``).

    ``group``: columns with one scale where activations are rounded to int8 for products with
    integers; 0: they are not rounded; None: as OpenVINO does by default.
    """
    settings: dict[str, str | int | bool] = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }
    if group is not None:
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
    return openvino.Core().compile_model(graph, "CPU", settings)


class RowGraph:
    """A compiled graph whose inputs and outputs, all [rows, width], lie in our memory."""

    def __init__(self, graph: Model, precision: str, threads: int) -> None:
        self._request = compile_graph(graph, precision, threads).create_infer_request()
        self._widths = [
            {port.get_any_name(): port.get_partial_shape()[1].get_length() for port in ports}
            for ports in (self._request.model_inputs, self._request.model_outputs)
        ]
        self._inputs: dict[str, Floats] = {}
        self._outputs: dict[str, Floats] = {}
        self._rows = 0

    def run(self, **inputs: Floats) -> dict[str, Floats]:
        """Return the outputs by name, until the next call. Raises RuntimeError where there are
        none: with one thread an exception within a graph is swallowed.
        """
        rows = len(next(iter(inputs.values())))
        if rows != self._rows:
            self._inputs, self._outputs = (self._bound(rows, widths) for widths in self._widths)
            self._rows = rows
        for name, values in inputs.items():
            self._inputs[name][...] = values
        for output in self._outputs.values():
            output[:, 0] = math.nan
        self._request.infer()
        for name, output in self._outputs.items():
            if np.isnan(output[:, 0]).any():
                raise RuntimeError(f"OpenVINO's pass of a draft head left no {name}")
        return self._outputs

    def _bound(self, rows: int, widths: dict[str, int]) -> dict[str, Floats]:
        """Return memory for this many rows, which the request uses from now on."""
        memory = {name: np.empty((rows, width), np.float32) for name, width in widths.items()}
        for name, array in memory.items():
            self._request.set_tensor(name, Tensor(array, shared_memory=True))
        return memory


def name_graph(outputs: dict[str, Output], inputs: list[op.Parameter], name: str) -> Model:
    """Return the graph of these outputs by name."""
    for output_name, output in outputs.items():
        output.get_tensor().set_names({output_name})
    model = Model([*map(opset13.result, outputs.values())], inputs, name)
    model.validate_nodes_and_infer_types()
    return model


def matrix(
    weight: Floats,  # [rows, columns]
    *,
    rounded: bool,
) -> Output:
    """Return a matrix in fp32, or ``rounded`` to int8 where that pays."""
    if rounded and weight.size >= SMALL_WEIGHT:
        return int8(*round_to_int8(weight))
    return opset13.constant(weight)


def half_matrix(
    weight: Floats,  # [rows, columns]
) -> Output:
    """Return a matrix that is stored in bf16."""
    # A tensor over an array does not keep it alive; its own memory is not initialised.
    tensor = Tensor(Type.bf16, list(weight.shape))
    bits = tensor.data.view(np.uint16)
    for first in range(0, len(weight), _ROWS):
        bits[first : first + _ROWS] = narrow(weight[first : first + _ROWS])
    return opset13.convert(op.Constant(tensor), "f32")


def norm_rows(
    rows: Output,  # [..., hidden]
    weight: Floats,  # [hidden] or [taps, hidden]
    eps: float,
) -> Output:
    """Return rows divided by their root mean square and multiplied by ``weight``."""
    squares = opset13.reduce_mean(opset13.power(rows, number(2.0)), ints(-1), True)
    root = opset13.sqrt(opset13.add(squares, number(eps)))
    divided = opset13.multiply(rows, opset13.divide(number(1.0), root))
    return opset13.multiply(opset13.constant(weight), divided)


def parameter(name: str, shape: list[int], dtype: Type) -> op.Parameter:
    """Return an input."""
    node = opset13.parameter(PartialShape(shape), dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def ints(values: int | list[int]) -> op.Constant:
    """Return a constant i32."""
    return opset13.constant(np.array(values, np.int32))


def number(value: float) -> op.Constant:
    """Return a constant f32."""
    return opset13.constant(np.array(value, np.float32))


def round_to_int8(
    weight: Floats | StoredMatrix,  # [rows, columns]
) -> tuple[Digits, Scales]:
    """Return the integers of a matrix in int8 and their scale a row [rows, 1]."""
    begins = range(0, weight.shape[0], _ROWS)
    parts = [_quantize(weight[begin : begin + _ROWS]) for begin in begins]
    digits, scales = zip(*parts, strict=True)
    return np.concatenate(digits), np.concatenate(scales)


def int8(
    digits: Digits,  # [rows, columns]
    scale: Scales,  # [rows, 1]
) -> Output:
    """Return a matrix in int8 in the form that its kernels read."""
    wide = opset13.convert(opset13.constant(digits), "f16")
    return opset13.convert(opset13.multiply(wide, opset13.constant(scale)), "f32")


def _quantize(weight: Floats) -> tuple[Digits, Scales]:
    """Return the digits and the scales [rows, 1] of ``weight`` [rows, columns]."""
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float16)
    wide = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)  # rows of padding are zeros
    return (weight / wide).round().clip(-127, 127).astype(np.int8), scale
