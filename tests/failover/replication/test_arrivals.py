"""Partitions that are handed over to a node: requests for them wait there until it serves."""

from __future__ import annotations

from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.session import Session
from dcp.wire.feature import Feature
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.effects import PartitionsArrived, ReplicationEffect, StepDue
from failover.replication.serving import ARRIVAL_NS_MAX, Arrivals
from failover.rules.isr import PROMOTED_WAIT_NS
from failover.rules.replication_record import elect, want
from support.core_cluster import MS, VB, CoreCluster, CoreNode
from support.memory_node import Peer
from vbucket.engine.partition import VbState

LONG = PROMOTED_WAIT_NS + 200 * MS
SET = pack_request(Opcode.SET, vb_id=VB, key=b"\0k", extras=bytes(8), value=b"v", opaque=7)


def handed_over(members: str = "ab") -> CoreCluster:
    """Return a cluster in which b has just read that it is the master, and did nothing yet."""
    cluster = CoreCluster(members)
    cluster.run(LONG)
    assert cluster.a.part.state == VbState.ACTIVE
    cluster.write(want(cluster.record, "b"))
    cluster.tick("a")
    cluster.a.answer()
    assert (cluster.record.master, cluster.record.epoch) == ("b", 3)
    cluster.show(cluster.b)
    assert cluster.b.part.state == VbState.FENCED
    return cluster


def serve(cluster: CoreCluster) -> None:
    """Let b serve; no time passes."""
    for _ in range(3):
        cluster.settle()
        for node in cluster.nodes.values():
            cluster.show(node)
            node.core.step(cluster.now_ns)
    assert cluster.b.part.state == VbState.ACTIVE


def client(node: CoreNode) -> Peer:
    peer = node.connect()
    peer.joins(node.core.master)
    peer.hello(Feature.XERROR, Feature.COLLECTIONS, Feature.MUTATION_SEQNO)
    return peer


def statuses(peer: Peer) -> list[int]:
    answers = b"".join(peer.state.answers)
    peer.state.answers.clear()
    return [frame.status for frame in FrameDecoder().feed(answers)]


def test_a_write_that_comes_too_early_waits_for_the_new_master() -> None:
    cluster = handed_over("abc")
    b, peer = cluster.b, client(cluster.b)
    session: Session = peer.session
    b.now_ns += 1 << 16
    session.receive(SET, b.now_ns)
    assert peer.state.is_full
    assert not statuses(peer)
    serve(cluster)
    assert len(b.told(PartitionsArrived)) == 1
    session.resume(b.now_ns)
    held = HeldAnswers(b.engine)
    assert not held.take(peer.state, cluster.now_ns), "not before it is committed"
    cluster.settle()
    answers = b"".join(batch.answers for batch in held.release())
    assert [frame.status for frame in FrameDecoder().feed(answers)] == [Status.OK]
    assert b.part.committed_seqno == b.part.high_seqno > 0


def test_an_arrival_ends_when_it_takes_too_long() -> None:
    cluster = handed_over()
    b, began_ns = cluster.b, cluster.now_ns
    peer = client(b)
    peer.session.receive(SET, b.now_ns)
    b.core.check_fence(began_ns + ARRIVAL_NS_MAX - 1)
    assert VB in b.core.master.arriving
    assert not b.told(PartitionsArrived)
    b.core.check_fence(began_ns + ARRIVAL_NS_MAX)
    assert VB not in b.core.master.arriving
    assert b.told(PartitionsArrived)
    peer.session.resume(b.now_ns)
    assert statuses(peer) == [Status.ETMPFAIL]
    cluster.run(LONG)
    assert b.part.state == VbState.ACTIVE


def test_a_tick_ends_it_as_well_when_no_request_comes() -> None:
    cluster = handed_over()
    cluster.tick("b", ns=ARRIVAL_NS_MAX)
    assert not cluster.b.core.master.arriving
    assert cluster.b.told(PartitionsArrived)


def test_it_ends_when_somebody_else_becomes_master() -> None:
    cluster = handed_over("abc")
    cluster.write(elect(cluster.record, "c", gone="b"))
    assert not cluster.b.core.master.arriving
    assert cluster.b.told(PartitionsArrived)
    assert cluster.b.part.state == VbState.REPLICA


def test_nobody_waits_for_the_master_after_a_failover() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    cluster.write(elect(cluster.record, "b", gone="a"))
    assert cluster.b.mastership.epoch == cluster.record.epoch
    assert cluster.b.part.state == VbState.FENCED
    assert not cluster.b.core.master.arriving
    peer = client(cluster.b)
    peer.session.receive(SET, cluster.b.now_ns)
    assert statuses(peer) == [Status.ETMPFAIL]


def test_nobody_waits_where_the_master_stays_the_same() -> None:
    """A new epoch of the same master, or one that a restarted process finds, is no arrival."""
    cluster = handed_over()
    serve(cluster)
    cluster.run(LONG)
    cluster.write(elect(cluster.record, "b"))
    assert cluster.b.mastership.epoch == cluster.record.epoch
    assert not cluster.b.core.master.arriving


def test_many_arrivals_leave_one_effect() -> None:
    effects: list[ReplicationEffect] = [StepDue()]
    arrivals = Arrivals(effects)
    for vb_id in range(16):
        arrivals.began(vb_id, 0)
    for vb_id in range(16):
        arrivals.ended(vb_id)
        arrivals.ended(vb_id)
    assert [type(effect) for effect in effects] == [StepDue, PartitionsArrived]
    effects.clear()
    arrivals.ended(1)
    arrivals.expire(ARRIVAL_NS_MAX)
    assert not effects
