"""Nothing stops silently: for each way in which a stream can stand still the reaction, the line in
the log and the metric."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from test_consumer_steering import until

from clients import (
    Consumer,
    DcpdError,
    HistoryBranchedError,
    KvClient,
    Mirror,
    Mutation,
    Rollback,
    StreamFailed,
    StreamOpened,
    export_prometheus,
)
from clients.consumer.counters import COUNTERS, GAUGES
from clients.consumer.streams import PATIENCE, PartitionStream, StallWatch
from clients.position import Position
from clients.testing import DcpServer
from dcp.wire.message import EndReason
from dcp.wire.status import Status
from vbucket.model.ids import vbucket_of

KEY = b"stops"
VB = vbucket_of(KEY)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("stops") / "data") as process:
        yield process


class Following:
    """A consumer of one partition in a task of its own, and what it has said."""

    def __init__(self, server, **options):
        self.consumer = Consumer(
            server.address, **{"vbuckets": [VB], "validate": True, "name": "stops"} | options
        )
        self.events = []
        self.error = None

    async def __aenter__(self):
        await self.consumer.open()
        self.task = asyncio.create_task(self.follow())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.consumer.close()

    async def follow(self):
        try:
            async for event in self.consumer:
                self.events.append(event)
        except HistoryBranchedError as error:
            self.error = error

    @property
    def values(self):
        return [event.value for event in self.events if isinstance(event, Mutation)]

    @property
    def has_come_back(self):
        """Whether the new history came after a rollback."""
        kinds = [type(event) for event in self.events]
        after = self.events[kinds.index(Rollback) :] if Rollback in kinds else []
        return b"new history" in [e.value for e in after if isinstance(e, Mutation)]

    async def sees(self, value):
        await until(lambda: value in self.values)


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", [reason.name.lower() for reason in EndReason if reason != EndReason.FILTER_EMPTY]
)
async def test_a_stream_that_ends_for_whatever_reason_goes_on(server, reason, caplog):
    caplog.set_level(logging.INFO, "dcpd.consumer")
    value = reason.encode()
    async with KvClient.connect(server.address) as kv, Following(server) as following:
        await kv.set(KEY, value)
        await following.sees(value)
        assert await asyncio.to_thread(server.close_streams, reason=reason, vb=VB) == 1
        await kv.set(KEY, value + b" again")
        await following.sees(value + b" again")
    assert following.consumer.metrics.stream_ends_by_reason == {EndReason[reason.upper()]: 1}
    assert following.consumer.metrics.stream_ends == 1
    words = reason.replace("_", " ")
    assert f"partition {VB}: stream_end: {words} at seqno" in caplog.text


async def test_a_filter_that_is_empty_is_told_and_is_the_end(server, caplog):
    async with Following(server) as following:
        await until(lambda: following.events)
        assert await asyncio.to_thread(server.close_streams, reason="filter_empty", vb=VB) == 1
        await asyncio.wait_for(following.task, 10)
    assert following.consumer.metrics.stream_ends_by_reason == {EndReason.FILTER_EMPTY: 1}
    assert "filter empty" in caplog.text
    assert "for good" in caplog.text


# -- ahead, rollbacks ----------------------------------------------------------------------------


async def test_checkpoint_ahead_of_server_goes_back_to_what_both_have(server, caplog):
    """ERANGE, as a server gives it that was set up anew from an older copy."""
    async with KvClient.connect(server.address) as kv:
        await kv.set(KEY, b"there")
        high = (await kv.get_all_vb_seqnos())[VB]
        log = tuple(await kv.failover_log(VB))
    position = Position(log, high + 7, high + 7, high + 7, ((0, high), (high + 7, high + 7)))
    server.fault(opcode="DCP_STREAM_REQ", vb=VB, status="ERANGE", count=1)
    try:
        async with Following(server, start={VB: position}) as following:
            await until(lambda: any(isinstance(event, Rollback) for event in following.events))
            (rollback,) = [e for e in following.events if isinstance(e, Rollback)]
            assert (rollback.from_seqno, rollback.to_seqno) == (high + 7, high)
            assert "ERANGE" in rollback.reason
            async with KvClient.connect(server.address) as kv:
                await kv.set(KEY, b"goes on")
            await following.sees(b"goes on")
    finally:
        server.clear_faults()
    metrics = following.consumer.metrics
    assert (metrics.checkpoints_ahead, metrics.rollbacks) == (1, 1)
    assert f"partition {VB}: ahead: ERANGE at seqno {high + 7}" in caplog.text


async def branched(server, following):
    """Write three values, branch away the last one, write another; return seqnos."""
    async with KvClient.connect(server.address) as kv:
        seqnos = [(await kv.set(KEY, b"b%d" % n)).seqno for n in range(3)]
        await following.sees(b"b2")
        await asyncio.to_thread(server.branch, VB, seqnos[2] - 1)
        await kv.set(KEY, b"new history")
    return seqnos


async def test_strategy_fail_stops_before_anything_moved(server, caplog):
    caplog.set_level(logging.INFO, "dcpd.consumer")  # the program gets it as an error
    async with Following(server, on_rollback="fail") as following:
        seqnos = await branched(server, following)
        await asyncio.wait_for(following.task, 10)
        assert following.error.to_seqno == seqnos[1]
        assert "history branched" in str(following.error)
        assert following.consumer.checkpoint()[VB].seqno == seqnos[2]
        assert not any(isinstance(event, Rollback) for event in following.events)
    assert following.consumer.metrics.rollbacks == 1
    assert "rollback" in caplog.text


@pytest.mark.parametrize("strategy", ["restart", "undo"])
async def test_strategies_by_name(server, strategy):
    async with Following(server, on_rollback=strategy) as following:
        seqnos = await branched(server, following)
        await until(lambda: following.has_come_back)
    (told,) = [event for event in following.events if isinstance(event, Rollback)]
    assert told.to_seqno == (seqnos[1] if strategy == "undo" else 0)
    anew = following.events[following.events.index(told) :]
    values = [event.value for event in anew if isinstance(event, Mutation)]
    assert values[-1] == b"new history"
    assert following.consumer.validator.documents_of(VB)[KEY].value == b"new history"


@pytest.mark.parametrize(
    ("choice", "to"),
    [("undo", "state"), ("restart", "zero"), (1_000_000, "state"), ("lower", "lower")],
)
async def test_the_user_is_asked_when_all_before_is_processed(server, choice, to):
    asked = []
    following: Following

    async def decide(event):
        asked.append((event, following.consumer.checkpoint()[VB].seqno))
        await asyncio.sleep(0)
        return event.to_seqno - 1 if choice == "lower" else choice

    # With a rate limit batches are cut at other places, too.
    following = Following(server, on_rollback=decide, events_per_s=2000)
    async with following:
        seqnos = await branched(server, following)
        await until(lambda: following.has_come_back)
    ((event, stood_at),) = asked
    assert (event.from_seqno, stood_at) == (seqnos[2], seqnos[2])
    (told,) = [event for event in following.events if isinstance(event, Rollback)]
    goal = {"state": seqnos[1], "zero": 0, "lower": seqnos[1] - 1}[to]
    assert told.to_seqno <= goal
    assert to == "lower" or told.to_seqno == goal
    if to == "zero":
        assert "chose seqno 0" in told.reason


async def test_a_connection_that_breaks_while_the_user_decides(server):
    answer = asyncio.get_running_loop().create_future()

    async def decide(_event):
        return await answer

    async with Following(server, on_rollback=decide) as following:
        await branched(server, following)
        await until(lambda: following.consumer.metrics.rollbacks)
        lost = following.consumer.metrics.connections_lost
        for session in following.consumer._placement.sessions.values():
            session.link._transport.abort()
        await until(lambda: following.consumer.metrics.connections_lost > lost)
        assert not following.has_come_back
        answer.set_result("restart")
        await until(lambda: following.has_come_back)
        (told,) = [event for event in following.events if isinstance(event, Rollback)]
        assert told.to_seqno == 0


# -- refusals ----------------------------------------------------------------------------------


async def test_stream_refused_for_good_is_told_and_others_go_on(server, caplog):
    server.fault(opcode="DCP_STREAM_REQ", vb=VB, status="EACCESS", count=1)
    try:
        async with Following(server, vbuckets=[VB, VB + 1], until_now=True) as following:
            await asyncio.wait_for(following.task, 20)
            (failed,) = [e for e in following.events if isinstance(e, StreamFailed)]
            assert (failed.vb_id, failed.status) == (VB, Status.EACCESS)
            assert failed.hint
            (opened,) = [e for e in following.events if isinstance(e, StreamOpened)]
            assert opened.vb_id == VB + 1
        assert following.consumer.metrics.streams_failed == 1
        assert f"partition {VB}: stream_failed: " in caplog.text
        server.fault(opcode="DCP_STREAM_REQ", vb=VB, status="EACCESS", count=1)
        with pytest.raises(DcpdError, match="stream request from seqno 0"):
            await Mirror(server.address, vbuckets=[VB]).open()
        server.fault(opcode="DCP_STREAM_REQ", vb=VB, status="EACCESS", count=1)
        async with Consumer(server.address, vbuckets=[VB]) as consumer:
            with pytest.raises(DcpdError, match="stream request from seqno 0") as refused:
                _ = [change async for change in consumer.changes()]
        assert refused.value.status == Status.EACCESS
    finally:
        server.clear_faults()


async def test_stream_that_is_refused_for_moment_is_asked_for_again(server, caplog):
    caplog.set_level(logging.INFO, "dcpd.consumer")
    server.fault(opcode="DCP_STREAM_REQ", vb=VB, status="ETMPFAIL", count=2)
    try:
        async with Following(server) as following:
            await until(lambda: any(isinstance(e, StreamOpened) for e in following.events))
    finally:
        server.clear_faults()
    assert following.consumer.metrics.streams_retried == 2
    assert caplog.text.count(f"partition {VB}: retry: ") == 2
    assert not any(isinstance(e, StreamFailed) for e in following.events)


# -- silence -------------------------------------------------------------------------------------


async def test_a_stalled_partition_is_asked_for_again(server, caplog):
    async with (
        KvClient.connect(server.address) as kv,
        Following(server, stall_s=0.1) as following,
    ):
        await kv.set(KEY, b"moving")
        await following.sees(b"moving")
        assert await asyncio.to_thread(server.stall_streams, vb=VB) == 1
        await kv.set(KEY, b"stalled")
        await following.sees(b"stalled")
    assert following.consumer.metrics.stalls >= 1
    assert f"partition {VB}: stall: no progress at seqno" in caplog.text


async def test_a_request_without_an_answer_is_another_connection(server, caplog):
    server.fault(opcode="DCP_STREAM_REQ", vb=VB, delay_ms=60_000, count=1)
    try:
        async with (
            KvClient.connect(server.address) as kv,
            Following(server, stall_s=0.1) as following,
        ):
            await kv.set(KEY, b"answered")
            await following.sees(b"answered")
    finally:
        server.clear_faults()
    metrics = following.consumer.metrics
    assert metrics.silent_connections >= 1
    assert metrics.connections >= 2
    assert "was not answered within" in caplog.text


async def test_a_partition_that_moves_is_looked_for(server, caplog):
    caplog.set_level(logging.INFO, "dcpd.consumer")
    async with KvClient.connect(server.address) as kv, Following(server) as following:
        await kv.set(KEY, b"here")
        await following.sees(b"here")
        await asyncio.to_thread(server.set_state, VB, "dead")
        await until(lambda: following.consumer.metrics.streams_moved >= 2)
        await asyncio.to_thread(server.set_state, VB, "active")
        await kv.set(KEY, b"back")
        await following.sees(b"back")
    assert f"partition {VB}: moved: no longer on 127.0.0.1" in caplog.text


async def test_a_server_that_is_gone_is_told_until_it_is_back(tmp_path, caplog):
    with DcpServer(tmp_path / "data") as server:
        async with KvClient.connect(server.address) as kv, Following(server) as following:
            await kv.set(KEY, b"1")
            await following.sees(b"1")
            await asyncio.to_thread(server.kill)
            await until(lambda: "have no stream" in caplog.text)
            assert following.consumer.gauges()["partitions_unplaced"] == 1
            await asyncio.to_thread(server.start)
            await until(lambda: following.consumer.metrics.connections == 2)
            assert following.consumer.gauges()["partitions_unplaced"] == 0
        assert following.consumer.metrics.connections_lost == 1


def stream_at(vb_id, seqno):
    return PartitionStream(vb_id, Position(((7, 0),), seqno, seqno, seqno) if seqno else Position())


def test_only_what_is_behind_and_does_not_move_stalls():
    watch = StallWatch()
    moving, idle, stuck = stream_at(1, 5), stream_at(2, 9), stream_at(3, 5)
    streams = [(11, moving), (12, idle), (13, stuck)]
    assert watch.check(streams, {1: 9, 2: 9, 3: 5}) == []
    moving.seqno, stuck.seqno = 7, 5
    assert watch.check(streams, {1: 20, 2: 9, 3: 9}) == []
    moving.seqno = 8
    # The third is behind for the second time, but has not shown anything while others do.
    assert watch.check(streams, {1: 20, 2: 9, 3: 9}) == []
    for _ in range(PATIENCE - 2):
        moving.seqno += 1
        assert watch.check(streams, {1: 20, 2: 9, 3: 9}) == []
    moving.seqno += 1
    assert watch.check(streams, {1: 20, 2: 9, 3: 9}) == [stuck]
    # Where nothing moves at all there is no reason for patience.
    assert watch.check(streams, {1: 30, 2: 9, 3: 9}) == [moving]


def test_a_stream_that_was_asked_for_again_begins_anew():
    watch = StallWatch()
    stream = stream_at(1, 5)
    assert watch.check([(11, stream)], {1: 9}) == []
    assert watch.check([(12, stream)], {1: 9}) == []
    assert watch.check([(12, stream)], {1: 9}) == [stream]


# -- metrics -------------------------------------------------------------------------------------


async def test_every_metric_is_exported(server):
    async with Following(server) as following:
        await until(lambda: following.consumer.metrics.events)
        registry = CollectorRegistry()
        export_prometheus(following.consumer, registry)
        text = generate_latest(registry).decode()
        for name in COUNTERS:
            assert f'dcpd_consumer_{name}_total{{consumer="stops"}}' in text
        for name in GAUGES:
            assert f'dcpd_consumer_{name}{{consumer="stops"}}' in text
        assert set(following.consumer.metrics.as_dict()) == set(COUNTERS)
        assert set(following.consumer.gauges()) == set(GAUGES)
        assert following.consumer.gauges()["partitions"] == 1
