"""The option `held`: who begins at 0 and holds documents gets what differs, to the same end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resync_parts import ADDRESS, KEYS, PARTITIONS, VB, Change, PeerLink, apply, changes

from clients import Consumer, ConsumerOptions, Held, HeldDocument, KvClient, Position, SyncKv
from clients.cli.dcpctl import run
from clients.consumer.streams import after_differences
from clients.consumer.supervisor import differences_of
from clients.errors import DcpdError, NotFoundError
from clients.event import Deletion, Differences, Event, Mutation, Rollback, StreamFailed
from clients.kv.hash_reads import HashReader
from clients.kv.resync import Resync
from clients.testing import DcpServer, ServerRefusedError
from dcp.wire.feature import Feature
from dcp.wire.message import parse_deletion, parse_mutation
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import decode_leb128

Place = tuple[int, int, bytes]
"""Partition, collection id, key."""
COUNT = 64
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'front'}"}


class Application(Held):
    """Documents in a dict, with positions that change together with them."""

    def __init__(self) -> None:
        self.rows: dict[Place, tuple[int, int, bytes]] = {}
        self.positions: dict[int, Position] = {}
        self.seen: list[Event] = []
        self.sent = 0
        """How many documents came."""

    def documents(self, vb_id: int) -> Iterable[HeldDocument]:
        return [
            HeldDocument(key, cas, rev, collection_id)
            for (of_vb, collection_id, key), (cas, rev, _) in self.rows.items()
            if of_vb == vb_id
        ]

    def take(self, events: Iterable[Event], positions: dict[int, Position] | None = None) -> None:
        for event in events:
            match event:
                case Mutation():
                    self._set(event)
                case Deletion():
                    self.rows.pop((event.vb_id, event.collection_id, event.key), None)
                case Rollback():
                    assert not event.to_seqno, "with restart it never undoes"
                    self.rows = {at: row for at, row in self.rows.items() if at[0] != event.vb_id}
                case Differences():
                    for each in event.changed:
                        self._set(each)
                    for collection_id, key in event.gone:
                        del self.rows[event.vb_id, collection_id, key]
                case StreamFailed():
                    raise event.error()
                case _:
                    continue
            self.seen.append(event)
        self.positions |= positions or {}

    def _set(self, each: Mutation) -> None:
        self.sent += 1
        row = each.cas, each.rev_seqno, each.value
        self.rows[each.vb_id, each.collection_id, each.key] = row

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.seen if type(event) is kind]


# -- the core, with everything that may happen between any two requests --------------------------

ORDERS = 8
"""A collection's id, and that of one that is not followed."""
OTHER = 9
FOLLOWED = (0, ORDERS)
PREFIXES = {0: b"\0", ORDERS: b"\x08", OTHER: b"\x09"}


def followed(node: MemoryNode, app: Application, position: Position) -> bool:
    """Take what a stream from a position sends; False: the server answers ROLLBACK."""
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    peer.open()
    peer.control(b"enable_noop", b"true")
    snap = position.snap_start, position.snap_end
    answer = peer.stream(
        VB, position.seqno, uuid=position.vb_uuid, snap=snap, value=b'{"collections":["0","8"]}'
    )
    if answer.status == Status.ROLLBACK:
        return False
    assert answer.status == Status.OK, answer
    for frame in peer.drain():
        collection_id, at = decode_leb128(frame.key) or (0, 0)
        key = frame.key[at:]
        if frame.opcode == Opcode.DCP_MUTATION:
            sent = parse_mutation(frame)
            event: Event = Mutation(
                VB, key, frame.value, sent.by_seqno, sent.rev_seqno, frame.cas, 0, 0,
                collection_id=collection_id,
            )  # fmt: skip
        elif frame.opcode in {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}:
            gone = parse_deletion(frame)
            event = Deletion(
                VB, key, gone.by_seqno, gone.rev_seqno, frame.cas, collection_id=collection_id
            )
        else:
            continue
        app.take([event])
    return True


collection_changes = st.lists(st.tuples(changes, st.sampled_from([*PREFIXES])), max_size=3)
Several = list[tuple[list[Change], int]]


def flat(several: Several) -> list[tuple[Change, bytes]]:
    return [(change, PREFIXES[number]) for some, number in several for change in some]


def node_with_collections() -> MemoryNode:
    node = MemoryNode(partitions=PARTITIONS)
    manifest = node.engine.keyspace.manifest.create_scope("shop")
    manifest = manifest.create_collection("shop", "orders").create_collection("shop", "other")
    node.engine.keyspace.set_manifest(manifest)
    node.commit()
    return node


