"""Layers' requirements, and what is refused by ``config.json`` alone."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.attention import AttentionError, AttentionSpec, spec_of
from backend.engines.models.probe import probe
from tests.models.families import REFUSED, SERVED, config_of

pytestmark = pytest.mark.medium


def folder_of(tmp_path, kind, settings, **changes):
    """A folder with a config.json alone."""
    config = config_of(kind, settings)
    raw = config.to_dict()
    built = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    raw |= {"architectures": [built.__name__ if built else "none"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def test_layers_ask_for_windows_caps_scales_and_head_sizes_of_their_own(tmp_path):
    spec = probe(folder_of(tmp_path, *SERVED["gemma 2"]))
    assert spec.architecture == "Gemma2ForCausalLM"
    assert spec.layers == tuple(
        AttentionSpec(n, 4, 2, 16, 16, 0.25, window=0 if n % 2 else 16, softcap=5.0)
        for n in range(4)
    )
    assert (spec.vocab_size, spec.hidden_size, spec.max_context_tokens) == (256, 64, 512)
    assert (spec.ties_embeddings, spec.looked_up, spec.kv_width) == (True, 256 * 64, 256)
    spec = probe(folder_of(tmp_path, *SERVED["gemma 4"]))
    assert [layer.key_dim for layer in spec.layers] == [16, 32, 16, 32]
    assert spec.looked_up == 256 * 64 + 256 * 8 * 4  # of each layer a table
    spec = probe(folder_of(tmp_path, *SERVED["gpt-oss"]))
    assert [(layer.sinks, layer.window) for layer in spec.layers] == [(True, 16), (True, 0)] * 2
    assert not spec.ties_embeddings
    assert spec.looked_up == 256 * 64
    assert spec.experts == 4 * 4 * (64 * 2 * 96 + 96 * 64)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_wrong_is_refused_with_the_reason(tmp_path, family):
    model_type, settings, reason = REFUSED[family]
    with pytest.raises(CheckpointError, match=reason):
        probe(folder_of(tmp_path, model_type, settings))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            r"its code is in the folder \(trust_remote_code\)",
        ),
        ({"model_type": "of_tomorrow"}, r"has no such model \(model_type 'of_tomorrow'\)"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised: hqq is not one of fp8"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "would be a LlamaForCausalLM"),
        ({"num_attention_heads": "x"}, "cannot be served"),
        ({"draft_vocab_size": 64}, "a part of the vocabulary"),
    ],
)
def test_a_folder_that_would_be_wrong_is_refused_with_the_reason(tmp_path, changes, reason):
    folder = folder_of(tmp_path, *SERVED["llama 3"], **changes)
    with pytest.raises(CheckpointError, match=reason):
        probe(folder)


def test_an_untested_multimodal_folder_is_refused(tmp_path):
    text = config_of(*SERVED["llama 3"]).to_dict()
    raw = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": text}))
    with pytest.raises(CheckpointError, match="multimodal folders of Gemma3ForCond"):
        probe(tmp_path)


def test_a_window_that_is_not_passed_on_is_refused(tmp_path, monkeypatch):
    from transformers.models.mistral import modeling_mistral

    real = modeling_mistral.MistralAttention.__init__

    def forgetful(self, config, layer_idx):
        real(self, config, layer_idx)
        self.config = config.__class__(**config.to_dict() | {"sliding_window": None})
        self.config._attn_implementation = config._attn_implementation

    folder = folder_of(tmp_path, *SERVED["mistral, windows"])
    assert {layer.window for layer in probe(folder).layers} == {16}
    monkeypatch.setattr(modeling_mistral.MistralAttention, "__init__", forgetful)
    with pytest.raises(CheckpointError, match="sliding_window 16 is not passed on"):
        probe(folder)


class Layer(nn.Module):
    layer_idx = 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "layer 3 asks attention for position_bias"),
        ({"is_causal": False}, "layer 3 attends to later tokens"),
    ],
)
def test_what_no_engine_knows_is_refused(options, reason):
    states = torch.zeros(1, 2, 5, 8)
    with pytest.raises(AttentionError, match=reason):
        spec_of(Layer(), states, states, states, None, options)
    known = {"dropout": 0.0, "position_bias": None, "sliding_window": 4}
    assert spec_of(Layer(), states, states, states, None, known).window == 4
