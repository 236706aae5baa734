# Spindle on TensorRT-LLM 1.2.1, checkpoints and engines, in NVIDIA's container. Build from the project's root:
#   docker build -f docker/trtllm.Dockerfile -t spindle:trtllm .
# RELEASE may be 26.04 to 26.07, which all hold TensorRT-LLM 1.2.1.
# Not built or run yet: see docs/how-to/tensorrt-llm.md.
ARG RELEASE=26.07
FROM nvcr.io/nvidia/tritonserver:${RELEASE}-trtllm-python-py3

# Since 26.03 torch and tensorrt_llm live in this environment; the system's Python has neither.
ENV SPINDLE_PYTHON=/opt/venv-tritonserver/bin/python3 \
    PATH=/opt/venv-tritonserver/bin:${PATH}
# Another release than those named above is refused here, not when a model is loaded.
RUN test "$("$SPINDLE_PYTHON" -c 'from importlib.metadata import version; print(version("tensorrt_llm"))')" = 1.2.1

# Only what the container lacks is added, every package by name. Without a network:
# `pip download --no-deps -d wheels -r` of both files elsewhere, COPY wheels, and
# PIP_FIND_LINKS=wheels PIP_NO_INDEX=1. The container lacks python3-venv, so the front end's environment gets no pip of its own.
COPY docker/trtllm-requirements.txt /tmp/requirements.txt
COPY docker/frontend-requirements.txt /tmp/frontend-requirements.txt
RUN "$SPINDLE_PYTHON" -m pip install --no-cache-dir --no-deps -r /tmp/requirements.txt \
    && "$SPINDLE_PYTHON" -m venv --without-pip /opt/frontend \
    && "$SPINDLE_PYTHON" -m pip --python /opt/frontend/bin/python install --no-cache-dir --no-deps -r /tmp/frontend-requirements.txt \
    && "$SPINDLE_PYTHON" -m pip --python /opt/frontend/bin/python check \
    && rm /tmp/requirements.txt /tmp/frontend-requirements.txt

RUN (id spindle || useradd --create-home --uid 10001 spindle) && install -d -o spindle /var/cache/spindle /engines
COPY policy /opt/spindle/policy
COPY backend /opt/spindle/backend
COPY engines_build /opt/spindle/engines_build
COPY model_repository /opt/spindle/model_repository
COPY docker/healthcheck.py /opt/spindle/docker/
COPY docker/deployments /opt/spindle/docker/deployments

# Names of the engine process's files; the container's own Triton serves, without the launcher.
# Converters and quantisers read what they are given by path: a name that would be looked up on
# Hugging Face's hub is an error, not a download.
ENV PYTHONPATH=/opt/spindle \
    HF_HUB_OFFLINE=1 \
    HF_DATASETS_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    FRONT_END_PYTHON=/opt/frontend/bin/python \
    BIND=0.0.0.0 \
    SPINDLE_CACHE=/var/cache/spindle \
    SPINDLE_CONFIG=/engines/serving.json
USER 10001
WORKDIR /opt/spindle
# Before VOLUME: what is written there later is not kept. Another kind of processor compiles again.
RUN "$SPINDLE_PYTHON" -m policy.loops
VOLUME ["/engines", "/var/cache/spindle"]
EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=20s --start-period=15m --retries=3 \
    CMD ["/opt/venv-tritonserver/bin/python3", "docker/healthcheck.py"]
CMD ["/opt/venv-tritonserver/bin/python3", "-m", "backend.launcher.container"]