def compared(app: Application, link: PeerLink) -> tuple[Event, Position]:
    """Return the event and the position that a consumer makes of what differs."""
    resync = Resync(ADDRESS, app, FOLLOWED, 5.0)
    resync._reader = HashReader(link, 5.0)  # type: ignore[arg-type]
    back = Rollback(VB, 0, 0, 9, "test")
    found = asyncio.run(resync.partition(VB))
    if found is None:
        return back, Position()
    event = differences_of(found, back, ())
    return event, after_differences(event, FOLLOWED, None)


@settings(max_examples=60, deadline=None)
@given(
    before=collection_changes, away=collection_changes, meanwhile=collection_changes,
    strays=st.lists(st.tuples(st.sampled_from([0, ORDERS, 77]), st.integers(0, 60)), max_size=9),
)  # fmt: skip
def test_differences_end_as_a_stream_from_0(
    before: Several, away: Several, meanwhile: Several, strays: list[tuple[int, int]]
) -> None:
    """Both sides change, in collections that are followed and others, also one that is gone."""
    node, app = node_with_collections(), Application()
    for number in FOLLOWED:
        apply(node, ("set", 0, 150), PREFIXES[number])
    for change, prefix in flat(before):
        apply(node, change, prefix)
    assert followed(node, app, Position())
    for change, prefix in flat(away):
        apply(node, change, prefix)
    for number, at in strays:
        app.rows[VB, number, KEYS[at]] = (5, 1, b"not the server's")
    left = flat(meanwhile)

    def next_change() -> None:
        if left:
            apply(node, *left.pop())

    link = PeerLink(node, next_change)
    for _ in range(30):
        event, position = compared(app, link)
        app.take([event])
        next_change()
        if followed(node, app, position):
            break
    else:
        pytest.fail("it never ends")
    fresh = Application()
    assert followed(node, fresh, Position())
    assert app.rows == fresh.rows


def test_only_documents_of_what_differs_are_sent() -> None:
    node, app = node_with_collections(), Application()
    for number in FOLLOWED:
        apply(node, ("set", 0, 300), PREFIXES[number])
    assert followed(node, app, Position())
    apply(node, ("set", 7, 1), PREFIXES[ORDERS])
    apply(node, ("delete", 9, 1), PREFIXES[0])
    app.sent = 0
    event, position = compared(app, PeerLink(node))
    app.take([event])
    assert isinstance(event, Differences)
    assert [(each.collection_id, each.key) for each in event.changed] == [(ORDERS, KEYS[7])]
    assert event.gone == [(0, KEYS[9])]
    assert position.seqno == position.snap_end == node.engine.partitions[VB].high_seqno


STRANGER = next(key for key in (b"%d" % n for n in range(99)) if vbucket_of(key, PARTITIONS) != VB)


def test_hidden_keys_are_no_differences() -> None:
    """A ServerCheckpoint is in the server's documents, and its consumer does not see it."""
    node, app = node_with_collections(), Application()
    node.connect().set(VB, b"_dcpd:checkpoint", b"1")
    apply(node, ("set", 0, 2), PREFIXES[ORDERS])
    app.rows[VB, 0, KEYS[5]] = (5, 1, b"gone")
    resync = Resync(ADDRESS, app, FOLLOWED, 5.0)
    resync._reader = HashReader(PeerLink(node), 5.0)  # type: ignore[arg-type]
    found = asyncio.run(resync.partition(VB))
    assert found is not None
    event = differences_of(found, Rollback(VB, 0, 0, 9, "test"), (b"_dcpd:",))
    assert sorted(each.key for each in event.changed) == sorted(KEYS[:2])


def test_who_waits_is_looked_up_only_for_what_is_read() -> None:
    """With 1,024 partitions that wait, a list for each of them would be a million entries."""
    node, app = node_with_collections(), Application()
    apply(node, ("set", 0, 9), PREFIXES[0])
    assert followed(node, app, Position())
    resync = Resync(ADDRESS, app, FOLLOWED, 5.0)
    link = PeerLink(node)
    resync._reader = HashReader(link, 5.0)  # type: ignore[arg-type]
    taken = []

    def waiting() -> Iterator[int]:
        for vb_id in (VB, 0, 0, VB):
            taken.append(vb_id)
            yield vb_id

    assert asyncio.run(resync.partition(VB, waiting())) is not None
    assert taken == [], "the first is read alone"
    assert asyncio.run(resync.partition(VB, waiting())) is not None
    assert taken == [VB, 0, 0, VB]
    batches, taken = link.batches, []
    found = asyncio.run(resync.partition(0, waiting()))
    assert found is not None
    assert (found.seqno, link.batches, taken) == (0, batches, []), "it was read ahead"


