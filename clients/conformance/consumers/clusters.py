"""Scenarios on three nodes: masters move, die, stand still, and lose changes."""

from __future__ import annotations

from typing import Final

from clients.conformance.consumers.scenario import scenario
from clients.conformance.consumers.stage import Stage
from clients.testing.cluster import DcpCluster

GROUP: Final = "cluster"


def _cluster(stage: Stage) -> DcpCluster:
    assert stage.cluster is not None, "the suite gives one"
    return stage.cluster


def _other(stage: Stage) -> str:
    """Return a node that is not the master of the scenario's partition, and not the first one."""
    master = _cluster(stage).master_of(stage.vb_id)
    return next(name for name in ("n3", "n2") if name != master)


@scenario(GROUP, "a partition's master moves by a handover", needs_cluster=True)
def master_moves(stage: Stage) -> None:
    """No version begins. The stream ends with reason 2, the map names another node, and the
    consumer goes on there from the same position.
    """
    stage.begin(6)
    _cluster(stage).move(stage.vb_id, _other(stage))
    stage.write(4, first=10)
    stage.until_same()


@scenario(GROUP, "a partition's master moves while the consumer is away", needs_cluster=True)
def master_moves_while_away(stage: Stage) -> None:
    """The consumer's own map is old, or it has none."""
    stage.begin(6)
    stage.consumer.kill()
    _cluster(stage).move(stage.vb_id, _other(stage))
    stage.write(4, first=10)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "a failover on three nodes that loses two changes", needs_cluster=True)
def cluster_loses_changes(stage: Stage) -> None:
    """The consumer has changes that no node has any more. The new master sends it back."""
    stage.begin(8)
    before = stage.wanted()
    _cluster(stage).lose(stage.vb_id, 2)
    stage.note_undone(before)
    stage.write(2, first=20)
    stage.until_same()


@scenario(GROUP, "a partition branches on all its copies", needs_cluster=True)
def cluster_branches(stage: Stage) -> None:
    """The same as on one node, from whichever copy is the master."""
    stage.consumer.start()
    last = stage.write(8)
    stage.until_same()
    stage.branch(last - 4)
    stage.write(2, first=20)
    stage.until_same()


@scenario(GROUP, "a node dies", needs_cluster=True, timeout_s=60)
def node_dies(stage: Stage) -> None:
    """Others become masters of its partitions, with new versions, and nothing that was answered is
    lost. The consumer finds them although a node of its map does not answer.
    """
    stage.consumer.start()
    stage.write(6)
    for vb_id in range(400, 410):
        stage.write(2, vb_id=vb_id)
    stage.until_same()
    _cluster(stage).kill("n3")
    try:
        stage.write(4, first=10)
        for vb_id in range(400, 410):
            stage.write(1, first=5, vb_id=vb_id)
        stage.until_same()
    finally:
        _cluster(stage).restart("n3")
    stage.write(1, first=30)
    stage.until_same()


@scenario(GROUP, "a node stands still, and comes back", needs_cluster=True, timeout_s=60)
def node_stands_still(stage: Stage) -> None:
    """Its connections stay open and say nothing; others serve its partitions meanwhile. A consumer
    must not wait for it for ever.
    """
    stage.consumer.start()
    stage.write(6)
    for vb_id in range(420, 430):
        stage.write(2, vb_id=vb_id)
    stage.until_same()
    _cluster(stage).pause("n2")
    try:
        stage.write(4, first=10)
        for vb_id in range(420, 430):
            stage.write(1, first=5, vb_id=vb_id)
    finally:
        _cluster(stage).resume("n2")
    stage.until_same()
