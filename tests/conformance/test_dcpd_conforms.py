"""dcpd passes the kit, but for what docs/compatibility.md lists; the list is that of this run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from clients.conformance.check import CHECKS, FAIL, PASS
from clients.testing import DcpServer
from site_pages.conformance_page import COMPATIBILITY, SECTION, differences, judged
from support.server import TlsDcpd


@pytest.fixture(scope="module")
def run() -> tuple[int, list[dict[str, Any]]]:
    return judged()


def test_all_checks_are_made_and_none_fails(run: tuple[int, list[dict[str, Any]]]) -> None:
    code, lines = run
    failed = [(each["check"], each["reason"]) for each in lines if each.get("outcome") == FAIL]
    assert failed == []
    assert code == 0
    made = {each["check"] for each in lines if "check" in each}
    assert made == set(CHECKS)
    assert len(made) >= 150
    assert lines[-1]["summary"][PASS] == sum(each.get("outcome") == PASS for each in lines)


def test_what_is_refused_is_listed(run: tuple[int, list[dict[str, Any]]]) -> None:
    found = SECTION.search(COMPATIBILITY.read_text())
    assert found is not None
    how = "PYTHONPATH=docs:tests .venv/bin/python -m site_pages.conformance_page"
    assert found[0] == differences(run[1]), how


def _conformance(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.cli", "conformance", "server", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_junit_names_each_check_and_skips_what_needs_a_hook() -> None:
    with DcpServer() as server:
        ran = _conformance(server.address, "--only", "framing,branch.log", "-o", "junit")
    assert ran.returncode == 0, ran.stderr
    suite = ET.fromstring(ran.stdout)
    names = {case.get("name") for case in suite}
    groups = {each.id for each in CHECKS.values() if each.group == "framing"}
    assert names == groups | {"branch.log", "server.answers"}
    assert suite.get("failures") == "0"
    (skipped,) = suite.iter("skipped")
    assert skipped.get("message") == "n/a: --branch-command is not given"


def test_a_hook_that_does_not_work_says_why() -> None:
    with DcpServer() as server:
        for command, says in (
            ("false", "ended with 1"),
            ("no-such-program-here", "did not work"),
            ("echo {nobody}", "cannot be filled in"),
        ):
            words = ("--only", "purge.above", "--purge-command", command, "-o", "json")
            ran = _conformance(server.address, *words)
            line = json.loads(ran.stdout.splitlines()[1])
            assert line["outcome"] == "n/a"
            assert says in line["reason"]


def test_a_wrong_login_is_the_verdict() -> None:
    with DcpServer() as server:
        ran = subprocess.run(
            [sys.executable, "-m", "clients.cli", "--user", "nobody", "--password-file", "-",
             "conformance", "server", server.address],
            capture_output=True, text=True, check=False, input="not-the-secret\n",
        )  # fmt: skip
    assert ran.returncode == 1
    assert "SASL_AUTH is answered AUTH_ERROR, not OK" in ran.stdout
    assert "not-the-secret" not in ran.stdout


def test_the_kit_speaks_tls(tmp_path: Path) -> None:
    with TlsDcpd(tmp_path) as server:
        ran = subprocess.run(
            [sys.executable, "-m", "clients.cli", "--tls-ca", str(server.ca.path),
             "conformance", "server", f"dcpds://127.0.0.1:{server.tls_port}",
             "--dcpd", "--only", "framing,branch.rolls-back"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    assert "0 fail, 0 refused, 0 n/a" in ran.stdout


def test_list_shows_the_checks_and_an_unknown_name_the_groups() -> None:
    ran = _conformance("--list", "--only", "rollback")
    assert ran.returncode == 0
    wanted = [each.id for each in CHECKS.values() if each.group == "rollback"]
    assert [line.split()[0] for line in ran.stdout.splitlines()] == wanted
    ran = _conformance("--list", "--only", "nothing-like-it")
    assert ran.returncode == 2
    assert "the groups are server, framing" in ran.stderr
