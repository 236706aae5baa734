"""A converted graph made ready to be compiled."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import openvino
from openvino import Model, Output, Type, opset13

from backend.engines.models.spec import AttentionSpec
from backend.engines.openvino.marks import AttentionMark, replace_marks
from backend.engines.openvino.parts import ints
from backend.engines.openvino.passes import has_experts, smallest_group, sums, tabulate_angles


@dataclass(frozen=True, slots=True)
class ConvertedGraph:
    """A graph to compile."""

    graph: Model
    """Inputs: ``ids`` i64[T], ``positions`` i64[E], ``rows`` i64[R] (which want logits),
    ``marks.LAYOUT``, and caches ``key_cache.<layer>``, ``value_cache.<layer>``. Outputs: ``logits``
    f32[R, vocab], and with taps ``hidden_states`` [T, taps x hidden]. If it repeats, attention has
    E rows, ``expand`` i32[E] of the T others, and after it ``compress`` i32[T] of those; else
    E = T. If it ranks, there are also ``best_ids`` i32[R, best], the greatest logits by the
    activations' type, by id, and ``masses`` f32[R, 1], the sums of exp(logit - greatest).
    """
    layers: Seq[AttentionSpec]
    """Each layer's requirements of attention."""
    vocab_size: int
    sums: set[int]
    """Terms of the sums in its products."""
    has_experts: bool
    """Whether rows choose their matrices."""
    group: int | None
    """Columns of the smallest group of a matrix of 4 bits; None without any."""


def read(file: Path) -> Model:
    """Return a saved graph, with its marks."""
    core = openvino.Core()
    core.add_extension(AttentionMark)
    graph = core.read_model(file)
    AttentionMark.alive.clear()
    return graph


def complete(
    graph: Model, *, positions: int, repeats: bool, best: int = 0, stored: Type = Type.f32
) -> ConvertedGraph:
    """Return a graph with attention in its marks' places, for positions below ``positions``.

    ``repeats``: attention may have more rows than the rest. ``best``: columns to rank; 0: none.
    ``stored``: the type of hidden states; another one than that of the activations would have the
    sums that lead to them in fp32.
    """
    tabulate_angles(graph, positions)
    chooses = has_experts(graph)
    layers = replace_marks(graph, repeats=repeats)
    results = {next(iter(result.output(0).get_names())): result for result in graph.get_results()}
    if best:
        for name, output in _rank(results["logits"].input_value(0), best).items():
            output.get_tensor().set_names({name})
            graph.add_results([opset13.result(output)])
    if (taps := results.get("hidden_states")) is not None:
        states = taps.input_value(0)
        states.get_tensor().set_names(set())
        converted = opset13.convert(states, stored).output(0)
        converted.get_tensor().set_names({"hidden_states"})
        graph.remove_result(taps)
        graph.add_results([opset13.result(converted)])
    graph.validate_nodes_and_infer_types()
    vocab = graph.output("logits").get_partial_shape()[1].get_length()
    return ConvertedGraph(graph, layers, vocab, sums(graph), chooses, smallest_group(graph))


def _rank(logits: Output, count: int) -> dict[str, Output]:
    """Return the outputs that rank ``count`` columns (``ConvertedGraph.graph``)."""
    best = opset13.topk(logits, ints(count), -1, "max", "index", "i32")
    greatest = opset13.reduce_max(logits, ints(-1), True)
    masses = opset13.reduce_sum(opset13.exp(opset13.subtract(logits, greatest)), ints(-1), True)
    return {"best_ids": best.output(1), "masses": masses.output(0)}
