"""How many tokens a row runs freely where every turn costs something beside its iterations (TensorRT-LLM: a turn is a request)."""

from __future__ import annotations

import math


def free_run_tokens(turn_s: float, token_s: float, wait_s: float, margin: float, rest_steps: int, most: int) -> int:
    """Return the tokens, 1..``most``, of a turn that does not speculate: the longer, the rarer its overhead, and the later the next plan.

    A turn of m tokens takes ``turn_s`` + m ``token_s``. A plan that found no gain finds one again, by the planner's own constants, once in
    ``rest_steps`` tokens, and then gains at least ``margin`` of their time; a turn under way misses it, for (m - 1) / 2 tokens in the mean.
    Turns of one token end together. Longer ones end apart, and who comes back while others run waits ``wait_s`` for their iteration to end.
    So a token costs, beside its iteration,

        turn_s  for m = 1,    (turn_s + wait_s) / m + h (m - 1) / 2  else,    h = margin token_s / rest_steps,

    the latter least at m = sqrt(2 (turn_s + wait_s) / h), the economic lot size (Harris 1913).
    """
    delay_s = margin * token_s / rest_steps if rest_steps else math.inf
    if turn_s <= 0 or delay_s == math.inf:
        return 1
    tokens = max(1, min(most, round(math.sqrt(2 * (turn_s + wait_s) / delay_s)))) if delay_s > 0 else most
    return tokens if (turn_s + wait_s) / tokens + delay_s * (tokens - 1) / 2 < turn_s else 1
