"""Every command of docs/security.md runs as it stands there, in its order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from dcp.server.config.sources import OPTIONS, default_text
from dcp.session.access.rights import Role
from support.etcd_members import free_ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


PRELUDE = """
dcpd() { exec "$BIN/dcpd" "$@" > /dev/null 2>&1; }
dcpctl() { "$BIN/dcpctl" "$@"; }
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
set -e
"""
"""`dcpd ... &` is the shell's job itself, so that `kill %1` ends it. Its own words are dropped."""


def pasted(lines: list[str], folder: Path) -> dict[str, str]:
    """Paste lines into one clean shell; return what each of them wrote."""
    port, tls_port = map(str, free_ports(2))
    environment = {
        "PATH": os.environ["PATH"],
        "BIN": str(Path(sys.executable).parent),
        "HOME": str(folder),
        "DCPD_PORT": port,
        "DCPD_ADMIN_PORT": "0",
        "DCPD_TLS_PORT": tls_port,
        "DCPD_ADMIN_TLS_PORT": "0",
        "DCPCTL_SERVER": f"127.0.0.1:{port}",
    }
    script = PRELUDE
    for number, line in enumerate(lines):
        # The page has the default ports, which this machine may use for something else.
        typed = line.replace("dcpds://localhost?", f"dcpds://localhost:{tls_port}?")
        if "--tls-ca" in typed:
            script += f"export DCPCTL_SERVER=127.0.0.1:{tls_port}\n"
        script += f"exec > out-{number}\n{typed}\n"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    outputs = [folder / f"out-{number}" for number in range(len(lines))]
    last = [line for line, path in zip(lines, outputs, strict=True) if path.exists()][-1]
    assert done.returncode == 0, f"{last}: {done.stderr}"
    return {line: path.read_text() for line, path in zip(lines, outputs, strict=True)}


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    output = pasted(commands(), tmp_path)
    first = "DCPCTL_PASSWORD=correct-horse dcpctl --user root user list --wait"
    assert output[first].splitlines()[1].startswith("root\t")
    shown = output["dcpctl user show app"].partition("\n")[2]  # below the header
    assert shown.split() == ["read", "app:", "stream"]
    assert output['dcpctl --server "dcpds://localhost?tls_ca=cert.pem" get over-tls'] == "1"
    logins = [
        json.loads(line) for line in (tmp_path / "demo" / "audit.log").read_text().splitlines()
    ]
    over_tls = [one for one in logins if one.get("over") == "kv-tls"]
    assert {(one["event"], one["user"]) for one in over_tls} == {("login", "root")}
    assert json.loads(output["tail -n 1 demo/audit.log"]) == logins[-1]


def test_the_first_block_leaves_a_closed_server(tmp_path: Path) -> None:
    """Not the first one, which everybody on this machine may use."""
    block = PAGE.partition("```sh\n")[2].partition("```")[0].splitlines()
    refused = "dcpctl get k && exit 1 || echo refused with $?"
    output = pasted([*block, refused], tmp_path)
    assert output[refused] == "refused with 7\n"


def test_the_page_names_roles_and_limits_as_they_are() -> None:
    assert {role for role in Role if f"\n| `{role}` | " in PAGE} == set(Role)
    limits = dict(re.findall(r"^\| `(\w+_\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    assert len(limits) == 12
    assert limits == {name: default_text(name) for name in limits}
    named = set(re.findall(r"--([a-z][a-z-]+)", PAGE))
    settings = {key.replace("_", "-") for key in OPTIONS}
    of_dcpctl = {
        "password-file", "user", "role", "prefix", "collection", "tls-ca", "tls-cert", "server",
        "wait",
    }  # fmt: skip
    assert named - settings - of_dcpctl == set()
