"""A decoder of transformers as an OpenVINO graph that has marks for attention.

Tracing meets one operation, ``spindle::attend``, where a module asks for attention: so every family
whose modules ask the attention function is converted, without a line of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import openvino
import torch
from openvino import Model, Output
from openvino.frontend.pytorch import ConversionExtension
from torch import nn
from transformers.utils import logging

from backend.engines.checkpoint import CheckpointError
from backend.engines.memory import PROCESS_BYTES, host_bytes
from backend.engines.models.attention import attending_by
from backend.engines.models.comparison import BLOCKS, TOKENS, compare, run_eagerly
from backend.engines.models.loading import load_decoder
from backend.engines.models.probe import check_taps
from backend.engines.models.reading import read_spec
from backend.engines.models.spec import AttentionSpec, DecoderSpec
from backend.engines.openvino.converted import complete, read
from backend.engines.openvino.decoder import OpenvinoDecoder
from backend.engines.openvino.experts import EXPERTS
from backend.engines.openvino.four_bits import take_four_bits
from backend.engines.openvino.marks import AttentionMark, mark
from backend.engines.openvino.packed import PackedMatrices
from backend.engines.openvino.parts import SMALL_WEIGHT
from backend.engines.openvino.passes import narrow, side_by_side
from backend.engines.weights import read_stored, widen_stored
from backend.storage.manifest import read_model_config
from backend.storage.weight_files import weight_files

_EXAMPLE = (torch.arange(5, 12), torch.arange(7), torch.tensor([3, 6]))
"""Token ids, positions and the rows whose logits are wanted, for tracing."""


HEAD_DIM_STEP = 16
"""Heads of 4 gave wrong texts where vectors have 8 numbers; they may have 16."""

PEAK_BYTES = 16
"""Bytes a weight at the peak: in fp32 by torch, joined with its neighbours, and compiled."""

SECONDS, SECONDS_PER_BILLION = 15, 60
"""Estimates of how long a conversion takes."""

GIB = 1 << 30


@torch.library.custom_op("spindle::attend", mutates_args=())
def _attend(
    query: torch.Tensor,  # [rows, heads x key_dim]
    key: torch.Tensor,  # [rows, kv_heads x key_dim]
    value: torch.Tensor,  # [rows, kv_heads x value_dim]
    sinks: torch.Tensor,  # [heads], or [0] without sinks
    layer: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    del key, value, sinks, layer, kv_heads, key_dim, scale, window
    return query.new_zeros(query.shape[0], heads * value_dim)


def _trace(
    spec: AttentionSpec,
    query: torch.Tensor,  # [1, heads, rows, key_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, key_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Leave ``spindle::attend`` in the trace (``attention.Attend``)."""
    rows = (x.transpose(1, 2).flatten(0, 1).flatten(1) for x in (query, key, value))
    shape = spec.layer, spec.heads, spec.kv_heads, spec.key_dim, spec.value_dim
    sinks = torch.zeros(0) if sinks is None else sinks
    output: torch.Tensor = _attend(*rows, sinks, *shape, spec.scale, spec.window)
    return output.view(1, -1, spec.heads, spec.value_dim)


