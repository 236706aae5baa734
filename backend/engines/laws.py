"""Laws of the next token as tensors: made of logits, drawn from, and what is left of one when a token was rejected."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from backend.request import SamplingParams

_NUCLEUS_HEAD = 256


@dataclass(frozen=True, slots=True)
class Law:
    """The law q that proposed tokens were drawn from: ``probs`` [k, S], and the token of each column (None: column = token)."""

    probs: torch.Tensor
    token_ids: torch.Tensor | None = None

    def of(self, tokens: Seq[int], places: Seq[int] | None = None) -> torch.Tensor:
        """Return q(token) [len(tokens)] in float64, of row i for token i, or of row ``places[i]``.

        ValueError for a token that the law cannot have given.
        """
        rows = range(len(tokens)) if places is None else places
        if tokens and max(rows) >= len(self.probs):
            raise ValueError(f"a law of {len(self.probs)} rows cannot have given {len(tokens)} tokens")
        wanted = torch.tensor([list(rows), tokens], dtype=torch.int64, device=self.probs.device)
        if self.token_ids is None:
            found = self.probs[wanted[0], wanted[1]].double()
        else:
            found = (self.probs[wanted[0]] * (self.token_ids == wanted[1][:, None])).sum(-1, dtype=torch.float64)
        chances = found / self.probs.sum(-1, dtype=torch.float64)[wanted[0]]
        if not bool((chances > 0).all()):
            raise ValueError(f"proposed tokens {list(tokens)} have probability 0 under the law that they are said to come from")
        return chances

    def dense(self, row: int, vocab_size: int) -> torch.Tensor:
        """Return row ``row`` over the whole vocabulary [vocab_size] in float64."""
        probs = normalised(self.probs[row : row + 1])[0]
        if self.token_ids is None:
            return probs
        return probs.new_zeros(vocab_size).index_copy_(0, self.token_ids, probs)


def acceptance(laws: torch.Tensor, tokens: Seq[int], law: Law | None) -> torch.Tensor:
    """Return p(x) / q(x) [k] (float64; accept when a uniform is below it) for tokens x under p = ``laws`` [k, vocab].

    Without a law q is a point mass on x (a greedy draft or lookup), and the chance is p(x).
    """
    if not tokens:
        return laws.new_zeros(0)
    found = laws.gather(1, torch.tensor(tokens, device=laws.device)[:, None])[:, 0]
    chances = found.double() / laws.sum(-1, dtype=torch.float64)
    return chances if law is None else chances / law.of(tokens)


def residual(target: torch.Tensor, token: int, law: Law | None, row: int) -> torch.Tensor:
    """Return the law [vocab] (not normalised) of the token emitted in place of the rejected ``token``, number ``row`` of its proposal.

    It is (p - q)+, which for a point mass is p without the token. Without mass (p = q but for rounding) it is p itself: then a rejection
    has no probability of its own.
    """
    if law is None:
        rest = target.clone()
        rest[token] = 0.0
    else:
        rest = (target - law.dense(row, len(target))).clamp_(min=0.0)
    return rest if float(rest.sum()) > 0.0 else target


def target_laws(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Return the law [rows, vocab] each row is to be sampled from: temperature first, then top-k, then top-p (as transformers does).

    fp64 logits give fp64 probabilities, all others fp32. Top-k keeps ties with the k-th token, top-p with the one that crosses the
    threshold.
    """
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    device = logits.device
    temperature = torch.tensor([param.temperature for param in params], dtype=wide, device=device)
    scores = logits.to(wide)
    scores = (scores - scores.amax(-1, keepdim=True)).div_(temperature[:, None])  # the greatest is 0: no temperature overflows it
    vocab = scores.shape[-1]
    limits = [min(param.top_k, vocab) or vocab for param in params]
    if min(limits) < vocab:
        last = torch.tensor(limits, device=device)[:, None] - 1
        widest = max((limit for limit in limits if limit < vocab), default=1)
        best = scores.topk(widest).values
        threshold = best.gather(1, last.clamp(max=widest - 1)).masked_fill(last >= vocab - 1, -torch.inf)
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    nuclei = [row for row, param in enumerate(params) if param.top_p < 1.0]
    laws = scores.softmax(-1)
    if nuclei:
        laws[nuclei] = _nucleus(laws[nuclei], torch.tensor([params[row].top_p for row in nuclei], dtype=wide, device=device))
    return laws


def _nucleus(laws: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what is less probable than the most probable tokens that together reach ``top_p`` [rows]; rows stay unnormalised.

    A nucleus is mostly small, and sorting a whole vocabulary costs 30 times as much as finding its head.
    """
    width, vocab = min(_NUCLEUS_HEAD, laws.shape[-1]), laws.shape[-1]
    thresholds, reached = _crossing(laws.topk(width).values, top_p)
    if width < vocab and not bool(reached.all()):
        beyond = ~reached
        thresholds[beyond] = _crossing(laws[beyond].sort(dim=-1, descending=True).values, top_p[beyond])[0]
    return laws.masked_fill_(laws < thresholds[:, None], 0.0)


def _crossing(ordered: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probability [rows] at which descending rows reach ``top_p`` and whether they do."""
    total = ordered.cumsum(-1)
    count = (total - ordered < top_p[:, None]).sum(-1).clamp_(min=1)
    return ordered.gather(1, count[:, None] - 1)[:, 0], total[:, -1] >= top_p


def normalised(laws: torch.Tensor) -> torch.Tensor:
    """Return rows in float64 that sum to one: the law that ``draw`` samples from."""
    wide = laws.double()
    return wide / wide.sum(-1, keepdim=True)


def arg_max(logits: torch.Tensor) -> list[int]:
    """Return the column of each row's greatest logit, the first of equals. (NumPy's is 4 to 17 times as fast on CPUs.)"""
    columns: list[int]
    if logits.device.type == "cpu":
        columns = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy().argmax(-1).tolist()
    else:
        columns = logits.argmax(-1).tolist()
    return columns


def draw(laws: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the distribution function of each row (any positive mass) at uniforms in [0, 1) [rows] or [rows, n]: column indices.

    Sums are float64; a column without probability is never chosen, whatever the rounding.
    """
    cumulative = laws.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    heights = torch.minimum(numbers.view(len(laws), -1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, heights, right=True).view_as(numbers)
