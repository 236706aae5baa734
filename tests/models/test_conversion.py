"""Families converted to OpenVINO: exact against transformers, and the same bits in any batch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.engines.checkpoint import CheckpointError
from backend.engines.openvino.converted import complete, read
from backend.engines.openvino.decoder import OpenvinoDecoder, stored_as
from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.openvino.graph_cache import bring_graph, graph_folder, has_graph
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.machine import machine
from backend.sequence import BLOCK_TOKENS
from backend.storage import cache
from tests.fakes.machine import FakeMachine
from tests.models.families import SERVED, config_of, make_folder, spread_weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONVERTED = [name for name in SERVED if name != "gemma 2"]
"""Families without soft-caps."""

DTYPES = ["fp32"] + ["bf16"] * machine.multiplies_bf16()
TAPS = (2, 4)
TREE = (-1, 0, 1, -1, 3, 0, 4)

ROUNDING = 5e-5
"""Error of logits in fp32, in standard deviations of all: Gemma 4 has 2e-5, others 4e-6."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))


def texts(*lengths):
    """Random texts."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


def table(*blocks):
    return KVTable(blocks)


class Compared:
    """An engine's passes against whole texts of transformers' eager forward."""

    def __init__(self, folder, **sizes):
        self.lm = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.engine = OpenvinoEngine.load(
            "target", folder, kv_blocks=16, max_context_tokens=128, taps=TAPS, **sizes
        )

    @torch.inference_mode()
    def check(self, *parts):
        """Run chunks in a pass; each comes with the text whose last rows its logits are."""
        logits = torch.from_numpy(self.engine.model.forward([chunk for chunk, _ in parts]))
        for (chunk, text), rows in zip(
            parts, logits.split([chunk.logits for chunk, _ in parts]), strict=True
        ):
            for row, path in enumerate(text if chunk.parents else [text]):
                whole = self.lm(torch.tensor([path]), use_cache=False).logits[0]
                found = rows[row : row + 1] if chunk.parents else rows
                wanted = whole[-len(found) :]
                assert ((found - wanted).abs().max() / whole.std()) < ROUNDING


def paths(text, nodes):
    """The texts that end at the root and at each node of ``TREE``."""
    found = []
    for node, parent in enumerate(TREE):
        found.append([*(found[parent] if parent >= 0 else text), nodes[node]])
    return [text, *found]


@pytest.mark.parametrize("family", CONVERTED)
def test_ragged_batches_trees_and_taps_are_those_of_transformers(family, tmp_path):
    folder = make_folder(family, tmp_path / "model")
    compared = Compared(folder)
    a, b, c, nodes = texts(70, 41, 33, len(TREE))
    for_a, for_b, for_c = table(5, 2, 9, 11), table(1, 7, 3), table(12, 4, 6)
    compared.check((PassChunk(a[:50], 0, for_a, 50, prompt_rows=50), a[:50]))
    states = torch.from_numpy(compared.engine.model.hidden_states.copy())
    compared.check(
        (PassChunk(a[50:51], 50, for_a, 1), a[:51]),
        (PassChunk(b[:37], 0, for_b, 37, prompt_rows=37), b[:37]),
        (PassChunk(c[:20], 0, for_c, 20, prompt_rows=20), c[:20]),
    )
    compared.check(
        (PassChunk(a[51:60], 51, for_a, 9), a[:60]),
        (PassChunk(b[37:38], 37, for_b, 1), b[:38]),
        (PassChunk(c[20:33], 20, for_c, 13, prompt_rows=13), c[:33]),
    )
    tree = PassChunk([a[60], *nodes], 60, for_a, 1 + len(TREE), TREE)
    compared.check((tree, paths(a[:61], nodes)), (PassChunk(b[38:39], 38, for_b, 1), b[:39]))
    assert torch.allclose(states, outputs(compared.lm, a[:50]), atol=1e-3)


@torch.inference_mode()
def outputs(lm, text):
    """The outputs of the layers ``TAPS`` [tokens, taps, hidden]."""
    found = []
    for tap in TAPS:
        layer = lm.get_decoder().layers[tap - 1]
        layer.register_forward_hook(
            lambda _m, _i, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
    lm(torch.tensor([text]), use_cache=False)
    return torch.stack([states[0] for states in found], 1)


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
EXACT = {
    "qwen 3": WIDE,
    "gemma 3": {**WIDE, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen 3 moe": {**WIDE, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", EXACT)
def test_a_text_has_the_same_bits_alone_among_others_and_with_a_prompt(
    family, dtype, threads, tmp_path
):
    random_folder(family, EXACT[family], tmp_path / "model")
    decoder = decoder_of(tmp_path / "model", dtype, kv_blocks=24, positions=128, threads=threads)
    text, other, prompt = texts(58, 40, 25)
    mine, others = table(0, 1), [table(2 + 2 * n, 3 + 2 * n) for n in range(9)]

    def run(*chunks):
        return torch.from_numpy(decoder.forward(chunks).copy())

    def among(position, count):
        rows = [PassChunk(other[30:31], 30, where, 1) for where in others[:count]]
        middle = count // 2
        own = PassChunk(text[position : position + 1], position, mine, 1)
        return run(*rows[:middle], own, *rows[middle:])[middle : middle + 1]

    def with_prompt(position):
        chunk = PassChunk(prompt, 0, table(20), 1, prompt_rows=len(prompt))
        return run(chunk, PassChunk(text[position : position + 1], position, mine, 1))[1:]

    with torch.inference_mode():
        run(PassChunk(text[:50], 0, mine, 1, prompt_rows=50))
        for where in others:
            run(PassChunk(other[:30], 0, where, 1, prompt_rows=30))
        alone = torch.cat([among(position, 0) for position in range(50, 58)])
        assert alone.isfinite().all()
        assert torch.equal(run(PassChunk(text[50:], 50, mine, 8)), alone)
        for count in (1, 3, 9):
            rows = [among(position, count) for position in range(50, 58)]
            assert torch.equal(torch.cat(rows), alone), f"among {count} others"
        assert torch.equal(torch.cat([with_prompt(n) for n in range(50, 58)]), alone)


def random_folder(family, settings, folder):
    """Save a random model of a family with other settings; return it."""
    kind, usual = SERVED[family]
    config = config_of(kind, usual | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    spread_weights(model)
    model.save_pretrained(folder)
    return model


def decoder_of(folder, dtype, *, kv_blocks, positions, threads=1):
    """A decoder that is run row by row, also where the engine would not promise its bits."""
    graph = read(bring_graph(folder, dtype))
    stored = stored_as(dtype)
    return OpenvinoDecoder(
        complete(graph, positions=positions, repeats=True, stored=stored),
        kv_blocks=kv_blocks,
        precision=dtype,
        threads=threads,
    )


def test_experts_are_no_promise_and_soft_caps_are_refused_by_name(tmp_path):
    sizes = {"kv_blocks": 4, "max_context_tokens": 64}
    moe = OpenvinoEngine.load("target", make_folder("mixtral", tmp_path / "moe"), **sizes)
    assert not moe.limits.invariant
    with pytest.raises(CheckpointError, match=r"Gemma2.*: its scores are bounded .*'torch'"):
        OpenvinoEngine.load("target", make_folder("gemma 2", tmp_path / "capped"), **sizes)


def test_far_positions_in_bf16_have_the_angles_of_fp32(tmp_path):
    if "bf16" not in DTYPES:
        pytest.skip("no products in bf16")
    length, last = 2000, 200
    longer = {"num_hidden_layers": 2, "layer_types": None, "max_position_embeddings": length}
    model = random_folder("cohere 2", longer, tmp_path / "model")
    (text,) = texts(length)
    blocks = -(-length // BLOCK_TOKENS)
    decoder = decoder_of(tmp_path / "model", "bf16", kv_blocks=blocks, positions=length)
    chunk = PassChunk(text, 0, table(*range(blocks)), last, prompt_rows=length)
    with torch.inference_mode():
        wanted = model(torch.tensor([text]), use_cache=False, logits_to_keep=last).logits[0]
        errors = (torch.from_numpy(decoder.forward([chunk])) - wanted).square().mean(
            -1
        ).sqrt() / wanted.std()
    assert errors.median() < 0.02  # 0.005; with angles in bf16 it is 0.05


def test_a_second_start_reads_the_graph_without_transformers(tmp_path):
    folder = make_folder("qwen 3", tmp_path / "model")
    lines = []
    bring_graph(folder, "fp32", say=lines.append)
    assert "GiB of memory" in lines[0]
    assert "Qwen3ForCausalLM" in lines[0]
    code = (
        "import sys; from pathlib import Path\n"
        "from backend.machine import machine\n"
        "from backend.engines.openvino.engine import OpenvinoEngine\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "machine.package_version = {}.get\n"
        "def load(dtype):\n"
        f"    folder = Path({str(folder)!r})\n"
        "    OpenvinoEngine.load('t', folder, dtype=dtype, kv_blocks=4, max_context_tokens=64)\n"
        "load('fp32')\n"
        "try:\n"
        "    load('int8')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    text = f"converting {folder} to int8 needs the package torch: install spindle[convert]"
    assert done.stdout.startswith(text)


def test_a_graph_is_made_again_if_another_transformers_is_installed(tmp_path, monkeypatch):
    folder = make_folder("qwen 3", tmp_path / "model")
    bring_graph(folder, "fp32")
    place = graph_folder(folder, "fp32")
    monkeypatch.setattr(cache, "machine", FakeMachine(packages={"transformers": "5.99.0"}))
    assert not has_graph(place)
    bring_graph(folder, "fp32")
    assert graph_folder(folder, "fp32") == place
    assert has_graph(place)


def test_another_dtype_tap_or_configuration_is_another_graph(tmp_path):
    folder = make_folder("qwen 3", tmp_path / "model")
    places = {graph_folder(folder, "fp32"), graph_folder(folder, "bf16")}
    places.add(graph_folder(folder, "fp32", (1,)))
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace("1e-06", "1e-05"), "utf-8")
    places.add(graph_folder(folder, "fp32"))
    assert len(places) == 4
