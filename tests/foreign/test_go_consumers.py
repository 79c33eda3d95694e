"""Consumers of the Go world; scripts/go-consumers builds them into .venv/go.

docs/consumers-compared.md has what they do in all scenarios; few are played here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clients.conformance.check import FAIL, PASS, Result
from clients.conformance.consumers.scenario import SCENARIOS
from clients.conformance.consumers.suite import play_one

pytestmark = pytest.mark.foreign
BUILT = Path(__file__).parents[2] / ".venv" / "go"


def played(scenario: str, name: str, *arguments: str, timeout_s: float = 60.0) -> Result:
    program = BUILT / name
    if shutil.which(str(program)) is None:
        pytest.skip(f"{name} is not built: scripts/go-consumers needs Go")
    return play_one(SCENARIOS[scenario], [str(program), *arguments], timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("scenario", "mode"),
    [
        ("rollback-inside-a-snapshot", ""),
        ("out-of-order-snapshot", "oso"),
        ("history-streams", "history"),
    ],
)
def test_gocbcore_goes_back_where_the_kit_says(scenario: str, mode: str) -> None:
    result = played(scenario, "gocbcore", mode)
    assert (result.outcome, result.reason) == (PASS, "")


def test_go_dcp_asks_for_no_version_after_a_rollback() -> None:
    """If this fails, go-dcp is better than docs/consumers-compared.md says."""
    result = played("rollback-while-away", "godcp")
    assert result.outcome == FAIL
    report = "\n".join([result.reason, *result.exchange])
    assert "its last words: panic" in report
    assert "DCP_STREAM_REQ answer ROLLBACK: opaque" in report
    assert "start 4, end 18446744073709551615, uuid 0" in report
