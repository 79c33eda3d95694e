"""Groups, starts, filters, pausing, lag and rate, against a live server."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta

import pytest

from clients import (
    CheckpointFile,
    Consumer,
    Deletion,
    Group,
    KvClient,
    Mutation,
    Position,
    ServerCheckpoint,
)
from clients.consumer.options import time_ns_of
from clients.errors import UnknownCollectionError
from clients.kv.sync_client import SyncKv
from clients.testing import DcpServer
from vbucket.model.ids import time_ns_from_cas, vbucket_of


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("steering") / "data") as process:
        with process.connect() as kv:
            for n in range(200):
                kv.set(b"k%d" % n, b"1")
        yield process


async def until(condition):
    """Wait until something is so."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


async def changes(server, **options):
    """Return the keys and values of all changes up to now."""
    async with Consumer(server.address, until_now=True, validate=True, **options) as consumer:
        return [
            (event.key, getattr(event, "value", None))
            async for event in consumer
            if isinstance(event, Mutation | Deletion)
        ]


# -- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DCPD_GROUP_SIZE": "3", "DCPD_GROUP_MEMBER": "2"}, Group(2, 3)),
        ({"DCPD_GROUP_SIZE": "3", "JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-2"}, Group(0, 3)),
        ({"DCPD_GROUP_SIZE": "12", "POD_NAME": "indexer-blue-11"}, Group(11, 12)),
        (
            {"DCPD_GROUP_SIZE": "2", "DCPD_GROUP_NAME": "indexer", "HOSTNAME": "indexer-1"},
            Group(1, 2),
        ),
        (
            {
                "DCPD_GROUP_SIZE": "2",
                "DCPD_GROUP_NAME": "indexer",
                "POD_NAME": "indexer-0",
                "HOSTNAME": "ip-10-0-0-1",
            },
            Group(0, 2),
        ),
    ],
)
def test_a_member_knows_its_place_from_the_environment(environment, expected):
    assert Group.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"HOSTNAME": "indexer-1"}, "DCPD_GROUP_SIZE is not set"),
        ({"DCPD_GROUP_SIZE": "2", "HOSTNAME": "indexer"}, "member's number is missing"),
        ({"DCPD_GROUP_SIZE": "2", "POD_NAME": "indexer-2"}, "no member 2"),
        ({"DCPD_GROUP_SIZE": "2", "HOSTNAME": "ip-10-0-0-1"}, "HOSTNAME is 'ip-10-0-0-1'"),
        ({"DCPD_GROUP_SIZE": "2", "HOSTNAME": "indexer-1"}, "DCPD_GROUP_NAME to its name"),
        (
            {"DCPD_GROUP_SIZE": "2", "DCPD_GROUP_NAME": "ip", "HOSTNAME": "ip-10-0-0-1"},
            "is ip-0, ip-1",
        ),
        (
            {"DCPD_GROUP_SIZE": "2", "DCPD_GROUP_NAME": "indexer", "HOSTNAME": "indexer-01"},
            "member's number is missing",
        ),
        ({"DCPD_GROUP_SIZE": "two"}, "must be a number"),
    ],
)
def test_a_place_that_cannot_be_is_refused(environment, what):
    with pytest.raises(ValueError, match=what):
        Group.from_environment(environment)


@pytest.mark.parametrize("size", [1, 3, 5])
async def test_members_share_all_partitions_and_none_twice(server, size):
    parts = [set(Group(member, size).vbuckets(1024)) for member in range(size)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 1024
    seen = [dict(await changes(server, group=Group(member, size))) for member in range(size)]
    assert sum(map(len, seen)) == len({key for part in seen for key in part})
    assert {f"k{n}".encode() for n in range(200)} <= {key for part in seen for key in part}


async def test_members_of_one_name_do_not_end_each_other(server):
    async with (
        Consumer(server.address, name="shared", group=Group(0, 2)) as first,
        Consumer(server.address, name="shared", group=Group(1, 2)) as second,
    ):
        await anext(first.batches())
        await anext(second.batches())
        assert {row["name"] for row in server.streams()} >= {"shared:0", "shared:1"}
        assert first.metrics.connections_lost == 0


async def test_group_of_another_size_goes_on_where_the_old_one_was(server):
    """All members share a store: the new owner of a partition begins where the old one stopped."""

    async def follow(size):
        told = []
        for member in range(size):
            store = ServerCheckpoint(server.address, "group")
            async with Consumer(
                server.address, group=Group(member, size), store=store, until_now=True,
                validate=True,
            ) as consumer:  # fmt: skip
                told += [event.key async for event in consumer if isinstance(event, Mutation)]
                await consumer.save()
        return told

    before = await follow(2)
    assert len(set(before)) == len(before) >= 200
    with server.connect() as kv:
        for n in range(0, 200, 10):
            kv.set(b"k%d" % n, b"2")
    assert sorted(await follow(3)) == sorted(b"k%d" % n for n in range(0, 200, 10))
    assert await follow(2) == []


# -- where to begin ------------------------------------------------------------------------------


async def test_from_a_moment_on(server):
    async with KvClient.connect(server.address) as kv:
        await kv.set("before", b"1")
        first = await kv.set("moment", b"1")
        await kv.set("after", b"1")
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
        microseconds=time_ns_from_cas(first.cas) // 1000
    )
    keys = [key for key, _ in await changes(server, start=moment)]
    assert {b"moment", b"after"} <= set(keys)
    assert b"k0" not in keys
    assert await changes(server, start=datetime.now(UTC) + timedelta(hours=1)) == []
    assert len(await changes(server, start=datetime(2020, 1, 1, tzinfo=UTC))) >= 200


