"""Train an EAGLE-3 head and write it as SafeAILab does: a pickle of tensors and a flat
``config.json`` (``python -m engines_build.distill --form eagle``).

The head's forward is that of serving (``backend.engines.eagle.whole_text``); the target's states
are computed again for every text that is read, because a head reads them at every place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backend.engines.eagle.dialects import DEFAULT_THETA, default_layers
from backend.engines.eagle.folder import EagleShape
from backend.engines.eagle.whole_text import WholeText
from backend.engines.models.spec import PlainLlama
from engines_build.distill.generate import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS
from engines_build.distill.head import HeadSample, starts_of

_FIRST_SCALE = 0.3
"""Scale of the last norm at first, as of ``head.network``: the rows that it multiplies are frozen.
"""

_AT_TOP = ("fc", "norm")
"""Tensors that SafeAILab's files have outside of the layer."""


def eagle_shape(config: PlainLlama, taps: Sequence[int], rows: int) -> EagleShape:
    """Return the shape of a head for a target of this ``config``, which proposes ``rows`` tokens
    and reads the layers ``taps``; none: those of a folder that names none.
    """
    return EagleShape(
        vocab_size=config.vocab_size,
        draft_vocab_size=rows,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=tuple(taps) or default_layers(config.num_layers),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=DEFAULT_THETA,  # which the files cannot say
        own_head=False,
        trained_tokens=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS,
    )


class EagleNetwork(nn.Module):
    """The trained tensors of a head."""

    def __init__(
        self,
        shape: EagleShape,
        token_ids: Tensor,  # int64[rows]
    ) -> None:
        super().__init__()
        self.shape, self._token_ids = shape, token_ids
        self._weights = nn.ParameterDict()
        for name, size in shape.tensors().items():
            if name != "token_ids":
                self._weights[name.replace(".", "/")] = nn.Parameter(_first(name, size))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of ``backend.engines.eagle.folder``."""
        named = {name.replace("/", "."): tensor for name, tensor in self._weights.items()}
        return {**named, "token_ids": self._token_ids}


def _first(name: str, size: tuple[int, ...]) -> Tensor:
    if len(size) == 1:
        return torch.full(size, _FIRST_SCALE if name == "norm.weight" else 1.0)
    return torch.randn(size) / math.sqrt(size[1])


class EagleUnroller:
    """``Unrolls`` of an EAGLE-3 head; it proposes the shortlist's tokens alone."""

    def __init__(
        self,
        network: EagleNetwork,
        states: Callable[[Tensor], Tensor],
        embedding: Tensor,
        head: Tensor,
        shortlist: Tensor,
    ) -> None:
        """``states`` returns those of the target [n, num_layers, hidden] of tokens [n];
        ``embedding`` and ``head`` [vocab, hidden] are its own; ``shortlist`` int64[rows] the tokens
        that are proposed.
        """
        self.network, self.shortlist, self.vocab_size = network, shortlist, len(head)
        self._states, self._tables = states, (embedding, head)
        self._layers = torch.tensor(network.shape.layers) - 1
        self._every_token = torch.ones(len(head), dtype=torch.bool)

    def unroll(self, samples: Sequence[HeadSample], steps: int) -> Iterator[Any]:
        """Yield logits [rows, shortlist] by step (``Unrolls``)."""
        starts = starts_of(samples, self._every_token)
        head = WholeText(self.network.shape, self.network.tensors(), *self._tables)
        texts = [
            head.unroll(s.tokens.long(), self._states(s.tokens)[:, self._layers], steps)
            for s in samples
        ]
        alive = torch.arange(len(starts.answer))
        for step in range(steps):
            alive = alive[starts.remaining[alive] > step]
            if not len(alive):
                return
            rows = []
            for number, text in enumerate(texts):
                places = starts.first[alive][starts.answer[alive] == number] - 1
                if len(places):
                    rows.append(next(text)[places])
            yield torch.cat(rows), alive, starts


def export_eagle(network: EagleNetwork, rows: Tensor, out: Path, *, names_layers: bool) -> None:
    """Write a head's folder in SafeAILab's dialect, in fp16; ``rows`` [vocab, hidden] are the
    target's head. With ``names_layers``, ``config.json`` says which layers it reads.
    """
    out.mkdir(parents=True, exist_ok=True)
    shape, tensors = network.shape, network.tensors()
    ids = tensors.pop("token_ids")
    named = {
        name if name.split(".")[0] in _AT_TOP else f"midlayer.{name}": tensor.detach().half()
        for name, tensor in tensors.items()
    }
    named["lm_head.weight"] = rows[ids].half()
    named["d2t"] = ids - torch.arange(len(ids))
    named["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
    named["t2d"][ids] = True
    torch.save({name: tensor.clone() for name, tensor in named.items()}, out / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.trained_tokens,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": shape.vocab_size,
    }
    if names_layers:
        config["eagle_aux_hidden_state_layer_ids"] = list(shape.layers)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
