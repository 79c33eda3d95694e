"""The load on clusters: it follows the map, repeats what is refused, and times what that takes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import workload
from benchmarks.cluster_map import OP_GET_CLUSTER_CONFIG, masters_of
from benchmarks.cluster_nodes import Load, Nodes, processor_ns
from benchmarks.generator import Load as GeneratorLoad
from benchmarks.generator import run
from clients.cli.node.answers import AnswerError
from support.waiting import until

SET_ANSWER = workload.HEADER.pack(0x81, 0x01, 0, 0, 0, 0, 16, 0, 0) + bytes(16)


def config(rev: int, ports: list[int]) -> bytes:
    """Return a map in which the first node is the master of all partitions."""
    placed = {"serverList": [f"$HOST:{port}" for port in ports], "vBucketMap": [[0]] * 1024}
    return json.dumps({"rev": rev, "vBucketServerMap": placed}, separators=(",", ":")).encode()


def test_masters_are_ports_and_zero_where_there_is_none() -> None:
    document = json.loads(config(1, [5, 7]))
    document["vBucketServerMap"]["vBucketMap"] = [[1, 0], [-1, 0], [0, 1]]
    assert masters_of(json.dumps(document).encode()) == [7, 0, 5]


class FakeNode:
    """Answers SETs with a status until told otherwise; tells a map."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.status = 0
        self.config = b""
        self.sets = 0
        self.refused = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:
            connection, _ = self._listener.accept()
        with (
            suppress(ConnectionResetError),  # a load that is stopped leaves answers unread
            connection,
            connection.makefile("rb") as stream,
        ):
            while head := stream.read(24):
                stream.read(int.from_bytes(head[8:12], "big"))
                connection.sendall(self._answer(head[1]))

    def _answer(self, opcode: int) -> bytes:
        body = self.config if opcode == OP_GET_CLUSTER_CONFIG else b""
        status = self.status if opcode == workload.OP_SET else 0
        if opcode == workload.OP_SET and not status:
            self.sets += 1
            return SET_ANSWER
        if status == 0x07:
            body = self.config
            self.refused.set()
        return workload.HEADER.pack(0x81, opcode, 0, 0, 0, status, len(body), 0, 0) + body


@pytest.fixture
def two() -> tuple[FakeNode, FakeNode]:
    first, second = FakeNode(), FakeNode()
    first.config = config(1, [first.port, second.port])
    second.config = config(1, [first.port, second.port])
    return first, second


def written_to(load: Load, node: FakeNode) -> list[float]:
    load.begin_mark(node.port)
    return load.end_mark()


def test_refused_write_goes_to_new_master_and_keeps_its_time(
    two: tuple[FakeNode, FakeNode],
) -> None:
    first, second = two
    load = Load([first.port, second.port], rate=200)
    try:
        assert len(written_to(load, first)) == 1024, "one write to each partition"
        first.config = config(2, [second.port, first.port])
        first.status = 0x07
        assert first.refused.wait(20)
        until(lambda: len(written_to(load, second)) == 1024)  # the refusal has told the new map
        result = load.stop()
    finally:
        load.kill()
    assert second.sets >= 1024
    assert result["maps"] == 2
    assert result["refusals"]["status 0x07"] >= 1
    assert result["max_us"] / 1000 + 1 >= result["longest_refused_ms"] > 0
    assert sum(row[0] for row in result["each_second"].values()) == result["operations"]


def test_a_cluster_is_measured(tmp_path: Path) -> None:
    with Nodes(tmp_path / "nodes", "ab") as nodes:
        nodes.change("set", min_in_sync=1)
        assert sum(nodes.masters().values()) == len(nodes.epochs()) == 1024
        assert nodes.processor_ns() > processor_ns(nodes.nodes["a"].pid) > 0
        everything = GeneratorLoad(
            "binary", nodes.ports[0], connections=3, in_flight=8, keys=999, load=True, cluster=True
        )
        result = run(everything)
        assert (result.operations, result.errors) == (999, 0), "each key went to its master"
        with pytest.raises(AnswerError, match="with 2 of them it takes as many connections, not 1"):
            run(replace(everything, connections=1))
        load, count = Load(nodes.ports, rate=500), nodes.masters()["b"]
        try:
            load.until_begun()
            load.begin_mark(nodes.nodes["b"].port)
            nodes.nodes["b"].kill()
            gaps = load.end_mark()
            assert len(gaps) == count, "each partition of the dead node was written again"
            assert min(gaps) > 0
        finally:
            load.kill()


def test_the_command_freezes_cuts_joins_and_keeps_nodes_busy(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", "--quick", "--only", "freeze,cut,join,busy",
         "--rounds", "1", "--isr", "2", "--folder", str(tmp_path), "--json", str(figures)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row["samples"]["dcpd"] for row in json.loads(figures.read_text())["rows"]}
    cuts = [what for what in rows if what.startswith("cut to the first write, 2 in sync")]
    assert len(cuts) == 3
    freezes = [what for what in rows if what.startswith("freeze to the first write, 2 in sync")]
    assert len(freezes) == 3
    assert min(rows[what][0] for what in freezes) > 0
    assert min(rows[what][0] for what in cuts) > 0
    assert rows["one more node joins, 4 MiB"][0] > 0
    assert "join: 682 copies, 3 MiB" in done.stderr or "join: 683 copies" in done.stderr
    assert rows["one more node joins, 4 MiB, writes' p99 meanwhile"][0] > 0
    assert {"elections in 2 s of full load", "new versions in 2 s of full load"} <= rows.keys()


def test_command_restarts_all_nodes_and_kills_coordinator(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", "--quick", "--only",
         "restart,kill-coordinator", "--rounds", "1", "--isr", "2", "--folder", str(tmp_path),
         "--json", str(figures)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row["samples"]["dcpd"] for row in json.loads(figures.read_text())["rows"]}
    restart = "rolling restart of all nodes at 500/s"
    assert rows[f"{restart}, longest wait of any write"][0] > 0
    assert rows[f"{restart}, new versions"] == [0]
    kills = [what for what in rows if what.startswith("kill-coordinator to the first write, 2 in")]
    assert len(kills) == 3
    assert min(rows[what][0] for what in kills) > 0


def test_the_command_measures_what_copies_cost(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", "--quick", "--only", "lag,away,backup,memory",
         "--folder", str(tmp_path), "--json", str(figures)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row["samples"] for row in json.loads(figures.read_text())["rows"]}
    for what in ("answer", "event at a consumer of masters", "visible at a copy"):
        assert rows[f"500 SETs/s: {what}, p50"]["dcpd"][0] > 0
        assert rows[f"500 SETs/s: {what}, of them"]["dcpd"][0] > 0
    away = "a replica was away for 1,000 changes, 500/s go on"
    assert rows[f"{away}, catching up"]["dcpd"][0] > 0
    assert rows[f"{away}, level after"]["dcpd"] > rows[f"{away}, of that its start"]["dcpd"]
    assert rows["backup of 3,000 documents"].keys() == {"dcpd", "one node"}
    for name in "abc":
        node = f"node {name} with 3,000 documents at 500 SETs/s"
        assert rows[f"{node}, Anonymous"]["dcpd"][0] > 10
        assert rows[f"{node}, processor time"]["dcpd"][0] > 0


def test_the_command_says_what_it_knows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", "--only", "nothing"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'nothing' is not one of set, peers, idle" in done.stderr
