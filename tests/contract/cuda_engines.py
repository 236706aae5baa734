"""The CUDA engine, on a CPU in fp64, in the place of torch's, under the same scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as TransformersConfig
from transformers import LlamaForCausalLM

from backend.engines.checkpoint import LlamaConfig, Weights
from backend.engines.cuda.engine import CudaEngine
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.cuda.stream import Stream
from backend.engines.models.attention import ATTENTION
from backend.engines.port import Engine
from backend.engines.torch.engine import TorchEngine
from tests.contract.checks import fresh
from tests.contract.scenarios import Scenario, plain_text


def llama(config: LlamaConfig, weights: Weights) -> LlamaForCausalLM:
    """Return transformers' model of these weights, in their dtype."""
    shape: Any = TransformersConfig(  # type: ignore[call-arg] # of the base class
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_theta": config.rope_theta, **config.rope},
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tied,
        attn_implementation=ATTENTION,
    )
    dtype = weights["model.norm.weight"].dtype
    lm: Any = LlamaForCausalLM(shape)
    lm = lm.to(dtype).eval()
    lm.load_state_dict(weights)
    return lm


@contextmanager
def on_cuda_engine(
    *scenarios: Scenario, padded: bool = False, lookahead: bool = False
) -> Iterator[None]:
    """Make every engine of weights a CUDA engine; what is compared with has been made on
    torch before. ``padded`` runs passes at the sizes of graphs;
    with ``lookahead`` the target decides on its device.
    """
    for scenario in scenarios:
        for ask in scenario.asks:
            plain_text(ask)
    fresh()

    def made(name: str, config: LlamaConfig, weights: Weights, **sizes: Any) -> Engine:
        sizes.pop("attention", None)
        with torch.inference_mode(False):
            lm = llama(config, weights)
        looks_ahead = lookahead and name == "target"
        kind = partial(LookaheadEngine, sequences=6) if looks_ahead else CudaEngine
        engine = kind(name, lm, vocab_size=config.vocab_size, **sizes)
        engine._model.graphs.captures = padded
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "capture", lambda _, run: run)
        patch.setattr(TorchEngine, "from_weights", made)
        yield
