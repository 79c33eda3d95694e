"""Resyncs: whatever happens meanwhile, a mirror ends as a stream from 0 would leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resync_parts import ADDRESS, KEYS, PARTITIONS, VB, Change, PeerLink, apply, changes, followed

from clients import KvClient, Mirror
from clients.address import ServerAddress, parse_address
from clients.cli.dcpctl import run
from clients.consumer.streams import after_differences
from clients.consumer.supervisor import differences_of
from clients.errors import ConnectError, NotMyVbucketError, UnknownCollectionError
from clients.event import Differences, Mutation, Rollback
from clients.kv.differences import (
    PARTITIONS_AT_ONCE,
    Copy,
    Difference,
    NotComparableError,
    RowsCopy,
    checked_collections,
)
from clients.kv.hash_reads import GROUPS_AT_ONCE, HashReader, differences
from clients.kv.held import ROW, ROW_FORM, Held
from clients.kv.resync import Resync
from clients.link.pipelined_link import Link
from clients.link.topology import single_node
from clients.mirror.lmdb_mirror import LmdbStore
from clients.mirror.mirror import _HeldDocuments
from clients.mirror.mirror_state import MemoryStore, MirrorStore, counted, take
from clients.position import Position
from clients.testing import DcpServer
from dcp.wire.frame import Frame
from dcp.wire.hash_reads import KeyVersion, pack_version, versions_in
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of
from vbucket.native.key_hashes import BITS_MAX, KeyHashes, Row

ADD = ["collection", "add", "shop.orders"]


def held_of(store: MirrorStore) -> Held:
    """What a mirror of the default collection tells a consumer."""
    consumer = SimpleNamespace(collection_ids=(0,))
    mirror: Any = SimpleNamespace(_stored=lambda _vb_id: store, consumer=consumer)
    return _HeldDocuments(mirror)


def resync_of(link: PeerLink, store: MirrorStore) -> Resync:
    made = Resync(ADDRESS, held_of(store), (0,), 5.0)
    made._reader = HashReader(link, 5.0)  # type: ignore[arg-type]
    return made


def compared(link: PeerLink, store: MirrorStore) -> Differences | None:
    """Return the event that a consumer makes of what differs."""
    found = asyncio.run(resync_of(link, store).partition(VB))
    return None if found is None else differences_of(found, Rollback(VB, 0, 0, 9, "test"), ())


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
        event = compared(link, store)
        position = Position() if event is None else after_differences(event, (0,), None)
        back = Rollback(VB, 0, 0, 9, "test")
        take(store, [back if event is None else event], {VB: position})
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
    event = compared(link, store)
    assert event is not None
    assert (event.changed, event.gone) == ([], [])
    position = after_differences(event, (0,), None)
    assert (position.seqno, position.snap_start, position.snap_end) == (300, 300, 300)
    assert link.batches == 2, "hashes, and the failover log"


def test_what_does_not_differ_is_not_read() -> None:
    node, store = MemoryNode(partitions=PARTITIONS), MemoryStore()
    apply(node, ("set", 0, 500))
    node.merge()
    assert followed(node, store, Position())
    apply(node, ("set", 7, 1))
    resync = resync_of(PeerLink(node), store)
    found = asyncio.run(resync.partition(VB))
    assert resync.received_bytes < 5000
    assert found is not None
    assert [(sent.version.key, sent.value) for _, sent in found.changed] == [(KEYS[7], b"500")]


@pytest.mark.parametrize("what", ["other document", "cut short", "endless"])
def test_a_server_that_lies_is_not_believed(what: str) -> None:
    """Nothing of what it sent is used."""
    node, store = MemoryNode(partitions=PARTITIONS), MemoryStore()
    apply(node, ("set", 0, 3))
    take(store, [Mutation(VB, KEYS[5], b"not the server's", 1, 1, 5, 0, 0)], {})
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
        asyncio.run(resync_of(link, store).partition(VB))


def test_an_answer_that_is_cut_short_is_refused() -> None:
    one = pack_version(KeyVersion(b"key", 1, 2, 3))
    assert versions_in(2 * one) == 2 * [KeyVersion(b"key", 1, 2, 3)]
    for length in {*range(2 * len(one))} - {0, len(one)}:
        with pytest.raises(ValueError, match=f"an answer of {length} bytes is cut short"):
            versions_in((2 * one)[:length])


# -- differences ---------------------------------------------------------------------------------


class HeldCopy(RowsCopy):
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
    found = found_between(HeldCopy("one", one), HeldCopy("two", two))
    wanted = {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
    assert {each.key for each in found} == wanted
    assert len(found) == len(wanted)
    for each in found:
        assert (each.first is None) == (each.key not in one)
        assert each.vb_id == vbucket_of(each.key, 2)


class AskedCopy(HeldCopy):
    """Notes what it is asked for, and how much is asked for at a time."""

    def __init__(self, name: str, held: dict[bytes, tuple[int, int]], count: int) -> None:
        super().__init__(name, held, count)
        self.asked: list[tuple[int, int]] = []
        """First partition, and bits."""
        self.at_once = self.most = 0

    async def hashes(self, vb_ids: Sequence[int], bits: int) -> dict[int, KeyHashes]:
        self.asked.append((vb_ids[0], bits))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0)
            return await super().hashes(vb_ids, bits)
        finally:
            self.at_once -= 1


def test_where_most_differ_all_buckets_are_asked_for_at_once() -> None:
    count, groups = 8 * PARTITIONS_AT_ONCE, range(0, 8 * PARTITIONS_AT_ONCE, PARTITIONS_AT_ONCE)
    keys = [b"k%d" % number for number in range(8000)]
    one, equal = dict.fromkeys(keys, (1, 1)), AskedCopy("equal", dict.fromkeys(keys, (1, 1)), count)
    assert found_between(HeldCopy("one", one, count), equal) == []
    assert equal.asked == [(first, 0) for first in groups]
    other = AskedCopy("other", dict.fromkeys(keys, (2, 2)), count)
    found = found_between(HeldCopy("one", one, count), other)
    assert [each.vb_id for each in found] == sorted(vbucket_of(key, count) for key in keys)
    bits_of = {first: [bits for each, bits in other.asked if each == first] for first in groups}
    assert bits_of[0] == [0, BITS_MAX]
    assert all(bits_of[first] == [BITS_MAX] for first in groups[GROUPS_AT_ONCE:])
    assert other.most == GROUPS_AT_ONCE


class ServerAndCopy:
    """A server, and a copy that lacks one of its documents, has another value of one, and has one
    that the server has not.
    """

    def __init__(self) -> None:
        node = MemoryNode(partitions=PARTITIONS)
        apply(node, ("set", 0, 300))
        node.merge()
        apply(node, ("set", 5, 20))
        self.link = PeerLink(node)
        self.reader = HashReader(self.link, 5.0)  # type: ignore[arg-type]
        everything = dict.fromkeys(range(PARTITIONS), (0, b"\x01"))
        versions = asyncio.run(self.reader.versions(everything, {}))
        held = {
            each.key: (each.cas, each.rev_seqno) for found in versions.values() for each in found
        }
        lacking, stale, *_ = held
        del held[lacking]
        held[stale], held[b"only here"] = (1, 1), (1, 1)
        self.copy = HeldCopy("copy", held, PARTITIONS)
        self.wanted = {lacking: "missing on B", stale: "older on B", b"only here": "missing on A"}
        self.link.batches = 0

    def answers(self, change: Callable[[Frame], Frame]) -> None:
        """Change each answer of the server from now on."""
        send = self.link.send_batch

        async def changed(*args: Any, **kwargs: Any) -> list[Frame]:
            return [change(frame) for frame in await send(*args, **kwargs)]

        self.link.send_batch = changed  # type: ignore[method-assign]

    def kinds(self) -> dict[bytes, str]:
        return {each.key: each.kind for each in found_between(self.reader, self.copy)}


def test_a_server_tells_in_one_answer_in_what_it_differs() -> None:
    both = ServerAndCopy()
    assert both.kinds() == both.wanted
    assert both.link.batches == 2, "one hash of each partition, and what differs"
    assert len(found_between(both.copy, both.reader)) == len(both.wanted)
    assert both.link.batches == 4


def test_a_long_list_of_what_differs_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ServerAndCopy()
    both.copy.held.clear()
    monkeypatch.setattr("dcp.session.kv.hash_reads.LISTED_BYTES_MAX", 500)
    found = both.kinds()
    assert len(found) == 300
    assert set(found.values()) == {"missing on B"}
    assert both.link.batches > 10


def test_an_older_server_is_asked_for_hashes_and_keys() -> None:
    both = ServerAndCopy()

    def unknown(frame: Frame) -> Frame:
        is_new = len(frame.value) > 64 and both.link.batches == 2
        return frame._replace(status=Status.EINVAL, value=b"{}") if is_new else frame

    both.answers(unknown)
    assert both.kinds() == both.wanted
    assert both.link.batches == 4, "it was asked once more, in the older way"
    assert not both.reader.compares


@pytest.mark.parametrize("what", ["bits", "cut short", "endless"])
def test_a_server_that_lies_about_what_differs_is_named(what: str) -> None:
    both = ServerAndCopy()

    def lie(frame: Frame) -> Frame:
        if both.link.batches != 2:
            return frame
        if what == "cut short":
            return frame._replace(value=frame.value[:-1])
        bits_and_more = b"\xc8\0" if what == "bits" else frame.extras[-2:-1] + b"\1"
        return frame._replace(extras=frame.extras[:-2] + bits_and_more, value=bytes(2))

    both.answers(lie)
    with pytest.raises(ConnectError, match=rf"what differs: .*{what}.*node:1"):
        both.kinds()


async def test_a_comparison_that_is_closed_asks_for_nothing_more() -> None:
    keys = [b"k%d" % number for number in range(3000)]
    one = HeldCopy("one", dict.fromkeys(keys, (1, 1)), 1024)
    other = AskedCopy("other", dict.fromkeys(keys, (2, 2)), 1024)
    comparison = differences(one, other)
    assert await anext(comparison)
    await comparison.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert other.at_once == 0
    assert len(other.asked) <= 2 * GROUPS_AT_ONCE + 1


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
        found_between(HeldCopy("one", {}), HeldCopy("two", {}, 64))
    assert (
        found_between(HeldCopy("one", {b"k": (1, 1)}, 64), HeldCopy("two", {b"k": (1, 1)}, 0)) == []
    )
    two = HeldCopy("two", {b"k%d" % n: (1, 1) for n in range(99)}, 0)
    with pytest.raises(NotComparableError, match="keys of two are not those of 1024 partitions"):
        found_between(HeldCopy("one", {}, 1024), two)
    two.num_vbuckets, two.partitions_seen = 0, 64
    with pytest.raises(NotComparableError, match="two has more than 2 partitions"):
        found_between(HeldCopy("one", {}), two)
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


async def test_groups_that_are_read_at_a_time_share_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, dialled = TwoNodes(), list[str]()
    nodes.reader._links.clear()

    async def connect(address: ServerAddress, **_: object) -> PeerLink:
        dialled.append(address.node)
        await asyncio.sleep(0)
        return PeerLink(nodes.old)

    monkeypatch.setattr(Link, "connect", connect)
    first, second = await asyncio.gather(*(nodes.reader._link_to(("other", 2)) for _ in range(2)))
    assert first is second
    assert len(dialled) == 1


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
