"""The tiny family: a byte-level tokenizer, a small target trained from scratch, and its drafts; for
tests and for benchmarks on a CPU.

The target learns from the documents of ``engines_build.distill.corpora``, from questions in SQL
with their answers, and from the answers of a larger model, where a folder of such shards is at hand
(``--dialogues``, the ``train`` folder of another distillation).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from engines_build.distill.corpora import Corpus, sql_example
from engines_build.distill.train import Sample, Shape, hidden_states

VOCABULARY = 4096
PIECE_TOKENS = 256
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QUESTIONS_PER_SCHEMA = 60
_DIALOGUE_COPIES = 2
_SYSTEM = re.compile(r"<\|im_start\|>system\n.*?<\|im_end\|>\n", re.S)


@dataclass(frozen=True, slots=True)
class Member:
    """A draft of the family: a small model of a shape (``shortlist``: the whole vocabulary), or,
    without one, a head.
    """

    name: str
    shape: Shape | None = None


TARGET_NAME = "tiny-target"
DRAFTS = (Member("tiny-head"), Member("tiny-0.9m", Shape(128, 2, 32, VOCABULARY)))


def family_texts(corpus: Corpus, dialogues: list[str]) -> list[str]:
    """Return what the target is trained on, in a seeded order: documents, SQL questions with
    answers, ``dialogues``.
    """
    rng = random.Random(f"family/{corpus.seed}")
    texts = [
        d.text
        for d in corpus.documents(
            "postgresql", "sqlite", "python", "stdlib", "wordnet", "chatterbot"
        )
    ]
    for schema in corpus.documents("sql"):
        for _ in range(_QUESTIONS_PER_SCHEMA):
            question, answer = sql_example(schema, rng)
            prompt = f"{schema.text}\n\n{question}"
            texts.append(
                f"{prompt}\n{answer}"
                if rng.random() < 0.35
                else f"{as_message(prompt)}{answer}{STOP}"
            )
    texts += dialogues * _DIALOGUE_COPIES
    rng.shuffle(texts)
    return texts


def as_message(text: str) -> str:
    """Return what stands before the answer to one message, by ``CHAT_TEMPLATE``."""
    return f"{START}user\n{text}{STOP}\n{START}assistant\n"


def dialogues_of(samples: list[Sample], tokenizer: Any) -> list[str]:
    """Return prompts with the answers of a larger model, as text, without its system message."""
    texts = (tokenizer.decode(s.tokens.tolist(), skip_special_tokens=False) for s in samples)
    return [_SYSTEM.sub("", text).removesuffix(END) for text in texts]


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Write a byte-level BPE tokenizer of ``VOCABULARY`` tokens with the special ones of
    ``CHAT_TEMPLATE``.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START, STOP],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    settings |= {"bos_token": START, "eos_token": STOP, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1) + "\n", encoding="utf-8"
    )
    ends = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(
        json.dumps(ends, indent=1) + "\n", encoding="utf-8"
    )


def pieces(texts: list[str], tokenizer: Any) -> Iterator[Sample]:
    """Yield the texts, end to end, as samples of ``PIECE_TOKENS`` whose law is the next token
    itself.
    """
    kept: list[int] = []
    for text in texts:
        kept += [*tokenizer(text)["input_ids"], 0]
        while len(kept) >= PIECE_TOKENS:
            piece = torch.tensor(kept[:PIECE_TOKENS], dtype=torch.int32)
            del kept[:PIECE_TOKENS]
            yield Sample(
                piece,
                1,
                "text",
                piece[1:, None],
                torch.zeros(PIECE_TOKENS - 1, 1, dtype=torch.half),
            )


def untrained(shape: Shape) -> LlamaForCausalLM:
    """Make a Llama with random weights and a tied head."""
    heads = shape.hidden // shape.head_dim
    config = LlamaConfig(
        vocab_size=shape.shortlist,
        hidden_size=shape.hidden,
        intermediate_size=round(2.7 * shape.hidden / 32) * 32,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).float()


@torch.no_grad()
def held_out_losses(
    model: LlamaForCausalLM, corpus: Corpus, tokenizer: Any, device: str, tokens: int = 20_000
) -> dict[str, float]:
    """Return the mean loss (nats a token) on the held-out documents of each source, on about
    ``tokens`` of each.
    """
    losses = {}
    for source in corpus.sources:
        texts = [d.text for d in corpus.documents(source)]
        samples = [
            s
            for s, _ in zip(
                pieces(texts, tokenizer), range(max(tokens // PIECE_TOKENS, 1)), strict=False
            )
        ]
        values = [_loss(model, samples[i : i + 8], device) for i in range(0, len(samples), 8)]
        if values:
            losses[source] = float(torch.cat(values).mean())
    return losses


def _loss(model: LlamaForCausalLM, samples: list[Sample], device: str) -> Tensor:
    logits = model.lm_head(hidden_states(model, samples, device)[:, :-1].float())
    following = torch.stack([s.tokens[1:] for s in samples]).long().to(device)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), following.flatten(), reduction="none"
    ).cpu()
