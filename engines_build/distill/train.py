"""The loop that trains a head on the target's kept distributions: budget, checkpoints and curve."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines_build.distill.head import HeadSample, Starts, Unrolls
from engines_build.distill.muon import Muon

SINGLE_SHARE = 0.4
"""Share of the training that looks one token ahead."""

UNROLLED = 4
"""Tokens ahead in the rest of it."""

_STEP_WEIGHT = 0.8
"""Weight of a token further on, relative to the one before it: fewer proposals get there."""


_RISE_STEPS = 40
_STEPS_PER_LINE = 50
_CHECKPOINT_S = 240.0


def choose_shortlist(
    targets: Iterable[tuple[Tensor, Tensor]],
    size: int,
    vocab: int,
    always: set[int],
    device: str = "cpu",
) -> Tensor:
    """Pick the ``size`` tokens, int64[size], that the teacher most expects (by summed probability),
    given the distributions of its own text (ids and log probabilities, both [n, K]), ``always``
    first; ascending.
    """
    mass = torch.zeros(vocab, dtype=torch.float64, device=device)
    for ids, logprobs in targets:
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


class HeadTrainer:
    """Trains a head on answers, from the checkpoint in ``run`` on if there is one.

    ``samples`` lie where the shortlist of ``unroller`` does. ``single_share`` of the training
    looks one token ahead. ``run`` names the checkpoint ``run.pt`` and the curve ``run.jsonl``:
    step, tokens read, loss (nats a position), agreement, all means of the steps since the line
    before.
    """

    def __init__(
        self,
        unroller: Unrolls,
        samples: list[HeadSample],
        seed: int,
        run: Path,
        single_share: float = SINGLE_SHARE,
    ):
        self.unroller, self.network = unroller, unroller.network
        self.device, self.single_share = str(unroller.shortlist.device), single_share
        self.samples, self.seed = samples, seed
        self.checkpoint, self.curve = (
            run.with_name(run.name + ".pt"),
            run.with_name(run.name + ".jsonl"),
        )
        run.parent.mkdir(parents=True, exist_ok=True)
        self.rows = len(unroller.shortlist)
        self.index = torch.full((unroller.vocab_size,), -1, device=self.device)
        self.index[unroller.shortlist] = torch.arange(self.rows, device=self.device)
        self.done = 0.0
        """Share of the budget that is spent."""

    def run(self, budget: Budget) -> dict[str, float]:
        """Train within ``budget`` and return the last line of the curve."""
        optimisers = self._optimisers(budget)
        groups = [group for optimiser in optimisers for group in optimiser.param_groups]
        state = self._resume(optimisers)
        start = saved = time.monotonic()
        losses: list[dict[str, float]] = []
        for step, samples in self._batches(budget.batch, state["step"]):
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
            losses.append(self._step(samples, optimisers))
            state["step"], state["tokens"] = (
                step + 1,
                state["tokens"] + sum(len(s.tokens) for s in samples),
            )
            if state["step"] % _STEPS_PER_LINE == 0:
                self._report(state, losses, now - start)
                if now - saved > _CHECKPOINT_S:
                    self._save(state, optimisers)
                    saved = now
        if losses:
            self._report(state, losses, time.monotonic() - start)
        self._save(state, optimisers)
        return dict(state["line"])

    def _optimisers(self, budget: Budget) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.network.parameters() if p.dim() > 1]
        vectors = [p for p in self.network.parameters() if p.dim() == 1]
        return [
            Muon([{"params": matrices, "rate": 1.0}], budget.learning_rate),
            torch.optim.AdamW(
                [{"params": vectors, "rate": 1.0}],
                lr=budget.learning_rate,
                betas=(0.9, 0.98),
                weight_decay=0.0,
                fused=True,
            ),
        ]

    def _report(self, state: dict[str, Any], losses: list[dict[str, float]], wall_s: float) -> None:
        means = {
            name: round(float(np.mean([one[name] for one in losses])), 4) for name in losses[0]
        }
        losses.clear()
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
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.network.load_state_dict(saved["draft"])
        for optimiser, theirs in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(theirs)
        lines = self.curve.read_text("utf-8").splitlines() if self.curve.exists() else []
        earlier_lines = [
            line for line in lines if json.loads(line)["step"] <= saved["state"]["step"]
        ]
        self.curve.write_text("".join(line + "\n" for line in earlier_lines), "utf-8")
        return dict(saved["state"])

    def _save(self, state: dict[str, Any], optimisers: list[torch.optim.Optimizer]) -> None:
        """Write the checkpoint; it appears whole or not at all."""
        fresh = self.checkpoint.with_suffix(".tmp")
        theirs = [optimiser.state_dict() for optimiser in optimisers]
        torch.save(
            {"draft": self.network.state_dict(), "optimisers": theirs, "state": state}, fresh
        )
        fresh.rename(self.checkpoint)

    def _batches(self, batch: int, first: int) -> Iterator[tuple[int, list[HeadSample]]]:
        """Yield steps from ``first`` on and their samples, of like length (less padding), shuffled
        differently in each pass.
        """
        steps = math.ceil(len(self.samples) / batch)
        for pass_ in count(first // steps):
            rng = random.Random(f"{self.seed}/{pass_}")
            order = sorted(self.samples, key=lambda s: len(s.tokens) + rng.randint(0, 40))
            batches = [order[i : i + batch] for i in range(0, len(order), batch)]
            rng.shuffle(batches)
            for at, members in enumerate(batches):
                if pass_ * steps + at >= first:
                    yield pass_ * steps + at, members

    def _step(
        self, samples: list[HeadSample], optimisers: list[torch.optim.Optimizer]
    ) -> dict[str, float]:
        """Take one step; return what the curve shows of it."""
        loss, parts = self._loss(samples)
        self.network.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        return parts

    def _loss(self, samples: list[HeadSample]) -> tuple[Tensor, dict[str, float]]:
        """Return what to make less; and, to show, it and the share of places where head and target
        choose the same token.
        """
        steps = 1 if self.done < self.single_share else UNROLLED
        total, weight, shares = torch.zeros(()), 0.0, []
        for ahead, (logits, rows, starts) in enumerate(self.unroller.unroll(samples, steps)):
            ids, logprobs = _targets(samples, starts, rows, ahead)
            places = self._places(ids, starts)
            hidden = logits.gather(1, places.clamp(min=0)) < -1e3
            loss = top_cross_entropy(logits, places.masked_fill(hidden, -1), logprobs)
            total = total + _STEP_WEIGHT**ahead * loss
            weight += _STEP_WEIGHT**ahead
            shares.append((logits.argmax(dim=1) == places[:, 0]).float().mean().item())
        loss = total / weight
        return loss, {"loss": loss.item(), "agreement": shares[0], "last": shares[-1]}

    def _places(self, ids: Tensor, starts: Starts) -> Tensor:
        """Return the head's columns of tokens int64[n, K], -1 for those that have none."""
        index = self.index.clone()
        numbers = torch.arange(len(starts.context), device=index.device)
        index[starts.context] = self.rows + numbers
        return index[ids]


