"""A policy of your own: each request gets its best draft, the batch the length that pays best."""

import numpy as np

from policy import NO_DRAFT, Plan, Policy


class BestPaid(Policy):
    """Maximises the tokens per second of a step, by what each request accepted lately."""

    def __init__(self, drafts, latency, k_max, hope=0.7):  # hope: an untried draft's odds
        self.latency, self.lengths = latency, np.arange(1, k_max + 1)
        self.fresh = np.outer([2 * hope, 2], np.ones(len(drafts)))  # accepted, checked

    def start(self):
        """Return the state: by request, the tokens of each draft accepted and checked."""
        return {}

    def plan(self, view, state, now, rng):
        """Return a draft and a length for every row, and the state."""
        rows, target_s, drafts = len(view), self.latency.target.at, self.latency.drafts
        past = np.reshape([state.get(r, self.fresh) for r in view.request], (rows, 2, len(drafts)))
        odds = past[:, 0] / past[:, 1] * (view.ceiling > 0)  # [rows, drafts]
        uses = np.bincount(draft := odds.argmax(axis=1), minlength=len(drafts))
        draft_s = sum(each.at(n) for each, n in zip(drafts, uses, strict=True) if n)
        tokens = rows + (odds.max(axis=1) ** self.lengths[:, None]).sum(axis=1).cumsum()
        per_s = tokens / [target_s(rows + rows * k) + k * draft_s for k in self.lengths]
        length = 1 + per_s.argmax() if per_s.max() > rows / target_s(rows) else 0
        return Plan.within(view, draft, length), state

    def observe(self, outcome, state, now):
        """Return the counts after a step. A state is never changed, a new one is returned."""
        state = dict(state)
        for seen in (outcome.rows, outcome.free):  # proposed; what would have been accepted
            columns = seen.request, seen.draft, seen.accepted, seen.scored
            for request, draft, accepted, scored in zip(*columns, strict=True):
                if draft != NO_DRAFT:
                    counts = state[request] = 0.95 * state.get(request, self.fresh)
                    counts[:, draft] += accepted, min(accepted + 1, scored)
        return {request: state[request] for request in state.keys() - set(outcome.finished)}
