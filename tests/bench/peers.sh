#!/bin/sh
# Makes the environments of the peers that `make bench ARGS="--peers ..."` compares with, each apart: tests/bench/peers.sh openvino
# transformers is in the project's own environment.
set -eu
cd "$(dirname "$0")/../.."
for peer in "$@"; do
    case $peer in
    openvino) packages=openvino-genai==2026.4.1 ;;
    *) echo "peers.sh: no peer '$peer': openvino" >&2 && exit 2 ;;
    esac
    "${PYTHON:-python3}" -m venv "build/peers/$peer"
    "build/peers/$peer/bin/pip" install --quiet --disable-pip-version-check "$packages"
done
