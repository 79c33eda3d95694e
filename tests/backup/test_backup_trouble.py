"""Runs that are killed, cut off, in each other's way, or without room: nothing is lost or wrong."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import pytest

from clients.address import parse_address
from clients.backup import run as run_module
from clients.backup.archives import place, segment_writer
from clients.backup.archives.archive import create_archive, open_archive
from clients.backup.archives.archive_check import verify
from clients.backup.archives.archive_errors import (
    ArchiveDamagedError,
    ArchiveError,
    ArchiveLockedError,
)
from clients.backup.archives.lock import LockTimes
from clients.backup.intake import Intake
from clients.backup.restore_link import RESTORE_FEATURES, RestoreWriter
from clients.backup.restore_load import FRAMES_BYTES_MAX, load_of
from clients.backup.run import Backup, BackupOptions, collections_of
from clients.errors import (
    OperationTimeoutError,
    StreamViolationError,
    TemporaryError,
    TopologyError,
)
from clients.link import dials as dials_module
from clients.link.dials import Dials
from clients.link.pipelined_link import Link
from clients.link.topology import ClusterNode, Topology
from dcp.wire.frame import RemoteProtocolError, pack_request
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from support.backup_pair import (
    Keys,
    backup,
    ends_of,
    export,
    fill,
    high_seqnos,
)
from support.server import DcpdProcess
from vbucket.model.ids import NUM_VBUCKETS


def test_two_runs_at_once_are_refused(ctl, server, archive):
    backup(ctl, server, archive)
    backup(ctl, server, archive)
    with open_archive(str(archive)).lock("test"):
        code, _, err = ctl(server, "backup", "run", "--archive", archive)
        assert code == 1
        assert "the archive is in use by test of process" in err
        code, _, err = ctl(server, "backup", "prune", "--archive", archive, "--keep", 1)
        assert (code, "the archive is in use by test" in err) == (1, True)
        assert ctl(server, "backup", "list", "--archive", archive)[0] == 0, "reading is free"
    backup(ctl, server, archive)


RENEWED_OFTEN = LockTimes(renew_s=0)
"""Every time that a writer looks whether it has to."""


def steal(url):
    """Take the lease of an archive, as somebody does who found it old."""
    holder = {"purpose": "a thief", "state": "held", "renewed_s": time.time()}
    open_archive(url).write("locks/1-thief", json.dumps(holder).encode())


def test_who_lost_the_lease_writes_no_manifest(server):
    """A run that stood still for too long, and a merge that takes longer than the lease."""
    from clients.backup import fold as fold_module

    address, url = parse_address(server.address), "memory://stolen"
    made = create_archive(url, 1)
    fill(server, b"lease", 10)
    asyncio.run(Backup(made, address).run())
    fill(server, b"lease", 10)
    asyncio.run(Backup(made, address).run())
    with pytest.raises(ArchiveLockedError, match="in use by a thief"):
        asyncio.run(Backup(made, address, on_progress=lambda _progress: steal(url)).run())
    assert [record.run for record in made.runs()] == [1, 2]
    made.delete("locks/1-thief")
    folded = []

    def on_fold(count, _total):
        folded.append(count)
        steal(url)

    with pytest.raises(ArchiveLockedError, match="in use by a thief"):
        fold_module.fold(open_archive(url, lock_times=RENEWED_OFTEN), 2, on_fold)
    assert folded == [1], "it stops at once, not after the work"
    assert [record.run for record in made.runs()] == [1, 2]
    made.delete("locks/1-thief")


def test_who_lost_the_lease_writes_no_segment(server, monkeypatch):
    """Who took it writes files of the same names."""
    address, url = parse_address(server.address), "memory://stolen-segment"
    made = create_archive(url, 1, lock_times=RENEWED_OFTEN)
    fill(server, b"segment", 10)
    add = segment_writer.SegmentWriter.add

    def steal_and_add(self, chunk):
        steal(url)
        add(self, chunk)

    monkeypatch.setattr(segment_writer.SegmentWriter, "add", steal_and_add)
    with pytest.raises(ArchiveLockedError, match="in use by a thief"):
        asyncio.run(Backup(made, address, BackupOptions(keep_s=1000)).run())
    assert made.files() == {}


def test_an_archive_that_is_slow_is_waited_for(server, archive, monkeypatch):
    """Hours pass while the archive takes its time; the server is not at fault."""
    fill(server, b"slow", 3000, size=1000)
    passed_s, is_slow, go = [0.0], threading.Event(), threading.Event()
    add = run_module.SegmentWriter.add

    def slow_add(self, chunk):
        is_slow.set()
        go.wait(20)
        add(self, chunk)

    class Clock:
        time_ns, monotonic_ns = time.time_ns, time.monotonic_ns

        @staticmethod
        def monotonic():
            if is_slow.is_set() and not go.is_set():
                passed_s[0] += 1000
                if passed_s[0] > 5000:
                    go.set()
            return time.monotonic() + passed_s[0]

    monkeypatch.setattr(run_module.SegmentWriter, "add", slow_add)
    monkeypatch.setattr(run_module, "time", Clock)
    made = create_archive(str(archive), 1)
    asyncio.run(Backup(made, parse_address(server.address), BackupOptions(queue_chunks=0)).run())
    assert passed_s[0] > 5000
    assert len(made.runs()) == 1


class CountedLink(Link):
    """Counts how often reading was paused."""

    pauses = 0

    def pause_reading(self):
        CountedLink.pauses += 1
        super().pause_reading()


class WritesAtOnce:
    """An executor without a thread."""

    def __init__(self, _threads, thread_name_prefix):
        self.name = thread_name_prefix

    def submit(self, work, *arguments):
        done = Future()
        done.set_result(work(*arguments))
        return done

    def shutdown(self, wait):
        pass


def back_up_without_ticks(server, archive, monkeypatch, queue_chunks):
    """Return how often it paused. What would wait for the next tick ends in a TimeoutError."""
    fill(server, b"soon", 3000, size=1000)
    monkeypatch.setattr(run_module, "TICK_S", 3600.0)
    monkeypatch.setattr(dials_module, "Link", CountedLink)
    monkeypatch.setattr(CountedLink, "pauses", 0)
    made = create_archive(str(archive), 1)
    options = BackupOptions(queue_chunks=queue_chunks, chunk_bytes=20_000)
    work = Backup(made, parse_address(server.address), options)
    report = asyncio.run(asyncio.wait_for(work.run(), 60))
    assert report.record.changes >= 3000
    return CountedLink.pauses


def test_reading_goes_on_as_soon_as_the_archive_has_room(server, archive, monkeypatch):
    """Until the next tick the thread that compresses would have nothing to do."""
    assert back_up_without_ticks(server, archive, monkeypatch, queue_chunks=0)


def test_chunks_that_are_written_do_not_pause_the_reading(server, archive, monkeypatch):
    """They counted until the next tick, so a run was paused after 16 MiB of a tick."""
    monkeypatch.setattr(run_module, "ThreadPoolExecutor", WritesAtOnce)
    # A read has up to 13 chunks, and a result is known a turn of the loop or two later.
    assert back_up_without_ticks(server, archive, monkeypatch, queue_chunks=64) == 0


KILLED = """
import os, signal, sys
from functools import partial
from clients.backup import run
from clients.backup.archives import place
from clients.cli.dcpctl import run as dcpctl

