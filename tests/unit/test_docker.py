"""The files of the containers: linted by the linters of their formats, and held against what this project has."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from backend.metric_names import FAMILIES, Kind
from engines_build.deployment import load_deployment

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
    found = subprocess.run([str(program), *command[1:]], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_dockerfiles_copy_what_is_there_and_run_as_another_than_root():
    for path in DOCKER.glob("*.Dockerfile"):
        text = path.read_text()
        assert re.search(r"^USER (?!root|0)", text, re.M)
        assert re.search(r"^HEALTHCHECK .*healthcheck\.py", text, re.M)
        for line in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", text, re.M):
            for source in line.split():
                assert (ROOT / source).exists(), f"{path.name}: {source}"


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
    for name in ("spindle-trtllm", "spindle-cpu"):
        assert host in services[name]["networks"]["default"]["aliases"]
        assert any(published.endswith(f":{port}") for published in services[name]["ports"])


def test_the_dashboard_asks_for_metrics_that_exist():
    series = set()
    for family in FAMILIES:
        endings = ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",)
        series |= {family.name + ending for ending in endings}
    dashboard = json.loads((DOCKER / "grafana/dashboards/spindle.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"] for name in re.findall(r"spindle_\w+", target["expr"])}
    assert len(asked) > 15
    assert asked <= series
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_the_smoke_tests_deployment_file_is_one(tmp_path):
    function = re.search(r"^deployment\(\).*?^}", (DOCKER / "smoke.sh").read_text(), re.M | re.S)[0]
    for arguments, drafts in (("target", 0), ("target draft", 1)):
        written = subprocess.run(["bash", "-c", f"{function}\ndeployment {arguments}"], capture_output=True, text=True, check=True)
        (tmp_path / "deployment.yaml").write_text(written.stdout)
        assert len(load_deployment(tmp_path / "deployment.yaml").drafts) == drafts
