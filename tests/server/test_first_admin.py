"""The first user, whose password a container or a service manager hands over as a file."""

from __future__ import annotations

import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from dcp.server.access.users import FIRST_ADMIN, USERS_FILE, Users
from support.raw_client import login
from support.server import DcpdProcess


def status_of(server: DcpdProcess, user: str, password: str) -> int:
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
    try:
        headers = {"authorization": login(user, password).partition(": ")[2]}
        connection.request("GET", "/api/v1/users", None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_first_admin_has_the_password_in_the_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    flags = ("--admin-password-file", str(secret), "--guest", "off", "--anonymous", "off")
    with DcpdProcess(tmp_path / "data", *flags) as server:
        assert status_of(server, FIRST_ADMIN, "correct horse") == 200
        assert status_of(server, FIRST_ADMIN, "correct horse\n") == 401
        log = server.log_path.read_text()
        assert "first user added" in log
        assert "correct horse" not in log
        # Later starts need no file, and a new password in it changes nothing.
        server.stop()
        secret.write_text("another one\n")
        server.start()
        assert status_of(server, FIRST_ADMIN, "correct horse") == 200
        server.stop()
        secret.unlink()
        server.start()
        assert status_of(server, FIRST_ADMIN, "correct horse") == 200


def dcpd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0", *arguments],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"", "6 to 128"),
        (b"\xff" * 8, "not UTF-8"),
        (b"x" * 9000, "6 to 128"),
    ],
)
def test_a_password_that_cannot_be_used_stops_the_start(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    done = dcpd("--data", str(tmp_path / "data"), "--admin-password-file", str(secret))
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    assert Users(tmp_path / "data" / USERS_FILE).names() == []


def test_it_opens_an_address_that_others_reach(tmp_path: Path) -> None:
    """192.0.2.1 is reserved for documentation: no machine has it, so the next check refuses it."""
    arguments = ("--host", "192.0.2.1", "--data", str(tmp_path / "data"))
    assert "--admin-password-file FILE" in dcpd(*arguments).stderr
    done = dcpd(*arguments, "--admin-password-file", str(tmp_path / "none"))
    assert "this machine has no such address" in done.stderr
