"""A head's whole proposal on the device, all depths in one piece: what ``engines.head`` proposes on
the host, written where a verification step reads it.
"""

from __future__ import annotations

import torch

from backend.engines.cuda.noise import exponentials, mix
from backend.engines.cuda.step import VerifyStep
from backend.engines.head.network import HeadNetwork
from backend.engines.spine import CANDIDATES
from backend.sampling.draw import HEAD, SHARPNESS
from backend.sampling.laws import FAINT


class HeadProposal:
    """Proposals of ``depth`` places for the rows of a step, ``CANDIDATES`` nodes at each.

    The likeliest node of a place continues the spine; its siblings are leaves. The step has
    ``depth * CANDIDATES`` columns. ``token_ids`` int64[static] are the tokens that the head can
    always propose, ``embedding`` and ``lm_head`` [vocab, hidden] the target's.
    """

    def __init__(
        self,
        network: HeadNetwork,
        token_ids: torch.Tensor,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        step: VerifyStep,
        depth: int,
    ) -> None:
        self._network, self._step, self._depth = network, step, depth
        self._embedding, self._lm_head = embedding, lm_head
        self._token_ids, self._static = token_ids, lm_head[token_ids].contiguous()
        spine = torch.arange(depth, device=token_ids.device) * CANDIDATES - CANDIDATES
        parents = spine.clamp(min=-1).int().repeat_interleave(CANDIDATES)
        step.parent.copy_(parents.expand_as(step.parent))

    def run(self) -> None:
        """Launch the proposal: write the step's ``token`` and ``chance``."""
        step, slots = self._step, self._step.slots
        slot = step.slot
        last, place = slots.last[slot], slots.length[slot] + 1
        own = slots.own[slot]
        rows = self._lm_head[own.clamp(min=0)]
        tokens = torch.cat((self._token_ids.expand(len(slot), -1), own), 1)
        state = self._network.begin(slots.states[slot])
        path = torch.ones(len(slot), device=slot.device)
        for depth in range(self._depth):
            state, vectors = self._network.step(state, self._embedding[last])
            theirs = torch.bmm(rows, vectors[:, :, None])[:, :, 0].masked_fill(own < 0, -torch.inf)
            logits = torch.cat((vectors @ self._static.T, theirs), 1).float()
            column, chance = self._candidates(logits, tokens, place + depth)
            columns = slice(depth * CANDIDATES, (depth + 1) * CANDIDATES)
            step.token[:, columns] = tokens.gather(1, column)
            step.chance[:, columns] = path[:, None] * chance
            last, path = step.token[:, columns.start], step.chance[:, columns.start]

    def _candidates(
        self, logits: torch.Tensor, tokens: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns int64[rows, CANDIDATES] that are likeliest to be what the target
        draws, best first, and how likely each is; 0 for a column that is not worth a node.

        Greedy rows take the likeliest tokens, others those that win the race with the request's
        noise at ``place`` int64[rows] (``sampling.draw.finishers``).
        """
        step, slots = self._step, self._step.slots
        slot = step.slot
        temperature = slots.temperature[slot]
        is_sampled = (temperature > 0.0)[:, None]
        scores = logits
        if step.bounded:
            limits = (slots.top_k[slot], slots.top_p[slot], slots.min_p[slot])
            bound = step.model.kernels.bounds(logits, temperature, *limits)
            scores = logits.masked_fill(logits < bound[:, None], -torch.inf)
        heat = torch.where(is_sampled, temperature[:, None], 1.0)
        mass = ((scores - scores.amax(1, keepdim=True)) / heat).softmax(1)
        words = mix(slots.seed[slot] ^ place)[:, None]
        times = exponentials(words ^ tokens) / mass
        speed = torch.where(mass >= HEAD, times**-SHARPNESS, 0.0)
        worth = torch.where(is_sampled, speed, mass.double())
        best = worth.topk(CANDIDATES)
        chance = best.values / worth.sum(1, keepdim=True).clamp(min=1e-300)
        is_faint = ~is_sampled & (chance < FAINT * chance[:, :1])
        return best.indices, chance.masked_fill(is_faint, 0.0).float()
