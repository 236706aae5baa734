"""Exact verification as tensor operations on the device: what a pass's logits accept of the proposals, and what the target then emits.

Greedy rows compare arg-maxes. Sampled rows follow speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318):
x drawn from q is accepted with min(1, p(x) / q(x)), else a token of norm((p - q)+) is emitted; behind the last accepted token one of p.
Every decision has its own uniform (``backend.randomness``), so that the emitted tokens follow p exactly. Coupled rows compare with what the
request's own noise makes of p (``backend.engines.coupling``).

At a place with several candidates they are tested in turn, each against what the rejections before it have left of p, and the first that is
accepted leads on (SpecInfer's multi-step rule, arXiv 2305.09781); a greedy or coupled row accepts whichever is its own token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from backend.engines.coupling import fastest, winner
from backend.engines.laws import Law, acceptance, arg_max, draw, normalised, residual, target_laws
from backend.engines.processing import WHOLE_VOCABULARY, Columns, process
from backend.engines.trees import ROOT, Tree, leading
from backend.ports import Proposal, Sequence
from backend.randomness import Purpose, uniforms
from backend.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence's share of a verification: ``position`` is that of the first token decided about, ``tokens`` the proposal's.

    ``committed`` and then ``run`` (a free run so far) are the tokens before ``position``; only options look at them. The first
    ``prompt_tokens`` of them are the prompt. Where ``tree`` is set, ``tokens`` are its nodes', and it has the laws.
    """

    sampling: SamplingParams
    position: int
    attempt: int
    tokens: list[int]
    law: Law | None = None
    committed: Seq[int] = ()
    run: Seq[int] = ()
    prompt_tokens: int = 0
    tree: Tree | None = None

    @classmethod
    def of(cls, sequence: Sequence, proposal: Proposal | None) -> Request:
        """Take tokens and laws from a proposal behind a sequence, if there is one; only a sampled sequence needs laws.

        ValueError for a tree with tokens that their law cannot have given.
        """
        sampling = sequence.sampling
        drawn = not (sampling.greedy or sampling.coupled)
        tokens, law, tree = [], None, None
        if proposal is not None and proposal.is_chain:
            tokens, law = proposal.tokens, proposal.probs if drawn else None
        elif proposal is not None:
            tree = Tree.of(proposal, drawn=drawn)
            tokens = tree.tokens
        end = len(sequence.tokens)
        return cls(sampling, end, sequence.attempt, tokens, law, sequence.tokens, prompt_tokens=sequence.prompt_tokens, tree=tree)

    @property
    def rows(self) -> int:
        """Rows of logits: one for each proposed token and one for the token behind them."""
        return len(self.tokens) + 1

    @property
    def row_params(self) -> list[SamplingParams]:
        """How each row's token is drawn."""
        sampling = self.sampling
        if sampling.top_p_decay == 1.0:
            return [sampling] * self.rows
        output = [*self.committed[self.prompt_tokens :], *self.run]
        return [sampling.behind([*output, *self.tokens[:row]]) for row in range(self.rows)]

    @property
    def depth(self) -> int:
        """How many of its tokens could be accepted at the most."""
        return len(self.tokens) if self.tree is None else self.tree.depth

    @property
    def reads_scores(self) -> bool:
        """Whether more than the arg-max of the model's own logits is wanted."""
        return not self.sampling.greedy or self.sampling.changes_logits or self.sampling.reads_log_probs


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many proposed tokens are accepted, the column of the token emitted behind them, and all their log-probabilities if wanted.

    ``top`` are the most likely (column, log-probability) at each of their places if wanted. ``path`` are the accepted nodes of a tree, from
    its root.
    """

    accepted: int
    column: int
    log_probs: list[float] | None = None
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    path: Seq[int] = ()


def verify(logits: torch.Tensor, requests: Seq[Request], columns: Columns = WHOLE_VOCABULARY) -> list[Verdict]:
    """Return the verdict on each request.

    ``logits`` [rows, S] holds ``Request.rows`` rows a request, in order: row i decides about proposed token i, the last about the bonus. Of
    a tree, the first row decides about the root's children, row n + 1 about those of node n.
    """
    firsts = _firsts(requests)
    verdicts = [Verdict(0, 0)] * len(requests)
    chains = []
    for index, request in enumerate(requests):
        if request.tree is None:
            chains.append(index)
        else:
            verdicts[index] = _verify_tree(logits, request, request.tree, firsts[index], columns)
    plain = [index for index in chains if not requests[index].reads_scores]
    if plain:
        for index, verdict in zip(plain, _verify_greedy(logits, [requests[i] for i in plain], [firsts[i] for i in plain]), strict=True):
            verdicts[index] = verdict
    others = [index for index in chains if requests[index].reads_scores]
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


def _verify_tree(logits: torch.Tensor, request: Request, tree: Tree, first: int, columns: Columns) -> Verdict:
    """Walk from the root to an accepted node after another, up to the first place where none of the candidates is: only its rows matter."""
    path: list[int] = []
    tokens: list[int] = []
    log_probs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    while True:
        node = path[-1] if path else ROOT
        here = replace(request, tokens=[], tree=None, position=request.position + len(path), run=tokens)
        row = scores(logits[first + node + 1 : first + node + 2], [here], columns)
        child, column = _choose(row, here, tree, tree.children(node), columns)
        told = _with_log_probs(row, here, 0, Verdict(0, column))
        log_probs += told.log_probs or []
        top += told.top
        if child is None:
            return Verdict(len(path), column, log_probs or None, top, path)
        path.append(child)
        tokens.append(column)


def _choose(row: torch.Tensor, here: Request, tree: Tree, candidates: Seq[int], columns: Columns) -> tuple[int | None, int]:
    """Return the candidate that is accepted for a place (None: none is) and the column of the token there, from scores [1, S]."""
    sampling = here.sampling
    if not sampling.greedy and not sampling.coupled:
        return _test(normalised(target_laws(row, here.row_params))[0], here, tree, candidates)
    if sampling.greedy:
        (column,) = arg_max(row)
    else:
        column = winner(target_laws(row, here.row_params)[0], sampling.seed, here.position, columns)
    return next((node for node in candidates if tree.tokens[node] == column), None), column


def _test(law: torch.Tensor, here: Request, tree: Tree, candidates: Seq[int]) -> tuple[int | None, int]:
    """Test candidates in turn against p = ``law`` [vocab] (float64, sums to one); when all are rejected, draw from what is left of it."""
    numbers = uniforms(here.sampling.seed, here.position, Purpose.ACCEPT, here.attempt, range(len(candidates))).tolist()
    for node, number in zip(candidates, numbers, strict=True):
        token, drawn_from = tree.tokens[node], tree.laws[node]
        q, place, chance = drawn_from or (None, 0, 1.0)
        if number < float(law[token]) / chance:
            return node, token
        law = normalised(residual(law, token, q, place)[None])[0]
    return None, sample(law[None], [here], Purpose.EMIT)[0]


def _with_log_probs(rows: torch.Tensor, request: Request, first: int, verdict: Verdict) -> Verdict:
    """Add log p of the emitted tokens, where wanted: p with options and temperature, before top-k and top-p."""
    if not request.sampling.reads_log_probs:
        return verdict
    emitted = [*request.tokens[: verdict.accepted], verdict.column]
    laws = (rows[first : first + len(emitted)] / (request.sampling.temperature or 1.0)).log_softmax(-1)
    wanted = torch.tensor(emitted, device=rows.device)[:, None]
    verdict = replace(verdict, log_probs=laws.gather(1, wanted)[:, 0].tolist())
    if request.sampling.top_log_probs:
        best = laws.topk(min(request.sampling.top_log_probs, laws.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        verdict = replace(verdict, top=[list(zip(*pair, strict=True)) for pair in pairs])
    return verdict


def _verify_greedy(rows: torch.Tensor, requests: Seq[Request], firsts: Seq[int]) -> list[Verdict]:
    """``rows`` [any, S] holds the requests' rows at ``firsts``, perhaps among others."""
    best = arg_max(rows)
    verdicts = []
    for request, first in zip(requests, firsts, strict=True):
        accepted = leading(best[first + i] == token for i, token in enumerate(request.tokens))
        verdicts.append(Verdict(accepted, best[first + accepted]))
    return verdicts


