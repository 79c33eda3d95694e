"""Rests between groups of handovers."""

from __future__ import annotations

from copy import copy

import pytest

from failover.replication.effects import StepDue, Steps
from failover.replication.handover import (
    FOLLOWED_NS_MAX,
    GROUP_REST_NS_MAX,
    HANDING_NS_MAX,
    REST_NS,
    STUCK_NS_MAX,
    Handovers,
)
from failover.replication.mastership import Mastership
from failover.rules.isr import PROMOTED_WAIT_NS
from failover.rules.replication_record import ReplicationRecord, elect, want
from support.core_cluster import MS, VB, CoreCluster


@pytest.mark.parametrize(("took_ns", "rest_ns"), [
    (0, 0), (30 * MS, 30 * MS), (150 * MS, GROUP_REST_NS_MAX), (FOLLOWED_NS_MAX, 0),
])  # fmt: skip
def test_after_group_cluster_rests_as_long_as_group_took(took_ns: int, rest_ns: int) -> None:
    """It does not rest after a group whose new master stands still."""
    cluster = CoreCluster()
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    handovers, one, began_ns = Handovers(Steps([])), cluster.a.mastership, cluster.now_ns
    record = want(one.record, "b")
    handovers.wait([VB, VB + 1])
    assert handovers.due(began_ns, {}) == [VB, VB + 1]
    assert handovers.next_record(one, record, began_ns, may_write=True) is not None
    handovers.ended(VB, began_ns, is_handed=True)
    ended_ns = began_ns + took_ns
    handovers.note_followed(ended_ns, lambda vb_id: took_ns < FOLLOWED_NS_MAX)
    for _ in range(2):  # the rest is not made longer by looks at it
        if rest_ns:
            assert not handovers.take_pause_end(ended_ns + rest_ns - 1)
            assert not handovers.due(ended_ns + rest_ns - 1, {})
        handovers.note_followed(ended_ns + rest_ns, lambda vb_id: True)
    assert handovers.due(ended_ns + rest_ns, {}) == [VB + 1]
    assert handovers.take_pause_end(ended_ns + rest_ns) == (took_ns < FOLLOWED_NS_MAX)
    assert not handovers.take_pause_end(ended_ns + rest_ns), "once"


@pytest.fixture
def held() -> tuple[CoreCluster, Handovers, ReplicationRecord]:
    """Return a master that holds a partition to hand it over. Its disk lacks the last change."""
    cluster = CoreCluster()
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    handovers, one = Handovers(Steps([])), cluster.a.mastership
    one.part.synced_seqno = one.part.committed_seqno = one.part.high_seqno - 1
    record = want(one.record, "b")
    handovers.wait([VB])
    assert handovers.due(cluster.now_ns, {VB: one}) == [VB]
    assert handovers.next_record(one, record, cluster.now_ns, may_write=True) is None
    return cluster, handovers, record


Held = tuple[CoreCluster, Handovers, ReplicationRecord]


def test_handover_that_waits_in_vain_is_given_up_for_a_while(held: Held) -> None:
    cluster, handovers, record = held
    one, late_ns = cluster.a.mastership, cluster.now_ns + HANDING_NS_MAX + 1
    assert handovers.next_record(one, record, late_ns, may_write=True) is None
    assert not one.handing_since_ns
    handovers.wait([VB])
    assert not handovers.due(late_ns + REST_NS - 1, {VB: one})
    assert handovers.due(late_ns + REST_NS, {VB: one}) == [VB]


def test_failover_that_waits_in_vain_elects_the_wanted_master(held: Held) -> None:
    """It is in sync, so it has all that is committed."""
    cluster, handovers, record = held
    one, in_time_ns = cluster.a.mastership, cluster.now_ns + HANDING_NS_MAX

    def next_record(now_ns: int, *, may_write: bool = True) -> ReplicationRecord | None:
        return handovers.next_record(one, record, now_ns, may_write=may_write, is_failover=True)

    assert next_record(in_time_ns) is None
    assert next_record(in_time_ns + 1, may_write=False) is None
    assert one.handing_since_ns, "writers wait for the record to be written"
    after = next_record(in_time_ns + 1)
    assert after == elect(record, "b")
    assert after.isr == record.isr, "the old master leaves by the same rule as any other"
    assert one.has_handed, "nobody is served until the outcome is known"


def test_a_failover_that_waits_for_replicas_elects_nobody(held: Held) -> None:
    """With `acknowledge=master`, what is on this disk may have been answered."""
    cluster, handovers, record = held
    one, late_ns = cluster.a.mastership, cluster.now_ns + HANDING_NS_MAX + 1
    one.part.synced_seqno = one.part.high_seqno
    assert not handovers.next_record(one, record, late_ns, may_write=True, is_failover=True)
    assert not one.handing_since_ns, "writers go on"
    assert not handovers.due(late_ns, {VB: one})


def test_a_failover_hands_over_what_is_committed_in_time(held: Held) -> None:
    cluster, handovers, record = held
    one = cluster.a.mastership
    one.part.synced_seqno = one.part.committed_seqno = one.part.high_seqno
    after = handovers.next_record(
        one, record, cluster.now_ns + HANDING_NS_MAX + 1, may_write=True, is_failover=True
    )
    assert after is not None
    assert after.handover == (one.part.vb_uuid, one.part.high_seqno)


def test_after_one_partition_others_wait_less_in_vain(held: Held) -> None:
    cluster, handovers, record = held
    one, now_ns = cluster.a.mastership, cluster.now_ns + HANDING_NS_MAX + 1
    other = copy(one)
    other.part = copy(one.part)
    other.part.vb_id, other.handing_since_ns = VB + 1, 0
    handovers.wait([VB + 1])

    def elected_after(of: Mastership, since_ns: int, held_ns: int) -> bool:
        after = handovers.next_record(
            of, record, since_ns + held_ns, may_write=True, is_failover=True
        )
        return after is not None

    assert elected_after(one, now_ns, 0)
    handovers.ended(VB, now_ns, is_handed=True)
    handovers.note_followed(now_ns + FOLLOWED_NS_MAX, lambda vb_id: False)
    began_ns = now_ns + FOLLOWED_NS_MAX
    assert handovers.due(began_ns, {VB + 1: other}) == [VB + 1]
    assert not elected_after(other, began_ns, 0)
    assert not elected_after(other, began_ns, STUCK_NS_MAX)
    assert elected_after(other, began_ns, STUCK_NS_MAX + 1)
    handovers.ended(VB + 1, began_ns, is_handed=False)
    assert not handovers.is_under_way
    handovers.wait([VB])
    assert handovers.due(began_ns + MS, {VB: one}) == [VB]
    one.handing_since_ns, one.has_handed = 0, False
    assert not elected_after(one, began_ns + MS, 0)
    assert not elected_after(one, began_ns + MS, STUCK_NS_MAX + 1), "that failover is over"


def test_a_rest_that_is_over_asks_for_a_step_between_ticks() -> None:
    cluster = CoreCluster()
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    core = cluster.a.core
    handovers = core.master.handovers
    handovers.wait([VB + 1])
    handovers._handed[VB], handovers._began_ns = cluster.now_ns, cluster.now_ns - 5 * MS
    handovers.note_followed(cluster.now_ns, lambda vb_id: True)
    core.take_effects()
    core.master.steps.is_due = False
    core.check_fence(cluster.now_ns + 5 * MS - 1)
    assert not core.master.steps.is_due
    core.check_fence(cluster.now_ns + 5 * MS)
    assert core.master.steps.is_due
    assert StepDue() in core.take_effects()
