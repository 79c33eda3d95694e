"""What is handed out: to one iteration at a time; batches go back, rollbacks are settled once."""

from __future__ import annotations

import asyncio

import pytest
from test_consumer_steering import until

from clients.consumer.batch_reader import BatchReader
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.saving import Saver
from clients.consumer.streams import Batch
from clients.errors import DcpdError, StreamViolationError
from clients.event import Mutation, Rollback, SnapshotEnd, SnapshotStart, StreamOpened
from clients.position import Position
from clients.streaming.mutations import Mutations
from clients.validator import StreamValidator
from dcp.wire.frame import pack_request
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode


class Streams:
    """In the place of a session and of who looks after the streams."""

    def __init__(self, *, asks=False):
        self.asks, self.is_finished = asks, False
        self.given_back, self.settled = [], []
        self.decided = asyncio.Event()
        self.decided.set()

    def done_with(self, batch):
        self.given_back.append(batch)

    def handed_out(self, piece):
        """Nothing is held."""

    async def settle(self, batch, at):
        self.settled.append(batch.items[at].to_seqno)
        await self.decided.wait()
        batch.items[at] = Rollback(1, 0, 5, 9, "decided")


def mutation(seqno):
    return Mutation(1, b"k", b"v", seqno, 1, 1, 0, 0)


def mutations(*seqnos):
    """Mutations that are not decoded, with the content of `mutation`."""
    data = b"".join(
        pack_request(
            Opcode.DCP_MUTATION, vb_id=1, key=b"k", value=b"v", cas=1,
            extras=MUTATION_EXTRAS.pack(seqno, 1, 0, 0, 0, 0, 0),
        )
        for seqno in seqnos
    )  # fmt: skip
    return Mutations(1, seqnos[0], seqnos[-1], len(seqnos), (data, 0, 0))


def batch_of(*events):
    last = events[-1]
    names = ("to_seqno", "seqno", "last_seqno", "end_seqno")
    seqno = next(getattr(last, name) for name in names if hasattr(last, name))
    return Batch(list(events), {1: Position(((7, 0),), seqno, 0, 99)}, 10, {1: (0, 99)})


def reader_of(streams, *batches, events_per_s=None, validator=None):
    metrics = ConsumerMetrics()
    reader = BatchReader(Saver(None, None, metrics, "reader"), metrics, validator, events_per_s)
    reader.is_open = True
    for batch in batches:
        reader.put(streams, batch)
    return reader


async def test_of_two_iterations_newer_one_counts_and_no_batch_is_lost():
    streams = Streams()
    batches = [batch_of(mutation(1)), batch_of(mutation(2)), batch_of(mutation(3))]
    reader = reader_of(streams, batches[0])
    older = reader.batches(streams)
    assert await anext(older) == batches[0].events
    waiting = asyncio.create_task(anext(older))
    await until(lambda: streams.given_back == batches[:1])
    newer = reader.batches(streams)
    reader.put(streams, batches[1])
    assert await anext(newer) == batches[1].events
    with pytest.raises(RuntimeError, match="one at a time"):
        await waiting
    reader.put(streams, batches[2])
    assert await anext(newer) == batches[2].events
    assert streams.given_back == batches[:2]
    streams.is_finished = True
    with pytest.raises(StopAsyncIteration):
        await anext(newer)
    assert streams.given_back == batches


async def test_an_older_iteration_that_is_taken_up_again_is_refused():
    streams = Streams()
    reader = reader_of(streams, batch_of(mutation(1)), batch_of(mutation(2)))
    older, newer = reader.batches(streams), reader.batches(streams)
    await anext(older)
    (event,) = await anext(newer)
    assert event.seqno == 2
    with pytest.raises(RuntimeError, match="one at a time"):
        await anext(older)
    assert reader.checkpoint()[1].seqno == 2
    assert reader.processed()[1].seqno == 1


async def test_rollback_is_done_once_although_its_wait_was_cancelled():
    """First while the user decides, then after that and before it was handed out."""
    streams = Streams(asks=True)
    batch = batch_of(mutation(9), Rollback(1, 5, 5, 9, "asked"), mutation(6))
    reader = reader_of(streams, batch, events_per_s=1)
    reader.pace._events_per_s = 0.001  # for the second piece
    assert await anext(reader.batches(streams)) == batch.events[:1]
    streams.decided.clear()
    waiting = asyncio.create_task(anext(reader.batches(streams)))
    await until(lambda: streams.settled)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    streams.decided.set()
    waiting = asyncio.create_task(anext(reader.batches(streams)))
    await until(lambda: batch.events[1].reason == "decided")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert streams.settled == [5, 5]
    reader.pace = None
    told = await anext(reader.batches(streams))
    assert (told[0].reason, streams.settled) == ("decided", [5, 5])


async def test_what_was_handed_out_is_processed_when_more_is_asked_for():
    streams = Streams()
    reader = reader_of(streams, batch_of(mutation(1), mutation(2)), batch_of(mutation(3)))
    reading = reader.batches(streams)
    piece = await anext(reading)
    assert (reader.processed(), streams.given_back) == ({}, [])
    assert reader.checkpoint()[1].seqno == 2
    for count, event in enumerate(reader.one_by_one(piece)):
        assert reader.checkpoint()[1].seqno == event.seqno
        assert reader.processed().get(1, Position()).seqno == count
    await anext(reading)
    assert reader.processed()[1].seqno == 2
    assert len(streams.given_back) == 1


