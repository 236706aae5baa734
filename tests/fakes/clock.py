"""Time that only a test moves."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock that a test sets, and that ticks by ``tick_s`` whenever it is read."""

    now_s: float = 0.0
    tick_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s