run.BackupOptions = partial(run.BackupOptions, chunk_bytes=4_000, segment_bytes=20_000)
write = place._write_local


def write_or_die(path, data):
    if path.name == "0003.seg":
        path.with_name(path.name + ".part").write_bytes(data[:5000])
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)


place._write_local = write_or_die
sys.exit(dcpctl(sys.argv[1:]))
"""
"""dcpctl with small segments, that is killed while it writes the fourth."""


def test_a_killed_run_goes_on(ctl, tmp_path, archive):
    with DcpdProcess(tmp_path / "data") as server:
        fill(server, b"k", 6000)
        command = [sys.executable, "-c", KILLED, "--server", server.address, "backup", "run"]
        killed = subprocess.run([*command, "--archive", str(archive)], check=False)
        assert killed.returncode == -signal.SIGKILL
        segments = archive / "runs" / "000001"
        assert sorted(path.name for path in segments.iterdir()) == [
            "0000.seg", "0001.seg", "0002.seg", "0003.seg.part"
        ]  # fmt: skip
        saved = [open_archive(str(archive)).footer(f"runs/000001/000{n}.seg") for n in range(3)]
        held = sum(footer.section(at).size_bytes for footer in saved
                   for at in range(footer.section_count()))  # fmt: skip
        report = backup(ctl, server, archive)
        assert (report["resumed"], report["run"], report["changes"]) == (True, 1, 6000)
        overhead = NUM_VBUCKETS * 80  # markers and ends
        assert report["wire_bytes"] <= report["raw_bytes"] - held + overhead, "not once more"
        assert held > 50_000
        assert not list(segments.glob("*.part"))
        assert len(export(ctl, server, archive)) == 6000
        assert ctl(server, "backup", "verify", "--archive", archive)[0] == 0


def test_lost_connections(ctl, server, archive, monkeypatch):
    """Connections break in the middle of a partition: it goes on where it was."""
    fill(server, b"cut", 5000)
    long = 67
    with Keys(server) as keys:
        for number in range(20):
            document = {"key": b"\0long%d" % number, "value": bytes(40_000), "extras": bytes(8)}
            assert keys.link.request(Opcode.SET, vb_id=long, **document).status == 0
    cuts = 0
    take = Backup.take

    def take_and_cut(self, session, pieces):
        nonlocal cuts
        take(self, session, pieces)
        if cuts < 3 and any(piece.vb_id == long for piece in pieces):
            cuts += 1
            session.link.close()

    monkeypatch.setattr(Backup, "take", take_and_cut)
    monkeypatch.setattr(Link, "data_received", in_pieces(Link.data_received))
    made = create_archive(str(archive), 1)
    report = asyncio.run(Backup(made, parse_address(server.address)).run())
    assert cuts == 3
    monkeypatch.undo()
    whole = backup(ctl, server, archive.with_name("whole"))
    assert report.record.changes == whole["changes"], "nothing twice, nothing missing"
    assert len(report.record.legs[long]) >= 2
    assert {f"cut{number}" for number in range(5000)} <= export(ctl, server, archive).keys()


def in_pieces(data_received):
    """Bytes come in small reads, so that there is something between two of them."""

    def receive(self, data):
        for at in range(0, len(data), 50_000):
            if not self.is_closed:
                data_received(self, data[at : at + 50_000])

    return receive


@pytest.mark.parametrize(
    "error", [TemporaryError("not now"), RemoteProtocolError("no frame"), struct.error("too short")]
)
def test_error_at_end_of_read_costs_nothing_that_came_before_it(
    ctl, server, archive, monkeypatch, error
):
    """Each connection ends so three times; what is no reason to go on ends the run, and the next
    one goes on."""
    fill(server, b"ends", 3000)
    receive, raised = Intake.receive, []

    def receive_and_raise(self, data, now_ns):
        receive(self, data, now_ns)
        if self._pieces and self.wire_bytes > 50_000 and len(raised) < 3:
            raised.append(len(self._pieces))
            raise error

    made, report = create_archive(str(archive), 1), None
    with monkeypatch.context() as patch:
        patch.setattr(Intake, "receive", receive_and_raise)
        patch.setattr(Link, "data_received", in_pieces(Link.data_received))
        while report is None:
            with suppress(StreamViolationError):
                report = asyncio.run(Backup(made, parse_address(server.address)).run())
    assert len(raised) == 3
    whole = backup(ctl, server, archive.with_name("whole"))
    assert report.record.changes == whole["changes"], "nothing twice, nothing missing"
    assert verify(made).is_sound
    assert {f"ends{number}" for number in range(3000)} <= export(ctl, server, archive).keys()


def test_a_node_that_is_down_does_not_keep_the_others(server, archive, monkeypatch):
    """They are streamed to their end; its partitions are when it is back."""
    fill(server, b"down", 2000)
    half = NUM_VBUCKETS // 2
    here, down = ClusterNode("127.0.0.1", server.port), ClusterNode("127.0.0.1", 1)
    seen = []

    def topology_now(*_, **__):
        is_back = bool(seen) and seen[-1].partitions_done >= half
        nodes = (here if is_back else down, here)
        return Topology((1, 1 + is_back), nodes, (0,) * half + (1,) * half)

    monkeypatch.setattr(Link, "topology", topology_now)
    made, address = create_archive(str(archive), 1), parse_address(server.address)
    work = Backup(made, address, BackupOptions(give_up_after_s=10), on_progress=seen.append)
    report = asyncio.run(work.run())
    assert ends_of(report.record) == {
        vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if seqno
    }


class SilentHost:
    """Takes connections and says nothing, until it is told to: then it leads to a server."""

    def __init__(self, server):
        self.server = server
        self.dialled = asyncio.Event()
        self.speak = asyncio.Event()

    async def __aenter__(self):
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.listener.close()
        await self.listener.wait_closed()

    async def serve(self, reader, writer):
        self.dialled.set()
        await self.speak.wait()
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        await asyncio.gather(self.pump(reader, to_writer), self.pump(to_reader, writer))

    async def pump(self, reader, writer):
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_silent_node_does_not_keep_the_others(server, archive, monkeypatch, is_cut):
    """It is dialled first, and answers when the others are done; one of them is cut off meanwhile,
    and is dialled again."""
    fill(server, b"silent", 2000)
    monkeypatch.setattr(Link.connect.__func__, "__kwdefaults__",
                        Link.connect.__kwdefaults__ | {"timeout_s": 10_000})  # fmt: skip
    half, here = NUM_VBUCKETS // 2, ClusterNode("127.0.0.1", server.port)

    async def go():
        async with asyncio.timeout(60), SilentHost(server) as silent:
            monkeypatch.setattr(
                Link, "topology",
                lambda *_, **__: Topology(
                    (1, 1), (ClusterNode("127.0.0.1", silent.port), here), (0,) * half + (1,) * half
                ),
            )  # fmt: skip
            cuts, done = [], []

            def on_progress(progress):
                if is_cut and not cuts and work._sessions:
                    (session,) = work._sessions.values()
                    session.link.close()
                    cuts.append(progress.partitions_done)
                done.append(progress.partitions_done)
                if done[-1] >= half and silent.dialled.is_set():
                    silent.speak.set()

            made = create_archive(str(archive), 1)
            work = Backup(made, parse_address(server.address), on_progress=on_progress)
            report = await work.run()
            assert half in done
            assert cuts == ([0] if is_cut else [])
            return report

    report = asyncio.run(go())
    assert ends_of(report.record) == {
        vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if seqno
    }


@contextmanager
def standing_still(server):
    """The server is there, and does nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_collections_are_not_waited_for_without_end(server):
    async def ask():
        link = await Link.connect(parse_address(server.address))
        try:
            with standing_still(server):
                await collections_of(link, answer_timeout_s=0.1)
        finally:
            link.close()
            await asyncio.sleep(0)

    with pytest.raises(OperationTimeoutError, match="did not list its collections") as info:
        asyncio.run(ask())
    assert info.value.node == server.address.removeprefix("dcpd://")
    assert "dcpctl status" in info.value.hint


