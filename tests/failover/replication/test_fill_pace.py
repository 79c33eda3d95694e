"""Copies that are filled for the first time come at a pace; nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from dcp.wire.frame import FrameDecoder
from failover.replication.mastership import Mastership, ReplicationSettings
from failover.replication.messages import unpack_entries
from failover.replication.pace import BURST_NS, FILL_SECTION_BYTES, JOIN_NS, FillPace
from failover.replication.progress import AckDelays, Inflight
from failover.rules.replication_record import ReplicationRecord, add_copy, drop_copies, expand
from support.core_cluster import MS, CoreCluster
from support.replica_pair import EPOCH, Master

RATE = 20_000
SECOND = 1_000_000_000
LONG = 700 * MS


def sent_in(seconds: float, links: str, size: int, rate: int = RATE) -> dict[str, int]:
    """Return what links send that ask every 50 ms."""
    pace, sent = FillPace(rate), dict.fromkeys(links, 0)
    for turn in range(int(seconds * 20)):
        for link in links:
            while pace.renew(link, turn * 50 * MS) and sent[link] < 10**9:
                pace.sent(link, size)
                sent[link] += size
    return sent


@pytest.mark.parametrize("size", [100, 7_000])
def test_links_share_the_rate_whatever_the_size_of_messages(size: int) -> None:
    sent = sent_in(20, "abc", size)
    assert sum(sent.values()) == pytest.approx(20 * RATE, rel=0.1, abs=3 * size)
    assert max(sent.values()) - min(sent.values()) <= size + RATE / 3


def test_a_pause_is_not_made_up_for() -> None:
    pace = FillPace(RATE)
    assert pace.renew("a", 0)
    pace.sent("a", 1)
    later = 100 * SECOND
    sent = 0
    while pace.renew("a", later):
        pace.sent("a", 100)
        sent += 100
    assert sent <= RATE * BURST_NS / SECOND + 100


def test_full_copies_may_join_at_some_ticks_only() -> None:
    pace = FillPace(RATE)
    may = [turn for turn in range(20) if pace.take_join(turn * 100 * MS)]
    assert may == [0, 5, 10, 15]
    assert pace.take_join(100 * SECOND)
    assert JOIN_NS == 500 * MS


def test_a_link_that_fills_nothing_any_more_takes_no_share() -> None:
    pace = FillPace(RATE)
    pace.renew("b", 0)
    sent = 0
    for turn in range(200):
        while pace.renew("a", turn * 50 * MS):
            pace.sent("a", 500)
            sent += 500
    assert sent == pytest.approx(10 * RATE, rel=0.15)


def test_no_more_is_on_its_way_than_a_tenth_of_a_second_takes() -> None:
    pace = FillPace(RATE)
    pace.renew("a", 0)
    assert pace.renew("a", SECOND, RATE // 10)
    assert not pace.renew("a", SECOND, RATE // 10 + 1)
    assert pace.renew("a", SECOND, 0), "one message may be larger than that"


def test_a_replica_that_acknowledges_groups_late_gets_less() -> None:
    sent: list[Inflight] = []
    delays = AckDelays(sent)
    pace = FillPace(0)
    for turn in range(100):
        pace.renew("a", turn * 50 * MS)
        delays.acknowledged(Inflight(turn, 0, 0), 2 * MS)
        pace.look(turn * 50 * MS, (delays,))
    quick = pace.rate.bytes_per_s
    delays.acknowledged(Inflight(0, 0, 0, filling=1), SECOND)
    pace.look(100 * 50 * MS, (delays,))
    assert pace.rate.bytes_per_s >= quick, "what is filled may take its time"
    sent.append(Inflight(1, 0, 101 * 50 * MS - SECOND))
    pace.look(101 * 50 * MS, (delays,))
    assert pace.rate.bytes_per_s < quick, "it waits still"


def test_an_event_loop_that_is_late_sends_less() -> None:
    pace = FillPace(0)
    for turn in range(100):
        pace.renew("a", turn * 50 * MS)
        pace.was_late(0)
        pace.look(turn * 50 * MS, ())
    quick = pace.rate.bytes_per_s
    pace.was_late(SECOND)
    pace.look(100 * 50 * MS, ())
    assert pace.rate.bytes_per_s < quick


def filling(rate: int) -> CoreCluster:
    """Return a cluster whose node b has to be filled with 100 kB."""
    settings = ReplicationSettings(min_in_sync=1, fill_bytes_per_s=rate, section_bytes=1000)
    cluster = CoreCluster(settings=settings)
    cluster.run(LONG)
    cluster.write(drop_copies(cluster.record, "b", in_sync_min=1))
    for number in range(100):
        cluster.a.put(b"\0k%d" % number, bytes(900))
    cluster.run(LONG)
    cluster.write(add_copy(cluster.record, "b"))
    return cluster


def test_a_new_copy_is_filled_at_the_rate_and_then_not_held_up() -> None:
    cluster = filling(RATE)
    cluster.run(2 * SECOND)
    held = cluster.b.part.high_seqno
    assert 30 <= held <= 60, "2 s of 20 kB"
    cluster.run(4 * SECOND)
    assert cluster.record.isr == {"a", "b"}
    for number in range(100):
        cluster.a.put(b"\0more%d" % number, bytes(900))
    cluster.settle()
    assert cluster.b.part.high_seqno == 200


def test_without_a_rate_a_new_copy_is_filled_at_once() -> None:
    cluster = filling(0)
    cluster.run(200 * MS)
    assert cluster.b.part.high_seqno == 100


def test_a_full_copy_that_fell_behind_is_not_paced() -> None:
    cluster = filling(RATE)
    cluster.write(expand(cluster.record, "b"))  # as if it had been full, and missed all of it
    for wire in cluster.wires:
        wire.cut()
    cluster.run(300 * MS)
    assert cluster.b.part.high_seqno == 100


def test_copies_that_are_filled_make_no_partition_restless() -> None:
    """A member that is not level is looked at for each partition, which delays writes."""
    cluster = filling(RATE)
    cluster.run(SECOND)
    for wire in cluster.wires:
        wire.is_up = False  # nothing is acknowledged
    cluster.run(200 * MS)
    feed = cluster.a.core.master.feeds["b"]
    assert feed.streams.is_filling
    feed.take_caught_up()
    assert feed.take_caught_up()


def test_filled_partition_is_looked_at_when_copies_may_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_ns: list[int] = []
    changed_isr = Mastership.changed_isr

    def look(*arguments: Any, **named: Any) -> ReplicationRecord | None:
        looked_ns.append(arguments[1])
        return changed_isr(*arguments, **named)

    cluster = filling(RATE)
    cluster.run(500 * MS)
    monkeypatch.setattr(Mastership, "changed_isr", look)
    cluster.run(2 * SECOND)
    assert cluster.record.filling == {"b"}
    assert len(looked_ns) == 2 * SECOND // JOIN_NS
    cluster.run(4 * SECOND)
    assert cluster.record.isr == {"a", "b"}


def late_groups(delay_ns: int) -> float:
    """Return the rate of a fill after some seconds in which groups wait so long for the replica
    that is filled.
    """
    settings = ReplicationSettings(min_in_sync=1, section_bytes=1000)
    cluster = CoreCluster(settings=settings)
    cluster.run(LONG)
    leading = cluster.a.core.master
    for number in range(40):
        leading.pace.renew("c", cluster.now_ns)  # another copy is filled meanwhile
        cluster.a.put(b"\0k%d" % number, bytes(100))
        cluster.a.commit()
        for wire in cluster.wires:
            wire.is_down = not delay_ns
        cluster.settle()
        cluster.run(delay_ns)
        for wire in cluster.wires:
            wire.is_down = True
        cluster.run(100 * MS)
    return leading.pace.rate.bytes_per_s


def test_a_fill_slows_down_when_groups_wait_for_their_replicas() -> None:
    assert late_groups(50 * MS) < late_groups(0)


def test_a_fill_goes_on_beside_a_full_copy_that_falls_behind() -> None:
    master = Master()
    for number in range(300):
        master.put(0, b"%d" % number + bytes(1000))
        master.put(1, b"%d" % number + bytes(1000))
    master.commit()
    master.feed.open(0, EPOCH, 1, 0, is_filling=True)
    master.open(1)
    frames = FrameDecoder().feed(b"".join(master.feed.pump(2 * FILL_SECTION_BYTES)))
    sections = [section for frame in frames for section in unpack_entries(frame).sections]
    assert [section.vb_id for section in sections if section.entries] == [0, 1]
