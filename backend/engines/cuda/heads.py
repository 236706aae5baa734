"""A head's whole proposal on the device, all depths in one piece: what ``engines.head`` proposes on
the host, written where a verification step reads it.
"""

from __future__ import annotations

import torch

from backend.engines.cuda.step import VerifyStep
from backend.engines.head.network import HeadNetwork
from backend.engines.spine import CANDIDATES


class DeviceHead:
    """A head's weights on the target's device: ``network``, and ``embedding`` and ``lm_head``
    [vocab, hidden], which are the target's. It can always propose ``token_ids`` int64[static].
    """

    def __init__(
        self,
        name: str,
        network: HeadNetwork,
        token_ids: torch.Tensor,  # int64[static]
        embedding: torch.Tensor,  # [vocab, hidden]
        lm_head: torch.Tensor,  # [vocab, hidden]
    ) -> None:
        self.name = name
        self.network, self.token_ids = network, token_ids.to(lm_head.device)
        self.embedding, self.lm_head = embedding, lm_head
        self.static = lm_head[self.token_ids].contiguous()


class HeadProposal:
    """Proposals of ``depth`` places for rows of a step, ``CANDIDATES`` nodes at each.

    The likeliest node of a place continues the spine; its siblings are leaves. They fill the
    step's first ``depth * CANDIDATES`` columns. ``bounded``: rows may have top-k, top-p or min-p.
    """

    def __init__(
        self, head: DeviceHead, step: VerifyStep, depth: int, *, bounded: bool = False
    ) -> None:
        device = step.slot.device
        self._head, self._step, self._depth, self._bounded = head, step, depth, bounded
        self.length = torch.full((step.rows,), depth, dtype=torch.int32, device=device)
        """int32[rows]: places to propose for; 0 for rows that are another draft's. Read."""
        spine = torch.arange(depth, device=device) * CANDIDATES - CANDIDATES
        self._parent = spine.clamp(min=-1).int().repeat_interleave(CANDIDATES)[None]

    def run(self) -> None:
        """Launch the proposal: write the step's ``token``, ``parent`` and ``chance``."""
        step, slots, head = self._step, self._step.slots, self._head
        slot, width = step.slot, self._parent.shape[1]
        is_own = (self.length > 0)[:, None]
        step.parent[:, :width] = torch.where(is_own, self._parent, step.parent[:, :width])
        last, place = slots.last[slot], slots.length[slot] + 1
        text_tokens = slots.text_tokens[slot]
        rows = head.lm_head[text_tokens.clamp(min=0)]
        tokens = torch.cat((head.token_ids.expand(len(slot), -1), text_tokens), 1)
        state = head.network.begin(slots.states[slot])
        path = torch.ones(len(slot), device=slot.device)
        for depth in range(self._depth):
            state, vectors = head.network.step(state, head.embedding[last])
            text_logits = torch.bmm(rows, vectors[:, :, None])[:, :, 0].masked_fill(
                text_tokens < 0, -torch.inf
            )
            logits = torch.cat((vectors @ head.static.T, text_logits), 1)
            token, chance = self._candidates(logits, tokens, place + depth)
            chance = path[:, None] * chance * (depth < self.length)[:, None]
            columns = slice(depth * CANDIDATES, None)
            for target, values in ((step.token, token), (step.chance, chance)):
                place_of = target[:, columns][:, :CANDIDATES]
                place_of.copy_(torch.where(is_own, values, place_of))
            last, path = token[:, 0], chance[:, 0]

    def _candidates(
        self, logits: torch.Tensor, tokens: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens int64[rows, CANDIDATES] that are likeliest to be what the target draws,
        best first, and how likely each is; 0 for a token that is not worth a node. ``logits`` are
        those of ``tokens`` [rows, columns] at ``place`` int64[rows].
        """
        slot, kernels = self._step.slot, self._step.model.kernels
        slots, bounded = self._step.slots, self._bounded
        options = slots.drawing(kernels, logits, slot, place, bounded=bounded)
        return kernels.candidates(logits, tokens, *options)
