"""A member recovers its folder beside the event loop: probes are answered, nothing is served."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path

import pytest

from dcp.server import node as node_module
from dcp.server.admin.probes_at_start import CONNECTIONS_MAX, ProbesAtStart, answer_to
from dcp.server.storage.opening import Storage
from support.cluster_here import ClusterHere


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    """Return status and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(20):
            raw = await reader.read()
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


async def test_probes_are_answered_while_a_member_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    loop_thread = threading.get_ident()

    def slow(*arguments: object, **more: object) -> Storage:
        assert threading.get_ident() != loop_thread
        has_begun.set()
        assert may_go_on.wait(60)
        return Storage(*arguments, **more)  # type: ignore[arg-type]

    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        await node.stop()
        port, admin_port = cluster._ports["n1"]
        with monkeypatch.context() as patch:
            patch.setattr(node_module, "Storage", slow)
            starting = asyncio.ensure_future(cluster.start("n1"))
            await asyncio.to_thread(has_begun.wait, 60)
            try:
                assert await ask(admin_port, get("/livez")) == (200, b'{"status":"ok"}')
                status, body = await ask(admin_port, get("/readyz"))
                assert (status, json.loads(body)) == (
                    503,
                    {"status": "not ready", "why": "starting"},
                )
                status, body = await ask(admin_port, get("/api/v1/status"))
                assert status == 503
                assert "reads its data folder" in json.loads(body)["error"]["why"]
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)
                assert cluster.nodes["n1"].replicated is None
            finally:
                may_go_on.set()
            await starting
        assert (await ask(admin_port, get("/livez")))[0] == 200
        assert (await ask(admin_port, get("/readyz")))[0] == 200
        await cluster.until_all_in_sync(1)


async def test_a_start_that_fails_gives_the_port_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_arguments: object, **_more: object) -> Storage:
        raise OSError("the disk is gone")

    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await node.stop()
        with monkeypatch.context() as patch:
            patch.setattr(node_module, "Storage", damaged)
            with pytest.raises(OSError, match="the disk is gone"):
                await cluster._new("n1").start()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", cluster._ports["n1"][1]))


async def test_start_without_its_key_value_port_gives_admin_port_up(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await node.stop()
        port, admin_port = cluster._ports["n1"]
        with socket.create_server(("127.0.0.1", port)):
            with pytest.raises(OSError, match="in use"):
                await cluster.start("n1")
            socket.create_server(("127.0.0.1", admin_port)).close()
        await cluster.start("n1")


async def test_bad_requests_and_crowds_do_not_stop_the_probes() -> None:
    async with ProbesAtStart("127.0.0.1", 0) as probes:
        assert probes._listener is not None
        port = probes._listener.getsockname()[1]
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        _, extra = await asyncio.open_connection("127.0.0.1", port)
        for _, writer in [*idle[1:], (None, extra)]:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        long = b"GET /livez HTTP/1.1\r\n" + b"x" * (1 << 20)
        (told,) = await asyncio.gather(ask(port, long), return_exceptions=True)
        assert isinstance(told, ConnectionError) or told == (0, b"")
        while (await ask(port, get("/livez")))[0] != 200:  # noqa: ASYNC110 - those above end first
            await asyncio.sleep(0)
        idle[0][1].close()
    for line in (b"", b"\xff\xff", b"GET", b"GET  HTTP/1.1"):
        assert answer_to(line + b"\r\n\r\n").startswith(b"HTTP/1.1 503")
    assert answer_to(b"HEAD /livez?x HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
