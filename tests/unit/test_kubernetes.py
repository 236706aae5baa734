"""The Kubernetes manifests: valid by the API's own schemas, and compared with what this
project has.
"""

import json
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from backend.config import LimitsConfig
from backend.launcher.environment import read_settings
from backend.ops.metric_names import FAMILIES

DOCKER = Path(__file__).parents[2] / "docker"
FOLDER, OVERLAYS = DOCKER / "kubernetes", DOCKER / "overlays"
VERSIONS = ("1.30", "1.34")


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


RESOURCES = [
    *documents("serving.yaml"),
    *documents("cache.yaml"),
    *documents("scaling.yaml"),
    *documents("network.yaml"),
]
FLEET = [
    *documents("../overlays/fleet/discovery.yaml"),
    *documents("../overlays/fleet/front-end.yaml"),
    *documents("../overlays/fleet/network.yaml"),
]
KINDS = {resource["kind"]: resource for resource in RESOURCES}


def selected(resource):
    """Return a resource as kustomize makes it: with the label in its selector and template."""
    labels = documents("kustomization.yaml")[0]["labels"][0]["pairs"]
    if resource["kind"] == "Deployment":
        template = {
            **resource["spec"]["template"],
            "metadata": {**resource["spec"]["template"]["metadata"], "labels": labels},
        }
        return {
            **resource,
            "spec": {**resource["spec"], "selector": {"matchLabels": labels}, "template": template},
        }
    return resource


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resource_is_valid_by_the_schema_of_its_kind(kind, version):
    kubernetes_validate.validate(selected(KINDS[kind]), version, strict=True)


def patched():
    """Return the Deployment and the Service as the fleet's patches make them."""
    (worker,), (labels,) = (
        documents("../overlays/fleet/worker.yaml"),
        documents("../overlays/fleet/service.yaml"),
    )
    deployment, service = json.loads(json.dumps([selected(KINDS["Deployment"]), KINDS["Service"]]))
    pod, patch = (each["spec"]["template"]["spec"] for each in (deployment, worker))
    (container,), (more,) = pod["containers"], patch.pop("containers")
    assert container["name"] == more["name"]
    pod |= patch
    container |= more
    service["metadata"] |= labels["metadata"]
    return [deployment, service]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fleet_is_valid_by_the_schemas(version):
    for resource in [*FLEET, *patched()]:
        kubernetes_validate.validate(resource, version, strict=True)


