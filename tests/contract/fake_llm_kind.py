"""The kind ``tensorrt_llm`` over the fake of its library, for a server; texts are bytes."""

from __future__ import annotations

from backend.engines.tensorrt_llm import kind
from backend.kinds import Kind
from tests.contract import fake_llm_api

KIND = Kind(__name__, tokenizer=False, hosted=True)
REFUSES = kind.REFUSES
drafter, check_folder = kind.drafter, kind.check_folder


async def start(engine, service):
    """Start 1.2.1 of the fake."""
    fake_llm_api.install("1.2.1")
    return await kind.start(engine, service)
