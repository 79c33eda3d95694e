"""Batches that end at consistent cuts, and tables as of a cut.

Most of it needs no Spark: a driver's reader and its tasks are called as Spark calls them, and their
rows go into the sinks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from test_spark_sinks import table

from clients.address import parse_address
from clients.cli.dcpctl import run as dcpctl
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from clients.operation import vbucket_of
from clients.spark import apply_changes, read_table, table_cuts
from clients.spark.cut import draw_cut
from clients.spark.offset import CUT, entry_at
from clients.spark.options import OptionError, parse_options
from clients.spark.plan import PartitionFacts, are_at
from clients.spark.sink import delta, parquet
from clients.spark.sink.parquet import Outcome, TableFiles, commit, open_table, write_buckets
from clients.spark.sink.rules import TableWriter, at_cut, without_cuts
from clients.spark.source import DcpStreamReader, read_task
from clients.testing import DcpCluster, DcpServer
from dcp.session import controls
from support.cluster_here import node_here
from support.waiting import until

WRITER = TableWriter()
_TYPES = {"INT": IntegerType, "BIGINT": LongType, "BINARY": BinaryType, "STRING": StringType,
          "TIMESTAMP": TimestampType}  # fmt: skip
SCHEMA = StructType(
    [
        StructField(name, _TYPES[kind]())
        for name, kind in (
            column.split() for column in parse_options({"servers": "x"}).schema.split(", ")
        )
    ]
)


# -- sinks -----------------------------------------------------------------------------------------


class ParquetSink:
    """The Parquet sink, as driver and executors use it; it keeps three cuts."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, TableFiles(path)

    def apply(self, rows: pa.Table) -> int:
        manifest = open_table(self.files, 4, WRITER)
        outcomes = {}
        for told in write_buckets(without_cuts(rows), self.files, manifest):
            (row,) = told.to_pylist()
            outcomes[row["bucket"]] = parquet.msgspec.json.decode(row["outcome"], type=Outcome)
        time = at_cut(rows).time
        commit(self.files, manifest, outcomes, time, 3)
        return time

    def cuts(self) -> list[int]:
        return parquet.cuts_of_table(self.path)

    def rows(self, name: str, as_of: int | None = None) -> list[dict]:
        files = parquet.files_of(self.path, name, as_of)
        return [row for file in files for row in parquet.pq.read_table(file).to_pylist()]


