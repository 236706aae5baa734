"""Conversion of a published head to the one form of ``folder``, once, into the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.engines.checkpoint import load_embeddings
from backend.engines.eagle import folder as folders
from backend.engines.eagle.answering import Answer, answer
from backend.engines.eagle.dialects import PublishedHead, TargetShape, read_published
from backend.engines.eagle.place import is_converted, place_of
from backend.engines.eagle.probe import Score, choose
from backend.engines.models.configuration import read_decoder_config
from backend.settings import ConfigError
from backend.storage import cache
from backend.storage.manifest import check_vocabulary, vocabulary_sha256, weights_sha256
from backend.tokenizer import load_tokenizer

_WIDENING = {"bf16": 1, "fp32": 2}
"""Bytes in memory for a byte of the target's files, which are mostly in bf16."""

_GIB = 1 << 30


def bring_head(
    published: Path,
    target: Path,
    say: Callable[[str], None],
    *,
    dtype: str,
    device: str = "cpu",
    free_bytes: int,
) -> Path:
    """Return the converted folder of a published head for the target in a folder, which is made
    first unless the cache has it.

    The target answers a few prompts for that, in ``dtype`` on ``device``, which has
    ``free_bytes``; ``say`` is given what is done before it begins. Raises ConfigError for a head
    that is not served or does not fit the target, and where the target does not fit into memory;
    CheckpointError for a target that cannot be read.
    """
    place = place_of(published)
    if not is_converted(place, target):
        needed = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        needed *= _WIDENING[dtype]
        text = (
            f"converting {published}: its target answers a few prompts, to see what it reads. "
            f"That needs {needed / _GIB:.1f} GiB of memory, {free_bytes / _GIB:.1f} GiB are free"
        )
        if needed > free_bytes:
            raise ConfigError(text)
        say(text)
        provenance = {"folder": str(published), "target": str(target)}
        with cache.publish(place, provenance) as fresh:
            convert(published, target, fresh, lambda: answer(target, dtype, device))
    return place


def convert(
    published: Path,
    target: Path,
    out: Path,
    answers: Callable[[], Sequence[Answer]] | None = None,
) -> None:
    """Write the converted form of a published head for the target in a folder. Without ``answers``
    of the target, the head is taken by what its ``config.json`` says.
    """
    config: Any = read_decoder_config(target)
    check_vocabulary(target, published)
    tokens = load_tokenizer(target).vocab_size
    sizes = config.hidden_size, config.vocab_size, config.num_hidden_layers
    head = read_published(published, TargetShape(*sizes, tokens))
    embedding, rows = load_embeddings(target)
    head = _shared(head, embedding, rows)
    scores: list[Score] = []
    reading = head.shape
    if answers is not None:
        reading, scores = choose(head, embedding, rows, answers(), str(published))
    folders.save(
        out,
        reading,
        head.tensors,
        {
            "dialect": head.dialect,
            "probe": [_as_json(score) for score in scores],
            "target_sha256": weights_sha256(target),
            "vocabulary_sha256": vocabulary_sha256(target / "tokenizer.json"),
        },
    )


def _shared(head: PublishedHead, embedding: Tensor, rows: Tensor) -> PublishedHead:
    """Return a head without the matrices that are the target's own."""
    tensors = dict(head.tensors)
    own, head_rows = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    shares = own is not None and _is_same(own, embedding)
    shares_rows = head_rows is not None and _is_same(head_rows, rows[tensors["token_ids"]])
    if shares:
        del tensors["embed_tokens.weight"]
    if shares_rows:
        del tensors["lm_head.weight"]
    shape = replace(
        head.shape,
        own_embedding=head.shape.own_embedding and not shares,
        own_head=head.shape.own_head and not shares_rows,
    )
    return replace(head, shape=shape, tensors=tensors)


def _is_same(own: Tensor, targets: Tensor) -> bool:
    """Return whether a matrix is the target's as the head's file rounds it."""
    return own.shape == targets.shape and torch.equal(own, targets.to(own.dtype))


def _as_json(score: Score) -> dict[str, Any]:
    return {
        "first_token_share": round(score.first_token_share, 3),
        "layers": list(score.layers),
        "log_prob": round(score.log_prob, 3),
        "norm_before_residual": score.norm_before_residual,
    }
