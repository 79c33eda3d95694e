"""dcpctl ping, and --wait: commands can be typed while the server still starts."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from clients import Consumer, KvClient, WrongProtocolError
from clients.link import blocking_link
from dcp.server import listeners
from support.cluster_here import node_here
from support.server import DcpdProcess


def test_ping_says_who_answers(ctl, rows, server):
    code, out, _ = ctl("ping")
    assert code == 0
    assert out.startswith(f"{server.address} answers (".encode())
    (answer,) = rows("ping")
    assert answer["node"] == server.address
    assert answer["ms"] > 0


def test_without_wait_server_that_is_not_there_is_error_at_once(local_ctl):
    assert local_ctl("--server", "127.0.0.1:1", "ping")[0] == 6


def test_the_first_set_waits_for_the_server_to_start(local_ctl, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first_refusal = threading.Event()
    told = socket.create_connection

    def connect(*arguments, **options):
        try:
            return told(*arguments, **options)
        except OSError:
            first_refusal.set()
            raise

    server = DcpdProcess(tmp_path / "data")
    server.port = port

    def start():
        assert first_refusal.wait(20), "the first attempt comes before the server is there"
        server.start()

    starting = threading.Thread(target=start)
    starting.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "create_connection", connect)
            address = f"127.0.0.1:{port}"
            code, out, err = local_ctl("--server", address, "set", "hello", "world", "--wait")
        assert (code, err) == (0, "")
        assert out.startswith(b"stored hello")
    finally:
        first_refusal.set()
        starting.join()
        server.kill()


def test_wait_gives_up_with_the_last_reason(local_ctl, monkeypatch):
    monkeypatch.setattr(blocking_link, "WAIT_S", 0.2)
    call = ("--server", "127.0.0.1:1", "--timeout", "0.1", "--wait", "get", "k")
    code, _, err = local_ctl(*call)
    assert code == 6
    assert "connection refused; the server was not ready within 0.2 s" in err


def test_wait_does_not_wait_for_what_will_not_change(ctl, server, monkeypatch):
    monkeypatch.setattr(blocking_link.time, "sleep", lambda _s: pytest.fail("it waits"))
    monkeypatch.setenv("DCPCTL_PASSWORD", "wrong")
    assert ctl("--user", "eve", "ping", "--wait")[0] == 7
    code, _, err = ctl("--server", f"127.0.0.1:{server.admin_port}", "ping", "--wait")
    assert code == 6
    assert "admin port" in err


@pytest.mark.parametrize("command", [["get", "k"], ["watch"], ["user", "list"], ["ping"]])
def test_the_admin_port_is_recognised(ctl, server, command):
    code, out, err = ctl("--server", f"127.0.0.1:{server.admin_port}", *command)
    assert (code, out) == (6, b"")
    assert "this port answers with HTTP: it is an admin port or a web server" in err
    assert "Use the key-value port (11210 by default)" in err


async def test_the_asyncio_clients_recognise_the_admin_port(server):
    address = f"127.0.0.1:{server.admin_port}"
    with pytest.raises(WrongProtocolError, match="HTTP"):
        await KvClient.open(address)
    with pytest.raises(WrongProtocolError, match="HTTP"):
        await Consumer(address).open()


def test_another_protocol_is_told_from_http(local_ctl):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            link, _ = listener.accept()
            with link:
                link.recv(1024)
                link.sendall(b"+OK this is a mail server, by the way\r\n")
                link.recv(1024)

        thread = threading.Thread(target=answer)
        thread.start()
        code, _, err = local_ctl("--server", f"127.0.0.1:{listener.getsockname()[1]}", "get", "k")
        thread.join()
    assert code == 6
    assert "the peer does not speak the protocol: no packet begins with byte 0x2b" in err


async def test_no_connection_is_accepted_before_the_ports_are_known(tmp_path, monkeypatch):
    """A client that is let in may ask for the cluster configuration, which names all ports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    refused = []
    start = listeners.AdminServer.start

    async def start_and_look(self, *arguments, **named):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        except ConnectionRefusedError as error:
            refused.append(error)
        return await start(self, *arguments, **named)

    monkeypatch.setattr(listeners.AdminServer, "start", start_and_look)
    async with node_here(tmp_path, {}, port=port):
        assert len(refused) == 1
        async with KvClient.connect(f"127.0.0.1:{port}") as kv:
            assert kv.topology.nodes[0].mgmt_port
