# Spindle on TensorRT-LLM 1.2.1 engines, in NVIDIA's container. Build from the project's root:
#   docker build -f docker/trtllm.Dockerfile -t spindle:trtllm .
# Not built or run yet: see docs/tensorrt_llm.md.
FROM nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

# The container has TensorRT-LLM, torch, NumPy, tokenizers and transformers; only what it lacks is added. Without a network:
# `pip download -d wheels` of both files elsewhere, COPY wheels, and PIP_FIND_LINKS=wheels PIP_NO_INDEX=1.
COPY docker/trtllm-requirements.txt /tmp/requirements.txt
COPY docker/frontend-requirements.txt /tmp/frontend-requirements.txt
RUN python3 -m pip install --no-cache-dir -r /tmp/requirements.txt \
    && python3 -m venv /opt/frontend \
    && /opt/frontend/bin/pip install --no-cache-dir -r /tmp/frontend-requirements.txt \
    && rm /tmp/requirements.txt /tmp/frontend-requirements.txt

RUN (id spindle || useradd --create-home --uid 10001 spindle) && install -d -o spindle /var/cache/spindle /engines
COPY policy /opt/spindle/policy
COPY backend /opt/spindle/backend
COPY engines_build /opt/spindle/engines_build
COPY model_repository /opt/spindle/model_repository
COPY docker/healthcheck.py docker/serve.sh /opt/spindle/docker/
COPY docker/deployments /opt/spindle/docker/deployments

# Names of the engine process's interpreter and files; the container's own Triton serves, without the launcher.
ENV PYTHONPATH=/opt/spindle \
    SPINDLE_PYTHON=/usr/bin/python3 \
    FRONT_END_PYTHON=/opt/frontend/bin/python \
    BIND=0.0.0.0 \
    SPINDLE_CACHE=/var/cache/spindle \
    SPINDLE_CONFIG=/engines/serving.json
USER 10001
WORKDIR /opt/spindle
VOLUME ["/engines", "/var/cache/spindle"]
EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=20s --start-period=15m --retries=3 CMD ["python3", "docker/healthcheck.py"]
CMD ["bash", "docker/serve.sh"]
