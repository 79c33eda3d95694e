"""The table of metrics, the page made from it, and what a live server says."""

import re
from pathlib import Path

import pytest

from clients.testing import DcpServer, ServerRefusedError
from dcp.server.observe.meter import Histogram, Meter
from dcp.server.report.cluster_metrics import CLUSTER_METRICS
from dcp.server.report.metrics import METRICS, VBUCKET_METRICS, markdown
from dcp.wire.opcode import Opcode
from failover.rules.rollback import RollbackKind
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == markdown(), "run: python -m dcp.server.report.metrics > docs/metrics.md"


@pytest.mark.parametrize(
    "spec", [*METRICS, *CLUSTER_METRICS, *VBUCKET_METRICS], ids=lambda spec: spec.name
)
def test_names_and_units_are_prometheus_own(spec):
    assert re.fullmatch(r"dcpd_[a-z]+(_[a-z]+)*", spec.name)
    assert spec.kind in {"counter", "gauge", "histogram", "info"}
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert spec.name.endswith("_info") == (spec.kind == "info")
    if spec.unit:
        assert spec.unit in {"bytes", "seconds"}
        assert spec.name.removesuffix("_total").endswith(f"_{spec.unit}")
    else:
        assert not re.search(r"_(ms|millis|us|ns|kb|mb|percent)(_|$)", spec.name)
    assert "vb" not in spec.labels or spec in VBUCKET_METRICS
    assert spec.meaning.endswith(".")
    assert "|" not in spec.meaning + spec.bad


def test_names_are_unique():
    names = [spec.name for spec in (*METRICS, *CLUSTER_METRICS, *VBUCKET_METRICS)]
    assert len(set(names)) == len(names)


def test_a_histogram_counts_at_or_below_each_bound():
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 2.5, 3, 100):
        histogram.observe(value)
    assert histogram.cumulative() == [("1", 2), ("2.5", 4), ("+Inf", 6)]
    assert histogram.total == 109


def test_a_meter_begins_at_nothing():
    meter = Meter()
    assert meter.answer_seconds.cumulative()[-1] == ("+Inf", 0)
    assert meter.sync_seconds is not meter.answer_seconds


def test_a_live_server_counts(tmp_path):
    vb = vbucket_of(b"key")
    with DcpServer(tmp_path / "data") as server:
        with server.connect() as kv:
            for number in range(10):
                kv.set(b"key", b"%d" % number)
            (link,) = kv._exchange._links.values()
            assert link.request(Opcode.GET, vb_id=1, extras=b"x", key=b"k").status == 4
            link.request(Opcode.DCP_OPEN, key=b"mine", extras=b"\0\0\0\0\0\0\0\1")
            link.request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true")
            asked = (0).to_bytes(8, "big") + b"".join(
                number.to_bytes(8, "big") for number in (5, 2**64 - 1, 7, 5, 5)
            )
            assert link.request(Opcode.DCP_STREAM_REQ, vb_id=vb, extras=asked).status == 0x23
            with pytest.raises(ServerRefusedError):
                server.ask("GET", "/api/v1/nothing")
            found = server.metrics()
        assert found["dcpd_items"] == 1
        assert found["dcpd_admin_connections"] == 1
        assert found["dcpd_admin_refusals_total" + '{status="404"}'] == 1
        assert found["dcpd_admin_closed_total" + '{reason="late"}'] == 0
        assert found["dcpd_changes_total"] == 10
        assert found["dcpd_answers_total"] > 10
        assert found["dcpd_received_bytes_total"] > 300
        assert found["dcpd_sent_bytes_total"] > 300
        assert found["dcpd_commit_groups_total"] == found["dcpd_sync_seconds_count"] == 10
        assert found["dcpd_answer_seconds_count"] > 10
        assert found["dcpd_refusals_total" + '{status="EINVAL"}'] == 1
        assert found["dcpd_rollbacks_total" + '{reason="unknown_version"}'] == 1
        assert found["dcpd_connections"] == found["dcpd_dcp_connections"] == 1
        assert found["dcpd_stream_lag_items" + '{consumer="mine"}'] == 0
        assert found["dcpd_stream_lag_seconds" + '{consumer="mine"}'] == 0
        assert found["dcpd_vbuckets" + '{state="active"}'] == NUM_VBUCKETS
        assert found["dcpd_unwritable_vbuckets"] == 0
        assert not any("_cluster_" in name or "replica_lag" in name for name in found)
        assert found["dcpd_disk_bytes" + '{part="log"}'] > 0
        assert found["process_resident_memory_bytes"] > 1e6
        names = {re.sub(r"(_bucket|_count|_sum)?(\{.*)?$", "", name) for name in found}
        wanted = {spec.name for spec in METRICS}
        silent = {
            "dcpd_rollbacks_total", "dcpd_refusals_total", "dcpd_noop_round_trip_seconds",
            "dcpd_consumer_keep_vbuckets",
        }  # fmt: skip
        assert wanted - names - silent == set(), "every line of the table is served"
        assert not any("vb=" in name for name in found)
        by_vb = server.ask("GET", "/metrics?vbuckets=1")
        assert f'dcpd_vbucket_high_seqno{{vb="{vb}"}} 10.0' in by_vb


def test_every_kind_of_rollback_is_named_on_the_page():
    for kind in RollbackKind:
        assert kind in markdown()
