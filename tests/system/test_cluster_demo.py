"""scripts/cluster-demo on a slice of real data; that it can fail; and that it leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    DurabilitySyncWriteAmbiguousException,
    RequestCanceledException,
    TemporaryFailException,
    UnAmbiguousTimeoutException,
)

from clients import MutationResult, vbucket_of
from clients.link.topology import single_node
from support.cluster_here import PARTITIONS, ClusterHere
from support.etcd_members import IS_MISSING, NO_ETCD
from support.waiting import until, until_so
from tests.soak.cluster import replicas

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "demos"
FLIGHTS_CSV = ROOT / "tests" / "data" / "flights-2013-01.csv.zip"
ROWS = 4000

TABLE_ROW = re.compile(
    r"  (?P<name>\w+( \w+)?) +(?P<documents>[\d,]+) +(?P<differences>[\d,]+)  (?P<story>.+)"
)

pytestmark = [pytest.mark.crash, pytest.mark.foreign]
needs_etcd = pytest.mark.skipif(IS_MISSING, reason=NO_ETCD)


def command(*arguments: str) -> list[str]:
    program = str(EXAMPLES / "cluster_flights.py")
    return [sys.executable, program, "--csv", str(FLIGHTS_CSV), *arguments]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder), "DCPD_PARTITIONS": str(PARTITIONS)}


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
    """With all that can follow it: a mirror, a group, backups, a Spark query."""
    done = subprocess.run(
        command("--rows", str(ROWS), "--deaths", "1", "--all"),
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "cluster-demo: all equal, nothing lost"
    summary = {line[:16].strip(): line[16:] for line in lines[1 : lines.index("")]}
    assert list(summary) == [
        "documents", "answered", "lost", "failovers", "versions", "ambiguous", "replicas",
        "differences", "rate", "time",
    ]  # fmt: skip
    table = [TABLE_ROW.fullmatch(line) for line in lines[lines.index("") + 2 :]]
    sides = {row["name"]: row for row in table if row is not None}
    assert list(sides) == [
        "writer", "nodes", "copies", "consumer", "mirror", "group", "restored copy", "Spark table",
    ]  # fmt: skip
    assert {row["differences"] for row in sides.values()} == {"0"}
    held = {int(row["documents"].replace(",", "")) for name, row in sides.items()}
    assert len(held) == 2, "all have the same, and copies twice that"
    assert int(sides["restored copy"]["story"].split()[0]) > 1, "backups"
    assert int(sides["group"]["story"].split()[0]) > 0, "deaths of members"
    assert summary["documents"] == f"{ROWS:,} of {ROWS:,} were answered"
    by = {client: int(count) for count, client in re.findall(r"(\d+) by (\w+)", _plain(summary))}
    assert by["KvClient"] + by["SDK"] == ROWS
    replicated = int(summary["replicas"].split()[0].replace(",", ""))
    assert 2 * ROWS < replicated <= 2 * (ROWS + PARTITIONS), (
        "both replicas of each document and probe"
    )
    assert replicated % 2 == 0
    assert by["SDK"] > 0
    assert by["KvClient"] > 0
    assert by["probes"] > PARTITIONS // 3
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
        command("--all"),  # all rows, or it may be over before the signal
        env=environment(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stderr is not None
        for line in demo.stderr:
            if "SIGKILL" in line:
                break
        assert len(left_behind(tmp_path)) > 10, "the folder, etcd, the nodes and who follows"
        demo.send_signal(signal.SIGINT)
        said = demo.stderr.read()
        assert demo.wait() == 130, said
    # The kernel kills the store process of a server that is gone. Nobody waits for that.
    until(lambda: left_behind(tmp_path) == [])


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


async def test_writers_go_on_while_another_has_documents_in_its_hands(
    flights: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the SDK has taken may come back: nobody else would write it."""
    writers = sys.modules["cluster_writers"]
    monkeypatch.setattr(writers, "PAUSE_S", 0)
    backlog, ledger = writers.Backlog([(b"a", b"1"), (b"b", b"2")]), writers.Ledger()
    backlog.allow(1)
    taken = backlog.take(range(1024), 1)
    running = asyncio.create_task(writers.KvWriters(AnsweringKv(), backlog, ledger).run())
    await until_so(lambda: len(ledger.answered) == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done()
    backlog.settle(len(taken), taken)
    await running
    assert ledger.answered == {b"a": b"1", b"b": b"2"}
    assert backlog.unanswered == 0


def test_ambiguous_answers_of_the_sdk_are_counted_by_their_code(flights: ModuleType) -> None:
    writers = sys.modules["cluster_writers"]
    failures = [
        AmbiguousTimeoutException(error_code=13),
        RequestCanceledException(error_code=2),
        DurabilitySyncWriteAmbiguousException(error_code=109),
        TemporaryFailException(error_code=13),
        TemporaryFailException(error_code=2),
        TemporaryFailException(error_code=7),
        UnAmbiguousTimeoutException(error_code=14),
    ]
    backlog = writers.Backlog([(b"%d" % number, b"v") for number in range(len(failures))])
    backlog.allow(1)
    batch = backlog.take(range(1024), len(failures))
    sdk = object.__new__(writers.SdkWriters)  # without a cluster
    sdk._backlog, sdk._ledger = backlog, writers.Ledger()
    keys = [key.decode() for key, _ in batch]
    done = SimpleNamespace(exceptions=dict(zip(keys, failures, strict=True)))
    sdk._documents = SimpleNamespace(upsert_multi=lambda *_: done)
    sdk._write(batch)
    assert sdk._ledger.ambiguous == 5
    assert backlog.unanswered == len(failures), "all are written again"


async def test_each_replica_is_asked_and_one_that_differs_is_named(
    flights: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documents = {b"k%d" % number: b"v%d" % number for number in range(3000)}
    async with ClusterHere(tmp_path) as here:
        await here.of_three()
        async with here.client("n1") as kv:
            await kv.set_many(documents)
        nodes = NodesHere(here)
        found = await flights.compare_replicas(nodes, documents, documents)
        assert found == (2 * len(documents), {})
        monkeypatch.setattr(replicas, "LEARN_S", 0.0)
        masters = documents | {b"k7": b"other"}
        del masters[b"k8"]
        _, wrong = await flights.compare_replicas(nodes, masters, documents)
        rows = {row["vb"]: row for row in nodes.map()}
    for key, value in ((b"k7", b"v7"), (b"k8", b"v8")):
        row = rows[vbucket_of(key, PARTITIONS)]
        who = {name for name, found in wrong.items() if found.get(key) == value}
        assert who == set(row["copies"]) - {row["master"]}
    assert sum(map(len, wrong.values())) == 4


class NodesHere:
    """What `compare_replicas` needs of the demo's nodes."""

    def __init__(self, here: ClusterHere) -> None:
        self._here = here
        self.servers = {
            name: SimpleNamespace(address=f"127.0.0.1:{node.ports.kv}")
            for name, node in here.nodes.items()
        }

    def map(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = msgspec.to_builtins(
            self._here.nodes["n1"]._cluster_operations().map()
        )
        return rows


class AnsweringKv:
    """A KvClient whose writes are all answered."""

    topology = single_node("127.0.0.1", 1)

    async def set_many(self, batch: list[tuple[bytes, bytes]]) -> list[MutationResult]:
        return [MutationResult(1, 0, 0, 0) for _ in batch]


@pytest.mark.parametrize(
    ("stored", "held", "wrong", "mirrored", "documents", "word"),
    [
        ({b"k": b"1"}, {b"k": b"1"}, {}, {b"k": b"1"}, 1, "all equal"),
        (
            {b"k": b"1"}, {b"k": b"1"}, {}, {b"k": b"2"}, 1,
            "k: the mirror is b'2', the nodes have b'1'",
        ),
        ({}, {}, {}, {}, 1, "answered is b'1', the nodes have nothing"),
        ({b"k": b"0"}, {b"k": b"0"}, {}, {b"k": b"0"}, 1, "answered is b'1', the nodes have b'0'"),
        ({b"k": b"1"}, {}, {}, {b"k": b"1"}, 1, "the consumer is nothing, the nodes have b'1'"),
        (
            {b"k": b"1"}, {b"k": b"1", b"x": b"2"}, {}, {b"k": b"1"}, 1,
            "x: the consumer is b'2', the nodes have nothing",
        ),
        (
            {b"k": b"1"}, {b"k": b"1"}, {"n3": {b"k": b"0"}}, {b"k": b"1"}, 1,
            "k: the replica on n3 is b'0', the nodes have b'1'",
        ),
        (
            {b"k": b"1"}, {b"k": b"1"}, {"n3": {b"k": None}}, {b"k": b"1"}, 1,
            "k: the replica on n3 is nothing, the nodes have b'1'",
        ),
        ({b"k": b"1"}, {b"k": b"1"}, {}, {b"k": b"1"}, 3, "2 of 3 documents were never answered"),
    ],
)  # fmt: skip
def test_what_is_lost_different_or_never_written_makes_it_fail(
    flights: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stored: dict[bytes, bytes],
    held: dict[bytes, bytes],
    wrong: dict[str, dict[bytes, bytes | None]],
    mirrored: dict[bytes, bytes],
    documents: int,
    word: str,
) -> None:
    ledger = flights.Ledger()
    ledger.answered[b"k"] = b"1"
    ledger.by["KvClient"] = 1
    replicas = flights.Compared(2, wrong)
    followers = [flights.Follower("mirror", mirrored | {b"_dcpd:group:g": b""}, "reads copies")]

    async def run_demo(*_: object, has_audience: bool) -> object:
        return flights.judged(
            documents, ledger, stored, held, replicas, followers, gaps_s=[0.5, 1.5],
            deaths=1, versions=2, rollbacks=0, load_s=1.0,
        )  # fmt: skip

    monkeypatch.setattr(flights, "run_demo", run_demo)
    code = flights.main(["--rows", "1", "--csv", str(FLIGHTS_CSV)])
    out = capsys.readouterr().out
    assert word in out
    assert code == (0 if word == "all equal" else 1)
