"""Folders of 4 bits on CPUs: the integers of their formats, exactly, and the same bits in any
pass.
"""

import json

import numpy as np
import openvino
import pytest
import torch

from backend.engine_config import EngineConfig, with_auto_resolved
from backend.engines.openvino.converted import complete, read
from backend.engines.openvino.decoder import OpenvinoDecoder
from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.openvino.formats import misfit_of_four_bits
from backend.engines.openvino.four_bits import round_to_four_bits, take_four_bits
from backend.engines.openvino.graph_cache import bring_graph
from backend.engines.stepping.chunks import KVTable, PassChunk
from tests.contract.deployment import K_MAX, MAX_CONTEXT_TOKENS, VOCAB
from tests.contract.test_openvino import same_texts_of
from tests.models.quantized import FOUR_BITS, METHODS, quantize
from tests.models.test_conversion import random_folder

TRANSPOSED = torch.Generator().manual_seed(5)


@pytest.mark.parametrize("method", FOUR_BITS)
def test_a_matrix_is_what_its_format_means(method):
    quantization, write = METHODS[method]
    weight = torch.randn(48, 256, generator=TRANSPOSED) * 0.02
    parts, meant = write(weight)
    tensors = {f"layer.{end}": part.contiguous() for end, part in parts.items()}
    kept = {"norm.weight": torch.ones(3)}
    tensors |= kept
    taken, reasons = take_four_bits(tensors, quantization)
    assert not reasons
    assert tensors.keys() == kept.keys()
    matrix = taken["layer.weight"]
    assert torch.equal(matrix.widen(), meant)  # in fp32: the same integers, zeros and scales
    assert matrix.shape == (48, 256)
    assert (matrix.zero is None) == ("symmetric" in method)
    assert not misfit_of_four_bits({"quantization_config": quantization})


