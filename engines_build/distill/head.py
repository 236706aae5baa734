"""Train a head (``backend.engines.head``) on the states that the target had while it answered, and
score it.

Every place of an answer is a start: from the target's states there the head is unrolled over the
tokens that followed, and each of its distributions is compared with the target's own. The first
part of the training looks one token ahead, the rest several, where the head goes on from what it
made itself, as it does when it drafts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from backend.engines.head.folder import WEIGHTS_FILE, config_json
from backend.engines.head.network import HeadNetwork
from backend.storage.manifest import read_manifest, vocabulary_sha256, weights_sha256
from engines_build.distill.corpora import WORKLOADS
from engines_build.distill.generate import Shards

POSITIONS = range(1, 9)
"""Places in a proposal whose acceptance is reported."""


@dataclass(slots=True)
class HeadSample:
    """A prompt with its answer; tensors of ``answer`` rows begin at the prompt's last token."""

    tokens: Tensor
    """All tokens [n], the prompt's too."""
    prompt_tokens: int
    workload: str
    greedy: bool
    top_ids: Tensor
    """The target's likeliest tokens [answer, TOP_K]."""
    top_logprobs: Tensor
    """The log probabilities of ``top_ids`` [answer, TOP_K]."""
    features: Tensor
    """The target's states [answer, layers, hidden]."""


def load_head_samples(shards: Shards, layers: int) -> list[HeadSample]:
    """Read every answer of at least two tokens whose features of ``layers`` layers were kept (0:
    those without features). Raises ValueError without any.
    """
    names, samples = list(WORKLOADS), []
    for path in shards.paths():
        t = load_file(path)
        places = int((t["lengths"] - t["prompt_lengths"]).sum())
        features = t.get("features", torch.zeros(places, 0, 0))
        if features.shape[1] != layers:
            continue
        lengths, prompts = t["lengths"].tolist(), t["prompt_lengths"].tolist()
        counts = [n - 1 for n in lengths]
        columns = (
            t["tokens"].split(lengths),
            prompts,
            t["workloads"].tolist(),
            t["sampled"].tolist(),
            [part[p - 1 :] for part, p in zip(t["top_ids"].split(counts), prompts, strict=True)],
            [
                part[p - 1 :]
                for part, p in zip(t["top_logprobs"].split(counts), prompts, strict=True)
            ],
            features.split([n - p for n, p in zip(lengths, prompts, strict=True)]),
        )
        samples += [
            HeadSample(a, b, names[c], not d, e, f, g)
            for a, b, c, d, e, f, g in zip(*columns, strict=True)
            if len(g) > 1
        ]
    if not samples:
        raise ValueError(f"work: no answer with features of {layers} layers in {shards.folder}")
    return samples


@dataclass(slots=True)
class Starts:
    """The starts of a batch of answers, and what the head may propose there.

    A row is the state of one answer before one of its tokens. The head's columns are the static
    tokens, and then ``context``.
    """

    answer: Tensor
    """[rows] the number of the answer."""
    first: Tensor
    """[rows] the number of the row's token in all tokens of its answer."""
    place: Tensor
    """[rows] the number of the row's state in all states of all answers."""
    remaining: Tensor
    """[rows] how many tokens come after the row's."""
    context: Tensor
    """[C]: the tokens of the answers' texts that are not static."""
    first_seen: Tensor
    """[answers, C]: the number of the first token that is such a one."""


def starts_of(samples: Sequence[HeadSample], static: Tensor) -> Starts:
    """Return the starts of answers; ``static`` bool[vocab] says which tokens have rows anyway."""
    device = static.device
    prompts = torch.tensor([s.prompt_tokens for s in samples], device=device)
    lengths = torch.tensor([len(s.tokens) for s in samples], device=device)
    tokens = torch.cat([s.tokens for s in samples]).long()
    text = torch.arange(len(samples), device=device).repeat_interleave(lengths)
    number = torch.arange(len(tokens), device=device) - (lengths.cumsum(0) - lengths)[text]
    begins = (number >= prompts[text]) & (number < lengths[text] - 1)
    answer, first = text[begins], number[begins]
    states = lengths - prompts
    place = (states.cumsum(0) - states)[answer] + first - prompts[answer]
    context = tokens[~static[tokens]].unique()
    columns = torch.full((len(static),), -1, device=device)
    columns[context] = torch.arange(len(context), device=device)
    columns = columns[tokens]
    exists = columns >= 0
    first_seen = torch.full((len(samples) * len(context),), 1 << 30, device=device)
    at = text[exists] * len(context) + columns[exists]
    first_seen.scatter_reduce_(0, at, number[exists], reduce="amin")
    first_seen = first_seen.view(len(samples), len(context))
    return Starts(answer, first, place, lengths[answer] - 1 - first, context, first_seen)