async def test_a_server_that_cannot_tell_a_moment_gives_the_same(server, monkeypatch):
    with server.connect() as kv:
        kv.set(b"later", b"1")
        cas = kv.get(b"later").cas
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(
        microseconds=time_ns_from_cas(cas) // 1000
    )
    told = await changes(server, start=moment)
    asked = []

    async def cannot_tell(_link, vb_ids, _time_ns):
        asked.extend(vb_ids)

    monkeypatch.setattr("clients.consumer.starting_point.seqnos_at", cannot_tell)
    assert sorted(await changes(server, start=moment)) == sorted(told)
    assert len(asked) == 1024
    assert b"later" in dict(told)


def test_a_moment_has_a_zone():
    with pytest.raises(ValueError, match="time zone"):
        Consumer("127.0.0.1:1", start=datetime(2026, 1, 1))  # noqa: DTZ001
    assert time_ns_of(datetime(1970, 1, 2, tzinfo=UTC)) == 86_400 * 10**9


async def test_from_a_vector_of_seqnos_or_positions(server):
    vb_id = vbucket_of(b"vector")
    with server.connect() as kv:
        seqnos = [kv.set(b"vector", b"%d" % n).seqno for n in range(3)]
        log = kv.failover_log(vb_id)
    told = dict(await changes(server, vbuckets=[vb_id], start={vb_id: seqnos[1]}))
    assert told == {b"vector": b"2"}
    position = Position(tuple(log), seqnos[2], seqnos[2], seqnos[2])
    assert await changes(server, vbuckets=[vb_id], start={vb_id: position}) == []
    # Partitions that are not named begin at the beginning.
    assert len(await changes(server, start={vb_id: seqnos[2]})) >= 200


async def test_a_seqno_vector_survives_branches(server):
    vb_id = vbucket_of(b"vector-2")
    with server.connect() as kv:
        seqnos = [kv.set(b"vector-2", b"%d" % n).seqno for n in range(4)]
    await asyncio.to_thread(server.branch, vb_id, seqnos[2])
    told = dict(await changes(server, vbuckets=[vb_id], start={vb_id: seqnos[0]}))
    assert told[b"vector-2"] == b"2"
    assert dict(await changes(server, vbuckets=[vb_id], start={vb_id: seqnos[3] + 50})) == {}


# -- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False])
async def test_key_prefixes_on_either_side_give_the_same(server, monkeypatch, is_known):
    if not is_known:
        # A control that the server does not know, as an older one would see it.
        monkeypatch.setattr("clients.consumer.extensions.KEY_PREFIX", b"x_unheard_of")
    with server.connect() as kv:
        for n in range(30):
            kv.set(b"user:%d" % (n % 7), b"%d" % n)
            kv.set(b"cart:%d" % (n % 3), b"%d" % n)
    consumer = Consumer(
        server.address, until_now=True, validate=True, key_prefixes=["user:", b"cart:1"]
    )
    async with consumer:
        told = [event async for event in consumer]
    keys = {event.key for event in told if isinstance(event, Mutation)}
    assert keys == {b"user:%d" % n for n in range(7)} | {b"cart:1"}
    high = await asyncio.to_thread(_high_seqnos, server)
    reached = {vb: position.seqno for vb, position in consumer.checkpoint().items()}
    assert reached == high
    received = consumer.metrics.wire_bytes
    everything = Consumer(server.address, until_now=True)
    async with everything:
        async for _ in everything.batches():
            pass
    assert (received < everything.metrics.wire_bytes) == is_known


def _high_seqnos(server):
    with SyncKv(Consumer(server.address).address) as kv:
        return kv.get_all_vb_seqnos()


async def test_an_unknown_collection_is_told(server):
    with pytest.raises(UnknownCollectionError):
        await changes(server, collections=["none.such"])


# -- pause, lag, rate ----------------------------------------------------------------------------


