"""One part under way: what it may take, and what it has found so far, which is in a file whenever
the part is killed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 0


class LackError(Exception):
    """Packages are not installed here; the message names them."""


@dataclass
class Job:
    """``result`` grows; ``keep`` writes it. ``end_s`` is when the part should be done, on
    ``time.monotonic``.
    """

    part: str
    out: Path
    device: str
    rehearse: bool
    end_s: float
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()

    def keep(self, **more: Any) -> None:
        """Write what there is; ``more`` stands beside the result."""
        path = self.out / f"{self.part}.part"
        old = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(old | more | {"result": self.result}), "utf-8")
        os.replace(fresh, path)