class Unrolls(Protocol):
    """Runs a network over the tokens of answers, teacher-forced."""

    @property
    def network(self) -> nn.Module:
        """The network that is trained."""
        ...

    @property
    def shortlist(self) -> Tensor:
        """The tokens that have rows in any case."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        ...

    def unroll(self, samples: Sequence[HeadSample], steps: int) -> Any:
        """Yield by step the logits [rows, columns] of the starts that go so far, which starts these
        are, and the batch's ``Starts``, whose columns they are. A token that a start's text has not
        had yet is far below the rest.
        """
        ...


class Unroller:
    """``Unrolls`` of a recurrent head."""

    def __init__(self, network: HeadNetwork, embedding: Tensor, head: Tensor, shortlist: Tensor):
        """``embedding`` and ``head`` [vocab, hidden] are the target's; ``shortlist`` [S] the tokens
        that have rows in any case.
        """
        self.network, self.embedding, self.head = network, embedding, head
        self.vocab_size = len(head)
        self.shortlist, self.rows = shortlist, head[shortlist]
        self.static = torch.zeros(len(head), dtype=torch.bool, device=head.device)
        self.static[shortlist] = True

    def unroll(self, samples: Sequence[HeadSample], steps: int) -> Any:
        """Yield logits [rows, S + C] by step (``Unrolls``)."""
        starts = starts_of(samples, self.static)
        tokens = nn.utils.rnn.pad_sequence([s.tokens.long() for s in samples], batch_first=True)
        rows = torch.cat([self.rows, self.head[starts.context]])
        alive = torch.arange(len(starts.answer), device=tokens.device)
        features = torch.cat([s.features for s in samples])[starts.place]
        state = self.network.begin(features.float())
        for step in range(steps):
            lasts = starts.remaining[alive] > step
            alive, state = alive[lasts], state[lasts]
            if not len(alive):
                return
            at = starts.first[alive] + step
            state, vectors = self.network.step(
                state, self.embedding[tokens[starts.answer[alive], at]]
            )
            logits = vectors @ rows.T
            unseen = starts.first_seen[starts.answer[alive]] > at[:, None]
            logits[:, len(self.shortlist) :].masked_fill_(unseen, -1e4)
            yield logits, alive, starts


@torch.no_grad()
def evaluate_head(unroller: Unrolls, samples: Sequence[HeadSample]) -> dict[str, dict[str, float]]:
    """Score a head on greedy answers, by workload.

    ``accepted_j``: of the places whose first j - 1 proposed tokens are the target's, the share
    whose j-th is. ``coverage``: share of tokens that it can propose. ``tokens_per_step_k``: a
    greedy chain of k. ``top_w``: the target's token is among the first w. ``claimed`` and
    ``held``: mean probability of the first candidate, and how often it was the token.
    """
    hits_of: dict[str, list[list[Tensor]]] = defaultdict(list)
    extra: dict[str, list[list[Tensor]]] = defaultdict(list)
    for s in samples:
        if not s.greedy:
            continue
        hits = []
        for ahead, (logits, scored, starts) in enumerate(unroller.unroll([s], len(POSITIONS))):
            following = s.tokens.long()[starts.first[scored] + ahead + 1]
            ids = torch.cat([unroller.shortlist, starts.context])
            order = logits.topk(4, dim=1).indices
            hit = ids[order] == following[:, None]
            hits.append(hit[:, 0].cpu())
            if ahead == 0:
                there = (ids == following[:, None]) & (logits > -1e3)
                claimed = logits.softmax(dim=1).amax(dim=1)
                extra[s.workload].append([hit.cpu(), there.any(dim=1).cpu(), claimed.cpu()])
        hits_of[s.workload].append(hits)
    scores = {}
    for workload, texts in sorted(hits_of.items()):
        score = {"tokens": float(sum(len(hits[0]) for hits in texts))}
        for place in range(len(POSITIONS)):
            alive, matched = 0, 0
            for hits in texts:
                if place < len(hits):
                    rows = len(hits[place])
                    before = torch.ones(rows, dtype=torch.bool)
                    for earlier in hits[:place]:
                        before &= earlier[:rows]
                    alive += int(before.sum())
                    matched += int((before & hits[place]).sum())
            score[f"accepted_{place + 1}"] = matched / alive if alive else math.nan
        for k in (2, 4, 8):
            score[f"tokens_per_step_{k}"] = _tokens_per_step(texts, k)
        first = [torch.cat(column) for column in zip(*extra[workload], strict=True)]
        for width in (2, 3, 4):
            score[f"top_{width}"] = float(first[0][:, :width].any(dim=1).float().mean())
        score["coverage"] = float(first[1].float().mean())
        score["claimed"] = float(first[2].mean())
        score["held"] = float(first[0][:, 0].float().mean())
        scores[workload] = score
    return scores


def _tokens_per_step(texts: Sequence[Sequence[Tensor]], k: int) -> float:
    """Return the mean tokens of a greedy step that proposes ``k``, along the target's own text.
    A text has, by place ahead, bool[n]: after which of its tokens the head's is the target's.
    """
    tokens = steps = 0
    for hits in texts:
        at, end = 0, len(hits[0])
        while at < end:
            run = 0
            while run < k and run < len(hits) and at < len(hits[run]) and bool(hits[run][at]):
                run += 1
            at += run + 1
            steps += 1
        tokens += at
    return tokens / max(steps, 1)


def export_head(network: HeadNetwork, shortlist: Tensor, target: Path, out: Path) -> None:
    """Write a head's folder (``backend.engines.head.folder``) for the target in a folder;
    ``shortlist`` int64[S] are the tokens of its rows.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().bfloat16().contiguous() for n, t in network.state_dict().items()}
    tensors["token_ids"] = shortlist.cpu().int()
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    text = config_json(
        network.config,
        vocabulary_sha256=vocabulary_sha256(target / "tokenizer.json"),
        target_sha256=weights_sha256(target),
        max_position_embeddings=read_manifest(target).max_context_tokens,
    )
    (out / "config.json").write_text(text, encoding="utf-8")
