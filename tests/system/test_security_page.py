"""Every command of docs/security.md runs as it stands there, in its order."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.server.config.sources import OPTIONS, default_text
from dcp.session.rights import Role

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Shell:
    """Runs the page's lines; each `dcpd ... &` takes the place of the one before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        port, tls_port = free_ports(2)
        self._tls_port = tls_port
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DCPD_PORT": port,
            "DCPD_ADMIN_PORT": "0",
            "DCPD_TLS_PORT": tls_port,
            "DCPD_ADMIN_TLS_PORT": "0",
            "DCPCTL_SERVER": f"127.0.0.1:{port}",
        }
        self._server: subprocess.Popen[str] | None = None

    def run(self, line: str) -> str:
        if line.startswith("dcpd "):
            self._serve(line.removesuffix("&").split())
            return ""
        if line.startswith("export "):
            self._environment |= dict(part.split("=") for part in line.split()[1:])
            return ""
        # The defaults of the page are taken on a machine that runs tests.
        line = line.replace("dcpds://localhost?", f"dcpds://localhost:{self._tls_port}?")
        if "--tls-ca" in line:
            self._environment["DCPCTL_SERVER"] = f"127.0.0.1:{self._tls_port}"
        done = subprocess.run(
            ["bash", "-c", line], cwd=self._folder, env=self._environment,
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, words: list[str]) -> None:
        self.stop()
        self._server = subprocess.Popen(
            words, cwd=self._folder, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._server.stdout is not None
        said = next((text for text in self._server.stdout if "dcpctl" in text), "")
        assert said, f"{words} did not get ready"

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.communicate(timeout=20)
            self._server = None


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.stop()


def test_the_commands_of_the_page(shell: Shell) -> None:
    output = {line: shell.run(line) for line in commands()}
    assert output["dcpctl user show app"].split() == ["read", "app:", "stream"]
    assert output["dcpctl --user root --password correct-horse user list"].startswith("root\t")
    assert output['dcpctl --server "dcpds://localhost?tls_ca=cert.pem" get over-tls'] == "1"
    last = json.loads(output["tail -n 1 demo/audit.log"])
    assert (last["event"], last["user"], last["over"]) == ("login", "root", "kv-tls")


def test_the_page_names_roles_and_limits_as_they_are() -> None:
    assert {role for role in Role if f"\n| `{role}` | " in PAGE} == set(Role)
    limits = dict(re.findall(r"^\| `(\w+_\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    assert len(limits) == 12
    assert limits == {name: default_text(name) for name in limits}
    named = set(re.findall(r"--([a-z][a-z-]+)", PAGE))
    settings = {key.replace("_", "-") for key in OPTIONS}
    of_dcpctl = {
        "new-password", "password", "user", "role", "prefix", "collection", "tls-ca", "tls-cert",
        "server",
    }  # fmt: skip
    assert named - settings - of_dcpctl == set()
