"""The seqno before a moment, against a scan of everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode
from vbucket.upkeep.seqno_at_time import seqno_before

VB = 3


def found(node: MemoryNode, time_ns: int, *, after_seqno: int = 0) -> int:
    end_seqno = node.engine.partitions[VB].committed_seqno
    return seqno_before(
        node.engine.versions.frames, VB, end_seqno, time_ns, after_seqno=after_seqno
    )


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(0, 5), max_size=25),
    merges_at=st.sets(st.integers(0, 25)),
    back=st.integers(0, 4),
    asked=st.integers(-2, 140),
)
def test_all_changes_at_or_after_moment_lie_above_and_no_other(steps, merges_at, back, asked):
    node = MemoryNode(2)
    writer = node.connect()
    writer.hello()
    cas_of = {}
    for number, step in enumerate(steps, 1):
        node.now_ns += step << 16
        node.engine.begin_batch(node.now_ns)
        answer = writer.set(VB, b"k%d" % (number % 4), b"v")
        assert answer.status == Status.OK
        cas_of[number] = answer.cas
        node.commit()
        if number in merges_at:
            node.merge()
    at_seqno = max(0, len(steps) - back)
    if back and steps and at_seqno:
        node.engine.keyspace.branch(VB, at_seqno)
        node.commit()
        cas_of = {seqno: cas for seqno, cas in cas_of.items() if seqno <= at_seqno}
    time_ns = (START_NS & ~0xFFFF) + (asked << 16)
    newer = [seqno for seqno, cas in sorted(cas_of.items()) if cas >= time_ns]
    expected = newer[0] - 1 if newer else node.engine.partitions[VB].committed_seqno
    assert found(node, time_ns) == expected
    for known in range(expected + 1):
        assert found(node, time_ns, after_seqno=known) == expected


@pytest.mark.parametrize("time_ns", [0, 2**64 - 1])
def test_an_empty_partition_is_at_zero(time_ns):
    assert found(MemoryNode(1), time_ns) == 0
