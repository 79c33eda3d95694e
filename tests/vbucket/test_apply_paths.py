"""The four ways in which a change reaches a partition leave the same behind.

Single commands go through `Keyspace.apply`, packets of frames through `Keyspace.apply_many`, a
start through `Replay.apply`, and the changes of a master through `ReplicatedChanges.apply`. They
are apart because each is fast at its own work.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.frame import HEADER_BYTES
from dcp.wire.message import U32
from support.memory_node import START_NS, MemoryNode
from vbucket.engine.engine import SET
from vbucket.engine.keyspace import DELETION, EXPIRATION, MUTATION
from vbucket.engine.loading.bulk import Frames
from vbucket.engine.replicated import ReplicatedChanges
from vbucket.model.entry import PREFIX_BYTES

VB = 3
COLLECTION = 8
KEYS = [b"\0a", b"\0b", b"\0c", b"\x08a", b"\x08b"]
START_S = START_NS // 10**9

changes = st.tuples(
    st.sampled_from(["set", "set", "delete", MUTATION, DELETION, EXPIRATION]),
    st.sampled_from(KEYS),
    st.binary(max_size=3),
    st.sampled_from([0, 0, START_S + 50, START_S + 60]),
    st.integers(1, 5),
)


class Left(NamedTuple):
    """What changes leave of a partition."""

    entries: list[bytes]
    newest: dict[bytes, bytes]
    high_seqno: int
    max_cas: int
    item_count: int
    tally: object
    due: list[bytes]


def left_on(node: MemoryNode) -> Left:
    part = node.engine.partitions[VB]
    return Left(
        part.active.entries,
        part.newest,
        part.high_seqno,
        part.max_cas,
        part.item_count,
        part.tally.to_document(),
        sorted(entry for held in node.engine.due.active.lists() for entry in held),
    )


def new_node() -> MemoryNode:
    node = MemoryNode(partitions=8)
    manifest = node.engine.keyspace.manifest.create_collection("_default", "other")
    assert COLLECTION in manifest.collections
    node.engine.keyspace.set_manifest(manifest)
    node.commit()
    return node


def change(node: MemoryNode, story: list[tuple[str | int, bytes, bytes, int, int]]) -> None:
    """Do single commands."""
    engine = node.engine
    for kind, key, value, expiry, number in story:
        node.now_ns += 1 << 16
        engine.begin_batch(node.now_ns)
        if kind == "set":
            assert engine.store(SET, VB, key, key + value, 7, expiry, 0, 0)[0] == 0
        elif kind == "delete":
            engine.delete(VB, key, 0)
        else:
            assert isinstance(kind, int)
            body = key + value if kind == MUTATION else key
            outcome = engine.put_with_meta(
                kind, VB, key, body, 7, expiry, 0, number, START_NS + number, 0,
                resolves_conflict=False,
            )  # fmt: skip
            assert outcome[0] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(changes, max_size=12), st.integers(0, 11))
def test_single_commands_packets_and_a_replay_leave_the_same(
    story: list[tuple[str | int, bytes, bytes, int, int]], before: int
) -> None:
    """The packet holds what comes after the first `before` changes, the others are there before."""
    one, many = new_node(), new_node()
    change(one, story[:before])
    change(many, story[:before])
    first_seqno = one.engine.partitions[VB].high_seqno + 1
    change(one, story[before:])
    frames = [
        entry[PREFIX_BYTES:]
        for entry in one.engine.partitions[VB].active.between(first_seqno, 2**63)
    ]
    if frames:
        table = b"".join(U32.pack(len(frame) - HEADER_BYTES) for frame in frames)
        packet = Frames(table + b"".join(frames), len(frames), VB)
        outcome = many.engine.put_frames(packet, resolves_conflict=False)
        assert outcome == (0, len(frames), 0, 0)
    assert left_on(many) == left_on(one)
    groups = [node.groups.next_job() for node in (one, many)]
    assert groups[0] == groups[1], "the log gets the same"
    if groups[0] is not None:
        one.finish(groups[0])
    expected = left_on(one)
    one.crash()
    assert left_on(one) == expected


def sync(node: MemoryNode, moment: str) -> None:
    """Sync the open group; then leave the changes in memory, freeze them, or merge them."""
    node.commit()
    if moment != "in memory":
        node.begin_merge()
    if moment == "merged":
        node.end_merge()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(changes, max_size=12),
    st.integers(0, 11),
    st.sampled_from(["in memory", "frozen", "merged"]),
)
def test_a_replica_is_left_like_its_master(
    story: list[tuple[str | int, bytes, bytes, int, int]], before: int, moment: str
) -> None:
    """The first `before` changes are in memory, frozen or in the store when the others come."""
    master, replica = new_node(), new_node()
    applied = ReplicatedChanges(replica.engine, replica.store)
    part = replica.engine.partitions[VB]
    for changed in (story[:before], story[before:]):
        first_seqno = master.engine.partitions[VB].high_seqno + 1
        change(master, changed)
        applied.apply(part, master.engine.partitions[VB].active.between(first_seqno, 2**63))
        groups = [node.groups.next_job() for node in (master, replica)]
        assert groups[0] == groups[1], "the log gets the same"
        for node, group in zip((master, replica), groups, strict=True):
            if group is not None:
                node.finish(group)
        applied.settle()
        assert left_on(replica) == left_on(master)
        sync(master, moment)
        sync(replica, moment)
        moment = "in memory"
    expected = left_on(master)
    replica.crash()
    assert left_on(replica).item_count == expected.item_count
    assert left_on(replica).tally == expected.tally
