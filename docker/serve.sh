#!/usr/bin/env bash
# Serve with the container's own tritonserver, and end when the service has not served for a while, so that the container is restarted:
# Triton does not notice a stub process that has died. Beside it runs the OpenAI front end, by FRONT_END_PYTHON (empty: none).
# HTTP_PORT, GRPC_PORT, METRICS_PORT, OPENAI_PORT (0: no front end), START_LIMIT_S, PROBE_PERIOD_S,
# PYTHON (for the healthcheck; by default the engine's, SPINDLE_PYTHON).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-${SPINDLE_PYTHON:-python3}}"
START_LIMIT_S="${START_LIMIT_S:-900}"
PROBE_PERIOD_S="${PROBE_PERIOD_S:-15}"
TRITONSERVER="${TRITONSERVER:-tritonserver}"

"$TRITONSERVER" --model-repository "$PWD/model_repository" --disable-auto-complete-config \
    --http-port "${HTTP_PORT:-8000}" --grpc-port "${GRPC_PORT:-8001}" --metrics-port "${METRICS_PORT:-8002}" "$@" &
server=$!
stopping=no
front=
trap 'stopping=yes; kill -TERM "$server" $front 2>/dev/null || true' TERM INT

front_end() { # again whenever it ends by itself
    child=
    trap 'kill -TERM "$child" 2>/dev/null; wait "$child"; exit 0' TERM
    while true; do
        "$FRONT_END_PYTHON" -m backend.openai_frontend &
        child=$!
        wait "$child" || echo "serve.sh: the OpenAI front end ended with status $?: again in 1 s" >&2
        sleep 1
    done
}
if [ -n "${FRONT_END_PYTHON:-}" ] && [ "${OPENAI_PORT:-9000}" != 0 ]; then
    front_end &
    front=$!
    trap 'kill -TERM "$front" 2>/dev/null || true; wait "$front" || true' EXIT
fi

started=$SECONDS
served=no
failures=0
while [ "$stopping" = no ] && kill -0 "$server" 2>/dev/null; do
    sleep "$PROBE_PERIOD_S" &
    wait $! || true # a signal ends the wait, not the sleep
    if [ "$stopping" = yes ] || ! kill -0 "$server" 2>/dev/null; then break; fi
    if "$PYTHON" docker/healthcheck.py; then
        served=yes
        failures=0
    elif [ "$served" = yes ] || [ $((SECONDS - started)) -ge "$START_LIMIT_S" ]; then
        failures=$((failures + 1))
    fi
    if [ "$failures" -ge 3 ] && [ "$stopping" = no ]; then
        echo "serve.sh: three probes in a row have failed; ending" >&2
        kill -TERM "$server" 2>/dev/null || true
        for _ in $(seq 20); do kill -0 "$server" 2>/dev/null && sleep 1; done
        kill -KILL "$server" 2>/dev/null || true
        exit 1
    fi
done
wait "$server"
