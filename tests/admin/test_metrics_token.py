"""The token that may read /metrics and nothing else, and the format that Accept asks for."""

from __future__ import annotations

import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from dcp.server.access.metrics_token import MetricsToken, TokenError
from dcp.server.admin.routes.probe_routes import prefers_openmetrics
from dcp.server.report.metrics import METRICS
from support.raw_client import login
from support.server import DcpdProcess
from support.waiting import until

PROMETHEUS_SENDS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


def ask(server: DcpdProcess, path: str, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and body."""
    connection = HTTPConnection("127.0.0.1", server.admin_port, timeout=20)
    try:
        connection.request("GET", path, None, headers)
        response = connection.getresponse()
        return response.status, response.headers["content-type"], response.read().decode()
    finally:
        connection.close()


def test_a_token_reads_the_metrics_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    with DcpdProcess(tmp_path / "data", "--metrics-token", str(path)) as server:
        assert ask(server, "/metrics", authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(server, "/metrics?vbuckets=1", authorization=f"bearer {TOKEN}")[0] == 200
        for wrong in ("", TOKEN[:-1], TOKEN + "0", OTHER, TOKEN.upper(), "\u00fc" * 16):
            status, _, text = ask(server, "/metrics", authorization=f"Bearer {wrong}")
            assert (status, "setting metrics_token" in text) == (401, True), wrong
        for other in ("/api/v1/status", "/whoami", "/api/v1/users", "/api/v1/openapi.json"):
            status, _, text = ask(server, other, authorization=f"Bearer {TOKEN}")
            assert (status, "/metrics only" in text) == (401, True), other
        # It can be replaced while the server runs. A bad file changes nothing.
        path.write_text(OTHER)
        until(lambda: ask(server, "/metrics", authorization=f"Bearer {OTHER}")[0] == 200)
        assert ask(server, "/metrics", authorization=f"Bearer {TOKEN}")[0] == 401
        path.write_text("short")
        until(lambda: "metrics token not reloaded" in server.log_path.read_text())
        assert ask(server, "/metrics", authorization=f"Bearer {OTHER}")[0] == 200


def test_without_the_setting_there_is_no_token(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        for token in ("", "None", TOKEN):
            assert ask(server, "/metrics", authorization=f"Bearer {token}")[0] == 401


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "one word"), ("two words", "one word"), ("fifteen-letters", "shorter than 16"),
        ("\u00fc" * 16, "one word"), ("x" * 5000, "one word"), (None, "cannot be read"),
    ],
    ids=str,
)  # fmt: skip
def test_files_that_hold_no_token(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenError, match=why):
        MetricsToken(path)


def test_a_server_does_not_start_without_its_token(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "dcp.server.main", "--data", str(tmp_path / "data"),
            "--port", "0", "--admin-port", "0", "--metrics-token", str(tmp_path / "none"),
        ],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, "cannot be read" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=x", True),
        # What Prometheus sends, and what it sends when told to use its own text.
        (PROMETHEUS_SENDS, True),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.4,*/*;q=0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=1e9", False),
        ("APPLICATION/OPENMETRICS-TEXT ; Q=0.7, text/plain;q=0.3", True),
        ("text/plain, application/openmetrics-text", False),
        (";;,,", False),
    ],
)  # fmt: skip
def test_which_format_a_client_gets(accept: str, wanted: bool) -> None:
    assert prefers_openmetrics(accept) is wanted


def test_openmetrics_has_the_same_metrics(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        basic = login().partition(": ")[2]
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        _, kind, text = ask(server, "/metrics", authorization=basic, accept=accept)
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        found = {family.name for family in openmetrics(text)}
        _, kind, text = ask(server, "/metrics", authorization=basic)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        plain = {family.name.removesuffix("_info") for family in prometheus(text)}
        assert plain == found
        own = {name for name in found if name.startswith("dcpd_")}
        assert own == {spec.name.removesuffix("_total").removesuffix("_info") for spec in METRICS}
