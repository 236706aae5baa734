# Spindle with its embedded model on a CPU. Build from the project's root:
#   docker build -f docker/cpu.Dockerfile -t spindle:cpu .
# Not built or run yet; its steps are those of `make serve`.
FROM python:3.11-slim

# Debian keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 spindle \
    && install -d -o spindle /opt/spindle /var/cache/spindle
USER 10001
WORKDIR /opt/spindle
COPY --chown=10001 Makefile requirements.txt requirements-convert.txt ./
# The environment alone: `make serve` would go on to serve.
RUN make .venv/.serve && rm -rf /home/spindle/.cache
COPY --chown=10001 . .

ENV BIND=0.0.0.0 \
    SPINDLE_CACHE=/var/cache/spindle
# Before VOLUME: what is written there later is not kept. Another kind of processor compiles again.
RUN .venv/bin/python -m policy.loops
VOLUME /var/cache/spindle
EXPOSE 8000 8001 8002 9000
# The first start converts the model and measures the machine.
HEALTHCHECK --interval=30s --timeout=20s --start-period=10m --retries=3 CMD [".venv/bin/python", "docker/healthcheck.py"]
CMD [".venv/bin/python", "-m", "backend.cli", "serve", "--verbose"]
