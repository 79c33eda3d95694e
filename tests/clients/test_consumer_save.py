"""Saving: one at a time, whoever is cancelled, and errors of stores where they belong."""

from __future__ import annotations

import asyncio
import threading

import pytest

from clients import (
    CheckpointError,
    CheckpointFile,
    Consumer,
    Group,
    MemoryCheckpoint,
    Position,
    SeqnoAdvanced,
    StreamOpened,
)
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.saving import Saver


class SlowStore:
    """A store whose saves take until they are let go."""

    def __init__(self):
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.under_way = self.at_once = 0
        self.saved, self.is_closed = [], False

    def load(self):
        return {}

    def save(self, checkpoint):
        assert not self.is_closed, "closed while it saves"
        self.under_way += 1
        self.at_once = max(self.at_once, self.under_way)
        self.begun.release()
        self.go.acquire(timeout=5)
        self.saved.append(checkpoint[1].seqno)
        self.under_way -= 1

    def close(self):
        assert not self.under_way, "closed while it saves"
        self.is_closed = True


def at(seqno):
    return {1: Position(((7, 0),), seqno, seqno, seqno)}


def seqnos(checkpoint):
    return {vb_id: position.seqno for vb_id, position in checkpoint.items()}


async def test_save_whose_caller_was_cancelled_is_over_before_next_one():
    store = SlowStore()
    saver = Saver(store, 3600.0, ConsumerMetrics(), "saves")
    first = asyncio.create_task(saver.save(at(5)))
    await asyncio.to_thread(store.begun.acquire)
    first.cancel()
    second = asyncio.create_task(saver.save_by_itself(at(6)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not first.done()
    store.go.release()
    store.go.release()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    await saver.close()
    assert (store.saved, store.at_once) == ([5, 6], 1)


async def test_an_error_of_the_system_is_one_of_the_checkpoint():
    class Full(SlowStore):
        def save(self, checkpoint):
            raise OSError(28, "No space left on device")

    metrics = ConsumerMetrics()
    saver = Saver(Full(), 3600.0, metrics, "saves")
    with pytest.raises(CheckpointError, match="No space left"):
        await saver.save(at(5))
    await saver.save_by_itself(at(5))
    assert (metrics.saves, metrics.saves_failed) == (0, 1)


async def test_whole_store_keeps_partitions_that_are_not_followed_now(tmp_path):
    store = CheckpointFile(tmp_path / "checkpoint")
    store.save({1: at(5)[1], 2: at(9)[1]})
    saver = Saver(store, None, ConsumerMetrics(), "saves")
    await saver.load()
    await saver.save(at(6))
    assert seqnos(store.load()) == {1: 6, 2: 9}


class Upserting:
    """A store of a user's own, that has only `save` and writes a row per partition."""

    def __init__(self):
        self.rows = {}

    def load(self):
        return dict(self.rows)

    def save(self, checkpoint):
        self.rows |= checkpoint


@pytest.mark.parametrize("make", [Upserting, MemoryCheckpoint])
async def test_shared_store_keeps_positions_of_other_members(make):
    store = make()
    store.save({1: at(5)[1], 2: at(9)[1]})
    one, other = (Saver(store, None, ConsumerMetrics(), name) for name in ("one", "other"))
    await one.load()
    await other.load()
    await other.save({2: at(20)[1]})
    await one.save(at(6))
    assert seqnos(store.load()) == {1: 6, 2: 20}


@pytest.mark.parametrize("part", [{"vbuckets": [1]}, {"group": Group(0, 2)}])
def test_part_of_partitions_needs_store_that_can_be_shared(part, tmp_path):
    with pytest.raises(ValueError, match=r"save_changes\(changed\)"):
        Consumer("127.0.0.1", store=Upserting(), **part)
    for store in (MemoryCheckpoint(), CheckpointFile(tmp_path / "checkpoint")):
        Consumer("127.0.0.1", store=store, **part)
    Consumer("127.0.0.1", store=Upserting())


class InServer(MemoryCheckpoint):
    """Its positions are documents of the server, as those of ServerCheckpoint are."""

    hidden_keys = (b"_x:",)


async def test_collections_new_to_a_position_are_saved_when_idle_too():
    store, before = InServer(), at(5)
    store.save(before)
    saver = Saver(store, None, ConsumerMetrics(), "saves")
    await saver.load()
    after = {1: before[1]._replace(collections=(8,))}
    saver.moved([StreamOpened(1, ((7, 0),), 5, 5)], before, after)
    await saver.save(after)
    assert store.load()[1].collections == (8,)
    # Where a stream is opened again and nothing is new, nothing is written.
    hidden = {1: after[1]._replace(seqno=9, snap_start=9, snap_end=9)}
    saver.moved([StreamOpened(1, ((7, 0),), 5, 5), SeqnoAdvanced(1, 9)], after, hidden)
    await saver.save(hidden)
    assert seqnos(store.load()) == {1: 5}
