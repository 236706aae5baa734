"""vLLM drafting with an EAGLE-3 head in a process of its own, and what the head proposed.

    python tests/hosts/eagle_worker.py TARGET HEAD LENGTH MOST_TOKENS < PROMPTS

Prints a line with, for each prompt (token ids): the answer, and by proposal the token that it
begins after and its own tokens. A pass has at most ``MOST_TOKENS``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOKENS = 24


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode import llm_base_proposer

    noted: list[tuple[int, list[int]]] = []
    for name in dir(llm_base_proposer):
        kind: Any = getattr(llm_base_proposer, name)
        if "propose" in getattr(kind, "__dict__", ()):

            def propose(self, *args, _propose=kind.propose, **kwargs):
                found = _propose(self, *args, **kwargs)
                noted.append((int(kwargs["next_token_ids"][0]), found[0].tolist()))
                return found

            kind.propose = propose
    target, head, length, most = sys.argv[1:]
    llm = LLM(
        model=target,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        max_num_batched_tokens=int(most),
        speculative_config={
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": int(length),
        },
    )
    options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    results = []
    for prompt in json.load(sys.stdin):
        noted.clear()
        (out,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**options))
        results.append({"answer": [*out.outputs[0].token_ids], "proposals": [*noted]})
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