@pytest.mark.parametrize(
    ("method", "change", "reason"),
    [
        ("gptq 4 bits", {"group_size": 16}, "its groups have 16 columns"),
        ("gptq 8 bits, by activations", {"group_size": 32}, "its integers have 8 bits"),
        ("gptq in 32", {"desc_act": True}, r"act-order"),
        ("gptq in 32", {"group_size": -1}, "its groups have -1 columns"),
        ("fp8 of one scale", {}, "fp8 has no integers of 4 bits"),
    ],
)
def test_a_folder_that_does_not_fit_is_widened_with_the_reason(method, change, reason, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": METHODS[method][0] | change,
    }
    assert reason in misfit_of_four_bits(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = EngineConfig(engine="openvino", model=str(tmp_path))
    assert with_auto_resolved(engine).dtype in ("bf16", "fp32")


def test_a_folder_that_fits_is_served_as_it_is(tmp_path):
    config = {"quantization_config": METHODS["awq in 64"][0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = EngineConfig(engine="openvino", model=str(tmp_path))
    assert with_auto_resolved(engine).dtype == "int4"
    assert "experts" in misfit_of_four_bits(config | {"num_experts": 8})


def test_columns_in_another_order_stay_with_the_reason():
    quantization, write = METHODS["gptq in 32"]
    parts, _ = write(torch.randn(8, 64))
    parts["g_idx"] = parts["g_idx"].flip(0)
    tensors = {f"layer.{end}": part.contiguous() for end, part in parts.items()}
    taken, reasons = take_four_bits(tensors, quantization)
    assert not taken
    assert "act-order" in reasons["layer.weight"]
    assert "layer.qweight" in tensors


def test_a_rounded_head_is_within_half_a_step_of_it():
    weight = torch.randn(64, 256, generator=TRANSPOSED)
    rounded = round_to_four_bits(weight)
    steps = rounded.scale.float().abs().repeat_interleave(rounded.group, 1)
    assert rounded.group == 128
    assert ((rounded.widen() - weight).abs() <= 1.01 * steps).all()  # the other end may be cut off
    assert (((rounded.widen() - weight).abs() <= 0.501 * steps).float().mean()) > 0.97


# -- converted

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))


LARGE = {"vocab_size": 2304, "num_hidden_layers": 2}
"""A vocabulary whose matrix is large enough to be stored as it is, too."""


def write_packed(folder, method, family="qwen 3", **settings):
    """A folder of 4 bits, and the same widened, of a random model."""
    if family == "gemma 3":
        settings["layer_types"] = ["sliding_attention", "full_attention"]
    random_folder(family, LARGE | settings, folder / "plain")
    return quantize(folder / "plain", folder / "packed", method), folder / "packed-wide"


def logits_of(folder, dtype, group, head=""):
    """The logits of a text in fp32, with activations rounded in groups, or not (0)."""
    graph = complete(read(bring_graph(folder, dtype, head=head)), positions=64, repeats=True)
    decoder = OpenvinoDecoder(graph, kv_blocks=4, group=group)
    return decoder.forward([PassChunk(list(range(3, 40)), 0, KVTable([2, 0, 1]), 37)]).copy()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama 3", "qwen 2", "qwen 3", "gemma 3", "phi 4"])
def test_a_family_has_the_logits_of_its_widened_folder(family, tmp_path):
    method = "gptq in 32" if family == "qwen 3" else "int4 in 32, symmetric"
    packed, wide = write_packed(tmp_path, method, family)
    found, wanted = logits_of(packed, "int4", 0), logits_of(wide, "fp32", 0)
    assert (found - wanted).std() < 2e-3 * wanted.std()  # the folder was widened to bf16
    assert (logits_of(packed, "int4", 32) - found).std() > 1e-3 * found.std()  # it does round


@pytest.mark.slow
def test_the_graph_holds_the_folder_s_integers(tmp_path):
    packed, _ = write_packed(tmp_path, "int4 in 32, symmetric")
    graph = read(bring_graph(packed, "int4"))
    kinds = [
        node.get_element_type() for node in graph.get_ops() if node.get_type_name() == "Constant"
    ]
    assert kinds.count(openvino.Type.i4) == 2 * 4  # of two layers: qkv, o, gate and up, down
    sizes = {
        file.name: file.stat().st_size for file in bring_graph(packed, "int4").parent.iterdir()
    }
    stored = (packed / "model.safetensors").stat().st_size
    assert sizes["graph.bin"] < 1.05 * stored


@pytest.mark.slow
@pytest.mark.parametrize("head", ["int8", "int4"])
def test_a_rounded_head_is_compared_and_differs(head, tmp_path):
    packed, _ = write_packed(
        tmp_path, "int4 in 32, symmetric", hidden_size=128, intermediate_size=256
    )
    as_it_is, rounded = (logits_of(packed, "int4", 0, head) for head in ("", head))
    difference = (rounded - as_it_is).std() / as_it_is.std()
    assert 1e-3 < difference < (0.02 if head == "int8" else 0.15)


BITS = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCAB, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method", ["gptq in 32", "awq in 64", "int4 in 128, symmetric"])
def test_requests_have_the_same_bits_under_loads(method, threads, tmp_path):
    random_folder("qwen 3", BITS, tmp_path / "plain")
    engine = OpenvinoEngine.load(
        "target",
        quantize(tmp_path / "plain", tmp_path / "packed", method),
        kv_blocks=20,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_draft_tokens=K_MAX,
        dtype="int4",
        threads=threads,
    )
    assert engine.limits.invariant
    same_texts_of(engine, range(1, 6), 60)


def rows_alone_and_together(decoder, count):
    """The logits of a text's rows, one by one and in one pass."""
    text = list(range(3, 3 + 20 + count))
    table = KVTable([0, 1])
    decoder.forward([PassChunk(text[:20], 0, table, 1, prompt_rows=20)])
    alone = [
        decoder.forward([PassChunk([text[20 + row]], 20 + row, table, 1)])[0].copy()
        for row in range(count)
    ]
    return np.stack(alone), decoder.forward([PassChunk(text[20:], 20, table, count)]).copy()


@pytest.mark.slow
def test_one_to_24_rows_have_the_same_bits_as_activations_are_rounded(tmp_path):
    packed, _ = write_packed(
        tmp_path, "int4 in 128, symmetric", hidden_size=512, intermediate_size=1024
    )
    graph = bring_graph(packed, "int4")

    def decoder(group):
        whole = complete(read(graph), positions=64, repeats=True)
        return OpenvinoDecoder(whole, kv_blocks=4, group=group)

    rounding, exact = decoder(128), decoder(0)
    for count in (2, 3, 4, 5, 8, 16, 24):
        assert np.array_equal(*rows_alone_and_together(rounding, count)), count
    assert not all(np.array_equal(*rows_alone_and_together(exact, count)) for count in (2, 8, 24))
