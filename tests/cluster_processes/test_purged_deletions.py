"""A node that was away until deletions that it missed were purged, in a cluster of processes."""

from __future__ import annotations

import pytest

from clients.errors import NotFoundError
from clients.testing import DcpCluster
from dcp.server.cluster.operators.cluster_status import _held
from failover.rules.history import FailoverLog
from vbucket.engine.partition import Partition
from vbucket.engine.resync import UNENDED
from vbucket.model.control import SnapshotWindow
from vbucket.model.ids import vbucket_of

PARTITIONS = 64
DOCUMENTS = 400
VALUE_BYTES = 4096
SENT = "dcpd_sent_bytes_total"


def test_a_node_gets_back_only_what_it_missed() -> None:
    keys = [b"key %d" % number for number in range(DOCUMENTS)]
    with DcpCluster("--partitions", str(PARTITIONS)) as cluster:
        with cluster.connect() as kv:
            for key in keys:
                kv.set(key, b"v" * VALUE_BYTES)
        cluster.wait_until_in_sync()
        cluster.kill("n3")
        with cluster.connect() as kv:
            deleted, changed = keys[0:DOCUMENTS:4], keys[1:DOCUMENTS:40]
            for key in deleted:
                kv.delete(key)
            for key in changed:
                kv.set(key, b"changed")
            last = {vbucket_of(key, PARTITIONS): key for key in keys if key not in deleted}
            for key in last.values():
                kv.set(key, b"last")
        for vb in range(PARTITIONS):
            assert cluster.purge(vb)["purge_seqno"] > 0
        sent = [cluster.nodes[name].metrics()[SENT] for name in ("n1", "n2")]
        cluster.restart("n3")
        after = [cluster.nodes[name].metrics()[SENT] for name in ("n1", "n2")]
        assert 0 < sum(after) - sum(sent) < DOCUMENTS * VALUE_BYTES / 10
        looked_at = range(0, PARTITIONS, 16)
        for vb in looked_at:
            cluster.move(vb, "n3")
        assert {cluster.master_of(vb) for vb in looked_at} == {"n3"}
        values = dict.fromkeys(keys, b"v" * VALUE_BYTES) | dict.fromkeys(changed, b"changed")
        values |= dict.fromkeys(last.values(), b"last")
        with cluster.connect() as kv:
            for key in keys:
                if vbucket_of(key, PARTITIONS) not in looked_at:
                    continue
                if key in deleted:
                    with pytest.raises(NotFoundError):
                        kv.get(key)
                else:
                    assert kv.get(key).value == values[key]


def test_a_part_without_an_end_is_shown_up_to_the_purge() -> None:
    part = Partition(0, FailoverLog.create(7))
    part.incomplete_snapshot = SnapshotWindow(8, UNENDED, 12)
    assert _held(part).snapshot_upto == 12
    part.incomplete_snapshot = SnapshotWindow(8, 14, 12)
    assert _held(part).snapshot_upto == 14
    part.incomplete_snapshot = None
    assert _held(part).snapshot_upto is None
