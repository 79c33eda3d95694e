"""Whole clusters of coordinators that are members, and an operator who asks for plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.plans.plan_steps import progress_of
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
    Stamp,
)
from failover.coordinator.records import (
    ClusterRecord,
    KeyKind,
    MemberRecord,
    decode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import TxnResult
from failover.rules.replication_record import ReplicationRecord, create
from support.cluster_model import KEYS, ModelCluster, ModelNode

PARTITIONS = 12


class Cluster(ModelCluster):
    """Nodes that are members, and an operator. `plain` members hold the copies at the beginning."""

    def __init__(
        self,
        members: str = "abcd",
        plain: str = "abc",
        copies: int = 3,
        *,
        cut: str = "",
        racks: Mapping[str, str] | None = None,
        **numbers: float,
    ) -> None:
        super().__init__(members, 0, settings=CoordinatorSettings())
        for vb_id in range(PARTITIONS):
            turn = vb_id % len(plain)
            chain = (plain[turn:] + plain[:turn])[:copies]
            self.put(vb_id, create(chain))
        cluster = ClusterRecord(copies=copies, **numbers)  # type: ignore[arg-type]
        self.put_key(KEYS.cluster, encode_record(cluster))
        for member in members:
            self.join(member, rack=(racks or {}).get(member, ""))
        if cut:
            self.cuts.add(frozenset(cut))
        self.keep_history()
        self.start()
        self.run_until(self.leaders)
        self.run(1)
        self.asked = 0

    def join(self, member: str, *, rack: str = "") -> None:
        record = MemberRecord(member=member, address=f"{member}:1", name=f"n-{member}", rack=rack)
        self.put_key(KEYS.of_member(KeyKind.MEMBER, member), encode_record(record))
        self.put_key(KEYS.of_name(f"n-{member}"), member.encode())

    def add(self, member: str) -> None:
        """Let a new node join and run."""
        self.join(member)
        self.nodes[member] = ModelNode(self, member)
        self.nodes[member].start()

    @property
    def view(self) -> ClusterView:
        """The view of a node that runs."""
        return next(node.session.view for node in self.nodes.values() if node.is_up)

    def stamp(self) -> Stamp:
        self.asked += 1
        return Stamp(f"operator{self.asked}", 1000)

    def ask(self, answer: Answer) -> Prepared:
        """Write a request."""
        assert isinstance(answer, Prepared), answer
        for txn in answer.txns:
            result = self.store.apply(self.time.now_ns, txn)
            assert isinstance(result, TxnResult)
            assert result.succeeded
        self.run(0.2)
        return answer

    def until_done(self, seconds: float = 30) -> None:
        self.run_until(lambda: KEYS.plan not in self.values(), seconds)
        assert KEYS.plan not in self.values(), progress_of(self.view)
        self.run(0.3)

    def records(self) -> dict[int, ReplicationRecord]:
        return {vb_id: self.record(vb_id) for vb_id in range(PARTITIONS)}

    def copies(self) -> Counter[str]:
        return Counter(copy for record in self.records().values() for copy in record.copies)

    def masters(self) -> Counter[str | None]:
        return Counter(record.master for record in self.records().values())

    def check_history(self, in_sync_min: int) -> None:
        """No change left fewer copies in sync than there were, or than are wanted."""
        for vb_id in range(PARTITIONS):
            batches = self.batches(KEYS.of_partition(KeyKind.PARTITION, vb_id))
            records = [decode_partition(event.item).record for b in batches for event in b.events]
            for before, after in pairwise(records):
                if after.copies != before.copies:
                    assert len(after.isr) >= min(len(before.isr), in_sync_min), (before, after)
                    assert after.epoch == before.epoch
                assert after.master is not None


def even(counts: Counter[str], members: str, total: int) -> bool:
    found = [counts[member] for member in members]
    return sum(found) == total and max(found) - min(found) <= 1
