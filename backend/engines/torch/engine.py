"""The readable reference on any device: a Llama forward on torch, or transformers' modules."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from backend.engines.checkpoint import LlamaConfig, Weights, load
from backend.engines.stepping.engine import StepEngine, step_limits
from backend.engines.torch.llama import Llama
from backend.kinds import misfit_of_llama
from backend.storage.manifest import read_model_config

logger = logging.getLogger(__name__)


class TorchEngine(StepEngine):
    """A step engine on torch, for targets and drafts, on CPUs and CUDA alike."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        dtype: str = "bf16",
        device: str = "cpu",
        threads: int | None = None,
        **sizes: int | Seq[int],
    ) -> None:
        """Load a Hugging Face folder. ``threads`` sets torch's threads, for the whole process;
        ``sizes`` are those of ``from_weights``.

        Raises CheckpointError for a folder that cannot be served.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        if misfit_of_llama(read_model_config(folder)):
            self._set_up_decoder(name, folder, dtype, device, **sizes)  # type: ignore[arg-type]
        else:
            self._set_up(name, *load(folder, dtype, device), **sizes)  # type: ignore[arg-type]

    @classmethod
    def from_weights(
        cls, name: str, config: LlamaConfig, weights: Weights, **sizes: int | Seq[int]
    ) -> TorchEngine:
        """Build an engine of weights that are in memory (``config.shapes()`` names them), in their
        dtype and on their device.

        ``sizes``: ``kv_blocks``, ``max_context_tokens``, ``max_draft_tokens`` (8) and ``taps``, the
        layers whose output drafts read (none).
        """
        engine = cls.__new__(cls)
        engine._set_up(name, config, dict(weights), **sizes)  # type: ignore[arg-type]
        return engine

    def _set_up(
        self,
        name: str,
        config: LlamaConfig,
        weights: Weights,
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
        taps: Seq[int] = (),
    ) -> None:
        limits = step_limits(config.vocab_size, kv_blocks, max_context_tokens, max_draft_tokens)
        with torch.inference_mode():
            model = Llama(
                config,
                weights,
                kv_blocks=kv_blocks,
                max_positions=max_context_tokens + max_draft_tokens,
                taps=taps,
            )
        super().__init__(name, model, limits)

    def _set_up_decoder(
        self,
        name: str,
        folder: Path,
        dtype: str,
        device: str,
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
        taps: Seq[int] = (),
    ) -> None:
        from backend.engines.models.comparison import compare  # transformers takes seconds
        from backend.engines.models.loading import load_decoder
        from backend.engines.models.probe import check_taps, probe
        from backend.engines.torch.decoder import Decoder

        spec = probe(folder)
        check_taps(folder, spec, taps)
        lm = load_decoder(folder, dtype, device)
        model = Decoder(lm, spec.layers, kv_blocks=kv_blocks, taps=taps)
        difference = compare(lm, model.forward, f"{name}: {folder}")
        text = "%s: a %s of transformers, %.1g standard deviations from its own forward"
        logger.info(text, name, spec.architecture, difference)
        limits = step_limits(spec.vocab_size, kv_blocks, max_context_tokens, max_draft_tokens)
        super().__init__(name, model, limits)
