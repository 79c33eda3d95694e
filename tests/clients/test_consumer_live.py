"""Consumer against a live server: resume, rollback, kill, slow users. Every event is validated."""

from __future__ import annotations

import asyncio

import pytest

from clients.checkpoint.checkpoint import CheckpointFile, MemoryCheckpoint
from clients.cli.admin_api import admin_of
from clients.cli.dcpctl import Target
from clients.cli.login import Given
from clients.consumer.consumer import Consumer
from clients.errors import AuthenticationError, ConnectError
from clients.event import Deletion, Mutation, Rollback
from clients.kv.client import KvClient
from clients.streaming.mutations import Mutations
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of


@pytest.fixture
def server(tmp_path):
    with DcpdProcess(tmp_path / "data") as process:
        yield process


async def consume(consumer):
    kinds = Mutation | Deletion | Rollback
    async with consumer:
        return [event async for event in consumer if isinstance(event, kinds)]


def branch(server, vb_id, at_seqno):
    target = Target(Given(server.address))
    path = f"/api/v1/vbuckets/{vb_id}/branch"
    return admin_of(target, vb_id=vb_id).request("POST", path, {"at": at_seqno})


async def test_until_now_sees_all_and_resumes_without_gap_or_duplicate(server, tmp_path):
    store = CheckpointFile(tmp_path / "state")
    async with KvClient.connect(server.address) as kv:
        await kv.set_many((f"k{n}", b"1") for n in range(500))
        first = Consumer(server.address, until_now=True, store=store, validate=True)
        assert len(await consume(first)) == 500
        await first.save()
        await kv.set_many((f"k{n}", b"2") for n in range(100))
        await kv.delete("k499")
        second = Consumer(server.address, until_now=True, store=store, validate=True)
        changes = await consume(second)
        assert len(changes) == 101
        assert sum(isinstance(change, Deletion) for change in changes) == 1
        await second.save()
        assert await consume(Consumer(server.address, until_now=True, store=store)) == []


async def test_changes_are_what_happened_to_documents(server):
    """Streams that open and end, snapshots and seqnos are events, and no changes."""
    store = MemoryCheckpoint()
    async with KvClient.connect(server.address) as kv:
        await kv.set("a", b"1")
        await kv.set("a", b"2")
        await kv.delete("a")
        await kv.set("b", b"1")
        async with Consumer(server.address, until_now=True) as consumer:
            assert {type(event) for event in [event async for event in consumer.events()]} > {
                Mutation,
                Deletion,
            }
        async with Consumer(server.address, until_now=True, store=store) as consumer:
            async for change in consumer.changes():
                assert isinstance(change, Mutation | Deletion)
                position = consumer.checkpoint()[change.vb_id]
                assert position.seqno == change.seqno, "the current change counts"
            await consumer.save()
        await asyncio.to_thread(branch, server, vbucket_of(b"a"), 1)
        async with Consumer(server.address, until_now=True, store=store) as consumer:
            (rollback, *again) = [change async for change in consumer.changes()]
        assert isinstance(rollback, Rollback)
        assert rollback.vb_id == vbucket_of(b"a")
        assert [(change.key, change.value) for change in again] in ([], [(b"a", b"1")])


async def test_lazy_batches_have_same_as_events_and_resume_without_gap(server, tmp_path):
    store = CheckpointFile(tmp_path / "state")
    async with KvClient.connect(server.address) as kv:
        await kv.set_many((f"k{n}", b"%d" % n * (n % 7)) for n in range(20_000))
        await kv.delete("k77")
    changes = await consume(Consumer(server.address, until_now=True))
    wanted = {change.key: getattr(change, "value", None) for change in changes}
    held, runs, seen, is_done = {}, 0, 0, False
    while not is_done:  # each round takes some batches, saves, and closes
        async with Consumer(server.address, until_now=True, store=store) as consumer:
            before, is_done = seen, True
            async for items in consumer.lazy_batches():
                for item in items:
                    match item:
                        case Mutations():
                            held.update(item.items())
                            runs, seen = runs + 1, seen + len(item)
                        case Mutation() | Deletion():
                            held[item.key] = getattr(item, "value", None)
                            seen += 1
                if seen > before + 4000:
                    is_done = False
                    break
            await consumer.save()
    assert held == wanted
    assert seen == len(changes), "each change once"
    assert runs > 500


async def test_checkpoint_covers_the_event_in_hand(server):
    async with KvClient.connect(server.address) as kv:
        await kv.set_many((f"k{n}", b"1") for n in range(300))
    store, seen = MemoryCheckpoint(), []
    while True:
        taken = 0
        async with Consumer(server.address, until_now=True, store=store, validate=True) as consumer:
            async for event in consumer:
                if isinstance(event, Mutation):
                    seen.append(event.key)
                    taken += 1
                    if taken == 37:
                        break
            await consumer.save()
        if taken < 37:
            break
    assert len(seen) == 300
    assert len(set(seen)) == 300


