#!/usr/bin/env bash
# A check by hand of a container on a GPU, item by item: builds the image, serves a checkpoint, asks, streams, cancels, kills a stub.
#
#   docker/smoke.sh CHECKPOINT [DRAFT_CHECKPOINT]     TensorRT-LLM, with engines built for it (family llama or qwen: FAMILY)
#   docker/smoke.sh --vllm CHECKPOINT                 vLLM with its n-grams; kills its engine process, too
#   docker/smoke.sh --running                         the items that need a running service only (HTTP_PORT, METRICS_PORT)
#
# The first two need docker and a GPU.
# Prints PASS or FAIL for every item; ends with 1 if any failed. Not run on a GPU yet.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

HTTP="http://127.0.0.1:${HTTP_PORT:-8000}"
METRICS="http://127.0.0.1:${METRICS_PORT:-8002}/metrics"
CONTAINER=spindle-smoke
ENGINE=trtllm
PYTHON=/opt/venv-tritonserver/bin/python3 # the container's
if [ "${1:-}" = --vllm ]; then
    ENGINE=vllm PYTHON=/opt/venv/bin/python3
    shift
fi
IMAGE="${IMAGE:-spindle:$ENGINE}"
START_LIMIT_S="${START_LIMIT_S:-900}"
failed=0
work="$(mktemp -d)"

finish() {
    if [ "${served:-}" = container ]; then docker rm --force "$CONTAINER" >/dev/null 2>&1; fi
    rm -rf "$work"
}
trap finish EXIT

item() { # item NAME COMMAND...: run a check and say how it ended
    local name="$1"
    shift
    if "$@" >"$work/output" 2>&1; then
        echo "PASS  $name"
    else
        echo "FAIL  $name"
        sed 's/^/      /' "$work/output" | tail -n 20
        failed=1
    fi
}

ask() { # ask MODEL JSON: print the reply
    curl --silent --show-error --fail-with-body --max-time 60 "$HTTP/v2/models/$1/generate" -d "$2"
}

answers() { ask "$1" '{"text_input": "The capital of France is", "max_tokens": 8}' | grep -q text_output; }

streams() {
    curl --silent --no-buffer --max-time 60 "$HTTP/v2/models/ensemble/generate_stream" \
        -d '{"text_input": "Count: one, two,", "max_tokens": 16, "stream": true}' >"$work/stream"
    [ "$(grep -c '^data:' "$work/stream")" -ge 2 ]
}

is_greedy_with_and_without_speculation() {
    local body='{"text_input": "Once upon a time", "max_tokens": 32'
    ask ensemble "$body}" >"$work/with" && ask ensemble "$body, \"num_draft_tokens\": 0}" >"$work/without" && cmp "$work/with" "$work/without"
}

refuses_nonsense() {
    ! ask ensemble '{"text_input": "a", "max_tokens": -1}' >"$work/refusal" && grep -q max_tokens "$work/refusal"
}

lets_go_of_a_client_that_hangs_up() {
    curl --silent --no-buffer --max-time 1 "$HTTP/v2/models/ensemble/generate_stream" \
        -d '{"text_input": "Count from one to a thousand:", "max_tokens": 512, "stream": true}' >/dev/null
    case $? in 0 | 28) ;; *) return 1 ;; esac # 28: curl's time is up
    for _ in $(seq 60); do
        sleep 1
        metric spindle_active_requests | grep -q ' 0$' && return 0
    done
    return 1
}

metric() { curl --silent --max-time 10 "$METRICS" | grep "^$1[{ ]"; }

counts_its_tokens() { metric spindle_emitted_tokens_total && metric spindle_steps_total; }

is_healthy() { python3 docker/healthcheck.py; }

becomes_healthy() {
    local end=$((SECONDS + START_LIMIT_S))
    until python3 docker/healthcheck.py; do
        if [ "$SECONDS" -ge "$end" ]; then return 1; fi
        sleep 3
    done
}

