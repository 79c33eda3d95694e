"""A live server with many connections that stand still: memory is bounded, others are served."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.address import parse_address
from clients.cli.dcpctl import run
from clients.kv.sync_client import SyncKv
from dcp.server.net.connection import TLS_READ_BUFFER_BYTES
from dcp.server.net.tls_listener import HANDSHAKE_BYTES
from dcp.wire.frame import HEADER, HEADER_BYTES, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.credentials import new_password
from support.raw_client import RawClient
from support.server import DcpdProcess, TlsDcpd
from support.waiting import until

WAIT_S = 20.0
MIB = 1 << 20
VALUE_BYTES = 20 * MIB
BODY_MISSES = 10
HALF_SENT = 40
PASSWORD = "secret1"
RECEIVED = "dcpd_receive_buffer_bytes"
UNSENT = "dcpd_send_buffer_bytes"


def resident_bytes(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) * 1024


def metric(server: DcpdProcess, name: str) -> float:
    """A metric of the server; of all its series together."""
    found = [value for key, value in server.metrics().items() if key.partition("{")[0] == name]
    assert found, name
    return sum(found)


@contextlib.contextmanager
def connections(port: int, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that send something, and nothing more."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(
                stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            )
            opened[-1].sendall(data)
        yield opened


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection on which it had nothing to say."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.settimeout(WAIT_S)


def user(server: DcpdProcess, *arguments: str) -> None:
    """dcpctl user ..., as guest."""
    assert run(["--server", server.address, "user", *arguments]) == 0


def large_set(key: bytes) -> bytes:
    return pack_request(Opcode.SET, key=key, value=bytes(VALUE_BYTES), extras=bytes(8))


def status_of_answer(connection: socket.socket) -> int:
    header = b""
    while len(header) < HEADER_BYTES:
        more = connection.recv(HEADER_BYTES - len(header))
        assert more, "the server closed"
        header += more
    status: int = HEADER.unpack(header)[5]
    return status


# -- what was received -----------------------------------------------------------------------------


@pytest.mark.parametrize("has_asked", [True, False], ids=["clients", "strangers"])
def test_half_sent_packets_of_all_connections_are_bounded(tmp_path: Path, has_asked: bool) -> None:
    bound = 64 * MIB
    arguments = ("--receive-buffers-bytes-max", str(bound), "--log-level", "debug")
    packet = large_set(b"large")
    half, rest = packet[:-BODY_MISSES], packet[-BODY_MISSES:]
    with (
        DcpdProcess(tmp_path / "data", *arguments) as server,
        RawClient(server.port) as other,
        RawClient(server.port) as steady,
        connections(server.port, HALF_SENT) as senders,
    ):
        before = resident_bytes(server.pid)
        slow = pack_request(Opcode.SET, key=b"slow", value=bytes(3 * MIB), extras=bytes(8))
        piece = len(slow) // (HALF_SENT + 1)
        steady.send(slow[:piece])
        held = [piece]
        for number, sender in enumerate(senders):
            if has_asked:
                sender.sendall(pack_request(Opcode.NOOP))
                assert status_of_answer(sender) == Status.OK
            sender.sendall(half)
            held.append(len(half))
            while sum(held) > bound:
                del held[1]  # the oldest that stands still
            expected = sum(held)
            until(lambda expected=expected: metric(server, RECEIVED) == expected)
            assert other.set(b"k%d" % number).status == Status.OK
            steady.send(slow[piece * (number + 1) : piece * (number + 2)])
            held[0] += piece
            until(lambda expected=expected: metric(server, RECEIVED) == expected + piece)
        kept = len(held) - 1
        # Without a bound, it were 800 MiB. Freed memory goes back to the system only in part.
        assert resident_bytes(server.pid) - before < bound + 192 * MIB
        assert metric(server, "dcpd_connections_pushed_out_total") == HALF_SENT - kept
        assert [is_closed(sender) for sender in senders] == (
            [True] * (HALF_SENT - kept) + [False] * kept
        )
        log = server.log_path.read_text()
        assert "this connection has not moved for the longest time" in log
        assert "(setting receive_buffers_bytes_max)" in log
        # Those that were left, and the one that went on all the time, come to their end.
        steady.send(slow[piece * (HALF_SENT + 1) :])
        answer = steady.receive()
        assert answer is not None
        assert answer.status == Status.OK
        for sender in senders[-kept:]:
            sender.sendall(rest)
            assert status_of_answer(sender) == Status.OK
        until(lambda: metric(server, RECEIVED) == 0)


# -- connections without a login -------------------------------------------------------------------


def test_connections_that_ask_nothing_keep_nobody_out(tmp_path: Path) -> None:
    arguments = ("--connections-max", "20", "--log-level", "debug")
    with (
        DcpdProcess(tmp_path / "data", *arguments) as server,
        contextlib.ExitStack() as stack,
        connections(server.port, 50, b"\x80\x00") as silent,
    ):
        clients = [stack.enter_context(RawClient(server.port)) for _ in range(15)]
        with connections(server.port, 50, b"get ") as more:
            for client in clients:
                assert client.set(b"k").status == Status.OK
            until(lambda: all(is_closed(one) for one in silent))
            until(lambda: sum(not is_closed(one) for one in more) == 5)
            assert not any(is_closed(one) for one in more[-5:])
        clients += [stack.enter_context(RawClient(server.port)) for _ in range(5)]
        with pytest.raises((AssertionError, OSError)):
            RawClient(server.port)
        for client in clients:
            assert client.set(b"k").status == Status.OK
        log = server.log_path.read_text()
        assert "of those without a login this one is the oldest (setting connections_max)" in log


def test_client_without_login_makes_room_for_one_that_logs_in(tmp_path: Path) -> None:
    """Where a login is needed, asking is not enough; and whose user is removed is a stranger."""
    data = tmp_path / "data"
    with DcpdProcess(data) as server:
        for name in ("ada", "bob"):
            user(server, "add", name, "--role", "all", *new_password(PASSWORD))
        assert server.stop() == 0
    arguments = ("--anonymous", "off", "--connections-max", "3")
    with (
        DcpdProcess(data, *arguments) as server,
        RawClient(server.port, "ada", PASSWORD) as ada,
        RawClient(server.port, "bob", PASSWORD) as bob,
        contextlib.ExitStack() as stack,
    ):
        strangers = [stack.enter_context(RawClient(server.port)) for _ in range(3)]
        assert strangers[0].is_closed()
        assert strangers[1].is_closed()
        assert ada.set(b"k").status == Status.OK
        server.ask("DELETE", "/api/v1/users/bob")
        assert strangers[2].ask(Opcode.NOOP).status == Status.OK
        stack.enter_context(RawClient(server.port))
        assert strangers[2].is_closed(), "the oldest stranger: bob has just become one"
        stack.enter_context(RawClient(server.port))
        assert bob.is_closed()
        assert ada.set(b"k").status == Status.OK


# -- TLS -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 100, None], ids=["silent", "half", "unanswered"])
def test_half_done_handshakes_keep_nobody_out(tmp_path: Path, length: int | None) -> None:
    with TlsDcpd(tmp_path, "--connections-max", "20") as server:
        hello = server.client_hello()[:length]
        with connections(server.tls_port, 50, hello) as half_done:
            until(lambda: metric(server, RECEIVED) == 20 * HANDSHAKE_BYTES)
            with server.client() as kv, RawClient(server.port) as plain:
                kv.set("over-tls", b"1")
                assert plain.set(b"k").status == Status.OK
                with connections(server.tls_port, 30, hello):
                    assert kv.get("over-tls").value == b"1"
                    assert plain.set(b"k").status == Status.OK
                    until(lambda: metric(server, RECEIVED) == 18 * HANDSHAKE_BYTES)
            until(lambda: all(is_over(one) for one in half_done))
        until(lambda: metric(server, RECEIVED) == 0)


def is_over(connection: socket.socket) -> bool:
    """Whether the server has closed a connection, after whatever it said."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True
    return False


