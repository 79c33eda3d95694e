"""Files of an archive that lie in another's place: named, and nothing goes on or is overwritten."""

from __future__ import annotations

import json

import pytest

from clients.backup.archives.archive import Archive, run_file, segment_file
from clients.backup.archives.archive_check import verify
from clients.backup.archives.archive_errors import ArchiveDamagedError, ArchiveError
from clients.backup.archives.archive_manifest import MarkRecord, pack_mark, pack_run
from clients.backup.archives.lock import LockTimes
from clients.backup.archives.point import Point
from clients.backup.export import Export
from clients.backup.fold import fold
from clients.backup.selection import Selection
from dcp.wire.feature import Feature
from support.backup_pair import KilledError, back_up, backup, fill, memory_archive, state_as_of
from support.memory_node import MemoryNode

VB_IDS = (0, 1)


class Written:
    """A node, its archive of some runs, and what the node held at the end of each."""

    def __init__(self, runs: int) -> None:
        self.node = MemoryNode(1)
        self.writer = self.node.connect()
        self.writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
        self.archive = memory_archive(LockTimes(settle_s=0))
        for _ in range(runs):
            self.run()

    def write(self) -> None:
        self.node.now_ns += 10**9
        for vb_id in VB_IDS:
            for number in range(3):
                value = b"%d-%d" % (self.node.now_ns, number) + bytes(300)
                self.writer.set(vb_id, b"\0k%d" % number, value)
        self.node.commit()

    def run(self) -> None:
        self.write()
        back_up(self.node, self.archive, VB_IDS)

    def files(self) -> dict[str, bytes]:
        archive = self.archive
        return {path: archive.read(path) for path in [*archive.files(), *archive._marks()]}


def copy(archive: Archive, source: str, target: str) -> None:
    archive.write(target, archive.read(source))


def check_nothing_goes_on(written: Written, path: str, what: str) -> None:
    """verify names the file; run, merge and a restore refuse; no file changes."""
    archive, before = written.archive, written.files()
    report = verify(archive)
    assert not report.is_sound
    assert report.broken[path].startswith(what)
    written.write()
    for work in (
        lambda: back_up(written.node, archive, VB_IDS),
        lambda: fold(archive, 2),
        lambda: archive.runs_of(Point()),
    ):
        with pytest.raises(ArchiveDamagedError) as caught:
            work()
        assert f"{path}: {what}" in str(caught.value)
        assert written.files() == before


@pytest.mark.parametrize("target", [4, 6, 7, 999_999])
def test_a_manifest_under_another_runs_number(target):
    written = Written(5)
    copy(written.archive, run_file(3), run_file(target))
    check_nothing_goes_on(written, run_file(target), "it is the manifest of run 3")
    assert len(verify(written.archive).broken) == 1


def test_misplaced_manifest_is_given_up_and_finished_runs_stay():
    written = Written(5)
    before, state = written.files(), state_as_of(written.archive, VB_IDS)
    copy(written.archive, run_file(3), run_file(6))
    with written.archive.lock("test") as lock:
        runs, run, found = written.archive.begin_run(lock, give_up=6)
    assert ([record.run for record in runs], run, found) == ([1, 2, 3, 4, 5], 6, [])
    after = written.files()
    assert {path: after[path] for path in before if path.startswith("runs/")} == {
        path: data for path, data in before.items() if path.startswith("runs/")
    }
    assert state_as_of(written.archive, VB_IDS) == state


def test_a_manifest_of_another_archive():
    written, other = Written(2), Written(3)
    written.archive.write(run_file(2), other.archive.read(run_file(2)))
    name = other.archive.record.archive_id
    check_nothing_goes_on(written, run_file(2), f"it belongs to the archive {name}")


def test_a_segment_of_another_archive():
    """Its number, partitions and seqnos are those that the manifest lists."""
    written, other = Written(2), Written(2)
    path = segment_file(2, 0)
    assert [s.held for s in written.archive.runs()[1].segments] == [
        s.held for s in other.archive.runs()[1].segments
    ]
    written.archive.write(path, other.archive.read(path))
    (*_, damage) = verify(written.archive).damages
    assert (damage.path, damage.what) == (path, "it is not the segment that the run wrote")
    work = Export(written.archive, Point(), Selection())
    assert list(work.rows())
    assert {damage.path for damage in work.findings.damages} == {path}


