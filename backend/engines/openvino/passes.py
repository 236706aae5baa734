"""Passes over a converted graph."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openvino
from openvino import Model, Node, Output, Type, opset13

from backend.engines.openvino.parts import SMALL_WEIGHT, half_matrix, ints, matrix
from backend.sampling.distributions import Floats


def side_by_side(graph: Model) -> None:
    """Join products of the same rows: queries, keys and values, or gate and up.

    It is faster, and the plug-in's own fusion of gate, up and down ends the process (SIGFPE) in
    bf16 with one thread on AMX.
    """
    products: dict[tuple[str, int], list[Node]] = {}
    for node, weight in _products(graph):
        if node.get_attributes()["transpose_b"] and _is_constant(weight.get_node()):
            rows = node.input_value(0)
            key = rows.get_node().get_friendly_name(), rows.get_index()
            products.setdefault(key, []).append(node)
    for nodes in products.values():
        if len(nodes) < 2:
            continue
        weights = [node.input_value(1).get_node() for node in nodes]
        whole = opset13.constant(np.concatenate([weight.data for weight in weights]))
        product = opset13.matmul(nodes[0].input_value(0), whole, False, True)
        sizes = [weight.get_output_shape(0)[0] for weight in weights]
        parts = opset13.variadic_split(product, ints(-1), ints(sizes)).outputs()
        for node, part in zip(nodes, parts, strict=True):
            node.output(0).replace(part)


def narrow(graph: Model, dtype: str) -> None:
    """Store matrices as the engine's ``dtype`` has them: ``fp32``, ``bf16``, or ``int8`` with a
    scale for each row where that pays; what int8 leaves is bf16.
    """
    if dtype == "fp32":
        return
    if dtype == "int8":
        for node, weight in list(_products(graph)):
            constant = weight.get_node()
            if _is_constant(constant) and node.get_attributes()["transpose_b"]:
                whole = matrix(np.array(constant.data), rounded=True)
                node.input(1).replace_source_output(whole.output(0))
    for constant in [node for node in graph.get_ordered_ops() if _is_constant(node)]:
        shape, kind = constant.get_output_shape(0), constant.get_element_type()
        if kind != Type.f32 or len(shape) < 2 or np.prod(shape) < SMALL_WEIGHT:
            continue
        targets = constant.output(0).get_target_inputs()
        wide = half_matrix(constant.data).output(0)
        for target in targets:
            target.replace_source_output(wide)


def tabulate_angles(graph: Model, positions: int) -> None:
    """Look cos and sin of positions up in tables of fp32: in bf16 the angle of a far position is
    wrong by radians.
    """
    parameter = next(p for p in graph.get_parameters() if "positions" in p.output(0).get_names())
    core, places = openvino.Core(), np.arange(positions, dtype=np.int64)
    tables: dict[tuple[str, str], Output] = {}
    for node in graph.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in ("Cos", "Sin"):
            continue
        angles = node.input_value(0)
        key = kind, angles.get_node().get_friendly_name()
        if key not in tables:
            part = Model([opset13.result(angles)], [parameter], "angles").clone()
            run = core.compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            values: Floats = run([places])[0].reshape(positions, -1)
            table = np.cos(values) if kind == "Cos" else np.sin(values)
            rows = opset13.gather(opset13.constant(table), parameter, ints(0))
            tables[key] = opset13.unsqueeze(rows, ints(0)).output(0)
        node.output(0).replace(tables[key])


def sums(graph: Model) -> set[int]:
    """Return how many terms the sums of the graph's products with matrices have."""
    return {
        weight.get_shape()[1 if node.get_attributes()["transpose_b"] else 0]
        for node, weight in _products(graph)
    }


def smallest_group(graph: Model) -> int | None:
    """Return how many columns the smallest group of a matrix of 4 bits has; None without any."""
    groups = [
        node.get_output_shape(0)[-1]
        for node in graph.get_ops()
        if _is_constant(node)
        and node.get_element_type() in (Type.i4, Type.u4)
        and node.get_output_shape(0)[-1] > 1
    ]
    return min(groups, default=None)


def has_experts(graph: Model) -> bool:
    """Return whether rows choose their matrices: those are the only choices in a decoder."""
    return any(node.get_type_name() in ("GroupedMatMul", "TopK") for node in graph.get_ops())


def _products(graph: Model) -> Iterator[tuple[Node, Output]]:
    """Yield products of rows with a matrix of the model, and the matrix."""
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        weight = node.input_value(1)
        source = weight.get_node()
        while source.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape"):
            source = source.input_value(0).get_node()
        if _is_constant(source) and len(weight.get_partial_shape()) == 2:
            yield node, weight


def _is_constant(node: Node) -> bool:
    name: str = node.get_type_name()
    return name == "Constant"
