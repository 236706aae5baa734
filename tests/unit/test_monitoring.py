"""The dashboard and the alerts: valid to the tools that read them, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from backend.ops.metric_names import FAMILIES, MetricKind

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/spindle.json").read_text())
ALERTS = yaml.safe_load((DOCKER / "prometheus/alerts.yaml").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
LABELS_OF_OTHERS = {"le", "job"}


def families(expression):
    """Return {family: labels that the expression gives it in braces} of the service's metrics in an
    expression.
    """
    endings = {
        f.name + end: f
        for f in FAMILIES
        for end in (("_bucket", "_sum", "_count") if f.kind is MetricKind.HISTOGRAM else ("",))
    }
    found = re.findall(r"\b((?:spindle|nv_trt_llm|nv_llm)_\w+)(?:\{([^}]*)\})?", expression)
    assert {name for name, _ in found} <= set(endings), expression
    return [(endings[name], set(re.findall(r"(\w+)=?[=!~]+\"", labels))) for name, labels in found]


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(rule["expr"] for rule in RULES)])
def test_an_expression_asks_for_metrics_and_labels_that_exist(expression):
    asked = families(expression)
    assert asked or "up{" in expression
    for family, labels in asked:
        assert labels <= set(family.labels), family.name
    grouped = {
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    assert grouped <= LABELS_OF_OTHERS | {label for family, _ in asked for label in family.labels}


def test_the_dashboard_is_one_to_grafanas_own_schema():
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))

    def lost(given, back, path=""):
        if isinstance(given, dict):
            return [
                each
                for key in given
                for each in lost(given[key], (back or {}).get(key), f"{path}.{key}")
            ]
        if isinstance(given, list):
            return [
                each
                for index, item in enumerate(given)
                for each in lost(item, back[index], f"{path}[{index}]")
            ]
        return [] if given == back else [(path, given, back)]

    assert lost(DASHBOARD, kept) == []
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_says_how_urgent_it_is_and_what_is_wrong():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    tried = (DOCKER / "prometheus/alerts_test.yaml").read_text()
    assert [rule["alert"] for rule in RULES if f'alertname="{rule["alert"]}"' not in tried] == []


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool (Debian: package prometheus) is not installed"
)
@pytest.mark.parametrize(
    "arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")]
)
def test_promtool_accepts_the_alerts_and_sees_each_raised(arguments):
    done = subprocess.run(
        ["promtool", *arguments],
        check=False,
        cwd=DOCKER / "prometheus",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
