# Spindle with vLLM as its engine, in NVIDIA's container. Build from the project's root:
#   docker build -f docker/vllm.Dockerfile -t spindle:vllm .
# RELEASE is one whose system Python is 3.12. VLLM is the version that `make test-vllm` runs.
# Not built or run yet: see docs/how-to/docker.md.
ARG RELEASE=26.07
FROM nvcr.io/nvidia/tritonserver:${RELEASE}-vllm-python-py3
ARG VLLM=0.32.0

# Triton's compiler builds its launcher in C. Ubuntu keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && (id spindle || useradd --create-home --uid 10001 spindle) \
    && install -d -o spindle /var/cache/spindle /models
ENV SPINDLE_PYTHON=/opt/venv/bin/python3 \
    PATH=/opt/venv/bin:${PATH}

# The container's vLLM is older and stays where it is; this one brings all that Spindle needs. The
# front end is apart: tritonclient wants an older protobuf than vLLM.
COPY docker/frontend-requirements.txt /tmp/frontend-requirements.txt
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir "vllm==${VLLM}" \
    && "$SPINDLE_PYTHON" -c 'import torch; assert torch.version.cuda' \
    && "$SPINDLE_PYTHON" -m venv /opt/frontend \
    && /opt/frontend/bin/pip install --no-cache-dir --no-deps --requirement /tmp/frontend-requirements.txt \
    && /opt/frontend/bin/pip check \
    && rm /tmp/frontend-requirements.txt

COPY policy /opt/spindle/policy
COPY backend /opt/spindle/backend
COPY engines_build /opt/spindle/engines_build
COPY model_repository /opt/spindle/model_repository
COPY docker/healthcheck.py /opt/spindle/docker/

# Compiled kernels are kept, too. A model's name is a folder: nothing is looked up on a hub.
ENV PYTHONPATH=/opt/spindle \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    VLLM_CACHE_ROOT=/var/cache/spindle/vllm \
    TRITON_CACHE_DIR=/var/cache/spindle/triton \
    FRONT_END_PYTHON=/opt/frontend/bin/python \
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
# The first start compiles vLLM's graphs and measures its steps.
HEALTHCHECK --interval=30s --timeout=20s --start-period=15m --retries=3 \
    CMD ["/opt/venv/bin/python3", "docker/healthcheck.py"]
CMD ["/opt/venv/bin/python3", "-m", "backend.launcher.container"]
