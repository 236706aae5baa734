#!/usr/bin/env bash
# A check by hand of the container on a GPU, item by item: builds engines for a checkpoint, serves, asks, streams, cancels, kills a stub.
#
#   docker/smoke.sh CHECKPOINT [DRAFT_CHECKPOINT]     on a machine with docker and a GPU (family llama or qwen: FAMILY)
#   docker/smoke.sh --running                         the items that need a running service only (HTTP_PORT, METRICS_PORT)
#
# Prints PASS or FAIL for every item; ends with 1 if any failed. Not run on a GPU yet.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

IMAGE="${IMAGE:-spindle:trtllm}"
HTTP="http://127.0.0.1:${HTTP_PORT:-8000}"
METRICS="http://127.0.0.1:${METRICS_PORT:-8002}/metrics"
CONTAINER=spindle-smoke
PYTHON=/opt/venv-tritonserver/bin/python3 # the container's
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

survives_the_death_of_a_stub() { # in the container: the healthcheck sees it, the container ends, docker starts it again
    docker exec "$CONTAINER" "$PYTHON" -c '
import os, pathlib, signal
stubs = [p.parent.name for p in pathlib.Path("/proc").glob("[0-9]*/comm") if p.read_text().startswith("triton_python")]
os.kill(int(stubs[0]), signal.SIGKILL)' || return 1
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

if [ "${1:-}" = --running ]; then
    check_a_running_service
    exit "$failed"
fi
if [ -z "${1:-}" ] || [ ! -d "$1" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi

deployment "$@" >"$work/deployment.yaml"
mkdir -p "$work/engines"
chmod 777 "$work" "$work/engines"
run=(docker run --rm --gpus all --shm-size 1g --volume "$work:/work" --volume "$(realpath "$1"):/checkpoints/target:ro")
if [ -n "${2:-}" ]; then run+=(--volume "$(realpath "$2"):/checkpoints/draft:ro"); fi

item "image builds" docker build --file docker/trtllm.Dockerfile --tag "$IMAGE" .
item "engines build" "${run[@]}" "$IMAGE" "$PYTHON" -m engines_build.build /work/deployment.yaml
item "a second build does nothing" "${run[@]}" "$IMAGE" "$PYTHON" -m engines_build.build /work/deployment.yaml
item "the container starts" docker run --detach --name "$CONTAINER" --restart unless-stopped --gpus all --shm-size 1g \
    --publish "127.0.0.1:${HTTP_PORT:-8000}:8000" --publish "127.0.0.1:${METRICS_PORT:-8002}:8002" \
    --volume "$work:/work" --env SPINDLE_CONFIG=/work/engines/serving.json --env PROBE_PERIOD_S=5 "$IMAGE"
served=container
item "the service is ready" becomes_healthy
check_a_running_service
item "a dead stub is seen and comes back" survives_the_death_of_a_stub
exit "$failed"
