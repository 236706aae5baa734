"""Weights of folders: nothing is left at random, and angles stay in fp32."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backend.engines.checkpoint import CheckpointError
from backend.engines.models.attention import ATTENTION
from backend.engines.models.loading import load_decoder
from tests.models.families import BASE, SERVED, make_folder, spread_weights

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

pytestmark = pytest.mark.medium


def changed(folder, change):
    """Rewrite a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.pop("model.layers.1.self_attn.q_proj.weight"),
            "tensor model.layers.1.self_attn.q_proj.weight is missing",
        ),
        (lambda t: t.update({"model.odd": torch.zeros(3)}), "model.odd is not one of the model's"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"tensor model.norm.weight must have shape \[64\]",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_left_over_is_refused(tmp_path, change, error):
    folder = changed(make_folder("mistral", tmp_path), change)
    with pytest.raises(CheckpointError, match=error):
        load_decoder(folder, "fp32")


def test_a_damaged_folder_and_a_wrong_dtype_are_refused(tmp_path):
    folder = make_folder("mistral", tmp_path)
    with pytest.raises(CheckpointError, match=r"dtype must be one of bf16, .* got 'int8'"):
        load_decoder(folder, "int8")
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_decoder(folder)


def test_angles_stay_in_fp32_in_every_dtype(tmp_path):
    folder = make_folder("gemma 3", tmp_path)
    for dtype, expected in (("bf16", torch.bfloat16), ("fp64", torch.float64)):
        lm = load_decoder(folder, dtype)
        assert {weight.dtype for weight in lm.parameters()} == {expected}
        angles = [buffer for name, buffer in lm.named_buffers() if "inv_freq" in name]
        assert angles
        assert {buffer.dtype for buffer in angles} == {torch.float32}
        assert lm.config._attn_implementation == ATTENTION


def wrapped(kind):
    """A random multimodal model, text part and all."""
    family = {"Gemma3": "gemma 3", "Gemma4": "gemma 4", "Mistral3": "ministral 3"}[kind]
    text = {**BASE, **SERVED[family][1], "pad_token_id": 0}
    vision = dict(VISION)
    if kind == "Gemma4":
        vision = {n: size for n, size in VISION.items() if n not in ("image_size", "patch_size")}
        vision |= {"num_key_value_heads": 2, "head_dim": 16}
    if kind == "Mistral3":
        text["model_type"] = "ministral3"
        vision |= {"model_type": "pixtral", "head_dim": 16}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    spread_weights(whole)
    return whole.eval()


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4", "Mistral3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_of_a_multimodal_folder_has_its_own_weights(tmp_path, kind, tied):
    whole = wrapped(kind)
    whole.save_pretrained(tmp_path)
    if not tied:  # a head of its own
        head = torch.randn(256, 64)
        whole.lm_head.weight = torch.nn.Parameter(head)
        changed(tmp_path, lambda t: t.update({"language_model.lm_head.weight": head}))
        raw = json.loads((tmp_path / "config.json").read_text())
        raw["tie_word_embeddings"] = raw["text_config"]["tie_word_embeddings"] = False
        (tmp_path / "config.json").write_text(json.dumps(raw))
    lm = load_decoder(tmp_path, "fp32")
    lm.set_attn_implementation("eager")
    ids = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        types = {"mm_token_type_ids": torch.zeros_like(ids)} if kind == "Gemma4" else {}
        wanted = whole(input_ids=ids, use_cache=False, **types).logits
        logits = lm(input_ids=ids, use_cache=False).logits
    assert float((logits - wanted).abs().max() / wanted.std()) < 1e-4