def test_workers_and_front_ends_of_a_fleet_find_each_other():
    deployment, service = patched()
    front_end = next(resource for resource in FLEET if resource["kind"] == "Deployment")
    pods = [each["spec"]["template"]["spec"] for each in (deployment, front_end)]
    environments = [
        {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        for pod in pods
    ]
    for name in ("DYN_DISCOVERY_BACKEND", "DYN_EVENT_PLANE", "POD_NAME", "POD_NAMESPACE"):
        assert environments[0][name] == environments[1][name]
    read_settings({name: value for name, value in environments[0].items() if value})
    accounts = {pod["serviceAccountName"] for pod in pods}
    names = {each["metadata"]["name"] for each in FLEET if each["kind"] == "ServiceAccount"}
    assert accounts == names
    assert service["metadata"]["labels"]["nvidia.com/dynamo-discovery-enabled"] == "true"
    dockerfile = (DOCKER / "fleet.Dockerfile").read_text()
    python = front_end["spec"]["template"]["spec"]["containers"][0]["command"][0]
    assert f"DYNAMO_PYTHON={python}" in dockerfile


def test_the_schema_finds_a_mistake():
    broken = selected(KINDS["Deployment"])
    broken["spec"]["template"]["spec"]["containers"][0]["port"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_what_is_asked_for_and_selected_is_there():
    (kustomization,) = documents("kustomization.yaml")
    assert set(kustomization["resources"]) == {
        "serving.yaml",
        "cache.yaml",
        "scaling.yaml",
        "network.yaml",
    }
    labels = kustomization["labels"][0]["pairs"]
    pod = KINDS["Deployment"]["spec"]["template"]["spec"]
    assert KINDS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == labels
    (container,) = pod["containers"]
    assert container["image"] == kustomization["images"][0]["name"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in KINDS["Service"]["spec"]["ports"]} <= set(ports)
    dockerfile = (DOCKER / "trtllm.Dockerfile").read_text()
    assert f"EXPOSE {' '.join(map(str, ports.values()))}" in dockerfile
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    for probe in ("startupProbe", "livenessProbe"):
        assert (
            json.dumps(container[probe]["exec"]["command"]) in dockerfile
        )  # as in its HEALTHCHECK
    assert f"USER {pod['securityContext']['runAsUser']}" in dockerfile


@pytest.mark.parametrize("version", VERSIONS)
def test_the_service_of_triton_s_ports_is_valid(version):
    (service,) = documents("triton.yaml")
    kubernetes_validate.validate(service, version, strict=True)


def test_other_pods_reach_what_asks_for_a_key_and_nothing_else():
    assert [port["port"] for port in KINDS["Service"]["spec"]["ports"]] == [9000]
    (container,) = KINDS["Deployment"]["spec"]["template"]["spec"]["containers"]
    key = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"]}
    assert not key["OPENAI_API_KEY"].get("optional"), "a pod without a key would serve anyone"
    policy = KINDS["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert (
        policy["podSelector"]["matchLabels"]
        == documents("kustomization.yaml")[0]["labels"][0]["pairs"]
    )
    allowed = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert set(allowed) == {port["name"] for port in container["ports"]}
    anyone = [port for port, peers in allowed.items() if {"podSelector": {}} in peers]
    assert anyone == ["openai"]
    # kustomize adds the replicas' label to matchLabels of peers, which would let in replicas alone
    peers = [peer for peers in allowed.values() for peer in peers]
    assert not any("matchLabels" in peer.get("podSelector", {}) for peer in peers)


def test_a_pod_has_time_to_drain():
    pod = KINDS["Deployment"]["spec"]["template"]["spec"]
    before_s = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > before_s + LimitsConfig().drain_s + 20


def test_the_autoscaler_asks_for_metrics_that_the_adapter_makes_of_ours():
    (adapter,) = documents("prometheus-adapter.yaml")
    made = {}
    for rule in adapter["rules"]["custom"]:
        series = rule["seriesQuery"].partition("{")[0]
        made[rule.get("name", {}).get("as", series)] = series
    assert set(made.values()) <= {family.name for family in FAMILIES}
    asked = {
        metric["pods"]["metric"]["name"]
        for metric in KINDS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert asked == set(made)


def built(folder):
    """Return the resources that kustomize makes of a folder."""
    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")


@needs_kubectl
@pytest.mark.parametrize(
    ("folder", "count"),
    [
        (FOLDER, len(RESOURCES)),
        (OVERLAYS / "vllm", len(RESOURCES)),
        (OVERLAYS / "fleet", len(RESOURCES) + len(FLEET)),
    ],
)
def test_kustomize_makes_of_it_what_the_schemas_accept(folder, count):
    resources = built(folder)
    assert len(resources) == count
    for resource in resources:
        kubernetes_validate.validate(resource, VERSIONS[-1], strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", ["vllm", "fleet"])
def test_pods_of_an_overlay_have_its_image_and_probe_by_its_python(overlay):
    (deployment,) = [
        each
        for each in built(OVERLAYS / overlay)
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "spindle")
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"spindle:{overlay}"
    dockerfile = (DOCKER / f"{overlay}.Dockerfile").read_text()
    for probe in ("startupProbe", "livenessProbe"):
        assert json.dumps(container[probe]["exec"]["command"]) in dockerfile
        assert container[probe]["periodSeconds"]
    (config,) = [each["value"] for each in container["env"] if each["name"] == "SPINDLE_CONFIG"]
    assert config.rpartition("/")[0] in {each["mountPath"] for each in container["volumeMounts"]}