@pytest.mark.parametrize("of_another_archive", [False, True])
def test_segments_that_another_run_wrote_are_not_continued(of_another_archive):
    """As after `cp -r runs/000002 runs/000003`: the next run must not take them as its own."""
    written = Written(2)
    source = Written(0) if of_another_archive else written
    if of_another_archive:
        for _ in range(2):
            source.run()
        source.write()
        with pytest.raises(KilledError):
            back_up(source.node, source.archive, VB_IDS, kill_after_bytes=1500, segment_bytes=200)
    run = 3 if of_another_archive else 2
    assert segment_file(run, 0) in source.archive.files()
    written.archive.write(segment_file(3, 0), source.archive.read(segment_file(run, 0)))
    assert written.archive.unfinished(3) == []
    assert verify(written.archive).unused == {
        segment_file(3, 0): "no run needs it, and the next run deletes it"
    }
    written.run()
    assert not written.archive.runs()[-1].is_resumed
    assert verify(written.archive).is_sound


def test_a_segment_that_is_listed_twice_or_is_not_the_runs_own():
    written = Written(2)
    record = written.archive.runs()[1]
    first = record.segments[0]
    for extra, what in (
        (first, f"it lists {first.path} twice"),
        (first._replace(path=segment_file(1, 0)), "it lists runs/000001/0000.seg, which is not"),
        (first._replace(path="../secret"), "it lists ../secret, which is not"),
    ):
        wrong = record._replace(segments=[*record.segments, extra])
        written.archive.write(run_file(2), pack_run(wrong))
        check_nothing_goes_on(written, run_file(2), what)


def test_a_mark_under_another_runs_number():
    """Read by its name alone it would hide that the newest run is lost later."""
    written = Written(3)
    copy(written.archive, "finished/000003", "finished/000009")
    check_nothing_goes_on(written, "finished/000009", "it is the mark of run 3")
    with pytest.raises(ArchiveDamagedError) as caught:
        written.archive.runs()
    assert caught.value.hint == "Move finished/000009 out of the archive."
    written.archive.delete("finished/000009")
    written.run()
    assert verify(written.archive).is_sound


def test_unreadable_manifest_far_behind_newest_run_is_damage():
    """Only the next run can have died while it wrote its manifest."""
    written = Written(2)
    written.archive.write(run_file(5), b"torn")
    check_nothing_goes_on(written, run_file(5), "cut short")
    written.archive.delete(run_file(5))
    written.archive.write(run_file(3), b"torn")
    written.run()
    assert verify(written.archive).is_sound


def test_a_finished_run_is_never_overwritten():
    """Two writers, as on a store whose lease was lost: the later one finds the manifest."""
    written = Written(2)
    archive, before = written.archive, written.files()
    record = archive.runs()[1]._replace(changes=7)
    with archive.lock("test") as lock, pytest.raises(ArchiveError, match=r"000002\.run is there"):
        archive.write_run(record, lock)
    assert written.files() == before


def test_files_that_no_run_needs_are_named_and_are_no_damage():
    written = Written(1)
    archive = written.archive
    archive.write("runs/notes.txt", b"mine")
    archive.write("runs/000001/0007.seg.part", b"half")
    archive.write("finished/000000", pack_mark(MarkRecord(0)))
    report = verify(archive)
    assert report.is_sound
    assert report.unused == {
        "runs/000001/0007.seg.part": "no run needs it, and the next run deletes it",
        "runs/notes.txt": "it is not a file of an archive",
    }
    written.run()
    assert "runs/notes.txt" in archive.files()
    assert "runs/000001/0007.seg.part" not in archive.files()


def test_the_commands_refuse_a_misplaced_manifest(ctl, server, archive):
    for run in range(3):
        fill(server, b"place", 10, first=10 * run)
        backup(ctl, server, archive)
    runs = archive / "runs"
    (runs / "000004.run").write_bytes((runs / "000002.run").read_bytes())
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    wanted = "runs/000004.run: it is the manifest of run 2"
    for command in (
        ("verify",), ("list",), ("run",), ("merge", "--into", 2), ("prune", "--keep", 1),
        ("restore", "--dry-run"),
    ):  # fmt: skip
        code, out, err = ctl(server, "backup", *command, "--archive", archive)
        assert code == 1, command
        assert wanted in out.decode() + err, command
    code, out, _ = ctl(server, "backup", "verify", "--archive", archive, "-o", "json")
    assert (code, json.loads(out)["broken"]) == (1, {"runs/000004.run": wanted.split(": ", 1)[1]})
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
    code, out, err = ctl(server, "backup", "run", "--archive", archive, "--give-up", 4)
    assert code == 0, err
    assert ctl(server, "backup", "verify", "--archive", archive)[0] == 0
    assert all(
        path.read_bytes() == data for path, data in before.items() if "000004" not in str(path)
    )
