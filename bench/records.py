"""Records of measurements: JSON files, the large ones packed by gzip; each says its commit."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from backend.machine import machine

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
_FOLDER = re.compile(r"(?:^|(?<=[=:,]))/(?:[^/\s]+/)+")
"""The folder of an absolute path within a word of a command."""


def read(path: Path) -> dict[str, Any]:
    """Return a record; ``path`` names it with or without ``.gz``."""
    packed = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    if path.suffix == ".gz" or not path.exists():
        text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    else:
        text = path.read_text("utf-8")
    record: dict[str, Any] = json.loads(text)
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record, all or nothing, after the stamp of this run; later writes of a record that
    goes on with another commit name both.
    """
    whole = stamp() | record
    commits = dict.fromkeys([*whole["commit"].split(), *COMMIT.split()])
    record["commit"] = whole["commit"] = " ".join(commits)
    from policy.simulate import lines

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(lines(whole), "utf-8")
    part.replace(path)


def stamp() -> dict[str, Any]:
    """Return the commit, time, command and machine of this run, without folders of the machine."""
    main = sys.modules["__main__"]
    module = main.__spec__.name.removesuffix(".__main__") if main.__spec__ else "?"
    words = ["python", "-m", module, *(_FOLDER.sub("", word) for word in sys.argv[1:])]
    return {
        "commit": COMMIT,
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(words),
        "machine": machine.describe(),
    }


def commit() -> str:
    """Return the commit that is run, "-changed" where files differ from it; empty: unknown."""
    command = ["git", "-C", str(RESULTS), "describe", "--always", "--abbrev=12", "--dirty=-changed"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


COMMIT = commit()
"""The commit of the code that this process imported."""
