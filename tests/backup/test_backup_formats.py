"""What is on disk: the archive of version 1 that is kept in tests/data, and the documents."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from clients.backup.archives.archive import create_archive, open_archive, run_file
from clients.backup.archives.archive_check import verify
from clients.backup.archives.archive_errors import (
    ArchiveDamagedError,
    ArchiveError,
    ArchiveMissingError,
    MissingExtraError,
)
from clients.backup.archives.archive_manifest import (
    ArchiveRecord,
    pack_archive,
    pack_run,
    parse_archive,
    parse_run,
)
from clients.backup.archives.legs import Leg
from clients.backup.archives.point import Point
from clients.backup.fold import fold
from clients.backup.reading import PointReader
from clients.install_hint import install_hint
from dcp.wire.feature import Feature
from support.backup_pair import back_up, documents_of, state_as_of
from support.memory_node import MemoryNode
from vbucket.model.ids import NUM_VBUCKETS

GOLDEN = Path(__file__).parents[1] / "data" / "backup-v1"
"""Written by `write_golden` and never again: every later version must read it."""
VB_IDS = (0, 5, 1023)


def write_golden(folder: Path) -> None:
    """How the golden archive came to be: python tests/backup/test_backup_formats.py FOLDER"""
    node = MemoryNode(1, partitions=NUM_VBUCKETS)
    writer = node.connect()
    writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
    archive = create_archive(str(folder), 1_800_000_000_000_000_000)
    archive.write("dcpd-archive", pack_archive(ArchiveRecord("00112233aabbccdd", node.now_ns)))
    archive.record = ArchiveRecord("00112233aabbccdd", node.now_ns)
    for number in range(6):
        writer.set(5, b"\0k%d" % (number % 4), b"first %d" % number)
    writer.set(1023, b"\0last", b"\xff\x00")
    back_up(node, archive, VB_IDS, history=False)
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.create_collection("_default", "more")
    )
    writer.set(5, b"\x08in more", b"{}")
    writer.delete(5, b"\0k1")
    node.now_ns += 10**9
    back_up(node, archive, VB_IDS)
    node.engine.keyspace.branch(5, 7)
    writer.set(5, b"\0after", b"the branch")
    node.now_ns += 10**9
    back_up(node, archive, VB_IDS)


GOLDEN_STATES = {
    1: {0: {}, 5: {b"\0k0": b"first 4", b"\0k1": b"first 5", b"\0k2": b"first 2",
                   b"\0k3": b"first 3"}, 1023: {b"\0last": b"\xff\x00"}},
    2: {0: {}, 5: {b"\0k0": b"first 4", b"\0k2": b"first 2", b"\0k3": b"first 3",
                   b"\x08in more": b"{}"}, 1023: {b"\0last": b"\xff\x00"}},
    3: {0: {}, 5: {b"\0k0": b"first 4", b"\0k1": b"first 5", b"\0k2": b"first 2",
                   b"\0k3": b"first 3", b"\0after": b"the branch"},
        1023: {b"\0last": b"\xff\x00"}},
}  # fmt: skip


@pytest.fixture
def golden(tmp_path):
    """A copy: reading must not need to write, and folding does."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return open_archive(str(tmp_path / "golden"))


def test_the_golden_archive_is_read(golden):
    assert golden.record == ArchiveRecord("00112233aabbccdd", 1_800_000_000_000_000_000)
    assert verify(golden).is_sound
    for run, states in GOLDEN_STATES.items():
        assert state_as_of(golden, VB_IDS, Point(run=run)) == states
    records = golden.runs()
    assert [record.is_history for record in records] == [False, True, True]
    assert records[2].rollbacks == {5: [(9, 7)]}
    reader = PointReader(golden, records[:1])
    view = reader.view(5, Point(seqnos={5: 3}))
    assert (view.wanted_seqno, view.seqno) == (3, 0), "inside a de-duplicated snapshot"
    assert documents_of(reader, view) == {}


