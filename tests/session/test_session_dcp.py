"""DCP_OPEN, DCP_CONTROL and DCP_STREAM_REQ: what is accepted, refused and rolled back, in order."""

from __future__ import annotations

import pytest

from dcp.session.node_facts import Limits
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import (
    EndReason,
    StreamRequest,
    pack_stream_request,
    parse_failover_log,
    parse_marker,
    parse_mutation,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer, node_for
from vbucket.engine.partition import VbState

VB = 7


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    """A connection that is open for DCP, without collections."""
    peer = node.connect()
    peer.hello()
    assert peer.open().status == Status.OK
    return peer


@pytest.fixture
def filtering(node: MemoryNode) -> Peer:
    """A DCP connection with collections, so that its requests may carry a filter."""
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    peer.open(b"filtering")
    assert peer.control(b"enable_noop", b"true").status == Status.OK
    return peer


def write(node: MemoryNode, count: int, vb_id: int = VB) -> int:
    """Set `count` documents, commit, return the partition's uuid."""
    peer = node.connect()
    peer.hello()
    for n in range(count):
        peer.set(vb_id, b"key%d" % n, b"value%d" % n)
    node.commit()
    return node.engine.partitions[vb_id].vb_uuid


def rollback_of(answer: Frame) -> int:
    assert answer.status == Status.ROLLBACK
    assert len(answer.value) == 8, "a rollback is 8 bytes and nothing else"
    assert (answer.extras, answer.key) == (b"", b"")
    return int.from_bytes(answer.value, "big")


def seqnos_of(frames: list[Frame]) -> list[int]:
    return [parse_mutation(f).by_seqno for f in frames if f.opcode == Opcode.DCP_MUTATION]


# -- DCP_OPEN ----------------------------------------------------------------------------------


def opened(node: MemoryNode, name: bytes, flags: int) -> int:
    return node.connect().open(name, flags).status


@pytest.mark.parametrize("flags", [0x01, 0x05, 0x09, 0x21, 0x41, 0x105, 0x165])
def test_open_takes_the_flags_of_a_producer(node: MemoryNode, flags: int) -> None:
    assert opened(node, b"name", flags) == Status.OK


@pytest.mark.parametrize("flags", [0x03, 0x11, 0x81, 0x80000001, 0x49, 0x101])
def test_open_with_unknown_or_contradicting_flags_is_einval(node: MemoryNode, flags: int) -> None:
    assert opened(node, b"name", flags) == Status.EINVAL


def test_open_as_a_consumer_is_not_supported(node: MemoryNode) -> None:
    assert opened(node, b"name", 0) == Status.NOT_SUPPORTED


def test_a_name_has_1_to_200_bytes(node: MemoryNode) -> None:
    assert opened(node, b"", 1) == Status.EINVAL
    assert opened(node, b"n" * 200, 1) == Status.OK
    assert opened(node, b"n" * 201, 1) == Status.EINVAL


def test_open_has_8_bytes_of_extras(node: MemoryNode) -> None:
    answer = node.connect().ask(Opcode.DCP_OPEN, key=b"name", extras=bytes(4))
    assert answer.status == Status.EINVAL


def test_a_second_open_on_a_connection_is_einval(peer: Peer) -> None:
    assert peer.open(b"other").status == Status.EINVAL


def test_an_open_that_was_refused_may_be_repeated(node: MemoryNode) -> None:
    peer = node.connect()
    assert peer.open(b"name", 0x03).status == Status.EINVAL
    assert peer.open(b"name", 0x01).status == Status.OK


def test_the_same_name_elsewhere_supersedes_the_older_connection(node: MemoryNode) -> None:
    older, newer = node.connect(), node.connect()
    called: list[str] = []
    older.state.schedule = lambda: called.append("older")
    older.open(b"name")
    newer.open(b"name")
    assert older.producer.is_superseded
    assert not newer.producer.is_superseded
    assert called == ["older"], "the shell is called, to close it"
    older.producer.close()
    newest = node.connect()
    newest.open(b"name")
    assert newer.producer.is_superseded, "the older one's end did not unregister the newer"


@pytest.mark.parametrize(
    "opcode", [Opcode.DCP_CONTROL, Opcode.DCP_STREAM_REQ, Opcode.DCP_CLOSE_STREAM]
)
def test_dcp_commands_before_open_are_einval(node: MemoryNode, opcode: int) -> None:
    assert node.connect().ask(opcode, key=b"k", value=b"v").status == Status.EINVAL


def test_add_stream_disconnects(peer: Peer) -> None:
    assert peer.ask(Opcode.DCP_ADD_STREAM, extras=bytes(4)).status == Status.EINVAL
    assert peer.state.is_closing


def test_documents_are_served_on_a_dcp_connection_too(peer: Peer) -> None:
    assert peer.set(VB, b"k", b"v").status == Status.OK


# -- DCP_CONTROL -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("enable_noop", ["true", "false"], ["1", "TRUE", "yes"]),
        (
            "set_noop_interval",
            ["0.1", "1", "20", "180", "10800"],
            ["0", "0.05", "-1", "nan", "inf", "x"],
        ),
        (
            "connection_buffer_size",
            ["0", "1", "20971520", "4294967295"],
            ["-1", "1.5", "4294967296", "9" * 200, "²", "+1", "0x10", " 1"],
        ),
        ("set_priority", ["high", "medium", "low"], ["highest"]),
        ("backfill_order", ["round-robin", "sequential"], ["random"]),
        ("send_stream_end_on_client_close_stream", ["true", "false"], ["x"]),
        ("enable_expiry_opcode", ["true", "false"], ["x"]),
        ("supports_cursor_dropping", ["true"], []),
        ("supports_cursor_dropping_vulcan", ["true"], []),
        ("supports_hifi_MFU", ["true"], []),
        ("include_deleted_user_xattrs", [], ["true", "false", "x"]),
        ("enable_stream_id", ["true"], ["false", "x"]),
        ("change_streams", ["true"], ["false", "x"]),
        ("v7_dcp_status_codes", ["true"], ["false", "x"]),
        ("consumer_name", ["any"], []),
        ("enable_out_of_order_snapshots", ["true", "true_with_seqno_advanced"], ["false", "1"]),
        ("x_version_log", ["true", "false"], ["1"]),
        ("x_snapshot_end", ["true", "false"], ["1"]),
        ("x_closed_times", ["true"], ["false", "1"]),
        ("x_exact_end", ["true", "false"], ["1"]),
        ("x_previous_value", ["true", "false"], ["1"]),
    ],
)
def test_controls_that_are_taken(peer: Peer, key: str, good: list[str], bad: list[str]) -> None:
    for value in good:
        assert peer.control(key.encode(), value.encode()).status == Status.OK, value
    for value in bad:
        assert peer.control(key.encode(), value.encode()).status == Status.EINVAL, value


