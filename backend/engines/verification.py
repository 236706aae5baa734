"""Exact verification as tensor operations on the device: what a pass's logits accept of the proposals, and what the target then emits.

Greedy rows compare arg-maxes. Sampled rows follow speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318):
x drawn from q is accepted with min(1, p(x) / q(x)), else a token of norm((p - q)+) is emitted; behind the last accepted token one of p.
Every decision has its own uniform (``backend.randomness``), so that the emitted tokens follow p exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from backend.ports import Proposal
from backend.randomness import Purpose, uniforms
from backend.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Law:
    """The law q that proposed tokens were drawn from: ``probs`` [k, S], and the token of each column (None: column = token)."""

    probs: torch.Tensor
    token_ids: torch.Tensor | None = None

    def of(self, tokens: Seq[int]) -> torch.Tensor:
        """Return q(token) [len(tokens)] in float64, row i for token i; ValueError for a token that the law cannot have given."""
        if len(tokens) > len(self.probs):
            raise ValueError(f"a law of {len(self.probs)} rows cannot have given {len(tokens)} tokens")
        rows = self.probs[: len(tokens)]
        wanted = torch.tensor(tokens, dtype=torch.int64, device=rows.device)[:, None]
        found = rows.gather(1, wanted) if self.token_ids is None else rows * (self.token_ids == wanted)
        chances = found.sum(-1, dtype=torch.float64) / rows.sum(-1, dtype=torch.float64)
        if not bool((chances > 0).all()):
            raise ValueError(f"proposed tokens {list(tokens)} have probability 0 under the law that they are said to come from")
        return chances

    def dense(self, row: int, vocab_size: int) -> torch.Tensor:
        """Return row ``row`` over the whole vocabulary [vocab_size] in float64."""
        probs = normalised(self.probs[row : row + 1])[0]
        if self.token_ids is None:
            return probs
        return probs.new_zeros(vocab_size).index_copy_(0, self.token_ids, probs)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence's share of a verification: ``position`` is that of the first token decided about, ``tokens`` the proposal's."""

    sampling: SamplingParams
    position: int
    attempt: int
    tokens: list[int]
    law: Law | None = None

    @classmethod
    def of(cls, sampling: SamplingParams, position: int, attempt: int, proposal: Proposal | None) -> Request:
        """Take tokens and law from a proposal, if there is one; a greedy sequence needs no law."""
        if proposal is None:
            return cls(sampling, position, attempt, [])
        return cls(sampling, position, attempt, proposal.tokens, None if sampling.greedy else proposal.probs)


def verify(logits: torch.Tensor, requests: Seq[Request]) -> list[tuple[int, int]]:
    """Return (accepted, token emitted behind them) of each request.

    ``logits`` [rows, vocab] holds len(tokens) + 1 rows a request, in order: row i decides about proposed token i, the last about the bonus.
    """
    firsts = _firsts(requests)
    results: list[tuple[int, int]] = [(0, 0)] * len(requests)
    greedy = [index for index, request in enumerate(requests) if request.sampling.greedy]
    if greedy:
        best = arg_max(logits)
        for index in greedy:
            tokens, first = requests[index].tokens, firsts[index]
            accepted = _leading(best[first + i] == token for i, token in enumerate(tokens))
            results[index] = accepted, best[first + accepted]
    sampled = [index for index, request in enumerate(requests) if not request.sampling.greedy]
    if sampled:
        chosen = [requests[index] for index in sampled]
        rows = [firsts[index] + i for index in sampled for i in range(len(requests[index].tokens) + 1)]
        laws = target_laws(logits[rows], [request.sampling for request in chosen for _ in range(len(request.tokens) + 1)])
        for index, result in zip(sampled, _verify_sampled(laws, chosen), strict=True):
            results[index] = result
    return results


def _verify_sampled(laws: torch.Tensor, requests: Seq[Request]) -> list[tuple[int, int]]:
    firsts = _firsts(requests)
    keys = [(r.sampling.seed, r.position + i, r.attempt) for r in requests for i in range(len(r.tokens))]
    seeds, positions, attempts = zip(*keys, strict=True) if keys else ((), (), ())
    numbers = iter(uniforms(seeds, positions, Purpose.ACCEPT, attempts).tolist())
    accepted = []
    for request, first in zip(requests, firsts, strict=True):
        chances = acceptance(laws[first : first + len(request.tokens)], request.tokens, request.law).tolist()
        accepted.append(_leading([next(numbers) < chance for chance in chances]))
    final = normalised(laws[[first + count for first, count in zip(firsts, accepted, strict=True)]])
    for row, (request, count) in enumerate(zip(requests, accepted, strict=True)):
        if count < len(request.tokens):
            final[row] = residual(final[row], request.tokens[count], request.law, count)
    return list(zip(accepted, sample(final, requests, Purpose.EMIT, accepted), strict=True))


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

    fp64 logits give fp64 probabilities, all others fp32. Top-k keeps ties with the k-th; top-p keeps the token that crosses the threshold.
    """
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    device = logits.device
    temperature = torch.tensor([param.temperature for param in params], dtype=wide, device=device)
    scores = logits.to(wide) / temperature[:, None]
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
    """Zero what lies behind the most probable tokens that together reach ``top_p`` [rows]; rows stay unnormalised."""
    ordered, order = torch.sort(laws, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = before < top_p[:, None]
    keep[:, 0] = True
    return laws * torch.zeros_like(keep).scatter_(1, order, keep)


def normalised(laws: torch.Tensor) -> torch.Tensor:
    """Return rows in float64 that sum to one: the law that ``draw`` samples from."""
    wide = laws.double()
    return wide / wide.sum(-1, keepdim=True)


def sample(laws: torch.Tensor, requests: Seq[Request], purpose: Purpose, offsets: Seq[int] | None = None) -> list[int]:
    """Return one column per row of ``laws``, drawn with the uniform of its request at its position plus the row's offset."""
    positions = [request.position + offset for request, offset in zip(requests, offsets or [0] * len(requests), strict=True)]
    numbers = uniforms([r.sampling.seed for r in requests], positions, purpose, [r.attempt for r in requests])
    columns: list[int] = draw(laws, torch.from_numpy(numbers).to(laws.device)).tolist()
    return columns


def arg_max(logits: torch.Tensor) -> list[int]:
    """Return the column of each row's greatest logit, the first of equals. (NumPy's is 4 to 17 times as fast on CPUs.)"""
    columns: list[int]
    if logits.device.type == "cpu":
        columns = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy().argmax(-1).tolist()
    else:
        columns = logits.argmax(-1).tolist()
    return columns


def draw(laws: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the distribution function of each row (any positive mass) at a uniform in [0, 1) [rows]: column indices [rows].

    Sums are float64; a column without probability is never chosen, whatever the rounding.
    """
    cumulative = laws.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    heights = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, heights[:, None], right=True)[:, 0]


def _leading(flags: Iterable[bool]) -> int:
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def _firsts(requests: Seq[Request]) -> list[int]:
    """Return the first row of each request among rows that hold len(tokens) + 1 of each."""
    firsts, row = [], 0
    for request in requests:
        firsts.append(row)
        row += len(request.tokens) + 1
    return firsts
