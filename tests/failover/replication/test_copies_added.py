"""A copy that is added while its master writes a group, which others got before it was on disk."""

from __future__ import annotations

from failover.rules.replication_record import add_copy, drop_copies
from support.core_cluster import MS, CoreCluster

LONG = 700 * MS


def test_a_stream_that_opens_while_a_group_is_written_gets_it() -> None:
    """Also if the change of the record excludes its partition from the group meanwhile."""
    cluster = CoreCluster("abc")
    b, c = cluster.b, cluster.nodes["c"]
    cluster.run(LONG)
    for number in range(3):
        cluster.a.put(b"\0k%d" % number)
    cluster.run(LONG)
    cluster.write(drop_copies(cluster.record, "c", in_sync_min=1))
    cluster.run(LONG)
    assert (b.part.high_seqno, c.part.high_seqno) == (3, 0)

    cluster.a.put(b"\0k3")
    job = cluster.a.take()
    cluster.write(add_copy(cluster.record, "c"))
    cluster.run(LONG)
    assert b.part.synced_seqno == 4, "b got it before it is on disk at a"
    assert c.part.high_seqno == 3
    cluster.a.finish(job)
    cluster.run(3 * LONG)
    assert c.part.high_seqno == 4
    assert cluster.record.isr == {"a", "b", "c"}
