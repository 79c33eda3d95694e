"""Consistent cuts at the consumer: what each has, what resumes from one, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from test_consumer_core import Session
from test_consumer_live import branch
from test_consumer_reader import Streams, batch_of, mutation, reader_of

from clients.consumer.consumer import Consumer
from clients.consumer.extensions import Closed
from clients.consumer.streams import StallWatch
from clients.errors import DcpdError, ExistsError, StatusError
from clients.event import Rollback, StreamFailed
from clients.kv.batch import AtomicBatch
from clients.kv.client import KvClient
from clients.kv.sync_client import SyncKv
from clients.mirror.mirror import Mirror
from clients.operation import Document
from clients.sync import SyncConsumer, SyncMirror
from dcp.server.check.folder_files import check_files
from dcp.server.storage.closed_times import CLOSED_FILE
from dcp.wire.message import pack_closed_time
from support.cluster_here import node_here
from support.server import DcpdProcess, ctl
from vbucket.check.finding import Finding
from vbucket.model.ids import vbucket_of


class Follow(Streams):
    """All partitions are with the one session, or with these."""

    def __init__(self, **given):
        super().__init__(**given)
        self.following, self.followed = [self], {1}


def closed(*events, time, is_whole=True, vb_id=1, round_=0):
    batch = batch_of(*events) if events else batch_of(mutation(1))._replace(items=[])
    return batch._replace(closed=Closed(time, round_, [vb_id], is_whole=is_whole))


async def cuts_of(reader, streams, events_max=None):
    streams.is_finished = True
    return [cut async for cut in reader.cuts(streams, events_max)]


# -- the core and the reader -----------------------------------------------------------------------


def test_what_follows_a_cut_in_the_same_read_is_another_batch():
    session = Session(cuts=True)
    session.accept()
    data = session.marker(1, 2) + session.mutation(1) + session.mutation(2)
    after = session.marker(3, 3) + session.mutation(3)
    before = session.feed(data + pack_closed_time(70) + after)
    assert (before[-1].end_seqno, session.batch.closed.time) == (2, 70)
    assert session.batch.closed.is_whole
    assert session.batch.wire_bytes == len(data), "the server does not count it"
    assert [event.seqno for event in session.feed(b"") if hasattr(event, "key")] == [3]
    assert session.batch.closed is None
    assert session.feed(b"") == []


def test_a_stream_that_is_not_open_has_not_reached_the_cut():
    session = Session(cuts=True)
    session.feed(pack_closed_time(70))
    assert not session.batch.closed.is_whole
    session.accept()
    session.feed(pack_closed_time(71))
    assert session.batch.closed.vb_ids == {17}


async def test_a_cut_has_all_since_the_last_one():
    streams = Follow()
    reader = reader_of(
        streams, batch_of(mutation(1)), closed(mutation(2), time=70), closed(time=71),
        batch_of(mutation(3)), closed(time=72), batch_of(mutation(4)),
    )  # fmt: skip
    cuts = await cuts_of(reader, streams)
    assert [[event.seqno for event in cut.events] for cut in cuts] == [[1, 2], [], [3]]
    assert [cut.time for cut in cuts] == [70, 71, 72]
    assert [cut.positions[1].seqno for cut in cuts] == [2, 1, 1]
    assert reader.checkpoint() == cuts[-1].positions, "what no cut has was not returned"
    assert reader.closed == {1: 72}


async def test_a_large_cut_comes_in_parts_that_are_no_cuts():
    streams = Follow()
    reader = reader_of(
        streams, batch_of(mutation(1), mutation(2)), batch_of(mutation(3)), closed(time=70)
    )
    cuts = await cuts_of(reader, streams, 2)
    assert [(cut.time, len(cut.events)) for cut in cuts] == [(0, 2), (70, 1)]


@pytest.mark.parametrize("why", ["not whole", "other sessions", "dropped", "clock set back"])
async def test_what_some_partition_has_not_reached_is_no_cut(why):
    streams = Follow()
    if why == "clock set back":
        reader = reader_of(streams, closed(time=80), closed(mutation(1), time=70))
    else:
        reader = reader_of(streams, closed(mutation(1), time=70, is_whole=why != "not whole"))
    if why == "other sessions":
        streams.followed = {1, 2}
    if why == "dropped":
        reader.forget([1])
    assert [cut.time for cut in await cuts_of(reader, streams)] == [80] * (why == "clock set back")


class Nodes(Follow):
    """Partition 1 is with this session, and partition 2 with the other one."""

    def __init__(self):
        super().__init__()
        self.other = Streams()
        self.following, self.followed = [self, self.other], {1, 2}


def of_other(seqno):
    batch = batch_of(mutation(seqno))
    return batch._replace(positions={2: batch.positions[1]}, markers={})


async def test_sessions_wait_for_each_other_at_a_cut():
    """One is told of times 70, 71 and 73, and the other one of 70, 72 and 73."""
    streams = Nodes()
    reader = reader_of(
        streams, closed(mutation(1), time=70), closed(mutation(2), time=71), closed(time=73),
        batch_of(mutation(3)),
    )  # fmt: skip
    for seqno, time in ((11, 70), (12, 72), (13, 73)):
        told = closed(time=time, vb_id=2).closed
        reader.put(streams.other, of_other(seqno)._replace(closed=told))
    cuts = await cuts_of(reader, streams)
    assert [cut.time for cut in cuts] == [70, 73]
    assert [sorted(event.seqno for event in cut.events) for cut in cuts] == [[1, 11], [2, 12, 13]]
    assert reader.closed == {1: 73, 2: 73}


async def test_cuts_of_one_time_and_two_leaders_are_two():
    streams = Nodes()
    reader = reader_of(streams, closed(time=70, round_=5), closed(time=71, round_=5))
    for time, leader in ((70, 6), (71, 5)):
        told = closed(time=time, vb_id=2, round_=leader).closed
        reader.put(streams.other, of_other(time)._replace(closed=told))
    assert [cut.time for cut in await cuts_of(reader, streams)] == [71]


async def test_a_partition_that_moved_waits_for_what_came_first():
    """Its events after a cut wait; what its new node sends must not come before them."""
    streams = Nodes()
    reader = reader_of(streams, closed(mutation(1), time=70), batch_of(mutation(2)))
    reader.put(streams.other, batch_of(mutation(3)))
    cuts = reader.cuts(streams, 1)
    assert [(await anext(cuts)).events[0].seqno for _ in range(3)] == [1, 2, 3]


async def test_a_session_waits_for_nobody_when_all_have_gone():
    streams = Nodes()
    reader = reader_of(streams, closed(mutation(1), time=70), batch_of(mutation(2)))
    cuts = reader.cuts(streams, 1)
    await anext(cuts)
    streams.following = [streams]
    assert [event.seqno for event in (await anext(cuts)).events] == [2]


async def test_a_rollback_takes_the_closed_time_of_its_partition():
    streams = Follow()
    back = Rollback(1, 0, 0, 1, "branch")
    reader = reader_of(streams, closed(mutation(1), time=70), batch_of(back), closed(time=71))
    cuts = reader.cuts(streams, None)
    await anext(cuts)
    assert reader.closed == {1: 70}
    seen = []
    async for events in reader.batches(streams):
        seen += events
        assert reader.closed == {}
        streams.is_finished = True
    assert seen == [back]
    assert reader.closed == {1: 71}


async def test_a_stream_that_is_refused_for_good_ends_the_cuts():
    streams = Follow()
    failed = StreamFailed(1, 0x24, "no access", "ask")
    reader = reader_of(streams, batch_of(mutation(1)))
    reader.put(streams, batch_of(mutation(2))._replace(items=[failed]))
    with pytest.raises(DcpdError, match="no access"):
        await cuts_of(reader, streams)


def test_a_stream_that_waits_at_a_cut_is_not_stalled():
    session = Session(cuts=True)
    session.accept()
    stream = session.core.streams.by_vb[17]
    other = Session().core.streams.by_vb[17]
    other.vb_id = 3
    for are_aligned in (False, True):
        watch, stalled = StallWatch(are_aligned=are_aligned), []
        for check in range(8):
            other.seqno = check
            stalled += watch.check([(1, stream), (2, other)], {17: 5, 3: 99})
        assert bool(stalled) == (not are_aligned)


def test_a_stream_whose_end_was_branched_away_is_stalled():
    """The end was asked for before, and the stream after: nothing would ever end it."""
    session = Session()
    session.accept()
    streams = session.core.streams
    stream = streams.by_vb[17]
    watch = StallWatch()
    for target, high, is_stalled in ((5, 5, False), (None, 5, False), (6, 5, True)):
        stream.seqno, stream.target = 5, target
        found = [watch.check([(1, stream)], {17: high}) for _ in range(3)]
        assert any(found) == is_stalled, target


@pytest.mark.parametrize("given", [{"until_now": True}, {"from_replicas": True}])
def test_cuts_and_ends_of_another_kind_exclude_each_other(given):
    with pytest.raises(ValueError, match="cuts cannot be used with"):
        Consumer("127.0.0.1:1", cuts=True, **given)


async def test_without_the_option_there_are_no_cuts():
    consumer = Consumer("127.0.0.1:1")
    with pytest.raises(RuntimeError, match="cuts=True"):
        await anext(consumer.cuts())
    with pytest.raises(RuntimeError, match="cuts=True"):
        assert consumer.frontier


async def test_a_server_that_knows_no_cuts_is_an_error_with_its_words(tmp_path, monkeypatch):
    monkeypatch.delitem(
        __import__("dcp.session.controls").session.controls.CONTROLS, "x_closed_times"
    )
    async with node_here(tmp_path, {}) as node:
        consumer = Consumer(f"127.0.0.1:{node.ports.kv}", cuts=True)
        with pytest.raises(StatusError, match="x_closed_times"):
            await anext(consumer.cuts())
        await consumer.close()


# -- a server ------------------------------------------------------------------------------------

PAIRS = [(f"first{n}", f"second{n}") for n in range(40)]


async def write_pairs(kv, numbers, stop):
    """Write the second of a pair after the first was answered."""
    for first, second in itertools.cycle(numbers):
        if stop.is_set():
            return
        number = b"%d" % next(COUNT)
        for key in (first, second):
            while not stop.is_set():
                try:
                    await kv.set(key, number)
                    break
                except DcpdError:
                    await asyncio.sleep(0.02)  # the server is down


COUNT = itertools.count(1)
ACCOUNTS = [f"account{n}" for n in range(20)]
BALANCE = 100


async def move_money(kv, accounts, stop):
    """Move money between accounts, in batches. One task writes an account."""
    for first, second in itertools.cycle(itertools.permutations(accounts, 2)):
        if stop.is_set():
            return
        try:
            held = await kv.get_many([first, second])
            async with kv.batch() as batch:
                for key, change in ((first, -1), (second, 1)):
                    batch.set(key, b"%d" % (int(held[key.encode()].value) + change))
        except DcpdError:
            await asyncio.sleep(0.02)  # the server is down, or the batch may have been made


def check_sum(documents):
    held = [int(documents[key.encode()]) for key in ACCOUNTS]
    assert sum(held) == BALANCE * len(ACCOUNTS), "a cut has a part of a batch"
    return held


def check_pairs(documents):
    for first, second in PAIRS:
        held = int(documents.get(first.encode(), 0)), int(documents.get(second.encode(), 0))
        assert held[0] >= held[1], f"a cut has {second} without {first}"


async def check_mirror(mirror):
    """What is read in a block is of one moment, however long that takes."""
    async with mirror.at_frontier() as time:
        held = {key.encode(): mirror[key] for key in ACCOUNTS}
        check_sum(held)
        await asyncio.sleep(0.01)
        assert {key.encode(): mirror[key] for key in ACCOUNTS} == held
        check_pairs(dict(mirror.items()))
        assert time
    held = dict(mirror.items())  # and between two cuts it is nowhere
    check_pairs(held)
    check_sum(held)


async def test_a_mirror_without_cuts_has_no_frontier():
    mirror = Mirror("127.0.0.1:1")
    with pytest.raises(RuntimeError, match="cuts=True"):
        async with mirror.at_frontier():
            pass


async def test_a_rollback_is_decided_after_what_is_before_it():
    """The events of before are returned first, as a part: they must be processed by then."""
    streams = Follow(asks=True)
    back = Rollback(1, 0, 0, 2, "branch")
    batch = batch_of(mutation(1), mutation(2), back)
    reader = reader_of(streams, batch, closed(time=70))
    cuts = reader.cuts(streams, None)
    assert [event.seqno for event in (await anext(cuts)).events] == [1, 2]
    assert streams.settled == []
    cut = await anext(cuts)
    assert streams.settled == [0]
    assert (cut.time, cut.events[0].reason) == (70, "decided")


async def test_what_earlier_batches_had_is_returned_before_it():
    """Also if the rollback begins a batch: a mirror is compared with what it holds then."""
    streams = Follow(asks=True)
    back = Rollback(1, 0, 0, 2, "branch")
    reader = reader_of(
        streams, batch_of(mutation(1)), batch_of(mutation(2)), batch_of(back), closed(time=70)
    )
    cuts = reader.cuts(streams, None)
    first = await anext(cuts)
    assert ([event.seqno for event in first.events], streams.settled) == ([1, 2], [])
    cut = await anext(cuts)
    assert (cut.time, cut.events[0].reason, streams.settled) == (70, "decided", [0])


def apply(documents, journal, cut):
    for change in cut.changes:
        match change:
            case Rollback():
                undone = [each for each in journal if each[0] == change.vb_id]
                for _, seqno, key, before in reversed(undone):
                    if seqno > change.to_seqno:
                        documents[key] = before
            case _:
                journal.append((change.vb_id, change.seqno, change.key, documents.get(change.key)))
                documents[change.key] = change.value


async def test_each_cut_is_one_state_through_a_kill_and_a_branch(tmp_path):
    """Pairs are written in order, and money is moved in batches, while the server is killed and
    another partition branches. The cuts never have the second write of a pair without the first,
    and the sum of all accounts holds.
    """
    with DcpdProcess(tmp_path / "data") as server:
        stop = asyncio.Event()
        written = [key for pair in PAIRS for key in pair] + ACCOUNTS
        taken = {vbucket_of(key.encode()) for key in written}
        aside = next(key for key in map(str, range(9999)) if vbucket_of(key.encode()) not in taken)
        async with KvClient.connect(server.address) as kv:
            await kv.set(aside, b"1")
            await kv.set(aside, b"2")
            await kv.set_many(
                (key, b"%d" % next(COUNT)) for pair in PAIRS for key in reversed(pair)
            )
            writers = [asyncio.create_task(write_pairs(kv, PAIRS[n::4], stop)) for n in range(4)]
            await kv.set_many((key, b"%d" % BALANCE) for key in ACCOUNTS)
            writers += [asyncio.create_task(move_money(kv, ACCOUNTS[n::4], stop)) for n in range(4)]
            consumer = Consumer(server.address, cuts=True, validate=True)
            mirror = Mirror(server.address, tmp_path / "mirror.lmdb", cuts=True)
            await mirror.open()
            documents, journal, times, seen_at, steps = {}, [], [0], [], 0
            balances = set()
            async for cut in consumer.cuts():
                apply(documents, journal, cut)
                check_pairs(documents)
                balances.add(tuple(check_sum(documents)))
                assert cut.time > times[-1]
                assert consumer.frontier == cut.time
                times.append(cut.time)
                if cut.changes:
                    seen_at.append(len(times))
                await check_mirror(mirror)
                has_rolled_back = any(isinstance(each, Rollback) for each in cut.changes)
                if len(times) == 8:
                    await asyncio.to_thread(server.restart_after_kill)
                elif len(times) == 14:
                    await asyncio.to_thread(branch, server, vbucket_of(aside.encode()), 1)
                elif has_rolled_back:
                    steps += 1
                    assert documents[aside.encode()] == b"1"
                if steps and len(times) > 18:
                    break
            stop.set()
            await asyncio.gather(*writers)
            assert min(seen_at) < 8, "there was something to see"
            assert max(seen_at) > 14, "to the end"
            assert len(balances) > 5, "money was moved"
            assert consumer.checkpoint() == cut.positions
            assert (await asyncio.to_thread(server.metrics))["dcpd_cut_age_seconds"] > 0
            await kv.set(PAIRS[0][0], b"999999999")
            await mirror.caught_up(20)
            async with mirror.at_frontier():
                assert mirror[PAIRS[0][0]] == b"999999999"
                assert mirror[aside] == b"1"
            await mirror.close()
            await consumer.close()


async def test_a_consumer_that_resumes_from_a_cut_has_the_next_one(tmp_path):
    async with node_here(tmp_path, {}) as node:
        address = f"127.0.0.1:{node.ports.kv}"
        async with KvClient.connect(address) as kv:
            await kv.set_many((f"k{n}", b"1") for n in range(500))
            async with Consumer(address, cuts=True) as consumer:
                cut = await anext(consumer.cuts())
                assert len(cut.changes) == 500
                assert cut.time == consumer.frontier
            await kv.set_many((f"k{n}", b"2") for n in range(100))
            async with Consumer(address, cuts=True, start=cut.positions) as consumer:
                again = await anext(consumer.cuts())
        assert len(again.changes) == 100
        assert again.time > cut.time
        assert all(change.cas <= again.time for change in again.changes)

        ran = await ctl(node.ports.kv, "watch", "--cuts", "--until-now", "-o", "json")
        lines = [json.loads(line) for line in ran.out.splitlines()]
        assert [line["event"] for line in lines] == ["mutation"] * 500 + ["cut"]
        assert int(lines[-1]["time"]) > again.time
        ran = await ctl(node.ports.kv, "watch", "--cuts", "--count", "1")
        assert (ran.code, "--cuts cannot be used with" in ran.err) == (2, True)

        def batches():
            with SyncKv(address) as kv:
                with kv.batch() as batch:
                    batch.set("k0", b"9", flags=3)
                    batch.delete("k1")
                with kv.batch():
                    pass  # nothing to send
                refused, twice = AtomicBatch(), AtomicBatch()
                for other in (refused, twice):
                    other.set("k0", b"10")
                refused.add("k2", b"9")
                twice.delete("k0")
                with pytest.raises(ExistsError, match="change 1 "):
                    kv.apply_batch(refused.changes)
                with pytest.raises(ValueError, match="once"):
                    kv.apply_batch(twice.changes)
                return batch.results, kv.get("k0")

        results, document = await asyncio.to_thread(batches)
        assert document == Document(b"9", results[0].cas, 3)
        assert {result.cas for result in results} == {document.cas}
        assert [result.vb_id for result in results] == [vbucket_of(b"k0"), vbucket_of(b"k1")]

        def of_mirror():
            with SyncMirror(address, cuts=True) as mirror, mirror.at_frontier() as time:
                return time, mirror["k0"], len(mirror)

        time, value, count = await asyncio.to_thread(of_mirror)
        assert time > again.time
        assert (value, count) == (b"9", 499)

        def first_cut():
            with SyncConsumer(address, cuts=True) as consumer:
                return next(consumer.cuts())

        last = await asyncio.to_thread(first_cut)
        assert {change.cas for change in last.changes if change.key in {b"k0", b"k1"}} == {
            document.cas
        }


async def test_a_restart_takes_no_cas_that_is_closed(tmp_path):
    """The clock is set back by a minute while the node is down."""
    async with node_here(tmp_path, {}) as node:
        address = f"127.0.0.1:{node.ports.kv}"
        async with Consumer(address, cuts=True) as consumer:
            before = await anext(consumer.cuts())
    async with node_here(tmp_path, {}) as node:
        begin = node.engine.begin_batch
        node.engine.begin_batch = lambda now_ns: begin(now_ns - 60 * 10**9)
        address = f"127.0.0.1:{node.ports.kv}"
        async with KvClient.connect(address) as kv:
            assert (await kv.set("key", b"1")).cas > before.time
        async with Consumer(address, cuts=True) as consumer:
            after = await anext(consumer.cuts())
    assert after.time > before.time
    (tmp_path / "data" / CLOSED_FILE).write_text("what is this")
    found = [each for each in check_files(tmp_path / "data") if isinstance(each, Finding)]
    assert [each.where for each in found] == [CLOSED_FILE]
