"""The loop over fake executors in virtual time, at latencies like those of an 8B target with a 1B
draft on an H200.

Target and draft work side by side, each iteration by iteration; the loop itself takes ``enqueue_s``
a request and nothing else. So figures of goodput are exact and the same on every machine. The draft
runs on a device of its own: nothing contends.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from backend.core import asynchronous
from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.core.orchestrator import Orchestrator
from backend.core.session import Session
from backend.engines.trtllm.engine import ExecutorSettings, TrtllmEngine
from backend.engines.trtllm.folder import read_engine_folder
from backend.ops.stats import Stats, StepStats
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Sequence
from backend.speculation import step_log
from backend.speculation.drafting import Drafting
from policy import LatencyCurve, LatencyModel, Policy
from tests.contract import fake_executor
from tests.contract.engine_folders import engine_folder
from tests.contract.fake_executor import Behaviour, Clock, Executor, Model

VOCAB = 16
K_MAX = 8
PROMPT_TOKENS = 16
_TOKENS = 2048


def line(fixed_s: float, token_s: float, flat_tokens: int) -> LatencyCurve:
    """A forward bound by its weights up to so many tokens, and by arithmetic beyond."""
    return LatencyCurve(
        fixed_s + token_s * np.maximum(np.arange(_TOKENS + 1) - flat_tokens, 0), token_s
    )


TARGET = line(5e-3, 20e-6, 64)
DRAFT = line(0.8e-3, 2.5e-6, 64)


def latency(turn_s: float = 0.0) -> LatencyModel:
    """What the planner is told of both; half a token a row is computed again."""
    curve = replace(TARGET, base_s=TARGET.base_s + turn_s, row_s=10e-6)
    return LatencyModel(curve, (DRAFT,), turn_s=turn_s)


def law(agreement: float = 1.0) -> Callable[..., np.ndarray]:
    """The target's law, and that of drafts which agree with it in so many of all places."""
    rows = np.eye(VOCAB)

    def logits(tokens):
        place = (tokens[-1] * 31 + tokens[-2] * 17 + len(tokens) * 101) * 2654435761 % 2**32
        return rows[(place // 7 + (place // 1009 % 1000 >= 1000 * agreement)) % VOCAB]

    return logits


def _chunking() -> SimpleNamespace:
    """The fake with chunked context on, whatever its users say."""

    def config(*args, **options):
        return fake_executor.ExecutorConfig(*args, **{**options, "enable_chunked_context": True})

    return SimpleNamespace(**{**vars(fake_executor), "ExecutorConfig": config})


class NoText:
    def push(self, token_id):
        return ""

    def finish(self):
        return ""


class Sink:
    cancelled = False

    def __init__(self, served: Served) -> None:
        self.served = served

    def chunk(self, delta):
        pass

    def final(self, delta, reason, usage):
        self.served.submit()

    def error(self, code, message):
        raise AssertionError(message)


class Served:
    """So many sequences in flight at any time, of unequal lengths; ``plans`` are (view, plan) of
    every step.
    """

    def __init__(
        self,
        monkeypatch,
        folder: Path,
        policy: Policy,
        sequences: int,
        agreement: float,
        *,
        free_run_tokens: int = 1,
        target: Behaviour | None = None,
        seed: int = 0,
        plain_share: float = 0.0,
        tokens: int = 0,
        text_tokens: int = _TOKENS // 2,
        max_num_tokens: int = 0,
        chunked: bool = False,
        capped: float = 1.0,
    ) -> None:
        """``tokens``: of every answer. ``text_tokens``: the longest. ``max_num_tokens``: of an
        iteration (0: enough). ``chunked``: what does not fit is cut; ``capped``: what share of
        the engines' own bound on the text in flight holds (0: none).
        """
        self._tokens, self._text_tokens, self._max_num_tokens, self._chunked = (
            tokens,
            text_tokens,
            max_num_tokens,
            chunked,
        )
        self.clock = (target := target or Behaviour()).clock = Clock()
        for module in (asynchronous, step_log):
            monkeypatch.setattr(module, "perf_counter", self.clock)
        target.curve = TARGET
        draft = Behaviour(clock=self.clock, curve=DRAFT)
        self.engines = [
            self._engine(folder, "target", law(), target),
            self._engine(folder, "draft", law(agreement), draft),
        ]
        self.stats, self.policy, self.plans, self.fell_back = Stats(), policy, [], Counter()
        step_stats = StepStats(self.stats)
        ledger = KVLedger(
            {engine.name: int(engine.limits.kv_blocks * capped) for engine in self.engines},
            K_MAX + 1,
            guaranteed=not capped,
        )
        self.loop = Orchestrator(
            self.engines[0],
            Drafting(self.engines[1:], step_stats, self.clock),
            policy,
            ledger,
            Admission(ledger, sequences, 10**6),
            step_stats,
            self.clock,
            k_max=K_MAX,
            prefill_chunk_tokens=10**7,
            free_run_tokens=free_run_tokens,
        )
        self._numbers, self._rng, self._plain_share = (
            itertools.count(1),
            random.Random(seed),
            plain_share,
        )
        for _ in range(sequences):
            self.submit()

    def _engine(self, folder: Path, name: str, law_, behaviour: Behaviour) -> TrtllmEngine:
        sizes = {
            "max_seq_len": self._text_tokens + 2 * K_MAX + 1,
            "max_batch_size": 256,
            "tokens_per_block": 2 if self._text_tokens < _TOKENS else 32,
        }
        sizes |= {"max_num_tokens": self._max_num_tokens}
        made = engine_folder(
            folder, name, vocab_size=VOCAB, max_draft_len=K_MAX if name == "target" else 0, **sizes
        )
        Executor.models[str(made)] = Model(law_, behaviour, kv_blocks=10**5)
        settings = ExecutorSettings(turn_timeout_s=1e6)
        engine = read_engine_folder(made)
        bindings = fake_executor
        if self._chunked:  # a text may then be longer than the budget
            bindings, engine = _chunking(), replace(engine, max_num_tokens=10**7)
        return TrtllmEngine(
            name,
            engine,
            settings,
            max_context_tokens=self._text_tokens,
            bindings=bindings,
            clock=self.clock,
        )

    def submit(
        self,
        sink: object = None,
        *,
        prompt: list[int] | None = None,
        tokens: int | None = None,
        **options,
    ) -> None:
        """Hand a new request to the loop."""
        prompt = prompt or [self._rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        sequence = Sequence(next(self._numbers), list(prompt), len(prompt), SamplingParams())
        ceiling = 0 if self._rng.random() < self._plain_share else None
        ids = tuple(prompt) if sink is not None else None
        request = GenerationRequest(
            "",
            tokens or self._tokens or self._rng.randrange(16, 96),
            num_draft_tokens=ceiling,
            input_ids=ids,
            **options,
        )
        self.loop.submit(Session(sequence, request, frozenset(), NoText(), sink or Sink(self)))

    def until_decoding(self) -> None:
        """Run until every active request has a token."""
        while (
            any(session.output_tokens == 0 for session in self.loop._active.values())
            or not self.loop._active
        ):
            self.loop.step()

    def emitted(self) -> float:
        """Tokens emitted since the last call."""
        counters = self.stats.drain().counters
        for name, labels, value in counters:
            if name == "spindle_fallback_total":
                self.fell_back[labels["reason"]] += value
        return sum(value for name, _, value in counters if name == "spindle_emitted_tokens_total")

    def fallbacks(self) -> Counter[str]:
        """Return the counts of what was done instead, by reason."""
        self.emitted()
        return self.fell_back

    def goodput(self, seconds: float, warm_up_s: float) -> float:
        """Emitted tokens a second of virtual time, once warm."""
        for limit_s in (warm_up_s, seconds):
            started_s = self.clock.now_s
            self.emitted()
            while self.clock.now_s < started_s + limit_s:
                before = self.loop.planning.last_plan
                self.loop.step()
                if (last := self.loop.planning.last_plan) is not before:
                    self.plans.append((last[0], last[2]))
        return self.emitted() / (self.clock.now_s - started_s)
