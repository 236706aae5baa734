"""Distillation data: the teacher answers prompts in a large in-flight batch, its top logits kept at
every position.

Data and soft labels come from the same passes, of the model that serves. Finished rows are
refilled at once, so the batch stays full. Shards are written as sequences finish; a later call
continues after the last shard.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.core.block_pool import BlockPool
from backend.engines.models.reading import read_spec
from backend.engines.stepping.chunks import KVTable, PassChunk, logit_rows
from backend.engines.stepping.engine import Model
from backend.kinds import KINDS
from backend.machine import machine
from backend.sequence import BLOCK_TOKENS
from engines_build.distill.corpora import WORKLOADS, Corpus, CorpusPrompt, ask_about

TOP_K = 32
"""Teacher logits kept per position; what they do not cover is one rest class."""

MAX_PROMPT_TOKENS = 400
MAX_NEW_TOKENS = 224
SEQUENCES_PER_SHARD = 64
GREEDY_SHARE = 0.6
"""Share of the rows that answer prompts to train on; the others are sampled."""

SAMPLED_TEMPERATURES = (0.7, 1.0)
"""Bounds of a sampled row's temperature."""

_FOLLOW_UP_SHARE = 0.12
_WORKLOAD_NAMES = list(WORKLOADS)


@dataclass(slots=True)
class _GeneratedText:
    """A sequence in flight; all tokens but the last have the top ids and log probabilities.

    Within the prompt that distribution is the next token itself: the teacher's would cost much more
    than the prefill.
    """

    workload: int
    prompt_tokens: int
    tokens: list[int]
    temperature: float
    blocks: list[int]
    computed_tokens: int = 0
    """Tokens that were run, from the first one on."""
    answers: int = 1
    top_ids: list[Tensor] = field(default_factory=list)  # [tokens, TOP_K] each
    top_logprobs: list[Tensor] = field(default_factory=list)  # likewise [tokens, TOP_K]
    features: list[Tensor] = field(default_factory=list)
    """[rows, taps, hidden] each: the prompt's last token and each one generated but the last."""

    def is_over(self, eos: Set[int]) -> bool:
        """Whether the text is over, full, or repeats its last 8 tokens for the third time in 64 (a
        loop teaches nothing more).
        """
        new = self.tokens[self.prompt_tokens :]
        tail, recent = new[-8:], new[-64:]
        looping = (
            len(new) >= 24 and sum(recent[i : i + 8] == tail for i in range(len(recent) - 7)) >= 3
        )
        return new[-1] in eos or len(new) >= MAX_NEW_TOKENS or looping

    def within_prompt(self, width: int) -> None:
        """Note the distributions within the prompt: each token is followed by the next one."""
        prompt = self.tokens[1 : self.prompt_tokens]
        following = torch.tensor(prompt, dtype=torch.long)[:, None].expand(-1, width)
        certain = torch.full(following.shape, -math.inf)
        certain[:, 0] = 0.0
        self.top_ids.append(following)
        self.top_logprobs.append(certain)