def _verify_coupled(columns: Columns, rows: torch.Tensor, requests: Seq[Request], firsts: Seq[int]) -> list[Verdict]:
    """Race row after row, up to the first proposed token that does not win: a race costs more than a comparison."""
    verdicts = []
    for request, first in zip(requests, firsts, strict=True):
        laws = target_laws(rows[first : first + request.rows], request.row_params)
        for accepted, law in enumerate(laws):
            column = winner(law, request.sampling.seed, request.position + accepted, columns)
            if accepted == len(request.tokens) or column != request.tokens[accepted]:
                verdicts.append(Verdict(accepted, column))
                break
    return verdicts


def _verify_sampled(rows: torch.Tensor, requests: Seq[Request], firsts: Seq[int]) -> list[Verdict]:
    places = [first + i for request, first in zip(requests, firsts, strict=True) for i in range(request.rows)]
    laws = target_laws(_select(rows, places), [params for request in requests for params in request.row_params])
    firsts = _firsts(requests)
    keys = [(r.sampling.seed, r.position + i, r.attempt) for r in requests for i in range(len(r.tokens))]
    seeds, positions, attempts = zip(*keys, strict=True) if keys else ((), (), ())
    numbers = iter(uniforms(seeds, positions, Purpose.ACCEPT, attempts).tolist())
    accepted = []
    for request, first in zip(requests, firsts, strict=True):
        chances = acceptance(laws[first : first + len(request.tokens)], request.tokens, request.law).tolist()
        accepted.append(leading([next(numbers) < chance for chance in chances]))
    final = normalised(laws[[first + count for first, count in zip(firsts, accepted, strict=True)]])
    for row, (request, count) in enumerate(zip(requests, accepted, strict=True)):
        if count < len(request.tokens):
            final[row] = residual(final[row], request.tokens[count], request.law, count)
    drawn = sample(final, requests, Purpose.EMIT, accepted)
    return [Verdict(count, column) for count, column in zip(accepted, drawn, strict=True)]


