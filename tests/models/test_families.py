"""Every family on the torch engine, against transformers' own eager forward of the same folder."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines import memory
from backend.engines.checkpoint import CheckpointError
from backend.engines.models.comparison import compare
from backend.engines.models.loading import load_decoder
from backend.engines.models.probe import probe
from backend.engines.openvino.kind import WEIGHT_BYTES
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.engines.torch import decoder
from backend.engines.torch.decoder import Decoder
from backend.engines.torch.engine import TorchEngine
from backend.engines.weights import DTYPES
from backend.model_folders import check_folders
from tests.models.families import SERVED, make_folder

MOST = 2e-5
"""Difference over the logits' standard deviation, in fp32."""


def text(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (count,), generator=generator).tolist()


def load(folder, dtype="fp32", **options):
    return Decoder(load_decoder(folder, dtype), probe(folder).layers, kv_blocks=16, **options)


class Both:
    """A family's decoder and transformers' own, on the same folder."""

    def __init__(self, folder, taps=()):
        self.decoder = load(folder, taps=taps)
        self.own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.worst = 0.0

    def run(self, *chunks):
        with torch.inference_mode():
            return torch.from_numpy(self.decoder.forward(chunks))

    def check(self, logits, tokens):
        """Compare the last logits of a text."""
        with torch.inference_mode():
            wanted = self.own(torch.tensor([tokens]), use_cache=False).logits[0, -len(logits) :]
        self.worst = max(self.worst, float((logits - wanted).abs().max() / wanted.std()))


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_a_family_equals_transformers_in_ragged_batches_and_trees(tmp_path, family):
    both = Both(make_folder(family, tmp_path))
    a, b, c = text(70, 1), text(41, 2), text(33, 3)
    tables = [KVTable(blocks) for blocks in ([5, 2, 9, 11], [1, 7, 3], [12, 4, 6])]
    both.check(both.run(PassChunk(a[:50], 0, tables[0], 50)), a[:50])
    for end in range(51, 55):
        both.check(both.run(PassChunk(a[end - 1 : end], end - 1, tables[0], 1)), a[:end])
    logits = both.run(
        PassChunk(a[54:55], 54, tables[0], 1),
        PassChunk(b[:37], 0, tables[1], 37),
        PassChunk(c[:20], 0, tables[2], 20),
    )
    for rows, tokens in zip(logits.split((1, 37, 20)), (a[:55], b[:37], c[:20]), strict=True):
        both.check(rows, tokens)
    parents, nodes = (-1, 0, 1, -1, 3, 0, 4), text(7, 4)
    tree = PassChunk([a[55], *nodes], 55, tables[0], 8, parents)
    logits = both.run(
        tree, PassChunk(b[37:38], 37, tables[1], 1), PassChunk(c[20:33], 20, tables[2], 2)
    )
    both.check(logits[:1], a[:56])
    both.check(logits[8:9], b[:38])
    both.check(logits[9:], c)
    for node in range(7):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        both.check(logits[1 + node][None], [*a[:56], *(nodes[n] for n in path)])
    both.decoder.keep([(tree, [3, 4, 6])])
    accepted = [*a[:56], *(nodes[n] for n in (3, 4, 6)), a[60]]
    both.check(both.run(PassChunk([a[60]], 59, tables[0], 1)), accepted)
    assert both.worst < MOST


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen 3", "gemma 3", "qwen 3 moe", "gpt-oss", "gemma 4"])
def test_taps_are_the_layers_output_at_every_row(tmp_path, family):
    both = Both(make_folder(family, tmp_path), taps=(2, 4))
    tokens = text(40, 1)
    both.run(PassChunk(tokens, 0, KVTable([1, 0]), 3), PassChunk(tokens, 0, KVTable([2, 3]), 0))
    kept = []
    for layer in (1, 3):
        both.own.model.layers[layer].register_forward_hook(
            lambda module, inputs, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.inference_mode():
        both.own(torch.tensor([tokens]), use_cache=False)
    wanted = torch.stack([states.reshape(40, -1) for states in kept], 1).repeat(2, 1, 1)
    found = torch.from_numpy(both.decoder.hidden_states)
    assert found.shape == (80, 2, 64)
    assert float((found - wanted).abs().max() / wanted.std()) < MOST


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_an_engine_compares_64_tokens_before_it_serves_a_folder(tmp_path, dtype, monkeypatch):
    folder = make_folder("gpt-oss", tmp_path)
    sizes = {"kv_blocks": 8, "max_context_tokens": 128}
    engine = TorchEngine.load("target", folder, dtype=dtype, **sizes)
    assert (engine.limits.vocab_size, engine.limits.tree) == (256, True)

    real = decoder.attend

    def without_windows(spec, queries, keys, values, mask, sinks):
        causal = torch.arange(len(keys)) > torch.arange(len(keys))[-queries.shape[1] :, None]
        mask = torch.zeros(causal.shape, dtype=queries.dtype).masked_fill(causal, -torch.inf)
        return real(spec, queries, keys, values, mask.repeat(spec.heads // spec.kv_heads, 1), sinks)

    monkeypatch.setattr(decoder, "attend", without_windows)
    with pytest.raises(CheckpointError, match=r"target: .*logits of 64 tokens are .* at most"):
        TorchEngine.load("target", folder, dtype=dtype, **sizes)


@pytest.mark.medium
def test_far_positions_in_bf16_are_those_of_fp32(tmp_path):
    folder = make_folder("qwen 3", tmp_path)
    tokens, start = text(40, 1), 100_000
    wide, narrow = load(folder), load(folder, "bf16")

    def far(model):
        ids, positions = torch.tensor([tokens]), torch.arange(start, start + 40)[None]
        chunk = PassChunk(tokens, 0, KVTable([0, 1]), 40)
        real = model.lm.forward

        def shifted(**inputs):
            return real(**inputs | {"position_ids": positions, "input_ids": ids})

        model.lm.forward = shifted
        with torch.inference_mode():
            logits = torch.from_numpy(model.forward([chunk])).float()
        model.lm.forward = real
        return logits

    def distance(a, b):
        return float((a - b).square().mean().sqrt() / b.std())

    wanted = far(wide)
    assert distance(far(narrow), wanted) < 0.02
    rotary = narrow.lm.model.rotary_emb
    exact = rotary.forward

    def rounded(states, positions):
        return exact(states, positions.to(torch.bfloat16).float())

    rotary.forward = rounded  # what a product of positions in bf16 does
    assert distance(far(narrow), wanted) > 0.05


@pytest.mark.medium
def test_layers_that_never_ask_are_seen_by_the_comparison(tmp_path):
    """A model with a layer that mixes the rows of a pass: what the probe must refuse."""
    folder = make_folder("qwen 3", tmp_path)
    model = load(folder)
    mixing = model.lm.model.layers[1]
    mixing.register_forward_hook(lambda module, inputs, out: out + out.cumsum(1) * 0.2)
    with pytest.raises(CheckpointError, match="engine would answer wrongly"):
        compare(model.lm, model.forward, "qwen 3")


@pytest.mark.medium
def test_experts_are_planned_in_bf16_where_matrices_are_rounded(tmp_path):
    folder = make_folder("mixtral", tmp_path)
    planned = {}
    for dtype in ("int8", "bf16"):
        raw = {"target": {"engine": "openvino", "model": str(folder), "dtype": dtype}}
        planned[dtype] = memory.plan(parse_config(raw), {"target": folder})["target"].weights
    spec = probe(folder)
    rounded = spec.weights - spec.looked_up - spec.experts
    _, narrow, in_experts = WEIGHT_BYTES["int8"]
    assert in_experts == WEIGHT_BYTES["bf16"][2]
    assert planned["bf16"] - planned["int8"] == rounded * (WEIGHT_BYTES["bf16"][1] - narrow)


@pytest.mark.medium
def test_a_deployment_names_the_reason_for_a_folder_that_is_refused(tmp_path):
    folder = make_folder("gemma 3", tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    config = parse_config({"target": {"engine": "torch", "model": str(folder)}})
    check_folders(config)
    planned = memory.plan(config, {"target": folder})["target"]
    numbers = sum(weight.numel() for weight in load(folder).lm.parameters())
    assert planned.weights == numbers * DTYPES[config.target.dtype].itemsize
    raw = json.loads((folder / "config.json").read_text())
    text = json.dumps(raw | {"use_bidirectional_attention": True})
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"target\.model: .* its layers attend to later tokens"):
        check_folders(config)
