"""deploy/systemd, deploy/kubernetes, deploy/helm: tools accept them, and what they name exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dcp.server.admin.api_page import described
from dcp.server.cluster.replicated_node import LEAVE_MAX_S
from dcp.server.config.settings import Settings
from dcp.server.config.sources import OPTIONS
from dcp.server.main import ExitCode
from dcp.server.signal_watch import STOP_LIMIT_S

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "dcpd.service"
KUBERNETES = ROOT / "deploy" / "kubernetes"
EXPOSURE_MAX = 15
"""Tenths of the exposure level that systemd-analyze finds for the unit; 0 is none."""
MONITOR_SCHEMA = yaml.safe_load(Path(__file__).with_name("servicemonitor.schema.yaml").read_text())
CHART = ROOT / "deploy" / "helm" / "dcpd"
API_VERSION = "1.34"
"""Of Kubernetes, whose schemas the manifests are checked with."""
KINDS = ("NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet")
HAND_OVER_S = 60
"""How long the hook before a stop may take."""
Documents = dict[tuple[str, str], dict[str, Any]]
"""By kind and name."""
SETTINGS = {f"DCPD_{key.upper()}" for key in OPTIONS}


def needs(command: str, package: str) -> str:
    found = shutil.which(command)
    if found is None:
        pytest.skip(f"the command {command} is missing ({package})")
    return found


def unit() -> dict[str, str]:
    pairs = (
        line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line)
    )
    return dict(pairs)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    command = needs("systemd-analyze", "sudo apt-get install systemd")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/dcpd/bin/dcpd", "/bin/true"))
    done = subprocess.run(
        [command, "verify", "--man=no", str(copy)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [command, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(copy)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_unit_fits_the_server() -> None:
    found = unit()
    assert found["Type"] == "notify"
    assert {name.split("=")[0] for name in found["Environment"].split()} <= SETTINGS | {
        "PYTHONUNBUFFERED"
    }
    final = {int(code) for code in found["RestartPreventExitStatus"].split()}
    assert final == {ExitCode.USAGE, ExitCode.FOLDER, ExitCode.DAMAGED}
    assert int(found["TimeoutStopSec"].removesuffix("s")) > STOP_LIMIT_S


def kustomization() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return document


def parsed(text: str) -> Documents:
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def of_kustomize(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    command = needs("kubectl", "https://kubernetes.io/docs/tasks/tools")
    folder = tmp_path_factory.mktemp("kustomize") / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    for name in kustomization()["secretGenerator"][0]["files"]:
        (folder / name).write_text("0123456789abcdef")
    done = subprocess.run(
        [command, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def rendered(*values: str, name: str = "dcpd") -> Documents:
    """What the chart makes with these values."""
    command = shutil.which("helm", path=f"{ROOT / '.venv' / 'go'}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("the command helm is missing (scripts/test builds it, with Go 1.24 or newer)")
    options = [part for value in values for part in ("--set", value)]
    done = subprocess.run(
        [command, "template", name, str(CHART), f"--kube-version={API_VERSION}.0", *options],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def check_schemas(documents: Documents) -> None:
    """Check them as the API server of API_VERSION does, with the Prometheus operator's schema."""
    for (kind, _), document in documents.items():
        if kind == "ServiceMonitor":
            jsonschema.validate(document, MONITOR_SCHEMA)
        else:
            kubernetes_validate.validate(document, API_VERSION, strict=True)


def pod_of(documents: Documents, name: str) -> dict[str, Any]:
    found: dict[str, Any] = documents["StatefulSet", name]["spec"]["template"]
    return found


def test_kustomize_makes_what_the_api_accepts(of_kustomize: Documents) -> None:
    check_schemas(of_kustomize)
    assert set(of_kustomize) == {
        ("Secret", "dcpd"),
        *((kind, name) for kind in KINDS for name in ("dcpd", "dcpd-etcd")),
    }


