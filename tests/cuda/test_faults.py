"""Faults of the CUDA engine, injected on a CPU: graphs, rows without numbers, a lost context."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from backend.engines.cuda import stream
from backend.engines.cuda.engine import CudaEngine
from backend.engines.cuda.lookahead import LookaheadEngine
from backend.engines.cuda.stream import NO_NUMBERS
from backend.engines.port import AFTER, Completion, EngineLostError, Turn
from backend.request import SamplingParams
from backend.sequence import Proposal, Sequence
from tests.cuda.families import models

pytestmark = pytest.mark.slow
PROMPT = [7, 8, 9, 10, 11]
Capture = Callable[[Callable[[], object]], Callable[[], object]]
KINDS = pytest.mark.parametrize("lookahead", [False, True], ids=["by the host", "lookahead"])


def engine(*, lookahead: bool, reasons: list[str] | None = None) -> CudaEngine:
    sizes: dict[str, Any] = {"kv_blocks": 16, "max_context_tokens": 60, "max_draft_tokens": 4}
    sizes |= {"vocab_size": 199, "count": None if reasons is None else reasons.append}
    lm = models("llama")[1].lm
    return (
        LookaheadEngine("target", lm, sequences=4, **sizes)
        if lookahead
        else CudaEngine("target", lm, **sizes)
    )


def sequence(number: int, **options: Any) -> Sequence:
    blocks = {"target": [2 * number, 2 * number + 1]}
    return Sequence(number, list(PROMPT), len(PROMPT), SamplingParams(**options), blocks)


def step(
    target: CudaEngine, texts: list[Sequence], proposals: dict[int, Proposal] | None = None
) -> dict[int, Completion]:
    """Run a step of these texts, and commit what it emits."""
    proposed = proposals or {}
    target.submit([Turn(text, len(text.tokens), 1, proposed.get(text.id)) for text in texts])
    done = {completion.sequence_id: completion for completion in target.poll(0.0)}
    for text in texts:
        text.tokens += done[text.id].tokens
    return done


@KINDS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.95}], ids=str
)
def test_a_row_without_numbers_ends_and_no_other(
    lookahead: bool, value: float, options: dict[str, float]
) -> None:
    target, alone = engine(lookahead=lookahead), engine(lookahead=lookahead)
    texts = [sequence(n, seed=n, **options) for n in range(3)]
    copies = [sequence(n, seed=n, **options) for n in range(3)]
    step(target, texts)
    step(alone, copies)
    target.model.paged.kv[0][texts[1].blocks["target"][0]] = value
    chain = {n: Proposal.chain("d", [5, 6]) for n in range(3)}
    done, expected = step(target, texts, chain), step(alone, copies, chain)
    assert done[1].error == NO_NUMBERS
    assert done[1].tokens == []
    for n in (0, 2):
        assert (done[n].error, done[n].tokens) == (None, expected[n].tokens)
    target.cancel([1])
    again = step(target, [texts[0], texts[2]])
    assert all(completion.error is None for completion in again.values())


@KINDS
def test_a_broken_context_loses_the_engine_and_sequences_can_be_cancelled(
    lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, text = engine(lookahead=lookahead), sequence(0)
    step(target, [text])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(target.model.paged, "run", fail)
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            step(target, [text])
        assert not isinstance(caught.value, EngineLostError)
        patch.setattr(stream, "context_error", lambda _: "CUDA error: an illegal memory access")
        with pytest.raises(EngineLostError, match="target: CUDA's context on cpu is broken"):
            step(target, [text])
        target.cancel([0])
    assert step(target, [sequence(1)])[1].error is None


def texts_of(target: CudaEngine) -> list[list[int]]:
    """Return what two requests write, the second turn of each following its first."""
    texts = [sequence(0), sequence(1, temperature=0.8, seed=3)]
    step(target, texts)
    for _ in range(4):
        step(target, texts, {0: Proposal.chain("d", [5, 6])})
        target.submit([Turn(text, len(text.tokens), 1) for text in texts])
        target.submit([Turn(text, AFTER) for text in texts])
        for _ in range(2):
            for completion in target.poll(0.0):
                texts[completion.sequence_id].tokens += completion.tokens
    return [text.tokens for text in texts]


def on_graphs(target: CudaEngine, monkeypatch: pytest.MonkeyPatch, capture: Capture) -> None:
    """Let an engine run in graphs as on a GPU, captured by ``capture``."""
    target.model.graphs.captures = True
    if isinstance(target, LookaheadEngine):
        target._steps._parts.captures = True
    monkeypatch.setattr(stream.Stream, "capture", lambda _, run: capture(run))


@pytest.mark.parametrize("failing", [2, 3, 4], ids=["pass", "update", "decision"])
def test_a_size_that_cannot_be_captured_runs_without_a_graph_is_counted_and_tried_again(
    failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []
    tried: list[object] = []

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        tried.append(run)
        if len(tried) == failing:
            raise OutOfResources
        run()
        return run

    expected = texts_of(engine(lookahead=True))
    target = engine(lookahead=True, reasons=reasons)
    on_graphs(target, monkeypatch, capture)
    assert texts_of(target) == expected
    assert reasons == ["cuda_graph"]
    assert "OutOfResources" in caplog.text or "too large" in caplog.text
    assert len(tried) == target._steps.graphs + 1  # type: ignore[attr-defined]


class OutOfResources(Exception):
    def __str__(self) -> str:
        return "too large"


def test_a_size_is_tried_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    def fail(run: object) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    target = engine(lookahead=False, reasons=reasons)
    on_graphs(target, monkeypatch, fail)
    text = sequence(0)
    for _ in range(5):
        step(target, [text])
    alone = sequence(1)
    for _ in range(5):
        step(engine(lookahead=False), [alone])
    assert len(reasons) == 4  # that of the prompt once, that of a token at its first three
    assert text.tokens[:5] == alone.tokens[:5]


def fake_cuda(monkeypatch: pytest.MonkeyPatch, graph: Callable[..., object]) -> stream.Stream:
    """Put a ``torch.cuda`` that captures nothing in place; return a stream to capture on."""

    class Stream:
        def __init__(self, _: object) -> None: ...

        def wait_stream(self, _: object) -> None: ...

    class Graph:
        def replay(self) -> None: ...

    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": object,
        "stream": lambda _: nullcontext(),
        "current_stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return stream.Stream(torch.device("cuda", 7))


def test_all_graphs_have_one_pool_and_one_stream_also_after_one_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[tuple[object, object]] = []

    def graph(_: object, pool: object, stream: object) -> object:
        used.append((pool, stream))
        return nullcontext()

    there = fake_cuda(monkeypatch, graph)
    there.capture(lambda: 1)
    calls = iter([0, 1])
    with pytest.raises(ZeroDivisionError):
        there.capture(lambda: 1 / (1 - next(calls)))
    there.capture(lambda: 3)
    assert len(used) == 3
    assert len({*used}) == 1


def test_kernels_and_events_are_those_of_the_engines_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, current = fake_cuda(monkeypatch, lambda *_, **__: nullcontext()), list[int]()

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(which.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    with there.serving("target"):
        assert current == [7]
    assert current == []


def test_a_captured_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    there = fake_cuda(monkeypatch, lambda *_, **__: nullcontext())
    read = torch.zeros(1)  # a graph knows only its address
    alive = weakref.ref(read)
    replay = there.capture(partial(len, read))
    del read
    assert alive() is not None
    del replay
    assert alive() is None


def test_a_turn_may_follow_one_without_numbers() -> None:
    target = engine(lookahead=True)
    texts = [sequence(n, seed=n) for n in range(2)]
    step(target, texts)
    target.model.paged.kv[0][texts[1].blocks["target"][0]] = float("nan")
    target.submit([Turn(text, len(text.tokens)) for text in texts])
    target.submit([Turn(text, AFTER) for text in texts])  # it embeds what the last one drew
    for _ in range(2):
        done = {completion.sequence_id: completion for completion in target.poll(0.0)}
        assert (done[0].error, len(done[0].tokens)) == (None, 1)
        assert (done[1].error, done[1].tokens) == (NO_NUMBERS, [])
        texts[0].tokens += done[0].tokens
