"""deploy/monitoring: what the alerts and the dashboard ask for exists, and promtool agrees."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp.server.observe.meter import REFUSAL_KINDS, ClusterMeter
from dcp.server.report.cluster_metrics import CLUSTER_METRICS
from dcp.server.report.metric_sources import MetricSpec
from dcp.server.report.metrics import METRICS
from failover.rules.rollback import RollbackKind
from vbucket.engine.partition import VbState

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
ALERTS = FOLDER / "alerts.yml"
DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
PROCESS_SERIES = {
    "process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds",
    "process_start_time_seconds",
}  # fmt: skip
"""What prometheus_client's ProcessCollector has, as far as it is used."""
SERIES = re.compile(r"\b((?:dcpd|process)_[a-z_]+)(\{[^}]*\})?")
GROUPING = re.compile(r"by \(([^)]*)\)")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
SCRAPED_LABELS = {"instance", "job"}
VALUES = {
    ("dcpd_writes_refused", "reason"): set(REFUSAL_KINDS),
    ("dcpd_rollbacks_total", "reason"): {str(kind) for kind in RollbackKind},
    ("dcpd_vbuckets", "state"): {state.name.lower() for state in VbState},
    ("dcpd_cluster_nodes", "state"): {"up", "leaving", "down"},
    ("dcpd_cluster_copies", "role"): {"master", "replica", "filling"},
    ("dcpd_elections_total", "kind"): set(ClusterMeter().elections),
    ("dcpd_receipts_total", "kind"): set(ClusterMeter().receipts),
}


def series_of(spec: MetricSpec) -> set[str]:
    if spec.kind == "histogram":
        return {f"{spec.name}_{part}" for part in ("bucket", "count", "sum")}
    return {spec.name}


SPECS = (*METRICS, *CLUSTER_METRICS)
SPEC_OF = {name: spec for spec in SPECS for name in series_of(spec)}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> dict[str, str]:
    """Name of an alert, or title of a panel and number of its query -> expression."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                found[f"{dashboard.stem} {panel['title']} {target['refId']}"] = target["expr"]
    return found


@pytest.mark.parametrize("name", expressions())
def test_every_series_exists_and_has_the_labels(name: str) -> None:
    expression = expressions()[name]
    used = SERIES.findall(expression)
    assert used or expression.startswith("up{"), "no series of ours"
    labels = set(SCRAPED_LABELS)
    for series, selector in used:
        if series in PROCESS_SERIES:
            own = set()
        else:
            assert series in SPEC_OF, f"docs/metrics.md has no {series}"
            own = set(SPEC_OF[series].labels)
        labels |= own | ({"le"} if series.endswith("_bucket") else set())
        for label, value in MATCHER.findall(selector):
            assert label in own | SCRAPED_LABELS, f"{series} has no label {label}"
            if label not in SCRAPED_LABELS and (series, label) in VALUES:
                assert set(value.split("|")) <= VALUES[series, label], series
    for grouping in GROUPING.findall(expression):
        assert {label.strip() for label in grouping.split(",")} <= labels


def test_alerts_say_what_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description"}
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        known = {label for spec in SPECS for label in spec.labels} | SCRAPED_LABELS
        assert labels <= known, rule["alert"]


def test_dashboards_show_every_metric_of_a_cluster() -> None:
    shown = " ".join(expressions().values())
    assert [spec.name for spec in CLUSTER_METRICS if spec.name not in shown] == []
    names = [json.loads(dashboard.read_text())["uid"] for dashboard in DASHBOARDS]
    assert names == [dashboard.stem for dashboard in DASHBOARDS]


def test_each_alert_is_seen_to_fire_and_to_stay_silent() -> None:
    """Each alert of a cluster, as far as promtool's tests go."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    (names,) = ({r["alert"] for r in g["rules"]} for g in groups if g["name"] == "dcpd-cluster")
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    for is_firing in (True, False):
        assert names <= {c["alertname"] for c in checks if bool(c.get("exp_alerts")) == is_firing}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_apart_and_whole(dashboard: Path) -> None:
    ids = [panel["id"] for panel in panels(dashboard)]
    assert len(set(ids)) == len(ids)
    covered: set[tuple[int, int]] = set()
    for panel in panels(dashboard):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, panel["title"]
        assert place["x"] + place["w"] <= 24
        covered |= cells
        assert panel["targets"]


def promtool(*arguments: str) -> None:
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("the command promtool is missing (sudo apt-get install prometheus)")
    done = subprocess.run(
        [command, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "alerts.yml")


def test_alerts_fire_and_stay_silent() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_promtool_accepts_the_scrape_configuration() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "dcpd", "alerts name the job"


def test_promtool_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, with Grafana's variables replaced."""
    queries = [
        expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
        for name, expression in expressions().items()
    ]
    recorded = [{"record": f"r{n}", "expr": query} for n, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    promtool("check", "rules", "--lint=none", str(path))
