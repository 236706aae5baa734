"""Heads read targets of every family, on both engines that serve them."""

import pytest
import torch
from safetensors.torch import save_file

from backend.config import parse_config
from backend.engines.checkpoint import CheckpointError
from backend.engines.head.folder import HeadConfig, config_json
from backend.engines.head.network import HeadNetwork
from backend.engines.port import Turn
from backend.engines.registry import Service, make_engine
from backend.request import SamplingParams
from backend.sequence import Sequence
from tests.models.families import BASE, make_folder

TAPS = (1, 2, 4)
TOKENS = list(range(7, 40))


def write_head(folder, **changes):
    """A head with random weights."""
    sizes = {"vocab_size": BASE["vocab_size"], "hidden_size": BASE["hidden_size"], "rows": 32}
    config = HeadConfig(**sizes | {"intermediate_size": 32, "layers": TAPS} | changes)
    torch.manual_seed(0)
    tensors = {name: t.bfloat16() for name, t in HeadNetwork(config).state_dict().items()}
    folder.mkdir()
    (folder / "config.json").write_text(config_json(config))
    ids = torch.arange(config.rows, dtype=torch.int32)
    save_file({**tensors, "token_ids": ids}, folder / "model.safetensors")
    return folder


def engines(target, head, kind):
    """The target and its head."""
    raw = {
        "target": {"model": str(target), "engine": kind, "dtype": "fp32"},
        "drafts": [{"name": "head", "engine": "head", "model": str(head), "dtype": "fp32"}],
        "limits": {"max_context_tokens": 64, "kv_cache_tokens": 256, "max_active_requests": 2},
    }
    config = parse_config(raw)
    service = Service(config, 1, lambda engine: target if engine.name == "target" else head)
    return make_engine(config.target, service), make_engine(config.drafts[0], service)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openvino", "torch"])
@pytest.mark.parametrize("family", ["qwen 3", "gemma 3", "qwen 3 moe"])
def test_a_head_proposes_for_a_target_of_another_family(family, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    folder = make_folder(family, tmp_path / "model")
    target, head = engines(folder, write_head(tmp_path / "head"), kind)
    sequence = Sequence(1, TOKENS, len(TOKENS), SamplingParams(), {"target": [0, 1, 2]})
    target.submit([Turn(sequence, len(TOKENS))])
    (completion,) = target.poll(0.0)
    assert completion.error is None
    assert completion.hidden_states.rows.shape[1:] == (len(TAPS), BASE["hidden_size"])
    sequence.tokens.extend(completion.tokens)
    head.absorb([(sequence, completion.hidden_states)])
    head.submit([Turn(sequence, len(sequence.tokens), run=3, nodes=4)])
    (proposed,) = head.poll(0.0)
    assert proposed.error is None
    assert len(proposed.proposal.tokens) == 4


@pytest.mark.medium
def test_a_head_that_reads_a_layer_too_many_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    folder = make_folder("qwen 3", tmp_path / "model")
    head = write_head(tmp_path / "head", layers=(1, 5))
    for kind in ("torch", "openvino"):
        with pytest.raises(CheckpointError, match="has 4 layers, and a draft reads layer 5"):
            engines(folder, head, kind)
