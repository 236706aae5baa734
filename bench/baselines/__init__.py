"""Published policies that the planner is compared with and that nothing is served with for its own
sake, each reached by its dotted path, such as ``bench.baselines.spin.SpinSelection``.

A module is a family; its ``ENTRIES`` name it in comparisons.
"""

from policy.baselines import BASELINES as SERVED
from policy.baselines import Baseline, collect

BASELINES: dict[str, Baseline] = {**SERVED, **collect(__name__)}
"""All baselines by the name that comparisons give them: those that are settings, then these."""


def compared_baselines() -> dict[str, Baseline]:
    """Return the baselines that comparisons run."""
    return {name: baseline for name, baseline in BASELINES.items() if baseline.compared}
