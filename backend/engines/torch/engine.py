"""The readable reference on any device: transformers' modules, pass by pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from pathlib import Path

from torch import nn

from backend.engines.models.comparison import BLOCKS, compare
from backend.engines.models.loading import load_decoder
from backend.engines.models.probe import check_taps
from backend.engines.models.reading import read_spec
from backend.engines.models.spec import AttentionSpec
from backend.engines.stepping.engine import StepEngine, step_limits
from backend.engines.torch.decoder import Decoder

logger = logging.getLogger(__name__)


class TorchEngine(StepEngine):
    """A step engine on torch, for targets and drafts, on CPUs and CUDA alike."""

    def __init__(
        self,
        name: str,
        lm: nn.Module,
        layers: Seq[AttentionSpec],
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
        taps: Seq[int] = (),
    ) -> None:
        """Serve a causal language model of transformers that attends by ``ATTENTION``, on its
        device and in its dtype; ``taps`` are the layers whose output drafts read.
        """
        model = Decoder(lm, layers, kv_blocks=max(kv_blocks, BLOCKS), taps=taps)
        limits = step_limits(model.vocab_size, kv_blocks, max_context_tokens, max_draft_tokens)
        super().__init__(name, model, limits)
        self.model: Decoder

    @classmethod
    def load(
        cls,
        name: str,
        folder: Path,
        *,
        dtype: str = "bf16",
        device: str = "cpu",
        taps: Seq[int] = (),
        **sizes: int,
    ) -> TorchEngine:
        """Serve a folder, after a comparison with transformers' own forward. Raises ConfigError for
        one that cannot be served.
        """
        spec = read_spec(folder)
        check_taps(folder, spec, taps)
        engine = cls(name, load_decoder(folder, dtype, device), spec.layers, taps=taps, **sizes)
        difference = compare(engine.model.lm, engine.model.forward, f"{name}: {folder}")
        text = "%s: a %s of transformers, %.1g standard deviations from its own forward"
        logger.info(text, name, spec.architecture, difference)
        return engine