class Teacher:
    """A target that answers ``slots`` texts at once, on the model that it is served by.

    ``features`` [rows, taps, hidden] are the last step's states after the layers ``taps``
    (counted from 1): what a head reads.
    """

    def __init__(self, target: Path, dtype: str, slots: int, taps: Sequence[int] = ()):
        self.slots, self.taps = slots, taps
        room = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS
        blocks = slots * -(-room // BLOCK_TOKENS)
        self._pool = BlockPool(blocks)
        self._model = _model(target, dtype, room, kv_blocks=blocks, taps=taps)

    def begin(self, prompt_tokens: int) -> list[int]:
        """Return blocks for a new prompt and its answer."""
        return self._pool.allocate(-(-(prompt_tokens + MAX_NEW_TOKENS) // BLOCK_TOKENS))

    def hold(self, row: _GeneratedText) -> None:
        """Keep the blocks that a prompt fills for another answer to it."""
        self._pool.share(row.blocks[: row.prompt_tokens // BLOCK_TOKENS])

    def again(self, row: _GeneratedText) -> list[int]:
        """Return blocks for another answer to a prompt: those that are kept, and new ones."""
        blocks = row.blocks[: row.prompt_tokens // BLOCK_TOKENS]
        return blocks + self._pool.allocate(len(row.blocks) - len(blocks))

    def end(self, row: _GeneratedText) -> None:
        """Give a row's blocks back."""
        self._pool.drop(row.blocks, 0)

    def read(self, row: _GeneratedText) -> Tensor:
        """Run a whole answer. Returns the logits [answer, vocab] after which it was drawn."""
        tokens, table = row.tokens[:-1], KVTable(row.blocks)
        return self._forward([PassChunk(tokens, 0, table, len(row.tokens) - row.prompt_tokens)])

    def step(self, rows: Sequence[_GeneratedText]) -> Tensor:
        """Run what each row has that was not run. Returns logits [rows, vocab]."""
        chunks = []
        for row in rows:
            table = KVTable(row.blocks)
            chunks.append(
                PassChunk(row.tokens[row.computed_tokens :], row.computed_tokens, table, logits=1)
            )
            row.computed_tokens = len(row.tokens)
        return self._forward(chunks)

    def _forward(self, chunks: list[PassChunk]) -> Tensor:
        logits = self._model.forward(chunks)
        if self._model.hidden_states is not None:
            wanted = self._model.hidden_states[logit_rows(chunks)]
            self.features = torch.from_numpy(wanted).bfloat16()
        return torch.from_numpy(logits)


@torch.inference_mode()
def answered(
    teacher: Teacher, tokens: list[int], prompt_tokens: int, workload: int, temperature: float
) -> _GeneratedText:
    """Return a row as if the teacher had just generated the tokens after the prompt: in one pass
    over all of them.
    """
    row = _GeneratedText(workload, prompt_tokens, tokens, temperature, teacher.begin(prompt_tokens))
    logits = teacher.read(row)
    top_logprobs, top_ids = _top(logits)
    row.within_prompt(top_ids.shape[1])
    row.top_ids.append(top_ids)
    row.top_logprobs.append(top_logprobs)
    row.features += [teacher.features] if teacher.taps else []
    teacher.end(row)
    return row


def _model(target: Path, dtype: str, positions: int, **sizes: Any) -> Model:
    """Return the faster model here: OpenVINO's where it runs such a decoder."""
    spec = read_spec(target)
    if not KINDS["openvino"].missing:
        from backend.engines.openvino.conversion import misfit_of_attention  # not everywhere
        from backend.engines.openvino.converted import complete, read
        from backend.engines.openvino.decoder import OpenvinoDecoder, stored_as
        from backend.engines.openvino.graph_cache import bring_graph

        if not misfit_of_attention(spec.layers):
            graph = read(bring_graph(target, dtype, sizes["taps"]))
            stored = stored_as(dtype)
            return OpenvinoDecoder(
                complete(graph, positions=positions, repeats=False, stored=stored),
                precision=dtype,
                threads=torch.get_num_threads(),
                invariant=False,
                repeats=False,
                **sizes,
            )
    from backend.engines.models.loading import load_decoder  # not where a head is trained
    from backend.engines.torch.decoder import Decoder

    return Decoder(load_decoder(target, dtype), spec.layers, **sizes)


@dataclass(slots=True)
class Shards:
    """A folder of shards; ``generated`` counts teacher-generated tokens and ``next_prompt`` the
    prompts taken.
    """

    folder: Path
    generated: int = 0
    next_prompt: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.paths():
            shard = load_file(path)
            self.generated += int((shard["lengths"] - shard["prompt_lengths"]).sum())
            self.next_prompt = int(shard["next_prompt"])

    def paths(self) -> list[Path]:
        """Return the shard files, oldest first."""
        return sorted(self.folder.glob("shard-*.safetensors"))

    def write(self, rows: list[_GeneratedText]) -> None:
        """Append one shard; it appears whole or not at all."""
        tensors = {
            "tokens": torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(r.tokens) for r in rows]),
            "prompt_lengths": torch.tensor([r.prompt_tokens for r in rows]),
            "workloads": torch.tensor([r.workload for r in rows]),
            "sampled": torch.tensor([r.temperature > 0 for r in rows]),
            "top_ids": torch.cat([t for r in rows for t in r.top_ids]).int(),
            "top_logprobs": torch.cat([t for r in rows for t in r.top_logprobs]).half(),
            "next_prompt": torch.tensor(self.next_prompt),
        }
        if features := [t for r in rows for t in r.features]:
            tensors["features"] = torch.cat(features)
        path = self.folder / f"shard-{len(self.paths()):05d}.safetensors"
        save_file(tensors, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        self.generated += sum(len(r.tokens) - r.prompt_tokens for r in rows)


class Generator:
    """Fills ``shards`` with the teacher's answers to ``corpus``.

    Prompts are of ``workloads`` (None: all), by their shares in training, in turn on the held-out
    side. ``greedy_share`` of the rows decode greedily, the others sample among the top ``TOP_K``. A
    prompt gets ``answers`` answers, all but the first sampled: they share its prefill. A token of
    ``ends`` ends one.
    """

    def __init__(
        self,
        teacher: Teacher,
        tokenizer: Any,
        corpus: Corpus,
        shards: Shards,
        greedy_share: float,
        workloads: Sequence[str] | None = None,
        answers: int = 1,
        *,
        ends: Set[int],
    ):
        self.workloads = [w for w in corpus.workloads if workloads is None or w in workloads]
        self.teacher, self.tokenizer, self.corpus, self.shards, self.greedy_share = (
            teacher,
            tokenizer,
            corpus,
            shards,
            greedy_share,
        )
        self.answers = answers
        self.eos = ends
        self.replies: deque[str] = deque(maxlen=64)
        self.waiting: deque[_GeneratedText] = deque()  # prompts, once for each answer still wanted
        self.noise = torch.Generator().manual_seed(corpus.seed * 1_000_003 + len(shards.paths()))
        self.rng = random.Random(f"{corpus.seed}/{len(shards.paths())}")

    @torch.inference_mode()
    def run(self, tokens: int, deadline: float) -> None:
        """Generate, printing progress; sequences still in flight at the end are kept as far as they
        went.
        """
        start, before = time.monotonic(), self.shards.generated
        finished: list[_GeneratedText] = []
        rows = [self._start() for _ in range(self.teacher.slots)]
        while self.shards.generated < tokens and time.monotonic() < deadline:
            self._extend(rows, self.teacher.step(rows))
            for slot, row in enumerate(rows):
                if row.is_over(self.eos):
                    self.teacher.end(row)
                    finished.append(row)
                    self._remember(row)
                    rows[slot] = self._start()
            if len(finished) >= SEQUENCES_PER_SHARD:
                self.shards.write(finished)
                finished.clear()
                rate = (self.shards.generated - before) / (time.monotonic() - start)
                print(
                    f"generate: {self.shards.generated} tokens, {self.shards.next_prompt} "
                    f"prompts, {rate:.0f} tok/s",
                    flush=True,
                )
        if begun := finished + [row for row in rows if row.top_ids]:
            self.shards.write(begun)

    def _start(self) -> _GeneratedText:
        """Begin another answer to a prompt that was run, or one to a new prompt."""
        if self.waiting:
            return self._again(self.waiting.popleft())
        prompt = self._next_prompt()
        ids = encode(self.tokenizer, prompt)
        greedy = self.rng.random() < self.greedy_share
        return _GeneratedText(
            _WORKLOAD_NAMES.index(prompt.workload),
            len(ids),
            ids,
            0.0 if greedy else self._draw_temperature(),
            self.teacher.begin(len(ids)),
            answers=self.answers,
        )

    def _again(self, first: _GeneratedText) -> _GeneratedText:
        """Begin another answer: its first token is drawn from the distribution after the prompt."""
        n, logprobs, temperature = (
            first.prompt_tokens,
            first.top_logprobs[1],
            self._draw_temperature(),
        )
        row = replace(
            first,
            tokens=first.tokens[:n],
            temperature=temperature,
            blocks=self.teacher.again(first),
            computed_tokens=n // BLOCK_TOKENS * BLOCK_TOKENS,
            answers=1,
            top_ids=first.top_ids[:2],
            top_logprobs=first.top_logprobs[:2],
            features=first.features[:1],
        )
        row.tokens += self._choose(logprobs, row.top_ids[1], torch.tensor([temperature])).tolist()
        return row

    def _draw_temperature(self) -> float:
        return self.rng.uniform(*SAMPLED_TEMPERATURES)

    def _next_prompt(self) -> CorpusPrompt:
        self.shards.next_prompt += 1
        if (
            not self.corpus.held_out
            and self.replies
            and "qa" in self.workloads
            and self.rng.random() < _FOLLOW_UP_SHARE
        ):
            workload = self.rng.choice(["summarise", "qa"])
            return CorpusPrompt(
                workload,
                ask_about(self.rng.choice(self.replies), workload, self.rng),
                self.rng.random() < 0.35,
            )
        index = self.shards.next_prompt - 1
        if self.corpus.held_out:
            return self.corpus.prompt(index, self.workloads[index % len(self.workloads)])
        return self.corpus.prompt(
            index, self.rng.choices(self.workloads, [WORKLOADS[w] for w in self.workloads])[0]
        )

    def _extend(self, rows: list[_GeneratedText], logits: Tensor) -> None:
        """Draw each row's next token from ``logits`` [rows, vocab], and keep its distribution."""
        top_logprobs, top_ids = _top(logits)
        temperatures = torch.tensor([r.temperature for r in rows])
        tokens = self._choose(top_logprobs, top_ids, temperatures).tolist()
        for i, row in enumerate(rows):
            if not row.top_ids:
                self._start_others(row, top_ids.shape[1])
            row.top_ids.append(top_ids[i : i + 1])
            row.top_logprobs.append(top_logprobs[i : i + 1])
            row.features += [self.teacher.features[i : i + 1]] if self.teacher.taps else []
            row.tokens.append(tokens[i])

    def _start_others(self, row: _GeneratedText, width: int) -> None:
        """Note the distributions within a prompt that was run, and ask for its other answers."""
        row.within_prompt(width)
        for _ in range(row.answers - 1):
            self.teacher.hold(row)
            self.waiting.append(row)

    def _choose(self, top_logprobs: Tensor, top_ids: Tensor, temperatures: Tensor) -> Tensor:
        """One token per row [n]: the Gumbel-max trick over the kept logits [n, K] (``temperatures``
        [n]); temperature 0 leaves the noise out.
        """
        gumbel = -torch.empty_like(top_logprobs).exponential_(generator=self.noise).log()
        pick = (top_logprobs + temperatures[:, None] * gumbel).argmax(dim=1, keepdim=True)
        return top_ids.gather(1, pick)[:, 0]

    def _remember(self, row: _GeneratedText) -> None:
        """Keep a long answer of a chat as the article of later summaries and questions: prose on
        more topics than the documents have.
        """
        if _WORKLOAD_NAMES[row.workload] == "chat" and len(row.tokens) - row.prompt_tokens > 100:
            self.replies.append(
                self.tokenizer.decode(row.tokens[row.prompt_tokens :], skip_special_tokens=True)
            )


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities and ids of the most likely tokens, [n, TOP_K] each, on the CPU, of logits
    [n, vocab].
    """
    logits = logits.float()
    top, ids = logits.topk(min(TOP_K, logits.shape[1]), dim=1)
    return (top - logits.logsumexp(dim=1, keepdim=True)).cpu(), ids.cpu()


def encode(tokenizer: Any, prompt: CorpusPrompt) -> list[int]:
    """Token ids of a prompt as the server would see them, cut to the first ``MAX_PROMPT_TOKENS``
    (in the template: the message is cut).
    """
    if prompt.raw or tokenizer.chat_template is None:
        return list(tokenizer(prompt.text)["input_ids"])[:MAX_PROMPT_TOKENS]
    ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    message = tokenizer.decode(ids[: MAX_PROMPT_TOKENS - 64])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])[:MAX_PROMPT_TOKENS]


def served_dtype(device: str) -> str:
    """Return the dtype that the target has where it generates: that of serving (``auto``)."""
    return "bf16" if device != "cpu" or machine.multiplies_bf16() else "fp32"
