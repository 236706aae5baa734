"""Another stack serving a benchmark's requests, in an environment of its own: this file imports nothing of the project.

    python peer_worker.py NAME --model FOLDER --draft FOLDER --gguf FILE

Writes a line when ready, then answers each JSON line {"requests": [inputs], "concurrency": n} with a line of {"replies", "wall_s"}. Decodes
greedily. A stack that batches serves ``n`` requests as one batch; one that does not, one after the other, while the others wait.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

DRAFT_TOKENS = 4


class Transformers:
    """``generate``, alone or with an assistant model or prompt lookup; only the first can batch."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(options.threads)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self.batches = kind == "plain"
        self._more: dict[str, Any] = {}
        if kind == "assisted":
            draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=torch.float32, ignore_mismatched_sizes=True).eval()
            _give_narrow_head(draft, options.draft)
            draft.generation_config.num_assistant_tokens = DRAFT_TOKENS
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._more = {"assistant_model": draft}
        elif kind == "lookup":
            self._more = {"prompt_lookup_num_tokens": DRAFT_TOKENS}

    def generate(self, texts: list[str], max_tokens: int) -> tuple[list[tuple[str, int]], float]:
        """Return (text, tokens) of each, and when the first token was there."""
        from transformers import StoppingCriteria

        seen_s: list[float] = []

        class Watch(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                seen_s.append(time.perf_counter())
                return input_ids.new_zeros(input_ids.shape[0], dtype=bool)

        inputs = self._tokenizer(texts, return_tensors="pt", padding=True)
        pad = self._tokenizer.pad_token_id
        with self._torch.inference_mode():
            made = self._model.generate(
                **inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=pad, stopping_criteria=[Watch()], **self._more
            )
        ends = {self._tokenizer.eos_token_id}
        return [self._cut(row[inputs["input_ids"].shape[1] :].tolist(), ends) for row in made], seen_s[0]

    def _cut(self, tokens: list[int], ends: set[int]) -> tuple[str, int]:
        count = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return self._tokenizer.decode(tokens[:count], skip_special_tokens=True), count


def _give_narrow_head(draft: Any, folder: str) -> None:
    """Give a draft the head of its checkpoint, which scores a part of the vocabulary; the other tokens are never proposed."""
    import torch
    from safetensors.torch import load_file

    parts = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    ids, weight, size = tensors["lm_head.token_ids"].long(), tensors["lm_head.weight"].float(), draft.config.vocab_size

    class Head(torch.nn.Module):
        def forward(self, hidden: Any) -> Any:
            scores = hidden.new_full((*hidden.shape[:-1], size), float("-inf"))
            scores[..., ids] = hidden @ weight.T
            return scores

    draft.lm_head = Head()


class OpenVino:
    """``openvino_genai`` from the GGUF file, alone or with prompt lookup."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        import openvino_genai

        self._genai = openvino_genai
        more = {"prompt_lookup": True} if kind == "lookup" else {}
        scheduler = openvino_genai.SchedulerConfig()
        self._pipeline = openvino_genai.LLMPipeline(
            options.gguf, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=options.threads, **more
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._kind = kind
        self.batches = kind == "plain"

    def generate(self, texts: list[str], max_tokens: int) -> tuple[list[tuple[str, int]], float]:
        """Return (text, tokens) of each, and when the first token was there."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_tokens, False, False
        config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        if self._kind == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = DRAFT_TOKENS, 3
        started_s = time.perf_counter()
        made = self._pipeline.generate(self._tokenizer.encode(texts, add_special_tokens=False), config)
        first_s = made.perf_metrics.get_ttft().mean / 1000
        return [(self._tokenizer.decode(list(tokens)), len(tokens)) for tokens in made.tokens], started_s + first_s


STACKS = {"transformers": Transformers, "openvino": OpenVino}


def serve(stack: Any, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Serve a closed loop; a request is due when one of those in flight before it has ended."""
    size, started_s = concurrency if stack.batches else 1, time.perf_counter()
    replies: list[dict[str, Any]] = []
    ended_s: list[float] = []
    for begin in range(0, len(requests), size):
        wave = requests[begin : begin + size]
        made, first_s = stack.generate([request["text_input"] for request in wave], wave[0]["max_tokens"])
        now_s = time.perf_counter()
        for text, tokens in made:
            number = len(replies)
            due_s = started_s if number < concurrency else ended_s[number - concurrency]
            replies.append({"text": text, "output_tokens": tokens, "first_s": first_s - due_s, "total_s": now_s - due_s})
            ended_s.append(now_s)
    return {"replies": replies, "wall_s": time.perf_counter() - started_s}


def main() -> None:
    """Load a stack and serve until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="STACK-KIND")
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--gguf")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    stack, _, kind = options.name.partition("-")
    made = STACKS[stack](kind, options)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(serve(made, work["requests"], work["concurrency"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
