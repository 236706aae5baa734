"""The inputs that a machine without the corpora needs to make a head: prompts, prompts held out,
and the hashes of the runs of words that judge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from backend.engines.models.llama import read_llama
from backend.storage.manifest import weights_sha256
from backend.tokenizer import load_tokenizer
from engines_build.distill import answer_files
from engines_build.distill.corpora import WORKLOADS, Corpus
from engines_build.distill.data import judged_by
from engines_build.distill.generate import encode
from engines_build.distill.on_gpu.batch_model import EncodedPrompt

_MESSAGE = "<<message>>"
_WORKLOADS = list(WORKLOADS)


Text = tuple[str, list[int], int, bool]
"""A workload, tokens of a prompt and an answer, how many the prompt has, and if it is sampled."""


class PlainTokenizer:
    """A target's tokenizer without transformers, as far as ``encode`` needs it. ``around`` is the
    chat template before and after a message, if there is one.
    """

    def __init__(self, target: Path, around: Sequence[str] | None) -> None:
        self.plain = Tokenizer.from_file(str(target / "tokenizer.json"))
        self.chat_template = around

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of a text."""
        return {"input_ids": self.plain.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return str(self.plain.decode(tokens, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        """Return the text that asks for the answer to the one message."""
        before, after = self.chat_template or ("", "")
        return f"{before}{messages[0]['content']}{after}"


def write_prompts(args: argparse.Namespace) -> None:
    """Write the folder ``--out``. Raises ValueError for sources that are not there."""
    from transformers import AutoTokenizer  # not where a head is trained

    args.held_out, corpus = (
        Corpus(args.sources, args.corpora, held_out, args.seed) for held_out in (True, False)
    )
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=False)
    kinds = args.held_out.workloads
    for name, prompts in (
        ("held_out", (args.held_out.prompt(n, kinds[n % len(kinds)]) for n in range(args.judging))),
        ("prompts", (corpus.prompt(n) for n in range(args.prompts))),
    ):
        requests = [EncodedPrompt(prompt.workload, encode(tokenizer, prompt)) for prompt in prompts]
        texts = [(one.workload, one.tokens, len(one.tokens), False) for one in requests]
        write_texts(args.out / f"{name}.npz", texts, 0, weights_sha256(args.target))
        print(f"prompts: {len(requests)} in {args.out / name}.npz", flush=True)
    runs = sorted(frozenset().union(*judged_by(args).values()))
    np.save(args.out / "judged.npy", np.array(runs, np.uint64))
    about = {
        "seed": args.seed,
        "ends": sorted(load_tokenizer(args.target).end_ids),
        "around": _around(tokenizer),
        "target": asdict(read_llama(args.target)),
    }
    (args.out / "about.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _around(tokenizer: Any) -> list[str] | None:
    """Return what the chat template has before and after a message."""
    if tokenizer.chat_template is None:
        return None
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MESSAGE}], tokenize=False, add_generation_prompt=True
    )
    return list(text.split(_MESSAGE, 1))


def read_about(folder: Path) -> dict[str, Any]:
    """Return the other notes of ``write_prompts``: ``seed``, ``ends`` (the tokens that end a text),
    ``around`` (``PlainTokenizer``) and ``target`` (``PlainLlama``), which a machine without
    transformers cannot read.
    """
    return dict(json.loads((folder / "about.json").read_text("utf-8")))


def write_texts(path: Path, texts: Sequence[Text], next_prompt: int, target_sha256: str) -> None:
    """Write texts as ``--answers-file`` reads them."""
    workloads, tokens, prompts, sampled = zip(*texts, strict=True) if texts else ((),) * 4
    columns = {
        "tokens": list(chain(*tokens)),
        "lengths": [len(text) for text in tokens],
        "prompt_lengths": prompts,
        "workloads": [_WORKLOADS.index(workload) for workload in workloads],
        "sampled": sampled,
    }
    answer_files.write(path, columns, next_prompt, target_sha256)


def read_texts(path: Path, target_sha256: str, flag: str) -> tuple[int, list[Text]]:
    """Return the number of the next prompt and the texts of a file. Raises ValueError, naming the
    flag and the file, for those of another target and for what is no such file.
    """
    next_prompt, texts = answer_files.read(path, target_sha256, flag)
    return next_prompt, [(_WORKLOADS[c], a, b, d > 0) for a, b, c, d in texts]


def read_prompts(path: Path, target_sha256: str) -> list[EncodedPrompt]:
    """Return the prompts of a file, as ``read_texts`` does."""
    return [
        EncodedPrompt(text[0], text[1]) for text in read_texts(path, target_sha256, "--prompts")[1]
    ]