def test_half_done_handshakes_are_bounded_in_bytes_too(tmp_path: Path) -> None:
    bound = 42 * MIB
    fit = bound // HANDSHAKE_BYTES
    with (
        TlsDcpd(tmp_path, "--receive-buffers-bytes-max", str(bound)) as server,
        RawClient(server.port) as uploading,
    ):
        begun = large_set(b"k")[: 10 * MIB]
        uploading.send(begun)
        until(lambda: metric(server, RECEIVED) == len(begun))
        with connections(server.tls_port, 2 * fit, b"\x16\x03\x01"):
            left = (bound - len(begun)) // HANDSHAKE_BYTES
            until(lambda: metric(server, RECEIVED) == len(begun) + left * HANDSHAKE_BYTES)
            with server.client() as kv:
                kv.set("over-tls", b"1")
            uploading.send(large_set(b"k")[len(begun) :])
            answer = uploading.receive()
            assert answer is not None
            assert answer.status == Status.OK


def test_failed_handshake_is_forgotten_and_stop_does_not_wait(tmp_path: Path) -> None:
    with TlsDcpd(tmp_path, "--log-level", "debug") as server:
        with connections(server.tls_port, 5, b"GET / HTTP/1.0\r\n\r\n") as wrong:
            until(lambda: all(is_over(one) for one in wrong))
        until(lambda: metric(server, RECEIVED) == 0)
        until(lambda: "TLS handshake failed" in server.log_path.read_text())
        with connections(server.tls_port, 5, b"\x16\x03\x01"):
            until(lambda: metric(server, RECEIVED) == 5 * HANDSHAKE_BYTES)
            assert server.stop() == 0
        assert "Traceback" not in server.log_path.read_text()


