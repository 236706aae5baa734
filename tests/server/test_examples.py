"""Every example is run as its reader would run it, against a real tritonserver with fakes."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from backend import PROJECT_ROOT
from backend.config import DEFAULT_CONFIG, load_config
from tests.server.harness import CONFIG, free_ports

EXAMPLES = PROJECT_ROOT / "examples"


@pytest.fixture(scope="module")
def examples(start_service, tmp_path_factory):
    """A service of examples/serving-my-policy.json, its engines replaced by the fakes."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copy(EXAMPLES / "my_policy.py", folder)
    config = json.loads((EXAMPLES / "serving-my-policy.json").read_text())
    fakes = json.loads(CONFIG.read_text())
    config |= {name: fakes[name] for name in ("target", "drafts")}
    config["openai"] = {"chat_template": "chat.jinja"}
    (folder / "serving.json").write_text(json.dumps(config))
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    (port,) = free_ports(1)
    service = start_service(folder / "serving.json", OPENAI_PORT=str(port)).wait_ready()
    service.wait_for_front_end()
    return service


def run(name, *arguments):
    """Return what an example prints."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    options = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, check=False, cwd=PROJECT_ROOT, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(service, prompt):
    """Return the text that the examples ask for."""
    body = {"text_input": prompt, "max_tokens": 48, "exclude_input_in_output": True}
    status, text = service.post("/v2/models/ensemble/generate", body)
    assert status == 200, text
    return json.loads(text)["text_output"]


def test_plain_http(examples):
    url = f"http://127.0.0.1:{examples.http}"
    printed = run("http_generate.py", "--url", url, "--prompt", "one two")
    text, _, counted = printed.rstrip("\n").rpartition("\n")
    assert text == written(examples, "one two")
    counts = re.fullmatch(r"(\d+) of (\d+) proposed tokens were accepted", counted)
    accepted, proposed = map(int, counts.groups())
    assert 0 < accepted <= proposed


def test_grpc(examples):
    printed = run("grpc_stream.py", "--url", f"127.0.0.1:{examples.grpc}", "--prompt", "one two")
    assert printed.startswith(f"{written(examples, 'one two')}\n")
    counted = re.findall(
        r"^(good|poor): (\d+) of (\d+) proposed tokens were accepted$", printed, re.M
    )
    assert sum(int(accepted) for _, accepted, _ in counted) > 0


def test_openai(examples):
    printed = run("openai_chat.py", "--url", f"http://127.0.0.1:{examples.openai}/v1")
    prompt = re.search(r'--prompt", default="(.*?)"', (EXAMPLES / "openai_chat.py").read_text())[1]
    text = written(examples, prompt)
    assert printed == f"{text}\nfake: {len(prompt)} tokens read, {len(text)} written\n"


def test_the_policy_plans_what_is_served_and_never_fails(examples):
    before = examples.metric("spindle_draft_tokens_total")
    assert examples.generate("served", 40)[0] == 200
    examples.wait_until(lambda: examples.metric("spindle_draft_tokens_total") > before)
    assert examples.metric("spindle_fallback_total") == 0


def test_the_configuration_names_the_policy():
    assert load_config(EXAMPLES / "serving-my-policy.json").policy.is_custom


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/first-request.md"])
def test_the_first_answer_is_the_one_that_the_page_shows(page, start_service):
    text = (PROJECT_ROOT / page).read_text("utf-8")
    (block,) = re.findall(r"```python\n(from openai.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"print\(.*\)  # (.*)", block)
    (port,) = free_ports(1)
    start_service(DEFAULT_CONFIG, OPENAI_PORT=str(port)).wait_ready(
        limit_s=300
    ).wait_for_front_end()
    block = block.replace("localhost:9000", f"127.0.0.1:{port}")
    done = subprocess.run(
        [sys.executable, "-c", block], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.strip(), done.stderr) == (shown, "")
