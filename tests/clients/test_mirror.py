"""Mirrors: what they hold after any changes and branches, against plain dictionaries; and live."""

from __future__ import annotations

import asyncio
import struct
import threading
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_peer import reply
from test_consumer_session import dcp_peer
from test_consumer_steering import until

from clients import (
    CheckpointError,
    CheckpointFile,
    DcpdError,
    KvClient,
    Mirror,
    Mutation,
    SyncConsumer,
    SyncMirror,
)
from clients.checkpoint.checkpoint import decode_position, encode_position
from clients.errors import OperationTimeoutError
from clients.event import Deletion, Differences, Rollback, SystemEvent
from clients.local_lmdb import LocalLmdb, rows_from
from clients.mirror.lmdb_mirror import FORMAT, VERSION, LmdbStore
from clients.mirror.mirror_state import MemoryStore, counted, rows_within, take
from clients.position import Position
from clients.testing import DcpServer
from dcp.wire.opcode import Opcode
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import SystemEventKind
from vbucket.native.key_hashes import hash_of_key

VB = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("mirror") / "data") as process:
        with process.connect() as kv:
            for n in range(100):
                kv.set(b"k%d" % n, b"1")
        yield process


def mutation(seqno, key, value):
    return Mutation(VB, key, value, seqno, 1, seqno, 0, 0)


def deletion(seqno, key):
    return Deletion(VB, key, seqno, 1, seqno)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=3)),
        st.tuples(st.just("delete"), st.sampled_from([b"a", b"b", b"c"])),
        st.tuples(st.just("back"), st.integers(0, 12)),
        st.tuples(st.just("drop")),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, batch=st.integers(1, 5), journal_max=st.sampled_from([3, 1000]))
@pytest.mark.parametrize("kind", ["dicts", "lmdb"])
def test_undoing_gives_exactly_what_was_held(tmp_path_factory, kind, steps, batch, journal_max):
    store = MemoryStore()
    if kind == "lmdb":
        folder = tmp_path_factory.mktemp("undo")
        store = LmdbStore(folder / "mirror", is_durable=False)
    states, seqno, events = {0: {}}, 0, []

    def flush():
        nonlocal events
        take(store, events, {VB: Position(((1, 0),), seqno, seqno, seqno)}, journal_max=journal_max)
        events = []

    for step in steps:
        held = dict(states[seqno])
        match step:
            case ("set", key, value):
                seqno += 1
                events.append(mutation(seqno, key, value))
                held[key] = value
            case ("delete", key):
                seqno += 1
                events.append(deletion(seqno, key))
                held.pop(key, None)
            case ("drop",):
                seqno += 1
                drop = SystemEvent(VB, seqno, SystemEventKind.DROP_COLLECTION, 2, 0, 0, "")
                events.append(drop)
                held = {}
            case ("back", count):
                flush()
                goal = max(0, seqno - count)
                # As a mirror decides: what the journal does not reach begins anew.
                goal = goal if goal >= store.floor(VB) else 0
                if goal < seqno:
                    events.append(Rollback(VB, goal, goal, seqno, "test"))
                    seqno = goal
                    held = states[goal]
                    states = {at: state for at, state in states.items() if at <= goal}
        states[seqno] = held
        if len(events) >= batch:
            flush()
    flush()
    assert dict(store.items()) == states[seqno]
    assert store.count() == len(states[seqno])
    assert store.positions()[VB].seqno == seqno
    assert store.hashes(VB) == counted(store.rows(VB, store.keys(VB)))
    for key in (b"a", b"b", b"c"):
        assert store.get(VB, key) == states[seqno].get(key)
    store.close()


