"""A device that is not there: tensors that compute on the CPU and are held to the rules of an
accelerator.

They may not meet tensors of the host (but for scalars and indices), nor what another stream has
queued unless theirs has waited for it (``pretend_streams``); every wait for a result and every
upload is counted. So device mistakes show on a machine without an accelerator; kernels do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.contract.pretend_streams import Event, PretendStreams, memory

DEVICE = torch.device("xpu")
"""Neither "cpu" nor "cuda": the engine takes its general way."""

WAITS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
SIZED_BY_VALUES = {"nonzero", "unique", "masked_select", "bincount"}
MAY_MIX = {"__getitem__", "__setitem__", "copy_", "to"}
"""An index may lie on the host, and a copy may cross."""
ASKS_SHAPE = {"__get__", "__len__", "dim", "numel", "size", "stride"}
"""These look at no memory."""
IN_PLACE = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__iand__",
    "__ior__",
    "__ixor__",
}
"""These write to their first argument, and so do all whose names end with one underscore."""


class OnDevice(torch.Tensor):
    """A tensor of the device."""


class PretendDevice(TorchFunctionMode):
    """While entered, what is put on ``DEVICE`` is an ``OnDevice``. ``counted`` has the waits and
    uploads by the name of the function.

    ``broken`` has the rules that were broken: those that are caught are no better. A side stream's
    operations are not counted.
    """

    def __init__(self, streams: PretendStreams | None = None) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.broken: list[str] = []
        self.streams = streams or PretendStreams()

    def side_stream(self, name: str = "side") -> Callable[[], AbstractContextManager[None]]:
        """Return a new stream, as an engine does (``backend.engines.port.StreamsBeside``)."""
        return lambda: self._queued_on(name, self.streams.event())

    @contextmanager
    def _queued_on(self, stream: str, event: Event) -> Iterator[None]:
        there = PretendDevice(self.streams)  # a mode is the thread's that enters it
        there.broken = self.broken
        with there, self.streams.on(stream, event):
            yield

    def _must(self, holds: bool, rule: str) -> None:
        if not holds:
            self.broken.append(rule)
            raise AssertionError(rule)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", str(function)), dict(kwargs or {})
        tensors = list(_tensors([args, kwargs]))
        there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if name == "__get__" and there and function == torch.Tensor.device.__get__:
            return DEVICE
        if name in WAITS and there:
            self.counted[name] += 1
            self._queue(name, there, [])
            return function(*_plain(args), **_plain(kwargs))
        if there and name not in MAY_MIX:
            strangers = [
                tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()
            ]
            shapes = [list(tensor.shape) for tensor in strangers[:1]]
            self._must(
                not strangers,
                f"{name} of a tensor on the device and one on the host of shape {shapes}",
            )
        if name not in ASKS_SHAPE:
            in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
            written = _tensors([args[:1] if in_place else (), kwargs.get("out")])
            self._queue(name, there, [tensor for tensor in written if isinstance(tensor, OnDevice)])
        target = bool(there)
        self.counted[name] += target and name in SIZED_BY_VALUES
        if name == "to" or "device" in kwargs:
            named = [
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, (torch.device, str))
            ]
            if named:
                target = torch.device(named[0]) == DEVICE
                self.counted["upload"] += target and (
                    name == "tensor" or (bool(tensors) and not there)
                )
                args = (
                    tuple(value for value in args if not isinstance(value, (torch.device, str)))
                    if name == "to"
                    else args
                )
                kwargs.pop("device", None)
                if name == "to" and len(args) == 1 and not kwargs:
                    return self._new(
                        args[0].clone().as_subclass(OnDevice if target else torch.Tensor), there
                    )
        if (
            target
            and name in ("copy_", "to")
            and len(args) > 1
            and isinstance(args[1], torch.Tensor)
        ):
            self.counted["upload"] += not all(isinstance(tensor, OnDevice) for tensor in args[:2])
        if (
            name == "__getitem__"
            and there
            and any(t.dtype == torch.bool and t.dim() for t in _tensors([args[1]]))
        ):
            self.counted["mask"] += 1
        found = function(*_plain(args), **_plain(kwargs))
        return self._new(_wrapped(found), there) if target else found

    def _queue(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        missed = self.streams.queue(reads, writes) if reads or writes else set()
        self._must(
            not missed,
            f"{name} on stream {self.streams.current!r}, which has not waited for "
            f"{', '.join(sorted(missed))}",
        )

    def _new(self, found: Any, given: list[torch.Tensor]) -> Any:
        """Note what memory is new among ``found``: no view of what was ``given``."""
        known = {memory(tensor) for tensor in given}
        self.streams.made(
            t for t in _tensors([found]) if isinstance(t, OnDevice) and memory(t) not in known
        )
        return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _plain(value: Any) -> Any:
    return _mapped(
        value,
        lambda tensor: tensor.as_subclass(torch.Tensor) if isinstance(tensor, OnDevice) else tensor,
    )


def _wrapped(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.as_subclass(OnDevice))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
