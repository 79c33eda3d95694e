"""deploy/systemd and deploy/kubernetes: the tools accept them, and what they name exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp.server.admin.api_page import described
from dcp.server.config.settings import Settings
from dcp.server.config.sources import OPTIONS
from dcp.server.main import ExitCode
from dcp.server.signal_watch import STOP_LIMIT_S

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "dcpd.service"
KUBERNETES = ROOT / "deploy" / "kubernetes"
EXPOSURE_MAX = 15
"""Tenths of the exposure level that systemd-analyze finds for the unit; 0 is none."""
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


def documents() -> dict[str, dict[str, Any]]:
    """Kind -> document, as Kustomize reads them."""
    paths = [KUBERNETES / name for name in kustomization()["resources"]]
    found = [yaml.safe_load(path.read_text()) for path in paths]
    return {document["kind"]: document for document in found}


def kustomization() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return document


def test_the_manifests_fit_the_server() -> None:
    spec = documents()["StatefulSet"]["spec"]
    assert spec["replicas"] == 1
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > STOP_LIMIT_S
    (container,) = pod["containers"]
    assert {variable["name"] for variable in container["env"]} <= SETTINGS
    paths = described()["paths"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert paths[asked["path"]]["get"]["security"] == [], "probes have no login"
        assert asked["port"] in {port["name"] for port in container["ports"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "key-value": Settings().port,
        "admin": Settings().admin_port,
    }
    service = documents()["Service"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    assert service["metadata"]["name"] == spec["serviceName"]
    # Volumes are where the settings say, and the secret has the files.
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert set(mounts) == claims | {volume["name"] for volume in pod["volumes"]}
    (secret,) = kustomization()["secretGenerator"]
    files = {f"{mounts['secrets']}/{name}" for name in secret["files"]}
    assert {v["value"] for v in container["env"] if v["value"].startswith("/")} == files
    image = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:" in image
    assert f"VOLUME {mounts['data']}\n" in image


def test_kustomize_accepts_the_folder(tmp_path: Path) -> None:
    command = needs("kubectl", "https://kubernetes.io/docs/tasks/tools")
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    for name in kustomization()["secretGenerator"][0]["files"]:
        (folder / name).write_text("0123456789abcdef")
    done = subprocess.run(
        [command, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert set(found) == {"Secret", "Service", "StatefulSet"}
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
    volumes = found["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    names = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert names == {found["Secret"]["metadata"]["name"]}
