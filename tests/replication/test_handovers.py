"""Rests between groups of handovers."""

from __future__ import annotations

import pytest

from dcp.replication.handovers import FOLLOWED_NS_MAX, GROUP_REST_NS_MAX, Handovers
from dcp.replication.shell_effects import StepDue
from failover.isr import PROMOTED_WAIT_NS
from failover.replication_record import want
from support.core_cluster import MS, VB, CoreCluster


@pytest.mark.parametrize(("took_ns", "rest_ns"), [
    (0, 0), (30 * MS, 30 * MS), (150 * MS, GROUP_REST_NS_MAX), (FOLLOWED_NS_MAX, 0),
])  # fmt: skip
def test_after_a_group_the_cluster_rests_as_long_as_the_group_took(
    took_ns: int, rest_ns: int
) -> None:
    """It does not rest after a group whose new master stands still."""
    cluster = CoreCluster()
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    handovers, one, began_ns = Handovers(lambda part: None), cluster.a.mastership, cluster.now_ns
    record = want(one.record, "b")
    handovers.wait([VB, VB + 1])
    assert handovers.due(began_ns, {}) == [VB, VB + 1]
    assert handovers.next_record(one, record, began_ns, may_write=True) is not None
    handovers.ended(VB, began_ns, is_handed=True)
    ended_ns = began_ns + took_ns
    handovers.note_followed(ended_ns, lambda vb_id: took_ns < FOLLOWED_NS_MAX)
    for _ in range(2):  # the rest is not made longer by looks at it
        if rest_ns:
            assert not handovers.take_rested(ended_ns + rest_ns - 1)
            assert not handovers.due(ended_ns + rest_ns - 1, {})
        handovers.note_followed(ended_ns + rest_ns, lambda vb_id: True)
    assert handovers.due(ended_ns + rest_ns, {}) == [VB + 1]
    assert handovers.take_rested(ended_ns + rest_ns) == (took_ns < FOLLOWED_NS_MAX)
    assert not handovers.take_rested(ended_ns + rest_ns), "once"


def test_a_rest_that_is_over_asks_for_a_step_between_ticks() -> None:
    cluster = CoreCluster()
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    core = cluster.a.core
    handovers = core.leading.handovers
    handovers.wait([VB + 1])
    handovers._handed[VB], handovers._began_ns = cluster.now_ns, cluster.now_ns - 5 * MS
    handovers.note_followed(cluster.now_ns, lambda vb_id: True)
    core.take_effects()
    core.leading.is_step_due = False
    core.check_fence(cluster.now_ns + 5 * MS - 1)
    assert not core.leading.is_step_due
    core.check_fence(cluster.now_ns + 5 * MS)
    assert core.leading.is_step_due
    assert StepDue() in core.take_effects()
