"""Over the wire: what was answered to a tenant helps with the next answers to that tenant, for who
may be remembered, and over a restart where that is set; no text changes.
"""

import json
import stat

import openai
import pytest

from tests.server.harness import free_ports

PROMPT = "the same question: "
TOKENS = 60


@pytest.fixture(scope="module")
def remembering(start_service, tmp_path_factory):
    """Return a function that starts the service, and its cache folder, always the same."""
    folder = tmp_path_factory.mktemp("remembering")
    draft = {"name": "suffix", "engine": "suffix", "keep_remembered": True}
    settings = {
        "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.001}},
        "drafts": [draft],
        "policy": {"kind": "fixed", "draft": "suffix", "length": 4},
    }
    (folder / "serving.json").write_text(json.dumps(settings))

    def start(**environment):
        cache = {"SPINDLE_CACHE": str(folder / "cache")}
        return start_service(folder / "serving.json", **cache, **environment).wait_ready()

    return start, folder / "cache"


def accepted(service, **inputs):
    status, reply = service.generate(PROMPT, TOKENS, return_perf_metrics=True, **inputs)
    assert status == 200, reply
    assert reply["text_output"].startswith(PROMPT)
    return reply["text_output"], reply["total_accepted_draft_tokens"]


def test_answers_are_remembered_by_tenant_unless_not_to_be_and_over_a_restart(
    remembering, reference_text
):
    start, cache = remembering
    (port,) = free_ports(1)
    service = start(OPENAI_PORT=str(port))
    service.wait_for_front_end()
    text = PROMPT + reference_text(PROMPT, TOKENS)
    (_, alone), *others = (accepted(service, remember=False) for _ in range(3))
    assert others == [(text, alone)] * 2
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    asked = {"model": model.id, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    client.completions.create(**asked, extra_body={"remember": False, "ignore_eos": True})
    assert service.metric("spindle_remembered_tokens_total") == 0
    assert accepted(service) == (text, alone)
    known = [accepted(service) for _ in range(2)]
    assert known == [(text, known[0][1])] * 2
    assert known[0][1] > alone + TOKENS // 2
    assert accepted(service, cache_salt="other")[1] < alone + TOKENS // 2
    service.wait_until(
        lambda: service.metric("spindle_remembered_tokens_total", event="kept") > 3 * TOKENS, 5
    )
    assert service.stop() == 0
    (file,) = (cache / "remembered").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = start()
    assert accepted(again) == known[0]
    assert again.stop() == 0