class DeltaSink:
    """The Delta sink."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def apply(self, rows: pa.Table) -> int:
        return delta.apply_batch(rows, self.path, 4, {}, WRITER).time

    def cuts(self) -> list[int]:
        return list(delta.versions_of_cuts(self.path, {}))

    def rows(self, name: str, as_of: int | None = None) -> list[dict]:
        return delta.rows_of(self.path, name, {}, as_of).to_pylist()


SINKS = pytest.mark.parametrize("make", [ParquetSink, DeltaSink], ids=["parquet", "delta"])


def at(time: int | None):
    return (None, None, None, "cut", None, None, time)


def put(vb: int, seqno: int, key: bytes):
    return (vb, seqno, 7, "set", key, b"%d" % seqno, seqno)


def values(sink, as_of: int | None = None) -> dict[bytes, bytes]:
    return {row["key"]: row["value"] for row in sink.rows("current", as_of)}


@SINKS
def test_a_table_is_read_as_of_each_cut_that_it_has_kept(make, tmp_path):
    sink = make(tmp_path / "table")
    assert sink.apply(table([put(1, 1, b"a"), put(900, 1, b"b"), at(10), at(10)])) == 10
    assert sink.apply(table([put(1, 2, b"a"), at(20)])) == 20
    # A batch that came short of its cut in one task is at none.
    assert sink.apply(table([put(1, 3, b"a"), at(None), at(30)])) == 0
    assert sink.cuts() == [10, 20]
    assert values(sink) == {b"a": b"3", b"b": b"1"}
    # It is repaired: history went back to seqno 1.
    back = (1, 1, 7, "rollback", None, None, None)
    sink.apply(table([back, put(1, 2, b"c"), at(40)]))
    assert sink.apply(table([at(50)])) == 50, "nothing has changed, and that is at a cut"
    a, b = (b"a", b"1"), (b"b", b"1")
    states = {
        10: dict([a, b]), 20: {b"a": b"2", b"b": b"1"}, 40: dict([a, b, (b"c", b"2")]),
        50: dict([a, b, (b"c", b"2")]),
    }  # fmt: skip
    for time in sink.cuts():
        assert values(sink, time) == states[time]
    seqnos = {time: sorted(row["seqno"] for row in sink.rows("changes", time)) for time in (20, 50)}
    assert seqnos == {20: [1, 1, 2], 50: [1, 1, 2]}
    for time, complaint in ((5, "has not kept the cut 5: its oldest is"),
                            (60, "not at 60 yet: its newest cut is 50"),
                            (45, "45 is no cut of the table.*are 40 and 50")):  # fmt: skip
        with pytest.raises(DcpdError, match=complaint):
            sink.rows("current", time)


@SINKS
def test_a_table_without_cuts_says_so(make, tmp_path):
    sink = make(tmp_path / "table")
    sink.apply(table([put(1, 1, b"a")]))
    assert sink.cuts() == []
    with pytest.raises(DcpdError, match="has kept no cut: its query needs the option consistent"):
        sink.rows("current", 10)


def test_parquet_drops_files_of_cuts_that_it_does_not_keep(tmp_path):
    sink = ParquetSink(tmp_path / "table")
    for number in range(1, 8):
        sink.apply(table([put(1, number, b"a"), at(number * 10)]))
    assert sink.cuts() == [50, 60, 70]
    assert values(sink, 50) == {b"a": b"5"}
    manifest = parquet.load_manifest(sink.files)
    on_disk = {f"{file.parent.name}/{file.name}" for file in sink.path.glob("*/*.parquet")}
    assert on_disk == manifest.named() | set(manifest.replaced)
    assert len(list((sink.path / "current").iterdir())) == 4, "three cuts, and one for readers"


def test_delta_says_that_the_files_of_a_cut_were_vacuumed(tmp_path):
    sink = DeltaSink(tmp_path / "table")
    for number in (1, 2):
        sink.apply(table([put(1, number, b"a"), at(number * 10)]))
    current = delta.DeltaTable(f"{sink.path}/current")
    current.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(DcpdError, match=r"the files of version \d+ of .* are gone"):
        sink.rows("current", 10)
    assert values(sink, 20) == {b"a": b"2"}


def test_apply_changes_that_needs_cuts_refuses_a_batch_without(tmp_path):
    rows = table([put(1, 1, b"a")])
    with pytest.raises(DcpdError, match="needs a source with the option consistent"):
        delta.apply_batch(rows, str(tmp_path / "t"), 4, {}, TableWriter(needs_cuts=True))
    assert not (tmp_path / "t").exists()


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqno", "versions", "end", "is_at"),
    [
        (5, ((1, 0),), 5, True),
        (5, ((1, 0),), 6, False),  # compaction passed the cut
        (5, ((2, 5), (1, 0)), 5, True),  # branched, but not below it
        (5, ((2, 4), (1, 0)), 5, False),
    ],
)
def test_a_plan_is_at_a_cut_or_another_is_drawn(seqno, versions, end, is_at):
    facts = PartitionFacts(1, 9, 0, 0, versions)
    ends = {1: entry_at(end, versions), 2: entry_at(0, ())}
    cut = {1: entry_at(seqno, ((1, 0),)).position}
    assert are_at(cut, ends, [facts, PartitionFacts(2, 0, 0, 0, ((3, 0),))]) == is_at


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"maxRowsPerTrigger": "5"}, "consistent and maxRowsPerTrigger: a batch has all"),
        ({"maxBytesPerTrigger": "5"}, "consistent and maxBytesPerTrigger"),
        ({"fromReplicas": "true"}, "consistent and fromReplicas: only masters tell cuts"),
        ({"startingOffsets": "latest"}, "consistent and startingOffsets"),
    ],
)
def test_options_that_do_not_go_with_cuts(more, complaint):
    with pytest.raises(OptionError, match=complaint):
        parse_options({"servers": "x", "consistent": "true", **more})


# -- a server --------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    with DcpServer(tmp_path / "data", "--partitions", "64") as made:
        yield made


class Query:
    """A driver and its tasks, called as Spark calls them, and a table."""

    def __init__(self, address: str, sink, **options) -> None:
        given = {"servers": address, "consistent": "true", **options}
        self.reader = DcpStreamReader(parse_options(given), SCHEMA, look_again_s=0.0)
        self.sink = sink
        self.offset: dict[str, str] = {}
        self.rollbacks = 0

    def batch(self, between=lambda: None) -> int:
        """Plan a batch, and read and apply it; return the time of the cut that it is at."""
        start = self.offset
        self.offset = end = self.reader.latestOffset(start, ReadAllAvailable())
        between()
        schema = to_arrow_schema(SCHEMA, timezone="UTC")
        rows = pa.Table.from_batches(
            [
                batch
                for task in self.reader.partitions(start, end)
                for batch in read_task(task, SCHEMA, is_batch=False)
            ],
            schema,
        )
        self.rollbacks += rows["op"].to_pylist().count("rollback")
        time = self.sink.apply(rows)
        assert time in {0, int(end[CUT])}
        return time


PAIRS = [(b"first%d" % n, b"second%d" % n) for n in range(10)]
ACCOUNTS = [b"account%d" % n for n in range(10)]
BALANCE = 100


def write_pairs(address: str, stop: threading.Event) -> None:
    """Write the second of a pair after the first was answered."""
    with SyncKv(address) as kv:
        for number, (first, second) in enumerate(itertools.cycle(PAIRS), 1):
            if stop.is_set():
                return
            kv.set(first, b"%d" % number)
            kv.set(second, b"%d" % number)


def move_money(address: str, stop: threading.Event) -> None:
    with SyncKv(address) as kv:
        for first, second in itertools.cycle(itertools.permutations(ACCOUNTS, 2)):
            if stop.is_set():
                return
            held = [int(kv.get(key).value) for key in (first, second)]
            with kv.batch() as batch:
                batch.set(first, b"%d" % (held[0] - 1))
                batch.set(second, b"%d" % (held[1] + 1))


def check_state(held: dict[bytes, bytes]) -> None:
    """The sum of all accounts, and the order of each pair."""
    assert sum(int(held[key]) for key in ACCOUNTS) == BALANCE * len(ACCOUNTS)
    for first, second in PAIRS:
        assert int(held.get(first, 0)) >= int(held.get(second, 0)), f"{second!r} without {first!r}"


@SINKS
def test_each_cut_of_a_table_is_one_state_through_branches(server, make, tmp_path):
    """Two threads write meanwhile. One partition branches: between two batches, and between the
    plan of a batch and its reading, which then ends at no cut.
    """
    taken = {vbucket_of(key, 64) for key in (*ACCOUNTS, *(key for pair in PAIRS for key in pair))}
    aside = next(key for key in map(b"%d".__mod__, range(999)) if vbucket_of(key, 64) not in taken)
    vb_id = vbucket_of(aside, 64)

    def change() -> None:
        with SyncKv(server.address) as kv:
            for number in range(2, 5):
                kv.set(aside, b"%d" % number)

    def branch() -> None:
        server.branch(vb_id, at=1)

    with SyncKv(server.address) as kv:
        kv.set(aside, b"1")
        for key in ACCOUNTS:
            kv.set(key, b"%d" % BALANCE)
    query = Query(server.address, make(tmp_path / "table"))
    stop = threading.Event()
    writers = [
        threading.Thread(target=work, args=(server.address, stop))
        for work in (write_pairs, move_money)
    ]
    for writer in writers:
        writer.start()
    times, asides = [], []
    try:
        for before, between in (
            (None, None), (change, None), (branch, None), (change, branch), (None, None),
            (change, change), (None, None),
        ):  # fmt: skip
            if before is not None:
                before()
            time = query.batch(between or (lambda: None))
            times.append(time)
            held = values(query.sink, time or None)
            if time:
                check_state(held)
            asides.append(held[aside])
            for kept in query.sink.cuts():
                check_state(values(query.sink, kept))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
        query.reader.stop()
    assert [bool(time) for time in times] == [True, True, True, False, True, True, True]
    assert asides == [b"1", b"4", b"1", b"1", b"1", b"4", b"4"]
    assert [time for time in times if time] == sorted(set(times) - {0})
    assert query.rollbacks >= 2


def write_pairs_in_a_cluster(address: str, stop: threading.Event) -> None:
    """The same while masters change: what was not answered is written again."""
    with SyncKv(address, timeout_s=2.0) as kv:
        for number, pair in enumerate(itertools.cycle(PAIRS), 1):
            if stop.is_set():
                return
            for key in pair:
                while not stop.is_set():
                    with suppress(DcpdError):
                        kv.set(key, b"%d" % number)
                        break


@pytest.mark.timeout(180)
def test_each_cut_of_a_table_is_one_state_through_elections(tmp_path):
    """A node is killed, another one is asked for less than it has answered; a handover; a start."""
    taken = {vbucket_of(key, 64) for pair in PAIRS for key in pair}
    aside = next(key for key in map(b"%d".__mod__, range(999)) if vbucket_of(key, 64) not in taken)
    vb_id, stop = vbucket_of(aside, 64), threading.Event()
    with DcpCluster("--partitions", "64") as cluster:
        servers = ",".join(parse_address(cluster.nodes[name].address).node for name in ("n1", "n3"))
        query = Query(servers, ParquetSink(tmp_path / "table"))
        writer = threading.Thread(target=write_pairs_in_a_cluster, args=(cluster.address, stop))
        writer.start()
        try:
            asides = []
            for before in (
                None,
                partial(cluster.kill, "n2"),
                partial(cluster.lose, vb_id, 2),
                partial(cluster.restart, "n2"),
                partial(cluster.move, vb_id, "n2"),
            ):
                with SyncKv(cluster.address) as kv:
                    for number in range(4):
                        kv.set(aside, b"%d" % number)
                query.batch()
                if before is not None:
                    before()
                time = query.batch() or query.batch()
                for kept in {time, *query.sink.cuts()}:
                    held = values(query.sink, kept)
                    for first, second in PAIRS:
                        assert int(held.get(first, 0)) >= int(held.get(second, 0)), (before, first)
                asides.append(values(query.sink)[aside])
        finally:
            stop.set()
            writer.join()
            query.reader.stop()
    assert asides == [b"3", b"3", b"1", b"3", b"3"]
    assert query.rollbacks >= 1


async def test_a_server_that_closes_no_times_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.delitem(controls.CONTROLS, "x_closed_times")
    async with node_here(tmp_path, {}) as node:
        settings = parse_options({"servers": f"127.0.0.1:{node.ports.kv}", "consistent": "true"})
        with pytest.raises(DcpdError, match="x_closed_times") as caught:
            await asyncio.to_thread(draw_cut, settings, 5.0)
        assert "Leave out the option consistent" in caught.value.hint


def test_a_cut_that_nobody_tells_in_time_is_an_error(server):
    settings = parse_options({"servers": server.address, "consistent": "true"})
    with pytest.raises(DcpdError, match="told no consistent cut within 0 s"):
        draw_cut(settings, 0.0)
    server.stop()
    with pytest.raises(DcpdError, match=r"127\.0\.0\.1"):
        draw_cut(settings, 0.1)


@pytest.mark.timeout(300)
def test_a_query_in_spark_keeps_its_cuts(spark, server, tmp_path):
    path, checkpoint = str(tmp_path / "table"), tmp_path / "checkpoint"
    source = spark.readStream.format("dcp").options(servers=server.address, consistent="true")

    def held(as_of: int) -> set[bytes]:
        return {bytes(row["value"]) for row in read_table(spark, path, as_of=as_of).collect()}

    def store(value: bytes) -> None:
        with SyncKv(server.address) as kv, kv.batch() as batch:
            for number in range(9):
                batch.set(b"k%d" % number, value)

    store(b"1")
    query = (
        source.load().writeStream.foreachBatch(
            partial(apply_changes, path=path, consistent=True, keep_cuts=4)
        )
        .option("checkpointLocation", str(checkpoint)).start()
    )  # fmt: skip
    manifest = tmp_path / "table" / "manifest.json"
    until(lambda: manifest.exists() or query.exception())
    store(b"2")
    until(lambda: len(table_cuts(path)) == 2 or query.exception())
    query.stop()
    first, second = table_cuts(path)
    assert (held(first), held(second)) == ({b"1"}, {b"2"})
    offsets = sorted((checkpoint / "offsets").glob("[0-9]*"))
    ends = [json.loads(file.read_text().splitlines()[-1]) for file in offsets]
    assert [int(end[CUT]) for end in ends][:2] == [first, second]
    with pytest.raises(DcpdError, match="its newest cut is"):
        held(second + 1)
    rows = spark.read.format("dcp").options(servers=server.address, consistent="true").load()
    (cut,) = rows.where("op = 'cut'").collect()
    assert cut["cas"] > second
    with pytest.raises(ValueError, match="keep_cuts takes 1 to"):
        apply_changes(rows, 0, path=path, keep_cuts=0)
    with pytest.raises(DcpdError, match="names no cut"):
        apply_changes(rows.where("op = 'set'"), 0, path=path, query=query.id, consistent=True)


@SINKS
def test_dcpctl_diff_compares_a_table(server, make, tmp_path, capsys):
    query = Query(server.address, make(tmp_path / "table"))
    at, path = parse_address(server.address).node, str(tmp_path / "table")
    with SyncKv(server.address) as kv:
        for number in range(49):
            kv.set(b"k%d" % number, b"1")
        first = query.batch()
        kv.set(b"k49", b"1")
        second = query.batch()
        query.reader.stop()
        cuts = [f"table:{path}@{time}" for time in (first, second, second + 1)]
        assert [dcpctl(["diff", one, at]) for one in cuts] == [1, 0, 2]
        shown = capsys.readouterr()
        assert "missing on A  k49 " in shown.out
        assert "its newest cut is" in shown.err
        assert dcpctl(["diff", at, path]) == 0
        kv.set(b"k1", b"2")
        kv.delete(b"k2")
        kv.set(b"new", b"1")
    capsys.readouterr()
    assert dcpctl(["diff", at, path, "-o", "json"]) == 1
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert {line["key"]: line["kind"] for line in lines} == {
        "k1": "older on B", "k2": "missing on A", "new": "missing on B",
    }  # fmt: skip
    assert summary["differences"] == 3
    assert dcpctl(["diff", at, path, "--collection", "shop.orders"]) == 2
    assert "has no collection shop.orders" in capsys.readouterr().err
    assert dcpctl(["diff", at, f"table:{tmp_path}/none"]) == 2
    assert "there is no table at" in capsys.readouterr().err
