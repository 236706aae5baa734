"""Columns of a pass in one piece of memory, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_DTYPES: dict[type, torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float32: torch.float32,
}

Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
"""By name the NumPy type (int64, int32 or float32) and the shape of a column."""


def to_device(
    values: Sequence[Any] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return values on the device. The host does not wait for the copy, nor for what is under way
    before it.
    """
    tensor = torch.tensor(values, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Columns:
    """Columns on the device, with ``copies`` pinned buffers on the host that take turns.

    A copy may still be under way while the next one is written.
    """

    def __init__(self, shapes: Shapes, device: torch.device, *, copies: int = 1) -> None:
        lengths = [int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in shapes.values()]
        ends = list(accumulate(-(-length // 8) * 8 for length in lengths))
        size, pinned = max(8, *ends) if ends else 8, device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(copies)
        ]
        self._turn = 0
        places = [
            (name, end - -(-length // 8) * 8, length, kind, shape)
            for (name, (kind, shape)), length, end in zip(
                shapes.items(), lengths, ends, strict=True
            )
        ]

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: memory[begin : begin + length].view(_DTYPES[kind]).view(shape)
                for name, begin, length, kind, shape in places
            }

        self.device = views(self._device)
        self._host_views: list[dict[str, npt.NDArray[Any]]] = [
            {name: column.numpy() for name, column in views(host).items()} for host in self._hosts
        ]

    @property
    def host(self) -> dict[str, npt.NDArray[Any]]:
        """The host's columns whose turn it is."""
        return self._host_views[self._turn]

    def send(self) -> None:
        """Copy the host's columns to the device; the next copy's turn begins."""
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        self._turn = (self._turn + 1) % len(self._hosts)

    def fetch(self) -> dict[str, npt.NDArray[Any]]:
        """Copy the device's columns to the host's, which are returned: they are complete once the
        stream has come this far. The next copy's turn begins.
        """
        host, views = self._hosts[self._turn], self._host_views[self._turn]
        host.copy_(self._device, non_blocking=True)
        self._turn = (self._turn + 1) % len(self._hosts)
        return views
