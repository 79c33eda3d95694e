"""Resyncs: whatever happens meanwhile, a mirror ends as a stream from 0 would leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients import KvClient, Mirror
from clients.address import ServerAddress, parse_address
from clients.cli.dcpctl import run
from clients.errors import ConnectError, NotMyVbucketError, UnknownCollectionError
from clients.event import Deletion, Event, Mutation
from clients.kv.differences import (
    Copy,
    Difference,
    NotComparableError,
    RowsCopy,
    checked_collections,
    differences,
)
from clients.kv.hash_reads import HashReader
from clients.link.topology import Place, Topology, single_node
from clients.mirror.lmdb_mirror import LmdbStore
from clients.mirror.mirror_state import ROW, ROW_FORM, MemoryStore, counted, take
from clients.mirror.resync import Resync
from clients.position import Filter, Position
from clients.testing import DcpServer
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.hash_reads import KeyVersion
from dcp.wire.message import parse_deletion, parse_mutation
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.lifecycle import PurgeRefusedError, branch, purge, set_state
from vbucket.engine.partition import BranchRefusedError, VbState
from vbucket.model.ids import vbucket_of
from vbucket.native.key_hashes import Row

VB = 1
PARTITIONS = 2
KEYS = [key for key in (b"k%d" % n for n in range(1200)) if vbucket_of(key, PARTITIONS) == VB]
ADDRESS = ServerAddress("node", 1)
ADD = ["collection", "add", "shop.orders"]


class PeerLink:
    """A connection to a node in memory, which `before` may change before each answer."""

    is_closed = False
    place: Place = ("node", 1)
    address = ADDRESS
    node = "node:1"

    def __init__(self, node: MemoryNode, before: Callable[[], None] = lambda: None) -> None:
        self.memory = node
        self.before = before
        self.peer = node.connect()
        self.batches = 0

    def topology(self) -> Topology:
        return single_node("node", 1, PARTITIONS)

    def take_opaques(self, _count: int) -> int:
        return 1

    def close(self) -> None:
        pass

    async def send_batch(
        self, packets: bytes, _opaque: int, count: int, *, is_open_ended: bool = False
    ) -> list[Frame]:
        self.before()
        self.batches += 1
        frames = [
            frame
            for request in FrameDecoder().feed(packets)
            for frame in self.peer.send(_packed(request))
        ]
        self.memory.commit()
        assert is_open_ended or len(frames) == count
        return frames


def _packed(request: Frame) -> bytes:
    return pack_request(
        request.opcode, vb_id=request.vb_id, opaque=request.opaque, extras=request.extras,
        key=request.key, value=request.value,
    )  # fmt: skip


def followed(node: MemoryNode, store: MemoryStore, position: Position) -> bool:
    """Take what a stream from a position sends; False: the server answers ROLLBACK."""
    peer = node.connect()
    peer.open()
    snap = position.snap_start, position.snap_end
    answer = peer.stream(VB, position.seqno, uuid=position.vb_uuid, snap=snap)
    if answer.status == Status.ROLLBACK:
        return False
    assert answer.status == Status.OK, answer
    events: list[Event] = []
    for frame in peer.drain():
        key = frame.key
        if frame.opcode == Opcode.DCP_MUTATION:
            sent = parse_mutation(frame)
            events.append(
                Mutation(VB, key, frame.value, sent.by_seqno, sent.rev_seqno, frame.cas, 0, 0)
            )
        elif frame.opcode in {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}:
            gone = parse_deletion(frame)
            events.append(Deletion(VB, key, gone.by_seqno, gone.rev_seqno, frame.cas))
    take(store, events, {})
    return True


def resync_of(link: PeerLink) -> Resync:
    made = Resync(ADDRESS, 0, Filter(), 5.0)
    made._reader = HashReader(link, 5.0)  # type: ignore[arg-type]
    return made


Change = tuple[str, int, int]
changes = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "delete", "merge", "purge", "branch", "crash"]),
        st.integers(0, 300), st.integers(1, 60),
    ),
    max_size=6,
)  # fmt: skip


def apply(node: MemoryNode, change: Change) -> None:
    kind, first, count = change
    part = node.engine.partitions[VB]
    peer = node.connect()
    match kind:
        case "set":
            for key in KEYS[first : first + count]:
                peer.set(VB, key, b"%d" % part.high_seqno)
        case "delete":
            for key in KEYS[first : first + count]:
                peer.delete(VB, key)
        case "merge":
            node.merge()
        case "purge":
            node.merge()
            with pytest.MonkeyPatch.context():
                try:
                    purge(node.engine, VB)
                except PurgeRefusedError:
                    return
            node.commit()
            node.merge()
            node.compact([VB])
        case "branch":
            node.commit()
            try:
                branch(node.engine, VB, max(part.high_seqno - count, 0))
            except BranchRefusedError:
                return
    node.commit()


@settings(max_examples=50, deadline=None)
@given(before=changes, away=changes, meanwhile=changes, stray=st.integers(0, 40))
@pytest.mark.parametrize("kind", ["dicts", "lmdb"])
def test_a_resync_ends_as_a_stream_from_0(
    tmp_path_factory: pytest.TempPathFactory, kind: str, before: list[Change],
    away: list[Change], meanwhile: list[Change], stray: int,
) -> None:  # fmt: skip
    node = MemoryNode(partitions=PARTITIONS)
    store: Any = MemoryStore()
    if kind == "lmdb":
        store = LmdbStore(tmp_path_factory.mktemp("resync") / "view", is_durable=False)
    for change in [("set", 0, 200), *before]:
        apply(node, change)
    assert followed(node, store, Position())
    for change in away:
        apply(node, change)
    take(store, [Mutation(VB, key, b"not the server's", 1, 1, 5, 0, 0) for key in KEYS[:stray]], {})
    left = list(meanwhile)

    def next_change() -> None:
        if left:
            apply(node, left.pop())

    link = PeerLink(node, next_change)
    for _ in range(20):
        taken = asyncio.run(resync_of(link).partition(store, VB))
        position = Position() if taken is None else taken.position
        if taken is None:
            with store.changing() as change:
                change.clear(VB)
        else:
            take(store, [], {VB: position}, resynced={VB: taken})
            assert store.floor(VB) >= position.seqno
        next_change()
        if followed(node, store, position):
            break
    else:
        pytest.fail("it never ends")
    fresh = MemoryStore()
    assert followed(node, fresh, Position())
    assert dict(store.items()) == dict(fresh.items())
    assert store.hashes(VB) == fresh.hashes(VB) == counted(fresh.rows(VB, fresh.keys(VB)))
    store.close()


def test_an_equal_mirror_reads_hashes_only() -> None:
    node, store = MemoryNode(partitions=PARTITIONS), MemoryStore()
    apply(node, ("set", 0, 300))
    assert followed(node, store, Position())
    link = PeerLink(node)
    taken = asyncio.run(resync_of(link).partition(store, VB))
    assert taken is not None
    assert taken.rows == {}
    position = taken.position
    assert (position.seqno, position.snap_start, position.snap_end) == (300, 300, 300)
    assert link.batches == 2, "hashes, and the failover log"


def test_what_does_not_differ_is_not_read() -> None:
    node, store = MemoryNode(partitions=PARTITIONS), MemoryStore()
    apply(node, ("set", 0, 500))
    node.merge()
    assert followed(node, store, Position())
    apply(node, ("set", 7, 1))
    resync = resync_of(PeerLink(node))
    taken = asyncio.run(resync.partition(store, VB))
    assert resync.received_bytes < 5000
    assert taken is not None
    assert {key: row[16:] for key, row in taken.rows.items() if row} == {KEYS[7]: b"500"}


@pytest.mark.parametrize("what", ["other document", "cut short", "endless"])
def test_a_server_that_lies_is_not_believed(what: str) -> None:
    """Nothing of what it sent is used."""
    node, store = MemoryNode(partitions=PARTITIONS), MemoryStore()
    apply(node, ("set", 0, 3))
    link = PeerLink(node)
    send = link.send_batch

    async def lie(*args: Any, **kwargs: Any) -> list[Frame]:
        frames = await send(*args, **kwargs)
        frame = frames[0]
        if link.batches == 2 and what == "endless":
            return [frame._replace(extras=frame.extras[:-1] + b"\1", value=b"")]
        if link.batches == 3 and what == "other document":
            return [frame._replace(value=frame.value.replace(KEYS[0], KEYS[9]))]
        if link.batches == 3:
            return [frame._replace(value=frame.value[:-1])]
        return frames

    link.send_batch = lie  # type: ignore[method-assign]
    with pytest.raises(ConnectError, match=r"not the one that was asked|cut short|endless"):
        asyncio.run(resync_of(link).partition(store, VB))


# -- differences ---------------------------------------------------------------------------------


class Held(RowsCopy):
    """Documents by key: CAS and revision."""

    def __init__(self, name: str, held: dict[bytes, tuple[int, int]], count: int = 2) -> None:
        super().__init__(name, count, ROW_FORM)
        self.count = count or 64
        self.held = held

    async def collections(self) -> dict[str, int]:
        return {"_default._default": 0}

    def select(self, collection_id: int) -> None:
        assert collection_id == 0

    async def close(self) -> None:
        pass

    def rows(self, vb_id: int) -> list[Row]:
        return [
            (key, ROW.pack(*version)) for key, version in self.held.items()
            if vbucket_of(key, self.count) == vb_id
        ]  # fmt: skip


def found_between(first: Copy, second: Copy) -> list[Difference]:
    async def all_of() -> list[Difference]:
        return [each async for some in differences(first, second) for each in some]

    return asyncio.run(all_of())


held = st.dictionaries(
    st.integers(0, 500).map(b"k%d".__mod__),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=400,
)  # fmt: skip


@settings(max_examples=30)
@given(held, held)
def test_exactly_what_differs_is_found(
    one: dict[bytes, tuple[int, int]], two: dict[bytes, tuple[int, int]]
) -> None:
    found = found_between(Held("one", one), Held("two", two))
    wanted = {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
    assert {each.key for each in found} == wanted
    assert len(found) == len(wanted)
    for each in found:
        assert (each.first is None) == (each.key not in one)
        assert each.vb_id == vbucket_of(each.key, 2)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (None, (1, 1), "missing on A"),
        ((1, 1), None, "missing on B"),
        ((9, 1), (1, 2), "older on A"),
        ((1, 3), (9, 2), "older on B"),
        ((1, 2), (9, 2), "value"),
    ],
)
def test_differences_have_names(
    first: tuple[int, int] | None, second: tuple[int, int] | None, kind: str
) -> None:
    one, two = (
        None if each is None else KeyVersion(b"k", each[0], 0, each[1]) for each in (first, second)
    )
    assert Difference(0, b"k", one, two).kind == kind


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(NotComparableError, match="one has 2 partitions and two has 64"):
        found_between(Held("one", {}), Held("two", {}, 64))
    assert found_between(Held("one", {b"k": (1, 1)}, 64), Held("two", {b"k": (1, 1)}, 0)) == []
    two = Held("two", {b"k%d" % n: (1, 1) for n in range(99)}, 0)
    with pytest.raises(NotComparableError, match="keys of two are not those of 1024 partitions"):
        found_between(Held("one", {}, 1024), two)
    two.num_vbuckets, two.partitions_seen = 0, 64
    with pytest.raises(NotComparableError, match="two has more than 2 partitions"):
        found_between(Held("one", {}), two)
    with pytest.raises(NotComparableError, match=r"one lacks b\.c; two lacks a\.b$"):
        checked_collections({"a.b": 1, "d.e": 2}, {"d.e": 9, "b.c": 3}, ("one", "two"))
    assert checked_collections({"a.b": 1}, {"a.b": 2}, ("one", "two")) == ["a.b"]


class TwoNodes:
    """Connections to two nodes of a cluster; the second one has become master of all."""

    def __init__(self) -> None:
        self.old, self.new = MemoryNode(partitions=PARTITIONS), MemoryNode(partitions=PARTITIONS)
        apply(self.new, ("set", 0, 50))
        for vb_id in range(PARTITIONS):
            set_state(self.old.engine, vb_id, VbState.REPLICA)
        self.old.commit()
        self.reader = HashReader(PeerLink(self.old), 5.0)  # type: ignore[arg-type]
        link: Any = PeerLink(self.new)
        self.reader._links["other", 2] = link
        self.refreshed = 0

        async def refresh() -> None:
            self.refreshed += 1
            self.reader._cluster.topology = single_node("other", 2, PARTITIONS)

        self.reader._refresh = refresh  # type: ignore[method-assign]


async def test_a_partition_that_moved_is_asked_for_where_it_is() -> None:
    nodes = TwoNodes()
    levels = await nodes.reader.levels(range(PARTITIONS), 4)
    assert [levels[vb_id].hashes.documents for vb_id in range(PARTITIONS)] == [0, 50]
    assert nodes.refreshed == 1


async def test_what_nobody_answers_is_given_up_with_the_reason() -> None:
    nodes = TwoNodes()
    nodes.reader._timeout_s = 0.0
    with pytest.raises(NotMyVbucketError):
        await nodes.reader.levels([VB], 0)
    nodes.reader.select(99)
    nodes.reader._cluster.topology = single_node("other", 2, PARTITIONS)
    with pytest.raises(UnknownCollectionError):
        await nodes.reader.levels([VB], 0)


# -- live ----------------------------------------------------------------------------------------


async def test_a_mirror_takes_over_what_another_server_has(tmp_path) -> None:
    """It has no version of the first server, so without hashes it would be loaded again."""
    with (
        DcpServer(tmp_path / "one", "--partitions", "64") as one,
        DcpServer(tmp_path / "two", "--partitions", "64") as two,
    ):
        for server in (one, two):
            async with KvClient.connect(server.address) as kv:
                await kv.set_many([(b"k%d" % number, b"old") for number in range(200)])
                arguments = ["--server", parse_address(server.address).node, *ADD]
                assert await asyncio.to_thread(run, arguments) == 0
                orders = kv.collection("shop.orders")
                await orders.set_many([(b"o%d" % number, b"old") for number in range(90)])
        for collection, letter in ((None, "k"), ("shop.orders", "o")):
            path = tmp_path / letter
            async with Mirror(one.address, path, collection=collection) as view:
                before = len(view)
            async with KvClient.connect(two.address) as kv:
                written = kv if collection is None else kv.collection(collection)
                await written.delete(f"{letter}1")
                await written.set("new", b"1")
                async with Mirror(two.address, path, collection=collection) as view:
                    assert view.resyncs > 40
                    assert view.resync_bytes < 40_000
                    await written.set(f"{letter}2", b"now")
                    await view.caught_up(10)
                    assert len(view) == before
                    found = view[f"{letter}2"], view["new"], view.get(f"{letter}1")
                    assert found == (b"now", b"1", None)
            async with (
                Mirror(two.address, collection=collection) as fresh,
                Mirror(two.address, path, collection=collection) as view,
            ):
                assert dict(view.items()) == dict(fresh.items())