@pytest.mark.parametrize("kind", ["dicts", "lmdb"])
def test_hashes_grow_with_the_documents_and_are_kept(tmp_path, kind):
    """Rows of some buckets are looked up, or found among all keys if another copy has fewer."""
    store = MemoryStore() if kind == "dicts" else LmdbStore(tmp_path / "m", is_durable=False)
    seqno = 0
    for count, bits in ((24, 0), (25, 2), (385, 6), (24_577, 12)):
        more = range(seqno, count)
        take(store, [mutation(n + 1, b"k%d" % n, b"v") for n in more], {}, journal_max=100)
        seqno = count
        assert store.hashes(VB).bits == bits
    take(store, [mutation(seqno + 1, b"k7", b"w"), deletion(seqno + 2, b"k8")], {})
    if kind == "lmdb":
        store.close()
        store = LmdbStore(tmp_path / "m", is_durable=False)
    keys = store.keys(VB)
    assert store.hashes(VB) == counted(store.rows(VB, keys))
    wanted = bytes(at == 5 for at in range(16))
    there = {key for key in keys if hash_of_key(key) >> 60 == 5}
    for known in (there, {*there, b"not there"}, list(there)[1:], ()):
        assert {key for key, _ in rows_within(store, VB, 4, wanted, known)} == there
    with store.changing() as change:
        change.clear(VB)
        change.put(VB, b"k1", bytes(16), 1)
    assert store.hashes(VB) == counted([(b"k1", bytes(16))])
    store.close()


@pytest.mark.parametrize("kind", ["dicts", "lmdb"])
def test_what_a_resync_took_over_is_not_undone(tmp_path, kind):
    """Entries of the time before may be left: those that follow have their seqnos, too."""
    store = MemoryStore() if kind == "dicts" else LmdbStore(tmp_path / "m", is_durable=False)
    take(store, [mutation(seqno, b"k%d" % seqno, b"1") for seqno in range(1, 10)], {})
    other = Mutation(VB, b"k1", b"2", 4, 0, 0, 0, 0)
    event = Differences(VB, [other], [(0, b"k9")], 4, 6, 9, "test")
    take(store, [event, mutation(5, b"k2", b"2")], {})
    assert store.floor(VB) == 6
    take(store, [mutation(seqno, b"k3", b"%d" % seqno) for seqno in (6, 7, 8)], {})
    take(store, [Rollback(VB, 6, 6, 8, "test")], {})
    held = {b"k%d" % number: b"1" for number in range(4, 9)}
    assert dict(store.items()) == {**held, b"k1": b"2", b"k2": b"2", b"k3": b"6"}
    take(store, [mutation(7, b"k4", b"2")], {}, journal_max=1)
    assert store.floor(VB) == 6
    take(store, [mutation(8, b"k4", b"3")], {}, journal_max=1)
    assert store.floor(VB) == 7
    store.close()


def test_an_lmdb_mirror_takes_a_batch_whole_or_not_at_all(tmp_path):
    store = LmdbStore(tmp_path / "mirror", is_durable=False)
    take(store, [mutation(1, b"a", b"1")], {VB: Position(((1, 0),), 1, 1, 1)})

    def dying():
        yield mutation(2, b"a", b"2")
        raise MemoryError

    with pytest.raises(MemoryError):
        take(store, dying(), {VB: Position(((1, 0),), 2, 2, 2)})
    assert (store.get(VB, b"a"), store.positions()[VB].seqno, store.count()) == (b"1", 1, 1)
    store.close()


def test_a_damaged_place_in_a_kept_mirror_is_named(tmp_path):
    store = LmdbStore(tmp_path / "mirror", is_durable=False)
    take(store, [mutation(1, b"a", b"1")], {VB: Position(((1, 0),), 1, 1, 1)})
    with store._file.writing() as transaction:
        transaction.put(b"p" + VB.to_bytes(2, "big"), b"\x80")
    with pytest.raises(CheckpointError, match=r"mirror: .*fields"):
        store.positions()
    store.close()


@pytest.mark.parametrize("is_kept", [False, True])
async def test_one_line_gives_the_documents_and_keeps_them_up_to_date(server, tmp_path, is_kept):
    path = tmp_path / "view" if is_kept else None
    async with KvClient.connect(server.address) as kv, Mirror(server.address, path) as view:
        assert view["k1"] == view[b"k1"] == b"1"
        assert "k99" in view
        assert view.get("none") is None
        with pytest.raises(KeyError):
            view["none"]
        await kv.set("k1", b"2")
        await kv.delete("k2")
        await view.caught_up()
        assert view["k1"] == b"2"
        assert "k2" not in view
        await kv.set("k2", b"1")
        await kv.set("k1", b"1")
        await view.caught_up()
        assert len(view) == len(list(view)) == len(dict(view.items()))


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("journal_max", [1000, 1])
async def test_a_branch_is_undone_exactly(server, tmp_path, is_kept, journal_max):
    path = tmp_path / "view" if is_kept else None
    key = f"branched-{is_kept}-{journal_max}"
    vb_id = vbucket_of(key.encode())
    async with (
        KvClient.connect(server.address) as kv,
        Mirror(server.address, path, journal_max=journal_max) as view,
    ):
        seqnos = [(await kv.set(key, b"%d" % n)).seqno for n in range(5)]
        await view.caught_up()
        assert view[key] == b"4"
        await asyncio.to_thread(server.branch, vb_id, seqnos[1])
        await until(lambda: view.get(key) == b"1")
        assert view.consumer.metrics.rollbacks == 1
        documents = await kv.get_many(list(view))
        await view.caught_up()
        assert dict(view.items()) == {name: item.value for name, item in documents.items()}


