"""A member's clock record is written by its present process only, and never over a newer one."""

from __future__ import annotations

import logging

import pytest

from dcp.server.cluster.own_records import TELL_NS, OwnClock
from dcp.server.observe.event_log import EventLog
from failover.coordinator.records import ClockRecord, KeyKind, decode_record
from failover.metadata.metastore import Put, Range, RangeResult, Txn, TxnResult
from support.cluster_model import KEYS, ModelCluster, ModelNode

CLOCK = KEYS.of_member(KeyKind.CLOCK, "a")


@pytest.fixture
def cluster() -> ModelCluster:
    """One member that is alive."""
    cluster = ModelCluster("a").start()
    cluster.run_until(lambda: cluster.nodes["a"].session.membership.is_alive)
    return cluster


class Submitted:
    """A store that keeps what is submitted: it is under way until somebody carries it out."""

    def __init__(self) -> None:
        self.requests: list[Txn] = []

    def submit(self, request: object, _done: object) -> None:
        assert isinstance(request, Txn)
        self.requests.append(request)

    def watch(self, *_: object) -> None:
        raise AssertionError("nobody watches")


def told(node: ModelNode) -> Txn:
    """Return the transaction with which the present process of a member tells its clock."""
    store = Submitted()
    clock = OwnClock(node.session, store, EventLog(logging.getLogger("test")))  # type: ignore[arg-type]
    clock.tick(TELL_NS)
    (request,) = store.requests
    return request


def carried_out(cluster: ModelCluster, request: Txn) -> bool:
    """Carry a transaction out, let the view see it, and tell whether it happened."""
    result = cluster.store.apply(cluster.time.now_ns, request)
    assert isinstance(result, TxnResult)
    cluster.run(0.2)
    return result.succeeded


def stored_ms(cluster: ModelCluster) -> int:
    read = cluster.store.apply(cluster.time.now_ns, Range(CLOCK))
    assert isinstance(read, RangeResult)
    return decode_record(read.items[0], ClockRecord).unix_ms


def test_the_clock_is_told_again_and_again(cluster: ModelCluster) -> None:
    assert carried_out(cluster, told(cluster.nodes["a"]))
    before_ms = stored_ms(cluster)
    assert carried_out(cluster, told(cluster.nodes["a"]))
    assert stored_ms(cluster) >= before_ms


def test_a_clock_that_comes_late_does_not_replace_a_newer_one(cluster: ModelCluster) -> None:
    """It would look like a clock that is behind."""
    late, newer = told(cluster.nodes["a"]), told(cluster.nodes["a"])
    assert carried_out(cluster, newer)
    assert not carried_out(cluster, late)


def test_a_process_that_was_replaced_tells_no_clock(cluster: ModelCluster) -> None:
    node = cluster.nodes["a"]
    late = told(node)
    (put,) = late.then
    assert isinstance(put, Put)
    node.kill()
    cluster.run(0.2)
    node.start()
    cluster.run_until(lambda: node.session.membership.is_alive)
    assert node.session.membership.lease_id != put.lease_id
    assert cluster.store.leases().keys() >= {put.lease_id}, "the store would take its lease"
    assert not carried_out(cluster, late)
    assert carried_out(cluster, told(node))
