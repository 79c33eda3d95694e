"""Folders as they are found: of an older format, and with values that look like the log itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import google_crc32c
import pytest

from dcp.server.storage.folder import store_path
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.log.device import SEGMENT_FORMAT_VERSION
from vbucket.log.record import (
    KIND_GROUP,
    OLD_RECORD_HEAD,
    RECORD_BYTES,
    read_segment_header,
    scan_segment,
)
from vbucket.log.segment_files import MARK_NAME, read_segment, segment_path, segments_in
from vbucket.store.environment_lmdb import LmdbPageReader
from vbucket.store.records import STORE_FORMAT_VERSION, TABLES, RecordView

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.crash


def findings(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "clients.cli", "verify", "-o", "json", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    return [line["kind"] for line in lines if "kind" in line]


def versions(log: Path) -> list[int]:
    return [read_segment(log, segment)[11] for segment in segments_in(log)]


def documents(client: RawClient, vb_id: int, keys: list[bytes]) -> dict[bytes, bytes]:
    answers = {key: client.ask(Opcode.GET, key=key, vb_id=vb_id) for key in keys}
    assert {answer.status for answer in answers.values()} <= {Status.OK, Status.KEY_ENOENT}
    return {key: answer.value for key, answer in answers.items() if answer.status == Status.OK}


def numbered(name: str, value: str, count: int) -> dict[bytes, bytes]:
    return {b"%s-%d" % (name.encode(), n): b"%s %d" % (value.encode(), n) for n in range(count)}


@pytest.mark.parametrize(("version", "log_versions"), [(1, [1, 1]), (2, [2]), (3, [3])])
def test_a_folder_with_an_older_log_goes_on_as_it_was(
    tmp_path: Path, version: int, log_versions: list[int]
) -> None:
    """It was killed: some is merged, a partition was branched, a group at the end is torn."""
    data = tmp_path / "data"
    with ZipFile(DATA / f"folder-log-v{version}.zip") as folder:
        folder.extractall(data)
    assert versions(data / "log") == log_versions
    assert findings(data) == ["torn-tail"]
    merged, logged = numbered("merged", "value", 20), numbered("logged", "value", 10)
    at_0 = {b"after-branch": b"v", **merged, b"logged-0": b"value 0", b"logged-1": b"value 1"}
    at_7 = merged | logged | numbered("logged", "newer", 5)
    del at_7[b"merged-3"]
    keys = [*merged, *logged, b"after-branch"]
    with DcpdProcess(data) as server:
        assert "torn tail cut" in server.log_path.read_text()
        for _ in range(2):
            with RawClient(server.port) as client:
                assert documents(client, 0, keys) == at_0
                assert documents(client, 7, keys) == at_7
                assert documents(client, 1023, keys) == merged
                assert client.set(b"new").status == Status.OK
                assert client.ask(Opcode.DELETE, key=b"new", vb_id=0).status == Status.OK
            server.compact()  # which merges all that is in the log, of either version, before
        assert server.status()["merges"]
    assert set(versions(data / "log")) == {SEGMENT_FORMAT_VERSION}
    assert findings(data) == []


def version_log(server: DcpdProcess, vb_id: int) -> list[tuple[int, int, int]]:
    """All versions of a partition: uuid, seqno, epoch."""
    with server.connect() as kv:
        rows = kv.stats(f"version-log {vb_id}")
    name, count = f"vb_{vb_id}", int(rows[f"vb_{vb_id}:num_entries"])
    numbers = [[int(rows[f"{name}:{n}:{w}"]) for w in ("id", "seq", "epoch")] for n in range(count)]
    return [(vb_uuid, seqno, epoch) for vb_uuid, seqno, epoch in numbers]


def test_a_folder_of_format_3_keeps_its_versions_and_gets_room_for_more(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ZipFile(DATA / "folder-log-v3.zip") as folder:
        folder.extractall(data)
    with DcpdProcess(data) as server:
        before = version_log(server, 5)
        assert [version[1:] for version in before] == [(6, 0)] * 25
        for _ in range(3):
            server.branch(5, 6)
        log = version_log(server, 5)
        assert log[3:] == before
        with server.connect() as kv:
            assert kv.failover_log(5) == [version[:2] for version in log[:25]]
            states = kv.stats("vbucket")
        assert (states["vb_9"], states["vb_8"]) == ("replica", "active")
        server.kill()
        server.start()
        assert version_log(server, 5) == log
        server.compact()
        server.restart()
        assert version_log(server, 5) == log
    store = LmdbPageReader(store_path(data), TABLES)
    node = RecordView(store).node()
    store.close()
    assert node is not None
    assert node.format_version == STORE_FORMAT_VERSION
    assert findings(data) == []


def plain_record(group: int, payload: bytes) -> bytes:
    """A record as every client can make it: that of a log without a salt."""
    head = OLD_RECORD_HEAD.pack(0xDC9D_106E, KIND_GROUP, len(payload), group)
    return head + google_crc32c.value(head + payload).to_bytes(4, "big") + payload


def test_a_value_that_looks_like_a_record_in_a_torn_group_stops_no_start(tmp_path: Path) -> None:
    """The disk got the value and not the head of the group, which nobody was answered."""
    with DcpdProcess(tmp_path / "data") as server:
        log = server.data / "log"
        crafted = b"".join(plain_record(group, b"x" * 40) for group in range(1, 200))
        with RawClient(server.port) as client:
            assert client.set(b"kept").status == Status.OK
            mark = (log / MARK_NAME).read_bytes()
            assert client.set(b"crafted", crafted).status == Status.OK
        server.kill()
        (log / MARK_NAME).write_bytes(mark)  # as after a power cut before that group's sync
        segment = segments_in(log)[-1]
        data = bytearray(read_segment(log, segment))
        first, last = scan_segment(bytes(data), segment, is_newest=True)
        data[first.end : first.end + RECORD_BYTES] = bytes(RECORD_BYTES)
        assert crafted in data[first.end : last.end]
        segment_path(log, segment).write_bytes(data)
        assert findings(server.data) == ["torn-tail"]
        server.start()
        assert "torn tail cut" in server.log_path.read_text()
        with RawClient(server.port) as client:
            assert documents(client, 0, [b"kept", b"crafted"]) == {b"kept": b"v"}


def test_every_segment_of_a_node_has_a_salt_of_its_own(tmp_path: Path) -> None:
    salts: set[int] = set()
    with DcpdProcess(tmp_path / "data") as server:
        for _ in range(3):
            log = server.data / "log"
            newest = segments_in(log)[-1]
            salts.add(read_segment_header(read_segment(log, newest), newest).salt)
            server.restart()
    assert len(salts) == 3
