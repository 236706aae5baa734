"""Exact verification as tensor operations on the device: what a pass's logits accept of the proposals, and what the target then emits.

Greedy rows compare arg-maxes. Sampled rows follow speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318):
x drawn from q is accepted with min(1, p(x) / q(x)), else a token of norm((p - q)+) is emitted; behind the last accepted token one of p.
Every decision has its own uniform (``backend.randomness``), so that the emitted tokens follow p exactly. Coupled rows compare with what the
request's own noise makes of p (``backend.engines.coupling``).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import torch

from backend.engines.coupling import winner
from backend.engines.processing import WHOLE_VOCABULARY, Columns, process
from backend.ports import Proposal, Sequence
from backend.randomness import Purpose, uniforms
from backend.request import SamplingParams

_NUCLEUS_HEAD = 256


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
    """One sequence's share of a verification: ``position`` is that of the first token decided about, ``tokens`` the proposal's.

    ``committed`` and then ``run`` (a free run so far) are the tokens before ``position``; only options look at them. The first
    ``prompt_tokens`` of them are the prompt.
    """

    sampling: SamplingParams
    position: int
    attempt: int
    tokens: list[int]
    law: Law | None = None
    committed: Seq[int] = ()
    run: Seq[int] = ()
    prompt_tokens: int = 0

    @classmethod
    def of(cls, sequence: Sequence, proposal: Proposal | None) -> Request:
        """Take tokens and law from a proposal behind a sequence, if there is one; only a sampled sequence needs a law."""
        sampling = sequence.sampling
        tokens = proposal.tokens if proposal else []
        law = proposal.probs if proposal and not (sampling.greedy or sampling.coupled) else None
        end = len(sequence.tokens)
        return cls(sampling, end, sequence.attempt, tokens, law, sequence.tokens, prompt_tokens=sequence.prompt_tokens)

    @property
    def rows(self) -> int:
        """Rows of logits: one for each proposed token and one for the token behind them."""
        return len(self.tokens) + 1

    @property
    def reads_scores(self) -> bool:
        """Whether more than the arg-max of the model's own logits is wanted."""
        return not self.sampling.greedy or self.sampling.changes_logits or self.sampling.log_probs


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many proposed tokens are accepted, the column of the token emitted behind them, and all their log-probabilities if wanted."""

    accepted: int
    column: int
    log_probs: list[float] | None = None


def verify(logits: torch.Tensor, requests: Seq[Request], columns: Columns = WHOLE_VOCABULARY) -> list[Verdict]:
    """Return the verdict on each request.

    ``logits`` [rows, S] holds ``Request.rows`` rows a request, in order: row i decides about proposed token i, the last about the bonus.
    """
    firsts = _firsts(requests)
    verdicts = [Verdict(0, 0)] * len(requests)
    plain = [index for index, request in enumerate(requests) if not request.reads_scores]
    if plain:
        for index, verdict in zip(plain, _verify_greedy(logits, [requests[i] for i in plain], [firsts[i] for i in plain]), strict=True):
            verdicts[index] = verdict
    others = [index for index, request in enumerate(requests) if request.reads_scores]
    if others:
        chosen = [requests[index] for index in others]
        rows = _select(logits, [firsts[index] + i for index in others for i in range(requests[index].rows)])
        for index, verdict in zip(others, _verify_scores(scores(rows, chosen, columns), chosen, columns), strict=True):
            verdicts[index] = verdict
    return verdicts


def scores(logits: torch.Tensor, requests: Seq[Request], columns: Columns = WHOLE_VOCABULARY) -> torch.Tensor:
    """Return the logits [rows, S] with every request's options applied, in fp32 (fp64 stays fp64)."""
    changed = any(request.sampling.changes_logits for request in requests)
    wide = logits.to(logits.dtype if logits.dtype == torch.float64 else torch.float32, copy=changed)
    for request, first in zip(requests, _firsts(requests), strict=True):
        if request.sampling.changes_logits:
            before = [*request.committed, *request.run]
            rows = wide[first : first + request.rows]
            process(rows, request.sampling, before, request.position - request.prompt_tokens, request.tokens, columns)
    return wide


