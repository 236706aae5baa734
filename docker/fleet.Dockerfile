# A replica of a Dynamo fleet, and Dynamo's front end: an image of Spindle with Dynamo's environment. Build from the project's root:
#   docker build -f docker/fleet.Dockerfile --build-arg BASE=spindle:cuda -t spindle:fleet .
# Not built or run yet.
ARG BASE=spindle:cuda
FROM ${BASE}

USER 0
COPY requirements-fleet.txt /tmp/requirements-fleet.txt
RUN python3 -m venv /opt/fleet \
    && /opt/fleet/bin/pip install --no-cache-dir --no-deps --requirement /tmp/requirements-fleet.txt \
    && rm /tmp/requirements-fleet.txt
ENV DYNAMO_PYTHON=/opt/fleet/bin/python \
    DYN_EVENT_PLANE=zmq
USER 10001
HEALTHCHECK --interval=30s --timeout=20s --start-period=15m --retries=3 \
    CMD ["/opt/venv/bin/python3", "docker/healthcheck.py"]