def _targets(
    samples: Sequence[HeadSample], starts: Starts, rows: Tensor, ahead: int
) -> tuple[Tensor, Tensor]:
    """Return the target's distribution, int64[n, K] and float32[n, K], after the token that step
    ``ahead`` of each of the starts ``rows`` int64[n] has read.
    """
    at = starts.place[rows] + ahead + 1
    ids = torch.cat([s.top_ids for s in samples])[at].long()
    return ids, torch.cat([s.top_logprobs for s in samples])[at].float()


def top_cross_entropy(logits: Tensor, places: Tensor, logprobs: Tensor) -> Tensor:
    """Mean cross entropy (nats) of the draft's distribution against the teacher's kept one,
    everything unkept being one further class.

    ``logits`` [n, S] over the shortlist, ``places`` [n, K] shortlist positions of the kept tokens
    (-1: not in it; left out, the draft has no class for it), ``logprobs`` [n, K] the teacher's.
    """
    inside = places >= 0
    student = (
        logits.log_softmax(dim=1).gather(1, places.clamp(min=0)).masked_fill(~inside, -math.inf)
    )
    rest = torch.log1p(-student.exp().sum(dim=1).clamp(max=1 - 1e-4))
    p = logprobs.exp()
    expected = (p * student.masked_fill(~inside, 0.0)).sum(dim=1)
    return -(expected + (1 - p.sum(dim=1)).clamp(min=0) * rest).mean()
