"""scripts/cluster-demo on a slice of real data; that it can fail; and that it leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from support.etcd_members import IS_MISSING

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FLIGHTS_CSV = ROOT / "tests" / "data" / "flights-2013-01.csv.zip"
ROWS = 4000

pytestmark = [pytest.mark.crash, pytest.mark.foreign]
needs_etcd = pytest.mark.skipif(
    IS_MISSING, reason="the command etcd is missing (sudo apt-get install etcd-server)"
)


def command(*arguments: str) -> list[str]:
    program = str(EXAMPLES / "cluster_flights.py")
    return [sys.executable, program, "--csv", str(FLIGHTS_CSV), *arguments]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder)}


def left_behind(folder: Path) -> list[str]:
    """Return folders that are left, and processes that work in one of them."""
    found = [str(path) for path in folder.glob("dcpd-cluster-demo-*")]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in words and process.name != str(os.getpid()):
                found.append(words)
    return found


@needs_etcd
@pytest.mark.timeout(900)
def test_flights_through_a_cluster_whose_nodes_die_end_equal(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--rows", str(ROWS), "--deaths", "1"),
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "cluster-demo: all equal, nothing lost"
    summary = {line[:16].strip(): line[16:] for line in lines[1:]}
    assert list(summary) == [
        "answered", "lost", "failovers", "versions", "ambiguous", "differences", "rate", "time",
    ]  # fmt: skip
    by = {client: int(count) for count, client in re.findall(r"(\d+) by (\w+)", _plain(summary))}
    assert by["KvClient"] + by["SDK"] == ROWS
    assert by["SDK"] > 0
    assert by["KvClient"] > 0
    assert by["probes"] > 300
    assert summary["lost"] == summary["differences"] == "0"
    assert summary["failovers"].startswith("2 of nodes, ")
    story = done.stderr
    for step in (
        "SIGKILL; it was master", "SIGSTOP; it was master", "etcd's leader", "n4 has joined",
        "rebalance: ", "drain n2: ", "comparing",
    ):  # fmt: skip
        assert step in story
    assert re.search(r"drain n2: .*n2 0,", story), "nobody is master there any more"
    assert left_behind(tmp_path) == []


def _plain(summary: dict[str, str]) -> str:
    return summary["answered"].replace(",", "")


@needs_etcd
@pytest.mark.timeout(900)
def test_everything_is_gone_when_it_is_interrupted(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--rows", "500"), env=environment(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stderr is not None
        for line in demo.stderr:
            if "clients begin at" in line:
                break
        assert len(left_behind(tmp_path)) > 6, "the folder, etcd and the nodes"
        demo.send_signal(signal.SIGINT)
        demo.stderr.read()
        assert demo.wait(60) == 130
    assert left_behind(tmp_path) == []


def test_without_etcd_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--rows", "10"), env=environment(tmp_path) | {"PATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "sudo apt-get install etcd-server" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind(tmp_path) == []


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """Give the program as a module, with its folders below ours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(sys.modules)
    import cluster_flights

    yield cluster_flights
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("stored", "held", "word"),
    [
        ({b"k": b"1"}, {b"k": b"1"}, "all equal"),
        ({}, {}, "answered is b'1', the nodes have nothing"),
        ({b"k": b"0"}, {b"k": b"0"}, "answered is b'1', the nodes have b'0'"),
        ({b"k": b"1"}, {}, "the consumer is nothing, the nodes have b'1'"),
        ({b"k": b"1"}, {b"k": b"1", b"x": b"2"}, "x: the consumer is b'2', the nodes have nothing"),
    ],
)
def test_what_is_lost_or_different_makes_it_fail(
    flights: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stored: dict[bytes, bytes],
    held: dict[bytes, bytes],
    word: str,
) -> None:
    ledger = flights.Ledger()
    ledger.answered[b"k"] = b"1"
    ledger.by["KvClient"] = 1

    async def run_demo(*_: object) -> object:
        return flights.judged(
            1, ledger, stored, held, gaps_s=[0.5, 1.5], deaths=1, versions=2, rollbacks=0,
            load_s=1.0,
        )  # fmt: skip

    monkeypatch.setattr(flights, "run_demo", run_demo)
    code = flights.main(["--rows", "1", "--csv", str(FLIGHTS_CSV)])
    out = capsys.readouterr().out
    assert word in out
    assert code == (0 if word == "all equal" else 1)
