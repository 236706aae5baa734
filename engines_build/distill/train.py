"""Train a draft on the teacher's kept logits and score it: agreement with the teacher and tokens
per step on held-out prompts.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engines_build.distill.corpora import WORKLOADS
from engines_build.distill.generate import Shards

if TYPE_CHECKING:  # heads are trained without it
    from transformers import LlamaForCausalLM

PROMPT_SHARE = 0.25
"""Share of the prompt positions trained on beside all generated ones (the draft is never asked
about them; they teach it the language).
"""

POSITIONS = range(1, 9)
"""Places in a proposal whose acceptance is reported."""

EMBEDDING_RMS = 0.3
HEAD_RMS = 0.06
_RISE_STEPS = 40
_STEPS_PER_LINE = 50
_CHECKPOINT_S = 240.0
_PLAIN_TOKENS, _PLAIN_PIECES = 256, 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What a draft is made of; ``shortlist`` is the number of tokens that it can propose."""

    hidden: int
    layers: int
    head_dim: int
    shortlist: int


def shape_of(draft: LlamaForCausalLM) -> Shape:
    """Return what a draft is made of."""
    config = draft.config
    return Shape(
        config.hidden_size, config.num_hidden_layers, config.head_dim, draft.lm_head.out_features
    )


@dataclass(slots=True)
class Sample:
    """A sequence [n] and the teacher's law behind each token but the last: ids and log
    probabilities [n-1, TOP_K].
    """

    tokens: Tensor
    prompt_tokens: int
    workload: str
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def own_laws(self) -> tuple[Tensor, Tensor]:
        """The laws that the teacher's own text was drawn from."""
        own = slice(self.prompt_tokens - 1, None)
        return self.top_ids[own], self.top_logprobs[own]


def load_samples(shards: Shards) -> list[Sample]:
    """Read every sequence of ``shards``; raises ValueError when there is none."""
    names, samples = list(WORKLOADS), []
    for path in shards.paths():
        t = load_file(path)
        lengths = t["lengths"].tolist()
        laws = [n - 1 for n in lengths]
        columns = (
            t["tokens"].split(lengths),
            t["prompt_lengths"].tolist(),
            t["workloads"].tolist(),
            t["top_ids"].split(laws),
            t["top_logprobs"].split(laws),
        )
        samples += [Sample(a, b, names[c], d, e) for a, b, c, d, e in zip(*columns, strict=True)]
    if not samples:
        raise ValueError(f"work: no sequence in {shards.folder}; generate first")
    return samples


def plain_samples(texts: list[str], tokenizer: Any, tokens: int, seed: int) -> list[Sample]:
    """Cut the beginnings of ``texts`` into samples of ``_PLAIN_TOKENS``, about ``tokens`` in all,
    whose law is the next token itself.
    """
    rng, samples = random.Random(seed), []
    for text in rng.sample(texts, len(texts)):
        for piece in torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32).split(
            _PLAIN_TOKENS
        )[:_PLAIN_PIECES]:
            if len(piece) > 8 and tokens > 0:
                samples.append(
                    Sample(
                        piece,
                        1,
                        "text",
                        piece[1:, None],
                        torch.zeros(len(piece) - 1, 1, dtype=torch.half),
                    )
                )
                tokens -= len(piece)
    return samples


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


