"""A family that is converted, from its folder to texts over the wire: those of transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend import PROJECT_ROOT
from tests.models.families import SERVED, config_of, spread_weights

TOKENIZER = PROJECT_ROOT / "engines_build" / "drafts" / "tiny-target"
PROMPTS = [
    "Monday, Tuesday, Wednesday,",
    "Once upon a time there was a king and a queen",
    "def twice(x):\n    return 2 * x\n" * 8,
]
TOKENS = 40

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 with a tokenizer of texts."""
    folder = tmp_path_factory.mktemp("converted") / "tiny-qwen3"
    kind, usual = SERVED["qwen 3"]
    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256}
    untied = {"tie_word_embeddings": False, "max_position_embeddings": 2048}
    model = AutoModelForCausalLM.from_config(config_of(kind, usual | sizes | untied))
    spread_weights(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def test_greedy_texts_are_those_of_generate_and_the_graph_is_made_once(
    folder, start_service, tmp_path
):
    settings = {
        "target": {"model": str(folder), "dtype": "fp32"},
        "drafts": [{"name": "suffix", "engine": "suffix"}],
    }
    (tmp_path / "serving.json").write_text(json.dumps(settings))
    cache = {"SPINDLE_CACHE": str(tmp_path / "cache")}
    service = start_service(tmp_path / "serving.json", **cache).wait_ready(limit_s=300)
    assert "converting" in service.log.read_text()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = lm.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        text = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        assert len({*whole[0, ids.shape[1] :].tolist()}) > TOKENS // 4  # no loop of few tokens
        options = {"temperature": 0, "end_id": -1, "exclude_input_in_output": True}
        status, reply = service.generate(prompt, TOKENS, **options)
        assert (status, reply["text_output"]) == (200, text)
    service.process.terminate()
    service.process.wait(60)
    again = start_service(tmp_path / "serving.json", **cache).wait_ready(limit_s=120)
    assert "converting" not in again.log.read_text()