async def test_paused_partition_says_nothing_and_goes_on_without_loss(server):
    keys = [f"p{n}" for n in range(40)]
    quiet = vbucket_of(b"p0")
    seen: list[tuple[str, bytes]] = []
    async with (
        KvClient.connect(server.address) as kv,
        Consumer(server.address, start="now", validate=True) as consumer,
    ):
        opened = asyncio.Event()
        wanted = asyncio.Event()

        async def follow():
            async for events in consumer.batches():
                seen.extend((e.key.decode(), e.value) for e in events if isinstance(e, Mutation))
                if len(consumer.checkpoint()) == 1024:
                    opened.set()
                if any(key == "end" for key, _ in seen):
                    wanted.set()

        task = asyncio.create_task(follow())
        await opened.wait()
        consumer.pause([quiet])
        assert consumer.paused == {quiet}
        await kv.set_many((key, b"1") for key in keys)
        await kv.set("end", b"1")
        await wanted.wait()
        assert "p0" not in dict(seen)
        consumer.resume([quiet])
        await until(lambda: "p0" in dict(seen))
        assert sorted(key for key, _ in seen) == sorted([*keys, "end"])
        # The whole consumer.
        seen.clear()
        wanted.clear()
        consumer.pause()
        await kv.set("p1", b"2")
        await asyncio.sleep(0.1)
        assert seen == []
        assert sum((await consumer.lag()).values()) >= 1
        assert consumer.gauges()["lag"] >= 1
        consumer.resume()
        await until(lambda: seen == [("p1", b"2")])
        await consumer.lag()
        await until(lambda: not consumer.gauges()["lag"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_rate_limit_hands_out_in_small_pieces(server):
    consumer = Consumer(server.address, until_now=True, events_per_s=20_000)
    sizes = []
    async with consumer:
        async for events in consumer.batches():
            sizes.append(len(events))
            assert len(consumer.checkpoint()) <= 1024
    assert max(sizes) <= 2000
    assert sum(sizes) == consumer.metrics.events > 2000
    # What it takes follows from the count, not from a clock: 20,000 a second.
    assert consumer._reader.pace._next_s > 0


async def test_who_leaves_an_iteration_goes_on_with_the_next_event(server):
    everything = await changes(server)
    seen = []
    async with Consumer(server.address, until_now=True, validate=True) as consumer:
        for count in (1, 2, 3, 5, 8, 10**9):
            wanted = len(seen) + count
            async for event in consumer:
                if isinstance(event, Mutation | Deletion):
                    seen.append((event.key, getattr(event, "value", None)))
                    if len(seen) == wanted:
                        break
    assert sorted(seen) == sorted(everything)


async def test_saving_by_itself_leaves_out_what_is_in_hand(server, tmp_path):
    store = CheckpointFile(tmp_path / "state")
    key = b"in-hand"
    vb_id = vbucket_of(key)
    with server.connect() as kv:
        kv.set(key, b"1")
    options = {"vbuckets": [vb_id], "store": store, "save_every_s": 3600.0}
    async with Consumer(server.address, **options) as consumer:
        async for event in consumer:
            if isinstance(event, Mutation) and event.key == key:
                break
    # It was not processed as far as anybody can know, so it comes again.
    again = Consumer(server.address, until_now=True, **options)
    async with again:
        keys = [event.key async for event in again if isinstance(event, Mutation)]
    assert key in keys
    assert consumer.metrics.saves == 1
    # This one came to its end: everything is saved.
    assert await changes(server, vbuckets=[vb_id], store=store) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"start": "later"}, 'start \'later\': use "beginning", "now"'),
        ({"start": 3}, "start 3"),
        ({"start": {1: b"raw"}}, "decode_position"),
        ({"on_rollback": "ask"}, "on_rollback 'ask': use 'undo', 'restart', 'fail'"),
        ({"store": "state"}, "CheckpointFile"),
        ({"save_every_s": 5}, "needs a store"),
        ({"vbuckets": [1], "group": Group(0, 2)}, "either vbuckets or group"),
        ({"key_prefixes": ["a", ""]}, "leave out key_prefixes"),
        ({"collections": []}, '"all" for all'),
        ({"events_per_s": 0}, "above 0"),
    ],
)
def test_impossible_options_are_refused_at_once_with_what_can_be(options, what):
    with pytest.raises(ValueError, match=re.escape(what)):
        Consumer("127.0.0.1:1", **options)


async def test_one_collection_needs_no_list(server):
    assert len(await changes(server, collections="_default._default")) >= 200


@pytest.mark.parametrize("count", [1, 3])
async def test_checkpoint_of_few_events_keeps_moment_of_start(server, count):
    """Also for partitions of which nothing, or only the opening, was handed out."""
    async with Consumer(server.address, start="now") as consumer:
        opened = []
        async for event in consumer:
            opened.append(event)
            if len(opened) == count:
                break
        checkpoint = consumer.checkpoint()
    for event in opened:
        assert checkpoint[event.vb_id].base_seqno == event.start_seqno
    assert sum(position.seqno for position in checkpoint.values()) > 0
    assert await changes(server, start=checkpoint) == []
