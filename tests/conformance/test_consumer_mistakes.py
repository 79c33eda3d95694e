"""Consumers with a mistake each: the scenario that is made for it finds it, and names it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path
from struct import Struct
from urllib.request import Request, urlopen
from xml.etree import ElementTree as ET

import pytest

from clients.conformance import packet as p
from clients.conformance.check import FAIL, NOT_APPLICABLE, PASS
from clients.conformance.consumers.contents import Shifted
from clients.conformance.consumers.documents import BadLineError, Documents, difference
from clients.conformance.consumers.process import ConsumerProcess
from clients.conformance.consumers.proxy import Link, Passing
from clients.conformance.consumers.scenario import SCENARIOS
from clients.conformance.consumers.stage import Stage
from clients.conformance.consumers.suite import play_one
from dcpd.conformance import UnknownScenarioError, play, scenarios

ROOT = Path(__file__).parents[2]
CONSUMER = Path(__file__).with_name("raw_consumer.py")
TIMEOUT_S = 4.0
PAIR = Struct(">QQ")
GUEST = "Basic " + b64encode(b"guest:guest").decode()
FOUND_BY = {
    "ignores-rollback": ("rollback-to-the-middle", "it ignores ROLLBACK: sent back to 5"),
    "keeps-undone": ("rollback-to-zero", "keeps what the server has undone"),
    "skips-new-history": ("new-history-is-live", "it skips changes of the new history"),
    "saves-inside-snapshot": ("rollback-inside-a-snapshot", "positions inside a snapshot as if"),
    "ignores-deletions": ("deletions", "which were deleted or have expired"),
    "keeps-on-restart": ("purge-passes-the-consumer", "a rollback to 0 empties the partition"),
    "no-noop": ("noop-is-asked", "it does not answer NOOPs"),
    "no-ack": ("more-than-a-window", "it never acknowledges bytes"),
    "no-return": ("stream-ends-state-changed", "it does not come back after STREAM_END"),
    "gives-up": ("temporary-failures", "it ended: exit code 1; its last words: a stream request"),
    "rounds": ("seqnos-beyond-a-double", "it rounds seqnos"),
    "resumes-inside-oso": ("out-of-order-snapshot", "it goes on inside an out-of-order snapshot"),
    "skips-repeats": ("history-streams", "has an old or wrong value of 4 documents"),
    "splits": ("one-byte-at-a-time", "it ended: exit code 1"),
    "silent": ("deletions", "at the end it lacks 10 documents"),
    "floods": ("deletions", "it floods its standard output"),
}
"""Mistake -> the scenario, and what its report says."""
ENDING = {"floods", "gives-up"}
"""Mistakes that end the consumer: patience costs no time."""
MODES = {"out-of-order-snapshot": "oso", "history-streams": "history"}
"""Scenario -> what a consumer has to ask for; without that it is not played."""


def played(scenario: str, mistake: str = "", timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    command = [sys.executable, str(CONSUMER), *([mistake] if mistake else [])]
    outcome = play_one(SCENARIOS[scenario], command, timeout_s=timeout_s)
    return outcome.outcome, "\n".join([outcome.reason, *outcome.exchange])


@pytest.mark.parametrize("mistake", FOUND_BY)
def test_a_mistake_is_named(mistake: str) -> None:
    scenario, sentence = FOUND_BY[mistake]
    timeout_s = 60.0 if mistake in ENDING else TIMEOUT_S
    result, report = played(scenario, mistake, timeout_s)
    assert result == FAIL, report
    assert sentence in report


@pytest.mark.parametrize("scenario", sorted({scenario for scenario, _ in FOUND_BY.values()}))
def test_without_it_the_scenario_is_passed(scenario: str) -> None:
    assert played(scenario, MODES.get(scenario, ""), timeout_s=15.0) == (PASS, "")
    if scenario in MODES:
        assert played(scenario)[0] == NOT_APPLICABLE


def test_a_consumer_that_supposes_1024_partitions() -> None:
    """This one knows its partitions beforehand, which is right with 1,024 only."""
    result, report = played("partitions-64")
    assert result == FAIL, report
    assert (
        "does not take the number of partitions from the map: it asked for partition 92" in report
    )


def judged(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.cli", "conformance", "consumer", *words],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip


def test_the_example_passes_on_one_node_and_on_three() -> None:
    names = (
        "unknown-version,rollback-inside-a-snapshot,odd-documents,cluster-loses-changes,"
        "partitions-128"
    )
    ran = judged(
        "-j", "2", "--wait-for", "60", "--scenario", names, "-o", "json", "--",
        sys.executable, "examples/sqlite_mirror.py",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *results, summary = map(json.loads, ran.stdout.splitlines())
    assert {each["check"].partition(".")[2] for each in results} == set(names.split(","))
    assert summary["summary"][PASS] == 5


def test_shifted_seqnos_are_reported_as_they_come() -> None:
    result, report = played("seqnos-beyond-a-double", "keeps-undone", timeout_s=2 * TIMEOUT_S)
    assert (result, "keeps what the server has undone" in report) == (FAIL, True), report
    assert f"answer ROLLBACK: opaque 0x5d, seqno {2**53 + 1 + 5}" in report


def test_a_report_in_junit_has_the_mistake_and_the_packets() -> None:
    ran = judged(
        "--wait-for", "3", "--scenario", "rollback-to-the-middle", "-o", "junit", "--",
        sys.executable, str(CONSUMER), "ignores-rollback",
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    (failure,) = ET.fromstring(ran.stdout).iter("failure")
    assert failure.get("message", "").startswith("it ignores ROLLBACK")
    assert "consumer DCP_STREAM_REQ vb 92" in (failure.text or "")


def test_scenarios_are_listed_and_bad_names_are_told() -> None:
    listed = judged("--list", "-o", "json")
    names = [json.loads(line)["scenario"] for line in listed.stdout.splitlines()]
    assert len(names) >= 40
    assert set(names) == SCENARIOS.keys()
    for page in ("README.md", "CHANGELOG.md", "docs/conformance.md"):
        text = (ROOT / page).read_text()
        assert re.search(rf"{len(names)} scenarios|all {len(names)} are played", text), page
    unknown = judged("--scenario", "nothing", "--", "true")
    assert (unknown.returncode, "no scenario or group 'nothing'" in unknown.stderr) == (2, True)
    absent = judged("--", "no-such-program")
    assert (absent.returncode, "there is no program" in absent.stderr) == (2, True)
    assert judged().returncode == 2


def test_a_scenario_is_a_test_of_pytest() -> None:
    assert set(scenarios()) == SCENARIOS.keys()
    with pytest.raises(AssertionError, match="which were deleted or have expired"):
        play("deletions", [sys.executable, str(CONSUMER), "ignores-deletions"], timeout_s=TIMEOUT_S)
    with pytest.raises(UnknownScenarioError, match="no scenario or group 'nothing'"):
        scenarios("nothing")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"op": "sett"}', '"op" is set, delete or rollback'),
        (b'{"op": "set", "vb": "92", "seqno": 1}', "whole numbers"),
        (b'{"op": "set", "vb": 92, "seqno": 1, "key": "a"}', "are texts"),
    ],
)
def test_a_line_that_cannot_be_judged_is_told(tmp_path: Path, line: bytes, why: str) -> None:
    with pytest.raises(BadLineError, match=why):
        Documents(tmp_path / "none").take_line(line)


def test_a_stage_that_cannot_be_made_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way of the consumer's folder")
    stage = Stage(["true"], tmp_path, timeout_s=1.0)
    with pytest.raises(FileExistsError), stage:
        raise AssertionError("it cannot be made")
    assert not stage.server.runs
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", stage.proxy.port))


def test_a_consumer_that_cannot_be_killed_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(_: ConsumerProcess) -> None:
        raise subprocess.TimeoutExpired("consumer", 20)

    monkeypatch.setattr(ConsumerProcess, "close", stuck)
    stage = Stage(["true"], tmp_path, timeout_s=1.0)
    with pytest.raises(subprocess.TimeoutExpired), stage:
        assert stage.server.runs
    assert not stage.server.runs


@pytest.mark.parametrize("old", [b"", PAIR.pack(8, 4)])
def test_observed_seqnos_are_shifted(old: bytes) -> None:
    head, by = Struct(">BHQ").pack(bool(old), 92, 7), 2**53
    answer = p.Packet(p.RESPONSE, p.OBSERVE_SEQNO, p.OK, 1, value=head + PAIR.pack(5, 0) + old)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shifted = p.take(Shifted(by)(Passing(answer, True, Link(1, ours, theirs))) or b"")
    assert shifted is not None
    more = PAIR.pack(8, 4 + by) if old else b""
    assert shifted[0].value == head + PAIR.pack(5 + by, 0) + more


def test_the_last_words_of_a_trace_are_its_first_line(tmp_path: Path) -> None:
    script = "echo 'panic: no stream' >&2; echo >&2; seq 9 | sed 's/^/  trace /' >&2; exit 2"
    process = ConsumerProcess(["sh", "-c", script], tmp_path, {})
    process.start()
    while not (ended := process.ended()):
        time.sleep(0.01)
    process.close()
    assert ended == "exit code 2; its last words: panic: no stream"


def test_the_admin_port_of_the_proxy_names_its_own_ports(tmp_path: Path) -> None:
    with Stage(["true"], tmp_path, timeout_s=1.0) as stage:
        url = f"http://127.0.0.1:{stage.proxy.admin_port}/pools/default/nodeServices"
        with urlopen(Request(url, headers={"authorization": GUEST})) as answer:
            services = json.load(answer)["nodesExt"][0]["services"]
    assert services == {"kv": stage.proxy.port, "mgmt": stage.proxy.admin_port}


def test_documents_are_told_in_three_ways(tmp_path: Path) -> None:
    documents = Documents(tmp_path / "documents.json")
    for line in (
        b"a log line",
        b'{"op": "set", "vb": 1, "seqno": 1, "key": "a", "value": "1"}',
        b'{"op": "set", "vb": 1, "seqno": 2, "key": "a", "value": "2"}',
        b'{"op": "delete", "vb": 1, "seqno": 3, "key": "a"}',
        b'{"op": "set", "vb": 1, "seqno": 4, "key": "b", "value": "x", "collection": "s.c"}',
    ):
        documents.take_line(line)
    assert documents.held() == {}
    documents.take_line(b'{"op": "rollback", "vb": 1, "seqno": 1}')
    assert documents.held() == {"a": "1"}
    documents.put("c", "3")
    (tmp_path / "documents.json").write_text('{"d": "4"}')
    assert documents.held() == {"a": "1", "c": "3", "d": "4"}
    documents.put("c", None)
    assert difference(documents.held(), {"a": "9", "e": "5"}) == (("e",), ("a",), ("d",))
