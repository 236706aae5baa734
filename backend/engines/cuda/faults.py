"""Errors of CUDA that end the process: after them nothing runs in its context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from backend.engines.port import EngineLostError

NO_NUMBERS = "the target's logits are no numbers"
"""The error of a row whose logits have a NaN, are infinite, or are all minus infinity."""


def context_error(device: torch.device) -> str:
    """Return the error that every call gets on a device; empty while its context works."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return ""


@contextmanager
def reporting_loss(name: str, device: torch.device) -> Iterator[None]:
    """Raise EngineLostError in the place of an error after which the device's context is broken."""
    try:
        yield
    except Exception as error:
        if why := context_error(device):
            raise EngineLostError(f"{name}: CUDA's context on {device} is broken: {why}") from error
        raise
