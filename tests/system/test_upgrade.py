"""What version 0.1.0 left is read: its data folder, its archive, and its older files of users.

    python -m tests.system.test_upgrade FILE

writes the golden file; it was run once, in a checkout of 0.1.0. Every later version must read it.
docs/upgrade.md says what an upgrade changes.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import cramjam
import pytest

from clients.backup.archives.segment import FORMAT_VERSION
from clients.testing import DcpServer
from dcp.server.access.users_file import USERS_FORMAT_VERSION
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from support.raw_client import RawClient
from vbucket.log.device import SEGMENT_FORMAT_VERSION
from vbucket.store.records import OLDEST_FORMAT_VERSION, STORE_FORMAT_VERSION

GOLDEN = Path(__file__).parents[1] / "data" / "upgrade-0.1.0.zip"
USERS = Path(__file__).parents[1] / "data"
FAR_S = 4_102_444_800
"""2100-01-01: the expiry of a document."""
TEXT = b"compressed " * 50
XATTR, MKDIR_P, MKDOC, SNAPPY, JSON = 0x04, 0x01, 0x01, 0x02, 0x01
PLAIN = {b"plain-%d" % number: b"value %d" % number for number in range(20)}
PASSWORD = "correct horse battery"


def dcpctl(server: DcpServer, *arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", server.address, *arguments],
        env=os.environ | env, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def aware(server: DcpServer) -> RawClient:
    """A client that knows JSON, XATTRs and Snappy."""
    client = RawClient(server.port)
    features = (Feature.XERROR, Feature.JSON, Feature.XATTR, Feature.SNAPPY)
    value = b"".join(feature.to_bytes(2, "big") for feature in features)
    assert client.ask(Opcode.HELLO, value=value).status == 0
    return client


def store(client: RawClient, vb_id: int, key: bytes, value: bytes, **more: int) -> None:
    extras = struct.pack(">II", more.get("flags", 0), more.get("expiry", 0))
    answer = client.ask(
        Opcode.SET, vb_id=vb_id, key=key, value=value, extras=extras,
        datatype=more.get("datatype", 0),
    )  # fmt: skip
    assert answer.status == 0, answer


def write_golden(target: Path, scratch: Path) -> None:
    """Write a folder as a killed server leaves it, and an archive of the same data."""
    archive = ["--archive", str(scratch / "archive")]
    with DcpServer(scratch / "data") as server:
        body: dict[str, Any] = {"name": "alice", "password": PASSWORD}
        server.ask("POST", "/api/v1/users", body)
        body |= {"name": "bob", "roles": {"read": [{"prefix": "pub:", "collection": "shop.a"}]}}
        server.ask("POST", "/api/v1/users", body)
        dcpctl(server, "collection", "create", "shop.a")
        with aware(server) as client:
            for key, value in PLAIN.items():
                store(client, 5, key, value, flags=7)
            store(client, 5, b"gone", b"x")
            assert client.ask(Opcode.DELETE, vb_id=5, key=b"gone").status == 0
            store(client, 6, b"json", b'{"a":1}', datatype=JSON, expiry=FAR_S)
            block = bytes(cramjam.snappy.compress_raw(TEXT))
            store(client, 6, b"text", block, datatype=SNAPPY)
            path, value = b"who.wrote", b'"0.1.0"'
            extras = struct.pack(">HBB", len(path), XATTR | MKDIR_P, MKDOC)
            answer = client.ask(
                Opcode.SUBDOC_DICT_UPSERT, vb_id=6, key=b"marked", value=path + value, extras=extras
            )
            assert answer.status == 0, answer
        dcpctl(server, "backup", "run", *archive)
        server.compact()
        for _ in range(30):
            server.failover(9)
        with aware(server) as client:
            store(client, 5, b"plain-0", b"newer")
            store(client, 7, b"undone", b"x")
            store(client, 7, b"undone", b"y")
        server.branch(7, 1)  # the scope: the first change of every partition
        server.set_state(10, "replica")
        dcpctl(server, "backup", "run", *archive)
        with aware(server) as client:
            store(client, 5, b"plain-1", b"only in the log")
        server.kill()
    with ZipFile(target, "w", ZIP_DEFLATED) as file:
        for name in ("data", "archive"):
            for path_of_file in sorted((scratch / name).rglob("*")):
                if path_of_file.is_file():
                    file.write(path_of_file, path_of_file.relative_to(scratch))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upgrade")
    with ZipFile(GOLDEN) as file:
        file.extractall(folder)
    (folder / "data" / "users.json").chmod(0o600)
    return folder


@pytest.fixture
def server(golden: Path, tmp_path: Path) -> Iterator[DcpServer]:
    shutil.copytree(golden / "data", tmp_path / "data")
    with DcpServer(tmp_path / "data") as server:
        yield server


def found(client: RawClient, vb_id: int, key: bytes) -> Frame:
    return client.ask(Opcode.GET, vb_id=vb_id, key=key)


def check_documents(client: RawClient, plain: dict[bytes, bytes]) -> None:
    for key, value in plain.items():
        answer = found(client, 5, key)
        assert (answer.status, answer.value) == (0, value), key
    assert found(client, 5, b"gone").status == 1
    answer = found(client, 6, b"json")
    assert (answer.value, answer.datatype & JSON) == (b'{"a":1}', JSON)
    meta = client.ask(Opcode.GET_META, vb_id=6, key=b"json")
    assert struct.unpack_from(">I", meta.extras, 8)[0] == FAR_S
    answer = found(client, 6, b"text")
    is_compressed = answer.datatype & SNAPPY  # a restore stores it plain
    assert (
        bytes(cramjam.snappy.decompress_raw(answer.value)) if is_compressed else answer.value
    ) == TEXT
    path = b"who.wrote"
    answer = client.ask(
        Opcode.SUBDOC_GET, vb_id=6, key=b"marked", value=path,
        extras=struct.pack(">HB", len(path), XATTR),
    )  # fmt: skip
    assert (answer.status, answer.value) == (0, b'"0.1.0"')


NEWEST = PLAIN | {b"plain-0": b"newer", b"plain-1": b"only in the log"}


@pytest.mark.crash
def test_a_folder_of_0_1_0_goes_on_as_it_was(server: DcpServer) -> None:
    for _ in range(2):
        with aware(server) as client:
            check_documents(client, NEWEST)
            assert found(client, 7, b"undone").status == 1
            assert found(client, 10, b"any").status == 7, "a replica is not read"
        assert "shop.a" in dcpctl(server, "collection", "list")
        with server.connect() as kv:
            versions = kv.stats("version-log 9")
        assert int(versions["vb_9:num_entries"]) == 31
        users = server.ask("GET", "/api/v1/users")
        assert users["roles"]["bob"] == {"read": [{"prefix": "pub:", "collection": "shop.a"}]}
        assert set(users["roles"]["alice"]) == {"read", "write", "stream", "admin"}
        login = {"DCPCTL_USER": "alice", "DCPCTL_PASSWORD": PASSWORD}
        assert "durability" in dcpctl(server, "status", **login)
        server.branch(5, 24)  # within the history of 0.1.0
        with aware(server) as client:
            check_documents(client, PLAIN)
            store(client, 5, b"plain-0", b"newer")
            store(client, 5, b"plain-1", b"only in the log")
        server.compact()
        server.restart()
    assert server.stop() == 0
    done = subprocess.run(
        [sys.executable, "-m", "clients.cli", "verify", "-o", "json", str(server.data)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [line for line in done.stdout.splitlines() if "kind" in json.loads(line)] == []
    server.start()


def test_an_archive_of_0_1_0_is_restored_and_continued(
    server: DcpServer, golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(golden / "archive", tmp_path / "archive")
    archive = ["--archive", str(tmp_path / "archive")]
    dcpctl(server, "backup", "run", *archive)  # what was only in the log
    dcpctl(server, "backup", "verify", *archive)
    with DcpServer(tmp_path / "other") as other:
        dcpctl(other, "backup", "restore", "--create-collections", *archive)
        with aware(other) as client:
            check_documents(client, NEWEST)
            assert found(client, 7, b"undone").status == 1


def test_the_page_names_the_formats() -> None:
    page = (Path(__file__).parents[2] / "docs" / "upgrade.md").read_text()
    formats = {
        "log": (SEGMENT_FORMAT_VERSION, SEGMENT_FORMAT_VERSION),
        "store": (OLDEST_FORMAT_VERSION, STORE_FORMAT_VERSION),
        "`users.json`": (USERS_FORMAT_VERSION, USERS_FORMAT_VERSION),
        "archives of `dcpctl backup`": (FORMAT_VERSION, FORMAT_VERSION),
    }
    for what, (oldest, newest) in formats.items():
        read = ", ".join(str(number) for number in range(oldest, newest + 1))
        assert f"| {what} | {read} | {newest}" in page


if __name__ == "__main__":
    scratch_folder = Path(sys.argv[1]).with_suffix(".folder")
    scratch_folder.mkdir()
    write_golden(Path(sys.argv[1]), scratch_folder)
