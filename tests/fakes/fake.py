"""The kind of ``FakeEngine``, an engine of one's own that ``serving.json`` names by its path."""

from __future__ import annotations

from backend.engine_config import EngineConfig
from backend.engines.registry import Service
from backend.kinds import Kind

KIND = Kind(__name__, model=False, tokenizer=False, known_s=1e-6, most_ahead=4096)


def make(engine: EngineConfig, service: Service):
    """Make an engine, with the ``options`` ``seed``, ``agreement`` (a draft's) and ``step_s``."""
    from tests.fakes.fake_engine import FakeEngine

    target = service.config.target
    is_target = engine is target
    in_target = bool(target.lookahead) and not is_target
    sizes = service.sizes
    return FakeEngine(
        engine.name,
        **({"agreement": 0.7, **engine.options} if not is_target else engine.options),
        kv_blocks=0 if in_target else sizes["kv_blocks"],
        max_context_tokens=sizes["max_context_tokens"],
        max_draft_tokens=sizes["max_draft_tokens"],
        lookahead=engine.lookahead if is_target else 0,
        in_target=in_target,
    )