class Fixed(Held):
    """What is given."""

    def __init__(self, *documents: Any) -> None:
        self.held = documents

    def documents(self, vb_id: int) -> Iterable[HeldDocument]:
        return self.held


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (HeldDocument("text", 1, 1), "its key must be bytes"),  # type: ignore[arg-type]
        (HeldDocument(KEYS[0], -1, 1), r"numbers from 0 to 2\^64 - 1"),
        (HeldDocument(KEYS[0], 1, None), r"numbers from 0 to 2\^64 - 1"),  # type: ignore[arg-type]
        (
            HeldDocument(STRANGER, 1, 1),
            "belongs to partition 0 of this server's 2",
        ),
    ],
)
def test_what_cannot_be_held_is_named(document: HeldDocument, why: str) -> None:
    node = node_with_collections()
    apply(node, ("set", 0, 9), PREFIXES[0])
    resync = Resync(ADDRESS, Fixed(document), FOLLOWED, 5.0)
    resync._reader = HashReader(PeerLink(node), 5.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"held: of partition 1 there is .*{why}"):
        asyncio.run(resync.partition(VB))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"held": "rows"}, "an object of a class of yours"),
        ({"key_prefixes": "a"}, "key_prefixes: hashes are those of all keys"),
        ({"collections": "all"}, "name those that you hold"),
        ({"xattrs": True}, "come without XATTRs"),
        ({"history": True}, "only the newest version"),
        ({"previous_values": True}, "have none"),
        ({"start": "now"}, "it is not at 0"),
    ],
)
def test_options_that_cannot_be_compared_are_refused(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"held .*{why}"):
        ConsumerOptions(**{"held": Application(), **given})


# -- live ----------------------------------------------------------------------------------------


async def caught_up(app: Application, server: DcpServer, **options: Any) -> Consumer:
    """Follow a server until now, as an application that cannot undo."""
    consumer = Consumer(
        server.address, held=app, start=app.positions, on_rollback="restart", until_now=True,
        **options,
    )  # fmt: skip
    async with consumer:
        await consumer.run(lambda delivery: app.take(*delivery))
    return consumer


async def write(server: DcpServer, letter: str, numbers: Iterable[int], value: bytes) -> None:
    async with KvClient.connect(server.address) as kv:
        await kv.set_many([(f"{letter}{number}", value) for number in numbers])


async def equal(app: Application, server: DcpServer, **options: Any) -> bool:
    fresh = Application()
    async with Consumer(server.address, until_now=True, **options) as consumer:
        await consumer.run(lambda delivery: fresh.take(*delivery))
    return app.rows == fresh.rows


@pytest.fixture
def server(tmp_path):
    with DcpServer(tmp_path / "one", "--partitions", str(COUNT)) as server:
        yield server


async def test_a_lost_checkpoint_costs_what_differs(server: DcpServer) -> None:
    app = Application()
    await write(server, "k", range(2000), b"x" * 200)
    first = await caught_up(app, server)
    assert (app.sent, first.metrics.resyncs) == (2000, 0), "who holds nothing reads the stream"
    async with KvClient.connect(server.address) as kv:
        await kv.set("k1", b"new")
        await kv.delete("k2")
    app.positions, app.sent, app.seen = {}, 0, []
    second = await caught_up(app, server, validate=True)
    assert second.metrics.resyncs == COUNT
    assert app.sent == 1
    assert [each.gone for each in app.of(Differences) if each.gone] == [[(0, b"k2")]]
    assert not app.of(Rollback)
    assert second.metrics.resync_bytes + second.metrics.wire_bytes < first.metrics.wire_bytes / 10
    assert await equal(app, server)
    app.sent = 0
    third = await caught_up(app, server)
    assert (app.sent, third.metrics.resyncs) == (0, 0), "its positions are those of a stream"


async def test_another_server_and_a_collection(server: DcpServer, tmp_path) -> None:
    app, chosen = Application(), {"collections": ["shop.orders", "_default._default"]}
    with DcpServer(tmp_path / "two", "--partitions", str(COUNT)) as other:
        for each in (server, other):
            await write(each, "k", range(100), b"1")
            node = each.address.removeprefix("dcpd://")
            add = ["--server", node, "collection", "add", "shop.orders"]
            assert await asyncio.to_thread(run, add) == 0
            async with KvClient.connect(each.address) as kv:
                orders = kv.collection("shop.orders")
                await orders.set_many([(f"o{number}", b"1") for number in range(100)])
        await caught_up(app, server, **chosen)
        async with KvClient.connect(server.address) as kv:
            await kv.collection("shop.orders").set("o-gone", b"1")
        await caught_up(app, server, **chosen)
        consumer = await caught_up(app, other, **chosen)
        assert consumer.metrics.resyncs > 40
        assert (0, b"o-gone") not in app.rows
        assert await equal(app, other, **chosen)