def test_tls_input_received_while_paused_is_counted_and_bounded(
    tmp_path: Path,
) -> None:
    """Beneath the session: bytes that are still encrypted."""
    with TlsDcpd(tmp_path) as server, SyncKv(parse_address(server.address)) as kv:
        kv.set("large", bytes(16 * MIB))
        context = ssl.create_default_context(cafile=server.ca.path)
        with (
            socket.create_connection(("127.0.0.1", server.tls_port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as lazy,
        ):
            lazy.sendall(pack_request(Opcode.GET, key=b"large"))
            until(lambda: metric(server, UNSENT) > MIB)  # the session takes nothing from it now
            piece = pack_request(Opcode.NOOP) * 500  # less than a record of TLS
            held = 0.0
            while held < TLS_READ_BUFFER_BYTES:
                lazy.sendall(piece)
                until(lambda held=held: metric(server, RECEIVED) >= held + len(piece))
                held = metric(server, RECEIVED)
            for _ in range(10):
                lazy.sendall(piece)
            ticked = metric(server, "dcpd_uptime_seconds") + 2
            until(lambda: metric(server, "dcpd_uptime_seconds") >= ticked)
            assert metric(server, RECEIVED) == held, "nothing more is read"
        until(lambda: metric(server, RECEIVED) == 0)


# -- what is not read ------------------------------------------------------------------------------


def test_unread_output_is_bounded_for_all_clients_together(tmp_path: Path) -> None:
    bound = 48 * MIB
    arguments = ("--send-buffers-bytes-max", str(bound), "--log-level", "debug")
    with (
        DcpdProcess(tmp_path / "data", *arguments) as server,
        RawClient(server.port) as other,
        SyncKv(parse_address(server.address)) as kv,
        contextlib.ExitStack() as stack,
    ):
        kv.set("large", bytes(16 * MIB))  # far more than what the system takes for a socket
        before = resident_bytes(server.pid)
        gets = pack_request(Opcode.GET, key=b"large") * 2
        lazy = []
        for number in range(HALF_SENT):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.connect(("127.0.0.1", server.port))
            connection.settimeout(WAIT_S)
            connection.sendall(gets)
            lazy.append(connection)
            assert other.set(b"k%d" % number).status == Status.OK
        until(lambda: metric(server, "dcpd_connections_pushed_out_total") > HALF_SENT - 8)
        assert metric(server, UNSENT) <= bound
        assert resident_bytes(server.pid) - before < bound + 96 * MIB
        assert "(setting send_buffers_bytes_max)" in server.log_path.read_text()
        # The last one has what it asked for as soon as it reads.
        missing = 2 * (HEADER_BYTES + 4 + 16 * MIB)
        while missing:
            data = lazy[-1].recv(1 << 20)
            assert data, "the server closed"
            missing -= len(data)


def test_over_tls_what_is_not_read_is_seen(tmp_path: Path) -> None:
    with TlsDcpd(tmp_path) as server, SyncKv(parse_address(server.address)) as kv:
        kv.set("large", bytes(16 * MIB))
        context = ssl.create_default_context(cafile=server.ca.path)
        with (
            socket.create_connection(("127.0.0.1", server.tls_port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as lazy,
        ):
            lazy.sendall(pack_request(Opcode.GET, key=b"large"))
            until(lambda: metric(server, UNSENT) > 8 * MIB)
        until(lambda: metric(server, UNSENT) == 0)
