"""Snapshots of a stream: where markers start and end, what is in them, how a stream ends."""

from __future__ import annotations

import pytest

from dcp.stream.producer import BACKLOGS_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import (
    EndReason,
    MarkerFlag,
    SnapshotMarker,
    parse_deletion,
    parse_marker,
    parse_mutation,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from stream.follower import Follower
from stream.shape import marker_flags, shape
from support.memory_node import START_NS, MemoryNode, Peer

VB = 7
MARKER, MUTATION = Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_MUTATION
DELETION, END = Opcode.DCP_DELETION, Opcode.DCP_STREAM_END


def set_all(writer: Peer, keys: str, vb_id: int = VB) -> None:
    """Set each letter of `keys` as a key; nothing is committed."""
    for key in keys:
        writer.set(vb_id, key.encode(), b"value")


# -- where a marker starts ---------------------------------------------------------------------


def test_an_empty_partition_sends_no_marker(peer: Peer) -> None:
    peer.stream(VB)
    assert peer.drain() == []


def test_the_first_marker_starts_at_the_requested_snapshot_start(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "abcdef")
    node.commit()
    uuid = node.engine.partitions[VB].vb_uuid
    peer.stream(VB, 4, uuid=uuid, snap=(2, 5))
    assert shape(peer.drain()) == [(2, 6), "5:e", "6:f"]


def test_later_marker_starts_at_the_previous_end_plus_1(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "a")
    node.commit()
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 1), "1:a"]
    set_all(writer, "aba")
    node.commit()
    assert shape(peer.drain()) == [(2, 4), "3:b", "4:a"]
    set_all(writer, "aaa")
    node.commit()
    assert shape(peer.drain()) == [(5, 7), "7:a"]


def test_a_backlog_is_a_disk_snapshot_and_live_ones_are_memory(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "ab")
    node.commit()
    peer.stream(VB)
    assert marker_flags(peer.drain()) == [MarkerFlag.DISK]
    for _ in range(2):
        set_all(writer, "c")
        node.commit()
        assert marker_flags(peer.drain()) == [MarkerFlag.MEMORY]


def test_stream_without_backlog_is_live_from_its_first_snapshot(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "ab")
    node.commit()
    peer.stream(VB, flags=0x40)
    assert peer.drain() == []
    set_all(writer, "c")
    node.commit()
    assert marker_flags(peer.drain()) == [MarkerFlag.MEMORY]


# -- de-duplication ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_backlog_shows_the_newest_version_of_each_key(
    node: MemoryNode, writer: Peer, peer: Peer, is_merged: bool
) -> None:
    set_all(writer, "abacb")
    writer.delete(VB, b"a")
    node.commit()
    if is_merged:
        node.merge()
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 6), "4:c", "5:b", "6:-a"]


def test_a_backlog_over_store_and_memory_is_one_snapshot(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "abc")
    node.merge()
    set_all(writer, "ad")
    node.begin_merge()
    set_all(writer, "be")
    node.commit()
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 7), "3:c", "4:a", "5:d", "6:b", "7:e"]


def test_several_groups_that_wait_are_one_live_snapshot(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    peer.stream(VB)
    peer.drain()
    for keys in ("ab", "ac", "ad"):
        set_all(writer, keys)
        node.commit()
    assert shape(peer.drain()) == [(0, 6), "2:b", "4:c", "5:a", "6:d"]


def test_open_snapshot_takes_in_nothing_committed_meanwhile(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "ab")
    node.commit()
    peer.stream(VB)
    first = peer.pump(1)
    assert shape(first) == [(0, 2)]
    set_all(writer, "a")
    node.commit()
    assert shape(peer.drain(1)) == ["1:a", "2:b", (3, 3), "3:a"]


def test_a_deletion_of_a_key_that_the_client_never_saw_is_sent(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "a")
    writer.delete(VB, b"a")
    node.commit()
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 2), "2:-a"]


# -- nothing uncommitted -----------------------------------------------------------------------


