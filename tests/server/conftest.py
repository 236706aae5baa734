from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from backend.app import build
from backend.config import load_config
from tests.fakes.apps import ask, finish
from tests.server.harness import CONFIG, STOP_LIMIT_S, Service, write_engine_python
from tests.server.tensors import connected


@pytest.fixture(scope="session")
def reference_text():
    """Return what the fake target of serving.json writes alone: computed in this process without
    server, wire, batch or draft.
    """
    config = load_config(CONFIG)
    app = build(replace(config, target=replace(config.target, options={}), drafts=()))

    def text(prompt, max_tokens):
        finish(app, sink := ask(app, prompt, max_tokens, exclude_input_in_output=True))
        return sink.text

    yield text
    app.close()


@pytest.fixture(scope="session")
def faulty_python(tmp_path_factory):
    """Return a Python for ``SPINDLE_PYTHON`` that runs tests.server.faulty_engine as the engine
    process.
    """
    return str(
        write_engine_python(
            tmp_path_factory.mktemp("python") / "python", "tests.server.faulty_engine"
        )
    )


@contextmanager
def services(tmp_path_factory):
    """Give a function that starts services; what still runs at the end is stopped, all at once."""
    started = []

    def start(config=CONFIG, *arguments, log=None, **environment):
        log = log or tmp_path_factory.mktemp("service") / "log"
        started.append(Service(log, config, *arguments, **environment))
        return started[-1]

    yield start
    running = [service for service in started if service.process.poll() is None]
    for service in running:
        service.process.terminate()
    for service in running:
        service.process.wait(STOP_LIMIT_S)


@pytest.fixture(scope="module")
def start_service(tmp_path_factory):
    """Start services of a module's own."""
    with services(tmp_path_factory) as start:
        yield start


HOSTED_CONFIG = CONFIG.with_name("hosted.json")
HOSTED: dict[str, list[Any]] = {
    "test_requests": [],
    "test_cancellation": [pytest.mark.slow],
    "test_guides": [pytest.mark.slow],
    "test_one_to_one": [pytest.mark.slow],
    "test_options": [pytest.mark.slow],
    "test_tensors": [pytest.mark.slow],
}
"""Files that run over a hosted engine too, which has the texts of the fake one."""


def pytest_generate_tests(metafunc):
    name = metafunc.module.__name__.rpartition(".")[2]
    if "service" in metafunc.fixturenames and name in HOSTED:
        hosted = pytest.param(HOSTED_CONFIG, id="hosted", marks=HOSTED[name])
        steps = pytest.param(CONFIG, id="steps")
        metafunc.parametrize("service", [steps, hosted], indirect=True, scope="session")


@pytest.fixture(scope="session")
def service(tmp_path_factory, request):
    """The service that tests share; they must leave it as they found it."""
    with services(tmp_path_factory) as start:
        yield start(getattr(request, "param", CONFIG)).wait_ready()


@pytest.fixture
def refused(service):
    """The options that the target of the service refuses, with the reason."""
    return load_config(service.config).target.kind.answer("REFUSES", {})


@pytest.fixture
def client(service):
    """A gRPC stream to the shared service."""
    with connected(service) as stream:
        yield stream
