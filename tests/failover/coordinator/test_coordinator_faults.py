"""Whole clusters of coordinators under faults of nodes, links and the store, from a seed."""

from __future__ import annotations

from itertools import groupby, pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.records import ClusterRecord, KeyKind, decode_partition, encode_record
from support.cluster_model import KEYS, ModelCluster
from support.metastore_faults import MS, Absence, StoreFaults

MEMBERS = "abcde"
PARTITIONS = 4
STEPS = 25
SETTLE_S = 25
"""Faults have ended for so long when everything must be in order: leases (3 s), watches (5 s),
elections (1 s), handovers to preferred masters (5 s), and all of it again if one came late."""


def a_fault(cluster: ModelCluster, random: Random) -> None:
    """Change one thing, for the worse or the better."""
    node = cluster.nodes[random.choice(MEMBERS)]
    link = frozenset(random.sample(MEMBERS, 2))
    faults = [
        lambda: node.kill() if node.is_up else node.start(),
        lambda: node.start() if not node.is_up else None,
        lambda: setattr(node, "is_paused", not node.is_paused),
        lambda: cluster.cuts.symmetric_difference_update({link}),
        lambda: setattr(node.faults, "absence", random.choice(list(Absence))),
        lambda: setattr(node.faults, "unknown_rate", random.choice([0.0, 0.3, 0.9])),
        lambda: setattr(node.faults, "applied_rate", random.random()),
        lambda: setattr(node.faults, "request_ns", (MS, random.choice([MS, 700 * MS]))),
        lambda: setattr(node.faults, "watch_ns", (MS, random.choice([MS, 900 * MS]))),
        node.store.lose_watches,
        node.store.compact,
        node.store.restart,
    ]
    random.choice(faults)()


def heal(cluster: ModelCluster) -> None:
    cluster.cuts.clear()
    for node in cluster.nodes.values():
        node.is_paused = False
        node.faults = node.store.faults = StoreFaults()
        if not node.is_up:
            node.start()


def check_history(cluster: ModelCluster) -> None:
    """Each epoch has one master, and each change of master is a new epoch."""
    elected = [each for node in cluster.nodes.values() for each in node.elected]
    for vb_id in range(PARTITIONS):
        key = KEYS.of_partition(KeyKind.PARTITION, vb_id)
        batches = cluster.batches(key)
        records = [decode_partition(event.item).record for b in batches for event in b.events]
        for before, after in pairwise(records):
            assert after.epoch - before.epoch in {0, 1}
            if after.epoch == before.epoch:
                assert after.master == before.master
            elif after.unclean_epoch != after.epoch:
                assert after.master in before.isr, "a clean election outside the ISR"
        first_of_epoch = [next(found) for _, found in groupby(records, lambda r: r.epoch)]
        told = [each.record for each in elected if each.vb_id == vb_id]
        assert len({record.epoch for record in told}) == len(told), "two elected in one epoch"
        assert all(record in first_of_epoch for record in told), "told, and not written"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), is_unclean=st.booleans())
def test_one_master_per_epoch_and_all_is_well_after_the_faults(seed, is_unclean):
    random = Random(seed)
    cluster = ModelCluster(
        MEMBERS, PARTITIONS, seed, CoordinatorSettings(elects_uncleanly=is_unclean)
    ).start()
    soon = ClusterRecord(copies=len(MEMBERS), masters_return_s=5)
    cluster.put_key(KEYS.cluster, encode_record(soon))
    cluster.keep_history()
    cluster.run(random.random() * 3)
    for _ in range(STEPS):
        a_fault(cluster, random)
        cluster.run(random.choice([0.05, 0.4, 1.5]))
    heal(cluster)
    cluster.run(SETTLE_S)
    check_history(cluster)
    assert len(cluster.leaders()) == 1
    for vb_id in range(PARTITIONS):
        record = cluster.record(vb_id)
        assert record.master == record.copies[0], "the preferred copy is master again"
        assert record.isr == set(MEMBERS)
        node = cluster.nodes[record.master]
        assert node.serves(vb_id), "the record's master knows it"
    for node in cluster.nodes.values():
        assert node.session.membership.is_alive
        shown = {vb: s.content.record for vb, s in node.session.view.partitions.items()}
        assert shown == {vb_id: cluster.record(vb_id) for vb_id in range(PARTITIONS)}
    before = cluster.store.revision
    cluster.run(20)
    assert cluster.store.revision == before, "at rest nothing is written"
