"""The benchmark runner: rows and ratios, processes and memory, and a short run of our server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import workload
from benchmarks.peers import (
    KEY_VALUE_PORT,
    PEERS,
    PeerError,
    descendants,
    disk_written_bytes,
    memory_bytes,
)
from benchmarks.report import Report, number_text
from benchmarks.run import generate, tool


def test_a_row_holds_medians_and_their_ratio():
    report = Report({"keys": "10"})
    for ours, theirs in [(30, 10), (10, 20), (20, 40)]:
        report.add("dcpd", "SET", ours, unit="op/s", more_is_better=True)
        report.add("redis", "SET", theirs, unit="op/s", more_is_better=True)
    report.add("dcpd", "alone", 1, unit="s", more_is_better=False)
    both, alone = report.to_document()["rows"]
    assert both["ratios"] == {"redis": 1.0}
    assert both["samples"] == {"dcpd": [30, 10, 20], "redis": [10, 20, 40]}
    assert alone["ratios"] == {"redis": None}
    lines = report.to_markdown().splitlines()
    assert lines[0] == "| figure | unit | better | dcpd | redis | dcpd / redis |"
    assert lines[2] == "| SET | op/s | more | **20** (10 to 30) | **20** (10 to 40) | 1.00 |"
    assert lines[3] == "| alone | s | less | 1 |  |  |"
    assert "| keys | 10 |" in lines


@pytest.mark.parametrize(
    ("value", "text"), [(188_123.4, "188,123"), (100, "100"), (1.234, "1.23"), (0.01234, "0.0123")]
)
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def test_memory_counts_what_a_process_started():
    command = [sys.executable, "-c", "x = bytes(range(256)) * 100_000; input()"]
    before = memory_bytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command})"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # fmt: skip
        # The grandchild is there once it holds its 25.6 MB; asked for until then.
        while memory_bytes(child.pid)["Anonymous"] < 25_000_000:
            assert child.poll() is None
        assert len(descendants(child.pid)) == 2
        assert memory_bytes(os.getpid())["Rss"] > before["Rss"] + 25_000_000
        child.communicate(b"\n")


def test_what_a_disk_was_sent_is_counted(tmp_path):
    before = disk_written_bytes(tmp_path)
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = disk_written_bytes(tmp_path)
    assert (before is None) == (after is None)
    assert (after or 1 << 20) >= (before or 0) + (1 << 20)


def test_the_port_is_found_in_what_the_server_prints():
    text = "dcpd is ready\n  data       /x/127\n  key-value  127.0.0.1:36267\n  admin  127.0.0.1:4"
    found = KEY_VALUE_PORT.search(text)
    assert found is not None
    assert found[1] == "36267"


def test_a_server_that_does_not_start_says_what_it_printed(tmp_path, monkeypatch):
    made = PEERS["dcpd"](tmp_path / "data")
    monkeypatch.setattr(made, "command", lambda: [sys.executable, "-c", "exit('no disk')"])
    with pytest.raises(PeerError, match=r"exit code 1: no disk"):
        made.start()


@pytest.mark.crash
@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_keeps_its_data_over_a_kill(name, tmp_path):
    program = {
        "redis": "redis-server",
        "redis-bounded": "redis-server",
        "nats": "nats-server",
        "etcd": "etcd",
    }.get(name)
    if program and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")  # scripts/test names it at its end
    peer = PEERS[name](tmp_path / "data")
    peer.start()
    try:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.generator", "--protocol", peer.protocol, "--port",
             str(peer.port), "--keys", "300", "--in-flight", "50", "--load"],
            check=True, timeout=30, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        peer.kill()
        peer.start()
        pool = workload.values(1, 128)
        kept = [peer.get(workload.key_of(index)) for index in (0, 1, 299)]
        assert kept == [pool[0], pool[1], pool[299 % len(pool)]]
        assert peer.get(b"no such key") is None
    finally:
        peer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.crash
def test_a_short_run_fills_the_table(tmp_path):
    written = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--peers", "dcpd", "--only", "catchup,restart",
         "--keys", "2000", "--runs", "2", "--folder", str(tmp_path), "--json", str(written)],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(written.read_text())["rows"]}
    assert set(rows) == {"2,000 new keys", "consumer's catch-up", "ready after SIGKILL"}
    assert all(len(row["samples"]["dcpd"]) == 2 for row in rows.values())
    assert "| consumer's catch-up | changes/s | more | **" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.crash
def test_reading_and_streams_fill_the_table_too(tmp_path):
    """Each part with few operations: what it counts has to be there, to the last change."""
    written = tmp_path / "figures.json"
    peers = "dcpd,redis" if shutil.which("redis-server") else "dcpd"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--peers", peers, "--only", "get,serve,tail",
         "--keys", "5000", "--runs", "1", "--seconds", "0.2", "--folder", str(tmp_path), "--json",
         str(written)],  # more keys than SETs: of two versions in a group, a stream has one
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row["samples"] for row in json.loads(written.read_text())["rows"]}
    for what in ("GET 8 x 64", "served", "served, bytes", "served, 1 KiB values"):
        assert set(rows[what]) == set(peers.split(","))
    for what in ("served without collections", "at 10,000 SETs/s: event, p99"):
        assert set(rows[what]) == {"dcpd"}


@pytest.mark.crash
def test_client_without_collections_gets_a_byte_less_each_change(tmp_path):
    peer = PEERS["dcpd"](tmp_path / "data")
    peer.start()
    try:
        generate("binary", peer.port, (1, 10), "--load", "--keys", 50)
        drained = [
            tool("following", name, "--port", peer.port, "--changes", 50)["bytes"]
            for name in ("drain-dcpd", "drain-bare")
        ]
    finally:
        peer.discard()
    assert drained[0] - drained[1] == 50


@pytest.mark.crash
def test_idle_streams_are_opened_and_followed(tmp_path):
    peer = PEERS["dcpd"](tmp_path / "data")
    peer.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.following", "idle", "--port", str(peer.port),
             "--pid", str(peer.pid), "--connections", "3", "--seconds", "0.2", "--writes", "5"],
            capture_output=True, text=True, check=False, timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    finally:
        peer.discard()
    assert found["streams"] == 3 * 1024
    assert found["anonymous_bytes"] > 0


@pytest.mark.crash
def test_the_cost_of_the_core_is_measured():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu", "--keys", "2000", "--operations", "128"],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {"set_new", "get_merged", "backfill_merged", "live", "merge"} < set(figures)
    assert all(figure > 0 for figure in figures.values())


def test_an_unknown_part_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--only", "sets"],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'sets' is not one of generator, set, memory, get, catchup, serve, tail" in done.stderr