def test_the_golden_archive_is_folded(golden):
    fold(golden, 3)
    assert state_as_of(golden, VB_IDS) == GOLDEN_STATES[3]


def test_what_is_written_today_is_the_golden_archive(tmp_path):
    """The compressed bytes may be another zstd's; what they say may not change unnoticed."""
    write_golden(tmp_path / "new")
    made, golden = open_archive(str(tmp_path / "new")), open_archive(str(GOLDEN))
    assert sorted(made.files()) == sorted(golden.files())
    for record, wanted in zip(made.runs(), golden.runs(), strict=True):

        def without_sizes(run):
            return run._replace(segments=[(path, held) for path, _, held in run.segments])

        assert without_sizes(record) == without_sizes(wanted)
        for segment in record.segments:
            assert made.footer(segment.path).sections == golden.footer(segment.path).sections


def test_documents_round_trip(golden):
    for record in golden.runs():
        assert parse_run(pack_run(record)) == record
    assert parse_archive(pack_archive(golden.record)) == golden.record


@pytest.mark.parametrize(
    "document",
    [None, 5, [], [1, 2], [0, 5, 4, 4, 4, [], []], [0, 0, 4, 5, 9, [], []],
     [0, 0, 4, 4, 4, [[1]], []]],
)  # fmt: skip
def test_legs_that_are_none_are_refused(document):
    with pytest.raises(ValueError, match="leg"):
        Leg.of(document)


def test_urls_that_cannot_be_used(tmp_path, monkeypatch):
    missing = {"class": "no_such_module.FileSystem", "err": "Install no_such_module"}
    monkeypatch.setitem(known_implementations, "nodriver", missing)
    with pytest.raises(ArchiveError, match="Protocol not known: nonsense"):
        open_archive("nonsense://x")
    with pytest.raises(MissingExtraError, match="no driver for this URL: Install no_such_module"):
        open_archive("nodriver://bucket/folder")
    with pytest.raises(ArchiveMissingError, match="there is no archive"):
        open_archive(str(tmp_path / "nothing"))
    with pytest.raises(ArchiveError, match="no archive is named"):
        open_archive("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ArchiveError, match="the folder is not empty"):
        create_archive(str(tmp_path / "full"), 1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArchiveError):
        create_archive(str(tmp_path / "file"), 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path, monkeypatch):
    archive = create_archive(str(tmp_path / "archive"), 1)
    (tmp_path / "archive" / "runs").write_text("in the way")
    with pytest.raises(ArchiveError, match=r"runs/000001.run cannot be written"):
        archive.write(run_file(1), b"")


def test_another_number_of_partitions_is_refused():
    import cbor2
    from google_crc32c import value as crc32c

    from clients.backup.archives import archive_manifest as manifest
    from clients.backup.archives.zstd import compress

    raw = cbor2.dumps({"id": "x", "created_ns": 1, "partitions": 65})
    packed = compress(raw)
    head = manifest._HEAD.pack(manifest.ARCHIVE_MAGIC, len(raw), crc32c(packed))
    with pytest.raises(ArchiveError, match="65 partitions"):
        parse_archive(head + packed)


def test_only_urls_and_parquet_need_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for url in (str(tmp_path / "a"), f"file://{tmp_path}/b"):
        create_archive(url, 1)
        assert list(open_archive(url).runs()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    with pytest.raises(
        MissingExtraError, match="fsspec, which opens URLs, is not installed"
    ) as info:
        open_archive("memory://archive")
    assert info.value.hint == install_hint("backup")


def test_a_damaged_golden_copy_is_not_read_wrong(golden):
    path = golden.runs()[0].segments[0].path
    data = golden.read(path)
    golden.write(path, data[:-30] + b"\0" + data[-29:])
    assert not verify(golden).is_sound
    with pytest.raises(ArchiveDamagedError):
        fold(golden, 2)


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
