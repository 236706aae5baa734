"""Conversion of a published head to the one form of ``folder``, once, into the cache.

It measures which of the target's layers a head reads, and which state its residual is: under one
key, folders count layers by two conventions, and some say nothing. A head that reads the wrong
layers proposes wrong tokens without any error, so each reading is scored on answers of the
target's own.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.checked_settings import ConfigError
from backend.engines.eagle import folder as folders
from backend.engines.eagle.dialects import (
    PublishedHead,
    TargetShape,
    default_layers,
    read_published,
)
from backend.engines.eagle.folder import EagleShape, is_converted, place_of
from backend.engines.eagle.whole_text import Answer, WholeText, answer
from backend.engines.models.configuration import read_decoder_config
from backend.engines.weights import load_embeddings
from backend.storage import cache
from backend.storage.manifest import check_vocabulary, vocabulary_sha256, weights_sha256
from backend.tokenizer import load_tokenizer

_WIDENING = {"bf16": 1, "fp32": 2}
"""Bytes in memory for a byte of the target's files, which are mostly in bf16."""

_GIB = 1 << 30
logger = logging.getLogger(__name__)
LEAST_SHARE = 0.2
"""First tokens that a head must get right in its best reading. Another target's gets fewer."""
_CLEAR = 3.0
"""Standard errors by which another reading than the stated one must be likelier."""


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
            f"converting {published}: its target answers a few prompts to show which layers it "
            f"reads. That needs {needed / _GIB:.1f} GiB of memory, {free_bytes / _GIB:.1f} GiB are "
            "free"
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
    head = _leave_shared_out(head, embedding, rows)
    scores: list[ReadingScore] = []
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


def _leave_shared_out(head: PublishedHead, embedding: Tensor, rows: Tensor) -> PublishedHead:
    """Return a head without the matrices that are the target's own: ``embedding`` and ``rows``
    [vocab, hidden].
    """
    tensors = dict(head.tensors)
    embed_rows, head_rows = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    shares = embed_rows is not None and _is_same(embed_rows, embedding)
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


def _is_same(tensor: Tensor, targets: Tensor) -> bool:
    """Return whether a matrix [rows, hidden] is the target's as the head's file rounds it."""
    return tensor.shape == targets.shape and torch.equal(tensor, targets.to(tensor.dtype))


def _as_json(score: ReadingScore) -> dict[str, Any]:
    return {
        "first_token_share": round(score.first_token_share, 3),
        "layers": list(score.layers),
        "log_prob": round(score.log_prob, 3),
        "norm_before_residual": score.norm_before_residual,
    }


@dataclass(frozen=True, slots=True)
class ReadingScore:
    """How well a reading fits the target."""

    layers: tuple[int, ...]
    norm_before_residual: bool
    first_token_share: float
    """The share of the answers' places where the head's likeliest token is the target's."""
    log_probs: Tensor
    """[places], of the target's tokens that the head can propose."""

    @property
    def log_prob(self) -> float:
        """The mean of them, in nats."""
        return float(self.log_probs.mean()) if len(self.log_probs) else -math.inf

    def __str__(self) -> str:
        residual = ", normed residual" if self.norm_before_residual else ""
        figures = f"first tokens {self.first_token_share:.2f}, {self.log_prob:.2f} nats"
        return f"layers {list(self.layers)}{residual}: {figures}"


def readings(shape: EagleShape, num_layers: int) -> Iterator[EagleShape]:
    """Yield a shape as it is stated, then with the layers of the other conventions, each with both
    residuals.
    """
    stated = shape.layers
    sets = [stated, *(tuple(layer + by for layer in stated) for by in (1, -1))]
    if len(stated) == len(default_layers(num_layers)):
        sets.append(default_layers(num_layers))
    layer_sets = [one for one in dict.fromkeys(sets) if min(one) >= 1 and max(one) <= num_layers]
    flags = (shape.norm_before_residual, not shape.norm_before_residual)
    for layers, residual in itertools.product(layer_sets, flags):
        yield replace(shape, layers=layers, norm_before_residual=residual)


def score(head: WholeText, answers: Sequence[Answer]) -> ReadingScore:
    """Return how well a head's first proposals fit the target's answers."""
    layers = torch.tensor(head.shape.layers) - 1
    hits, places, log_probs = 0, 0, []
    for one in answers:
        with torch.inference_mode():
            logits = next(head.unroll(one.tokens, one.states[:, layers], 1))
        first = max(0, one.prompt_tokens - 2)  # row r proposes token r + 2
        logits, wanted = logits[first:-1].log_softmax(-1), one.tokens[first + 2 :]
        is_wanted = head.token_ids == wanted[:, None]
        hits += int(is_wanted.gather(1, logits.argmax(-1)[:, None]).sum())
        places += len(wanted)
        log_probs.append(logits[is_wanted])
    shape = head.shape
    share = hits / max(1, places)
    return ReadingScore(shape.layers, shape.norm_before_residual, share, torch.cat(log_probs))


def choose(
    head: PublishedHead,
    embedding: Tensor,
    rows: Tensor,
    answers: Sequence[Answer],
    name: str,
) -> tuple[EagleShape, list[ReadingScore]]:
    """Return the shape by the reading that fits, and every reading's score, the stated one's first.
    ``embedding`` and ``rows`` [vocab, hidden] are the target's.

    The stated reading stays unless another is clearly likelier, which is a warning. Raises
    ConfigError beginning with the ``name`` where no reading fits.
    """
    num_layers = answers[0].states.shape[1]
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in head.tensors.items()}
    embedding, rows = embedding.float(), rows.float()
    shapes = list(readings(head.shape, num_layers))
    scores = [score(WholeText(one, tensors, embedding, rows), answers) for one in shapes]
    for one in scores:
        logger.info("%s: %s", name, one)
    better = [at for at in range(len(scores)) if _is_better(scores[0], scores[at])]
    best = max(better, key=lambda at: scores[at].log_prob, default=0)
    if scores[best].first_token_share < LEAST_SHARE:
        raise ConfigError(
            f"{name} does not fit its target: at best {scores[best].first_token_share:.2f} of its "
            f"first tokens are right ({scores[best]}), and at least {LEAST_SHARE:g} are expected. "
            "It was trained for another target, or for another chat template"
        )
    if _contradicts(head, scores[best]):
        logger.warning(
            "%s is served with %s, which fits its target; by its config.json it would be %s",
            *(name, scores[best], scores[0]),
        )
    return shapes[best], scores


def _is_better(stated: ReadingScore, other: ReadingScore) -> bool:
    """Return whether a reading is likelier by more than chance at the same places, and has not
    fewer first tokens right.
    """
    if other.first_token_share < stated.first_token_share:
        return False
    difference = other.log_probs - stated.log_probs
    if len(difference) < 2:
        return False
    error = float(difference.std()) / math.sqrt(len(difference))
    return float(difference.mean()) > _CLEAR * error


def _contradicts(head: PublishedHead, score: ReadingScore) -> bool:
    """Return whether a reading differs from something that the folder states."""
    shape = head.shape
    return (head.states_layers and score.layers != shape.layers) or (
        head.states_residual and score.norm_before_residual != shape.norm_before_residual
    )
