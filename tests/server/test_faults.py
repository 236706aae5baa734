"""The same faults through every door: HTTP and gRPC on three model names, and the OpenAI front
end.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tritonclient.utils import InferenceServerException

from tests.server.harness import CONFIG, free_ports
from tests.server.tensors import connected, ids_of, token_request

DOORS = (
    "HTTP ensemble",
    "HTTP tensorrt_llm_bls",
    "gRPC ensemble",
    "gRPC tensorrt_llm_bls",
    "gRPC tensorrt_llm",
    "OpenAI",
)


@pytest.fixture(scope="module")
def faulty(start_service, faulty_python):
    """A service whose engines raise over some prompts."""
    (port,) = free_ports(1)
    service = start_service(
        CONFIG, SPINDLE_PYTHON=faulty_python, OPENAI_PORT=str(port)
    ).wait_ready()
    service.wait_for_front_end()
    return service


def ask(service, door, prompt, max_tokens):
    """Return (text, "") or ("", the error) of a request that no end token ends early."""
    interface, _, model = door.partition(" ")
    if interface == "HTTP":
        status, reply = service.generate(prompt, max_tokens, model, exclude_input_in_output=True)
        return (reply["text_output"], "") if status == 200 else ("", reply["error"])
    try:
        if interface == "OpenAI":
            with openai.OpenAI(
                base_url=f"http://127.0.0.1:{service.openai}/v1", api_key="none", max_retries=0
            ) as client:
                options = {"temperature": 0, "extra_body": {"min_tokens": max_tokens}}
                reply = client.completions.create(
                    model="fake", prompt=prompt, max_tokens=max_tokens, **options
                )
            return reply.choices[0].text, ""
        with connected(service) as client:
            if model == "tensorrt_llm":
                return bytes(
                    ids_of(
                        client.ask(
                            model,
                            **token_request(prompt, max_tokens, exclude_input_in_output=[[True]]),
                        )
                    )
                ).decode(), ""
            inputs = {
                "text_input": [[prompt]],
                "max_tokens": [[max_tokens]],
                "end_id": [[-1]],
                "exclude_input_in_output": [[True]],
            }
            return client.ask(model, **inputs)[-1]["text_output"].item().decode(), ""
    except (openai.APIError, InferenceServerException) as error:
        return "", str(error)


@pytest.mark.parametrize("door", DOORS)
def test_a_draft_that_fails_costs_no_request_and_no_token(faulty, reference_text, door):
    before = faulty.metric("spindle_fallback_total", reason="draft_error")
    assert ask(faulty, door, "orphan ", 30) == (reference_text("orphan ", 30), "")
    faulty.wait_until(
        lambda: (
            faulty.metric("spindle_fallback_total", reason="draft_error") > before
            or drafts_rest(faulty)
        ),
        5,
    )


def drafts_rest(service):
    """Return whether both drafts have failed lately, so that none is asked."""
    return service.log.read_text(errors="replace").count("failed; disabled for") >= 2


@pytest.mark.parametrize("door", DOORS)
def test_a_target_that_fails_ends_the_request_with_an_error_and_the_next_one_is_served(
    faulty, reference_text, door
):
    text, error = ask(faulty, door, "poison ", 5)
    assert text == ""
    assert "the engine failed (MemoryError)" in error
    assert ask(faulty, door, "healthy ", 20) == (reference_text("healthy ", 20), "")


def test_requests_at_every_door_get_an_error_when_the_engine_dies_and_all_doors_open_again(
    faulty, reference_text
):
    with ThreadPoolExecutor(len(DOORS)) as pool:
        replies = [
            pool.submit(ask, faulty, door, f"{number} ", 1500) for number, door in enumerate(DOORS)
        ]
        faulty.wait_until(lambda: faulty.health()["active"] == len(DOORS), 20)
        os.kill(faulty.health()["pid"], signal.SIGKILL)
        ended = [reply.result(timeout=30) for reply in replies]
    assert all("engine process has ended" in error for _, error in ended), ended
    faulty.wait_until(lambda: faulty.command("health")[0] == 200, 60)
    for door in DOORS:
        assert ask(faulty, door, "again ", 10) == (reference_text("again ", 10), "")


def test_a_lost_target_costs_every_request_one_error_and_the_process_starts_again(
    faulty, reference_text
):
    before = faulty.health()["pid"]
    with ThreadPoolExecutor(len(DOORS)) as pool:
        replies = [
            pool.submit(ask, faulty, door, f"{number} ", 1500) for number, door in enumerate(DOORS)
        ]
        faulty.wait_until(lambda: faulty.health()["active"] == len(DOORS), 20)
        _, error = ask(faulty, "HTTP ensemble", "lost ", 5)
        ended = [reply.result(timeout=30) for reply in replies]
    assert "being restarted" in error
    assert all("being restarted" in error for _, error in ended), ended
    faulty.wait_until(lambda: ask(faulty, DOORS[0], "again ", 10)[0], 30)
    for door in DOORS:
        assert ask(faulty, door, "again ", 10) == (reference_text("again ", 10), "")
    assert faulty.health()["pid"] != before
    assert "the target engine is lost" in faulty.log.read_text(errors="replace")


def test_a_second_signal_ends_what_runs_by_an_error_at_every_door(faulty):
    with ThreadPoolExecutor(len(DOORS)) as pool:
        replies = [
            pool.submit(ask, faulty, door, f"{number} ", 1900) for number, door in enumerate(DOORS)
        ]
        faulty.wait_until(lambda: faulty.health()["active"] == len(DOORS), 20)
        faulty.process.send_signal(signal.SIGTERM)
        faulty.wait_until(lambda: faulty.health()["status"] == "draining", 10)
        assert faulty.health()["active"] == len(DOORS)
        faulty.process.send_signal(signal.SIGTERM)
        ended = [reply.result(timeout=30) for reply in replies]
    assert all("the server is shutting down" in error for _, error in ended), ended
    assert faulty.process.wait(20) == 0