@pytest.mark.parametrize(
    "key",
    [
        "stream_buffer_size",
        "enable_sync_writes",
        "flatbuffers_system_events",
        "max_marker_version",
        "cache_transfer",
    ],
)
def test_controls_that_are_known_and_off_are_not_supported(peer: Peer, key: str) -> None:
    assert peer.control(key.encode(), b"true").status == Status.NOT_SUPPORTED


@pytest.mark.parametrize("key", [b"no_such_control", b"Enable_Noop", b"\xff"])
def test_an_unknown_control_is_einval(peer: Peer, key: bytes) -> None:
    assert peer.control(key, b"true").status == Status.EINVAL


def test_a_control_has_a_key_and_a_value_and_no_extras(peer: Peer) -> None:
    assert peer.control(b"", b"true").status == Status.EINVAL
    assert peer.control(b"enable_noop", b"").status == Status.EINVAL
    answer = peer.ask(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true", extras=bytes(4))
    assert answer.status == Status.EINVAL
    assert not peer.producer.keepalive.is_enabled


def test_control_of_absurd_length_is_einval_with_short_log_line(peer: Peer) -> None:
    for key, value in (
        (b"connection_buffer_size", b"1" * 5000),
        (b"k" * 60_000, b"true"),
        (b"set_priority", b"x" * 1_000_000),
    ):
        assert peer.control(key, value).status == Status.EINVAL
    assert all(len(str(fields)) < 1000 for _, fields in peer.state.notes.lines)


# -- the order of checks of STREAM_REQ --------------------------------------------


def ask_stream(peer: Peer, **parts: int | bytes) -> Frame:
    return peer.ask(Opcode.DCP_STREAM_REQ, **parts)


def asked(
    start: int = 0, end: int = 2**64 - 1, *, flags: int = 0, uuid: int = 0, snap: int | None = None
) -> bytes:
    snap = start if snap is None else snap
    packet = pack_stream_request(0, StreamRequest(flags, start, end, uuid, snap, snap), 0)
    return packet[24:]


def test_1_extras_have_48_bytes(peer: Peer) -> None:
    for length in (0, 47, 49):
        assert ask_stream(peer, vb_id=5000, extras=bytes(length)).status == Status.EINVAL


def test_1_a_key_is_einval(peer: Peer) -> None:
    assert ask_stream(peer, vb_id=5000, extras=asked(), key=b"k").status == Status.EINVAL


@pytest.mark.parametrize("flags", [0x08, 0x100, 0x80000000])
def test_1_unknown_flags_are_einval(peer: Peer, flags: int) -> None:
    assert ask_stream(peer, vb_id=5000, extras=asked(flags=flags)).status == Status.EINVAL


def test_1_a_value_without_collections_is_einval(peer: Peer) -> None:
    answer = ask_stream(peer, vb_id=5000, extras=asked(), value=b'{"uid":"0"}')
    assert answer.status == Status.EINVAL


def test_2_an_unknown_partition_comes_before_ranges(node: MemoryNode, peer: Peer) -> None:
    answer = ask_stream(peer, vb_id=1024, extras=asked(5, 3))
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())


