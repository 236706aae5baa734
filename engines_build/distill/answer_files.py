"""A target's answers kept as token ids alone: a file small enough for a repository.

300,000 answered tokens take 0.4 MB so, and 1.5 GB with the distributions and states that training
needs. Those are computed again, one pass an answer with its prompt. That gives the same training
data, not a sooner one: SmolLM2-135M on AVX2 reads 145 answered tokens a second and generates 172.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors.torch import load_file

from engines_build.distill.generate import SEQUENCES_PER_SHARD, Shards, Teacher, answered

_COLUMNS = {
    "lengths": "<u2",
    "prompt_lengths": "<u2",
    "workloads": "u1",
    "sampled": "?",
}


def keep(shards: Shards, target_sha256: str, path: Path) -> None:
    """Write the answers of a work folder to a file. Raises ValueError where there are none."""
    stored = [load_file(shard) for shard in shards.paths()]
    if not stored:
        raise ValueError(f"--keep-answers: no answers in {shards.folder}")
    names = ("tokens", *_COLUMNS)
    columns = {name: torch.cat([shard[name] for shard in stored]).numpy() for name in names}
    write(path, columns, shards.next_prompt, target_sha256)


def write(path: Path, columns: dict[str, Any], next_prompt: int, target_sha256: str) -> None:
    """Write texts to a file: all their ``tokens``, and of each text how many it has
    (``lengths``), how many the prompt has (``prompt_lengths``), the workload's number
    (``workloads``) and whether it is ``sampled``.
    """
    tokens = np.asarray(columns["tokens"])
    columns = {name: np.asarray(columns[name]).astype(kind) for name, kind in _COLUMNS.items()}
    columns["tokens"] = tokens.astype("<u2" if tokens.max(initial=0) < 1 << 16 else "<u4")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            next_prompt=np.array(next_prompt),
            target_sha256=np.array(target_sha256),
            **columns,
        )


def read_again(paths: Sequence[Path], target_sha256: str, teacher: Teacher, shards: Shards) -> None:
    """Fill an empty work folder with the answers of files, their distributions and states computed
    by the teacher. Stopped and started again, it goes on after the last shard.

    Raises ValueError, naming the file, for answers of another target and for what is no such file.
    """
    files = [read(path, target_sha256) for path in paths]
    answers = [answer for _, theirs in files for answer in theirs]
    done = len(shards.paths()) * SEQUENCES_PER_SHARD
    for first in range(done, len(answers), SEQUENCES_PER_SHARD):
        shards.next_prompt = files[-1][0]
        block = answers[first : first + SEQUENCES_PER_SHARD]
        shards.write([answered(teacher, *answer) for answer in block])
        print(f"answers: {shards.generated} tokens read again", flush=True)


def read(
    path: Path, target_sha256: str, flag: str = "--answers-file"
) -> tuple[int, list[tuple[list[int], int, int, float]]]:
    """Return the number of the next prompt, and of each answer its tokens with the prompt's, how
    many the prompt has, workload and temperature (infinite where sampled: how warm is not kept).
    Raises ValueError, naming the flag and the file, for what ``read_again`` refuses.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        whose, next_prompt = str(columns["target_sha256"]), int(columns["next_prompt"])
        ends = np.cumsum(columns["lengths"].astype(np.int64))
        answers = [
            (tokens.tolist(), int(prompt), int(workload), math.inf if sampled else 0.0)
            for tokens, prompt, workload, sampled in zip(
                np.split(columns["tokens"].astype(np.int64), ends[:-1]),
                columns["prompt_lengths"],
                columns["workloads"],
                columns["sampled"],
                strict=True,
            )
        ]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ValueError(f"{flag}: {path} cannot be read: {error}") from None
    if whose != target_sha256:
        raise ValueError(f"{flag}: {path} holds the answers of another target")
    return next_prompt, answers
