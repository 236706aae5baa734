"""The exactness suite's deployments with TensorRT-LLM engines in place of the torch ones: the
adapter, over the fake executor.

The fake's forward pass is that of the very engine that it stands for, so that every
check and every reference text stays as it is.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

from backend.engines.torch.engine import TorchEngine
from backend.engines.trtllm.engine import ExecutorSettings, TrtllmEngine
from backend.engines.trtllm.folder import read_engine_folder
from tests.contract import checks, fake_executor, scenarios
from tests.contract.deployment import K_MAX, MAX_CONTEXT_TOKENS, Deployment
from tests.contract.engine_folders import engine_folder
from tests.contract.fake_executor import Behaviour, Executor, Model
from tests.contract.reference import Reference

numbers = itertools.count(1)
ENGINES = tempfile.TemporaryDirectory(prefix="spindle-fake-engines-")  # goes with the process


def trtllm_engine(
    like: TorchEngine, *, target: bool, behaviour: Behaviour | None = None, **options
) -> TrtllmEngine:
    """An engine over the fake executor with the forward pass and the name of a torch engine; its
    time stands still, and iterations stay unread.
    """
    root = Path(ENGINES.name) / str(next(numbers))
    settings = options.pop("settings", ExecutorSettings())
    folder = engine_folder(
        root,
        like.name,
        vocab_size=like.limits.vocab_size,
        max_draft_len=K_MAX if target else 0,
        max_seq_len=MAX_CONTEXT_TOKENS + 2 * K_MAX,
        **options,
    )
    Executor.models[str(folder)] = Model(Reference(like).logits, behaviour or Behaviour())
    return TrtllmEngine(
        like.name,
        read_engine_folder(folder),
        settings,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        bindings=fake_executor,
        clock=lambda: 0.0,
    )


def serve_with_trtllm(monkeypatch, behaviour: Callable[[], Behaviour] = Behaviour) -> None:
    """Make the suite's deployments run on it: the target, and of the drafts those that are plain
    engines.
    """

    def deployment(target, drafts=(), *arguments, **options):
        made = [
            trtllm_engine(d, target=False, behaviour=behaviour())
            if d.name in ("twin", "near", "other")
            else d
            for d in drafts
        ]
        return Deployment(
            trtllm_engine(target, target=True, behaviour=behaviour()),
            made,
            *arguments,
            **options,
        )

    for module in (checks, scenarios):
        monkeypatch.setattr(module, "Deployment", deployment)