kill_in_container() { # kill_in_container WORD: kill a process whose command line has the word
    docker exec "$CONTAINER" "$PYTHON" -c '
import os, pathlib, signal, sys
found = [p.parent.name for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if sys.argv[1].encode() in p.read_bytes()]
os.kill(min(int(pid) for pid in found if int(pid) != os.getpid()), signal.SIGKILL)' "$1"
}

survives_the_death_of_vllm() { # its engine process is started again, or after three failed probes the container
    kill_in_container VLLM::EngineCore || return 1
    sleep 5
    if is_healthy; then return 1; fi
    becomes_healthy && answers ensemble && [ "$(docker top "$CONTAINER" -eo args | grep -c ^VLLM::EngineCore)" = 1 ]
}

survives_the_death_of_a_stub() { # in the container: the healthcheck sees it, the container ends, docker starts it again
    kill_in_container triton_python_backend_stub || return 1
    sleep 5
    if python3 docker/healthcheck.py; then echo "the healthcheck has not seen it (another model's stub may have died)"; fi
    becomes_healthy
}

check_a_running_service() {
    item "health" is_healthy
    item "ensemble answers" answers ensemble
    item "tensorrt_llm_bls answers" answers tensorrt_llm_bls
    item "a stream comes in parts" streams
    item "greedy text is the same with and without speculation" is_greedy_with_and_without_speculation
    item "a bad request is refused by name" refuses_nonsense
    item "a client that hangs up is let go of" lets_go_of_a_client_that_hangs_up
    item "metrics count" counts_its_tokens
}

deployment() { # deployment CHECKPOINT [DRAFT]: a file for engines_build.build, paths as seen in the container
    echo "output: /work/engines"
    echo "max_batch_size: 8"
    echo "max_context_tokens: 1024"
    echo "max_draft_len: 6"
    echo "target: {name: target, checkpoint: /checkpoints/target, family: ${FAMILY:-llama}}"
    if [ -n "${2:-}" ]; then echo "drafts: [{name: draft, checkpoint: /checkpoints/draft, family: ${FAMILY:-llama}}]"; fi
}

vllm_serving() { # a serving.json, paths as seen in the container; fp32: in bf16 a near tie may end otherwise when it is verified
    echo '{"target": {"engine": "vllm", "model": "/checkpoints/target", "dtype": "fp32", "engine_args": {"speculative_config":'
    echo '  {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}}},'
    echo ' "limits": {"max_active_requests": 8, "max_context_tokens": 1024}}'
}

if [ "${1:-}" = --running ]; then
    check_a_running_service
    exit "$failed"
fi
if [ -z "${1:-}" ] || [ ! -d "$1" ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
fi

chmod 777 "$work"
run=(docker run --gpus all --shm-size 1g --volume "$work:/work" --volume "$(realpath "$1"):/checkpoints/target:ro")
if [ -n "${2:-}" ]; then run+=(--volume "$(realpath "$2"):/checkpoints/draft:ro"); fi

item "image builds" docker build --file "docker/$ENGINE.Dockerfile" --tag "$IMAGE" .
if [ "$ENGINE" = vllm ]; then
    config=/work/serving.json
    vllm_serving >"$work/serving.json"
else
    config=/work/engines/serving.json
    deployment "$@" >"$work/deployment.yaml"
    mkdir -m 777 "$work/engines"
    item "engines build" "${run[@]}" --rm "$IMAGE" "$PYTHON" -m engines_build.build /work/deployment.yaml
    item "a second build does nothing" "${run[@]}" --rm "$IMAGE" "$PYTHON" -m engines_build.build /work/deployment.yaml
fi
item "the container starts" "${run[@]}" --detach --name "$CONTAINER" --restart unless-stopped \
    --publish "127.0.0.1:${HTTP_PORT:-8000}:8000" --publish "127.0.0.1:${METRICS_PORT:-8002}:8002" \
    --env SPINDLE_CONFIG="$config" --env PROBE_PERIOD_S=5 "$IMAGE"
served=container
item "the service is ready" becomes_healthy
check_a_running_service
if [ "$ENGINE" = vllm ]; then item "a dead vLLM comes back" survives_the_death_of_vllm; fi
item "a dead stub is seen and comes back" survives_the_death_of_a_stub
exit "$failed"