async def test_kept_mirror_goes_on_and_undoes_what_was_rolled_back(server, tmp_path):
    key, path = "meanwhile", tmp_path / "view"
    async with KvClient.connect(server.address) as kv:
        seqnos = [(await kv.set(key, b"%d" % n)).seqno for n in range(2)]
        async with Mirror(server.address, path) as view:
            assert view[key] == b"1"
            await kv.set(key, b"2")
            await view.caught_up()
        await asyncio.to_thread(server.branch, vbucket_of(key.encode()), seqnos[1])
        async with Mirror(server.address, path) as view:
            assert view[key] == b"1"
            assert view.consumer.metrics.changes <= 2
            assert view.consumer.metrics.rollbacks == 1


async def test_a_mirror_that_cannot_follow_says_so(server):
    async with Mirror(server.address) as view:
        assert view["k1"] == b"1"
        view.consumer._supervisor.fail(DcpdError("the disk is on fire"))
        await until(lambda: view._failure is not None)
        with pytest.raises(DcpdError, match="on fire"):
            view["k1"]


async def test_a_mirror_that_cannot_be_opened_leaves_nothing_behind(server, tmp_path, monkeypatch):
    def fails(*_):
        raise CheckpointError("the file is damaged")

    monkeypatch.setattr(LmdbStore, "follow", fails)
    before = asyncio.all_tasks()
    mirror = Mirror(server.address, tmp_path / "view")
    with pytest.raises(CheckpointError, match="damaged"):
        await mirror.open()
    assert mirror.consumer._placement.sessions == {}
    assert asyncio.all_tasks() == before


async def test_a_mirror_of_a_prefix_holds_nothing_else(server):
    async with Mirror(server.address, key_prefixes="k1") as view:
        assert len(view) == 11
        assert "k2" not in view


async def test_a_file_that_is_a_mirror_of_other_keys_is_refused(server, tmp_path):
    path = tmp_path / "view"

    async def count(prefix):
        async with Mirror(server.address, path, key_prefixes=prefix or ()) as view:
            return sum(key.startswith(b"k") for key in view)

    for prefix in ("k1", ["k1", "k11"]):
        assert await count(prefix) == 11, "the same keys"
    for prefix in ("k2", "", ["k1", "k2"]):
        with pytest.raises(CheckpointError, match=r"it is for the default.*begin with 'k1'"):
            await count(prefix)
    assert await count("k1") == 11, "nothing of it was touched"


async def test_a_mirror_of_an_older_version_begins_anew_for_other_keys(server, tmp_path):
    """Its positions do not know of which documents they are; the file does."""
    path = tmp_path / "view"
    async with Mirror(server.address, path, key_prefixes="k1"):
        pass
    for prefix in ("k1", "k2"):
        file = LocalLmdb(path, FORMAT, version=VERSION)
        with file.writing() as transaction:
            transaction.put(b"\0format", b"dcpd-mirror 1")
            for key, raw in list(rows_from(transaction, b"p")):
                transaction.put(key, encode_position(decode_position(raw)._replace(filter=None)))
        file.close()
        async with Mirror(server.address, path, key_prefixes=prefix) as view:
            assert sum(key.startswith(b"k") for key in view) == 11
    with pytest.raises(CheckpointError, match="begin with 'k2'"):
        async with Mirror(server.address, path):
            pass
    with pytest.raises(CheckpointError, match="is dcpd-mirror 4, not dcpd-mirror 1"):
        LocalLmdb(path, FORMAT)