class _Rows(nn.Module):
    """A decoder with packed rows: logits of wanted rows, and the output of the layers ``taps``."""

    def __init__(self, lm: nn.Module, taps: Seq[int]) -> None:
        super().__init__()
        self.lm, self._taps = lm, taps
        self._tapped: list[torch.Tensor] = []

    def forward(
        self,
        ids: torch.Tensor,  # int64 [tokens]
        positions: torch.Tensor,  # int64 [tokens]
        rows: torch.Tensor,  # int64 [rows]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return logits [rows, vocab], and with taps all rows' [tokens, taps x hidden]."""
        self._tapped.clear()
        out = self.lm(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
        )
        logits: torch.Tensor = out.logits[0]
        if not self._taps:
            return logits
        return logits, torch.cat([states[0] for states in self._tapped], 1)

    def keep(self, module: object, inputs: object, output: Any) -> None:
        """Keep a layer's output: a forward hook."""
        del module, inputs
        self._tapped.append(output[0] if isinstance(output, tuple) else output)


def misfit_of_attention(layers: Iterable[AttentionSpec]) -> str:
    """Return why OpenVINO's attention does not run these layers; nothing where it does."""
    for layer in layers:
        if layer.softcap:
            return f"its scores are bounded (soft-cap {layer.softcap:g})"
        for dim in (layer.key_dim, layer.value_dim):
            if dim % HEAD_DIM_STEP:
                return f"head_dim must be a multiple of {HEAD_DIM_STEP}, got {dim}"
    return ""


def convert_folder(
    folder: Path, dtype: str, taps: Seq[int], file: Path, say: Callable[[str], None], head: str
) -> None:
    """Write a folder's graph to ``file`` as an engine of this ``dtype`` reads it; ``head``: that of
    the head, if it is another.

    ``say`` is given what that will take before it begins. Raises CheckpointError for a folder that
    cannot be served, for too little memory, and for a graph whose logits differ from those of
    transformers' own forward.
    """
    logging.set_verbosity_error()  # its warnings are of training
    spec = read_spec(folder)  # and keep it: a later start reads it without transformers
    if reason := misfit_of_attention(spec.layers):
        text = f"OpenVINO's attention does not run {spec.architecture}: {reason}"
        raise CheckpointError(f"{folder}: {text}; set engine to 'torch'")
    check_taps(folder, spec, taps)
    if dtype == "int4":
        _convert_packed(folder, spec, taps, file, say, head)
        return
    _check_memory(folder, spec, PEAK_BYTES * spec.weights, say)
    lm: Any = load_decoder(folder, "fp32")
    try:
        graph = convert(lm, taps)
        side_by_side(graph)
        _compare(folder, lm, graph.clone(), taps)
        del lm
        narrow(graph, dtype)
        graph.validate_nodes_and_infer_types()
        openvino.save_model(graph, file, compress_to_fp16=False)
    finally:
        AttentionMark.alive.clear()


def _convert_packed(
    folder: Path,
    spec: DecoderSpec,
    taps: Seq[int],
    file: Path,
    say: Callable[[str], None],
    head: str,
) -> None:
    """Do the same for a folder with matrices of 4 bits, without a copy of it in another format."""
    stored = sum(part.stat().st_size for part in weight_files(folder))
    wide_head = 0 if head else 4 * spec.looked_up
    _check_memory(folder, spec, 2 * stored + wide_head, say)
    tensors = read_stored(folder)
    quantization = read_model_config(folder).get("quantization_config") or {}
    matrices, reasons = take_four_bits(tensors, quantization)
    for name, reason in reasons.items():
        say(f"{folder}: {name} is widened to bf16: {reason}")
    others = widen_stored(folder, tensors)
    large = {n: t for n, t in others.items() if t.dim() == 2 and t.numel() >= SMALL_WEIGHT}
    packed = PackedMatrices({**matrices, **large})
    lm: Any = load_decoder(folder, "fp32", weights=others | packed.stand_ins)
    if misplaced := packed.assign(lm):
        text = f"tensor {misplaced} is multiplied where it cannot stay packed; set dtype to 'bf16'"
        raise CheckpointError(f"{folder}: {text}")
    if head:
        packed.round(lm.get_output_embeddings(), head)
    try:
        graph = convert(lm, taps, packed)
        openvino.save_model(graph, file, compress_to_fp16=False)
        del graph
        packed.forget_constants()
    finally:
        AttentionMark.alive.clear()
    with packed.multiplied():
        expected = run_eagerly(lm)
    del packed  # the memory of a rounded head
    _compare(folder, lm, read(file), taps, expected)


def convert(lm: Any, taps: Seq[int] = (), packed: PackedMatrices | None = None) -> Model:
    """Return the graph of a decoder in fp32, but for matrices that are ``packed``.

    Inputs: ``ids``, ``positions`` and ``rows``, all i64. Outputs: ``logits`` f32[R, vocab], and
    with ``taps``, layers counted from 1, ``hidden_states`` f32[T, taps x hidden].
    """
    if hasattr(lm, "set_experts_implementation"):
        lm.set_experts_implementation(EXPERTS)
    rows = _Rows(lm, taps).eval()
    layers = lm.get_decoder().layers
    hooks = [layers[tap - 1].register_forward_hook(rows.keep) for tap in taps]
    extensions = [ConversionExtension("spindle::attend", _place_mark)]
    extensions += packed.extensions if packed else []
    try:
        with torch.no_grad(), attending_by(_trace), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tracing: what is constant is so for every pass
            with packed.traced(rows, *_EXAMPLE) if packed else nullcontext():
                graph = openvino.convert_model(rows, example_input=_EXAMPLE, extension=extensions)
    finally:
        for hook in hooks:
            hook.remove()
    for port, name in zip(graph.inputs, ("ids", "positions", "rows"), strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(graph.outputs, ("logits", "hidden_states"), strict=False):
        port.get_tensor().set_names({name})
    return graph


def _check_memory(folder: Path, spec: DecoderSpec, peak: int, say: Callable[[str], None]) -> None:
    """Say what a conversion takes. Raises CheckpointError where that is not there."""
    needed, free = peak + PROCESS_BYTES, host_bytes()
    text = (
        f"converting {folder} ({spec.architecture}) for OpenVINO needs {needed / GIB:.1f} GiB of "
        f"memory, {free / GIB:.1f} GiB are free"
    )
    if needed > free:
        raise CheckpointError(text)
    say(f"{text}; once, in about {SECONDS + SECONDS_PER_BILLION * spec.weights / 1e9:.0f} s")


def _compare(
    folder: Path,
    lm: Any,
    graph: Model,
    taps: Seq[int],
    expected: torch.Tensor | None = None,  # [TOKENS, vocab]
) -> None:
    """Run the graph. Raises CheckpointError where it is not transformers' forward."""
    decoder = OpenvinoDecoder(
        complete(graph, positions=TOKENS, repeats=False),
        kv_blocks=BLOCKS,
        threads=torch.get_num_threads(),
        invariant=False,
        repeats=False,
        taps=taps,
        group=0,
    )
    compare(lm, decoder.forward, str(folder), expected)


def _place_mark(context: Any) -> list[Output]:
    """Return the mark for a ``spindle::attend`` of the trace."""
    values = [context.get_values_from_const_input(index) for index in range(4, 11)]
    inputs = [context.get_input(index) for index in range(4)]
    return [mark(inputs, AttentionSpec(*values))]
