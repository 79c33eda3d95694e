"""Documents expire on a real server though nobody asks for them, and streams show it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.testing import DcpServer
from dcp.wire.frame import pack_request
from dcp.wire.message import OPEN_EXTRAS, OpenFlag, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from vbucket.model.ids import SEQNO_MAX

VB = 5
COUNT = 500


def store_with_expiry(client: RawClient, expiry: int, count: int = COUNT) -> None:
    client.ask(Opcode.SELECT_BUCKET, key=b"default")  # so that it names its partitions
    extras = bytes(4) + expiry.to_bytes(4, "big")
    for number in range(count):
        client.send(
            pack_request(Opcode.SETQ, vb_id=VB, key=b"ttl:%d" % number, extras=extras, value=b"v")
        )
    assert client.ask(Opcode.NOOP).status == Status.OK


def expirations(client: RawClient, count: int) -> Iterator[tuple[int, bytes]]:
    """Stream the partition from its beginning; yield seqno and key of each expiry."""
    client.ask(Opcode.SELECT_BUCKET, key=b"default")
    flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
    assert client.ask(Opcode.DCP_OPEN, key=b"c", extras=OPEN_EXTRAS.pack(0, flags)).status == 0
    control = client.ask(Opcode.DCP_CONTROL, key=b"enable_expiry_opcode", value=b"true")
    assert control.status == Status.OK
    client.send(pack_stream_request(VB, StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0), 1))
    while count:
        frame = client.receive()
        assert frame is not None, "the server has closed"
        if frame.opcode == Opcode.DCP_EXPIRATION:
            yield int.from_bytes(frame.extras[:8], "big"), frame.key
            count -= 1


@pytest.mark.parametrize("interval", ["20ms", "1s"])
def test_documents_expire_without_an_access_and_streams_show_it(
    tmp_path: Path, interval: str
) -> None:
    with DcpServer(tmp_path / "data", "--expiry-interval", interval) as server:
        with RawClient(server.port) as writer, RawClient(server.port) as consumer:
            store_with_expiry(writer, int(time.time()) - 1)
            found = list(expirations(consumer, COUNT))
        seqnos = [seqno for seqno, _ in found]
        assert seqnos == sorted(set(seqnos))
        assert seqnos[-1] == 2 * COUNT
        assert {key for _, key in found} == {b"ttl:%d" % number for number in range(COUNT)}
        metrics = server.metrics()
        assert metrics['dcpd_expired_total{by="pager"}'] == COUNT
        assert metrics['dcpd_expired_total{by="access"}'] == 0
        assert metrics["dcpd_items"] == 0


def test_with_the_pager_off_they_expire_when_somebody_asks(tmp_path: Path) -> None:
    with (
        DcpServer(tmp_path / "data", "--expiry-interval", "0") as server,
        RawClient(server.port) as client,
    ):
        store_with_expiry(client, int(time.time()) - 1, 3)
        assert client.ask(Opcode.GET, vb_id=VB, key=b"ttl:1").status == Status.KEY_ENOENT
        metrics = server.metrics()
        assert metrics['dcpd_expired_total{by="access"}'] == 1
        assert metrics['dcpd_expired_total{by="pager"}'] == 0
        assert metrics["dcpd_items"] == 2


def test_what_was_due_while_server_was_down_expires_after_start(tmp_path: Path) -> None:
    off = ("--expiry-interval", "0", "--memtable-bytes", "1MiB")
    with DcpServer(tmp_path / "data", *off) as server, RawClient(server.port) as client:
        store_with_expiry(client, int(time.time()) - 1)
        while not server.metrics()["dcpd_merges_total"]:  # part of them in the store
            client.ask(Opcode.SET, vb_id=9, key=b"filler", extras=bytes(8), value=bytes(300_000))
        server.kill()
    with (
        DcpServer(tmp_path / "data", "--expiry-interval", "20ms") as server,
        RawClient(server.port) as consumer,
    ):
        assert len({key for _, key in expirations(consumer, COUNT)}) == COUNT
