"""Engines that a child process makes by name: drafts over the fake executor."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from backend.engines.trtllm.engine import ExecutorSettings, TrtllmEngine
from backend.engines.trtllm.folder import read_engine_folder
from tests.contract import fake_executor
from tests.contract.deployment import VOCAB, tiny_engine
from tests.contract.fake_executor import Behaviour, Executor, Model
from tests.contract.trtllm_deployment import trtllm_engine


def counting(tokens):
    return np.eye(VOCAB)[(tokens[-1] + 1) % VOCAB] * 9.0


def make(folder: Path, behaviour: Callable[[], Behaviour], count) -> TrtllmEngine:
    """A draft on a model that counts."""
    Executor.models[str(folder)] = Model(counting, behaviour())
    settings = ExecutorSettings(turn_timeout_s=600.0)
    engine = read_engine_folder(folder)
    return TrtllmEngine(
        "draft", engine, settings, max_context_tokens=96, bindings=fake_executor, count=count
    )


def twin(marker: Path, _count) -> TrtllmEngine:
    """The exactness suite's copy of the target, which dies once."""
    behaviour = Behaviour() if marker.exists() else Behaviour(dies_at=12)
    marker.touch()
    return trtllm_engine(tiny_engine("twin"), target=False, behaviour=behaviour)


def slow_when_made_again(marker: Path, build_s: float) -> Behaviour:
    """An executor whose constructor keeps the interpreter for so long, but for the first."""
    behaviour = Behaviour(build_s=build_s * marker.exists())
    marker.touch()
    return behaviour


def hangs(_count):
    """Print this process's number and keep the interpreter's lock for an hour."""
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(3600)
