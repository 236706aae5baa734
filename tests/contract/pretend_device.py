"""A device that is not there: tensors that compute on the CPU and must keep the rules of an
accelerator.

They may not meet tensors of the host (but for scalars and indices); every wait for a result and
every upload is counted. So device mistakes show on a machine without an accelerator; kernels do
not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("xpu")
"""Neither "cpu" nor "cuda": the engine takes its general way."""

WAITS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
SIZED_BY_VALUES = {"nonzero", "unique", "masked_select", "bincount"}
MAY_MIX = {"__getitem__", "__setitem__", "copy_", "to"}
"""An index may lie on the host, and a copy may cross."""


class OnDevice(torch.Tensor):
    """A tensor of the device."""


class PretendDevice(TorchFunctionMode):
    """While entered, what is put on ``DEVICE`` is an ``OnDevice``. ``counted`` has the waits and
    uploads by the name of the function.

    ``broken`` has the rules that were broken: those that are caught are no better.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.broken: list[str] = []

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
                    return args[0].clone().as_subclass(OnDevice if target else torch.Tensor)
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
        return _wrapped(found) if target else found


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
