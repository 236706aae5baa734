"""Attention's place in a converted graph: a mark that is saved with it, and our node instead.

A front end builds no graph with inputs that it has not declared, and OpenVINO reads no saved graph
with the private operation. So attention is a mark until the graph has been read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import openvino
from openvino import Model, Output, PartialShape, Type, op, opset13

from backend.engines.models.spec import AttentionSpec
from backend.engines.openvino.paged_attention import HeadShape, paged_attention
from backend.engines.openvino.parts import ints, parameter

LAYOUT = {
    "past_lens": [-1],
    "subsequence_begins": [-1],
    "block_indices": [-1],
    "block_indices_begins": [-1],
    "max_context_len": [],
}
"""Inputs that say where sequences lie, all int32, with their shapes."""


_NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("layer", "heads", "kv_heads", "key_dim", "value_dim"), int),
    "scale": float,
    "window": int,
}
"""Fields of a layer's ``AttentionSpec`` that a mark has as attributes, with their types."""


class AttentionMark(openvino.Op):  # type: ignore[misc]
    """Stands where attention is, with queries, keys, values [rows, heads x dim] and sinks."""

    alive: ClassVar[list[AttentionMark]] = []
    """The marks of the graph under conversion, which does not keep Python's half of them."""

    def __init__(
        self, inputs: list[Output] | None = None, numbers: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(self)
        self.numbers = dict(numbers or {name: kind() for name, kind in _NUMBERS.items()})
        if inputs is not None:
            self.set_arguments(inputs)
            self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        """Say what attention returns: [rows, heads x numbers of a value]."""
        width = self.numbers["heads"] * self.numbers["value_dim"]
        rows = self.get_input_partial_shape(0)[0]
        self.set_output_type(0, self.get_input_element_type(0), PartialShape([rows, width]))

    def clone_with_new_inputs(self, inputs: list[Output]) -> AttentionMark:
        """Return the same mark of other inputs."""
        clone = AttentionMark(inputs, self.numbers)
        self.alive.append(clone)
        return clone

    def visit_attributes(self, visitor: Any) -> bool:
        """Read or write what the layer asks for."""
        visitor.on_attributes(self.numbers)
        return True


def mark(inputs: list[Output], spec: AttentionSpec) -> Output:
    """Return attention's place; ``sinks``, the last input, may have no elements."""
    node = AttentionMark(inputs, {name: getattr(spec, name) for name in _NUMBERS})
    AttentionMark.alive.append(node)
    return node.output(0)


def replace_marks(graph: Model, *, repeats: bool) -> list[AttentionSpec]:
    """Put paged attention in the marks' places, with its inputs (``converted.complete``); return
    what the layers ask for, in their order.
    """
    layout = {name: parameter(name, shape, Type.i32) for name, shape in LAYOUT.items()}
    doubled = [parameter(name, [-1], Type.i32) for name in ("expand", "compress") if repeats]
    inputs = [*layout.values(), *doubled]
    layers = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() != AttentionMark.__name__:
            continue
        spec = _read_spec(node.get_attributes())
        layers.append(spec)
        caches = [  # their precision and layout are settled by the plug-in
            parameter(f"{kind}_cache.{spec.layer}", [-1, -1, -1, -1], Type.dynamic)
            for kind in ("key", "value")
        ]
        inputs += caches
        *qkv, sinks = (node.input_value(index) for index in range(4))
        if doubled:
            qkv = [opset13.gather(rows, doubled[0], ints(0)).output(0) for rows in qkv]
        output = paged_attention(
            (qkv[0], qkv[1], qkv[2]),
            (caches[0].output(0), caches[1].output(0)),
            {name: source.output(0) for name, source in layout.items()},
            HeadShape(spec.kv_heads, spec.key_dim, spec.value_dim),
            scale=spec.scale,
            window=spec.window,
            sinks=_sinks(sinks, spec.heads),
        )
        if doubled:
            output = opset13.gather(output, doubled[1], ints(0)).output(0)
        node.output(0).replace(output)
    if doubled:
        _shorten_positions(graph, doubled[1])
    graph.add_parameters(inputs)
    return sorted(layers, key=lambda spec: spec.layer)


def _shorten_positions(graph: Model, compress: op.Parameter) -> None:
    """Read the rows' positions from ``positions``, which are those of attention's rows."""
    positions = graph.input("positions").get_node().output(0)
    targets = positions.get_target_inputs()
    rows = opset13.gather(positions, compress, ints(0)).output(0)
    for target in targets:
        target.replace_source_output(rows)


def _read_spec(attributes: Mapping[str, Any]) -> AttentionSpec:
    # a graph that was read has them as strings
    return AttentionSpec(**{name: kind(attributes[name]) for name, kind in _NUMBERS.items()})  # type: ignore[arg-type]


def _sinks(sinks: Output, heads: int) -> Output | None:
    if sinks.get_partial_shape() == PartialShape([0]):
        return None
    return opset13.reshape(sinks, ints([1, heads, 1, 1]), False).output(0)