def build(
    shape: Shape, embedding: Tensor, shortlist: Tensor, tokenizer: Any, positions: int
) -> LlamaForCausalLM:
    """Make an untrained draft whose embedding and head are the teacher's ``embedding`` [vocab, d],
    projected onto its leading directions.

    ``positions`` is the teacher's longest context. The projection (principal components, uncentred)
    keeps which tokens are alike, most of what a small budget cannot learn.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape.hidden // shape.head_dim
    config = LlamaConfig(
        vocab_size=len(embedding),
        hidden_size=shape.hidden,
        intermediate_size=round(2.7 * shape.hidden / 32) * 32,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    draft = LlamaForCausalLM(config).float()
    draft.lm_head = nn.Linear(shape.hidden, len(shortlist), bias=False)
    with torch.no_grad():
        table = embedding.float().cpu()
        projected = (
            table
            @ torch.linalg.eigh(table.T @ table).eigenvectors[
                :, -min(shape.hidden, table.shape[1]) :
            ]
        )
        projected = nn.functional.pad(projected, (0, shape.hidden - projected.shape[1]))
        projected /= projected.square().mean().sqrt()
        draft.model.embed_tokens.weight.copy_(EMBEDDING_RMS * projected)
        draft.lm_head.weight.copy_(HEAD_RMS * projected[shortlist])
    return draft


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
    embedding_rate: float = 0.3
    """Learning rate of the input embedding relative to the rest: a draft's is the teacher's, and a
    free one learns the prompts by heart.
    """


class Trainer:
    """Distils ``samples`` into a draft (or trains a model on plain samples), from the checkpoint in
    ``run`` on if there is one.

    ``run`` names the checkpoint ``run.pt`` and the curve ``run.jsonl``: step, tokens read, loss
    (nats a position), agreement, all means of the steps since the line before.
    """

    def __init__(
        self,
        draft: LlamaForCausalLM,
        shortlist: Tensor,
        samples: list[Sample],
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

    def _optimisers(self, budget: Budget) -> list[torch.optim.Optimizer]:
        """Return what takes the steps; a group's ``rate`` is relative to the budget's."""
        embedding = self.draft.model.embed_tokens.weight
        others = [p for p in self.draft.parameters() if p is not embedding]
        groups = [
            {"params": [embedding], "rate": budget.embedding_rate, "weight_decay": 0.0},
            {"params": others, "rate": 1.0},
        ]
        return [adamw(groups, budget)]

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

    def _batches(self, batch: int, first: int) -> Iterator[tuple[int, list[Sample]]]:
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
        self, step: int, samples: list[Sample], optimisers: list[torch.optim.Optimizer]
    ) -> dict[str, float]:
        """Take one step; return what the curve shows of it."""
        loss, seen = self._loss(step, samples)
        self.draft.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        return seen

    def _loss(self, step: int, samples: list[Sample]) -> tuple[Tensor, dict[str, float]]:
        """Return what to make less; and, to show, it and the share of positions where draft and law
        choose the same token.
        """
        noise = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        hidden = hidden_states(self.draft, samples, self.device)
        wanted = [torch.arange(len(s.tokens) - 1) >= s.prompt_tokens - 1 for s in samples]
        wanted = [w | (torch.rand(len(w), generator=noise) < PROMPT_SHARE) for w in wanted]
        x = torch.cat([h[: len(w)][w.to(self.device)] for h, w in zip(hidden, wanted, strict=True)])
        places = self.index[
            torch.cat([s.top_ids[w] for s, w in zip(samples, wanted, strict=True)]).long()
        ].to(self.device)
        logprobs = (
            torch.cat([s.top_logprobs[w] for s, w in zip(samples, wanted, strict=True)])
            .float()
            .to(self.device)
        )
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.draft.lm_head(x)
        loss = top_cross_entropy(logits.float(), places, logprobs)
        agreement = (logits.argmax(dim=1) == places[:, 0]).float().mean()
        return loss, {"loss": loss.item(), "agreement": agreement.item()}


def adamw(groups: list[dict[str, Any]], budget: Budget) -> torch.optim.AdamW:
    """Return AdamW for groups of parameters."""
    rates = {"lr": budget.learning_rate, "betas": (0.9, 0.98), "weight_decay": 0.1}
    return torch.optim.AdamW(groups, **rates, fused=True)


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


def hidden_states(draft: LlamaForCausalLM, samples: list[Sample], device: str) -> Tensor:
    """Last hidden states [batch, longest, hidden]; the padding lies behind the texts, where causal
    attention does not look.
    """
    tokens = nn.utils.rnn.pad_sequence([s.tokens.long() for s in samples], batch_first=True).to(
        device
    )
    with torch.autocast(device, torch.bfloat16):
        return draft.model(input_ids=tokens, use_cache=False).last_hidden_state


@torch.no_grad()
def evaluate(
    draft: LlamaForCausalLM,
    shortlist: Tensor,
    samples: list[Sample],
    device: str,
    lengths: tuple[int, ...] = (2, 4, 8),
) -> dict[str, dict[str, float]]:
    """Score a draft on greedy answers of the teacher, by workload.

    ``agreement`` is the share of positions where both would choose the same token,
    ``tokens_per_step_k`` the mean number of tokens a greedy step with k proposed tokens emits,
    ``overlap`` the mean sum of min(p, q): the acceptance when sampling at temperature 1.
    """
    matches: dict[str, list[Tensor]] = defaultdict(list)
    overlaps: dict[str, list[Tensor]] = defaultdict(list)
    index = torch.full((draft.config.vocab_size,), -1, dtype=torch.long)
    index[shortlist] = torch.arange(len(shortlist))
    for s in samples:
        own = slice(s.prompt_tokens - 1, len(s.tokens) - 1)
        q = draft.lm_head(hidden_states(draft, [s], device)[0, own].float()).cpu().softmax(dim=1)
        matches[s.workload].append(shortlist[q.argmax(dim=1)] == s.top_ids[own, 0])
        places = index[s.top_ids[own].long()]
        overlap = torch.minimum(q.gather(1, places.clamp(min=0)), s.top_logprobs[own].float().exp())
        overlaps[s.workload].append(overlap.masked_fill(places < 0, 0.0).sum(dim=1))
    scores = {}
    for workload, runs in sorted(matches.items()):
        found = {
            "tokens": float(sum(len(r) for r in runs)),
            "agreement": torch.cat(runs).float().mean().item(),
        }
        found["overlap"] = torch.cat(overlaps[workload]).mean().item()
        found |= {f"tokens_per_step_{k}": tokens_per_step(runs, k) for k in lengths}
        scores[workload] = found | {
            f"accepted_{j}": share
            for j, share in zip(POSITIONS, accepted_by_position(runs), strict=True)
        }
    return scores


def greedy_steps(match: list[bool], k: int) -> list[int]:
    """Return how many of ``k`` proposed tokens each greedy step accepts, given where the draft's
    choice equals the teacher's.
    """
    accepted, at = [], 0
    while at < len(match):
        run = next(
            (i for i, hit in enumerate(match[at : at + k]) if not hit), min(k, len(match) - at)
        )
        accepted.append(run)
        at += run + 1
    return accepted


def tokens_per_step(matches: list[Tensor], k: int) -> float:
    """Mean tokens emitted by a greedy step that proposes ``k``, given where the draft's choice
    equals the teacher's along its own text.
    """
    return sum(len(match) for match in matches) / sum(
        len(greedy_steps(match.tolist(), k)) for match in matches
    )


def accepted_by_position(matches: list[Tensor]) -> list[float]:
    """Share of greedy steps that accept the first, second, ... token of a proposal as long as
    ``POSITIONS``.
    """
    steps = [run for match in matches for run in greedy_steps(match.tolist(), len(POSITIONS))]
    return [sum(run >= j for run in steps) / len(steps) for j in POSITIONS]


def run_name(shape: Shape, sequences: int, tokens: int, seed: int) -> str:
    """Name a training run by what its checkpoint depends on."""
    return "-".join(
        f"{k}{v}"
        for k, v in {
            **asdict(shape),
            "sequences": sequences,
            "tokens": tokens,
            "seed": seed,
        }.items()
    )
