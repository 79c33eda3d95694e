"""Five branches of history between two runs: the second one transfers what differs, not all.

One version per partition, as plain DCP clients name it, is the contrast: the server does not know
the branch that the archive was last on, and everything comes again."""

from __future__ import annotations

import pytest

from clients.backup.archives.legs import whole_states
from clients.backup.archives.point import Point, chain_of
from dcp.wire.feature import Feature
from support.backup_pair import back_up, memory_archive, state_as_of
from support.memory_node import MemoryNode

VB_IDS = tuple(range(8))
DOCUMENTS = 600
VALUE = bytes(120)
FRAME_BYTES = 24 + 31 + 9 + len(VALUE)
"""A change on the wire: header, extras, a key of 8 bytes and its collection, value."""


@pytest.fixture(scope="module")
def histories():
    """A node, archives of it with two runs each, and what the node held at the first run; then
    five branches, the first of which undoes the version that the archives know as the newest.
    """
    node = MemoryNode(7)
    writer = node.connect()
    writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)

    def write(first, count, value=VALUE):
        for number in range(first, first + count):
            for vb_id in VB_IDS:
                writer.set(vb_id, b"\0key%05d" % number, value)
        node.commit()

    def branch(at):
        for vb_id in VB_IDS:
            node.engine.keyspace.branch(vb_id, at)
        node.commit()

    write(0, DOCUMENTS - 40)
    branch(DOCUMENTS - 50)  # the version that the archives end on begins here
    write(20_000, 50)
    archives = {name: memory_archive() for name in ("all", "one")}
    for archive in archives.values():
        back_up(node, archive, VB_IDS)
    then = state_as_of(archives["all"], VB_IDS)
    for number, at in enumerate((560, 555, 540, 538, 530)):
        branch(at)
        write(30_000 + 1000 * number, 30)
    return node, archives, then


COMMON_SEQNO = 530
"""The last branch began there, below the seqno at which the archives' newest version began."""
DIFFERENCE_BYTES = 30 * FRAME_BYTES * len(VB_IDS)


def test_all_versions_transfer_the_difference(histories):
    node, archives, then = histories
    record = back_up(node, archives["all"], VB_IDS)
    assert record.rollbacks == {vb: [(DOCUMENTS, COMMON_SEQNO)] for vb in VB_IDS}
    assert DIFFERENCE_BYTES <= record.wire_bytes <= 1.2 * DIFFERENCE_BYTES
    runs = archives["all"].runs()
    for vb_id in VB_IDS:
        end = node.engine.partitions[vb_id].high_seqno
        assert whole_states(chain_of(runs, vb_id)) == ((0, end),)
    assert state_as_of(archives["all"], VB_IDS, Point(run=1)) == then


def test_one_version_transfers_everything(histories):
    node, archives, then = histories
    record = back_up(node, archives["one"], VB_IDS, versions_max=1)
    assert record.rollbacks == {vb: [(DOCUMENTS, 0)] for vb in VB_IDS}
    assert record.wire_bytes > 15 * DIFFERENCE_BYTES
    assert state_as_of(archives["one"], VB_IDS, Point(run=1)) == then
    assert state_as_of(archives["one"], VB_IDS) == state_as_of(archives["all"], VB_IDS)


def test_de_duplicated_archives_go_back_to_an_earlier_run():
    """Without every version, the ends of all runs are what the archive can go back to."""
    node = MemoryNode(3)
    writer = node.connect()
    writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
    archive = memory_archive()
    for run in range(4):
        for number in range(100):
            # Every document twice, so that snapshots leave versions out.
            writer.set(5, b"\0k%d" % (number % 50), b"%d.%d" % (run, number) + VALUE)
        node.commit()
        back_up(node, archive, [5], history=False)
    node.engine.keyspace.branch(5, 250)
    for number in range(10):
        writer.set(5, b"\0new%d" % number, VALUE)
    node.commit()
    record = back_up(node, archive, [5], history=False)
    assert record.rollbacks == {5: [(400, 200)]}, "the newest run that ended at or below 250"
    assert state_as_of(archive, [5])[5] == {
        **{b"\0k%d" % n: b"2.%d" % n + VALUE for n in range(50)},
        **{b"\0k%d" % n: b"1.%d" % (n + 50) + VALUE for n in range(50)},
        **{b"\0k%d" % n: b"2.%d" % n + VALUE for n in range(50)},
        **{b"\0new%d" % n: VALUE for n in range(10)},
    }
