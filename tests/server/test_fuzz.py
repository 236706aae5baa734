"""A few hundred malformed requests through every door; ``bench.micro.fuzz`` sends
thousands.
"""

import pytest

from bench.micro.fuzz import fuzz
from tests.server.harness import free_ports

pytestmark = pytest.mark.slow


def test_malformed_requests_are_answered_and_harm_no_other_request(start_service):
    (port,) = free_ports(1)
    service = start_service(OPENAI_PORT=str(port)).wait_ready()
    service.wait_for_front_end()
    figures, violations = fuzz(service, 450, number=1)
    assert violations == []
    assert min(figures["sent"].values()) >= 150
    for answers in figures["answers"].values():
        assert len(answers) > 1  # some are refused, some are good
