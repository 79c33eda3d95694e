"""What is synced and what is committed, partition by partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.memory_node import MemoryNode
from vbucket.engine.engine import SET, Engine
from vbucket.log.commit_group import CommitGroup

ALONE, COPIED, ALSO_COPIED = 1, 2, 3


def engine_with_copies() -> Engine:
    """Return an engine; two of its partitions have replicas."""
    engine = MemoryNode(partitions=4).engine
    for vb_id in (COPIED, ALSO_COPIED):
        engine.partitions[vb_id].has_copies = True
    return engine


def write(engine: Engine, *vb_ids: int) -> CommitGroup:
    """Change a document in each of these partitions; return the group."""
    for vb_id in vb_ids:
        assert engine.store(SET, vb_id, b"\0k", b"\0kv", 0, 0, 0, 0)[0] == 0
    group = engine.keyspace.take_group()
    assert group is not None
    return group


def seqnos(engine: Engine, vb_id: int) -> tuple[int, int, int]:
    part = engine.partitions[vb_id]
    return part.high_seqno, part.synced_seqno, part.committed_seqno


def test_a_sync_commits_what_has_no_replicas_and_nothing_else() -> None:
    engine = engine_with_copies()
    group = write(engine, ALONE, COPIED)
    assert seqnos(engine, ALONE) == seqnos(engine, COPIED) == (1, 0, 0)
    engine.keyspace.group_synced(group)
    assert seqnos(engine, ALONE) == (1, 1, 1)
    assert seqnos(engine, COPIED) == (1, 1, 0)
    commits = engine.commits
    assert (commits.synced_group, commits.committed_group) == (1, 0)
    assert commits.is_committed(ALONE, 1)
    assert not commits.is_committed(COPIED, 1)
    assert commits.commit(COPIED, 1)
    commits.settle()
    assert seqnos(engine, COPIED) == (1, 1, 1)
    assert commits.committed_group == 1


def test_partitions_commit_independently() -> None:
    engine = engine_with_copies()
    commits = engine.commits
    for _ in range(3):
        engine.keyspace.group_synced(write(engine, COPIED, ALSO_COPIED))
    assert commits.commit(COPIED, 2)
    commits.settle()
    assert seqnos(engine, COPIED) == (3, 3, 2)
    assert seqnos(engine, ALSO_COPIED) == (3, 3, 0)
    assert commits.is_committed(COPIED, 2)
    assert not commits.is_committed(COPIED, 3)
    assert not commits.is_committed(ALSO_COPIED, 1)
    assert commits.committed_group == 0
    engine.keyspace.group_synced(write(engine, ALONE))
    assert commits.is_committed(ALONE, 4), "what stands still stops nobody else"
    assert not commits.commit(COPIED, 2), "that is nothing new"


def test_a_branch_lowers_what_its_groups_commit() -> None:
    engine = engine_with_copies()
    for _ in range(3):
        engine.keyspace.group_synced(write(engine, COPIED))
    engine.keyspace.branch(COPIED, 1)
    assert engine.commits.commit(COPIED, 1)
    engine.commits.settle()
    assert engine.commits.committed_group == 3


@given(
    steps=st.lists(
        st.one_of(
            st.sets(st.sampled_from([ALONE, COPIED, ALSO_COPIED]), min_size=1),
            st.tuples(st.sampled_from([COPIED, ALSO_COPIED]), st.integers(1, 12)),
            st.none(),
        ),
        max_size=20,
    )
)
def test_against_a_table_of_every_group(
    steps: list[set[int] | tuple[int, int] | None],
) -> None:
    """A step writes a group, commits a partition up to a seqno, or syncs the oldest group."""
    engine = engine_with_copies()
    commits = engine.commits
    taken: list[CommitGroup] = []
    groups: list[dict[int, int]] = []  # per group: partition -> seqno
    upto = dict.fromkeys((COPIED, ALSO_COPIED), 0)
    for step in steps:
        if step is None:
            if len(groups) > commits.synced_group:
                engine.keyspace.group_synced(taken[commits.synced_group])
        elif isinstance(step, set):
            taken.append(write(engine, *step))
            groups.append(dict(taken[-1].high_seqnos))
        else:
            vb_id, seqno = step
            seqno = min(seqno, engine.partitions[vb_id].synced_seqno)
            commits.commit(vb_id, seqno)
            commits.settle()
            upto[vb_id] = max(upto[vb_id], seqno)
        synced = commits.synced_group
        upto[ALONE] = engine.partitions[ALONE].synced_seqno
        for vb_id, seqno in upto.items():
            assert engine.partitions[vb_id].committed_seqno == seqno
            for at in range(1, len(groups) + 1):
                ends = [group[vb_id] for group in groups[:at] if vb_id in group]
                expected = at <= synced and all(end <= seqno for end in ends)
                assert commits.is_committed(vb_id, at) == expected


def test_groups_tell_log_high_watermarks_and_start_knows_them() -> None:
    node = MemoryNode(partitions=4)
    engine = node.engine
    engine.partitions[COPIED].has_copies = True

    def set_(value: bytes) -> None:
        engine = node.engine
        assert engine.store(SET, COPIED, b"\0k", b"\0k" + value, 0, 0, 0, 0)[0] == 0
        node.commit()

    set_(b"1")
    set_(b"2")
    engine.commits.commit(COPIED, 1)
    engine.keyspace.watermarks[COPIED] = 1
    assert node.groups.next_job() is None, "a watermark alone makes no group"
    set_(b"3")
    node.merge()  # the segment that told it is deleted; the next one tells all again
    set_(b"4")
    node.crash()
    assert node.engine.keyspace.known_watermarks == {COPIED: 1}
    assert node.engine.partitions[COPIED].high_seqno == 4


def test_a_watermark_above_a_rollback_is_not_known_any_more() -> None:
    node = MemoryNode(partitions=4)
    part = node.engine.partitions[COPIED]
    part.has_copies = True
    for value in (b"1", b"2", b"3"):
        assert node.engine.store(SET, COPIED, b"\0k", b"\0k" + value, 0, 0, 0, 0)[0] == 0
    node.engine.keyspace.watermarks[COPIED] = 3
    node.commit()
    node.engine.keyspace.branch(COPIED, 2)
    node.commit()
    node.crash()
    assert node.engine.keyspace.known_watermarks == {COPIED: 2}