def _verify_scores(rows: torch.Tensor, requests: Seq[Request], columns: Columns) -> list[Verdict]:
    """Return the verdicts on requests of any kind from their processed logits."""
    firsts = _firsts(requests)
    verdicts = [Verdict(0, 0)] * len(requests)
    coupled = partial(_verify_coupled, columns)
    rules = [_verify_greedy if r.sampling.greedy else coupled if r.sampling.coupled else _verify_sampled for r in requests]
    for decide in (_verify_greedy, _verify_sampled, coupled):
        chosen = [index for index, rule in enumerate(rules) if rule is decide]
        if chosen:
            found = decide(rows, [requests[index] for index in chosen], [firsts[index] for index in chosen])
            for index, verdict in zip(chosen, found, strict=True):
                verdicts[index] = verdict
    return [_with_log_probs(rows, r, first, v) for r, first, v in zip(requests, firsts, verdicts, strict=True)]


def _with_log_probs(rows: torch.Tensor, request: Request, first: int, verdict: Verdict) -> Verdict:
    """Add log p of the emitted tokens, where wanted: p with options and temperature, before top-k and top-p."""
    if not request.sampling.log_probs:
        return verdict
    emitted = [*request.tokens[: verdict.accepted], verdict.column]
    laws = (rows[first : first + len(emitted)] / (request.sampling.temperature or 1.0)).log_softmax(-1)
    wanted = torch.tensor(emitted, device=rows.device)[:, None]
    return replace(verdict, log_probs=laws.gather(1, wanted)[:, 0].tolist())


def _verify_greedy(rows: torch.Tensor, requests: Seq[Request], firsts: Seq[int]) -> list[Verdict]:
    """``rows`` [any, S] holds the requests' rows at ``firsts``, perhaps among others."""
    best = arg_max(rows)
    verdicts = []
    for request, first in zip(requests, firsts, strict=True):
        accepted = _leading(best[first + i] == token for i, token in enumerate(request.tokens))
        verdicts.append(Verdict(accepted, best[first + accepted]))
    return verdicts


def _verify_coupled(columns: Columns, rows: torch.Tensor, requests: Seq[Request], firsts: Seq[int]) -> list[Verdict]:
    """Race row after row, up to the first proposed token that does not win: a race costs more than a comparison."""
    verdicts = []
    for request, first in zip(requests, firsts, strict=True):
        laws = target_laws(rows[first : first + request.rows], [request.sampling] * request.rows)
        for accepted, law in enumerate(laws):
            column = winner(law, request.sampling.seed, request.position + accepted, columns)
            if accepted == len(request.tokens) or column != request.tokens[accepted]:
                verdicts.append(Verdict(accepted, column))
                break
    return verdicts


def _verify_sampled(rows: torch.Tensor, requests: Seq[Request], firsts: Seq[int]) -> list[Verdict]:
    places = [first + i for request, first in zip(requests, firsts, strict=True) for i in range(request.rows)]
    laws = target_laws(_select(rows, places), [request.sampling for request in requests for _ in range(request.rows)])
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
    drawn = sample(final, requests, Purpose.EMIT, accepted)
    return [Verdict(count, column) for count, column in zip(accepted, drawn, strict=True)]


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


def _select(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return the rows at ``places``, without a copy where these are all of them."""
    return rows if len(places) == len(rows) else rows[places]


def _leading(flags: Iterable[bool]) -> int:
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def _firsts(requests: Seq[Request]) -> list[int]:
    """Return the first row of each request among rows that hold theirs in order."""
    firsts, row = [], 0
    for request in requests:
        firsts.append(row)
        row += request.rows
    return firsts