def test_the_schemas_refuse_what_the_api_would(of_kustomize: Documents) -> None:
    broken = deepcopy(of_kustomize["StatefulSet", "dcpd"])
    pod_of({("StatefulSet", "dcpd"): broken}, "dcpd")["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, API_VERSION, strict=True)


def test_the_chart_makes_the_same_as_kustomize(of_kustomize: Documents) -> None:
    chart = rendered()
    assert chart == {key: each for key, each in of_kustomize.items() if key[0] != "Secret"}
    monitor = rendered("serviceMonitor.enabled=true")["ServiceMonitor", "dcpd"]
    assert monitor == yaml.safe_load((KUBERNETES / "servicemonitor.yaml").read_text())


@pytest.mark.parametrize(
    ("old", "new"),
    [("interval: 15s", "interval: 15 s"), ("key: metrics-token", "kye: metrics-token"),
     ("port: admin", "ports: admin"), ("jobLabel", "joblabel")],
)  # fmt: skip
def test_the_service_monitor_is_what_its_operator_reads(old: str, new: str) -> None:
    text = (KUBERNETES / "servicemonitor.yaml").read_text()
    check_schemas(parsed(text))
    with pytest.raises(jsonschema.ValidationError):
        check_schemas(parsed(text.replace(old, new)))


def test_the_chart_follows_its_values() -> None:
    found = rendered(
        "replicas=5", "copies=2", "image=registry.example/dcpd:1", "etcd.url=etcd://e:2379",
        "networkPolicy.enabled=false", "storage.size=1Ti", "storage.className=fast",
        "secretName=hidden", "topologyKey=topology.kubernetes.io/zone",
        "resources.limits.memory=9Gi", name="shop",
    )  # fmt: skip
    check_schemas(found)
    assert {kind for kind, _ in found} == {"Service", "PodDisruptionBudget", "StatefulSet"}
    assert {name for _, name in found} == {"shop"}, "no etcd of its own"
    spec = found["StatefulSet", "shop"]["spec"]
    assert spec["replicas"] == 5
    claim = spec["volumeClaimTemplates"][0]["spec"]
    assert claim["storageClassName"] == "fast"
    assert claim["resources"]["requests"]["storage"] == "1Ti"
    pod = spec["template"]["spec"]
    assert pod["volumes"][0]["secret"]["secretName"] == "hidden"
    (container,) = pod["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["DCPD_CLUSTER_META"] == "etcd://e:2379"
    assert env["DCPD_CLUSTER_COPIES"] == "2"
    assert env["MEMBER_FIRST"] == "shop-0"
    assert env["MEMBER_PEERS"].split() == [f"shop-{n}.shop:11210" for n in range(5)]
    assert env["DCPD_ADVERTISE_HOST"].startswith("$(DCPD_NODE_NAME).shop.")
    assert container["image"] == "registry.example/dcpd:1"
    assert container["resources"]["limits"]["memory"] == "9Gi"
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"


def test_the_manifests_fit_each_other(of_kustomize: Documents) -> None:
    """What selects, names and mounts something finds it."""
    for name in ("dcpd", "dcpd-etcd"):
        template, spec = pod_of(of_kustomize, name), of_kustomize["StatefulSet", name]["spec"]
        labels = template["metadata"]["labels"]
        assert spec["replicas"] == 3
        assert spec["serviceName"] == of_kustomize["Service", name]["metadata"]["name"]
        selectors = [
            spec["selector"]["matchLabels"],
            of_kustomize["Service", name]["spec"]["selector"],
            of_kustomize["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"],
            of_kustomize["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"],
        ]
        assert selectors == [labels] * 4
        pod = template["spec"]
        (term,) = pod["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["labelSelector"]["matchLabels"] == labels
        assert of_kustomize["Service", name]["spec"]["clusterIP"] == "None"
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        ports = {port["name"] for port in container["ports"]}
        targets = {port["targetPort"] for port in of_kustomize["Service", name]["spec"]["ports"]}
        assert targets == ports
        for rule in of_kustomize["NetworkPolicy", name]["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= ports
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        assert set(mounts) == claims | {volume["name"] for volume in pod.get("volumes", ())}
    monitor = yaml.safe_load((KUBERNETES / "servicemonitor.yaml").read_text())["spec"]
    labels = of_kustomize["Service", "dcpd"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"] == labels
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {p["name"] for p in of_kustomize["Service", "dcpd"]["spec"]["ports"]}
    secret = endpoint["authorization"]["credentials"]
    assert secret["key"] in of_kustomize["Secret", secret["name"]]["data"]


def test_the_manifests_fit_the_server(of_kustomize: Documents) -> None:
    pod = pod_of(of_kustomize, "dcpd")["spec"]
    assert pod["terminationGracePeriodSeconds"] > LEAVE_MAX_S + STOP_LIMIT_S + HAND_OVER_S
    (container,) = pod["containers"]
    env = {each["name"]: each.get("value", "") for each in container["env"]}
    script = (ROOT / "deploy" / "docker" / "dcpd-member").read_text()
    own = set(re.findall(r"MEMBER_\w+", script)) | {"POD_NAMESPACE"}
    assert set(env) <= SETTINGS | own
    assert f"--timeout {HAND_OVER_S} cluster failover" in script
    for command in (container["command"], container["lifecycle"]["preStop"]["exec"]["command"]):
        assert command[0] == "dcpd-member"
        assert f"  {command[1]})" in script
    paths = described()["paths"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert paths[asked["path"]]["get"]["security"] == [], "probes have no login"
        assert asked["port"] in {port["name"] for port in container["ports"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"key-value": Settings().port, "admin": Settings().admin_port}
    assert env["MEMBER_PEERS"].split() == [f"dcpd-{n}.dcpd:{Settings().port}" for n in range(3)]
    assert env["MEMBER_FIRST"] == "dcpd-0"
    hosts = env["DCPD_ADMIN_HOSTS"].split(",")
    assert ".svc" in hosts, "the name that nodes advertise"
    assert ".dcpd" in hosts, "the name of peers"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    files = {f"{mounts['secrets']}/{name}" for name in of_kustomize["Secret", "dcpd"]["data"]}
    assert {value for value in env.values() if value.startswith("/")} == files
    image = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:" in image
    assert f"VOLUME {mounts['data']}\n" in image
    etcd = pod_of(of_kustomize, "dcpd-etcd")["spec"]["containers"][0]
    (port,) = (p["containerPort"] for p in etcd["ports"] if p["name"] == "client")
    assert env["DCPD_CLUSTER_META"] == f"etcd://dcpd-etcd:{port}"


def test_etcd_takes_its_options(of_kustomize: Documents) -> None:
    command = needs("etcd", "sudo apt-get install etcd-server")
    asked = pod_of(of_kustomize, "dcpd-etcd")["spec"]["containers"][0]["command"]
    known = subprocess.run(
        [command, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    for option in asked[1:]:
        assert f"{option.split('=')[0]} " in known.stdout + known.stderr


def test_every_image_that_is_not_ours_is_pinned() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "docker" / "cluster.yaml").read_text())
    (of_kustomize,) = (each for each in kustomization()["images"] if each["name"] == "etcd")
    images = {
        *(service["image"] for service in compose["services"].values()),
        yaml.safe_load((CHART / "values.yaml").read_text())["etcd"]["image"],
        f"{of_kustomize['newName']}:{of_kustomize['newTag']}",
    }
    (etcd,) = images - {"dcpd"}
    assert re.fullmatch(r"\S+/etcd:v3\.6\.\d+@sha256:[0-9a-f]{64}", etcd)