@pytest.mark.parametrize(
    ("state", "flags", "is_taken"),
    [
        (VbState.ACTIVE, 0, True),
        (VbState.ACTIVE, 0x10, True),
        (VbState.REPLICA, 0, True),
        (VbState.REPLICA, 0x10, False),
        (VbState.PENDING, 0, False),
        (VbState.DEAD, 0, False),
    ],
)
def test_3_a_stream_needs_an_active_partition_or_a_replica(
    node: MemoryNode, peer: Peer, state: VbState, flags: int, is_taken: bool
) -> None:
    node.engine.partitions[VB].state = state
    expected = Status.OK if is_taken else Status.NOT_MY_VBUCKET
    assert peer.stream(VB, flags=flags).status == expected


def test_3_the_state_comes_before_noop_and_ranges(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    peer.open()
    node.engine.partitions[VB].state = VbState.DEAD
    assert peer.stream(VB, 5, 3).status == Status.NOT_MY_VBUCKET


def test_4_from_latest_starts_at_high_seqno_whatever_was_asked(
    node: MemoryNode, peer: Peer
) -> None:
    write(node, 5)
    assert peer.stream(VB, 99, snap=(1, 2), flags=0x40).status == Status.OK
    assert peer.drain() == []
    write(node, 1)
    marker, mutation = peer.drain()
    assert parse_marker(marker)[:2] == (5, 6)
    assert parse_mutation(mutation).by_seqno == 6


def test_4_from_latest_takes_the_current_uuid_and_no_unknown_one(
    node: MemoryNode, peer: Peer
) -> None:
    uuid = write(node, 5)
    assert rollback_of(peer.stream(VB, flags=0x40, uuid=uuid + 1)) == 0
    assert peer.stream(VB, flags=0x40, uuid=uuid).status == Status.OK


def test_4_from_latest_of_an_empty_partition_is_from_zero(node: MemoryNode, peer: Peer) -> None:
    assert peer.stream(VB, flags=0x40).status == Status.OK
    write(node, 1)
    assert seqnos_of(peer.drain()) == [1]


def test_5_collections_need_noop_before_ranges_are_looked_at(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    peer.open()
    assert peer.stream(VB, 5, 3).status == Status.NOT_SUPPORTED
    peer.control(b"enable_noop", b"true")
    assert peer.stream(VB, 5, 3).status == Status.ERANGE


def test_5_xattrs_need_noop_too(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello()
    peer.open(flags=0x05)
    assert peer.stream(VB).status == Status.NOT_SUPPORTED
    peer.control(b"enable_noop", b"true")
    assert peer.stream(VB).status == Status.OK


def test_6_start_above_end_is_erange_before_the_filter(filtering: Peer) -> None:
    assert filtering.stream(VB, 5, 4, value=b"garbage").status == Status.ERANGE


@pytest.mark.parametrize("snap", [(6, 8), (1, 4), (8, 3)])
def test_7_start_outside_of_its_snapshot_is_erange_before_filter(
    filtering: Peer, snap: tuple[int, int]
) -> None:
    assert filtering.stream(VB, 5, snap=snap, value=b"garbage").status == Status.ERANGE


def test_8_a_bad_filter_comes_before_an_open_stream(filtering: Peer) -> None:
    assert filtering.stream(VB).status == Status.OK
    assert filtering.stream(VB, value=b"garbage").status == Status.EINVAL


def test_9_an_open_stream_comes_before_the_rollback_test(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    assert peer.stream(VB).status == Status.OK
    assert peer.stream(VB, 2, uuid=1).status == Status.KEY_EEXISTS
    assert peer.stream(VB + 1).status == Status.OK


def test_9_a_stream_that_ended_may_be_asked_for_again(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    assert peer.stream(VB, end=2).status == Status.OK
    peer.drain()
    assert peer.stream(VB, end=0).status == Status.OK
    assert peer.stream(VB).status == Status.OK
    peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB)
    assert peer.stream(VB).status == Status.OK


def test_10_rollback_test_comes_before_end_is_overwritten(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    assert rollback_of(peer.stream(VB, 9, uuid=1, flags=0x04)) == 0


def test_11_to_latest_ends_at_the_high_seqno(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    assert peer.stream(VB, flags=0x04).status == Status.OK
    write(node, 2)
    *frames, end = peer.drain()
    assert seqnos_of(frames) == [1, 2, 3]
    assert parse_stream_end(end) == EndReason.OK


def test_11_disk_only_ends_at_the_persisted_seqno(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    peer.set(VB, b"unsynced", b"v")
    group = node.engine.keyspace.take_group()
    assert group is not None
    node.engine.keyspace.group_synced(group, is_on_disk=False)
    assert peer.stream(VB, flags=0x02).status == Status.OK
    *frames, end = peer.drain()
    assert seqnos_of(frames) == [1, 2, 3]
    assert parse_stream_end(end) == EndReason.OK


def test_11_start_above_the_overwritten_end_is_erange(node: MemoryNode, peer: Peer) -> None:
    uuid = write(node, 3)
    peer.set(VB, b"uncommitted", b"v")
    assert peer.stream(VB, 4, uuid=uuid, flags=0x04).status == Status.ERANGE


def test_12_the_limit_of_streams_comes_last(node: MemoryNode) -> None:
    peer = node.connect(limits=Limits(streams_max=2))
    peer.hello()
    peer.open()
    assert peer.stream(0).status == Status.OK
    assert peer.stream(1).status == Status.OK
    assert rollback_of(peer.stream(2, 1, uuid=1)) == 0
    assert peer.stream(2).status == Status.ENOMEM
    peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=0)
    assert peer.stream(2).status == Status.OK


def test_13_ok_carries_the_failover_log_newest_first(node: MemoryNode, peer: Peer) -> None:
    first = write(node, 5)
    second = node.engine.keyspace.branch(VB, 4).failover.current.vb_uuid
    third = node.engine.keyspace.branch(VB, 4).failover.current.vb_uuid
    node.commit()
    answer = peer.stream(VB, opaque=0xABCD)
    assert (answer.status, answer.opaque) == (Status.OK, 0xABCD)
    assert parse_failover_log(answer.value) == [(third, 4), (second, 4), (first, 0)]


def test_13_ok_and_messages_follow_each_other(node: MemoryNode, peer: Peer) -> None:
    write(node, 1)
    peer.stream(VB)
    assert [f.opcode for f in peer.drain()] == [Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_MUTATION]


# -- rollback over real histories ------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "snap", "known", "back_to"),
    [
        (1, 3, (1, 1), False, 0),
        (1, 3, (1, 4), True, None),
        (4, 4, (4, 4), True, 3),
        (7, 7, (2, 7), True, 3),
        (2, 2**64 - 1, (1, 5), True, 1),
        (3, 2**64 - 1, (3, 3), True, None),
        (0, 2**64 - 1, (0, 0), False, None),
    ],
)
def test_worked_cases_with_high_seqno_3(
    node: MemoryNode,
    peer: Peer,
    start: int,
    end: int,
    snap: tuple[int, int],
    known: bool,
    back_to: int | None,
) -> None:
    uuid = write(node, 3)
    answer = peer.stream(VB, start, end, uuid=uuid if known else 0, snap=snap)
    if back_to is None:
        assert answer.status == Status.OK
    else:
        assert rollback_of(answer) == back_to


def test_a_branch_sends_its_followers_back_to_where_it_began(node: MemoryNode, peer: Peer) -> None:
    old = write(node, 10)
    new = node.engine.keyspace.branch(VB, 9).failover.current.vb_uuid
    node.commit()
    assert rollback_of(peer.stream(VB, 10, uuid=old)) == 9
    answer = peer.stream(VB, 9, uuid=old)
    assert parse_failover_log(answer.value) == [(new, 9), (old, 0)]
    write(node, 1)
    assert seqnos_of(peer.drain()) == [10]


def test_a_version_that_a_deeper_branch_dropped_is_unknown(node: MemoryNode, peer: Peer) -> None:
    first = write(node, 10)
    second = node.engine.keyspace.branch(VB, 8).failover.current.vb_uuid
    write(node, 4)
    third = node.engine.keyspace.branch(VB, 5).failover.current.vb_uuid
    node.commit()
    assert rollback_of(peer.stream(VB, 12, uuid=second)) == 0, "dropped: it began above 5"
    assert rollback_of(peer.stream(VB, 10, uuid=first)) == 5
    answer = peer.stream(VB, 5, uuid=first)
    assert parse_failover_log(answer.value) == [(third, 5), (first, 0)]


def test_after_a_branch_merged_and_restarted_the_answer_is_same(
    node: MemoryNode,
) -> None:
    old = write(node, 10)
    node.merge()
    node.engine.keyspace.branch(VB, 6)
    node.merge()
    node.crash()
    peer = node.connect()
    peer.hello()
    peer.open()
    assert rollback_of(peer.stream(VB, 10, uuid=old)) == 6


def test_strict_checks_the_uuid_at_seqno_0_too(node: MemoryNode, peer: Peer) -> None:
    uuid = write(node, 3)
    assert rollback_of(peer.stream(VB, 0, uuid=uuid + 1, flags=0x20)) == 0
    assert peer.stream(VB, 0, uuid=uuid, flags=0x20).status == Status.OK
    assert peer.stream(VB + 1, 0, uuid=0, flags=0x20).status == Status.OK
    assert peer.stream(VB + 2, 0, uuid=99).status == Status.OK, (
        "without the flag it is not looked at"
    )


def test_who_may_have_missed_purged_deletions_goes_back_to_0(
    node: MemoryNode, filtering: Peer
) -> None:
    uuid = write(node, 10)
    node.engine.partitions[VB].purge_seqno = 5
    assert rollback_of(filtering.stream(VB, 4, uuid=uuid)) == 0
    ignoring = filtering.stream(VB, 4, uuid=uuid, flags=0x80)
    assert ignoring.status == Status.OK
    filtering.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB)
    told = filtering.stream(VB, 4, uuid=uuid, value=b'{"purge_seqno":"5"}')
    assert told.status == Status.OK
    filtering.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB)
    assert rollback_of(filtering.stream(VB, 4, uuid=uuid, value=b'{"purge_seqno":"4"}')) == 0
    assert filtering.stream(VB, 5, uuid=uuid).status == Status.OK


def test_a_rollback_leaves_no_stream_and_a_reason_in_the_log(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    rollback_of(peer.stream(VB, 2, uuid=99))
    assert not peer.producer.has_stream(VB)
    event, fields = peer.state.notes.lines[-1]
    assert event == "rollback"
    assert fields["vb_id"] == VB
    assert "99" in str(fields["reason"])


# -- closing streams ---------------------------------------------------------------------------


def test_close_stream_without_a_stream_is_enoent(peer: Peer) -> None:
    assert peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB).status == Status.KEY_ENOENT
    assert peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=5000).status == Status.KEY_ENOENT


def test_close_stream_ends_silently(node: MemoryNode, peer: Peer) -> None:
    write(node, 3)
    peer.stream(VB)
    assert peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB, opaque=99).status == Status.OK
    assert peer.drain() == []
    write(node, 1)
    assert peer.drain() == []


def test_close_stream_is_followed_by_stream_end_if_controlled(node: MemoryNode, peer: Peer) -> None:
    peer.control(b"send_stream_end_on_client_close_stream", b"true")
    write(node, 3)
    peer.stream(VB, opaque=0xBEEF)
    assert peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB, opaque=99).opaque == 99
    (end,) = peer.drain()
    assert (parse_stream_end(end), end.opaque, end.vb_id) == (EndReason.CLOSED, 0xBEEF, VB)


@pytest.mark.all_partitions
def test_all_streams_may_be_asked_for_in_one_read(node: MemoryNode, peer: Peer) -> None:
    for vb_id in range(0, 1024, 100):
        write(node, 1, vb_id)
    request = StreamRequest(0, 0, 2**64 - 1, 0, 0, 0)
    answers = peer.send(
        b"".join(pack_stream_request(vb_id, request, 1000 + vb_id) for vb_id in range(1024))
    )
    assert [answer.opaque for answer in answers] == list(range(1000, 2024))
    assert {answer.status for answer in answers} == {Status.OK}
    mutations = [f for f in peer.drain() if f.opcode == Opcode.DCP_MUTATION]
    assert sorted(f.vb_id for f in mutations) == list(range(0, 1024, 100))
    assert all(f.opaque == 1000 + f.vb_id for f in mutations)
