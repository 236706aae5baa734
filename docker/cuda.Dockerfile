# Spindle with its engine for NVIDIA GPUs, in NVIDIA's container. Build from the project's root:
#   docker build -f docker/cuda.Dockerfile -t spindle:cuda .
# RELEASE is one whose system Python is 3.12.
# Not built or run yet: see docs/how-to/docker.md.
ARG RELEASE=26.07
FROM nvcr.io/nvidia/tritonserver:${RELEASE}-pyt-python-py3

# Triton's compiler builds its launcher in C. Ubuntu keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && (id spindle || useradd --create-home --uid 10001 spindle) \
    && install -d -o spindle /var/cache/spindle /models
ENV SPINDLE_PYTHON=/opt/venv/bin/python3 \
    PATH=/opt/venv/bin:${PATH}

# torch from PyPI is its CUDA build. The container has a tritonserver, and OpenVINO is for CPUs.
COPY requirements.txt requirements-convert.txt /tmp/all/
RUN grep --no-filename --invert-match --extended-regexp \
        '^(nvidia-pytriton|openvino|tritonclient|gguf)' /tmp/all/* > /tmp/requirements.txt \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --requirement /tmp/requirements.txt \
    && rm --recursive /tmp/all /tmp/requirements.txt \
    && "$SPINDLE_PYTHON" -c 'import torch, triton; assert torch.version.cuda'

COPY policy /opt/spindle/policy
COPY backend /opt/spindle/backend
COPY engines_build /opt/spindle/engines_build
COPY model_repository /opt/spindle/model_repository
COPY docker/healthcheck.py /opt/spindle/docker/

# Compiled kernels are kept, too. A model's name is a folder: nothing is looked up on a hub.
ENV PYTHONPATH=/opt/spindle \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    TRITON_CACHE_DIR=/var/cache/spindle/triton \
    FRONT_END_PYTHON=/opt/venv/bin/python3 \
    BIND=0.0.0.0 \
    SPINDLE_CACHE=/var/cache/spindle \
    SPINDLE_CONFIG=/models/serving.json
USER 10001
WORKDIR /opt/spindle
# Before VOLUME: what is written there later is not kept. Another kind of processor compiles again.
RUN "$SPINDLE_PYTHON" -m policy.loops
VOLUME ["/models", "/var/cache/spindle"]
EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
# The first start measures the latency tables.
HEALTHCHECK --interval=30s --timeout=20s --start-period=15m --retries=3 \
    CMD ["/opt/venv/bin/python3", "docker/healthcheck.py"]
CMD ["/bin/sh", "-c", "python3 -m engines_build.prepare --config \"$SPINDLE_CONFIG\" && exec python3 -m backend.launcher.container"]
