"""The facade for programs without asyncio: what it counts as handed out, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from clients import MemoryCheckpoint, Mutation, Mutations, SyncConsumer
from clients.sync import LoopThread
from clients.testing import DcpServer
from vbucket.model.ids import vbucket_of


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("sync") / "data") as process:
        with process.connect() as kv:
            for n in range(100):
                kv.set(b"k%d" % n, b"1")
        yield process


@pytest.mark.parametrize("stop_after", [1, 7, 60])
def test_saving_in_the_middle_of_a_batch_loses_nothing(server, stop_after):
    store = MemoryCheckpoint()
    seen = []
    with SyncConsumer(server.address, store=store, validate=True) as consumer:
        for event in consumer:
            if isinstance(event, Mutation):
                seen.append(event.key)
                if len(seen) == stop_after:
                    break
        consumer.save()
    with SyncConsumer(server.address, store=store, until_now=True) as consumer:
        seen += [event.key for event in consumer if isinstance(event, Mutation)]
    assert sorted(seen) == sorted(b"k%d" % n for n in range(100))


def test_changes_are_mutations_deletions_and_rollbacks(server):
    with SyncConsumer(server.address, until_now=True) as consumer:
        changes = list(consumer.changes())
    assert sorted(change.key for change in changes) == sorted(b"k%d" % n for n in range(100))
    with SyncConsumer(server.address, until_now=True) as consumer:
        assert len(list(consumer.events())) > len(changes) + 1024


def test_who_leaves_an_iteration_goes_on_with_the_next_event(server):
    seen = []
    with SyncConsumer(server.address, until_now=True, validate=True) as consumer:
        for count in (1, 2, 5, 10**9):
            wanted = len(seen) + count
            for event in consumer:
                if isinstance(event, Mutation):
                    seen.append(event.key)
                    if len(seen) == wanted:
                        break
    assert sorted(seen) == sorted(b"k%d" % n for n in range(100))


def test_lazy_batches_have_each_document_once(server):
    held = {}
    with SyncConsumer(server.address, until_now=True) as consumer:
        for items in consumer.lazy_batches():
            for item in items:
                if isinstance(item, Mutations):
                    assert not held.keys() & set(item.keys())
                    held.update(item.items())
                elif isinstance(item, Mutation):
                    assert item.key not in held
                    held[item.key] = item.value
    assert held == {b"k%d" % n: b"1" for n in range(100)}


def test_stopping_the_loop_ends_who_waits_for_it():
    loop_thread, ended = LoopThread("stops"), []

    def wait():
        try:
            loop_thread.call(asyncio.sleep(3600))
        except CancelledError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not loop_thread.call(_others()):
        pass
    loop_thread.stop()
    waiting.join(10)
    assert len(ended) == 1
    with pytest.raises(CancelledError):
        loop_thread.call(asyncio.sleep(0))


async def _others():
    """Return how many other tasks the loop has."""
    return len(asyncio.all_tasks()) - 1


def test_the_loops_own_thread_cannot_wait_for_itself(server):
    """A function of the user's runs there: it is told so, and nothing stands still."""
    key = b"k1"
    asked = []

    def decide(_event):
        for call in (consumer.checkpoint, consumer.close):
            try:
                call()
            except RuntimeError as error:
                asked.append(str(error))
        return "restart"

    values = []
    with SyncConsumer(
        server.address, vbuckets=[vbucket_of(key)], on_rollback=decide, validate=True
    ) as consumer:
        for event in consumer:
            if isinstance(event, Mutation) and event.key == key:
                values.append(event.value)
                if len(values) == 1:
                    server.branch(vbucket_of(key), 0)
                    with server.connect() as kv:
                        kv.set(key, b"2")
            if values and values[-1] == b"2":
                break
    assert len(asked) == 2
    assert all("cannot wait for itself" in error for error in asked)
    with server.connect() as kv:  # as the other tests know it
        for n in range(100):
            kv.set(b"k%d" % n, b"1")


def test_threads_that_iterate_at_once_are_told(server):
    """Each would take the other's batch for processed."""
    told = []

    def follow():
        try:
            for _ in consumer.batches():
                pass
        except RuntimeError as error:
            told.append(str(error))

    with SyncConsumer(server.address, start="now") as consumer:
        older = threading.Thread(target=follow)
        older.start()
        while consumer.consumer._reader._iteration is None:
            pass
        assert next(consumer.batches())
        older.join(20)
        assert not older.is_alive()
    assert len(told) == 1
    assert "one at a time" in told[0]


def test_outside_of_its_block_it_says_so(server):
    consumer = SyncConsumer(server.address)
    for call in (consumer.save, consumer.batches, consumer.lag, lambda: list(consumer)):
        with pytest.raises(RuntimeError, match="inside of `with"):
            call()
