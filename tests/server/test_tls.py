"""The TLS ports of a live server: our clients, certificates that change, client certificates."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.address import parse_address
from clients.cli.dcpctl import run
from clients.consumer.consumer import Consumer
from clients.errors import ConnectError
from clients.kv.client import KvClient
from clients.kv.sync_client import SyncKv
from dcp.server.access.certificates import ServerTls, TlsError, TlsFiles
from support.credentials import TestCa, new_password, with_password
from support.server import DcpdProcess
from support.waiting import until

WAIT_S = 20.0


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> TestCa:
    return TestCa(tmp_path_factory.mktemp("ca"))


class TlsDcpd(DcpdProcess):
    """A server with TLS ports."""

    def __init__(self, data: Path, cert: Path, *arguments: str) -> None:
        ports = ("--tls-port", "0", "--admin-tls-port", "0")
        super().__init__(data, *ports, "--tls-cert", str(cert), *arguments)

    @property
    def tls_port(self) -> int:
        found = re.search(r"with TLS\s+127\.0\.0\.1:(\d+)", self.output)
        assert found, self.output
        return int(found[1])

    @property
    def admin_tls_port(self) -> int:
        found = re.search(r"https://127\.0\.0\.1:(\d+)", self.output)
        assert found, self.output
        return int(found[1])

    def url(self, ca: TestCa, more: str = "") -> str:
        return f"dcpds://127.0.0.1:{self.tls_port}?tls_ca={ca.path}{more}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ca: TestCa) -> Iterator[TlsDcpd]:
    with TlsDcpd(tmp_path_factory.mktemp("tls") / "data", ca.issue("shared")) as process:
        yield process


def serial_of(port: int, ca: TestCa) -> str:
    """Return what names the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=ca.path)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        certificate = tls.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


# -- our clients -----------------------------------------------------------------------------------


def test_dcpctl_over_tls(server: TlsDcpd, ca: TestCa, capfdbinary) -> None:
    tls = ("--server", f"127.0.0.1:{server.tls_port}", "--tls-ca", str(ca.path))
    assert run([*tls, "set", "secret", "1"]) == 0
    assert run([*tls, "get", "secret"]) == 0
    assert run([*tls, "user", "add", "ada", "--role", "all", *new_password("secret1")]) == 0
    assert run([*tls, "--user", "ada", *with_password("secret1"), "user", "list"]) == 0
    out = capfdbinary.readouterr().out
    assert out.endswith(b"1added user ada\nname\troles\nada\tread, write, stream, admin\n")
    records = [json.loads(line) for line in (server.data / "audit.log").read_text().splitlines()]
    assert {record["over"] for record in records} == {"kv-tls", "admin-tls"}


async def test_the_asyncio_clients_over_tls(server: TlsDcpd, ca: TestCa) -> None:
    url = server.url(ca)
    large = bytes(range(256)) * 20_000
    async with KvClient.connect(url) as kv:
        await kv.set("tls:large", large)
        found = await kv.get("tls:large")
        assert found.value == large
        topology = kv.topology
        assert topology is not None
        assert topology.nodes[0].kv_port == server.tls_port
        assert topology.nodes[0].mgmt_port == server.admin_tls_port
    async with asyncio.timeout(WAIT_S), Consumer(url, until_now=True, validate=True) as consumer:
        keys = [getattr(event, "key", None) async for event in consumer]
    assert b"tls:large" in keys


def test_the_plain_ports_go_on(server: TlsDcpd) -> None:
    with SyncKv(parse_address(server.address)) as kv:
        kv.set("plain", b"1")
        assert kv.topology().nodes[0].kv_port == server.port


def test_a_ca_that_is_not_named_is_not_trusted(server: TlsDcpd, capfd) -> None:
    assert run(["--server", f"dcpds://127.0.0.1:{server.tls_port}", "get", "a"]) == 6
    said = capfd.readouterr().err
    assert "certificate is not trusted" in said
    assert "--tls-ca FILE" in said


async def test_failures_say_what_to_try(server: TlsDcpd, ca: TestCa, tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="not trusted"):
        await KvClient.open(f"dcpds://127.0.0.1:{server.tls_port}")
    with pytest.raises(ConnectError, match="no TLS connection") as caught:
        SyncKv(parse_address(f"dcpds://{server.address}?tls_ca={ca.path}")).topology()
    assert "11207" in caught.value.hint
    with pytest.raises(ConnectError, match="CA file"):
        SyncKv(parse_address(f"dcpds://{server.address}?tls_ca={tmp_path / 'none'}")).topology()


def test_nothing_older_than_tls_1_2(server: TlsDcpd) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    for port in (server.tls_port, server.admin_tls_port):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain,
            pytest.raises(ssl.SSLError),
        ):
            context.wrap_socket(plain)