def test_nothing_uncommitted_is_sent(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    set_all(writer, "a")
    peer.stream(VB)
    assert peer.drain() == []
    group = node.take()
    set_all(writer, "b")
    assert peer.drain() == []
    node.finish(group)
    assert shape(peer.drain()) == [(0, 1), "1:a"]


# -- how a stream ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3])
def test_start_equal_to_end_is_ok_and_the_end_at_once(
    node: MemoryNode, writer: Peer, peer: Peer, at: int
) -> None:
    set_all(writer, "abcde")
    node.commit()
    uuid = node.engine.partitions[VB].vb_uuid
    assert peer.stream(VB, at, at, uuid=uuid, opaque=0xFEED).status == Status.OK
    (end,) = peer.drain()
    assert shape([end]) == [EndReason.OK]
    assert (end.opaque, end.vb_id) == (0xFEED, VB)
    assert node.hub.stream_count == 0


@pytest.mark.parametrize("end", range(1, 8))
@pytest.mark.parametrize("is_merged", [False, True])
def test_end_in_middle_of_history_gives_exactly_state_as_of_it(
    node: MemoryNode, writer: Peer, peer: Peer, end: int, is_merged: bool
) -> None:
    states: list[dict[bytes, bytes]] = [{}]
    for n, key in enumerate(b"abacbad", start=1):
        writer.set(VB, bytes([key]), b"%d" % n)
        states.append({**states[-1], bytes([key]): b"%d" % n})
    node.commit()
    if is_merged:
        node.merge()
    assert peer.control(b"x_exact_end", b"true").status == Status.OK
    follower = Follower(peer)
    follower.follow(VB, 0, end)
    follower.drain()
    assert follower.documents[VB] == states[end]
    assert follower.ended == {VB: EndReason.OK}
    assert [tuple(marker[:2]) for marker in follower.markers[VB]] == [(0, end)]


@pytest.mark.parametrize("end", range(1, 8))
@pytest.mark.parametrize("is_merged", [False, True])
def test_stream_with_end_completes_snapshot_that_its_end_is_in(
    node: MemoryNode, writer: Peer, peer: Peer, end: int, is_merged: bool
) -> None:
    set_all(writer, "abacbad")
    node.commit()
    if is_merged:
        node.merge()
    peer.stream(VB, 0, end)
    found = shape(peer.drain())
    assert found == [(0, 7), "4:c", "5:b", "6:a", "7:d", EndReason.OK]
    assert node.hub.stream_count == 0


@pytest.mark.parametrize("is_exact", [False, True])
def test_an_end_in_the_future_is_waited_for(
    node: MemoryNode, writer: Peer, peer: Peer, is_exact: bool
) -> None:
    if is_exact:
        peer.control(b"x_exact_end", b"true")
    peer.stream(VB, 0, 3)
    set_all(writer, "ab")
    node.commit()
    assert shape(peer.drain()) == [(0, 2), "1:a", "2:b"]
    set_all(writer, "bcd")
    node.commit()
    if is_exact:
        assert shape(peer.drain()) == [(3, 3), "3:b", EndReason.OK]
    else:
        assert shape(peer.drain()) == [(3, 5), "3:b", "4:c", "5:d", EndReason.OK]


def test_an_ended_stream_is_no_longer_woken(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    set_all(writer, "a")
    node.commit()
    peer.stream(VB, 0, 1)
    peer.drain()
    set_all(writer, "b")
    node.commit()
    assert peer.drain() == []
    assert node.hub.stream_count == 0


# -- branches ----------------------------------------------------------------------------------


def test_branch_ends_stream_and_rollback_answer_leads_back(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "abcd")
    node.commit()
    uuid = node.engine.partitions[VB].vb_uuid
    peer.stream(VB, opaque=0xCAFE)
    peer.drain()
    node.engine.keyspace.branch(VB, 2)
    assert peer.drain() == [], "a branch that is not committed has not happened"
    set_all(writer, "x")
    node.commit()
    (end,) = peer.drain()
    assert (shape([end]), end.opaque) == ([EndReason.ROLLBACK], 0xCAFE)
    answer = peer.stream(VB, 4, uuid=uuid)
    assert (answer.status, int.from_bytes(answer.value, "big")) == (Status.ROLLBACK, 2)
    assert peer.stream(VB, 2, uuid=uuid).status == Status.OK
    assert shape(peer.drain()) == [(2, 3), "3:x"]


@pytest.mark.parametrize("sent", ["the marker", "an item"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_uncommitted_branch_stops_snapshot_that_is_under_way(
    node: MemoryNode, writer: Peer, peer: Peer, at: int, sent: str
) -> None:
    set_all(writer, "abcd")
    node.commit()
    peer.stream(VB)
    peer.pump(1)
    if sent == "an item":
        peer.pump(1)
    node.engine.keyspace.branch(VB, at)
    set_all(writer, "xyz")
    assert peer.drain() == []
    node.commit()
    assert shape(peer.drain()) == [EndReason.ROLLBACK]


def test_stream_begun_on_a_new_version_survives_its_commit(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    set_all(writer, "abcd")
    node.commit()
    node.engine.keyspace.branch(VB, 2)
    assert peer.stream(VB).status == Status.OK
    assert peer.must_wait
    assert peer.drain() == []
    node.commit()
    assert shape(peer.drain()) == [(0, 2), "1:a", "2:b"]
    set_all(writer, "e")
    node.commit()
    assert shape(peer.drain()) == [(3, 3), "3:e"]


def test_only_the_branched_partitions_stream_ends(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    for vb_id in (VB, VB + 1):
        set_all(writer, "a", vb_id)
        peer.stream(vb_id, opaque=vb_id)
    node.commit()
    peer.drain()
    node.engine.keyspace.branch(VB, 0)
    node.commit()
    assert [frame.vb_id for frame in peer.drain()] == [VB]
    assert peer.producer.has_stream(VB + 1)


# -- several connections, closing ------------------------------------------------------------------


def test_every_producer_gets_every_change(node: MemoryNode, writer: Peer) -> None:
    peers = [node.connect() for _ in range(3)]
    for n, peer in enumerate(peers):
        peer.hello()
        peer.open(b"consumer%d" % n)
        peer.stream(VB, opaque=n)
    set_all(writer, "ab")
    node.commit()
    for n, peer in enumerate(peers):
        frames = peer.drain()
        assert shape(frames) == [(0, 2), "1:a", "2:b"]
        assert {frame.opaque for frame in frames} == {n}


def test_who_followed_first_is_woken_first(node: MemoryNode, writer: Peer) -> None:
    """Otherwise a simulation could not be repeated."""
    woken: list[int] = []
    for n in range(20):
        peer = node.connect()
        peer.open(b"consumer%d" % n)
        peer.stream(VB)
        peer.drain()
        peer.producer._schedule = lambda n=n: woken.append(n)
    set_all(writer, "a")
    node.commit()
    assert woken == list(range(20))


@pytest.mark.all_partitions
def test_a_producer_that_closes_frees_the_hub(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    for vb_id in range(100):
        peer.stream(vb_id)
    assert (node.hub.connection_count, node.hub.stream_count) == (1, 100)
    peer.producer.close()
    assert (node.hub.connection_count, node.hub.stream_count) == (0, 0)
    set_all(writer, "a", 5)
    node.commit()
    assert not peer.producer.has_output


def test_a_commit_wakes_only_who_follows_a_partition_of_it(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    peer.stream(VB)
    peer.drain()
    called: list[int] = []
    peer.producer._schedule = lambda: called.append(1)
    set_all(writer, "a", VB + 1)
    node.commit()
    assert called == []
    set_all(writer, "a", VB)
    node.commit()
    assert called


# -- many backlogs -------------------------------------------------------------------------------


def backlogs_under_way(peer: Peer) -> int:
    return sum(
        stream.is_backlog and stream.snap_end_seqno is not None
        for stream in peer.producer._streams.values()
    )


@pytest.mark.all_partitions
def test_no_over_backlogs_max_are_under_way_and_none_starves(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    count = 3 * BACKLOGS_MAX
    follower = Follower(peer)
    for vb_id in range(count):
        set_all(writer, "abc", vb_id)
    node.commit()
    for vb_id in range(count):
        follower.follow(vb_id)
    most = 0
    while peer.producer.has_output:
        follower.pump(1)
        most = max(most, backlogs_under_way(peer))
    assert most == BACKLOGS_MAX
    assert follower.seqnos == dict.fromkeys(range(count), 3)


@pytest.mark.all_partitions
def test_streams_without_backlog_leave_their_place_to_others(
    node: MemoryNode, writer: Peer, peer: Peer
) -> None:
    """Busy ones take all places, then come many idle ones, then one more with a backlog."""
    follower = Follower(peer)
    last = 5 * BACKLOGS_MAX
    for vb_id in (*range(BACKLOGS_MAX), last):
        set_all(writer, "abc", vb_id)
    node.commit()
    for vb_id in range(last + 1):
        follower.follow(vb_id)
    for _ in range(BACKLOGS_MAX):
        follower.pump(1)
    assert backlogs_under_way(peer) == BACKLOGS_MAX
    follower.drain()
    assert follower.seqnos[last] == 3


@pytest.mark.parametrize("how", ["close", "branch"])
def test_stream_gone_before_it_begins_leaves_its_place(
    node: MemoryNode, writer: Peer, peer: Peer, how: str
) -> None:
    count = 2 * BACKLOGS_MAX + 1
    for vb_id in range(count):
        set_all(writer, "abc", vb_id)
    node.commit()
    for vb_id in range(count):
        peer.stream(vb_id)
    for _ in range(BACKLOGS_MAX + 200):
        peer.pump(1)
        waiting = [stream.vb_id for stream in peer.producer._waiting]
        admitted = [
            stream.vb_id
            for stream in peer.producer._ready
            if stream.is_backlog and stream.snap_end_seqno is None
        ]
        for vb_id in admitted if waiting else ():
            if how == "close":
                peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=vb_id)
            else:
                node.engine.keyspace.branch(vb_id, 3)
                node.commit()
    peer.drain()
    assert not peer.producer._waiting
    assert backlogs_under_way(peer) == 0


@pytest.mark.all_partitions
def test_a_branched_stream_gives_its_place_back(node: MemoryNode, writer: Peer, peer: Peer) -> None:
    follower = Follower(peer)
    count = BACKLOGS_MAX + 1
    for vb_id in range(count):
        set_all(writer, "abc", vb_id)
    node.commit()
    for vb_id in range(count):
        follower.follow(vb_id)
    for _ in range(BACKLOGS_MAX + 1):
        follower.pump(1)
    for vb_id in range(BACKLOGS_MAX):
        node.engine.keyspace.branch(vb_id, 0)
    node.commit()
    follower.drain()
    assert follower.ended == dict.fromkeys(range(BACKLOGS_MAX), EndReason.ROLLBACK)
    assert follower.seqnos[BACKLOGS_MAX] == 3


# -- what a connection negotiated ----------------------------------------------------------------


def frames_of(node: MemoryNode, flags: int, *features: int) -> list[Frame]:
    """Return what a connection with these flags and features sees of a set and a delete."""
    peer = node.connect()
    peer.hello(*features)
    peer.open(b"variant", flags)
    peer.control(b"enable_noop", b"true")
    peer.stream(VB)
    _, mutation, deletion = peer.drain()
    peer.producer.close()
    return [mutation, deletion]


@pytest.fixture
def stored(node: MemoryNode, writer: Peer) -> MemoryNode:
    extras = (0xABCD).to_bytes(4, "big") + (START_NS // 10**9 + 10_000_000).to_bytes(4, "big")
    writer.ask(Opcode.SET, vb_id=VB, key=b"set", value=b"value", extras=extras)
    set_all(writer, "x")
    writer.delete(VB, b"x")
    node.commit()
    return node


def test_without_collections_keys_have_no_prefix(stored: MemoryNode) -> None:
    mutation, deletion = frames_of(stored, 0x01)
    assert (mutation.key, mutation.value, deletion.key) == (b"set", b"value", b"x")
    numbers = parse_mutation(mutation)
    assert numbers == (1, 1, 0xABCD, START_NS // 10**9 + 10_000_000)
    assert len(deletion.extras) == 18
    assert parse_deletion(deletion)[:2] == (3, 2)
    assert mutation.wire_bytes == 55 + len(b"set") + len(b"value")
    assert deletion.wire_bytes == 42 + len(b"x")


def test_with_collections_keys_have_one_zero_byte_before(stored: MemoryNode) -> None:
    mutation, deletion = frames_of(stored, 0x01, Feature.COLLECTIONS)
    assert (mutation.key, deletion.key) == (b"\0set", b"\0x")


@pytest.mark.parametrize("flag", [0x08, 0x40])
@pytest.mark.parametrize("features", [(), (Feature.COLLECTIONS,)])
def test_without_values_nothing_else_changes(
    stored: MemoryNode, flag: int, features: tuple[int, ...]
) -> None:
    whole = frames_of(stored, 0x01, *features)
    bare = frames_of(stored, 0x01 | flag, *features)
    assert bare == [frame._replace(value=b"") for frame in whole]


@pytest.mark.parametrize("features", [(), (Feature.COLLECTIONS,)])
def test_with_delete_times_a_deletion_has_the_time_of_its_change(
    stored: MemoryNode, features: tuple[int, ...]
) -> None:
    mutation, deletion = frames_of(stored, 0x21, *features)
    assert len(deletion.extras) == 21
    assert parse_deletion(deletion) == (3, 2, START_NS // 10**9)
    assert mutation == frames_of(stored, 0x01, *features)[0]
    assert deletion.wire_bytes == 45 + len(deletion.key)


def test_all_variants_together(stored: MemoryNode) -> None:
    mutation, deletion = frames_of(stored, 0x29)
    assert (mutation.key, mutation.value) == (b"set", b"")
    assert (deletion.key, deletion.value) == (b"x", b"")
    assert parse_deletion(deletion).delete_time == START_NS // 10**9


def test_a_marker_of_version_1_is_what_everybody_gets(stored: MemoryNode) -> None:
    peer = stored.connect()
    peer.hello()
    peer.open()
    peer.stream(VB)
    marker = peer.drain()[0]
    assert (len(marker.extras), marker.key, marker.value) == (20, b"", b"")
    assert parse_marker(marker) == SnapshotMarker(0, 3, MarkerFlag.DISK)
