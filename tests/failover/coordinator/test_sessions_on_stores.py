"""Whole cluster sessions on the embedded store and on etcd: leases, a coordinator, an election."""

from __future__ import annotations

import asyncio

import pytest

from failover.coordinator.cluster_session import ClusterSession, StoreDriver
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    ReportedPartition,
    StoredPartition,
    encode_partition,
)
from failover.metadata.metastore import OutcomeUnknown, Put, StoreUnavailable, Txn, TxnResult
from failover.rules.replication_record import create, elect
from support.embedded_store import EmbeddedHarness
from support.etcd_members import EtcdHarness, EtcdMembers

ROOT = b"/dcpd/test/"
KEYS = ClusterKeys(ROOT)
PARTITIONS = 130
"""More than one transaction has room for."""
TICK_S = 0.05


class SessionNode:
    """A session with a client of its own; it reports partitions when told to."""

    def __init__(self, harness, member):
        self.harness = harness
        self.client = harness.client(deadline_s=0.8)
        self.suspects = frozenset()
        self.session = ClusterSession(ROOT, member, 1, CoordinatorSettings(prefers_first=False))
        self.driver = StoreDriver(self.session, self.client, self)
        self.task = harness.loop.create_task(self._run())

    def now_ns(self):
        return round(self.harness.loop.time() * 1e9)

    def guarded(self, step):
        step()

    def take(self, effect):
        pass

    async def _run(self):
        while True:
            self.driver.tick()
            reports = tuple(
                ReportedPartition(vb_id, self.record(vb_id).epoch, 7, 1, 5)
                for vb_id in sorted(self.suspects)
                if self.record(vb_id).master == "a"
            )
            self.driver.carry_out(self.session.report(self.now_ns(), reports))
            await asyncio.sleep(TICK_S)

    @property
    def view(self):
        return self.session.view

    def record(self, vb_id):
        return self.view.partitions[vb_id].content.record

    def close(self):
        """As a process that dies: its lease is left to run out."""
        self.task.cancel()
        self.driver.close()
        self.harness.run(asyncio.wait([self.task]))


@pytest.fixture(params=["embedded", "etcd"])
def harness(request, tmp_path):
    if request.param == "embedded":
        harness = EmbeddedHarness(tmp_path / "metastore")
        yield harness
        harness.close()
        return
    etcd = EtcdMembers(tmp_path, 3)
    harness = EtcdHarness(etcd)
    yield harness
    harness.close()
    etcd.close()


def write_records(harness):
    record = elect(create("ab"), "a")
    puts = [
        Put(
            KEYS.of_partition(KeyKind.PARTITION, vb_id),
            encode_partition(StoredPartition(record, "test")),
        )
        for vb_id in range(PARTITIONS)
    ]
    client, results = harness.client(), []
    client.submit(Txn(then=tuple(puts[:100])), results.append)
    client.submit(Txn(then=tuple(puts[100:])), results.append)
    harness.wait(lambda: len(results) == 2)
    assert all(isinstance(result, TxnResult) for result in results), results


def test_a_master_that_dies_is_followed(harness):
    write_records(harness)
    nodes = {member: SessionNode(harness, member) for member in "abc"}
    harness.wait(lambda: all(len(node.view.alive) == 3 for node in nodes.values()))
    harness.wait(lambda: all(len(node.view.partitions) == PARTITIONS for node in nodes.values()))
    harness.wait(lambda: nodes["b"].view.leader is not None)
    nodes["a"].close()
    nodes["b"].suspects = frozenset(range(PARTITIONS))
    live = (nodes["b"], nodes["c"])
    harness.wait(lambda: all("a" not in node.view.alive for node in live))
    harness.wait(
        lambda: all(
            node.record(vb_id).master == "b" for node in live for vb_id in range(PARTITIONS)
        )
    )
    for node in live:
        node.close()


def test_a_store_that_is_away_stops_nothing_and_is_back(harness):
    """The members' leases outlive it, and nobody is elected meanwhile."""
    write_records(harness)
    nodes = {member: SessionNode(harness, member) for member in "ab"}
    harness.wait(lambda: all(len(node.view.alive) == 2 for node in nodes.values()))
    stop(harness)
    harness.wait(lambda: all(node.client.trouble for node in nodes.values()))
    results = []
    nodes["a"].client.submit(Txn(), results.append)
    harness.wait(lambda: results)
    assert isinstance(results[0], OutcomeUnknown | StoreUnavailable)
    start(harness)
    harness.wait(lambda: not any(node.client.trouble for node in nodes.values()))
    harness.wait(lambda: all(node.session.membership.is_alive for node in nodes.values()))
    assert {node.record(0).master for node in nodes.values()} == {"a"}
    for node in nodes.values():
        node.close()


def stop(harness):
    if isinstance(harness, EmbeddedHarness):
        harness.stop()
        return
    for number in range(3):
        harness.etcd.kill(number)


def start(harness):
    if isinstance(harness, EmbeddedHarness):
        harness.start()
        return
    for number in range(3):
        harness.etcd.start(number)
    for number in range(3):
        harness.etcd.wait_until_ready(number)
