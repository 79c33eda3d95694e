"""What follows a cancellation: the next plan takes over what is left of it."""

from __future__ import annotations

import pytest

from failover.coordinator.partition_choices import AGAIN_NS
from failover.coordinator.plans.plan_steps import next_record, with_those_in_sync
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
)
from failover.coordinator.plans.requests import (
    _kept_chain,
    cancel,
    drain,
    failover,
    move,
    rebalance,
    remove,
    set_cluster,
    undrain,
)
from failover.coordinator.records import (
    PlanKind,
)
from failover.rules.replication_record import add_copy, create, elect, expand, shrink
from support.cluster_model import PARTITIONS, Cluster, even


def _with_cancellation() -> Cluster:
    """Return a cluster with a cancellation that waits for two nodes."""
    cluster = Cluster(cut="ad")  # some copies of the first plan are being filled
    cluster.ask(set_cluster(cluster.view, cluster.stamp(), copies=4))
    cluster.run(AGAIN_NS / 1e9 + 0.5)
    assert any(record.filling for record in cluster.records().values())
    cluster.nodes["d"].is_paused = True
    cluster.nodes["b"].is_paused = True
    operation = cluster.stamp()
    for txn in _prepared(cancel(cluster.view, operation)).txns:
        cluster.store.apply(cluster.time.now_ns, txn)
    cluster.run(0.05)
    plan = cluster.view.plan
    assert plan is not None
    assert plan.content.kind is PlanKind.CANCEL
    return cluster


@pytest.mark.parametrize("then", ["rebalance", "drain", "move", "set", "failover"])
def test_plan_replaces_cancellation_and_ends_what_it_had_to_do(then: str) -> None:
    cluster = _with_cancellation()
    view, stamp = cluster.view, cluster.stamp()
    asked = {
        "rebalance": lambda: rebalance(view, stamp),
        "drain": lambda: drain(view, "n-b", stamp),
        "move": lambda: move(view, 0, "n-c", stamp),
        "set": lambda: set_cluster(view, stamp, copies=2),
        "failover": lambda: failover(view, stamp, vb_id=0),
    }
    cluster.ask(asked[then]())
    cluster.nodes["d"].is_paused = cluster.nodes["b"].is_paused = False
    cluster.cuts.clear()
    cluster.until_done()
    copies = 2 if then == "set" else 3
    assert {len(record.copies) for record in cluster.records().values()} == {copies}
    assert not any(record.filling for record in cluster.records().values())
    assert (cluster.copies()["b"] == 0) == (then == "drain")
    cluster.check_history(copies)


def test_cancellation_that_is_asked_again_does_without_the_dead() -> None:
    record = expand(add_copy(elect(create("abcd"), "c"), "e"), "e")
    lacking = shrink(record, "abd")
    assert _kept_chain(record, 3) == ("a", "b", "c")
    assert _kept_chain(expand(lacking, "d"), 3) == ("c", "d", "e")
    assert _kept_chain(lacking, 3) == ("a", "c", "e"), "a may come back"
    assert _kept_chain(lacking, 3, "ab") == ("c", "d", "e")
    assert _kept_chain(lacking, 3, "abd") == ("c", "e"), "a new copy is made elsewhere"
    assert _kept_chain(lacking, 3, "abcde") == ("a", "c", "e")


def test_who_comes_back_into_sync_stays_in_a_cancellation() -> None:
    """It was down when the cancellation was asked for again; the cluster wants three copies."""
    cluster = _with_cancellation()
    members = "cad"
    record, chain = create(members), ("c",)
    lacking = shrink(record, "a")
    assert with_those_in_sync(cluster.view, record, chain) == ("c", "a", "d")
    assert next_record(cluster.view, record, ("c", "a", "d"), ()) is record
    assert with_those_in_sync(cluster.view, lacking, chain) == ("c", "d"), "a is not in sync"
    assert with_those_in_sync(cluster.view, record, ("a", "b", "c")) == ("a", "b", "c")
    cluster.nodes["a"].kill()
    cluster.run(8)
    assert with_those_in_sync(cluster.view, record, chain) == chain, "nobody else runs"


def test_plans_that_take_short_chains_over_keep_who_is_in_sync() -> None:
    """A drain replaces a cancellation: what is drained goes, and nobody else in sync does."""
    cluster = Cluster()
    for txn in _prepared(drain(cluster.view, "n-b", cluster.stamp())).txns:
        cluster.store.apply(cluster.time.now_ns, txn)
    cluster.run(0.05)
    plan = cluster.view.plan
    assert plan is not None
    assert plan.content.kind is PlanKind.DRAIN
    record = create("cabd")
    assert with_those_in_sync(cluster.view, record, ("c",)) == ("c", "a", "d")
    after = next_record(cluster.view, record, ("c", "a", "d"), ())
    assert after is not None
    assert after.copies == ("c", "a", "d")
    assert with_those_in_sync(cluster.view, shrink(record, "d"), ("c",)) == ("c", "a")


def _prepared(answer: Answer) -> Prepared:
    assert isinstance(answer, Prepared), answer
    return answer


def test_undrain_during_a_drain_takes_it_back() -> None:
    cluster = Cluster(cut="ad")
    cluster.ask(drain(cluster.view, "n-b", cluster.stamp()))
    assert cluster.view.plan is not None
    assert cluster.ask(undrain(cluster.view, "n-b", cluster.stamp())).what == "cancel drain n-b"
    assert not cluster.view.members["b"].content.is_drained
    again = _prepared(undrain(cluster.view, "n-b", cluster.stamp()))
    assert (again.txns, again.notes) == ((), ("n-b is not drained",))
    cluster.cuts.clear()
    cluster.until_done()
    assert {len(record.copies) for record in cluster.records().values()} == {3}
    assert cluster.copies()["b"] > 0
    cluster.check_history(3)


def test_undrain_is_not_held_up_by_the_plan_of_another_node() -> None:
    cluster = Cluster("abcde")
    cluster.ask(drain(cluster.view, "n-e", cluster.stamp()))
    cluster.until_done()
    cluster.cuts.add(frozenset("ad"))
    cluster.ask(drain(cluster.view, "n-b", cluster.stamp()))
    plan = cluster.view.plan
    assert plan is not None
    cluster.ask(undrain(cluster.view, "n-e", cluster.stamp()))
    assert not cluster.view.members["e"].content.is_drained
    assert cluster.view.plan == plan


def test_a_dead_node_is_removed_right_after_a_cancellation() -> None:
    cluster = Cluster()
    cluster.nodes["b"].kill()
    cluster.run(8)
    cluster.nodes["d"].is_paused = True
    cluster.ask(drain(cluster.view, "n-b", cluster.stamp()))
    cluster.ask(cancel(cluster.view, cluster.stamp()))
    cluster.nodes["d"].is_paused = False
    cluster.ask(remove(cluster.view, "n-b", cluster.stamp()))
    cluster.until_done()
    assert "b" not in cluster.view.members
    assert even(cluster.copies(), "acd", 3 * PARTITIONS)
