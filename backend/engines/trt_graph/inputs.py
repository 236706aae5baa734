"""Inputs of a compiled verification besides logits, made of requests, and verdicts of its outputs.

Names and meanings of the tensors are those of ``engines_build.trt_graph.verification``,
which describes it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from backend.engines.stepping.chunks import ancestors
from backend.sampling.draw import HEAD, Heads, race
from backend.sampling.randomness import word
from backend.sampling.verification import Verdict, VerifyRequest, follow

LOGITS, GREEDY, DRAWN = "logits", "greedy", "drawn"
"""The networks of a model, as files and messages call them; a draft has the first alone."""

ALL_TOP_P = 2.0
"""The value that stands for no top-p: no rounded sum reaches it."""

Tensors = dict[str, torch.Tensor]


def suits(request: VerifyRequest) -> bool:
    """Whether a verification can decide about a request.

    Options that change logits, min-p, a top-p of every place's own and log-probabilities are not
    compiled.
    """
    sampling = request.sampling
    uncompiled = sampling.min_p > 0.0 or sampling.top_p_decay != 1.0
    return not (sampling.changes_logits or sampling.reads_log_probs or uncompiled)


def network_for(requests: Seq[VerifyRequest]) -> str:
    """Return which verification decides about requests side by side."""
    return GREEDY if all(request.sampling.greedy for request in requests) else DRAWN


def inputs_of(
    network: str, requests: Seq[VerifyRequest], vocab_size: int, wide: torch.dtype
) -> Tensors:
    """Return a verification's inputs by name, on the CPU; ``wide`` is probabilities' dtype."""
    return _trees(requests) if network == GREEDY else _options(requests, vocab_size, wide)


def verdicts_of(network: str, requests: Seq[VerifyRequest], outputs: Tensors) -> list[Verdict]:
    """Return the verdicts on requests from a verification's outputs. This waits for the device."""
    if network == GREEDY:
        columns = zip(
            *(outputs[key].tolist() for key in ("accepted", "path", "tokens")), strict=True
        )
        return [
            Verdict([row - 1 for row in path[1 : n + 1]], tokens[n]) for n, path, tokens in columns
        ]
    draws, verdicts = iter(_draw(requests, outputs)), [Verdict([], -1) for _ in requests]
    for verdict, request in zip(verdicts, requests, strict=True):
        follow(verdict, request, [next(draws) for _ in range(request.rows)].__getitem__)
    return verdicts


def _trees(requests: Seq[VerifyRequest]) -> Tensors:
    rows = max(request.rows for request in requests)
    proposal = np.full((len(requests), rows), -1, np.int32)  # no row's own token
    above = np.zeros((len(requests), rows, rows), np.bool_)
    for number, request in enumerate(requests):
        nodes = slice(1, request.rows)
        proposal[number, nodes] = request.tokens
        above[number, nodes, 0] = True
        above[number, nodes, nodes] = np.tril(ancestors(request.parents), -1)
    return {"proposal": torch.from_numpy(proposal), "above": torch.from_numpy(above)}


def _options(requests: Seq[VerifyRequest], vocab_size: int, wide: torch.dtype) -> Tensors:
    params = [request.sampling for request in requests]
    options = {
        "temperature": [0.0 if param.greedy else param.temperature for param in params],
        "top_k": [min(param.top_k, vocab_size) or vocab_size for param in params],
        "top_p": [param.top_p if param.top_p < 1.0 else ALL_TOP_P for param in params],
    }
    return {name: torch.tensor(values, dtype=wide) for name, values in options.items()}


def _draw(requests: Seq[VerifyRequest], outputs: Tensors) -> list[int]:
    """Return every row's own token, request by request: ``backend.sampling.draw`` by the heads.

    No more of a distribution leaves the device, unless its tail wins.
    """
    padded = outputs["probs"].shape[1]
    rows = [first * padded + row for first, one in enumerate(requests) for row in range(one.rows)]
    packed = {name: outputs[name].flatten(0, 1)[rows] for name in ("masses", "columns", "totals")}
    places = (packed["masses"] >= HEAD).nonzero()
    at = places[:, 0], places[:, 1]
    heads = Heads(
        places[:, 0].cpu().numpy(),
        packed["columns"][at].cpu().numpy().astype(np.int64),
        packed["masses"][at].double().cpu().numpy(),
        packed["totals"].flatten().double().cpu().numpy(),
    )
    probs = outputs["probs"].flatten(0, 1)
    words = np.array([key for request in requests for key in _words(request)], np.uint64)
    return race(heads, words, lambda row: probs[rows[row]].cpu().numpy())


def _words(request: VerifyRequest) -> list[int]:
    """Return the noise of the place that each row draws for."""
    depths = [0]
    for parent in request.parents:
        depths.append(depths[parent + 1] + 1)
    return [word(request.sampling.seed, request.position + depth) for depth in depths]
