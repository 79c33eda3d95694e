"""An archive knows its number of partitions, and a restore into another number goes by key."""

from __future__ import annotations

from contextlib import suppress

import pytest

from clients.address import parse_address
from clients.backup.archives.archive import open_archive
from clients.backup.archives.archive_errors import ArchiveError
from clients.backup.archives.archive_manifest import ArchiveRecord, pack_archive, parse_archive
from clients.backup.restore_load import by_key, frames_of_load, load_of
from clients.errors import NotFoundError
from clients.kv.sync_client import SyncKv
from clients.testing import DcpServer
from dcp.wire.frame import pack_request
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from support.backup_pair import backup, restore
from vbucket.model.ids import vbucket_of

KEYS = [f"key-{number}" for number in range(500)]


@pytest.fixture(scope="module")
def few():
    with DcpServer(None, "--partitions", "64") as process:
        yield process


def write(ctl, server):
    """Documents in two collections, and deletions."""
    assert ctl(server, "collection", "create", "_default.fruit")[0] == 0
    address = parse_address(server.address)
    with server.connect() as client, SyncKv(address, collection="_default.fruit") as fruit:
        for key in KEYS:
            client.set(key, key.encode())
            fruit.set(key, b"a fruit")
        for key in KEYS[::10]:
            client.delete(key)


def content(server):
    """Collection and key -> value and CAS, by the server's own map."""
    found = {}
    for collection in ("_default._default", "_default.fruit"):
        with SyncKv(parse_address(server.address), collection=collection) as client:
            for key in KEYS:
                with suppress(NotFoundError):
                    document = client.get(key)
                    found[collection, key] = document.value, document.cas
    return found


def frame(number, collection=b"\0"):
    extras = MUTATION_EXTRAS.pack(number + 1, 1, 0, 0, 0, 0, 0)
    key = collection + b"key-%d" % number
    return pack_request(
        Opcode.DCP_MUTATION, vb_id=7, cas=number + 1, extras=extras, key=key, value=b"%d" % number
    )


@pytest.mark.parametrize("count", [64, 128, 1024])
def test_each_frame_goes_where_its_key_belongs(count):
    """Whatever its collection's id, and in the order that it had."""
    frames = [frame(number, (b"\0", b"\x08", b"\x81\x01")[number % 3]) for number in range(600)]
    loads = by_key(load_of(7, frames), count)
    assert len({load.vb_id for load in loads}) == len(loads) > 50
    left = dict.fromkeys(frames)
    for load in loads:
        numbers = []
        for moved in frames_of_load(load):
            assert int.from_bytes(moved[6:8], "big") == load.vb_id
            original = moved[:6] + (7).to_bytes(2, "big") + moved[8:]
            left.pop(original)
            numbers.append(frames.index(original))
            assert vbucket_of(b"key-%d" % numbers[-1], count) == load.vb_id
        assert numbers == sorted(numbers)
    assert not left


def test_the_record_has_the_number():
    for count in (1, 64, 128, 1024):
        record = ArchiveRecord("00", 5, count)
        assert parse_archive(pack_archive(record)) == record
    for count in (0, 100, 2048, "64"):
        with pytest.raises(ArchiveError, match=f"with {count} partitions; a power of two"):
            parse_archive(pack_archive(ArchiveRecord("00", 5, count)))


def test_there_and_back_again(ctl, server, few, other, tmp_path):
    """1,024 partitions to 64 and to 1,024 again: the same documents, and deletions stay."""
    write(ctl, server)
    wanted = content(server)
    assert len(wanted) == 2 * len(KEYS) - len(KEYS[::10])
    backup(ctl, server, tmp_path / "many")
    assert open_archive(str(tmp_path / "many")).record.partitions == 1024
    report = restore(ctl, few, tmp_path / "many", "--create-collections")
    assert report["written"] == 2 * len(KEYS)
    assert content(few) == wanted
    backup(ctl, few, tmp_path / "few")
    assert open_archive(str(tmp_path / "few")).record.partitions == 64
    restore(ctl, other, tmp_path / "few", "--create-collections")
    assert content(other) == wanted
    assert restore(ctl, other, tmp_path / "few")["kept_newer"] == 2 * len(KEYS)


def test_an_archive_keeps_its_number(ctl, server, few, archive):
    backup(ctl, few, archive)
    code, _, err = ctl(server, "backup", "run", "--archive", archive)
    assert code == 1
    assert "is of 64 partitions, and the server has 1024" in err
    assert "Use a new archive" in err
    backup(ctl, few, archive)  # as before
