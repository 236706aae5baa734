"""The loop that trains a draft on the teacher's kept logits: budget, checkpoints and curve."""

from __future__ import annotations

import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from backend.engines.head.network import HeadNetwork

if TYPE_CHECKING:
    from engines_build.distill.data import Answer

S = TypeVar("S", bound="Answer")
POSITIONS = range(1, 9)
"""Places in a proposal whose acceptance is reported."""

_RISE_STEPS = 40
_STEPS_PER_LINE = 50
_CHECKPOINT_S = 240.0


def choose_shortlist(
    laws: Iterable[tuple[Tensor, Tensor]],
    size: int,
    vocab: int,
    always: set[int],
    device: str = "cpu",
) -> Tensor:
    """Pick the ``size`` tokens that the teacher most expects (by summed probability) by laws of its
    own text (ids and log probabilities), ``always`` first; ascending.
    """
    mass = torch.zeros(vocab, dtype=torch.float64, device=device)
    for ids, logprobs in laws:
        mass.index_add_(0, ids.flatten().long(), logprobs.flatten().double().exp())
    mass[list(always)] = math.inf
    return mass.topk(size).indices.sort().values


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: ``tokens`` read (prompts included; the samples come round as often as that
    needs), at most until ``deadline``.

    The learning rate falls with whichever is nearer; where tokens are, two runs of one seed have
    the same loss curve.
    """

    tokens: int
    batch: int
    learning_rate: float
    deadline: float = math.inf
    """On the clock of ``time.monotonic``, in seconds."""


class Trainer(ABC, Generic[S]):
    """Trains ``draft`` on ``samples``, from the checkpoint in ``run`` on if there is one.

    ``run`` names the checkpoint ``run.pt`` and the curve ``run.jsonl``: step, tokens read, loss
    (nats a position), agreement, all means of the steps since the line before.
    """

    def __init__(
        self,
        draft: HeadNetwork,
        shortlist: Tensor,
        samples: list[S],
        device: str,
        seed: int,
        run: Path,
    ):
        self.draft, self.samples, self.device, self.seed = draft.to(device), samples, device, seed
        self.checkpoint, self.curve = (
            run.with_name(run.name + ".pt"),
            run.with_name(run.name + ".jsonl"),
        )
        run.parent.mkdir(parents=True, exist_ok=True)
        self.index = torch.full((draft.config.vocab_size,), -1, dtype=torch.long)
        self.index[shortlist] = torch.arange(len(shortlist))
        self.shortlist = shortlist
        self.done = 0.0
        """Share of the budget that is spent."""

    def run(self, budget: Budget) -> dict[str, float]:
        """Train within ``budget`` and return the last line of the curve."""
        optimisers = self._optimisers(budget)
        groups = [group for optimiser in optimisers for group in optimiser.param_groups]
        state = self._resume(optimisers)
        start = saved = time.monotonic()
        seen: list[dict[str, float]] = []
        for step, chosen in self._batches(budget.batch, state["step"]):
            now = time.monotonic()
            spent = (now - start) / (budget.deadline - start) if budget.deadline > start else 1.0
            done = max(state["tokens"] / budget.tokens, spent)
            if done >= 1:
                break
            self.done = done
            for group in groups:
                fall = 0.03 + 0.97 * (1 + math.cos(math.pi * done)) / 2
                group["lr"] = (
                    group["rate"] * budget.learning_rate * min((step + 1) / _RISE_STEPS, fall)
                )
            seen.append(self._step(step, chosen, optimisers))
            state["step"], state["tokens"] = (
                step + 1,
                state["tokens"] + sum(len(s.tokens) for s in chosen),
            )
            if state["step"] % _STEPS_PER_LINE == 0:
                self._report(state, seen, now - start)
                if now - saved > _CHECKPOINT_S:
                    self._save(state, optimisers)
                    saved = now
        if seen:
            self._report(state, seen, time.monotonic() - start)
        self._save(state, optimisers)
        return dict(state["line"])

    @abstractmethod
    def _optimisers(self, budget: Budget) -> list[torch.optim.Optimizer]:
        """Return what takes the steps; a group's ``rate`` is relative to the budget's."""

    def _report(self, state: dict[str, Any], seen: list[dict[str, float]], wall_s: float) -> None:
        means = {name: round(float(np.mean([one[name] for one in seen])), 4) for name in seen[0]}
        seen.clear()
        state["line"] = {"step": state["step"], "tokens": state["tokens"], **means}
        with self.curve.open("a", encoding="utf-8") as file:
            file.write(json.dumps(state["line"]) + "\n")
        print(
            f"train: {self.curve.stem} "
            + " ".join(f"{k} {v}" for k, v in state["line"].items())
            + f" {wall_s:.0f} s",
            flush=True,
        )

    def _resume(self, optimisers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        if not self.checkpoint.exists():
            self.curve.unlink(missing_ok=True)
            return {
                "step": 0,
                "tokens": 0,
                "line": {"loss": math.nan, "agreement": math.nan, "tokens": 0},
            }
        saved = torch.load(self.checkpoint, map_location=self.device)
        self.draft.load_state_dict(saved["draft"])
        for optimiser, theirs in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(theirs)
        lines = self.curve.read_text("utf-8").splitlines() if self.curve.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= saved["state"]["step"]]
        self.curve.write_text("".join(line + "\n" for line in kept), "utf-8")
        return dict(saved["state"])

    def _save(self, state: dict[str, Any], optimisers: list[torch.optim.Optimizer]) -> None:
        """Write the checkpoint; it appears whole or not at all."""
        fresh = self.checkpoint.with_suffix(".tmp")
        theirs = [optimiser.state_dict() for optimiser in optimisers]
        torch.save({"draft": self.draft.state_dict(), "optimisers": theirs, "state": state}, fresh)
        fresh.rename(self.checkpoint)

    def _batches(self, batch: int, first: int) -> Iterator[tuple[int, list[S]]]:
        """Yield steps from ``first`` on and their samples, of like length (less padding), shuffled
        differently in each pass.
        """
        steps = math.ceil(len(self.samples) / batch)
        for pass_ in count(first // steps):
            rng = random.Random(f"{self.seed}/{pass_}")
            order = sorted(self.samples, key=lambda s: len(s.tokens) + rng.randint(0, 40))
            batches = [order[i : i + batch] for i in range(0, len(order), batch)]
            rng.shuffle(batches)
            for at, chosen in enumerate(batches):
                if pass_ * steps + at >= first:
                    yield pass_ * steps + at, chosen

    def _step(
        self, step: int, samples: list[S], optimisers: list[torch.optim.Optimizer]
    ) -> dict[str, float]:
        """Take one step; return what the curve shows of it."""
        loss, seen = self._loss(step, samples)
        self.draft.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        return seen

    @abstractmethod
    def _loss(self, step: int, samples: list[S]) -> tuple[Tensor, dict[str, float]]:
        """Return what to make less; and, to show, it and the share of positions where draft and
        teacher choose the same token.
        """


def adamw(groups: list[dict[str, Any]], budget: Budget) -> torch.optim.AdamW:
    """Return AdamW for groups of parameters."""
    return torch.optim.AdamW(
        groups, lr=budget.learning_rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )


def top_cross_entropy(logits: Tensor, places: Tensor, logprobs: Tensor) -> Tensor:
    """Mean cross entropy (nats) of the draft's law against the teacher's kept one, everything
    unkept being one further class.

    ``logits`` [n, S] over the shortlist, ``places`` [n, K] shortlist positions of the kept tokens
    (-1: not in it; left out, the draft has no class for it), ``logprobs`` [n, K] the teacher's.
    """
    inside = places >= 0
    law = logits.log_softmax(dim=1).gather(1, places.clamp(min=0)).masked_fill(~inside, -math.inf)
    rest = torch.log1p(-law.exp().sum(dim=1).clamp(max=1 - 1e-4))
    p = logprobs.exp()
    kept = (p * law.masked_fill(~inside, 0.0)).sum(dim=1)
    return -(kept + (1 - p.sum(dim=1)).clamp(min=0) * rest).mean()
