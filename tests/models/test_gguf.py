"""GGUF files of other families become the folders that they were made from."""

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from backend.engines.models.loading import load_decoder
from backend.engines.openvino.formats import misfit_of_four_bits
from backend.engines.openvino.four_bits import take_four_bits
from backend.engines.weights import read_stored
from backend.storage.manifest import read_model_config
from engines_build.convert import ConvertError, convert
from tests.models.families import SERVED, config_of, spread_weights
from tests.unit.test_convert import convert_alphabet, permute

pytestmark = [pytest.mark.medium, pytest.mark.filterwarnings("ignore")]

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
ARCHITECTURES["qwen3"] = gguf.MODEL_ARCH.QWEN3
FAMILIES = {"llama": "mistral", "qwen2": "qwen 2", "qwen3": "qwen 3"}


def write(path, name, kind=gguf.GGMLQuantizationType.Q8_0):
    """A random model of a family, and its file of this kind; its weights are those of the file."""
    usual = SERVED[FAMILIES[name]][1]
    config = config_of(name, {**usual, "vocab_size": 258, "intermediate_size": 96})
    lm = AutoModelForCausalLM.from_config(config).eval()
    spread_weights(lm)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if usual.get("head_dim"):
        writer.add_key_length(usual["head_dim"])
        writer.add_value_length(usual["head_dim"])
    config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    writer.add_rope_freq_base(20000.0)
    config.rms_norm_eps = 1e-4
    writer.add_layer_norm_rms_eps(1e-4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<|end|>", *sorted(convert_alphabet()), "ĠĠ"])
    writer.add_token_types([3] + [1] * 257)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, tensor in lm.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        place, _, end = key.rpartition(".")
        count = heads.get(place.rpartition(".")[2]) if name == "llama" else None
        if tensor.dim() > 1:
            digits = gguf.quantize(tensor.numpy(), kind)
            tensor.copy_(torch.from_numpy(gguf.dequantize(digits, kind)))
            rows = permute(tensor.numpy(), count) if count else tensor.numpy()
            digits = gguf.quantize(rows, kind)
            writer.add_tensor(f"{names.get_name(place)}.{end}", digits, raw_dtype=kind)
        else:
            writer.add_tensor(f"{names.get_name(place)}.{end}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return lm


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_another_family_is_the_model_it_was_made_from(name, tmp_path):
    lm = write(tmp_path / "m.gguf", name)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    found = load_decoder(tmp_path / "out", "bf16").state_dict()
    for key, tensor in found.items():
        assert torch.equal(tensor, lm.state_dict()[key].bfloat16()), key
    ours, theirs = AutoConfig.from_pretrained(tmp_path / "out"), lm.config
    for key in ("rms_norm_eps", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, key, 0) == pytest.approx(getattr(theirs, key, 0)), key
    assert ours.rope_parameters == theirs.rope_parameters
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("x  42")["input_ids"]) == "x  42"
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path):
    write(tmp_path / "m.gguf", "qwen3")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight"))
    with pytest.raises(ConvertError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight is miss"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_q4_0_keeps_its_integers(name, tmp_path):
    lm = write(tmp_path / "m.gguf", name, gguf.GGMLQuantizationType.Q4_0)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    stored = read_stored(tmp_path / "out")
    config = read_model_config(tmp_path / "out")
    assert not misfit_of_four_bits(config)
    taken, reasons = take_four_bits(stored, config["quantization_config"])
    assert not reasons
    assert len(taken) == 7 * len(lm.model.layers)
    for key, matrix in taken.items():
        assert matrix.zero is None
        assert torch.equal(matrix.widen(), lm.state_dict()[key]), key
    assert "model.embed_tokens.weight" in stored