def sample(laws: torch.Tensor, requests: Seq[Request], purpose: Purpose, offsets: Seq[int] | None = None, lane: int = 0) -> list[int]:
    """Return one column per row of ``laws``, drawn with the uniform of its request at its position plus the row's offset."""
    positions = [request.position + offset for request, offset in zip(requests, offsets or [0] * len(requests), strict=True)]
    numbers = uniforms([r.sampling.seed for r in requests], positions, purpose, [r.attempt for r in requests], lane)
    columns: list[int] = draw(laws, torch.from_numpy(numbers).to(laws.device)).tolist()
    return columns


def sample_more(law: torch.Tensor, request: Request, lane: int, count: int) -> list[int]:
    """Return ``count`` further candidates for a place: columns drawn from ``law`` [S] independently of the first one, and of each other."""
    lanes = range(lane + 1, lane + 1 + count)
    numbers = uniforms(request.sampling.seed, request.position, Purpose.PROPOSE, request.attempt, lanes)
    columns: list[int] = draw(law[None], torch.from_numpy(numbers).to(law.device)[None])[0].tolist()
    return columns


def runners_up(row: torch.Tensor, request: Request, columns: Columns, best: int, count: int) -> list[int]:
    """Return the columns that a greedy or coupled draft would choose after ``best``, from its logits [1, S]."""
    wide = scores(row, [request], columns)
    sampling = request.sampling
    if sampling.coupled:
        found = fastest(target_laws(wide, request.row_params)[0], sampling.seed, request.position, columns, count + 1)
    else:
        found = wide[0].topk(min(count + 1, wide.shape[1])).indices.tolist()
    return [column for column in found if column != best][:count]


def _select(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return the rows at ``places``, without a copy where these are all of them."""
    return rows if len(places) == len(rows) else rows[places]


def _firsts(requests: Seq[Request]) -> list[int]:
    """Return the first row of each request among rows that hold theirs in order."""
    firsts, row = [], 0
    for request in requests:
        firsts.append(row)
        row += request.rows
    return firsts
