"""Pure decisions: which draft and how many tokens, for every request, before every step."""

from .baselines import FixedLength, NoSpeculation, RandomChoice
from .plan import NO_DRAFT, Outcome, Plan, Policy, View

__all__ = ["NO_DRAFT", "FixedLength", "NoSpeculation", "Outcome", "Plan", "Policy", "RandomChoice", "View"]
