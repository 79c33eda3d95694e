"""Folders as they are found: of another format, and with values that look like the log itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import google_crc32c
import pytest

from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.log.device import SEGMENT_FORMAT_VERSION, SEGMENT_HEADER_BYTES
from vbucket.log.record import (
    RECORD_BYTES,
    pack_group,
    read_segment_header,
    scan_segment,
)
from vbucket.log.segment_files import MARK_NAME, read_segment, segment_path, segments_in

pytestmark = pytest.mark.crash


def findings(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "clients.cli", "verify", "-o", "json", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    return [line["kind"] for line in lines if "kind" in line]


def documents(client: RawClient, vb_id: int, keys: list[bytes]) -> dict[bytes, bytes]:
    answers = {key: client.ask(Opcode.GET, key=key, vb_id=vb_id) for key in keys}
    assert {answer.status for answer in answers.values()} <= {Status.OK, Status.KEY_ENOENT}
    return {key: answer.value for key, answer in answers.items() if answer.status == Status.OK}


@pytest.mark.parametrize("version", [SEGMENT_FORMAT_VERSION - 1, SEGMENT_FORMAT_VERSION + 1])
def test_a_log_of_another_format_is_refused_by_name(tmp_path: Path, version: int) -> None:
    """Nothing in the folder changes, so the program that wrote it can go on with it."""
    with DcpdProcess(tmp_path / "data") as server, RawClient(server.port) as client:
        assert client.set(b"kept").status == Status.OK
        server.kill()
        path = segment_path(server.data / "log", segments_in(server.data / "log")[-1])
        segment = bytearray(path.read_bytes())
        segment[8:12] = version.to_bytes(4, "big")
        crc = google_crc32c.value(bytes(segment[: SEGMENT_HEADER_BYTES - 4]))
        segment[SEGMENT_HEADER_BYTES - 4 : SEGMENT_HEADER_BYTES] = crc.to_bytes(4, "big")
        path.write_bytes(segment)
        assert findings(server.data) == ["log"]
        found = subprocess.run(
            [sys.executable, "-m", "dcp.server.main", "--data", server.data, "--port", "0"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert found.returncode == 3
        assert f"has format version {version}, this program knows 4; use the " in found.stderr
        assert path.read_bytes() == segment


def test_record_like_value_in_a_torn_group_stops_no_start(tmp_path: Path) -> None:
    """The disk got the value and not the head of the group, which nobody was answered."""
    with DcpdProcess(tmp_path / "data") as server:
        log = server.data / "log"
        crafted = b"".join(pack_group(group, b"x" * 40, 0)[0] for group in range(1, 200))
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
