"""Memory of a step engine, from its checkpoint's configuration alone."""

from __future__ import annotations

from pathlib import Path

from backend.config import ServingConfig
from backend.engine_config import EngineConfig
from backend.engines.checkpoint import NUMBER_BYTES
from backend.engines.models.reading import read_spec
from backend.engines.models.spec import DecoderSpec
from backend.engines.port import Footprint
from backend.engines.stepping.counterfactual import SCORED_ROWS

LOGIT_BYTES = 28
"""Bytes for each logit of a pass while distributions are made of them (copies, sort and indices of
top-p): 24 measured in bf16, two more in fp32.
"""

PROB_BYTES = 4
"""Bytes for each probability of a distribution that a draft keeps until it is verified."""


def activation_bytes(dtype: str) -> int:
    """Return the bytes of a number of activations and KV, which int8 and int4 have in fp32."""
    return 4 if dtype in ("int8", "int4") else NUMBER_BYTES[dtype]


def weight_bytes(
    spec: DecoderSpec, looked_up: int, multiplied: int, in_experts: int, *, packs_head: bool
) -> int:
    """Return what weights take, by the bytes of a weight that is looked up, of one that is
    multiplied and of one in an expert. ``packs_head``: a tied embedding is copied to be multiplied
    by.
    """
    copied = packs_head and spec.ties_embeddings
    others = spec.weights - spec.looked_up - spec.experts
    others += spec.vocab_size * spec.hidden_size if copied else 0
    experts = in_experts * spec.experts
    return looked_up * spec.looked_up + multiplied * others + experts


def footprint(
    engine: EngineConfig,
    config: ServingConfig,
    folder: Path,
    *,
    weight_sizes: tuple[int, int, int] | None = None,
    packs_head: bool = False,
    scratch_tokens: int = 0,
) -> Footprint:
    """Return what an engine takes: its largest pass verifies every request, and a draft keeps
    distributions until they are verified. ``weight_sizes``: bytes of a weight that is looked up, of
    one that is multiplied and of one in an expert (none: the dtype's); ``scratch_tokens``: KV
    besides the ledger's. Raises CheckpointError for a folder that cannot be served.
    """
    limits, k_max, target = config.limits, config.policy.k_max, engine.name == config.target.name
    logit_rows = limits.max_active_requests * (1 + k_max * target)
    rows = logit_rows + limits.prefill_chunk_tokens
    prob_rows = 0 if target else limits.max_active_requests * k_max
    logit_rows += 0 if target else SCORED_ROWS
    spec, item = read_spec(folder), activation_bytes(engine.dtype)
    vocab = spec.vocab_size
    kept_rows = min(limits.prefill_chunk_tokens, limits.max_logits_bytes // (4 * vocab)) * target
    weights = weight_bytes(spec, *(weight_sizes or 3 * (item,)), packs_head=packs_head)
    passes = rows * spec.row_width * item + vocab * (
        logit_rows * LOGIT_BYTES + prob_rows * PROB_BYTES
    )
    passes += vocab * kept_rows * (item + 4)  # logits that are kept for replies, and in fp32
    kv = (limits.kv_cache_tokens + scratch_tokens) * spec.kv_width * item
    return Footprint(engine.device, weights, kv, passes)
