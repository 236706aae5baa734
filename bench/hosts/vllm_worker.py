"""An arm of ``bench.hosts.vllm_speed`` or ``vllm_gpu``, in vLLM's own environment:
``python vllm_worker.py ENGINE-JSON``. Writes ``ready``, then answers each JSON line {"prompts",
"max_tokens", "ignore_eos": false} with {"tokens", "wall_s", "steps": {sum of measured, of predicted
seconds}, "texts"}. Greedy; all prompts are in flight at once. Imports nothing of the project but
what the plug-in is.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def step_sums(scheduler: Any) -> dict[str, float]:
    """Return the plug-in's seconds of all steps so far, as measured and as predicted."""
    if not hasattr(scheduler, "_exporter"):
        return {}
    scheduler._exporter.export()
    page, sums = scheduler._exporter.text(), {}
    for name in ("spindle_step_seconds_sum", "spindle_step_predicted_seconds_sum"):
        line = re.search(rf"^{name} (\S+)", page, re.MULTILINE)
        sums[name] = float(line[1]) if line else 0.0
    return sums


def main() -> None:
    """Serve until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    settings = json.loads(sys.argv[1])
    engine = LLM(**settings).llm_engine
    scheduler, number = engine.engine_core.engine_core.scheduler, 0
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        before, started_s = step_sums(scheduler), time.perf_counter()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=work["max_tokens"],
            ignore_eos=work.get("ignore_eos", False),
            detokenize=not settings.get("skip_tokenizer_init", False),
        )
        for prompt in work["prompts"]:
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
            number += 1
        texts: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[int(output.request_id)] = list(output.outputs[0].token_ids)
        wall_s = time.perf_counter() - started_s
        after = step_sums(scheduler)
        steps = {name: after[name] - before.get(name, 0.0) for name in after}
        replies = [texts[key] for key in sorted(texts)]
        reply = {
            "tokens": sum(map(len, replies)),
            "wall_s": wall_s,
            "steps": steps,
            "texts": replies,
        }
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
