"""What a restore sends: loads in one packet, or a request for each frame; both leave the same."""

from __future__ import annotations

import asyncio
import struct
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.address import parse_address
from clients.backup import restore as restore_module
from clients.backup import restore_link
from clients.backup.archives.archive import create_archive, open_archive
from clients.backup.archives.point import Point
from clients.backup.reading import PointReader
from clients.backup.restore import Restore
from clients.backup.restore_link import RESTORE_FEATURES, RestoreWriter
from clients.backup.restore_load import (
    FRAMES_BYTES_MAX,
    Loader,
    frames_of_load,
    load_of,
    single_packets,
)
from clients.backup.run import PUSH_FEATURES, Backup
from clients.backup.selection import Selection
from clients.cli.dcpctl import run
from clients.errors import TemporaryError
from clients.kv.hash_reads import HashReader
from clients.link.blocking_link import SyncLink
from clients.link.dials import Dials
from dcp.wire.frame import HEADER_BYTES, pack_request
from dcp.wire.message import MUTATION_EXTRAS, PUT_FRAMES_BYTES_MAX, PUT_FRAMES_MAX
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.credentials import new_password
from support.server import DcpdProcess

VBS = (3, 4, 700)


def frame(number, size):
    extras = MUTATION_EXTRAS.pack(number + 1, 1, 0, 0, 0, 0, 0)
    return pack_request(
        Opcode.DCP_MUTATION, vb_id=3, cas=number + 1, extras=extras, key=b"\0%d" % number,
        value=bytes(size),
    )  # fmt: skip


sizes = st.lists(
    st.one_of(st.integers(0, 100), st.integers(60_000, 90_000), st.just(PUT_FRAMES_BYTES_MAX)),
    max_size=12,
)


