"""Clients of the Node world against a live server; scripts/test installs them into .venv/npm."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

SCRIPTS = Path(__file__).parent / "npm"
PACKAGES = Path(__file__).parents[2] / ".venv" / "npm" / "node_modules"


@pytest.mark.parametrize("client", ["couchbase", "memjs"])
def test_an_npm_client_connects_and_works(server: DcpdProcess, client: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("the command node is missing (Node.js 20 or newer, with npm)")
    if not (PACKAGES / client).is_dir():
        pytest.skip(f"the npm package {client} is not installed; scripts/test does it with npm")
    ran = subprocess.run(
        [node, str(SCRIPTS / f"{client}_client.cjs"), server.address],
        env=os.environ | {"NODE_PATH": str(PACKAGES)},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stdout + ran.stderr
