"""What a node does as a master: epochs, services, handovers, branches, who gets in."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest

from dcp.core.floors import allowed
from dcp.session.replication_port import ReplicationError
from failover.coordinator.effects import Notice
from failover.metadata.metastore import OutcomeUnknown
from failover.replication.effects import BranchEnded, StepDue, Undone
from failover.replication.handover import (
    DRAINED_NS_MAX,
    FOLLOWED_NS_MAX,
    GROUP_MAX,
    GROUP_REST_NS_MAX,
    HANDING_NS_MAX,
    REST_NS,
    UNWRITTEN_GROUP_MAX,
)
from failover.replication.mastership import Service
from failover.replication.messages import FORMAT, FORMAT_OLDEST, Greeting, encode
from failover.rules.isr import CONFIRMATION_NS, ELECTION_NS, PROMOTED_WAIT_NS
from failover.rules.replication_record import HandedOver, elect, hand_over, shrink, want
from support.core_cluster import CLUSTER, MS, VB, CoreCluster
from vbucket.engine.partition import BranchRefusedError, VbState

S = 1000 * MS
LONG = PROMOTED_WAIT_NS + 200 * MS


def serving(members: str = "ab") -> CoreCluster:
    """Return a cluster in which a serves, and three changes are committed everywhere."""
    cluster = CoreCluster(members)
    cluster.run(LONG)
    for number in range(3):
        cluster.a.put(b"\0k%d" % number)
    cluster.run(200 * MS)
    assert cluster.a.part.state == VbState.ACTIVE
    assert {node.part.committed_seqno for node in cluster.nodes.values()} == {3}
    return cluster


# -- epochs ----------------------------------------------------------------------------------------


def test_replicas_wait_until_the_version_is_on_disk() -> None:
    cluster = CoreCluster()
    cluster.b.core.tick(cluster.now_ns)
    for _ in range(5):  # bytes move, and no group is written
        cluster.dial()
        cluster._move_wires()
    assert not cluster.a.mastership.is_ready
    assert cluster.b.part.leader_epoch == 0
    cluster.run(300 * MS)
    assert cluster.b.part.failover == cluster.a.part.failover
    assert cluster.b.part.leader_epoch == 2


def test_promoted_replica_waits_until_its_confirmation_lapsed() -> None:
    cluster = serving()
    confirmed_ns = cluster.b.core.replica.last_confirmed_ns(VB)
    cluster.write(elect(cluster.record, "b", gone="a"), "b")
    cluster.settle()
    while cluster.b.part.state != VbState.ACTIVE:
        assert cluster.now_ns <= confirmed_ns + PROMOTED_WAIT_NS
        cluster.tick("b", ns=10 * MS)
        cluster.settle()
    assert cluster.now_ns >= confirmed_ns + PROMOTED_WAIT_NS
    assert cluster.b.part.failover.current.epoch == 3, "a version of its own"


def test_a_stopped_process_answers_nothing_stale() -> None:
    cluster = serving()
    a = cluster.a
    fence_ns = a.core.master.serving.fence_ns
    assert fence_ns is not None
    a.core.check_fence(fence_ns - 1)
    assert a.part.state == VbState.ACTIVE
    a.core.check_fence(fence_ns)
    assert a.part.state == VbState.FENCED
    cluster.now_ns = fence_ns
    cluster.run(300 * MS)
    assert a.part.state == VbState.ACTIVE, "confirmed again"


def test_who_is_not_confirmed_serves_nobody() -> None:
    cluster = serving()
    for wire in cluster.wires:
        wire.is_up = False
    for _ in range(0, CONFIRMATION_NS + 100 * MS, 50 * MS):
        cluster.tick()
        cluster.settle()
    assert cluster.a.part.state == VbState.FENCED
    assert cluster.a.mastership.service(cluster.now_ns, 0) is None


def test_who_waits_is_answered_before_anything_is_cut_off() -> None:
    cluster = serving()
    cluster.a.deposed.clear()
    cluster.a.put()
    cluster.a.commit()
    assert cluster.a.part.high_seqno == 4
    cluster.write(elect(cluster.record, "b"))
    ((vb_ids, why, high_seqno),) = cluster.a.deposed
    assert (vb_ids, high_seqno) == ((VB,), 4)
    assert "epoch 3 has begun" in why
    cluster.run(LONG)
    assert cluster.a.part.high_seqno == cluster.b.part.high_seqno
    assert cluster.a.part.failover == cluster.b.part.failover


def test_joiners_count_from_question_leavers_until_answer() -> None:
    cluster = serving("abc")
    cluster.write(shrink(cluster.record, "c"))
    cluster.run(100 * MS, answers=False)
    assert cluster.a.submits
    assert cluster.record.isr == {"a", "b"}
    assert cluster.a.mastership.isr == {"a", "b", "c"}
    cluster.a.answer()
    assert cluster.record.isr == {"a", "b", "c"}
    del cluster.a.session.view.alive["b"]
    cluster.tick("a")
    assert cluster.a.mastership.isr == {"a", "b", "c"}
    cluster.a.answer()
    assert cluster.a.mastership.isr == {"a", "b", "c"}, "c has not seen the record yet"
    cluster.show(cluster.nodes["c"])
    cluster.settle()
    assert cluster.a.mastership.isr == {"a", "c"}


# -- handovers -------------------------------------------------------------------------------------


def test_a_handover_goes_on_in_the_same_version_and_nobody_waits() -> None:
    cluster = serving()
    uuid = cluster.a.part.vb_uuid
    cluster.write(want(cluster.record, "b"))
    cluster.tick()
    assert cluster.a.part.state == VbState.FENCED, "until the outcome is known"
    assert cluster.a.mastership.has_handed
    cluster.run(PROMOTED_WAIT_NS - 150 * MS)
    assert (cluster.record.master, cluster.record.handover) == ("b", HandedOver(uuid, 3))
    assert cluster.b.part.state == VbState.ACTIVE
    assert (cluster.b.part.vb_uuid, cluster.b.part.leader_epoch) == (uuid, 3)
    assert cluster.b.part.committed_seqno == 3


def test_writers_are_held_back_and_it_is_given_up_in_the_end() -> None:
    cluster = serving()
    for wire in cluster.wires:
        wire.is_up = False  # no acknowledgement comes
    cluster.a.put()
    cluster.a.commit()
    cluster.write(want(cluster.record, "b"))
    fresh_ns = {"b": cluster.now_ns + 10 * S}
    cluster.a.core.master.serving.confirmations = lambda mastership: fresh_ns  # type: ignore[method-assign]
    heard = cluster.a.core.master.feeds["b"]
    cluster.tick("a")
    assert cluster.a.mastership.service(cluster.now_ns, None) is Service.HANDING
    assert cluster.a.part.holds
    began_ns = cluster.a.mastership.handing_since_ns
    while cluster.now_ns - began_ns <= HANDING_NS_MAX:
        heard._confirmed_ns = cluster.now_ns
        cluster.a.mastership._caught_up_ns["b"] = cluster.now_ns
        assert not cluster.a.submits
        cluster.tick("a")
    assert not cluster.a.mastership.has_handed
    assert cluster.record.master == "a"
    cluster.a.core.master.serve(cluster.now_ns)
    assert not cluster.a.part.holds, "writers go on"


def test_unknown_outcome_is_read_back_and_until_nobody_serves() -> None:
    cluster = serving()
    cluster.write(want(cluster.record, "b"))
    cluster.tick()
    handed = cluster.a.submits[0]
    cluster.store.apply(cluster.now_ns, handed.request)  # it happens, and the answer is lost
    cluster.a.answer(OutcomeUnknown("the answer was lost"))
    for _ in range(3):
        cluster.tick("a")
        cluster.settle()
        assert cluster.a.part.state == VbState.FENCED
        assert cluster.a.core.master.masterships[VB].has_handed
    cluster.run(100 * MS)
    assert (cluster.a.part.state, cluster.b.part.state) == (VbState.REPLICA, VbState.ACTIVE)


def test_a_handover_that_was_not_written_lets_the_master_go_on() -> None:
    cluster = serving()
    cluster.write(want(cluster.record, "b"))
    cluster.tick()
    cluster.write(want(cluster.record, None))  # somebody else was first: its compare fails
    cluster.run(100 * MS)
    assert cluster.record.master == "a"
    assert cluster.a.part.state == VbState.ACTIVE
    assert not cluster.a.part.holds


@pytest.mark.parametrize(("vb_uuid", "seqno"), [(0, 1), (1, 0)])
def test_a_partition_is_taken_over_only_as_it_was_handed_over(vb_uuid: int, seqno: int) -> None:
    cluster = serving()
    part = cluster.a.part
    end = HandedOver(part.vb_uuid + vb_uuid, part.high_seqno + seqno)
    cluster.write(hand_over(want(cluster.record, "b"), end))
    cluster.run(LONG)
    assert cluster.b.part.failover.current.epoch == 3, "a version of its own"


# -- branches --------------------------------------------------------------------------------------


def test_a_branch_that_cannot_begin_is_refused() -> None:
    cluster = serving()
    leading = cluster.a.core.master
    with pytest.raises(BranchRefusedError, match="ask its master"):
        cluster.b.core.master.want_branch(VB, 1, 99)
    with pytest.raises(BranchRefusedError, match="a branch cannot begin at 4"):
        leading.want_branch(VB, 4, 99)
    cluster.a.engine.keyspace.raise_floor(VB, 2, 0)
    with pytest.raises(BranchRefusedError, match="its history floor is 2"):
        leading.want_branch(VB, 1, 99)
    leading.want_branch(VB, 2, 99)
    with pytest.raises(BranchRefusedError, match="another branch"):
        leading.want_branch(VB, 2, 98)


def test_branch_is_in_the_record_first_and_answered_last() -> None:
    cluster = serving("abc")
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.tick()
    assert cluster.a.part.high_seqno == 3, "nobody rolls back before the record says so"
    cluster.a.answer()
    assert cluster.record.branch == (99, 1)
    assert cluster.a.part.high_seqno == 1
    cluster.show(cluster.b)
    for _ in range(4):
        cluster.tick("a", "b")
        cluster.settle()
    assert cluster.b.part.high_seqno == 1
    assert not cluster.a.submits, "c has not rolled back"
    assert cluster.a.told(BranchEnded) == []
    cluster.show(cluster.nodes["c"])
    cluster.run(500 * MS)
    assert cluster.record.branch is None
    assert cluster.a.told(BranchEnded) == [BranchEnded(VB, 99, "", Undone(2, 2))]
    for node in cluster.nodes.values():
        assert node.part.high_seqno == 1
        assert node.part.failover.upper_of(99, 1) is not None


def test_a_new_master_finishes_a_branch() -> None:
    cluster = serving()
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.tick()
    cluster.a.answer()
    cluster.write(elect(cluster.record, "b"))
    cluster.run(LONG)
    assert cluster.record.branch is None
    assert cluster.b.part.high_seqno == 1
    assert 99 in dict(cluster.b.part.failover.pairs())
    assert cluster.a.told(BranchEnded) == [BranchEnded(VB, 99, "", Undone(2, 2))], (
        "it is done everywhere"
    )


def test_a_branch_that_is_not_in_the_record_is_not_done() -> None:
    cluster = serving()
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.write(elect(cluster.record, "b"))
    (ended,) = cluster.a.told(BranchEnded)
    assert "not its master any more" in ended.why_not
    cluster.run(LONG)
    assert cluster.b.part.high_seqno == 3


def test_a_branch_can_be_withdrawn_until_its_record_is_written() -> None:
    cluster = serving()
    leading = cluster.a.core.master
    leading.want_branch(VB, 1, 99)
    assert not leading.withdraw_branch(VB, 98), "nobody asked for that one"
    assert leading.withdraw_branch(VB, 99)
    assert not leading.withdraw_branch(VB, 99)
    assert not cluster.a.part.pins
    cluster.run(LONG)
    assert (cluster.record.branch, cluster.a.part.high_seqno) == (None, 3)
    leading.want_branch(VB, 1, 97)
    cluster.tick()
    assert not leading.withdraw_branch(VB, 97), "the write of the record is on its way"
    cluster.a.answer()
    assert not leading.withdraw_branch(VB, 97), "whoever is master finishes it"
    cluster.show(cluster.b)
    cluster.run(LONG)
    assert cluster.a.told(BranchEnded) == [BranchEnded(VB, 97, "", Undone(2, 2))]


def test_no_floor_rises_above_a_branch_that_is_wanted() -> None:
    cluster = serving()
    part = cluster.a.part
    cluster.a.merge()
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.tick(ns=MS)
    assert allowed(part, 3, 0, ()).floor == 1, "the record does not say so yet"
    cluster.a.answer()
    assert part.high_seqno == 1, "it could be carried out"
    assert not part.pins


def test_branch_below_floor_that_only_replica_has_is_refused() -> None:
    cluster = serving()
    cluster.b.engine.keyspace.raise_floor(VB, 2, 0)  # a former master told it, and died
    cluster.wires[0].cut()
    cluster.run(LONG)
    with pytest.raises(BranchRefusedError, match="member b keeps every version from seqno 2"):
        cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.a.core.master.want_branch(VB, 2, 99)


def test_a_branch_that_became_impossible_is_not_written() -> None:
    cluster = serving()
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.a.engine.keyspace.raise_floor(VB, 2, 0)
    cluster.run(200 * MS)
    assert cluster.record.branch is None
    (ended,) = cluster.a.told(BranchEnded)
    assert "cannot go back to 1" in ended.why_not
    cluster.a.core.master.want_branch(VB, 2, 98)  # another one can be asked for


def test_master_that_cannot_branch_undoes_nothing_and_says_so() -> None:
    cluster = serving()
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.tick()
    cluster.b.engine.keyspace.raise_floor(VB, 2, 0)  # no rule allows it
    cluster.a.answer()
    cluster.write(elect(cluster.record, "b"))
    cluster.run(LONG)
    assert cluster.record.branch is None
    assert cluster.b.part.high_seqno == cluster.a.part.high_seqno == 3
    assert cluster.b.part.failover == cluster.a.part.failover
    (notice,) = cluster.b.told(Notice)
    assert "cannot carry out" in notice.text
    (ended,) = cluster.a.told(BranchEnded)
    assert "could not carry the branch out" in ended.why_not


# -- at rest ---------------------------------------------------------------------------------------


def test_after_rest_replica_cut_off_leaves_as_soon_as_otherwise() -> None:
    cluster = serving("abc")
    cluster.run(5 * S)
    leading = cluster.a.core.master
    assert not leading.serving.active(), "nothing is done for each partition"
    (wire,) = [wire for wire in cluster.wires if wire.node is cluster.b]
    wire.cut()
    cluster.wires.remove(wire)
    cut_ns = cluster.now_ns
    while "b" in cluster.record.isr:
        assert cluster.now_ns <= cut_ns + cluster.settings.replica_lag_max_ns + 200 * MS
        cluster.tick("a", "c")
        cluster.settle()
        while cluster.a.submits:
            cluster.a.answer()
            cluster.show(cluster.a)
    assert cluster.now_ns >= cut_ns + cluster.settings.replica_lag_max_ns - 200 * MS
    assert cluster.record.isr == {"a", "c"}


def cut_off(cluster: CoreCluster, *members: str) -> None:
    """Cut these members off from the master, which still reaches the store."""
    for wire in tuple(cluster.wires):
        if wire.node.member in members:
            wire.cut()
            cluster.wires.remove(wire)


def run_master(cluster: CoreCluster, ns: int) -> None:
    """Let time pass for the master alone; the store answers."""
    for _ in range(ns // (50 * MS)):
        cluster.tick("a")
        while cluster.a.submits:
            cluster.a.answer()
            cluster.show(cluster.a)


def test_master_that_hears_nobody_leaves_its_followers_electable() -> None:
    cluster = serving("abc")
    cut_off(cluster, "b")
    run_master(cluster, 200 * MS)
    cut_off(cluster, "c")  # a little later, as always
    run_master(cluster, ELECTION_NS)
    assert cluster.record.isr == {"a", "b", "c"}, "else nobody could be elected"
    assert cluster.a.part.state == VbState.FENCED
    cluster.write(elect(cluster.record, "b", gone="a"))
    assert cluster.a.part.state == VbState.REPLICA


def test_a_master_that_nobody_followed_in_time_goes_on_alone() -> None:
    """Its followers live, and cannot elect."""
    cluster = serving("abc")
    cut_off(cluster, "b", "c")
    run_master(cluster, ELECTION_NS + cluster.settings.replica_lag_max_ns + 200 * MS)
    assert cluster.record.isr == {"a"}
    assert cluster.a.part.state == VbState.ACTIVE


def test_a_master_of_two_copies_waits_for_nobody() -> None:
    """The other one alone cannot depose it."""
    cluster = serving("ab")
    cut_off(cluster, "b")
    run_master(cluster, cluster.settings.replica_lag_max_ns + 200 * MS)
    assert cluster.record.isr == {"a"}


def test_nodes_that_are_gone_leave_at_once() -> None:
    cluster = serving("abc")
    cut_off(cluster, "b", "c")
    for member in "bc":
        del cluster.a.session.view.alive[member]
    cluster.tick("a")
    cluster.a.answer()
    assert cluster.record.isr == {"a"}


def test_nobody_leaves_because_the_master_stood_still_at_rest() -> None:
    cluster = serving("abc")
    cluster.run(5 * S)
    assert not cluster.a.core.master.serving.active()
    cluster.now_ns += 2 * S  # nobody runs
    cluster.run(2 * S)
    assert cluster.record.isr == {"a", "b", "c"}
    assert cluster.a.part.state == VbState.ACTIVE


def test_at_rest_a_master_is_fenced_when_a_confirmation_lapses() -> None:
    cluster = serving("abc")
    cluster.run(5 * S)
    assert not cluster.a.core.master.serving.active()
    fence_ns = cluster.a.core.master.serving.fence_ns
    assert fence_ns is not None
    assert cluster.now_ns < fence_ns <= cluster.now_ns + CONFIRMATION_NS
    cluster.a.core.check_fence(fence_ns)
    assert cluster.a.part.state == VbState.FENCED


# -- who gets in -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": FORMAT + 1, "oldest": FORMAT + 1}, "Upgrade the older"),
        ({"format": FORMAT_OLDEST - 1, "oldest": FORMAT_OLDEST - 2}, "Upgrade the older"),
        ({"cluster": "other"}, "belongs to cluster 'other'"),
        ({"member": "stranger"}, "stranger is no member"),
        ({"master": "c"}, "wants to reach member c; here is a"),
        ({"incarnation": 0}, "runs as incarnation 1; this is 0, an older process"),
    ],
)
def test_who_is_refused(change: dict[str, object], words: str) -> None:
    cluster = CoreCluster()
    told = {"format": FORMAT, "cluster": CLUSTER, "member": "b", "incarnation": 1, "master": "a"}
    with pytest.raises(ReplicationError, match=words):
        cluster.a.core.master.open_feed(encode(Greeting(**(told | change))), lambda: None)


def test_a_replica_of_the_next_version_is_let_in() -> None:
    """It speaks the format of this one as well."""
    cluster = CoreCluster()
    greeting = Greeting(FORMAT + 1, CLUSTER, "b", 1, "a", oldest=FORMAT)
    assert cluster.a.core.master.open_feed(encode(greeting), lambda: None) is not None


def test_both_sides_are_on_one_epoch() -> None:
    cluster = serving()
    cluster.write(replace(cluster.record, epoch=7), "b")
    cluster.run(300 * MS, answers=False)
    assert cluster.b.part.leader_epoch == 2, "nothing was taken over"
    assert not cluster.a.core.master.feeds["b"].confirmed_ns(VB)


def test_handovers_go_in_groups_and_hold_only_their_writers() -> None:
    cluster = serving()
    leading = cluster.a.core.master
    one = leading.masterships[VB]
    handovers, record = leading.handovers, want(one.record, "b")
    others = {}
    for vb_id in range(2 * GROUP_MAX):
        part = copy(one.part)
        part.vb_id, part.holds = vb_id, {}
        other = others[vb_id] = copy(one)
        other.part = part
        part.committed_seqno = part.high_seqno - 1
        assert handovers.next_record(other, record, cluster.now_ns, may_write=True) is None
    assert not any(each.part.holds for each in others.values())
    for vb_id in handovers.due(cluster.now_ns, others):
        assert handovers.next_record(others[vb_id], record, cluster.now_ns, may_write=True) is None
    assert [vb for vb, each in others.items() if each.part.holds] == list(range(GROUP_MAX))
    due = handovers.due(cluster.now_ns, others)
    assert due == list(range(GROUP_MAX)), "the rest waits for room"
    others[0].part.committed_seqno += 1
    assert not handovers.may_write(cluster.now_ns, others), "they share a transaction"
    assert handovers.may_write(cluster.now_ns + DRAINED_NS_MAX, others)
    assert handovers.next_record(others[0], record, cluster.now_ns, may_write=True) is not None
    for vb_id in range(GROUP_MAX):
        handovers.ended(vb_id, cluster.now_ns, is_handed=True)
    assert not handovers.due(cluster.now_ns, others), "their new masters do not serve yet"
    handovers.note_followed(cluster.now_ns, lambda vb_id: vb_id > 0)
    assert not handovers.due(cluster.now_ns, others), "a group begins when none is on its way"
    handovers.note_followed(cluster.now_ns + FOLLOWED_NS_MAX, lambda vb_id: False)
    rested_ns = cluster.now_ns + FOLLOWED_NS_MAX + GROUP_REST_NS_MAX
    due = handovers.due(rested_ns, others)
    assert due == list(range(GROUP_MAX, 2 * GROUP_MAX)), "it holds up nobody any longer"


def test_partitions_never_written_go_in_larger_groups() -> None:
    """Nobody waits for them: a new cluster spreads its masters in less time."""
    cluster = serving()
    leading = cluster.a.core.master
    one = leading.masterships[VB]
    others = {}
    for vb_id in range(2 * UNWRITTEN_GROUP_MAX):
        part = copy(one.part)
        part.vb_id, part.high_seqno = vb_id, vb_id % 2  # every second one was written
        part.committed_seqno = part.high_seqno
        others[vb_id] = copy(one)
        others[vb_id].part = part
    leading.handovers.wait(others)
    due = leading.handovers.due(cluster.now_ns, others)
    assert due == list(range(0, 2 * UNWRITTEN_GROUP_MAX, 2))
    for vb_id in due[1:]:
        others[vb_id].part.high_seqno = others[vb_id].part.committed_seqno = 1
    assert len(leading.handovers.due(cluster.now_ns, others)) == GROUP_MAX


def test_partitions_without_open_changes_are_handed_over_first() -> None:
    """Their writers wait for no commit."""
    cluster = serving()
    leading = cluster.a.core.master
    one = leading.masterships[VB]
    handovers, record = leading.handovers, want(one.record, "b")
    others = {}
    for vb_id in range(GROUP_MAX):
        part = copy(one.part)
        part.vb_id, part.holds = vb_id, {}
        others[vb_id] = copy(one)
        others[vb_id].part = part
        if vb_id % 2:
            part.committed_seqno = part.high_seqno - 1
        handovers.next_record(others[vb_id], record, cluster.now_ns, may_write=False)
    assert handovers.due(cluster.now_ns, others) == list(range(0, GROUP_MAX, 2))
    assert handovers.may_write(cluster.now_ns, others)
    for vb_id in handovers.due(cluster.now_ns, others):
        other = others[vb_id]
        assert handovers.next_record(other, record, cluster.now_ns, may_write=True) is not None
        handovers.ended(vb_id, cluster.now_ns, is_handed=True)
    assert not any(others[vb_id].part.holds for vb_id in range(1, GROUP_MAX, 2)), "they are served"
    handovers.note_followed(cluster.now_ns, lambda vb_id: True)
    due = handovers.due(cluster.now_ns, others)
    assert due == list(range(1, GROUP_MAX, 2)), "no other is left: they are held"


def test_a_node_that_leaves_disturbs_only_what_it_hands_over() -> None:
    cluster = serving()
    cluster.run(300 * MS)
    leading = cluster.a.core.master
    assert not leading.serving.active()
    for wire in cluster.wires:
        wire.is_up = False  # no acknowledgement comes
    cluster.a.put()
    cluster.a.commit()
    leading.leave()
    assert not leading.serving.active(), "waiting costs nothing"
    cluster.tick("a")
    assert cluster.a.part.holds, "writers wait until the change is committed"
    heard, began_ns = leading.feeds["b"], cluster.now_ns
    while cluster.now_ns - began_ns <= HANDING_NS_MAX:
        heard._confirmed_ns = cluster.now_ns
        cluster.a.mastership._caught_up_ns["b"] = cluster.now_ns
        cluster.tick("a")
    assert not cluster.a.mastership.handing_since_ns, "it is given up"
    leading.serve(cluster.now_ns)
    assert not cluster.a.part.holds, "writers go on"
    for wire in cluster.wires:
        wire.is_up = True
    cluster.run(REST_NS + 500 * MS)
    assert (cluster.record.master, cluster.a.part.state) == ("b", VbState.REPLICA)


def test_a_handover_waits_for_no_tick() -> None:
    """Writers wait: each step follows as soon as the one before is done."""
    cluster = serving("abc")
    cluster.write(want(cluster.record, "b"))
    cluster.tick("a")  # the only one
    for _ in range(5):
        cluster.settle()
        for node in cluster.nodes.values():
            while node.submits:
                node.answer()
        for node in cluster.nodes.values():
            cluster.show(node)
        for node in cluster.nodes.values():
            if node.told(StepDue):
                node.effects = [item for item in node.effects if not isinstance(item, StepDue)]
                node.core.step(cluster.now_ns)
    assert cluster.record.master == "b"
    assert cluster.b.part.state == VbState.ACTIVE


def test_replica_that_read_record_first_waits_for_its_master() -> None:
    cluster = serving("abc")
    cluster.write(elect(cluster.record, "b", gone="a"), "c")
    cluster.tick("c")
    cluster.settle()
    assert VB not in cluster.b.core.master.masterships
    cluster.show(cluster.b)
    cluster.settle()  # no time passes, so nothing is asked again
    assert cluster.nodes["c"].core.replica.is_followed(VB)


def test_waiting_request_is_refused_when_another_is_master() -> None:
    cluster = serving("abc")
    after = elect(cluster.record, "b", gone="a")
    cluster.write(after, "c")
    cluster.settle()
    cluster.write(elect(after, "c"), "b")
    cluster.settle()
    link = cluster.nodes["c"].core.replica.links["b"]
    assert not link._asked, "it is answered"
    assert not link.is_open(VB)