def test_rows_of_an_older_version_get_the_place_of_their_cas(tmp_path):
    store = LmdbStore(tmp_path / "view", is_durable=False)
    events = [mutation(1, b"a", b"1"), mutation(2, b"a", b"2"), mutation(3, b"b", b"3")]
    take(store, events, {VB: Position(((1, 0),), 3, 3, 3)})
    with store._file.writing() as transaction:
        for key, row in list(rows_from(transaction, b"d")):
            transaction.put(key, row[16:])
        (_, undo), *_ = [row for row in rows_from(transaction, b"j") if row[1][0]]
        assert undo[-1:] == b"1"
        for key, undo in list(rows_from(transaction, b"j")):
            transaction.put(key, undo[:4] + undo[20:] if undo[0] else undo)
        place = b"s" + VB.to_bytes(2, "big")
        transaction.put(place, transaction.get(place)[:24])
        transaction.delete(b"r")
        transaction.put(b"\0format", b"dcpd-mirror 2")
    store.close()
    for _ in range(2):
        store = LmdbStore(tmp_path / "view", is_durable=False)
        assert dict(store.items()) == {b"a": b"2", b"b": b"3"}
        assert [row[:16] for _, row in store.rows(VB, [b"a", b"b"])] == [bytes(16)] * 2
        assert store.hashes(VB) == counted([(b"a", bytes(16)), (b"b", bytes(16))])
        store.close()
    store = LmdbStore(tmp_path / "view", is_durable=False)
    with store.changing() as change:
        change.undo(VB, 1)
    assert dict(store.items()) == {b"a": b"1"}
    store.close()


async def test_a_mirror_that_is_not_answered_is_not_caught_up(monkeypatch):
    """What the server told once does not count: since then there may be more."""
    answers = [struct.pack(">HQ", 1, 0)]
    async with dcp_peer() as peer:
        peer.handlers[Opcode.GET_ALL_VB_SEQNOS] = lambda frame: (
            reply(frame, value=answers[0]) if answers else b""
        )
        async with Mirror(peer.address, vbuckets=[1]) as view:
            answers.clear()
            monkeypatch.setattr(
                view.consumer, "high_seqnos", partial(view.consumer.high_seqnos, 0.02)
            )
            with pytest.raises(OperationTimeoutError, match="not caught up"):
                await view.caught_up(0.3)


# -- without asyncio -----------------------------------------------------------------------------


def test_a_mirror_without_asyncio(server):
    with SyncMirror(server.address) as view, server.connect() as kv:
        assert view["k1"] == b"1"
        kv.set(b"sync", b"1")
        view.caught_up(10)
        assert view["sync"] == b"1"
        assert "sync" in view
        assert len(view) == len(list(view)) == len(dict(view.items()))


def test_a_consumer_without_asyncio(server, tmp_path):
    store = CheckpointFile(tmp_path / "state")
    with SyncConsumer(server.address, until_now=True, store=store) as consumer:
        keys = [event.key for event in consumer if isinstance(event, Mutation)]
        consumer.save()
    assert {b"k%d" % n for n in range(100)} <= set(keys)
    with SyncConsumer(server.address, until_now=True, store=store) as consumer:
        assert [event for event in consumer if isinstance(event, Mutation)] == []
    with SyncConsumer(server.address, until_now=True) as consumer:
        told = [
            event.key
            for events, _ in consumer.deliveries()
            for event in events
            if isinstance(event, Mutation)
        ]
        assert sorted(told) == sorted(keys)


def test_leaving_block_ends_endless_iteration_and_its_thread(server):
    before = threading.active_count()
    with SyncConsumer(server.address) as consumer:
        for event in consumer:
            if isinstance(event, Mutation):
                break
        consumer.pause()
        consumer.resume()
        assert consumer.lag()
        assert len(consumer.high_seqnos()) == 1024
    assert threading.active_count() == before


def test_who_waits_in_another_thread_comes_to_the_end(server):
    with SyncConsumer(server.address, start="now") as consumer:
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(consumer))
        thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_errors_come_out_where_the_caller_waits(unused_tcp_port):
    with pytest.raises(DcpdError, match="connect"), SyncConsumer(f"127.0.0.1:{unused_tcp_port}"):
        pass
