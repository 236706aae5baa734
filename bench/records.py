"""Records of measurements: JSON files, the large ones packed by gzip."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def read(path: Path) -> dict[str, Any]:
    """Return a record; ``path`` names it with or without ``.gz``."""
    packed = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    if path.suffix == ".gz" or not path.exists():
        text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    else:
        text = path.read_text("utf-8")
    record: dict[str, Any] = json.loads(text)
    return record
