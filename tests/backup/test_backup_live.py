"""dcpctl backup against live servers: what is saved comes back, whatever happens in between."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest

from clients.address import parse_address
from clients.backup import archive as archive_module
from clients.backup import place, segment_writer
from clients.backup import run as run_module
from clients.backup.archive import create_archive, open_archive
from clients.backup.chunk import Chunker
from clients.backup.errors import ArchiveDamagedError, ArchiveError, ArchiveLockedError
from clients.backup.run import Backup
from clients.backup.verify import verify
from clients.cli.main import run
from clients.errors import TopologyError
from clients.link import Link
from clients.link_sync import SyncLink
from clients.topology import Node, Topology
from dcp.wire.frame import HEADER
from dcp.wire.opcode import Opcode
from support.server import DcpdProcess
from vbucket.ids import NUM_VBUCKETS, vbucket_of

META = struct.Struct(">IIIQB")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpdProcess(tmp_path_factory.mktemp("backup") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Where archives are restored to."""
    with DcpdProcess(tmp_path_factory.mktemp("backup") / "other") as process:
        yield process


@pytest.fixture
def ctl(capfdbinary):
    def call(at, *arguments):
        code = run(["--server", at.address, *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return code, out, err.decode()

    return call


@pytest.fixture
def archive(tmp_path):
    return tmp_path / "archive"


def lines(out):
    return [json.loads(line) for line in out.splitlines()]


def backup(ctl, server, archive, *options):
    code, out, err = ctl(server, "backup", "run", "--archive", archive, "-o", "json", *options)
    assert code == 0, err
    return lines(out)[0]


def restore(ctl, to, archive, *options, code=0):
    found, out, err = ctl(to, "backup", "restore", "--archive", archive, "-o", "json", *options)
    assert found == code, err
    return lines(out)[0]


class Keys:
    """Documents of one server, with what is beside their values."""

    def __init__(self, server):
        self.link = SyncLink(parse_address(server.address))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()

    def set(self, key, value, *, flags=0, expiry=0):
        extras = struct.pack(">II", flags, expiry)
        frame = self.link.request(
            Opcode.SET, vb_id=vbucket_of(key), key=b"\0" + key, value=value, extras=extras
        )
        assert frame.status == 0
        return frame.cas

    def delete(self, key):
        vb_id = vbucket_of(key)
        assert self.link.request(Opcode.DELETE, vb_id=vb_id, key=b"\0" + key).status == 0

    def meta(self, key):
        """Deleted, flags, expiry, revision, datatype, CAS."""
        frame = self.link.request(
            Opcode.GET_META, vb_id=vbucket_of(key), key=b"\0" + key, extras=b"\2"
        )
        return (*META.unpack(frame.extras), frame.cas) if not frame.status else None

    def get(self, key):
        frame = self.link.request(Opcode.GET, vb_id=vbucket_of(key), key=b"\0" + key)
        return frame.value if not frame.status else None


def fill(server, prefix, count, size=100, first=0):
    """Write documents in one go."""
    packets = []
    for number in range(first, first + count):
        key = b"\0%s%d" % (prefix, number)
        value = b"%d:" % number + bytes(size)
        head = HEADER.pack(
            0x80, Opcode.SETQ, len(key), 8, 0, vbucket_of(key[1:]), 8 + len(key) + len(value), 0, 0
        )
        packets.append(head + bytes(8) + key + value)
    with Keys(server) as keys:
        keys.link._write(b"".join(packets))
        assert keys.link.request(Opcode.NOOP).status == 0


def export(ctl, server, archive, *options):
    code, out, err = ctl(
        server, "backup", "export", "--archive", archive, "--to", "-", "--format", "jsonl", *options
    )
    assert code == 0, err
    return {document["key"]: document for document in lines(out)}


def test_documents_come_back_with_all_that_is_beside_them(ctl, server, other, archive):
    expiry = int(time.time()) + 5000
    with Keys(server) as keys:
        first = keys.set(b"meta:a", b"1", flags=0xCAFE, expiry=expiry)
        second = keys.set(b"meta:b", b"1")
        third = keys.set(b"meta:b", b"2")
        keys.set(b"meta:c", b"gone")
        keys.delete(b"meta:c")
        metas = {key: keys.meta(key) for key in (b"meta:a", b"meta:b", b"meta:c")}
    assert first < second < third
    report = backup(ctl, server, archive)
    assert report["run"] == 1
    assert report["history"] is True
    done = restore(ctl, other, archive, "--prefix", "meta:")
    assert (done["result"], done["documents"], done["deletions"]) == ("restored", 2, 1)
    with Keys(other) as keys:
        for key, meta in metas.items():
            assert keys.meta(key) == meta, key
        assert (keys.get(b"meta:a"), keys.get(b"meta:b"), keys.get(b"meta:c")) == (b"1", b"2", None)
        changed = keys.set(b"meta:b", b"3")
        assert changed > third, "the clock of the partition went along"
    again = restore(ctl, other, archive, "--prefix", "meta:")
    assert (again["written"], again["kept_newer"]) == (0, 3)
    with Keys(other) as keys:
        assert keys.get(b"meta:b") == b"3", "the higher revision won"
    forced = restore(ctl, other, archive, "--prefix", "meta:", "--force")
    assert forced["written"] == 3
    with Keys(other) as keys:
        assert (keys.get(b"meta:b"), keys.meta(b"meta:b")) == (b"2", metas[b"meta:b"])


def test_as_of_run_time_and_seqno(ctl, server, archive):
    key, vb_id = b"when", vbucket_of(b"when")
    with Keys(server) as keys:
        cas = [keys.set(key, b"1"), keys.set(key, b"2")]
        backup(ctl, server, archive)
        cas.append(keys.set(key, b"3"))
        backup(ctl, server, archive)
        keys.delete(key)
    backup(ctl, server, archive)

    def value(*options):
        return export(ctl, server, archive, *options).get("when", {}).get("value")

    assert [value("--run", run) for run in (1, 2, 3)] == ["2", "3", None]
    seqno = next(
        row["seqno"]
        for row in lines(ctl(server, "backup", "info", "--archive", archive, "--run", 3, "-o",
                             "json")[1])
        if row["vb"] == vb_id
    )  # fmt: skip
    at = [value("--seqnos", json.dumps({vb_id: seqno - back})) for back in range(4)]
    assert at == [None, "3", "2", "1"]
    for number, change in enumerate(cas, 1):
        time_ns = change & ~0xFFFF  # a change's time is its CAS
        found = value("--time", seconds(time_ns - 1)), value("--time", seconds(time_ns))
        assert found == (str(number - 1) if number > 1 else None, str(number))
    code, _, err = ctl(server, "backup", "export", "--archive", archive, "--to", "-", "--format",
                       "jsonl", "--time", "2100-01-01")  # fmt: skip
    assert code == 1
    assert "knows nothing of 2100-01-01T00:00:00.000Z" in err


def seconds(time_ns):
    return f"{time_ns // 10**9}.{time_ns % 10**9:09}"


def test_a_branch_between_runs(ctl, server, other, archive):
    key, vb_id = b"branched", vbucket_of(b"branched")
    with Keys(server) as keys:
        for number in range(6):
            keys.set(key, b"%d" % number)
        backup(ctl, server, archive)
        high = high_seqno(server, vb_id)
        server.branch(vb_id, high - 2)
        assert keys.get(key) == b"3"
        keys.set(key, b"other")
    report = backup(ctl, server, archive)
    assert report["rollbacks"] == {str(vb_id): [[high, high - 2]]}
    assert report["changes"] == 1
    assert export(ctl, server, archive, "--run", 1)["branched"]["value"] == "5"
    assert export(ctl, server, archive)["branched"]["value"] == "other"
    vector = json.dumps({vb_id: high - 2})
    assert export(ctl, server, archive, "--seqnos", vector)["branched"]["value"] == "3"


def high_seqnos(server):
    with Keys(server) as keys:
        frame = keys.link.request(Opcode.GET_ALL_VB_SEQNOS)
    return dict(struct.iter_unpack(">HQ", frame.value))


def high_seqno(server, vb_id):
    return high_seqnos(server)[vb_id]


def test_collections_are_made_mapped_and_chosen(ctl, server, other, archive):
    assert ctl(server, "collection", "create", "shop.orders", "--max-ttl", 90_000)[0] == 0
    assert ctl(server, "collection", "create", "shop.carts")[0] == 0
    manifest = {
        row["collection"]: int(row["id"], 16)
        for row in lines(ctl(server, "collection", "list", "-o", "json")[1])
    }
    for name, at in (("orders", 3), ("carts", 4)):
        prefix = bytes([manifest[f"shop.{name}"]])
        with Keys(server) as keys:
            frame = keys.link.request(
                Opcode.SET, vb_id=at, key=prefix + b"k", value=name.encode(), extras=bytes(8)
            )
            assert frame.status == 0
    backup(ctl, server, archive)
    code, _, err = ctl(other, "backup", "restore", "--archive", archive)
    assert code == 1
    assert "no collection shop.carts, shop.orders" in err
    assert "--create-collections" in err
    done = restore(ctl, other, archive, "--collection", "shop.orders", "--map",
                   "shop.orders=new.place", "--create-collections")  # fmt: skip
    assert done["created"] == ["new.place"]
    assert done["collections"] == {"new.place": 1}
    done = restore(ctl, other, archive, "--create-collections")
    assert done["created"] == ["shop.carts", "shop.orders"]
    found = {
        row["collection"]: int(row["id"], 16)
        for row in lines(ctl(other, "collection", "list", "-o", "json")[1])
    }
    with Keys(other) as keys:
        for path, at, value in (("new.place", 3, b"orders"), ("shop.orders", 3, b"orders"),
                                ("shop.carts", 4, b"carts")):  # fmt: skip
            key = bytes([found[path]]) + b"k"
            assert keys.link.request(Opcode.GET, vb_id=at, key=key).value == value
    code, _, err = ctl(other, "backup", "restore", "--archive", archive, "--collection", "a.b")
    assert code == 1
    assert "no collection 'a.b'" in err
    for path in ("shop",):
        assert ctl(server, "collection", "drop", path)[0] == 0
    assert backup(ctl, server, archive)["run"] == 2
    assert {row["collection"] for row in export(ctl, server, archive).values()} == {
        "_default._default"
    }
    assert "shop.carts" in {row["collection"] for row in export(ctl, server, archive, "--run", 1)
                            .values()}  # fmt: skip
    # Made again, it has another id: what the first one held comes back into it, as of then only.
    assert ctl(server, "collection", "create", "shop.orders")[0] == 0
    collection_id = next(
        int(row["id"], 16)
        for row in lines(ctl(server, "collection", "list", "-o", "json")[1])
        if row["collection"] == "shop.orders"
    )
    assert collection_id != manifest["shop.orders"]
    new = bytes([collection_id])
    with Keys(server) as keys:
        for key, value in ((b"new", b"2"), (b"k", b"2")):
            frame = keys.link.request(Opcode.SET, vb_id=3, key=new + key, value=value,
                                      extras=bytes(8))  # fmt: skip
            assert frame.status == 0
        backup(ctl, server, archive)
        chosen = ("--collection", "shop.orders")
        held = [export(ctl, server, archive, *chosen, "--run", number) for number in (1, 3)]
        assert [{key: row["value"] for key, row in rows.items()} for rows in held] == [
            {"k": "orders"}, {"k": "2", "new": "2"}
        ]  # fmt: skip
        done = restore(ctl, server, archive, *chosen, "--run", 1, "--force")
        assert (done["written"], done["collections"]) == (1, {"shop.orders": 1})
        found = [
            keys.link.request(Opcode.GET, vb_id=3, key=new + key).value for key in (b"k", b"new")
        ]
        assert found == [b"orders", b"2"]


def test_dry_run_asks_no_server(ctl, server, archive):
    fill(server, b"dry", 10)
    backup(ctl, server, archive)

    class Nowhere:
        address = "127.0.0.1:1"

    plan = restore(ctl, Nowhere, archive, "--prefix", "dry", "--dry-run")
    assert (plan["result"], plan["documents"]) == ("planned", 10)
    code, out, _ = ctl(Nowhere, "backup", "restore", "--archive", archive, "--prefix", "dry",
                       "--dry-run")  # fmt: skip
    assert code == 0
    assert b"would restore 10 documents" in out
    assert ctl(Nowhere, "backup", "restore", "--archive", archive)[0] == 6


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


def test_two_leases_at_once_are_refused_and_dead_ones_are_taken(monkeypatch):
    from clients.backup import lock as lock_module

    url = "memory://leases"
    create_archive(url, 1)
    second = open_archive(url).lock("second")
    with (
        open_archive(url).lock("first"),
        pytest.raises(ArchiveLockedError, match="in use by first"),
    ):
        second.__enter__()
    with open_archive(url).lock("third") as dead:
        monkeypatch.setattr(lock_module, "LEASE_S", 0)
        with (
            open_archive(url).lock("fourth"),
            pytest.raises(ArchiveLockedError, match="in use by fourth"),
        ):
            dead.renew()


def steal(url):
    """Take the lease of an archive, as somebody does who found it old."""
    holder = {"purpose": "a thief", "token": "other", "renewed_s": time.time()}
    open_archive(url).write("lock", json.dumps(holder).encode())


def test_who_lost_the_lease_writes_no_manifest(server, monkeypatch):
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
    made.delete("lock")
    monkeypatch.setattr(fold_module, "RENEW_S", 0)
    folded = []

    def on_fold(count, _total):
        folded.append(count)
        steal(url)

    with pytest.raises(ArchiveLockedError, match="in use by a thief"):
        fold_module.fold(made, 2, on_fold)
    assert folded == [1], "it stops at once, not after the work"
    assert [record.run for record in made.runs()] == [1, 2]
    made.delete("lock")


def test_an_archive_that_is_slow_is_waited_for(server, archive, monkeypatch):
    """Hours pass while the archive takes its time; the server is not at fault."""
    fill(server, b"slow", 3000, size=1000)
    monkeypatch.setattr(run_module, "QUEUE_CHUNKS", 0)
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
    asyncio.run(Backup(made, parse_address(server.address)).run())
    assert passed_s[0] > 5000
    assert len(made.runs()) == 1


KILLED = """
import os, signal, sys
from clients.backup import chunk, place, segment_writer
from clients.cli.main import run as dcpctl

segment_writer.SEGMENT_BYTES = 20_000
chunk.Chunker.__init__.__defaults__ = (4_000, 48 << 20)
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
    """Connections break while it streams: each partition goes on where it was."""
    fill(server, b"cut", 5000)
    taken = cuts = 0
    take = Backup.take

    def take_and_cut(self, session, pieces):
        nonlocal taken, cuts
        take(self, session, pieces)
        taken += sum(piece.changes for piece in pieces)
        if taken > 1500 * (cuts + 1) and cuts < 3:
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
    assert max(len(legs) for legs in report.record.legs.values()) >= 2
    assert {f"cut{number}" for number in range(5000)} <= export(ctl, server, archive).keys()


def in_pieces(data_received):
    """Bytes come in small reads, so that there is something between two of them."""

    def receive(self, data):
        for at in range(0, len(data), 50_000):
            if not self.is_closed:
                data_received(self, data[at : at + 50_000])

    return receive


def ends_of(record):
    return {vb_id: legs[-1].to_seqno for vb_id, legs in record.legs.items()}


def test_any_number_of_nodes(server, other, archive, monkeypatch):
    """Half of the partitions are on each of two servers; nothing is twice, nothing is missing."""
    fill(server, b"half", 2000)
    fill(other, b"half", 2000)
    half = NUM_VBUCKETS // 2
    nodes = tuple(Node("127.0.0.1", process.port) for process in (server, other))
    topology = Topology((1, 1), nodes, (0,) * half + (1,) * half)
    monkeypatch.setattr(run_module, "parse_topology", lambda *_, **__: topology)
    for vb_id in (half + 1, half + 2):
        server.set_state(vb_id, "dead")  # asked there, they would be refused
    try:
        made = create_archive(str(archive), 1)
        report = asyncio.run(Backup(made, parse_address(server.address)).run())
    finally:
        for vb_id in (half + 1, half + 2):
            server.set_state(vb_id, "active")
    record = report.record
    wanted = {vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if vb_id < half}
    wanted |= {vb_id: seqno for vb_id, seqno in high_seqnos(other).items() if vb_id >= half}
    assert ends_of(record) == {vb_id: seqno for vb_id, seqno in wanted.items() if seqno}


def test_a_partition_without_a_node_does_not_keep_the_others(server, archive, monkeypatch):
    """They are streamed and kept; the error names it, and the next run goes on."""
    fill(server, b"nowhere", 2000)
    node = Node("127.0.0.1", server.port)
    lost = Topology((1,), (node,), (0,) * 7 + (-1,) + (0,) * (NUM_VBUCKETS - 8))
    made, address = create_archive(str(archive), 1), parse_address(server.address)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "parse_topology", lambda *_, **__: lost)
        with pytest.raises(TopologyError, match="no node is active") as info:
            asyncio.run(Backup(made, address, give_up_after_s=0.3).run())
    assert info.value.vb_id == 7
    assert made.runs() == []
    assert made.unfinished(1), "though less than a segment came"
    report = asyncio.run(Backup(made, address).run())
    assert report.resumed_segments == 1
    assert ends_of(report.record) == {
        vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if seqno
    }
    assert report.record.wire_bytes < report.record.raw_bytes / 20 + NUM_VBUCKETS * 80


def test_a_full_disk_is_told_of_and_the_run_goes_on_when_there_is_room(
    server, archive, monkeypatch
):
    fill(server, b"full", 4000)
    made, address = create_archive(str(archive), 1), parse_address(server.address)
    synced = []

    def fsync(file):
        synced.append(file)
        if len(synced) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(segment_writer, "SEGMENT_BYTES", 10_000)
        patch.setattr(Chunker.__init__, "__defaults__", (4_000, 48 << 20))
        patch.setattr(place.os, "fsync", fsync)
        with pytest.raises(ArchiveError, match="cannot be written: No space left") as info:
            asyncio.run(Backup(made, address).run())
    assert "Make room" in info.value.hint
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
    with pytest.raises(ArchiveDamagedError, match=r"0000.seg was read back and is not what was"):
        asyncio.run(Backup(made, parse_address(server.address)).run())
    assert made.runs() == []


def test_a_terminal_shows_rate_and_time_left(server, archive):
    """On stderr; what machines read on stdout stays clean."""
    fill(server, b"bar", 2000)
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "clients.cli", "--server", server.address, "backup", "run"]
    try:
        done = subprocess.run(
            [*command, "--archive", str(archive), "-o", "json"], stdout=subprocess.PIPE,
            stderr=theirs, env=environment, check=True,
        )  # fmt: skip
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert json.loads(done.stdout)["result"] == "backed up"
    assert re.search(r"backup .*100%.* changes/s .*iB.*\d:\d\d:\d\d", shown), shown


def test_an_archive_of_as_many_runs_as_it_may_have(archive, monkeypatch):
    monkeypatch.setattr(archive_module, "RUNS_MAX", 0)
    made = create_archive(str(archive), 1)
    with pytest.raises(ArchiveError, match="no room for another one") as info:
        asyncio.run(Backup(made, parse_address("127.0.0.1:1")).run())
    assert "new archive" in info.value.hint


def test_times_without_a_state_are_refused(ctl, tmp_path, archive):
    """Before the first whole state, or folded away: nothing would be restored."""
    with DcpdProcess(tmp_path / "data") as server:
        with Keys(server) as keys:
            time_text = seconds(keys.set(b"early", b"1") & ~0xFFFF)
            keys.set(b"early", b"2")
        for _ in range(2):
            backup(ctl, server, archive, "--newest-only")
        exported = tmp_path / "x.jsonl"
        for command in (["restore"], ["restore", "--dry-run"], ["export", "--to", exported]):
            code, _, err = ctl(server, "backup", *command, "--archive", archive, "--time",
                               time_text)  # fmt: skip
            assert (code, "hold a whole state at or before" in err) == (1, True), err
            assert "Name a later one" in err
        assert not exported.exists(), "no half of an export"
        assert ctl(server, "backup", "prune", "--archive", archive, "--keep", 1)[0] == 0
        code, _, err = ctl(server, "backup", "restore", "--archive", archive, "--time", time_text)
        assert (code, "are folded into run 2" in err) == (1, True), err
        assert "--run 2" in err
        assert restore(ctl, server, archive, "--run", "2")["documents"] == 1


def test_a_server_that_is_gone_is_given_up_in_words(server, archive):
    made = create_archive(str(archive), 1)
    work = Backup(made, parse_address("127.0.0.1:1"), give_up_after_s=0.2)
    from clients.errors import ConnectError

    with pytest.raises(ConnectError):
        asyncio.run(work.run())
    assert made.runs() == []