async def test_from_now_shows_only_what_comes(server):
    async with KvClient.connect(server.address) as kv:
        await kv.set("old", b"1")
        async with Consumer(server.address, start="now", validate=True) as consumer:
            batches = consumer.batches()
            opened = 0
            while opened < 1024:
                opened += len(await anext(batches))
            await kv.set("new", b"1")
            while True:
                changes = [e for e in await anext(batches) if isinstance(e, Mutation)]
                if changes:
                    break
            assert [change.key for change in changes] == [b"new"]


@pytest.mark.parametrize("strategy", ["undo", "restart"])
async def test_rollback_is_told_and_recovered_from(server, strategy):
    vb_id = vbucket_of(b"a")
    async with KvClient.connect(server.address) as kv:
        for n in range(6):
            await kv.set("a", b"%d" % n)
        consumer = Consumer(server.address, vbuckets=[vb_id], validate=True, on_rollback=strategy)
        rollbacks = []
        async with consumer:
            async for event in consumer:
                if isinstance(event, Mutation) and event.value == b"5" and not rollbacks:
                    await kv.set("a", b"6")
                if isinstance(event, Mutation) and event.value == b"6":
                    await asyncio.to_thread(branch, server, vb_id, 6)
                if isinstance(event, Rollback):
                    rollbacks.append(event)
                    await kv.set("a", b"new")
                if isinstance(event, Mutation) and event.value == b"new":
                    break
        (rollback,) = rollbacks
        assert (rollback.vb_id, rollback.server_seqno, rollback.from_seqno) == (vb_id, 6, 7)
        assert rollback.to_seqno == (6 if strategy == "undo" else 0)
        assert consumer.validator.compare({b"a": b"new"}) == []


async def test_history_with_previous_values_is_whole_and_resumes(server, tmp_path):
    store = CheckpointFile(tmp_path / "state")
    options = {"store": store, "history": True, "previous_values": True, "validate": True}
    async with KvClient.connect(server.address) as kv:
        for n in range(3):
            await kv.set("a", b"%d" % n)
        consumer = Consumer(server.address, until_now=True, **options)
        first = await consume(consumer)
        await consumer.save()
        await kv.set("a", b"3")
        await kv.delete("a")
    second = await consume(Consumer(server.address, until_now=True, **options))
    assert [(e.value, e.previous_value) for e in first] == [
        (b"0", None), (b"1", b"0"), (b"2", b"1"),
    ]  # fmt: skip
    assert [event.previous_value for event in second] == [b"2", b"3"]


async def test_killed_server_is_waited_for(server):
    async with Consumer(server.address, validate=True) as consumer:
        seen = {}

        async def follow():
            async for event in consumer:
                if isinstance(event, Mutation):
                    seen[event.key] = event.value
                    if len(seen) == 2001 and set(seen.values()) == {b"1"}:
                        return

        task = asyncio.create_task(follow())
        for round_number in range(2):
            async with KvClient.connect(server.address) as kv:
                await kv.set_many((f"k{n}", b"%d" % round_number) for n in range(2000))
            await asyncio.to_thread(server.restart_after_kill)
        async with KvClient.connect(server.address) as kv:
            await kv.set("last", b"1")
            await task
            documents = await kv.get_many([*(f"k{n}" for n in range(2000)), "last"])
        assert seen == {key: document.value for key, document in documents.items()}
        assert consumer.validator.compare(seen) == []


async def test_small_window_goes_through(server):
    async with KvClient.connect(server.address) as kv:
        await kv.set_many((f"k{n}", b"x" * 200) for n in range(3000))
        await kv.set("big", b"y" * 300_000)
    consumer = Consumer(server.address, until_now=True, buffer_bytes=1000, validate=True)
    assert len(await consume(consumer)) == 3001


async def test_partition_that_is_not_there(server):
    with pytest.raises(ValueError, match="no partition 1024"):
        await consume(Consumer(server.address, vbuckets=[1024]))


async def test_wrong_password_and_wrong_port(server, unused_tcp_port):
    with pytest.raises(AuthenticationError):
        await consume(Consumer(f"dcpd://guest:wrong@{server.address}"))
    with pytest.raises(ConnectError):
        await consume(Consumer(f"127.0.0.1:{unused_tcp_port}"))


async def test_server_that_does_not_come_back_is_given_up(server):
    async with Consumer(server.address, give_up_after_s=0.0) as consumer:
        batches = consumer.batches()
        await anext(batches)
        await asyncio.to_thread(server.kill)
        with pytest.raises(ConnectError):
            async for _ in batches:
                pass
