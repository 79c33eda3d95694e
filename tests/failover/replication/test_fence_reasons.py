"""Who is refused by a fenced partition learns which node does not confirm its master, and why."""

from __future__ import annotations

import msgspec
import pytest

from failover.rules.isr import CONFIRMATION_NS, PROMOTED_WAIT_NS
from failover.rules.replication_record import want
from support.core_cluster import MS, VB, CoreCluster
from vbucket.engine.partition import VbState


@pytest.fixture
def cluster() -> CoreCluster:
    """Three members; a serves."""
    cluster = CoreCluster("abc")
    cluster.run(PROMOTED_WAIT_NS + 200 * MS)
    assert cluster.a.part.state == VbState.ACTIVE
    return cluster


def cut_off(cluster: CoreCluster, member: str) -> None:
    """Let nothing that a member sends arrive until a is fenced."""
    for wire in cluster.wires:
        wire.is_up &= wire.node.member != member
    cluster.run(CONFIRMATION_NS + 100 * MS, answers=False)
    assert cluster.a.part.state == VbState.FENCED


def told(cluster: CoreCluster) -> str:
    return cluster.a.core.master.why_fenced(VB)


def test_the_node_that_does_not_confirm_the_master_is_named(cluster: CoreCluster) -> None:
    members = cluster.a.session.view.members
    content = msgspec.structs.replace(members["c"].content, name="n3")
    members["c"] = members["c"]._replace(content=content)
    cut_off(cluster, "c")
    assert told(cluster) == "no confirmation from n3 for a while that this node is its master"
    assert cluster.b.core.master.why_fenced(VB) == "", "b is not its master"


def test_that_the_metadata_store_is_away_is_told(cluster: CoreCluster) -> None:
    cut_off(cluster, "c")
    before = told(cluster)
    cluster.a.core.master.serving.store_trouble = "nobody listens"
    assert told(cluster) == before + (
        "; no copy can leave the in-sync set while the metadata store is away"
    )


def test_a_handover_is_told_as_one(cluster: CoreCluster) -> None:
    cluster.write(want(cluster.record, "b"))
    cluster.tick()
    assert cluster.a.mastership.has_handed
    assert told(cluster) == "another node becomes the partition's master"