async def test_what_comes_after_a_failure_is_not_handed_out():
    """What failed may have left a hole, and no position may be told behind it."""
    streams = Streams()
    reader = reader_of(streams, batch_of(mutation(1)))
    reader.failure = DcpdError("a stream broke the rules")
    reader.put(streams, batch_of(mutation(9)))
    reading = reader.batches(streams)
    (event,) = await anext(reading)
    assert event.seqno == 1
    with pytest.raises(DcpdError, match="broke the rules"):
        await anext(reading)
    assert reader.processed()[1].seqno == 1


async def test_what_breaks_rules_is_not_handed_out_whoever_asks_again():
    streams = Streams()
    batch = batch_of(mutation(1), mutation(2))  # of no stream and in no snapshot
    reader = reader_of(streams, batch, batch_of(mutation(3)), validator=StreamValidator())
    for _ in range(2):
        with pytest.raises(StreamViolationError):
            await anext(reader.batches(streams))
        assert (reader.checkpoint(), reader.processed(), streams.given_back) == ({}, {}, [])


async def test_lazy_batches_have_mutations_that_are_not_decoded():
    streams = Streams()
    held = mutations(1, 2, 4)
    reader = reader_of(streams, batch_of(held, mutation(6)), batch_of(mutations(7, 8)))
    reading = reader.lazy_batches(streams)
    assert await anext(reading) == [held, mutation(6)]
    assert (reader._metrics.events, reader._metrics.changes) == (4, 4)
    assert reader.checkpoint()[1].seqno == 6
    assert reader.processed() == {}
    (rest,) = await anext(reading)
    assert reader.processed()[1].seqno == 6
    assert list(rest) == [mutation(7), mutation(8)]
    assert (reader._metrics.events, reader._metrics.changes) == (6, 6)


async def test_batches_have_the_same_decoded():
    streams = Streams()
    reader = reader_of(streams, batch_of(mutations(1, 2, 4), mutation(6)))
    piece = await anext(reader.batches(streams))
    assert piece == [mutation(seqno) for seqno in (1, 2, 4, 6)]
    for event in reader.one_by_one(piece):
        assert reader.checkpoint()[1].seqno == event.seqno
    assert (reader._metrics.events, reader._metrics.changes) == (4, 4)


async def test_an_iteration_of_another_kind_gets_the_rest_of_a_batch():
    """Mutations that were returned and mutations that were not, around a rollback to decide."""
    streams = Streams(asks=True)
    batch = batch_of(mutations(1, 2, 3), Rollback(1, 2, 2, 3, "asked"), mutations(3, 4, 5))
    reader = reader_of(streams, batch)
    (held,) = await anext(reader.lazy_batches(streams))
    assert [event.seqno for event in held] == [1, 2, 3]
    assert reader.checkpoint()[1].seqno == 3
    rest = await anext(reader.batches(streams))
    assert rest[0].reason == "decided"
    assert rest[1:] == [mutation(3), mutation(4), mutation(5)]
    assert reader._metrics.changes == 6
    assert reader.checkpoint()[1].seqno == 5


async def test_mutations_taken_back_are_returned_again_decoded():
    streams = Streams()
    reader = reader_of(streams, batch_of(mutation(1), mutations(2, 3), mutation(4)))
    await anext(reader.lazy_batches(streams))
    reader.handed_out(1)
    assert reader.checkpoint()[1].seqno == 1
    assert [event.seqno for event in await anext(reader.batches(streams))] == [2, 3, 4]
    assert reader._metrics.changes == 4, "each counts once"


async def test_a_rate_limit_gets_events():
    streams = Streams()
    batch = batch_of(
        StreamOpened(1, ((7, 0),)), SnapshotStart(1, 1, 1, 1), mutations(1), SnapshotEnd(1, 1)
    )
    reader = reader_of(streams, batch, events_per_s=1e6)
    told = await anext(reader.lazy_batches(streams))
    assert told[2:3] == [mutation(1)]


async def test_mutations_that_are_not_decoded_are_validated():
    streams, validator = Streams(), StreamValidator()
    validator.begin({1: Position(((7, 0),), 0, 0, 0)})
    batch = batch_of(StreamOpened(1, ((7, 0),)), SnapshotStart(1, 1, 3, 0x21), mutations(1, 2))
    batch.items.append(mutations(2))
    reader = reader_of(streams, batch, validator=validator)
    with pytest.raises(StreamViolationError, match="seqno 2 after seqno 2"):
        await anext(reader.lazy_batches(streams))
    assert validator.event_count == 5, "the one that breaks a rule, too"


async def test_a_decided_position_counts_within_a_batch():
    """Whoever decides on a Position has another state than the one that is gone back to."""
    streams = Streams(asks=True)
    decided = Position(((8, 0),), 7, 6, 9)

    async def settle(batch, at):
        vb_id = batch.items[at].vb_id
        batch.positions[vb_id] = decided
        batch.items[at] = Rollback(vb_id, 7, 0, 99, "decided")

    streams.settle = settle
    rollbacks = [Rollback(vb_id, 0, 0, 99, "other server") for vb_id in (1, 2)]
    batch = Batch(rollbacks, dict.fromkeys((1, 2), Position()), 10, {})
    reader = reader_of(streams, batch)
    reader.delivered.update(dict.fromkeys((1, 2), Position(((7, 0),), 99, 99, 99)))
    pieces = reader.batches(streams)
    for vb_id in (1, 2):
        events = await anext(pieces)
        assert [event.vb_id for event in events] == [vb_id]
        assert reader.delivery(events).positions == {vb_id: decided}
        assert reader.checkpoint()[vb_id] == decided
