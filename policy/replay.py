"""``spindle replay FILE``: plan a trace again, compare, and say what was decided.

``--step N`` says of the N-th plan what every request got, and why.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from .explain import explain, explain_batch, rests
from .plan import Plan
from .trace import Replanned, TraceError, replayed, same


def main() -> int:
    """Replay a file; return 1 if a plan differs, 2 if the file is no trace or has no such step."""
    parser = argparse.ArgumentParser(
        prog="spindle replay",
        description="Plan a trace of JSON lines again, compare, and explain.",
        epilog="example: spindle replay trace.jsonl --step 12",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=int, help="explain this plan (0: the first), request by request")
    options = parser.parse_args()
    plans: list[Plan] = []
    drafts: tuple[str, ...] = ()
    try:
        with options.file.open(encoding="utf-8") as lines:
            for step in replayed(lines):
                if len(plans) == options.step:
                    print("\n".join(explained(step)))
                    return 0
                if not same(step.recorded, step.plan):
                    print(f"plan {len(plans)} differs:\n  recorded {step.recorded}\n  now      {step.plan}")
                    return 1
                plans.append(step.recorded)
                drafts = step.planner.drafts
    except (OSError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.step is not None:
        print(f"error: --step must be in 0..{len(plans) - 1}, got {options.step}", file=sys.stderr)
        return 2
    print("\n".join([f"{len(plans)} plans, all the same", *summary(plans, drafts)]))
    return 0


def explained(step: Replanned) -> list[str]:
    """Return a line about the step and one for each of its requests; it is the plan of now that is explained."""
    lines = [f"queued {step.view.queued}, {step.view.prefill_tokens} prompt tokens; {explain_batch(step.plan)}"]
    return lines + explain(step.planner, step.view, step.state, step.plan, step.now)


def summary(plans: list[Plan], drafts: tuple[str, ...]) -> list[str]:
    """Return what the plans decided, in a few lines."""
    planned = [plan for plan in plans if len(plan.length)]
    if not planned:
        return []
    draft, length = np.concatenate([plan.draft for plan in planned]), np.concatenate([plan.length for plan in planned])
    shares = [f"none {(length == 0).mean():.0%}"]
    for d, name in enumerate(drafts):
        rows = (draft == d) & (length > 0)
        if rows.any():
            shares.append(f"{name} {rows.mean():.0%} (mean length {length[rows].mean():.1f})")
    counts = Counter("resting" if rests(plan) else "probing" if plan.notes.get("probe") else "" for plan in planned)
    step_ms = 1e3 * np.median([plan.predicted_s for plan in planned])
    why_not = Counter(f"no {name}: {why.split(':')[0]}" for plan in planned for name, why in plan.notes.get("why_not", {}).items())
    return [
        f"rows {len(length)}: {', '.join(shares)}",
        f"steps {len(planned)}: {counts['resting']} resting, {counts['probing']} probing; predicted {step_ms:.2f} ms (median)",
        *(f"{why} ({count} steps)" for why, count in why_not.most_common()),
        f"--step N, 0 to {len(plans) - 1}, says why each request got what it got",
    ]


if __name__ == "__main__":
    sys.exit(main())
