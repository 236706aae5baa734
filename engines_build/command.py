"""``spindle``: checks that Python finds this project's packages, then runs the command.

The packages have general names (``docs/adr/0072``), so this module imports none of them at its top.
"""

from __future__ import annotations

import hashlib
import sys
from base64 import urlsafe_b64encode
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("backend", "policy")


def main() -> int:
    """Run the command that ``sys.argv`` has; returns its exit status."""
    for name in PACKAGES:
        if reason := find_clash(name):
            text = "install Spindle into an environment of its own, and unset PYTHONPATH"
            print(f"spindle: error: {reason}: {text}", file=sys.stderr)
            return 1
    from backend.cli import main as run

    return run()


def find_clash(name: str) -> str:
    """Return why a package that Python finds by this name is not Spindle's; empty if it is."""
    ours = ROOT / name / "__init__.py"
    spec = find_spec(name)
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
    if not places or not ours.samefile(places[0] or places[-1]):
        there = next(filter(None, places), "nowhere")
        return f"Python finds the package '{name}' at {there}, Spindle's is {ours.parent}"
    if _is_overwritten(ours):
        return f"another package has overwritten {ours}, which was Spindle's"
    return ""


def _is_overwritten(file: Path) -> bool:
    """Return whether an installed file differs from the one that came with the wheel."""
    try:
        files = metadata.distribution("spindle").files or ()
    except metadata.PackageNotFoundError:  # a clone that is not installed
        return False
    for each in files:
        if each.hash and each.as_posix() == file.relative_to(ROOT).as_posix():
            digest = hashlib.new(each.hash.mode, file.read_bytes()).digest()
            return urlsafe_b64encode(digest).rstrip(b"=").decode() != each.hash.value
    return False


if __name__ == "__main__":
    sys.exit(main())
