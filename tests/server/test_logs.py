import json
import os
import signal

from tests.server.harness import CONFIG


def test_every_process_of_ours_writes_json_lines_when_asked_to(start_service, tmp_path):
    config = tmp_path / "serving.json"
    settings = {"limits": {"kv_cache_tokens": 256}, "log": {"format": "json"}}
    config.write_text(json.dumps({**json.loads(CONFIG.read_text()), **settings}))
    service = start_service(config).wait_ready()
    assert service.generate("more than there is room for ", 1000)[0] == 400
    os.kill(service.health()["pid"], signal.SIGKILL)
    service.wait_until(lambda: service.generate("x", 4)[0] == 200)
    assert service.stop() == 0
    lines = service.log.read_text().splitlines()
    assert not [line for line in lines if " backend." in line]  # nothing in the text form
    ours = [json.loads(line) for line in lines if line.startswith("{")]
    refused = next(line for line in ours if line["event"] == "request refused")
    assert (refused["process"], refused["level"], refused["code"], refused["waiting"]) == (
        "engine",
        "warning",
        "INVALID_ARGUMENT",
        0,
    )
    assert any(
        line["process"] == "spindle" and "the engine process ended with status -9" in line["event"]
        for line in ours
    )