@pytest.mark.parametrize("loads", [1, 100])
def test_a_restore_does_not_wait_without_end(server, loads):
    """For answers; and where the server takes no more bytes, for that."""
    address = parse_address(server.address)
    frame = pack_request(
        Opcode.DCP_MUTATION, vb_id=3, cas=1, extras=MUTATION_EXTRAS.pack(1, 1, 0, 0, 0, 0, 0),
        key=b"\0still", value=bytes(FRAMES_BYTES_MAX // 2),
    )  # fmt: skip

    async def restore():
        dials = Dials(address, asyncio.Event(), features=RESTORE_FEATURES)
        (await dials.refreshed_link()).close()
        writer = RestoreWriter(dials, 0, answer_timeout_s=0.1)
        try:
            await writer._channel(3)  # connected, with nothing that has to be answered in time
            with standing_still(server):
                for _ in range(loads):
                    await writer.send(load_of(3, [frame]))
                await writer.finish()
        finally:
            await writer.close()

    with pytest.raises(OperationTimeoutError, match="did not answer for") as info:
        asyncio.run(restore())
    assert "run the restore again" in info.value.hint


def test_a_kill_inside_very_first_write_leaves_no_folder_refused(archive):
    archive.mkdir()
    (archive / "dcpd-archive.part").write_bytes(b"DCP")
    made = create_archive(str(archive), 1)
    assert open_archive(str(archive)).record == made.record
    assert [path.name for path in archive.iterdir()] == ["dcpd-archive"]
    other = archive.with_name("other")
    other.mkdir()
    (other / "letter.txt").write_bytes(b"mine")
    with pytest.raises(ArchiveError, match="not empty"):
        create_archive(str(other), 1)


def test_a_full_disk_refuses_no_lock(archive, monkeypatch):
    """Pruning is what makes room."""
    create_archive(str(archive), 1)

    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    second = open_archive(str(archive)).lock("second")
    with open_archive(str(archive)).lock("first"), pytest.raises(ArchiveLockedError):
        second.__enter__()
    with second:
        pass


def test_a_partition_without_a_node_does_not_keep_the_others(server, archive, monkeypatch):
    """They are streamed and kept; the error names it, and the next run goes on."""
    fill(server, b"nowhere", 2000)
    node = ClusterNode("127.0.0.1", server.port)
    lost = Topology((1,), (node,), (0,) * 7 + (-1,) + (0,) * (NUM_VBUCKETS - 8))
    made, address = create_archive(str(archive), 1), parse_address(server.address)
    with monkeypatch.context() as patch:
        patch.setattr(Link, "topology", lambda *_, **__: lost)
        with pytest.raises(TopologyError, match="no node is active") as info:
            asyncio.run(Backup(made, address, BackupOptions(give_up_after_s=2)).run())
    assert info.value.vb_id == 7
    assert made.runs() == []
    assert made.unfinished(1), "though less than a segment came"
    report = asyncio.run(Backup(made, address).run())
    assert report.resumed_segments == 1
    assert ends_of(report.record) == {
        vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if seqno
    }
    assert report.record.wire_bytes < report.record.raw_bytes / 20 + NUM_VBUCKETS * 80


def test_full_disk_is_told_of_and_run_goes_on_when_there_is_room(server, archive, monkeypatch):
    fill(server, b"full", 4000)
    made, address = create_archive(str(archive), 1), parse_address(server.address)
    synced = []

    def fsync(file):
        synced.append(file)
        if len(synced) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(place.os, "fsync", fsync)
        with pytest.raises(ArchiveError, match="cannot be written: No space left") as info:
            asyncio.run(
                Backup(made, address, BackupOptions(chunk_bytes=4_000, segment_bytes=10_000)).run()
            )
    assert "Free some space" in info.value.hint
    assert made.runs() == []
    assert not list(archive.rglob("*.part")), "what was not written takes no room"
    kept = len(made.unfinished(1))
    assert kept >= 2
    report = asyncio.run(Backup(made, address).run())
    assert report.resumed_segments == kept
    assert verify(made).is_sound
    assert ends_of(report.record) == {
        vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if seqno
    }


def test_a_segment_that_reads_back_otherwise_is_told_of(server, archive, monkeypatch):
    """The disk kept something else: the run says so at once, and there is no such run."""
    fill(server, b"flip", 10)
    made = create_archive(str(archive), 1)
    write = place._write_local

    def write_wrong(path, data):
        is_segment = path.suffix == ".seg"
        write(path, data[:100] + bytes([data[100] ^ 1]) + data[101:] if is_segment else data)

    monkeypatch.setattr(place, "_write_local", write_wrong)
    with pytest.raises(ArchiveDamagedError, match=r"0000.seg was read back and differs from"):
        asyncio.run(Backup(made, parse_address(server.address)).run())
    assert made.runs() == []


def test_an_archive_of_as_many_runs_as_it_may_have(archive):
    made = create_archive(str(archive), 1, runs_max=0)
    with pytest.raises(ArchiveError, match="no room for another one") as info:
        asyncio.run(Backup(made, parse_address("127.0.0.1:1")).run())
    assert "new archive" in info.value.hint


def test_a_server_that_is_gone_is_given_up_in_words(server, archive):
    made = create_archive(str(archive), 1)
    work = Backup(made, parse_address("127.0.0.1:1"), BackupOptions(give_up_after_s=0.2))
    from clients.errors import ConnectError

    with pytest.raises(ConnectError):
        asyncio.run(work.run())
    assert made.runs() == []