def test_the_configuration_names_the_tls_ports(server: TlsDcpd, ca: TestCa) -> None:
    with SyncKv(parse_address(server.url(ca))) as kv:
        node = kv.topology().nodes[0]
    assert (node.kv_port, node.mgmt_port) == (server.tls_port, server.admin_tls_port)


# -- certificates that change ----------------------------------------------------------------------


def test_a_new_certificate_is_taken_over_without_a_restart(tmp_path: Path) -> None:
    ca = TestCa(tmp_path)
    cert = ca.issue()
    with (
        TlsDcpd(tmp_path / "data", cert) as server,
        SyncKv(parse_address(server.url(ca))) as open_before,
    ):
        open_before.set("before", b"1")
        ports = (server.tls_port, server.admin_tls_port)
        first = {serial_of(port, ca) for port in ports}
        assert len(first) == 1
        ca.issue()
        until(lambda: not first & {serial_of(port, ca) for port in ports})
        second = serial_of(ports[0], ca)
        assert open_before.get("before").value == b"1"

        cert.write_text("no certificate")
        until(lambda: "certificates not reloaded" in server.log_path.read_text())
        assert serial_of(ports[0], ca) == second
        ca.issue()
        until(lambda: serial_of(ports[0], ca) != second)
        # SIGHUP reads them again; it does not stop the server.
        count = server.log_path.read_text().count("certificates reloaded")
        subprocess.run(["kill", f"-{signal.SIGHUP.value}", str(server.pid)], check=True)
        until(lambda: server.log_path.read_text().count("certificates reloaded") > count)
        assert open_before.get("before").value == b"1"
        assert server.stop() == 0


def test_files_that_do_not_belong_together_are_logged_once(tmp_path: Path) -> None:
    ca = TestCa(tmp_path)
    cert, other = ca.issue("one"), ca.issue("other")
    key = tmp_path / "key.pem"
    key.write_bytes(cert.read_bytes())
    tls = ServerTls(TlsFiles(cert, key))
    assert not tls.reload_if_changed()
    before = tls._current
    key.write_bytes(other.read_bytes())
    with pytest.raises(TlsError, match="key values mismatch"):
        tls.reload_if_changed()
    assert not tls.reload_if_changed(), "once per change"
    assert tls._current is before
    cert.write_bytes(other.read_bytes())
    assert tls.reload_if_changed()
    assert tls._current is not before


def test_a_server_with_a_bad_certificate_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("x")
    done = subprocess.run(
        [
            sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0",
            "--tls-port", "0", "--admin-tls-port", "0", "--data", str(tmp_path / "data"),
            "--tls-cert", str(tmp_path / "bad.pem"),
        ],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "bad.pem cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


# -- client certificates ---------------------------------------------------------------------------


def test_only_clients_with_a_certificate_come_in(tmp_path: Path, capfd) -> None:
    ca, clients, strangers = (TestCa(tmp_path, name) for name in ("ca", "clients", "strangers"))
    client_ca = tmp_path / "client-ca.pem"
    client_ca.write_bytes(clients.path.read_bytes())
    mine, foreign = clients.issue("mine"), strangers.issue("foreign")
    arguments = ("--tls-client-ca", str(client_ca))
    with TlsDcpd(tmp_path / "data", ca.issue(), *arguments) as server:

        def code(more: str, command: str = "get") -> int:
            rest = {"get": ["get", "k"], "set": ["set", "k", "v"], "user": ["user", "list"]}
            return run(["--server", server.url(ca, more), *rest[command]])

        assert code(f"&tls_cert={mine}", "set") == 0
        assert code(f"&tls_cert={mine}", "user") == 0
        assert code("") == 6
        assert code(f"&tls_cert={foreign}") == 6
        assert code(f"&tls_cert={tmp_path / 'none'}") == 6
        assert "Traceback" not in capfd.readouterr().err
        # A new client CA counts for new connections.
        client_ca.write_bytes(strangers.path.read_bytes())
        until(lambda: code(f"&tls_cert={foreign}") == 0)
        assert code(f"&tls_cert={mine}") == 6


def test_with_tls_only_other_machines_reach_nothing_else(tmp_path: Path) -> None:
    ca = TestCa(tmp_path)
    data = tmp_path / "data"
    with TlsDcpd(data, ca.issue()) as server:
        assert (
            run(
                [
                    "--server",
                    server.address,
                    "user",
                    "add",
                    "ada",
                    *new_password("secret1"),
                ]
            )
            == 0
        )
        assert server.stop() == 0
    arguments = ("--host", "0.0.0.0", "--tls-only", "on")
    with TlsDcpd(data, ca.issue(), *arguments) as server:
        assert re.search(r"key-value\s+127\.0\.0\.1:", server.output)
        assert re.search(r"with TLS\s+0\.0\.0\.0:", server.output)
        rows = json.dumps(server.output)
        assert "http://127.0.0.1" in rows
