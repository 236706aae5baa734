"""The parts that tests of vLLM with a real tritonserver share."""

import json
import os
import subprocess
import threading

from backend import PROJECT_ROOT
from backend.launcher.processes import command_line

PYTHON = PROJECT_ROOT / ".venv-vllm" / "bin" / "python"
START_LIMIT_S, ANSWER_LIMIT_S = 900, 300
ENVIRONMENT = {
    "SPINDLE_PYTHON": str(PYTHON),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
BLS = "tensorrt_llm_bls"


def written_by_vllm(folder, prompts, max_tokens):
    """Return the token ids that vLLM alone writes after each of the prompts, greedily in fp32."""
    asked = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    engine = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": True,
    }
    rounds = [{"prompts": prompts, "params": asked}]
    done = subprocess.run(
        [PYTHON, PROJECT_ROOT / "tests/hosts/worker.py"],
        input=json.dumps({"engine": engine, "rounds": rounds}),
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        check=False,
    )
    line = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert line, (done.stdout + done.stderr)[-4000:]
    (texts,) = json.loads(line[0].removeprefix("RESULT "))["rounds"]
    return [ids for (ids,) in texts]


def generate(service, text, max_tokens=24, model=BLS, **inputs):
    """Return the reply, without the prompt."""
    body = {"text_input": text, "max_tokens": max_tokens, "end_id": -1}
    body |= {"exclude_input_in_output": True, **inputs}
    status, reply = service.post(f"/v2/models/{model}/generate", body, ANSWER_LIMIT_S)
    assert status == 200, reply
    return json.loads(reply)


def answers(service):
    """Return whether a service answers."""
    body = {"text_input": "a b", "max_tokens": 4}
    return service.post(f"/v2/models/{BLS}/generate", body, ANSWER_LIMIT_S)[0] == 200


def asking(service, count, text, max_tokens):
    """Send requests all at once; return a function that waits for their answers' statuses."""
    statuses = []

    def ask(number):
        body = {"text_input": f"{text} {number}", "max_tokens": max_tokens, "end_id": -1}
        statuses.append(service.post(f"/v2/models/{BLS}/generate", body, ANSWER_LIMIT_S)[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()

    def finish():
        for thread in threads:
            thread.join(ANSWER_LIMIT_S)
        assert len(statuses) == count
        return statuses

    return finish


def vllm_processes(service, title):
    """Return the processes with a title, which vLLM writes over their environment."""
    return [pid for pid in service.tree() if title in " ".join(command_line(pid))]
