"""Greedy texts of decoder families by the OpenAI front end, against transformers' ``generate``:
``python -m bench.micro.families --out FILE``.

Each family is a tiny model with random weights and the tokenizer of the tiny target. A real
tritonserver serves it in fp32 with the draft ``suffix``; its texts are asked for at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend import PROJECT_ROOT
from backend.config import load_config
from backend.loopback import open_url
from bench import records
from engines_build.measure import measure
from engines_build.prepare import prepare
from tests.models.families import SERVED, config_of, spread_weights
from tests.server.harness import Service, free_ports

FAMILIES = (
    "llama 3",
    "ministral 3",
    "qwen 3",
    "qwen 3 moe",
    "gemma 3",
    "gemma 4",
    "phi 4",
    "smollm 3",
    "granite",
    "olmo 3",
    "glm 4",
    "gpt-oss",
)
ENGINES = ("openvino", "torch")
PROMPTS = (
    "Monday, Tuesday, Wednesday,",
    "Once upon a time there was a king and a queen",
    "def twice(x):\n    return 2 * x\n" * 8,
    "1, 2, 3, 4,",
    "The capital of France is",
)
TOKENS = 40
READY_LIMIT_S = 600
MEASURE_S = 0.5
TOKENIZER = PROJECT_ROOT / "engines_build" / "drafts" / "tiny-target"
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
}


def write_model(family: str, folder: Path) -> None:
    """Save a random model of a family with a tokenizer."""
    kind, settings = SERVED[family]
    sizes = {
        key: 4096 if key.startswith("vocab_size") else value for key, value in settings.items()
    }
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of(kind, {**sizes, **SIZES}))
    spread_weights(lm)
    lm.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


def own_texts(folder: Path) -> list[str]:
    """Return what transformers writes."""
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = lm.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        texts.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def served_texts(folder: Path, engine: str, place: Path) -> list[str]:
    """Return what a server of the folder writes."""
    settings = {
        "target": {"model": str(folder), "engine": engine, "dtype": "fp32"},
        "drafts": [{"name": "suffix", "engine": "suffix"}],
    }
    place.mkdir()
    (place / "serving.json").write_text(json.dumps(settings))
    prepare(load_config(place / "serving.json"), measure=partial(measure, budget_s=MEASURE_S))
    (port,) = free_ports(1)
    service: Any = Service(place / "log", place / "serving.json", OPENAI_PORT=str(port))
    try:
        service.wait_ready(limit_s=READY_LIMIT_S)
        service.wait_for_front_end()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda prompt: _ask(port, folder.name, prompt), PROMPTS))
    finally:
        service.stop()


def _ask(port: int, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with open_url(request, 120) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


def run(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Serve and compare what is asked for; the record is written after each server."""
    for family in args.families:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / family.replace(" ", "-")
            write_model(family, folder)
            expected = own_texts(folder)
            for engine in args.engines:
                texts = served_texts(folder, engine, Path(temporary) / engine)
                equal = sum(text == alone for text, alone in zip(texts, expected, strict=True))
                report["equal"][engine][family] = equal
                print(f"{family}, {engine}: {equal} of {len(PROMPTS)} texts equal", flush=True)
                records.write(args.out, report)


def main() -> None:
    """Serve, compare and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "transformers": transformers.__version__,
        "texts_of_each": len(PROMPTS),
        "tokens": TOKENS,
        "equal": {engine: {} for engine in args.engines},
    }
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SPINDLE_CACHE"] = cache
        run(args, report)


if __name__ == "__main__":
    main()
