"""Saving: one at a time, whoever is cancelled, and errors of stores where they belong."""

from __future__ import annotations

import asyncio
import threading

import pytest

from clients import CheckpointError, MemoryCheckpoint, Position
from clients.consumer_metrics import ConsumerMetrics
from clients.consumer_save import Saver


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


async def test_a_save_whose_caller_was_cancelled_is_over_before_the_next_one():
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


async def test_a_store_that_writes_everything_keeps_partitions_that_are_not_followed_now():
    store = MemoryCheckpoint()
    store.save({1: at(5)[1], 2: at(9)[1]})
    saver = Saver(store, None, ConsumerMetrics(), "saves")
    await saver.load()
    await saver.save(at(6))
    assert {vb_id: position.seqno for vb_id, position in store.load().items()} == {1: 6, 2: 9}