@given(st.lists(st.tuples(sizes, st.booleans()), max_size=5), st.integers(0, 2))
def test_loads_hold_frames_in_order_and_fit_a_packet(runs, thousands):
    loader = Loader(3)
    sent, loads = [], []
    for found, is_dense in [*runs, ([0] * 1000 * thousands, True), *runs]:
        frames = [frame(len(sent) + at, size) for at, size in enumerate(found)]
        sent += frames
        if is_dense:
            data, ends, at = b"begin" + b"".join(frames), [], 5
            for item in frames:
                at += len(item)
                ends.append(at)
            sizes = [len(item) - HEADER_BYTES for item in frames]
            loader.add_run(data, [5, *ends][: len(ends)], ends, sizes)
        else:
            for item in frames:
                loader.add(item)
        loads += loader.take(is_last=False)
    loads += loader.take(is_last=True)
    assert [item for load in loads for item in frames_of_load(load)] == sent
    for load in loads:
        assert 0 < load.changes == len(frames_of_load(load)) <= PUT_FRAMES_MAX
        assert len(load.frames) <= FRAMES_BYTES_MAX or load.changes == 1
    for first, second in pairwise(loads):
        whole = first.changes + second.changes, len(first.frames) + len(second.frames)
        is_needed = whole[0] > PUT_FRAMES_MAX or whole[1] > FRAMES_BYTES_MAX
        assert is_needed, "no more packets than it takes"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An archive of a server with all kinds of changes."""
    folder = tmp_path_factory.mktemp("load")
    with DcpdProcess(folder / "data", "--durability", "none") as server:  # one change at a time
        ctl(server, "collection", "create", "shop.orders")
        with SyncLink(parse_address(server.address)) as link:
            expiry = int(time.time()) + 5000
            for vb_id in VBS:
                for number in range(150):
                    key = (b"\0" if number % 3 else b"\x08") + b"k%d" % number
                    write(link, Opcode.SET, vb_id, key, b"%d" % number, flags=number,
                          expiry=expiry if number % 7 == 0 else 0)  # fmt: skip
                    if number % 5 == 0:
                        write(link, Opcode.SET, vb_id, key, b"again")
                    if number % 11 == 0:
                        write(link, Opcode.DELETE, vb_id, key)
            write(link, Opcode.SET, 9, b"\0large", bytes(PUT_FRAMES_BYTES_MAX + 1))
            extras = struct.pack(">IIQQI", 0, 99, 7, 1 << 60, 0x10)
            request(link, Opcode.DEL_WITH_META, 9, b"\0expired", b"", extras)
        back_up(server, folder / "archive")
    return folder / "archive"


def ctl(server, *arguments):
    assert run(["--server", server.address, *arguments]) == 0


def write(link, opcode, vb_id, key, value=b"", *, flags=0, expiry=0):
    extras = struct.pack(">II", flags, expiry) if opcode == Opcode.SET else b""
    request(link, opcode, vb_id, key, value, extras)


def request(link, opcode, vb_id, key, value, extras):
    found = link.request(opcode, vb_id=vb_id, key=key, value=value, extras=extras)
    assert found.status == 0, found


def back_up(server, path):
    made = create_archive(str(path), 1)
    asyncio.run(Backup(made, parse_address(server.address)).run())
    return made


def restore(server, archive, *, force=False, user="", selection=None, **options):
    address = parse_address(server.address)
    if user:
        address = address._replace(user=user, password="restored")
    work = Restore(
        open_archive(str(archive)), Point(), selection or Selection(), force=force, **options
    )
    return asyncio.run(work.run(address))


def held(server, path):
    """All that a server streams: partition -> frames, without what means nothing."""
    archive = back_up(server, path)
    reader = PointReader(archive, archive.runs())
    return {
        vb_id: [
            data[start : start + 12] + data[start + 16 : stop]
            for data, start, stop in reader.frames(reader.view(vb_id, Point()))
        ]
        for vb_id in (*VBS, 9)
    }


@pytest.fixture
def sent(monkeypatch):
    """How many loads went whole, and how many as single requests."""
    counts = {"whole": 0, "single": 0}

    def spy(name, real):
        def call(load, options):
            counts[name] += 1
            return real(load, options)

        return call

    monkeypatch.setattr(restore_link, "packet", spy("whole", restore_link.packet))
    monkeypatch.setattr(restore_link, "single_packets", spy("single", single_packets))
    return counts


def test_both_ways_leave_the_same(source, tmp_path, sent):
    states, reports = [], []
    for number, features in enumerate((RESTORE_FEATURES, PUSH_FEATURES)):
        before = dict(sent)
        with DcpdProcess(tmp_path / f"data{number}") as server:
            ctl(server, "collection", "create", "shop.orders")
            first = restore(server, source, features=features)
            again = restore(server, source, features=features)
            states.append(held(server, tmp_path / f"held{number}"))
            forced = restore(server, source, force=True, features=features)
        reports += [[item._replace(seconds=0.0) for item in (first, again, forced)]]
        whole, single = sent["whole"] - before["whole"], sent["single"] - before["single"]
        assert single == (2 if number == 0 else single), "the one that is larger than a packet"
        assert bool(whole) == (number == 0)
    assert states[0] == states[1]
    assert reports[0] == reports[1]
    first, again, forced = reports[0]
    total = first.plan.documents + first.plan.deletions
    assert total == 3 * 150 + 2
    assert (first.written, first.kept_newer) == (total, 0)
    assert (again.written, again.kept_newer) == (0, total)
    assert (forced.written, forced.kept_newer) == (total, 0)
    with_collection = [item for item in states[0][VBS[0]] if b"\x08k" in item]
    assert len(with_collection) == 50


def test_what_the_server_has_by_its_hashes_is_not_sent(source, tmp_path, sent):
    with DcpdProcess(tmp_path / "data") as server:
        ctl(server, "collection", "create", "shop.orders")
        first = restore(server, source)
        assert first.equal == 0
        before = held(server, tmp_path / "before")
        loads = sent["whole"] + sent["single"]
        again = restore(server, source)
        assert (again.written, again.kept_newer) == (0, first.written)
        assert (sent["whole"] + sent["single"] - loads, again.equal) == (0, first.written)
        with SyncLink(parse_address(server.address)) as link:
            write(link, Opcode.SET, 4, b"\0k1", b"newer")
            for key in (b"\x08k3", b"\0k149"):  # both are older than the archive's: replaced below
                extras = struct.pack(">IIQQI", 0, 0, 1, 1, 1)
                request(link, Opcode.DEL_WITH_META, 700, key, b"", extras)
        third = restore(server, source)
        assert (third.written, third.kept_newer) == (2, first.written - 2)
        assert 0 < first.written - 2 - third.equal < 150, "some of two partitions were sent"
        after = held(server, tmp_path / "after")
        for vb_id, frames in before.items():
            missing = set(map(content, frames)) - set(map(content, after[vb_id]))
            assert len(missing) == (vb_id == 4), "only the key that is newer on the server"


def test_hashes_that_are_not_told_are_no_hindrance(source, tmp_path, sent, monkeypatch):
    """The server tells those of the first collection, and not of the second."""
    read, asked = HashReader.hashes, []

    async def hashes(reader, vb_ids, bits):
        asked.append(reader.collection_id)
        if len(asked) % 2 == 0:
            raise TemporaryError("not now")
        return await read(reader, vb_ids, bits)

    monkeypatch.setattr(HashReader, "hashes", hashes)
    with DcpdProcess(tmp_path / "data") as server:
        ctl(server, "collection", "create", "shop.orders")
        first = restore(server, source)
        again = restore(server, source)
    assert set(asked) == {0, 8}
    assert (again.written, again.kept_newer, again.equal) == (0, first.written, 0)


def content(frame):
    """A frame without its seqno: what a restore leaves as it was."""
    return frame[:20] + frame[28:]


def test_who_may_write_some_keys_only_restores_those_one_by_one(source, tmp_path, sent):
    with DcpdProcess(tmp_path / "data") as server:
        ctl(server, "collection", "create", "shop.orders")
        ctl(
            server,
            "user",
            "add",
            "ada",
            "--role",
            "admin",
            *new_password("restored"),
        )
        ctl(server, "user", "grant", "ada", "write", "--prefix", "k1")
        done = restore(server, source, user="ada", selection=Selection(prefix=b"k1"))
        assert done.written == done.plan.documents + done.plan.deletions == 3 * 61
        assert not done.refused
        assert sent["whole"] > 0
        assert sent["single"] >= sent["whole"], "what was refused as a packet went one by one"


def test_a_packet_that_cannot_be_taken_for_now_is_sent_again(source, tmp_path, sent, monkeypatch):
    """A partition is not active at first: NOT_MY_VBUCKET."""
    with DcpdProcess(tmp_path / "data") as server:
        ctl(server, "collection", "create", "shop.orders")
        server.set_state(VBS[0], "replica")
        looked = []
        look = Dials.refreshed_link

        async def look_and_repair(dials):
            looked.append(dials)
            if len(looked) == 3:
                await asyncio.to_thread(server.set_state, VBS[0], "active")
            return await look(dials)

        monkeypatch.setattr(Dials, "refreshed_link", look_and_repair)
        monkeypatch.setattr(restore_module, "HASHES_S", 0.1)
        done = restore(server, source, retry_pause_s=0.01)
        assert len(looked) == 3, "at the beginning, and before each attempt after the first"
        assert done.written == 3 * 150 + 2


def test_a_packet_that_is_refused_goes_frame_by_frame(tmp_path, sent):
    sound, other = frame(0, 5), frame(1, 5)
    locked = other[:48] + b"\0\0\0\1" + other[52:]  # a lock time, which no frame of ours has
    unknown = frame(2, 5).replace(b"\x002", b"\x092")  # a collection that is not there

    async def send(address):
        dials = Dials(address, asyncio.Event(), features=RESTORE_FEATURES)
        (await dials.refreshed_link()).close()
        writer = RestoreWriter(dials, 0)
        await writer.send(load_of(3, [sound, locked]))
        await writer.send(load_of(3, [sound, unknown]))
        await writer.finish()
        await writer.close()
        return writer

    with DcpdProcess(tmp_path / "data") as server:
        writer = asyncio.run(send(parse_address(server.address)))
        with SyncLink(parse_address(server.address)) as link:
            found = [link.request(Opcode.GET, vb_id=3, key=b"\0%d" % n).status for n in range(2)]
    assert found == [Status.OK, Status.OK]
    assert sent == {"whole": 2, "single": 1}
    assert writer.kept_newer == 1, "the sound one was there already"
    assert writer.refused == {Status.UNKNOWN_COLLECTION: 1}
    assert "UNKNOWN_COLLECTION" in writer.examples[Status.UNKNOWN_COLLECTION]
