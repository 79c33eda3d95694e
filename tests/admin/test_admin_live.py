"""The admin port of a real server that an attacker sits on, and names that are set."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from support.raw_client import login, request
from support.server import DcpdProcess
from support.waiting import until

HALF_HEADER = b"GET /livez HTTP/1.1\r\nhost: loc"
HALF_BODY = request("POST", "/api/v1/compact", login(), "content-type: application/json",
                    "content-length: 9") + b'{"vbs"'  # fmt: skip


def status_of(server: DcpdProcess, path: str, method: str = "GET", **headers: str) -> int:
    """Ask on a new connection; `sec_fetch_site` stands for Sec-Fetch-Site."""
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=30)
    sent: dict[str, Any] = {name.replace("_", "-"): value for name, value in headers.items()}
    sent["authorization"] = login().partition(": ")[2]
    body = None
    if method == "POST":
        sent.setdefault("content-type", "application/json")
        body = b'{"at": 0}'
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status >= 400:
        assert "error" in json.loads(text) or path == "/readyz"
    return response.status


def is_well(server: DcpdProcess) -> bool:
    return [status_of(server, path) for path in ("/livez", "/readyz", "/whoami")] == [200] * 3


def test_one_who_sits_on_the_port_keeps_nobody_out(tmp_path: Path) -> None:
    """80 half-sent requests kept it at 503 for minutes."""
    with DcpdProcess(tmp_path / "data") as server, ExitStack() as sitting:
        for number in range(160):
            peer = socket.create_connection(("127.0.0.1", server.admin_port), 30)
            sitting.enter_context(peer)
            peer.sendall(HALF_HEADER if number < 80 else HALF_BODY)
        assert is_well(server)
        assert server.metrics()["dcpd_admin_connections"] >= 100


def test_deadlines_are_those_of_the_setting(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", "--handshake-timeout", "200ms") as server:
        for half in (HALF_HEADER, HALF_BODY):
            with socket.create_connection(("127.0.0.1", server.admin_port), 30) as peer:
                peer.sendall(half)
                found = b"".join(iter(lambda: peer.recv(1 << 16), b""))
            assert found.startswith(b"HTTP/1.1 408 "), found
            assert b"handshake_timeout" in found
        assert is_well(server)
        metrics = server.metrics()
        assert metrics['dcpd_admin_closed_total{reason="late"}'] == 2
        assert "admin connection closed" in server.log_path.read_text()


def test_flood_of_what_is_not_http_leaves_some_lines_and_count(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", server.admin_port), 30) as peer:
                peer.sendall(b"\x16\x03\x01\r\n\r\n")
                assert peer.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        assert server.metrics()['dcpd_admin_refusals_total{status="400"}'] == 200
        lines = server.log_path.read_text().splitlines()
        assert 0 < len(lines) < 30


def test_names_and_pages(tmp_path: Path) -> None:
    hosts = ("--admin-hosts", "db.example,.corp.example")
    branch = "/api/v1/vbuckets/5/branch"
    with DcpdProcess(tmp_path / "data", *hosts) as server:
        own = f"127.0.0.1:{server.admin_port}"
        asked = {
            status_of(server, branch, "POST", host="evil.example", origin="http://evil.example"),
            status_of(server, branch, "POST", origin="http://evil.example"),
            status_of(server, branch, "POST", origin="http://127.0.0.1"),
            status_of(server, "/metrics", host=f"evil.example:{server.admin_port}"),
            status_of(server, "/metrics", sec_fetch_site="same-site"),
            status_of(server, "/livez", origin="null"),
        }
        assert asked == {403}
        assert server.status()["vbuckets"]["active"] == 1024
        assert is_well(server)
        for host in ("db.example", "a.corp.example:1", "localhost", "10.0.0.7:8091", "[::1]:8091"):
            assert status_of(server, "/metrics", host=host) == 200
        assert status_of(server, "/metrics", origin=f"http://{own}") == 200
        assert status_of(server, "/livez", host="any.name") == 200
        log = server.log_path.read_text()
        assert "evil.example" in log
        assert "admin_hosts" in log
    with DcpdProcess(tmp_path / "open", "--admin-hosts", "*") as server:
        assert status_of(server, "/metrics", host="evil.example") == 200
        assert status_of(server, "/metrics", origin="http://evil.example") == 403


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing meanwhile; what is open stays."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_connection_waits_while_there_is_no_descriptor_for_it(tmp_path: Path) -> None:
    with (
        DcpdProcess(tmp_path / "data") as server,
        socket.socket() as peer,
    ):
        with no_descriptors(server.pid):
            peer.connect(("127.0.0.1", server.admin_port))
            until(lambda: "admin connection not accepted" in server.log_path.read_text())
        peer.sendall(request("GET", "/livez"))
        peer.settimeout(30)
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert is_well(server)
        assert server.stop() == 0
        server.start()
