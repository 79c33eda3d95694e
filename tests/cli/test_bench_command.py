"""dcpctl bench: it measures what it says, and leaves no document behind."""

from __future__ import annotations

import json
import selectors

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.address import parse_address
from clients.cli.node import generator
from clients.cli.node.answers import AnswerError, BinaryCounter
from clients.cli.node.bench_command import ROWS, figures_of, histogram_text
from clients.cli.node.generator import Load, Measured, _shares, run
from clients.cli.node.histogram import Histogram
from clients.errors import TopologyError
from clients.link.topology import ClusterNode, Topology
from clients.operation import DurabilityLevel, vbucket_of

LOAD = Load("set", 5, 4, None, 200, 16, "bench-test:", DurabilityLevel.NONE, 10.0)
NODES = (ClusterNode("a", 1), ClusterNode("b", 2))


def test_it_measures_and_deletes_what_it_wrote(ctl):
    ctl("set", "bench-of-ctl", "stays")
    bench = (
        "bench",
        "--keys",
        "50",
        "--seconds",
        "100ms",
        "--in-flight",
        "4",
        "--connections",
        "3",
    )
    code, out, err = ctl(*bench, "-o", "json")
    assert code == 0, err
    set_, get = map(json.loads, out.splitlines())
    for row, verb in ((set_, "set"), (get, "get")):
        assert (row["verb"], row["errors"], row["in_flight"]) == (verb, 0, 4)
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        batches = sum(number for _, _, number in row["histogram_us"])
        assert batches * 4 == pytest.approx(row["ops_per_s"] * row["seconds"], rel=0.1)
    assert ctl("keys", "dcpctl-bench:")[1] == b""
    assert ctl("get", "bench-of-ctl")[1] == b"stays"
    code, out, _ = ctl(*bench[:-1], "1", "get", "--keep", "-o", "table")
    assert code == 0
    assert "get: latency of a batch of 4, ms" in out.decode()
    assert len(ctl("keys", "dcpctl-bench:")[1].splitlines()) == 50


def test_each_key_is_sent_once(server):
    assert run_on(server, LOAD)[:1] == (200,)
    assert run_on(server, LOAD._replace(verb="get")).errors == 0
    assert run_on(server, LOAD._replace(verb="del")).errors == 0
    missed = run_on(server, LOAD._replace(verb="get"))
    assert (missed.operations, missed.errors, missed.first_error) == (200, 200, "status 0x01")


def run_on(server, load) -> Measured:
    return run(parse_address(server.address), load)


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_each_connection_has_keys_of_its_node_only(connections):
    topology = Topology((1, 1), NODES, tuple(vb % 2 for vb in range(1024)))
    shares = _shares(topology, LOAD._replace(connections=connections))
    assert len(shares) == max(2, connections), "each node gets one"
    for place, keys in shares:
        assert {NODES[vbucket_of(key) % 2].place for key in keys} == {place}
    keys = [key for _, found in shares for key in found]
    assert len(keys) == len(set(keys)) == LOAD.keys


def test_a_cluster_without_a_master_is_an_error():
    with pytest.raises(TopologyError):
        _shares(Topology((1, 1), NODES, (-1,) * 1024), LOAD)


def test_what_is_no_answer_is_an_error(ctl, monkeypatch):
    def feed(_self, _chunk):
        raise AnswerError("an answer starts with byte 0x00")

    monkeypatch.setattr(BinaryCounter, "feed", feed)
    code, _, err = ctl("bench", "--keys", "1", "--seconds", "100ms", "--keep")
    assert code == 6
    assert "the server sent what is no answer" in err


@given(st.lists(st.integers(0, 10_000_000), max_size=50), st.integers(1, 20))
def test_the_rows_of_a_histogram_hold_every_value(values, count):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rows = histogram.rows(count)
    assert sum(number for _, _, number in rows) == len(values)
    assert len(rows) <= count
    assert all(begin < end for begin, end, _ in rows)
    measured = Measured(len(values), 1.0, histogram, 0, "", 0.1)
    lines = histogram_text("set", 1, measured).splitlines()
    assert len(lines) == 2 + len(histogram.rows(ROWS))
    assert figures_of("set", measured, 1 << 20)["mib_per_s"] == len(values)


def test_a_rate_is_kept(ctl):
    code, out, err = ctl(
        "bench", "get", "--rate", "200", "--seconds", "500ms", "--keys", "50", "--connections",
        "4", "-o", "json",
    )  # fmt: skip
    assert code == 0, err
    row = json.loads(out)
    assert row["rate"] == 200
    due = row["ops_per_s"] * row["seconds"] + row["not_sent"]  # some are not on a busy machine
    assert due == pytest.approx(100, abs=2)


class Paused:
    """A connection to a server that answers at once, except while it stands still."""

    def __init__(self, clock, still):
        self.socket, self.due_ns, self.operations, self.unsent = self, 0, 1, b""
        self.clock, self.still = clock, still

    def begin(self, due_ns):
        self.due_ns = due_ns
        return True

    def receive(self):
        begin_ns, end_ns = self.still
        if begin_ns <= self.clock.now_ns < end_ns:
            self.clock.now_ns = end_ns
        return True


class Clock:
    """Time that passes only while the generator waits."""

    def __init__(self):
        self.now_ns = 0

    def perf_counter_ns(self):
        return self.now_ns


class Ready:
    """A selector: what is registered is ready; if nothing is, time passes."""

    def __init__(self, clock):
        self.clock, self.keys = clock, {}

    def register(self, connection, _events, data):
        self.keys[connection] = selectors.SelectorKey(connection, 0, 0, data)

    def unregister(self, connection):
        del self.keys[connection]

    def get_map(self):
        return self.keys

    def select(self, wait_s):
        if not self.keys:
            self.clock.now_ns += round(wait_s * 1e9)
        return [(key, 0) for key in list(self.keys.values())]


def test_a_pause_of_the_server_delays_all_that_was_due(monkeypatch):
    """A batch each ms for a second, and a pause of 100 ms: 100 batches are late, not one."""
    clock = Clock()
    monkeypatch.setattr(generator, "time", clock)
    load = LOAD._replace(seconds=1.0, in_flight=1, rate=1000.0)
    driver = generator._Driver([Paused(clock, (200_000_000, 300_000_000))], load)
    driver.selector = Ready(clock)
    driver.drive()
    assert (driver.operations, driver.not_sent) == (1000, 0)
    late = sum(count for begin, _, count in driver.latencies.rows(1000) if begin >= 1000)
    assert 98 <= late <= 100
    assert driver.latencies.percentile(100) >= 98_000
