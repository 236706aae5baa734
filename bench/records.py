"""Records of measurements: JSON files, the large ones packed by gzip; each says its commit."""

from __future__ import annotations

import gzip
import json
import subprocess
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


def commit() -> str:
    """Return the commit that is run, "-changed" where files differ from it; empty: unknown."""
    command = ["git", "-C", str(RESULTS), "describe", "--always", "--abbrev=12", "--dirty=-changed"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
