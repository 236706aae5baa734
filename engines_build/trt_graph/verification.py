"""Verification as network layers, by the rule of ``backend.sampling.verification``.

Row 0 of a sequence's ``rows`` draws what follows its text, row n + 1 what follows node n of its
proposal, a tree; of a chain that is the next node. A row's greedy token is found inside, and
the tree is followed inside. By noise it is drawn outside, since a network has no state and TensorRT
no integers to hash: the head of each distribution goes out; nearly always it has the token.
"""

from __future__ import annotations

from backend.engines.trt_graph.inputs import GREEDY
from backend.sampling.draw import HEAD
from engines_build.trt_graph.distributions import DistributionOptions, VocabularyRows
from engines_build.trt_graph.graph import BOOL, I32, Graph, GraphTensor, where


def verify(graph: Graph, logits: GraphTensor, vocabulary: VocabularyRows, network: str) -> None:
    """Declare what verifying ``logits`` [batch, rows, vocab] reads besides them, and what it
    returns.

    ``greedy`` reads ``proposal`` i32 [batch, rows], the token of each row's node (-1 where there is
    none), and ``above`` bool [batch, rows, rows]: whether the second row is an ancestor of the
    first, as row 0 is of every node. It returns, in i32, ``accepted`` [batch]; ``path`` [batch,
    rows], row 0 and after it the accepted rows; ``tokens`` [batch, rows], what these draw: those
    accepted, and the one after them. Values further on mean nothing.

    ``drawn`` reads the options of distributions, and returns ``probs`` [batch, rows, vocab], their
    ``totals`` [batch, rows, 1], and of each the most probable ``columns`` (i32) with their
    ``masses`` [batch, rows, 1000 or vocab]: its head as in ``backend.sampling.draw``, and more.
    """
    if network == GREEDY:
        _follow(graph, vocabulary.arg_max(logits))
        return
    probs = vocabulary.probs(logits, DistributionOptions.declare(graph, vocabulary.dtype))
    masses, columns = probs.topk(min(round(1.0 / HEAD), vocabulary.size))
    outputs = {"probs": probs, "totals": probs.sum(-1), "masses": masses, "columns": columns}
    for name, tensor in outputs.items():
        graph.output(name, tensor)


def _follow(graph: Graph, draws: GraphTensor) -> None:
    """Accept every node that, with all above it, is what the row before it draws: a path. ``draws``
    i32[batch, rows, 1] are the tokens by row.
    """
    proposal = graph.input("proposal", I32, "batch", "rows").reshape(0, 0, 1)
    above = graph.input("above", BOOL, "batch", "rows", "rows")
    numbers = (proposal * 0 + 1).cumsum(1) - 1
    across = numbers.transpose(0, 2, 1)
    parents = where(above, across, 0).amax(-1)
    missed = ~(numbers.equals(0) | proposal.equals(draws.pick(parents, 1)))
    is_off = missed | ((above & missed.transpose(0, 2, 1)).to(I32).sum(-1) > 0)
    reached = ~is_off.transpose(0, 2, 1)
    depths = above.to(I32).sum(-1).transpose(0, 2, 1)
    path = where(reached & depths.equals(numbers), across, 0).sum(-1)
    graph.output("accepted", (reached.to(I32).sum(-1) - 1).reshape(-1))
    graph.output("path", path.reshape(0, 0))
    graph.output("tokens", draws.pick(path, 1).reshape(0, 0))
