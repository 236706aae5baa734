"""Values of requests in errors; without FastAPI, which the Dynamo worker's environment lacks."""

from __future__ import annotations

import json
from typing import Any

_MOST_SHOWN = 60


def as_json(value: Any) -> str:
    """Return a value as an error shows it: JSON, cut off where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
