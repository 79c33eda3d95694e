"""libmemcached's conformance suite and its load generator against a live server.

Both come with the Debian package libmemcached-tools.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

SUITE_TESTS = 27
"""Tests of memccapable for each protocol (libmemcached 1.1.4)."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"the command {name} is missing (sudo apt-get install libmemcached-tools)")
    return path


@pytest.mark.parametrize(("protocol", "flag"), [("binary", "-b"), ("ascii", "-a")])
def test_memccapable_passes_whole(server: DcpdProcess, protocol: str, flag: str) -> None:
    ran = subprocess.run(
        [tool("memccapable"), "-h", "127.0.0.1", "-p", str(server.port), "-v", flag],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    passed = re.findall(rf"{protocol} (.*?) *\[pass\]", ran.stdout)
    assert len(passed) == SUITE_TESTS, ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("flags", [[], ["-B"]], ids=["text", "binary"])
def test_memcaslap_runs_without_errors(server: DcpdProcess, flags: list[str]) -> None:
    ran = subprocess.run(
        [
            tool("memcaslap"), "-s", server.address, "-T", "1", "-c", "4", "-x", "4000",
            "-v", "0.1", *flags,
        ],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    found = re.findall(r"^(\w+): (\d+)$", output, re.MULTILINE)
    counts = {name: int(number) for name, number in found}
    assert counts["cmd_get"] + counts["cmd_set"] >= 4000, output
    assert counts["verify_failed"] == 0, output
    # memcaslap gets only what it has set.
    assert counts["get_misses"] == 0, output


@pytest.mark.parametrize("flags", [[], ["--binary"]], ids=["text", "binary"])
def test_the_tools_copy_show_touch_and_remove(
    server: DcpdProcess, tmp_path: Path, flags: list[str]
) -> None:
    def run(name: str, *arguments: str) -> tuple[int, str]:
        ran = subprocess.run(
            [tool(name), f"--servers={server.address}", *flags, *arguments],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        return ran.returncode, ran.stdout.strip()

    (tmp_path / "greeting").write_text("hello")
    assert run("memccp", str(tmp_path / "greeting"))[0] == 0
    assert run("memccat", "greeting") == (0, "hello")
    assert run("memctouch", "--expire=100", "greeting")[0] == 0
    assert run("memcexist", "greeting")[0] == 0
    assert run("memcrm", "greeting")[0] == 0
    assert run("memcexist", "greeting")[0] != 0
    code, statistics = run("memcstat")
    assert code == 0
    assert "curr_items" in statistics
    assert run("memcflush")[0] == 0
