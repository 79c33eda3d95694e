"""Damage: it is named, what is not concerned comes back, and nothing wrong ever does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.backup.archives.archive import ARCHIVE_FILE, open_archive, run_file
from clients.backup.archives.archive_check import verify
from clients.backup.archives.archive_errors import ArchiveDamagedError
from clients.backup.archives.archive_manifest import RUN_MAGIC
from clients.backup.archives.point import Point
from clients.backup.archives.segment import TRAILER
from clients.backup.export import Export
from clients.backup.fold import fold
from clients.backup.selection import Selection
from dcp.wire.feature import Feature
from support.backup_pair import back_up, memory_archive
from support.memory_node import MemoryNode

VB_IDS = tuple(range(6))


@pytest.fixture(scope="module")
def made():
    """An archive of two runs, and for each partition its state at each seqno."""
    node = MemoryNode(1)
    writer = node.connect()
    writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
    archive = memory_archive()
    states = {vb_id: {0: {}} for vb_id in VB_IDS}
    for run in range(2):
        for vb_id in VB_IDS:
            for number in range(8):
                key, value = b"k%d" % (number % 5), b"%d-%d-%d" % (run, vb_id, number) + bytes(60)
                writer.set(vb_id, b"\0" + key, value)
                seqno = node.engine.partitions[vb_id].high_seqno
                states[vb_id][seqno] = states[vb_id][seqno - 1] | {key: value}
        node.commit()
        back_up(node, archive, VB_IDS)
    return archive, states, files_of(archive)


def files_of(archive):
    paths = [*archive.files(), *archive._marks(), ARCHIVE_FILE]
    return {path: archive.read(path) for path in paths}


@pytest.fixture
def archive(made):
    """The same archive, whole again for each test."""
    return whole(made)


def whole(made):
    archive, _, files = made
    for path in archive.files():
        archive.delete(path)
    for path, data in files.items():
        archive.write(path, data)
    return open_archive(archive.url)


def flip(archive, path, at):
    data = bytearray(archive.read(path))
    data[at] ^= 0x10
    archive.write(path, bytes(data))


def export_of(archive, *, salvage=False):
    work = Export(archive, Point(), Selection(), salvage=salvage)
    found = {vb_id: {} for vb_id in VB_IDS}
    for row in work.rows():
        found[row.vb][row.key] = row.value
    return found, work.findings.damages


def segments_of(archive):
    return [segment for record in archive.runs() for segment in record.segments]


@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_byte_of_a_segment_is_found(made, data):
    archive = whole(made)
    _, states, _ = made
    segment = data.draw(st.sampled_from(segments_of(archive)), label="segment")
    flip(archive, segment.path, data.draw(st.integers(0, segment.size_bytes - 1), label="at"))
    report = verify(archive)
    assert not report.is_sound
    assert {damage.path for damage in report.damages} == {segment.path}
    found, damages = export_of(archive)
    hit = {damage.vb_id for damage in damages}
    assert {damage.vb_id for damage in report.damages} >= hit
    for vb_id in VB_IDS:
        if vb_id in hit:
            assert found[vb_id] in states[vb_id].values(), "an earlier whole state"
        else:
            assert found[vb_id] == states[vb_id][max(states[vb_id])]
    salvaged, _ = export_of(archive, salvage=True)
    for vb_id in VB_IDS:
        assert all(
            any(state.get(key) == value for state in states[vb_id].values())
            for key, value in salvaged[vb_id].items()
        )


def test_a_damaged_chunk_takes_its_partitions_and_no_others(made, archive):
    segment = segments_of(archive)[0]
    footer = archive.footer(segment.path)
    at, size = footer.chunks[0]
    flip(archive, segment.path, at + size // 2)
    lost = {footer.section(i).vb_id for i in range(footer.section_count())
            if footer.section(i).chunk == 0}  # fmt: skip
    report = verify(archive)
    assert {damage.vb_id for damage in report.damages} == lost
    assert f"the chunk at {at}: the checksum is wrong" in str(report.damages[0])
    assert f"partition {report.damages[0].vb_id}, seqno " in str(report.damages[0])
    found, damages = export_of(archive)
    assert {damage.vb_id for damage in damages} == lost
    _, states, _ = made
    for vb_id in set(VB_IDS) - lost:
        assert found[vb_id] == states[vb_id][16]


def test_a_missing_segment_is_named_with_all_that_it_held(archive):
    segment = segments_of(archive)[-1]
    archive.delete(segment.path)
    report = verify(archive)
    assert [(d.path, d.what, d.vb_id, d.first_seqno, d.last_seqno) for d in report.damages] == [
        (segment.path, "the file is missing", vb, first, last)
        for vb, _, first, last in segment.held
    ]
    _, damages = export_of(archive)
    assert {damage.vb_id for damage in damages} == {vb for vb, _, _, _ in segment.held}


def test_a_segment_of_another_run_in_its_place_is_noticed(archive):
    segments = segments_of(archive)
    archive.write(segments[0].path, archive.read(segments[-1].path))
    assert {damage.path for damage in verify(archive).damages} == {segments[0].path}
    _, damages = export_of(archive)
    assert damages


def test_a_damaged_manifest_is_named_and_earlier_runs_are_left(made, archive):
    flip(archive, run_file(2), 60)
    (what,) = (broken := verify(archive).broken).values()
    assert list(broken) == [run_file(2)]
    assert what.startswith("the checksum is wrong (the run ended at 20")
    with pytest.raises(
        ArchiveDamagedError, match=r"runs/000002.run: the checksum is wrong"
    ) as info:
        archive.runs()
    assert "--salvage" in info.value.hint
    runs, _ = archive.runs_and_damages()
    assert [record.run for record in runs] == [1]
    found, _ = export_of(archive, salvage=True)
    _, states, _ = made
    assert found == {vb_id: states[vb_id][8] for vb_id in VB_IDS}


def test_a_missing_manifest_is_named(archive):
    archive.delete(run_file(1))
    assert verify(archive).broken == {run_file(1): "it is missing"}


@pytest.mark.parametrize("at", [0, 9, 13, 20])
def test_a_damaged_archive_file_is_named(archive, at):
    flip(archive, ARCHIVE_FILE, at)
    with pytest.raises(ArchiveDamagedError, match=ARCHIVE_FILE):
        open_archive(archive.url)
    archive.write(ARCHIVE_FILE, b"")
    with pytest.raises(ArchiveDamagedError, match="cut short"):
        open_archive(archive.url)


def test_damage_is_not_folded_out_of_sight(archive):
    segment = segments_of(archive)[0]
    flip(archive, segment.path, 40)
    with pytest.raises(ArchiveDamagedError, match=segment.path):
        fold(archive, 2)
    assert [record.run for record in archive.runs()] == [1, 2], "nothing was deleted"


def test_what_a_killed_run_left_half_written_counts_as_not_there(made, archive):
    """The trailer is written last: without it a segment is none."""
    data = archive.read(segments_of(archive)[0].path)
    archive.write("runs/000003/0000.seg", data[: -TRAILER.size // 2])
    assert archive.unfinished(3) == []
    assert verify(archive).is_sound, "it belongs to no run"
    archive.delete("runs/000003/0000.seg")


def test_a_newer_format_is_refused_in_words(archive):
    from clients.backup.archives.archive_errors import ArchiveFormatError

    data = archive.read(run_file(1))
    assert data[:8] == RUN_MAGIC
    archive.write(run_file(1), data[:7] + b"\2" + data[8:])
    with pytest.raises(ArchiveFormatError, match="format version 2; this program knows 1") as info:
        archive.runs()
    assert "newer dcpctl" in info.value.hint
    path = segments_of_run(archive, 2)[0]
    data = archive.read(path)
    archive.write(path, data[:-1] + b"\2")
    with pytest.raises(ArchiveFormatError, match="segment of format version 2"):
        archive.footer(path)
    data = archive.read(ARCHIVE_FILE)
    archive.write(ARCHIVE_FILE, data[:7] + b"\7" + data[8:])
    with pytest.raises(ArchiveFormatError, match="format version 7"):
        open_archive(archive.url)


def segments_of_run(archive, run):
    return sorted(path for path in archive.files() if path.startswith(f"runs/{run:06}/"))
