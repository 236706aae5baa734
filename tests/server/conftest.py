from dataclasses import replace
from pathlib import Path

import pytest

from backend.app import build
from backend.config import load_config
from backend.request import GenerationRequest
from tests.server.harness import CONFIG, Service, write_engine_python


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)


class _Collect:
    cancelled = False

    def __init__(self):
        self.text = None

    def chunk(self, delta):
        raise AssertionError("not a streaming request")

    def final(self, delta, reason, usage):
        self.text = delta.text

    def error(self, code, message):
        raise AssertionError(message)


@pytest.fixture(scope="session")
def reference_text():
    """Return what the fake target of serving.json writes alone: computed in this process without server, wire, batch or draft."""
    config = load_config(CONFIG)
    app = build(replace(config, target=replace(config.target, step_s=0.0), drafts=()))

    def text(prompt, max_tokens):
        sink = _Collect()
        request = GenerationRequest(prompt, max_tokens, end_id=-1, exclude_input_in_output=True)
        app.orchestrator.submit(app.session(request, sink))
        while sink.text is None:
            app.orchestrator.step()
        return sink.text

    yield text
    app.close()


@pytest.fixture(scope="session")
def faulty_python(tmp_path_factory):
    """Return a Python for ``SPINDLE_PYTHON`` that runs tests.server.faulty_engine as the engine process."""
    return str(write_engine_python(tmp_path_factory.mktemp("python") / "python", "tests.server.faulty_engine"))


@pytest.fixture(scope="session")
def start_service(tmp_path_factory):
    """Start services; what still runs at the end is stopped."""
    services = []

    def start(config=CONFIG, *arguments, log=None, **environment):
        services.append(Service(log or tmp_path_factory.mktemp("service") / "log", config, *arguments, **environment))
        return services[-1]

    yield start
    for service in services:
        if service.process.poll() is None:
            service.stop()


@pytest.fixture(scope="session")
def service(start_service):
    """The service that tests share; they must leave it as they found it."""
    return start_service().wait_ready()
