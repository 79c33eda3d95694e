"""DCP_OPEN flag 0x200: who begins with nothing need not be told what there is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import EndReason, OpenFlag, StreamFlag, parse_marker
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from stream.shape import VB, connect, set_all, shape
from support.memory_node import MemoryNode, Peer

FLAGS = OpenFlag.PRODUCER | OpenFlag.SKIP_DELETES_IN_BACKFILL
REMOVALS = {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}


def consumer(node: MemoryNode, *features: int, **controls: str) -> Peer:
    return connect(node, *features, flags=FLAGS, enable_noop="true", **controls)


def write(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "abc")
    writer.delete(VB, b"b")
    node.commit()
    set_all(node, writer, "d")


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("features", [(), (Feature.COLLECTIONS,)])
def test_the_backlog_of_a_new_consumer_has_no_deletions(
    node: MemoryNode, writer: Peer, features: tuple[int, ...], is_merged: bool
) -> None:
    write(node, writer)
    if is_merged:
        node.merge()
    peer = consumer(node, *features)
    peer.stream(VB)
    prefix = "\0" if features else ""
    assert shape(peer.drain()) == [(0, 5), f"1:{prefix}a", f"3:{prefix}c", f"5:{prefix}d"]


def test_after_the_backlog_deletions_come(node: MemoryNode, writer: Peer) -> None:
    write(node, writer)
    peer = consumer(node)
    peer.stream(VB)
    peer.drain()
    writer.delete(VB, b"a")
    node.commit()
    assert shape(peer.drain()) == [(6, 6), "6:-a"]


def test_of_an_empty_partition_everything_comes(node: MemoryNode, writer: Peer) -> None:
    """There is no backlog: what comes is live."""
    peer = consumer(node)
    peer.stream(VB)
    peer.drain()
    set_all(node, writer, "a")
    writer.delete(VB, b"a")
    node.commit()
    assert shape(peer.drain())[-1] == "2:-a"


def test_who_holds_something_is_told_of_deletions(node: MemoryNode, writer: Peer) -> None:
    write(node, writer)
    peer = consumer(node)
    peer.stream(VB, 1, uuid=node.engine.partitions[VB].vb_uuid)
    assert shape(peer.drain()) == [(1, 5), "3:c", "4:-b", "5:d"]


def test_where_deletion_is_last_change_snapshot_has_its_end(node: MemoryNode, writer: Peer) -> None:
    set_all(node, writer, "ab")
    writer.delete(VB, b"a")
    writer.delete(VB, b"b")
    node.commit()
    unaware, aware = consumer(node), consumer(node, Feature.COLLECTIONS)
    unaware.stream(VB, flags=StreamFlag.TO_LATEST)
    assert shape(unaware.drain()) == [(0, 4), "4:-b", EndReason.OK]
    aware.stream(VB, flags=StreamFlag.TO_LATEST)
    assert shape(aware.drain()) == [(0, 4), "4:", EndReason.OK]


def test_history_snapshots_have_every_deletion(node: MemoryNode, writer: Peer) -> None:
    write(node, writer)
    peer = consumer(node, change_streams="true")
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 5), "1:a", "2:b", "3:c", "4:-b", "5:d"]


def test_an_expiry_is_a_deletion(node: MemoryNode, writer: Peer) -> None:
    writer.ask(Opcode.SET, vb_id=VB, key=b"e", value=b"v", extras=b"\0\0\0\0\0\0\0\x0a")
    node.now_ns += 20_000_000_000
    assert writer.ask(Opcode.GET, vb_id=VB, key=b"e").status == Status.KEY_ENOENT
    set_all(node, writer, "a")
    peer = consumer(node, enable_expiry_opcode="true")
    peer.stream(VB)
    assert shape(peer.drain()) == [(0, 3), "3:a"]


def test_a_takeover_takes_deletions(node: MemoryNode) -> None:
    answer = consumer(node, Feature.COLLECTIONS).stream(VB, flags=StreamFlag.TAKEOVER)
    assert answer.status == Status.EINVAL


def seqno_of(frame: Frame) -> int:
    return int.from_bytes(frame.extras[:8], "big")


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=20),
    bytes_max=st.sampled_from([1, 100, 1 << 20]),
    knows_collections=st.booleans(),
)
def test_it_is_the_plain_backlog_less_its_deletions(
    steps: list[tuple[str, bool]], bytes_max: int, knows_collections: bool
) -> None:
    node = MemoryNode(3)
    writer = node.connect()
    writer.hello()
    for key, is_set in steps:
        if is_set:
            writer.set(VB, key.encode(), b"value")
        else:
            writer.delete(VB, key.encode())
    node.commit()
    features = (Feature.COLLECTIONS,) * knows_collections
    plain = connect(node, *features, enable_noop="true")
    plain.stream(VB)
    wanted = plain.drain()
    peer = consumer(node, *features)
    peer.stream(VB)
    found = peer.drain(bytes_max)
    if not wanted:
        assert found == []
        return
    end_seqno = parse_marker(wanted[0]).end_seqno
    left = [
        (frame.opcode, seqno_of(frame), frame.key)
        for frame in wanted
        if frame.opcode not in REMOVALS or (not knows_collections and seqno_of(frame) == end_seqno)
    ]
    if seqno_of(wanted[-1]) == end_seqno and wanted[-1].opcode in REMOVALS and knows_collections:
        left.append((Opcode.DCP_SEQNO_ADVANCED, end_seqno, b""))
    assert [(frame.opcode, seqno_of(frame), frame.key) for frame in found] == left
