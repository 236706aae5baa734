"""The CUDA engine with turns in flight writes what it writes one submission at a time, also after
long prompts: no size is smaller than what the device has, no buffer is written too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from backend.core.session import Session
from backend.engines.cuda.forward import Inputs
from backend.engines.cuda.lookahead import LookaheadEngine, _Slot
from backend.engines.cuda.stream import PinnedColumns, Stream
from backend.engines.port import AFTER, Turn
from backend.request import SamplingParams
from backend.sequence import Sequence as Text
from bench.cuda.gate import GateRequest, Knowing, random_prompt, serve
from bench.cuda.random_models import SHAPES, random_llama
from policy.baselines import RandomChoice

VOCAB = SHAPES["tiny"].vocab
LENGTHS = (20, 300, 1500)
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def engine(longest: int = 1500, *, kv_blocks: int = 220, sequences: int = 8) -> LookaheadEngine:
    lm = random_llama(SHAPES["tiny"], "cpu", torch.float64)
    return LookaheadEngine(
        "target",
        lm,
        vocab_size=VOCAB,
        sequences=sequences,
        kv_blocks=kv_blocks,
        max_context_tokens=longest + 100,
        max_draft_tokens=8,
    )


def asks_of(lengths: Sequence[int], tokens: int = 12) -> list[GateRequest]:
    return [
        GateRequest(random_prompt(n, VOCAB, n), SAMPLED if number % 2 else {}, tokens)
        for number, n in enumerate(lengths)
    ]


def equal_texts(lengths: Sequence[int], *, chunk: int = 256, **sizes: Any) -> None:
    """Check that texts are the same alone and one at a time, together, and with proposals."""
    target, asks = engine(max(lengths), **sizes), asks_of(lengths)
    wanted = serve(target, asks, lookahead=0, chunk=chunk)
    assert serve(target, asks, lookahead=1, chunk=chunk) == wanted
    drafts = [Knowing(wanted, VOCAB)]
    assert (
        serve(target, asks, lookahead=1, chunk=chunk, drafts=drafts, policy=RandomChoice())
        == wanted
    )


@pytest.mark.parametrize("chunk", [256, 2048])
def test_texts_are_those_of_one_submission_at_a_time(chunk: int) -> None:
    for length in LENGTHS:
        equal_texts([length], chunk=chunk)
    equal_texts([*LENGTHS, 57, 64, 3, 1024], chunk=chunk)


@pytest.mark.slow
def test_texts_are_those_of_one_submission_at_a_time_after_5000_tokens() -> None:
    equal_texts([5000])
    equal_texts([5000, 20, 300, 1500], kv_blocks=400)


@pytest.mark.parametrize("cancels_at", [2, 5, 9])
def test_others_keep_their_texts_where_a_request_is_cancelled(cancels_at: int) -> None:
    target, asks = engine(), asks_of([1500, 40, 300, 20])
    wanted, steps = serve(target, asks, lookahead=0), 0

    def watch(sessions: Sequence[Session]) -> None:
        nonlocal steps
        steps += 1
        if steps == cancels_at:
            sessions[0].sink.cancelled = True  # type: ignore[misc]

    found = serve(target, asks, lookahead=1, watch=watch)
    assert found[1:] == wanted[1:]
    assert found[0] == wanted[0][: len(found[0])]
    assert serve(target, asks, lookahead=1) == wanted


def test_requests_that_are_preempted_keep_their_texts() -> None:
    asks = asks_of([30, 28, 26], tokens=110)
    wanted = serve(engine(), asks, lookahead=0)
    target, cancelled = engine(kv_blocks=14), list[int]()
    cancel = target.cancel
    target.cancel = lambda ids: (cancelled.extend(ids), cancel(ids))[1]  # type: ignore[method-assign]
    assert serve(target, asks, lookahead=1) == wanted
    assert len(cancelled) > len(asks), "nothing was preempted"


def test_a_turn_that_follows_has_no_more_room_than_its_blocks_have_then() -> None:
    target = engine()
    text = Text(0, [5] * 60, 60, SamplingParams(), {"target": [0, 1]})
    target.submit([Turn(text, 60)])
    target.submit([Turn(text, AFTER)])
    target.poll(0.0)
    (refused,) = target.poll(0.0)
    # 59 tokens have KV, and the first turn may write five.
    assert refused.error == "turn of sequence 0: needs KV for 65 tokens, has 64"


def test_more_blocks_than_a_row_can_have_fail_their_turn_alone() -> None:
    target = engine(60)
    texts = [Text(n, [5, 6, 7], 3, SamplingParams(), {"target": [2 * n]}) for n in range(2)]
    texts[1].blocks["target"] = [*range(2, 2 + target.model.paged.row_pages + 1)]
    target.submit([Turn(text, 3) for text in texts])
    done = {completion.sequence_id: completion for completion in target.poll(0.0)}
    assert done[0].error is None
    assert "a block table has room for" in (done[1].error or "")


def test_submitting_waits_for_nothing_under_way() -> None:
    """Decoding rows and short chunks in graphs of one size, each launched while the last runs."""
    target, waited = engine(60), list[object]()
    forward, stream = target.model, target._stream
    forward.graphs.captures, stream.capture = True, lambda run: run  # type: ignore[method-assign]
    texts = [
        Text(n, random_prompt(9, VOCAB, n), 9, SamplingParams(), {"target": [2 * n, 2 * n + 1]})
        for n in range(4)
    ]
    with counting_waits(stream, waited):
        target.submit([Turn(texts[0], 9), Turn(texts[1], 5, 0)])
        target.submit([Turn(texts[0], AFTER), Turn(texts[2], 7, 0)])
    for turn in (Turn(texts[3], 5, 0), Turn(texts[1], 9), Turn(texts[2], 9)):
        target.poll(0.0)
        with counting_waits(stream, waited):
            target.submit([turn])
    assert waited == []


@contextmanager
def counting_waits(stream: Stream, waited: list[object]) -> Iterator[None]:
    """Note the events that had not passed when the host waited for them."""
    wait = stream.wait
    stream.wait = lambda event: (  # type: ignore[method-assign]
        waited.extend([] if stream.has_passed(event) else [event]),
        wait(event),
    )[1]
    try:
        yield
    finally:
        del stream.wait


# -- faults that the tests above must show


def no_longest_row(patch: pytest.MonkeyPatch) -> None:
    made = Inputs.__init__

    def short(self: Inputs, model: Any, *args: Any) -> None:
        row_pages, model.row_pages = model.row_pages, min(model.row_pages, 32)
        try:
            made(self, model, *args)
        finally:
            model.row_pages = row_pages

    patch.setattr(Inputs, "__init__", short)


def rows_that_begin_at_0(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Slot, "bound", property(lambda slot: sum(slot.under_way)))


def one_pinned_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedColumns, "COPIES", 1)


def buffers_that_nothing_guards(patch: pytest.MonkeyPatch) -> None:
    one_pinned_copy(patch)
    patch.setattr(PinnedColumns, "host", property(lambda self: self._host_views[self._turn]))


def no_current_device(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(_: Stream) -> Iterator[None]:
        yield

    patch.setattr(Stream, "current", nothing)


def results_read_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait", lambda *_: None)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (no_longest_row, lambda: equal_texts([1500])),
    (rows_that_begin_at_0, test_a_turn_that_follows_has_no_more_room_than_its_blocks_have_then),
    (one_pinned_copy, test_submitting_waits_for_nothing_under_way),
    (buffers_that_nothing_guards, test_submitting_waits_for_nothing_under_way),
    (no_current_device, lambda: equal_texts([20])),
    (results_read_too_early, lambda: equal_texts([20])),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_a_fault_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    test: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        test()
