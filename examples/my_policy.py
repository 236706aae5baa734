"""A policy of your own: the draft that pays best, and none once the batch is large."""

import numpy as np

from policy import NO_DRAFT, Plan, Policy


class BestPaid(Policy):
    """Gives each request the draft with the most tokens per second, by what was accepted lately."""

    def __init__(self, drafts, latency, k_max, most_rows=16, rate=0.05):
        """``most_rows`` and ``rate`` are options: ``policy.options`` in serving.json."""
        self.drafts, self.k_max, self.most_rows, self.rate = drafts, k_max, most_rows, rate
        self.target_s = latency.target.at(1)  # seconds of a pass over one token
        self.draft_s = np.array([curve.at(1) for curve in latency.drafts])

    def start(self):
        """Return what each draft had accepted a step; a high start gives each a try."""
        return np.full(len(self.drafts), float(self.k_max))

    def plan(self, view, state, now, rng):
        """Return a draft and a length for every row, and the state."""
        if len(view) > self.most_rows:
            return Plan.within(view, NO_DRAFT, 0), state
        length = np.round(state) + 1  # one more than were accepted, so that it can grow
        tokens_per_s = (1 + state) / (self.target_s + length * self.draft_s)
        draft = np.where(view.ceiling > 0, tokens_per_s, 0).argmax(axis=1)
        return Plan.within(view, draft, length[draft]), state

    def observe(self, outcome, state, now):
        """Return the averages after a step: of what was proposed, and of what would have been."""
        state = state.copy()  # a state is never changed, a new one is returned
        drafts = [*outcome.rows.draft, *outcome.free.draft]
        accepted = [*outcome.rows.accepted, *outcome.free.accepted]
        for draft, tokens in zip(drafts, accepted, strict=True):
            if draft != NO_DRAFT:
                state[draft] += self.rate * (tokens - state[draft])
        return state
