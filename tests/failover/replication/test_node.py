"""Roles of a node's partitions by the records that it reads, and its high watermarks."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from dcp.session.session_commands import OBSERVE_CURRENT, OBSERVE_OLD
from dcp.wire.frame import Frame
from dcp.wire.message import EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.effects import Notice
from failover.coordinator.record_writer import COMPARES_MAX
from failover.replication.mastership import ReplicationSettings
from failover.rules.isr import PROMOTED_WAIT_NS
from failover.rules.replication_record import (
    add_copy,
    drop_copies,
    elect,
    shrink,
    unclean_elect,
)
from support.core_cluster import MS, VB, CoreCluster, CoreNode, vacated
from vbucket.engine.partition import VbState
from vbucket.model.receipt import ElectionLoss

UNHEARD_NS = ReplicationSettings().unheard_ns
LONG = PROMOTED_WAIT_NS + 200 * MS


def serving() -> CoreCluster:
    cluster = CoreCluster()
    cluster.run(LONG)
    cluster.a.put()
    cluster.run(200 * MS)
    assert cluster.a.part.state == VbState.ACTIVE
    return cluster


# -- roles -----------------------------------------------------------------------------------------


def test_nobody_is_master_before_an_epoch_began_while_it_ran() -> None:
    cluster = serving()
    cluster.a.crash()
    cluster.show(cluster.a)
    assert VB not in cluster.a.core.master.masterships
    cluster.run(LONG)
    assert cluster.a.part.state == VbState.REPLICA
    assert [item.vb_id for item in cluster.a.session.reported] == [VB], "it asks to be elected"
    cluster.write(elect(cluster.record, "a"))
    cluster.run(LONG)
    assert cluster.a.part.state == VbState.ACTIVE
    assert cluster.a.session.reported == ()


def test_a_partition_is_a_replica_until_a_record_says_more() -> None:
    cluster = CoreCluster()
    other = cluster.a.engine.partitions[VB + 1]
    assert other.state == VbState.REPLICA
    assert (other.has_copies, other.may_send_back) == (True, False)
    assert cluster.a.part.state == VbState.FENCED, "master, and not served yet"


def test_without_a_copy_a_partition_is_dead_here() -> None:
    cluster = serving()
    cluster.write(drop_copies(cluster.record, "b", in_sync_min=1))
    assert cluster.b.part.state == VbState.DEAD
    cluster.write(add_copy(cluster.record, "b"))
    assert cluster.b.part.state == VbState.REPLICA
    assert cluster.a.part.state == VbState.ACTIVE


def test_one_transaction_takes_so_many_changes_of_records() -> None:
    """A node with 1,024 partitions has more to write when another one dies."""
    cluster = serving()
    leading = cluster.a.core.master
    leading._view.alive.pop("b")
    one = leading.masterships.pop(VB)
    records = {}
    for vb_id in range(COMPARES_MAX + 5):
        leading.masterships[vb_id] = copy(one)
        records[vb_id] = cluster.a.core.records[VB]
    assert len(leading.record_changes(records, may_write=True)) == COMPARES_MAX
    assert len(leading.record_changes(records, may_write=True)) == 5


def test_who_knows_a_higher_epoch_steps_down() -> None:
    cluster = serving()
    cluster.a.deposed.clear()
    cluster.write(vacated(cluster.record), "a")
    part = cluster.a.part
    assert (part.state, part.guard, part.may_send_back) == (VbState.REPLICA, None, False)
    assert [vb_ids for vb_ids, _, _ in cluster.a.deposed] == [(VB,)]


def test_elected_again_it_begins_another_epoch_without_waiting() -> None:
    cluster = serving()
    before = cluster.a.mastership
    cluster.write(elect(cluster.record, "a"))
    assert cluster.a.mastership is not before
    assert cluster.a.deposed, "what waits is answered"
    cluster.run(PROMOTED_WAIT_NS // 2)
    assert cluster.a.part.state == VbState.ACTIVE
    assert cluster.a.part.failover.current.epoch == 3


# -- high watermarks -------------------------------------------------------------------------------


def test_a_change_is_committed_when_the_whole_set_has_synced_it() -> None:
    cluster = serving()
    wire = cluster.wires[0]
    wire.is_up = False
    cluster.a.put()
    cluster.settle()
    assert (cluster.a.part.synced_seqno, cluster.b.part.synced_seqno) == (2, 2)
    assert cluster.a.part.committed_seqno == 1
    wire.is_up = True
    cluster.settle()
    assert cluster.a.part.committed_seqno == 2
    assert cluster.b.part.committed_seqno == 2, "the replica is told"


def test_a_change_that_is_not_synced_here_is_not_committed() -> None:
    cluster = serving()
    cluster.a.put()
    job = cluster.a.take()
    cluster.a.mastership.acknowledged("b", 2, 2)
    cluster.a.core.tick(cluster.now_ns)
    assert cluster.a.part.committed_seqno == 1
    cluster.a.finish(job)
    cluster.a.core.tick(cluster.now_ns)
    assert cluster.a.part.committed_seqno == 2


# -- OBSERVE_SEQNO of replicas ---------------------------------------------------------------------


def test_replica_reports_what_it_synced_before_it_is_committed() -> None:
    cluster = serving()
    cluster.wires[0].is_up = False
    cluster.a.put()
    cluster.settle()
    assert (cluster.b.part.synced_seqno, cluster.b.part.committed_seqno) == (2, 1)
    peer, vb_uuid = cluster.b.connect(), cluster.b.part.vb_uuid
    answer = peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=vb_uuid.to_bytes(8, "big"))
    assert OBSERVE_CURRENT.unpack(answer.value) == (0, VB, vb_uuid, 2, 2)
    assert not peer.must_wait, "its master may be dead"


def test_a_replica_tells_where_an_older_version_ended() -> None:
    cluster = serving()
    old = cluster.b.part.vb_uuid
    cluster.write(elect(cluster.record, "a"))
    cluster.run(LONG)
    cluster.a.put()
    cluster.settle()
    new = cluster.a.part.vb_uuid
    for node in (cluster.a, cluster.b):
        answer = node.connect().ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=old.to_bytes(8, "big"))
        assert OBSERVE_OLD.unpack(answer.value) == (1, VB, new, 2, 2, old, 1)


# -- unclean elections -----------------------------------------------------------------------------


def test_first_master_after_unclean_election_tells_its_beginning() -> None:
    cluster = serving()
    cluster.write(shrink(cluster.record, "b"))
    cluster.b.core.replica.committed(
        {VB: 5}, is_synced=False
    )  # five are committed, and one of them is here
    versions = tuple(cluster.b.part.failover.pairs())
    cluster.write(unclean_elect(cluster.record, "b"))
    assert cluster.b.told(ElectionLoss) == [ElectionLoss(VB, 3, versions, 1, 5)]
    assert cluster.a.told(ElectionLoss) == []
    cluster.run(LONG)
    cluster.write(elect(cluster.record, "b"))
    assert len(cluster.b.told(ElectionLoss)) == 1, "once"


def test_it_is_told_although_the_elected_process_has_died() -> None:
    cluster = serving()
    cluster.write(shrink(cluster.record, "b"))
    cluster.b.crash()
    cluster.write(unclean_elect(cluster.record, "b"))
    assert cluster.b.told(ElectionLoss) == [], "that was another process"
    cluster.write(elect(cluster.record, "b"))
    (lost,) = cluster.b.told(ElectionLoss)
    assert (lost.epoch, lost.end_seqno, lost.committed_seqno) == (4, 1, None)


def test_a_clean_election_loses_nothing() -> None:
    cluster = serving()
    cluster.write(elect(cluster.record, "b"))
    assert cluster.b.told(ElectionLoss) == []


# -- records that cannot be followed ---------------------------------------------------------------


def test_record_that_cant_be_read_changes_nothing_and_told_once() -> None:
    cluster = serving()
    for text in (b"{not json", b"{not json"):
        cluster.write_raw(text)
        cluster.run(2 * LONG)
    for node in cluster.nodes.values():
        notices = [item.text for item in node.told(Notice)]
        assert len(notices) == 2, "once for each state of the key"
        assert notices[0].startswith("partition 1 stays as it is (leader epoch 2, master a): key ")
    assert cluster.a.part.state == VbState.ACTIVE
    cluster.a.put()
    cluster.run(200 * MS)
    assert cluster.b.part.committed_seqno == 2


def test_nobody_writes_a_record_that_it_cannot_read() -> None:
    cluster = serving()
    cluster.write_raw(b"{}")
    for wire in cluster.wires:
        wire.cut()
    for _ in range(60):  # b is not heard, and would leave the in-sync set
        cluster.tick("a")
    assert not cluster.a.submits
    good = replace(cluster.a.core._record_of(VB), wanted_master=None)
    cluster.write(good)
    cluster.tick("a")
    assert cluster.a.submits, "now it leaves"


def test_a_store_that_was_set_back_is_not_followed() -> None:
    cluster = serving()
    cluster.write(elect(cluster.record, "b"))
    cluster.run(LONG)
    assert cluster.b.part.leader_epoch == 3
    old = replace(cluster.record, epoch=2, master="a")
    cluster.write(old)
    cluster.run(LONG)
    for node in cluster.nodes.values():
        (notice,) = node.told(Notice)
        assert "was set back: it has leader epoch 2, change 2, and epoch 3" in notice.text
    assert cluster.b.part.state == VbState.ACTIVE
    cluster.a.crash()
    cluster.show(cluster.a)
    assert VB not in cluster.a.core.records, "its own log says that epoch 3 began"
    (notice,) = cluster.a.told(Notice)
    assert "partition 1 stays as it is (leader epoch 3, master not known)" in notice.text
    cluster.write(replace(old, epoch=9, master="b"))
    cluster.run(LONG)
    assert cluster.a.part.leader_epoch == 9


def test_a_store_that_was_set_back_and_restored_makes_no_master() -> None:
    cluster = serving()
    good = cluster.record
    cluster.a.crash()
    assert cluster.a.part.leader_epoch == good.epoch == 2
    cluster.write(replace(good, epoch=1))
    cluster.write(good)
    assert VB not in cluster.a.core.master.masterships, "epoch 2 began before this process"


# -- replicas that hear no master ------------------------------------------------------------------


def asked_for_seqno(node: CoreNode) -> Frame:
    uuid = node.part.vb_uuid.to_bytes(8, "big")
    return node.connect().ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=uuid)


def cut(cluster: CoreCluster) -> None:
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()


def test_replica_without_a_master_tells_nothing_old() -> None:
    cluster = serving()
    assert asked_for_seqno(cluster.b).status == Status.OK
    cut(cluster)
    cluster.tick(ns=UNHEARD_NS // 2)
    assert asked_for_seqno(cluster.b).status == Status.OK, "not yet"
    cluster.tick(ns=UNHEARD_NS)
    assert asked_for_seqno(cluster.b).status == Status.ETMPFAIL
    cluster.run(500 * MS)
    assert asked_for_seqno(cluster.b).status == Status.OK, "it is heard again"


def test_process_that_stood_looks_before_next_batch_of_requests() -> None:
    cluster = serving()
    cluster.now_ns += UNHEARD_NS
    cluster.b.core.check_fence(cluster.now_ns)
    assert asked_for_seqno(cluster.b).status == Status.ETMPFAIL


def test_streams_of_a_replica_end_once_when_it_hears_no_master() -> None:
    cluster = serving()
    peer, part = cluster.b.connect(), cluster.b.part
    peer.open()
    part.has_copies = False  # a partition with copies opens streams on its master only
    assert peer.stream(VB, opaque=9).status == Status.OK
    part.has_copies = True
    peer.drain()
    cut(cluster)
    cluster.tick(ns=2 * UNHEARD_NS)
    (end,) = peer.drain()
    assert (end.opcode, end.opaque) == (Opcode.DCP_STREAM_END, 9)
    assert int.from_bytes(end.extras, "big") == EndReason.STATE_CHANGED == 2
    cluster.tick()
    assert peer.drain() == []


def test_without_a_record_or_a_master_nothing_is_heard() -> None:
    cluster = serving()
    cluster.a.crash()
    assert asked_for_seqno(cluster.a).status == Status.ETMPFAIL, "it has read no record"
    cluster.show(cluster.a)
    cluster.write(vacated(cluster.record), "b")
    cluster.tick()
    assert asked_for_seqno(cluster.b).status == Status.ETMPFAIL, "nobody is master"
    cluster.write(elect(cluster.record, "b"), "b")
    assert not cluster.b.part.is_unheard, "this node is"


def test_where_no_copy_is_no_master_is_missed() -> None:
    cluster = CoreCluster("abc")
    cluster.write(drop_copies(cluster.record, "c", in_sync_min=1))
    cut(cluster)
    cluster.tick(ns=2 * UNHEARD_NS)
    assert [node.part.is_unheard for node in cluster.nodes.values()] == [False, True, False]


def test_read_waits_for_a_change_merged_before_its_commit() -> None:
    cluster = serving()
    wire, (node, part) = cluster.wires[0], (cluster.a, cluster.a.part)
    wire.is_up = False
    node.put()
    node.commit()
    node.groups.begin_merge()
    node.commit()
    node.end_merge()
    assert (part.merged_seqno, part.committed_seqno) == (2, 1)
    assert node.engine.keyspace.group_of_version(part, b"\0k") > 0, "nobody may see it yet"
    wire.is_up = True
    cluster.settle()
    assert part.committed_seqno == 2
    assert node.engine.keyspace.group_of_version(part, b"\0k") == 0