async def test_what_cannot_be_compared_begins_at_0(
    server: DcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then there is a Rollback to 0, also without a position, so nothing old is left."""
    app = Application()
    app.rows[vbucket_of(b"stray", COUNT), 0, b"stray"] = (1, 1, b"1")
    await write(server, "k", range(300), b"1")

    async def refused(*_arguments: Any) -> None:
        raise DcpdError("no hashes here")

    monkeypatch.setattr(HashReader, "levels", refused)
    await caught_up(app, server)
    assert [event.vb_id for event in app.of(Rollback)] == [vbucket_of(b"stray", COUNT)]
    assert await equal(app, server)


async def test_undo_is_asked_first_and_differences_last(server: DcpServer) -> None:
    """With on_rollback="undo" only what would begin at 0 is compared."""
    app = Application()
    await write(server, "k", range(300), b"1")
    await caught_up(app, server)
    vb = vbucket_of(b"k1", COUNT)
    held = app.positions[vb].seqno
    await write(server, "k", range(300), b"2")
    await caught_up(app, server)
    server.branch(vb, at=held)
    for on_rollback, kinds in (("undo", [Rollback]), ("restart", [Differences])):
        events: list[Event] = []
        async with Consumer(
            server.address,
            held=app,
            start=app.positions,
            until_now=True,
            vbuckets=[vb],
            on_rollback=on_rollback,  # type: ignore[arg-type]
        ) as consumer:
            async for some in consumer.batches():
                events += some
        assert [type(e) for e in events if isinstance(e, Rollback | Differences)] == kinds


def trouble(server: DcpServer, random_: random.Random, kv: SyncKv) -> None:
    """Write, delete, branch and purge."""
    for _ in range(120):
        key = f"k{random_.randrange(400)}"
        try:
            if random_.random() < 0.3:
                kv.delete(key)
            else:
                kv.set(key, b"%x" % random_.getrandbits(64))
        except (NotFoundError, DcpdError):
            continue
    high = {vb: seqno for vb, seqno in kv.get_all_vb_seqnos().items() if seqno}
    for vb in random_.sample(sorted(high), 12):
        try:
            if random_.random() < 0.5:
                server.branch(vb, at=random_.randint(0, high[vb]))
            else:
                server.purge(vb)
        except ServerRefusedError:
            continue


@pytest.mark.parametrize("seed", range(4))
async def test_an_application_follows_through_everything(server: DcpServer, seed: int) -> None:
    """Its positions are lost now and then, and the server changes while it reads."""
    random_, app = random.Random(seed), Application()
    with server.connect() as kv:
        for number in range(400):
            kv.set(f"k{number}", b"0")
        for _ in range(5):
            lost = random_.sample(range(COUNT), random_.choice([0, 9, COUNT]))
            app.positions = {vb: at for vb, at in app.positions.items() if vb not in lost}
            trouble(server, random_, kv)
            await asyncio.gather(
                caught_up(app, server, validate=True),
                asyncio.to_thread(partial(trouble, server, random_, kv)),
            )
        await caught_up(app, server)
    assert await equal(app, server)
    assert app.of(Differences)


def test_the_example_of_the_page(server: DcpServer, tmp_path: Path) -> None:
    """It loses its positions, and then compares all partitions that it has documents of."""
    page = (ROOT / "docs" / "consumers.md").read_text()
    section = page.partition("### What you hold already")[2]
    program, file = tmp_path / "program.py", tmp_path / "table.db"
    program.write_text(section.partition("```python\n")[2].partition("```")[0])

    def ran() -> str:
        command = [sys.executable, str(program), server.address, str(file)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=ENVIRONMENT
        )  # fmt: skip
        return done.stdout

    with server.connect() as kv, contextlib.closing(sqlite3.connect(file)) as db:
        for number in range(200):
            kv.set(f"k{number}", b"old")
        assert ran() == "0 partitions were compared\n"
        kv.set("k1", b"new")
        kv.delete("k2")
        with db:
            db.execute("DELETE FROM positions")
        assert ran() != "0 partitions were compared\n"
        rows = dict(db.execute("SELECT key, value FROM documents"))
        assert rows == {b"k%d" % n: b"old" for n in range(200) if n != 2} | {b"k1": b"new"}
        assert ran() == "0 partitions were compared\n"
