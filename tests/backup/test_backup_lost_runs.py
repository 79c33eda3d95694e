"""A newest run that was lost is told from one that was killed before its end, wherever it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clients.backup.archives.archive import ARCHIVE_FILE, open_archive, run_file
from clients.backup.archives.archive_check import verify
from clients.backup.archives.archive_errors import ArchiveDamagedError, ArchiveError
from clients.backup.archives.archive_manifest import MARK_MAGIC, parse_mark
from clients.backup.archives.lock import LockTimes
from clients.backup.archives.place import Place
from clients.backup.archives.point import Point
from clients.backup.export import Export
from clients.backup.fold import fold
from clients.backup.selection import Selection
from dcp.wire.feature import Feature
from support.backup_pair import back_up, backup, export, fill, memory_archive, restore, state_as_of
from support.memory_node import MemoryNode

VB_IDS = (0, 1, 2)
GOLDEN = Path(__file__).parents[1] / "data" / "backup-v1"


AT_ONCE = LockTimes(settle_s=0)


class Written:
    """A node, its archive, and what it held at the end of each run."""

    def __init__(self):
        self.node = MemoryNode(1)
        self.writer = self.node.connect()
        self.writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
        self.archive = memory_archive(AT_ONCE)
        self.states = [{vb_id: {} for vb_id in VB_IDS}]

    def write(self):
        self.node.now_ns += 10**9
        state = {vb_id: dict(documents) for vb_id, documents in self.states[-1].items()}
        for vb_id in VB_IDS:
            for number in range(3):
                key, value = b"k%d" % number, b"%d-%d" % (len(self.states), number) + bytes(300)
                self.writer.set(vb_id, b"\0" + key, value)
                state[vb_id][b"\0" + key] = value
        self.node.commit()
        self.states.append(state)

    def run(self):
        self.write()
        return back_up(self.node, self.archive, VB_IDS)

    def lose(self, run, *, segments=False):
        self.archive.delete(run_file(run))
        for path in [*self.archive.files()] if segments else []:
            if path.startswith(f"runs/{run:06}/"):
                self.archive.delete(path)


@pytest.fixture
def written():
    written = Written()
    for _ in range(3):
        written.run()
    return written


def marks(archive):
    return sorted(archive._place.files("finished"))


def test_one_mark_stays_and_names_the_newest_run(written):
    assert marks(written.archive) == ["finished/000003"]
    data = written.archive.read("finished/000003")
    assert data[:8] == MARK_MAGIC
    mark, run = parse_mark(data), written.archive.runs()[-1]
    assert mark == (3, 0, run.ended_ns, run.changes)


@pytest.mark.parametrize("segments", [False, True])
def test_lost_newest_run_is_named_and_nothing_goes_on(written, segments):
    archive = written.archive
    ended_ns = archive.runs()[-1].ended_ns
    written.lose(3, segments=segments)
    report = verify(archive)
    assert not report.is_sound
    ((path, what),) = report.broken.items()
    assert path == run_file(3)
    assert what.startswith("it is missing (the run ended at 20")
    with pytest.raises(ArchiveDamagedError, match=r"runs/000003.run: it is missing") as info:
        back_up(written.node, archive, VB_IDS)
    assert "backup run --give-up 3 gives up run 3" in info.value.hint
    assert "continues after run 2" in info.value.hint
    assert "--salvage" in info.value.hint
    for point in (Point(), Point(seqnos={0: 1}), Point(run=3), Point(time_ns=ended_ns + 1)):
        with pytest.raises(ArchiveDamagedError, match="000003"):
            archive.runs_of(point)
    with pytest.raises(ArchiveDamagedError, match="000003"):
        fold(archive, 2)
    # What is before it is as sure as ever.
    for point in (Point(run=2), Point(time_ns=archive.runs_of(Point(run=2))[-1].ended_ns)):
        work = Export(archive, point, Selection())
        assert {(row.vb, b"\0" + row.key): row.value for row in work.rows()} == {
            (vb_id, key): value
            for vb_id, state in written.states[2].items() for key, value in state.items()
        }  # fmt: skip
    assert [record.run for record in archive.runs_of(Point(), salvage=True)] == [1, 2]


@pytest.mark.parametrize("segments", [False, True])
def test_a_lost_run_is_given_up(written, segments):
    """Where its segments are there, they are used; where they are not, the server is asked."""
    archive = written.archive
    written.lose(3, segments=segments)
    with archive.lock("test") as lock:
        runs, run, found = archive.begin_run(lock, give_up=3)
    assert ([record.run for record in runs], run, bool(found)) == ([1, 2], 3, not segments)
    assert verify(archive).is_sound
    assert marks(archive) == ["finished/000002"]
    record = written.run()
    assert (record.run, record.is_resumed) == (3, not segments)
    assert verify(archive).is_sound
    for run, state in enumerate(written.states[1:3], 1):
        assert state_as_of(archive, VB_IDS, Point(run=run)) == state
    assert state_as_of(archive, VB_IDS) == written.states[-1]


def test_a_run_in_the_middle_is_given_up_with_those_after_it(written):
    archive = written.archive
    written.lose(2, segments=True)
    with pytest.raises(ArchiveDamagedError, match="000002"), archive.lock("test") as lock:
        archive.begin_run(lock, give_up=3)
    with archive.lock("test") as lock:
        runs, run, found = archive.begin_run(lock, give_up=2)
    assert ([record.run for record in runs], run, found) == ([1], 2, [])
    assert {path for path in archive.files() if "000003" in path} == set()
    written.run()
    assert state_as_of(archive, VB_IDS) == written.states[-1]


def test_what_is_not_lost_is_not_given_up(written):
    archive = written.archive
    with (
        archive.lock("test") as lock,
        pytest.raises(ArchiveError, match="run 3 cannot be given up: no run is lost") as info,
    ):
        archive.begin_run(lock, give_up=3)
    assert "without --give-up" in info.value.hint
    assert [record.run for record in archive.runs()] == [1, 2, 3]


def test_a_lost_base_is_named(written):
    """Older runs were folded into it: one file is missing, not three."""
    archive = written.archive
    fold(archive, 3)
    archive.delete(run_file(3))
    assert list(verify(archive).broken) == [run_file(3)]
    with pytest.raises(ArchiveDamagedError, match="000003") as info:
        archive.runs()
    assert "starts again from 0" in info.value.hint


def test_a_run_that_ends_while_the_archive_is_read_is_not_lost(written, monkeypatch):
    archive, files = written.archive, Place.files
    folders = []

    def files_then_run(place, folder):
        found = files(place, folder)
        folders.append(folder)
        if len(folders) == 1:
            written.run()
        return found

    monkeypatch.setattr(Place, "files", files_then_run)
    runs, damages = archive.runs_and_damages()
    assert damages == {}
    assert [record.run for record in runs] == [1, 2, 3, 4]


def test_a_mark_that_cannot_be_read_counts(written):
    """Its name tells the run; a store may show it half-written."""
    archive = written.archive
    archive.write("finished/000003", archive.read("finished/000003")[:11])
    assert verify(archive).is_sound
    written.lose(3)
    assert verify(archive).broken == {run_file(3): "it is missing"}


def test_an_archive_of_an_older_program_is_read_and_gets_marks(tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(GOLDEN, folder)
    archive = open_archive(str(folder))
    assert verify(archive).is_sound
    (folder / "runs" / "000003.run").rename(tmp_path / "kept")
    assert verify(archive).is_sound, "nothing tells of it"
    (tmp_path / "kept").rename(folder / "runs" / "000003.run")
    with archive.lock("test") as lock:
        _, run, _ = archive.begin_run(lock)
    assert run == 4
    (folder / "runs" / "000003.run").unlink()
    assert run_file(3) in verify(archive).broken


class CutError(Exception):
    """The machine is gone."""


class Power:
    """Counts what is written and deleted; at the last of it, it is half done, or not at all."""

    def __init__(self, monkeypatch, steps, *, is_torn):
        self.steps, self.is_torn, self.is_gone = steps, is_torn, False
        write, delete = Place.write, Place.delete

        def cut_write(place, path, data):
            if self.step() and self.is_torn:
                write(place, path, data[: len(data) // 2])
            self.check()
            write(place, path, data)

        def cut_delete(place, path):
            self.step()
            self.check()
            delete(place, path)

        monkeypatch.setattr(Place, "write", cut_write)
        monkeypatch.setattr(Place, "delete", cut_delete)

    def step(self):
        is_last = not self.is_gone and self.steps == 0
        self.steps -= 1
        self.is_gone = self.is_gone or is_last
        return is_last

    def check(self):
        if self.is_gone:
            raise CutError


def run_cut_at(written, steps, *, is_torn, work):
    """Do some work on the archive, with the power cut after so many steps; whether it was."""
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch, steps, is_torn=is_torn)
        try:
            work(open_archive(written.archive.url, lock_times=AT_ONCE))
        except CutError:
            assert power.is_gone
    return power.is_gone


def copy_of(written, files):
    for path in [*written.archive.files(), *marks(written.archive)]:
        written.archive.delete(path)
    for path in written.archive._place.files("locks"):
        written.archive.delete(path)
    for path, data in files.items():
        written.archive.write(path, data)


@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("runs_before", [0, 2])
def test_a_run_that_dies_at_any_step_is_unfinished_and_goes_on(runs_before, is_torn):
    written = Written()
    for _ in range(runs_before):
        written.run()
    written.write()
    archive = written.archive
    paths = [*archive.files(), *marks(archive), ARCHIVE_FILE]
    files = {path: archive.read(path) for path in paths}
    for steps in range(1000):
        copy_of(written, files)
        was_cut = run_cut_at(
            written, steps, is_torn=is_torn,
            work=lambda archive: back_up(written.node, archive, VB_IDS, segment_bytes=200),
        )  # fmt: skip
        assert verify(archive).broken == {}, steps
        finished = [record.run for record in archive.runs()]
        assert finished in ([*range(1, runs_before + 1)], [*range(1, runs_before + 2)])
        for path in archive._place.files("locks"):  # its time is over
            holder = {"purpose": "dead", "renewed_s": 0}
            archive.write(path, json.dumps(holder).encode())
        back_up(written.node, archive, VB_IDS)
        assert verify(archive).is_sound
        assert state_as_of(archive, VB_IDS) == written.states[-1]
        if not was_cut:
            break
    assert steps > 8, "it was cut at every step"


@pytest.mark.parametrize("is_torn", [False, True])
def test_folding_that_dies_at_any_step_loses_no_run(written, is_torn):
    """A torn manifest that is written anew is damage, on stores that show half of a file."""
    archive = written.archive
    files = {path: archive.read(path) for path in [*archive.files(), *marks(archive)]}
    for steps in range(100):
        copy_of(written, files)
        was_cut = run_cut_at(written, steps, is_torn=is_torn, work=lambda archive: fold(archive, 3))
        runs, damages = archive.runs_and_damages()
        if damages:
            assert is_torn
            assert damages[run_file(3)].startswith(("cut short", "the checksum is wrong"))
        else:
            assert [record.run for record in runs] in ([1, 2, 3], [3])
            assert state_as_of(archive, VB_IDS) == written.states[-1]
        if not was_cut:
            break
    assert steps > 5


def test_giving_up_that_dies_at_any_step_is_told_of_or_done(written):
    archive = written.archive
    written.lose(2, segments=True)
    files = {path: archive.read(path) for path in [*archive.files(), *marks(archive)]}
    outcomes = set()

    def give_up(archive):
        with archive.lock("test") as lock:
            archive.begin_run(lock, give_up=2)

    for steps in range(100):
        copy_of(written, files)
        was_cut = run_cut_at(written, steps, is_torn=False, work=give_up)
        runs, damages = archive.runs_and_damages()
        assert [record.run for record in runs] == [1]
        outcomes.add(bool(damages))
        assert run_file(2) in damages or (not damages and marks(archive) == ["finished/000001"])
        if not was_cut:
            break
    assert outcomes == {True, False}


def test_the_commands_name_a_lost_run(ctl, server, archive):
    for first in (0, 10):
        fill(server, b"lost", 10, first=first)
        backup(ctl, server, archive)
    (archive / "runs" / "000002.run").unlink()

    def call(*arguments):
        code, out, err = ctl(server, "backup", *arguments, "--archive", archive)
        return code, out.decode() + err

    for command in ("list", "info", "verify", "run"):
        code, text = call(command)
        assert code == 1
        assert "runs/000002.run: it is missing (the run ended at 20" in text
    assert "dcpctl backup run --give-up 2" in text
    code, out, _ = ctl(server, "backup", "info", "--archive", archive, "-o", "json")
    assert (code, list(json.loads(out)["broken"])) == (1, ["runs/000002.run"])
    code, text = call("info", "--run", 1)
    assert (code, "runs/000002.run: it is missing" in text) == (1, True)
    assert call("restore", "--dry-run")[0] == 1
    assert call("restore", "--dry-run", "--run", 1)[0] == 0
    assert len(export(ctl, server, archive, "--run", 1, "--prefix", "lost")) == 10
    check_salvage_names_the_run(ctl, server, archive)
    code, text = call("run", "--give-up", 2)
    assert (code, "run 2: 10 changes" in text) == (0, True), text
    assert call("verify")[0] == 0
    assert len(export(ctl, server, archive, "--prefix", "lost")) == 20


def test_salvage_names_the_first_run_if_nothing_is_left(ctl, server, archive):
    fill(server, b"lost", 10)
    backup(ctl, server, archive)
    (archive / "runs" / "000001.run").write_bytes(bytes(500))
    for command in (("restore",), ("export", "--to", archive.parent / "none.jsonl")):
        code, out, err = ctl(server, "backup", *command, "--archive", archive, "--salvage")
        assert code == 1
        assert "runs/000001.run: " in out.decode() + err
        assert "starts again from 0" in err


def test_the_archives_own_file_is_missed_by_name(ctl, server, archive):
    fill(server, b"lost", 10)
    backup(ctl, server, archive)
    (archive / ARCHIVE_FILE).unlink()
    for command in ("run", "verify", "restore"):
        code, out, err = ctl(server, "backup", command, "--archive", archive)
        assert code == 1
        assert "dcpd-archive: it is missing, although there are runs" in out.decode() + err


def check_salvage_names_the_run(ctl, server, archive):
    """What comes back is not what was asked for, so it is a part (exit code 8)."""
    plan = restore(ctl, server, archive, "--salvage", "--dry-run", code=8)
    assert (plan["runs"], list(plan["broken"])) == ([1], ["runs/000002.run"])
    report = restore(ctl, server, archive, "--salvage", code=8)
    assert (report["result"], list(report["broken"])) == ("partial", ["runs/000002.run"])
    assert restore(ctl, server, archive, "--salvage", "--run", 1)["broken"] == {}
    place = archive.parent / "salvaged.jsonl"
    arguments = ("backup", "export", "--archive", archive, "--salvage", "--to", place)
    code, out, err = ctl(server, *arguments, "-o", "json")
    assert (code, list(json.loads(out)["broken"])) == (8, ["runs/000002.run"])
    assert "damaged: runs/000002.run: it is missing" in err
