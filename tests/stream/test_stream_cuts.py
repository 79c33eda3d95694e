"""Closed times (control x_closed_times): what a connection has sent when it is told a time is the
node's state as of one moment, whatever happens meanwhile.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import precondition, rule

from dcp.wire.frame import Frame
from dcp.wire.message import pack_buffer_ack, parse_closed_time, parse_mutation
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from stream.follower import Follower
from stream.test_stream_model import (
    KEYS,
    VBUCKETS,
    StreamMachine,
    Versions,
    consumers,
    state,
    vb_ids,
)
from support.memory_node import MemoryNode, Peer
from vbucket.engine.cut import UNCOVERED, Cut, draw_cut
from vbucket.engine.engine import SET
from vbucket.engine.lifecycle import purge

CLOSED = Opcode.DCP_CLOSED_TIME


def draw(node: MemoryNode) -> int:
    """Draw a cut, as the timer does; return its time."""
    cut = draw_cut(node.engine, node.now_ns)
    for follower in node.hub.cutting:
        follower.begin_cut(cut)
    return cut.time


def follow(node: MemoryNode, vb_ids: range) -> Peer:
    peer = node.connect()
    peer.hello()
    peer.open()
    assert peer.control(b"x_closed_times", b"true").status == Status.OK
    for vb_id in vb_ids:
        assert peer.stream(vb_id).status == Status.OK
    return peer


def writer_of(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    return peer


def kinds(frames: list[Frame]) -> list[bytes]:
    """Return the keys of the changes, and the word cut where one was told."""
    wanted = (CLOSED, Opcode.DCP_MUTATION)
    return [frame.key or b"cut" for frame in frames if frame.opcode in wanted]


def test_what_was_changed_after_the_cut_comes_after_it(node: MemoryNode) -> None:
    writer = writer_of(node)
    peer = follow(node, range(3))
    writer.set(0, b"before", b"1")
    time = draw(node)
    writer.set(1, b"after", b"2")
    writer.set(0, b"before", b"3")
    node.commit()
    frames = peer.drain()
    assert kinds(frames)[:2] == [b"before", b"cut"]
    assert sorted(kinds(frames)[2:]) == [b"after", b"before"]
    told = next(at for at, frame in enumerate(frames) if frame.opcode == CLOSED)
    assert parse_closed_time(frames[told]).time == time
    changes = [(at, frame) for at, frame in enumerate(frames) if frame.key]
    assert [frame.cas > time for at, frame in changes] == [at > told for at, frame in changes]


def test_it_is_told_only_when_what_it_has_is_committed(node: MemoryNode) -> None:
    writer = writer_of(node)
    peer = follow(node, range(2))
    writer.set(0, b"key", b"1")
    draw(node)
    assert peer.drain() == []
    node.commit()
    assert kinds(peer.drain()) == [b"key", b"cut"]


def test_idle_partitions_close_together_in_one_message(node: MemoryNode) -> None:
    peer = follow(node, range(node.partitions))
    assert peer.drain() == []
    times = []
    for _ in range(3):
        times.append(draw(node))
        assert [parse_closed_time(frame).time for frame in peer.drain()] == times[-1:]
    assert times == sorted(set(times))


def test_busy_connections_of_a_cluster_prefer_the_same_cuts(node: MemoryNode) -> None:
    """Those whose time ends with the most zeros. What some cut does not cover is not told of it."""
    writer = writer_of(node)
    peer = follow(node, range(2))
    part = node.engine.partitions[0]
    for tick in (1, 2, 3, 8, 5):
        writer.set(0, b"key", b"%d" % tick)  # not committed, so it is on its way to the first one
        cut = Cut(tick << 16 | 0xFFFF, [each.high_seqno for each in node.engine.partitions], 7)
        peer.producer.begin_cut(cut)
    node.commit()
    told = [parse_closed_time(frame) for frame in peer.drain() if frame.opcode == CLOSED]
    assert told == [(1 << 16 | 0xFFFF, 7), (8 << 16 | 0xFFFF, 7)]
    peer.producer.begin_cut(Cut(9 << 16 | 0xFFFF, [part.high_seqno, UNCOVERED], 7))
    assert not peer.drain()


def test_without_the_control_nothing_is_sent(node: MemoryNode) -> None:
    writer = writer_of(node)
    plain = node.connect()
    plain.hello()
    plain.open()
    plain.stream(0)
    assert not node.hub.cutting
    writer.set(0, b"key", b"1")
    draw(node)
    writer.set(0, b"key", b"2")
    node.commit()
    assert len([frame for frame in plain.drain() if frame.opcode == Opcode.DCP_MUTATION]) == 1
    peer = follow(node, range(1))
    assert node.hub.cutting
    peer.producer.close()
    assert not node.hub.cutting


def test_control_takes_only_true_where_answers_can_wait(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello()
    peer.open()
    assert peer.control(b"x_closed_times", b"false").status == Status.EINVAL
    why = "acknowledge is master"
    peer.joins(SimpleNamespace(arriving=(), why_no_cuts=why))  # type: ignore[arg-type]
    assert peer.control(b"x_closed_times", b"true").status == Status.NOT_SUPPORTED
    assert not node.hub.cutting


def test_a_clock_that_is_set_back_gives_no_change_a_closed_time(node: MemoryNode) -> None:
    writer = writer_of(node)
    peer = follow(node, range(2))
    first = draw(node)
    node.now_ns -= 3600 * 10**9
    writer.set(0, b"key", b"1")
    second = draw(node)
    node.commit()
    frames = peer.drain()
    change = next(frame for frame in frames if frame.key)
    assert first < change.cas < second
    assert [parse_closed_time(frame).time for frame in frames if frame.opcode == CLOSED] == [first]


def test_a_change_with_a_foreign_cas_goes_by_its_place(node: MemoryNode) -> None:
    """SET_WITH_META may bring an older CAS: the cut has what came before it, whatever its CAS."""
    writer = writer_of(node)
    peer = follow(node, range(1))
    draw(node)
    old = node.engine.now_ns - 10**12
    outcome = node.engine.put_with_meta(
        Opcode.DCP_MUTATION, 0, b"\0key", b"\0keyvalue", 0, 0, 0, 5, old, 0
    )
    assert outcome[0] == 0
    writer.set(0, b"other", b"1")
    node.commit()
    assert kinds(peer.drain()) == [b"cut", b"key", b"other"]


def test_a_stream_that_is_added_ends_the_pending_cut(node: MemoryNode) -> None:
    """It may begin behind the cut, or beyond it."""
    writer = writer_of(node)
    peer = follow(node, range(1))
    writer.set(0, b"a", b"1")
    draw(node)
    writer.set(0, b"b", b"1")
    writer.set(1, b"c", b"1")
    node.commit()
    assert peer.stream(1).status == Status.OK
    assert kinds(peer.drain()) == [b"a", b"b", b"c"]
    draw(node)
    assert kinds(peer.drain()) == [b"cut"]


def test_a_full_window_holds_up_the_cut(node: MemoryNode) -> None:
    writer = writer_of(node)
    peer = node.connect()
    peer.hello()
    peer.open()
    peer.control(b"connection_buffer_size", b"1")
    peer.control(b"x_closed_times", b"true")
    peer.stream(0)
    peer.stream(1)
    for key in (b"a", b"b"):
        writer.set(0, key, b"1")
        writer.set(1, key, b"1")
    draw(node)
    node.commit()
    frames: list[Frame] = []
    while not frames or frames[-1].opcode != CLOSED:
        more = peer.pump()
        assert more, "acknowledged bytes let the streams go on"
        frames += more
        peer.send(pack_buffer_ack(peer.producer.unacked_bytes))
    assert sorted(kinds(frames)) == [b"a", b"a", b"b", b"b", b"cut"]


def test_the_end_of_a_stream_comes_before_the_cut(node: MemoryNode) -> None:
    """A stream that could not reach the cut has ended when the client is told."""
    writer = writer_of(node)
    for key in (b"a", b"b"):
        writer.set(0, key, b"1")
    writer.delete(0, b"a")
    writer.set(0, b"c", b"1")
    node.commit()
    node.merge()
    peer = follow(node, range(1, 2))
    uuid = node.engine.partitions[0].vb_uuid
    assert peer.stream(0, 1, uuid=uuid, snap=(1, 1)).status == Status.OK
    draw(node)
    assert purge(node.engine, 0)
    node.commit()
    ends = [frame.opcode for frame in peer.drain()]
    assert ends == [Opcode.DCP_STREAM_END, CLOSED]


class CutFollower(Follower):
    """Keeps what the node held when each cut was drawn, and compares when one is told."""

    told = 0
    drawn: dict[int, list[Versions]]

    def take(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.opcode != CLOSED:
                super().take([frame])
                continue
            self.told += 1
            versions = self.drawn[parse_closed_time(frame).time]
            for vb_id in range(VBUCKETS):
                if self.is_following(vb_id):
                    assert self.seqnos[vb_id] == len(versions[vb_id])
                    assert self.documents[vb_id] == state(versions[vb_id], len(versions[vb_id]))


class CutMachine(StreamMachine):
    """All that happens to streams, with cuts drawn at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, list[Versions]] = {}
        self.followers = [self.cut_follower(each) for each in self.followers]

    def cut_follower(self, follower: Follower) -> CutFollower:
        made = CutFollower(follower.peer)
        made.drawn = self.drawn
        return made

    def connect(self, number: int) -> Peer:
        peer = super().connect(number)
        if number != 1:
            assert peer.control(b"x_closed_times", b"true").status == Status.OK
        return peer

    @rule()
    def draw(self) -> None:
        self.drawn[draw(self.node)] = list(self.live)

    @precondition(lambda self: self.taken is None)
    @rule()
    def cut_for_all(self) -> None:
        """Everybody reads on until it is told a cut."""
        self.commit()
        for number, follower in enumerate(self.followers):
            self.catch_up(number)
            for vb_id in range(VBUCKETS):
                self.follow(number, vb_id)
            before = follower.told
            self.draw()
            self.catch_up(number)
            self.draw()
            self.catch_up(number)
            assert number == 1 or follower.told > before

    @rule(number=consumers, vb_id=vb_ids)
    def reopen_amid_a_cut(self, number: int, vb_id: int) -> None:
        self.catch_up(number)
        self.set({vb_id}, [KEYS[0]])
        self.draw()
        self.close(number, vb_id)
        self.follow(number, vb_id)
        self.commit()
        self.pump(number, 1, 3)

    def teardown(self) -> None:
        self.draw()
        super().teardown()


CutMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, phases=set(Phase) - {Phase.explain}
)
TestCuts = CutMachine.TestCase


@pytest.mark.parametrize("stop_at", [1, 5, 100])
def test_the_newest_version_of_a_key_does_not_leave_out_the_cuts(
    node: MemoryNode, stop_at: int
) -> None:
    """A snapshot leaves out older versions of a key; it ends at the cut, so the cut has its own."""
    engine = node.engine
    peer = follow(node, range(1))
    for n in range(200):
        engine.store(SET, 0, b"\0key", b"\0key%d" % n, 0, 0, 0, 0)
        if n + 1 == stop_at:
            draw(node)
    node.commit()
    changes = [frame for frame in peer.drain() if frame.opcode == Opcode.DCP_MUTATION]
    assert [parse_mutation(frame).by_seqno for frame in changes] == [stop_at, 200]
