"""Plan a trace again: ``python -m policy.replay FILE`` tells how many plans come out the same, and explains the first that does not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .trace import TraceError, replayed, same


def main() -> int:
    """Replay a file; return 1 if a plan differs, 2 if the file is no trace."""
    parser = argparse.ArgumentParser(prog="python -m policy.replay", description="Plan a trace of JSON lines again and compare.")
    parser.add_argument("file", type=Path)
    count = 0
    try:
        with parser.parse_args().file.open(encoding="utf-8") as lines:
            for recorded, now in replayed(lines):
                if not same(recorded, now):
                    print(f"plan {count} differs:\n  recorded {recorded}\n  now      {now}")
                    return 1
                count += 1
    except (OSError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} plans, all the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
