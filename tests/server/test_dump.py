"""Dumps of a partition as of a seqno: the command, and the admin API below it, on a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from cramjam import snappy

from clients.cli.dcpctl import run
from clients.testing import DcpServer
from dcp.server.operate.partition_dump import DUMPS_MAX, LARGE_LINE_BYTES, Dumps
from dcp.server.storage.waiters import CommitWaiters
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from support.raw_client import RawClient
from vbucket.engine.engine import SET

VB = 17
GUEST = {"authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}

Ctl = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpServer]:
    with DcpServer(tmp_path_factory.mktemp("dump") / "data", "--memtable-bytes", "1MiB") as server:
        yield server


@pytest.fixture
def client(server: DcpServer) -> Iterator[RawClient]:
    with RawClient(server.port) as client:
        client.ask(Opcode.SELECT_BUCKET, key=b"default")
        yield client


@pytest.fixture
def ctl(
    server: DcpServer, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Ctl:
    monkeypatch.setenv("DCPCTL_SERVER", server.address)

    def call(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        code = run(["vb", "dump", *arguments])
        out, err = capfdbinary.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err.decode()

    return call


def put(client: RawClient, key: bytes, value: bytes, vb_id: int) -> None:
    answer = client.ask(Opcode.SET, vb_id=vb_id, key=key, extras=b"\0\0\0\7\0\0\0\0", value=value)
    assert answer.status == Status.OK


def test_a_dump_is_the_documents_as_of_a_seqno(client: RawClient, ctl: Ctl) -> None:
    put(client, b"b", b"old", 1)
    put(client, b"a", b"\xff\xfe", 1)
    put(client, b"gone", b"v", 1)
    client.ask(Opcode.DELETE, vb_id=1, key=b"gone")
    put(client, b"b", b"new", 1)
    code, documents, err = ctl("1")
    assert code == 0
    assert "partition 1 as of seqno 5, version " in err
    assert [(one["key"], one["value"]) for one in documents] == [("a", "//4="), ("b", "new")]
    first, second = documents
    assert first["value_encoding"] == "base64"
    assert "value_encoding" not in second
    assert second.pop("cas").isdigit()
    assert second == {
        "v": 1, "collection": "_default._default", "key": "b", "value": "new", "seqno": 5,
        "rev": 2, "flags": 7, "expiry": 0, "datatype": 0,
    }  # fmt: skip
    before = ctl("1", "--at", "3")[1]
    assert [one["key"] for one in before] == ["a", "b", "gone"]
    assert before[1]["value"] == "old"
    assert ctl("1", "--at", "0")[1] == []


def test_a_seqno_that_is_not_there_is_refused(client: RawClient, ctl: Ctl) -> None:
    put(client, b"k", b"v", 2)
    code, documents, err = ctl("2", "--at", "9")
    assert (code, documents) == (4, [])
    assert "partition 2 ends at seqno 1, below 9" in err
    assert "dcpctl seqnos" in err


def test_a_dump_shows_one_state_while_somebody_writes(
    server: DcpServer, client: RawClient, ctl: Ctl
) -> None:
    """Writers go on, over several merges, and a dump of before is the same as before."""
    count = 3000
    for number in range(count):
        client.send(
            pack_request(
                Opcode.SETQ, vb_id=VB, key=b"key:%05d" % number, extras=bytes(8), value=b"before"
            )
        )
    assert client.ask(Opcode.NOOP).status == Status.OK
    stop = threading.Event()
    merges_before = server.metrics()["dcpd_merges_total"]

    def write() -> None:
        with RawClient(server.port) as writer:
            writer.ask(Opcode.SELECT_BUCKET, key=b"default")
            number = 0
            while not stop.is_set():
                number += 1
                put(writer, b"key:%05d" % (number * 7 % count), bytes(10_000), VB)
                put(writer, b"noise:%d" % number, b"v", VB)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        rounds = 0
        while not rounds or server.metrics()["dcpd_merges_total"] < merges_before + 2:
            rounds += 1
            code, documents, _ = ctl(str(VB), "--at", str(count))
            assert code == 0
            assert [one["key"] for one in documents] == [f"key:{n:05}" for n in range(count)]
            assert {one["value"] for one in documents} == {"before"}
    finally:
        stop.set()
        thread.join()


def test_dump_that_branch_undoes_says_that_it_is_not_complete(
    server: DcpServer, client: RawClient, ctl: Ctl
) -> None:
    """The reader is slow, so that the dump is under way when the branch comes."""
    vb_id = 40
    for number in range(60):
        put(client, b"key:%05d" % number, bytes(500_000), vb_id)
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
    connection.request("GET", f"/api/v1/vbuckets/{vb_id}/documents", headers=GUEST)
    response = connection.getresponse()
    assert response.headers["dcpd-seqno"] == "60"
    first = json.loads(response.readline())
    assert first["key"] == "key:00000"
    server.branch(vb_id, 10)
    lines = [line for line in response if line.strip()]
    error = json.loads(lines[-1])["error"]
    assert "partition 40 as of seqno 60 is incomplete" in error["what"]
    assert "rolled back to seqno 10" in error["why"]
    connection.close()


def test_who_may_not_read_everything_cannot_dump(server: DcpServer, client: RawClient) -> None:
    put(client, b"k", b"v", 3)
    for path, status in (
        ("/api/v1/vbuckets/3/documents", 401),
        ("/api/v1/vbuckets/3/documents?at=x", 400),
        ("/api/v1/vbuckets/1024/documents", 404),
    ):
        connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
        connection.request("GET", path, headers={} if status == 401 else GUEST)
        response = connection.getresponse()
        assert response.status == status
        response.read()
        connection.close()


def test_a_reader_that_goes_away_leaves_nothing_behind(
    server: DcpServer, client: RawClient
) -> None:
    vb_id = 41
    for number in range(60):
        put(client, b"key:%05d" % number, bytes(500_000), vb_id)
    for _ in range(3):
        connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
        connection.request("GET", f"/api/v1/vbuckets/{vb_id}/documents", headers=GUEST)
        connection.getresponse().readline()
        connection.close()
    while server.metrics()["dcpd_read_views"]:
        pass


def test_a_few_dumps_run_at_a_time(server: DcpServer, client: RawClient) -> None:
    """Each one holds a slice of lines for a reader that may not read on."""
    vb_id = 43
    for number in range(3):
        put(client, b"key:%05d" % number, bytes(900_000), vb_id)
    readers = [HTTPConnection("127.0.0.1", server.admin_port, timeout=20) for _ in range(9)]
    answers = []
    for reader in readers:
        reader.request("GET", f"/api/v1/vbuckets/{vb_id}/documents", headers=GUEST)
        answers.append(reader.getresponse())
    assert [answer.status for answer in answers] == [200] * DUMPS_MAX + [409]
    assert b"8 dumps run already; try again when one has ended" in answers[-1].read()
    for reader in readers:
        reader.close()
    while server.metrics()["dcpd_read_views"]:
        pass


async def test_a_reader_holds_one_large_line_at_most() -> None:
    node = MemoryNode(partitions=1)
    for number in range(40):
        value = bytes(100_000) if number % 10 == 9 else b"small"
        node.engine.store(SET, 0, b"\0%02d" % number, b"\0%02d" % number + value, 0, 0, 0, 0)
    node.commit()
    dumps = Dumps(node.engine, node.views, CommitWaiters(node.engine, node.commit))
    view = await dumps.open(0, None)
    pieces = [piece async for piece in dumps.lines(view)]
    lines = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert len(lines) == 40
    assert {len(line["value"]) for line in lines} == {5, 100_000}
    large = [sum(len(line) > LARGE_LINE_BYTES for line in piece.splitlines()) for piece in pieces]
    assert large == [1, 1, 1, 1]


def test_restricted_readers_are_told_why(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "data") as server:
        server.ask("POST", "/api/v1/users", {"name": "ada", "password": "correct horse"})
        server.ask("POST", "/api/v1/users/ada/revoke", {"role": "read"})
        server.ask("POST", "/api/v1/users/ada/grant", {"role": "read", "prefix": "user:"})
        connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
        login = {"authorization": "Basic YWRhOmNvcnJlY3QgaG9yc2U="}
        connection.request("GET", "/api/v1/vbuckets/3/documents", headers=login)
        response = connection.getresponse()
        assert response.status == 403
        assert "user:" in json.loads(response.read())["error"]["why"]
        connection.close()


def test_a_value_that_came_compressed_is_dumped_plain(client: RawClient, ctl: Ctl) -> None:
    value = b"again and " * 20
    client.ask(Opcode.HELLO, key=b"test", value=b"\0\x0a\0\x0b")
    answer = client.ask(
        Opcode.SET, vb_id=VB + 1, key=b"packed", extras=bytes(8), datatype=3,
        value=bytes(snappy.compress_raw(value)),
    )  # fmt: skip
    assert answer.status == Status.OK
    _, (line,), _ = ctl(str(VB + 1))
    assert (line["value"], line["datatype"]) == (value.decode(), 0), "it is no JSON"
