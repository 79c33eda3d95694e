"""Partitions that would begin at 0 are compared with the table, to the same end.

The plan and the sinks need no Spark: a model of a server branches, purges and is replaced, before,
between and after. Then real tables follow a real server.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable
from spark_truth import documents_of, rows_of, server_history, table_differences
from test_spark_cuts import SCHEMA as SOURCE_SCHEMA
from test_spark_cuts import ParquetSink as CutSink
from test_spark_sinks import DeltaTables, ParquetTable, table

from clients import KvClient
from clients.cli.dcpctl import run as dcpctl
from clients.errors import DcpdError
from clients.spark import apply_changes, read_table
from clients.spark.offset import NOTHING, Entry, entry_at, offset_of
from clients.spark.options import OptionError, parse_options
from clients.spark.plan import PartitionFacts, PlanStep, next_entries, start_of, steps_between
from clients.spark.source import DcpStreamReader, read_task
from clients.streaming.cursor import agreed_seqno
from clients.testing import DcpServer

VB = 7
V1, V2 = 0xA1, 0xB2
Row = tuple[int, int, int, str, bytes | None, bytes | None, int | None]


# -- the plan ------------------------------------------------------------------------------------


def facts(high: int, versions=((V1, 0),), *, purge: int = 0) -> PartitionFacts:
    return PartitionFacts(VB, high, purge, 0, versions)


def planned(entries: dict[int, Entry], fact: PartitionFacts, **more: Any) -> dict[int, Entry]:
    return next_entries(entries, [fact], **{"history": True, "compares": True, **more})[0]


def test_what_would_begin_at_0_is_compared():
    entries = {VB: entry_at(10, ((V1, 0),))}
    ends = planned(entries, facts(90, purge=50))
    (step,) = steps_between(offset_of(entries), offset_of(ends))
    assert step == PlanStep(VB, 0, (), 90, ((V1, 0),), 0, compares=True)
    ends = planned(entries, facts(90, purge=50), compares=False)
    (step,) = steps_between(offset_of(entries), offset_of(ends))
    assert not step.compares
    assert planned({}, facts(90), is_lost=True)[VB].compared == 1
    assert planned({}, facts(90))[VB].compared == 0


def test_an_empty_partition_is_emptied_in_a_table_without_offset():
    ends, gone_back = next_entries({}, [facts(0)], history=True, compares=True, is_lost=True)
    (step,) = steps_between({}, offset_of(ends))
    assert (step.rollback_to, step.end_seqno, step.compares) == (0, 0, False)
    assert gone_back == [], "it is no rollback of the server"
    assert planned(ends, facts(0), is_lost=True) == ends


def test_after_a_comparison_a_new_version_is_compared_again():
    """Until two more batches ended, the second of them wholly after the comparison."""
    end = {VB: entry_at(90, ((V1, 0),), complete=((90, 90),), rollback_to=0, compared=1)}
    marks = []
    for high in (100, 101, 102):
        at = end[VB].seqno
        branched = start_of(end[VB], facts(at, ((V2, at), (V1, 0))), compares=True)
        assert branched.compares == bool(end[VB].compared)
        assert planned(end, facts(at)) == end, "nothing new"
        end = planned(end, facts(high))
        marks.append(end[VB].compared)
        if end[VB].compared:
            assert end[VB].position.complete == ((high, high),)
    assert marks == [2, 0, 0]
    assert end[VB].position.complete == ((100, 102),)


def test_a_limited_batch_after_a_comparison_proves_nothing():
    end = {VB: entry_at(90, ((V1, 0),), complete=((90, 90),), rollback_to=0, compared=1)}
    end = planned(end, facts(100), rows_max=5)
    assert (end[VB].seqno, end[VB].compared) == (95, 1)
    assert planned(end, facts(100))[VB].compared == 2


def test_without_the_option_a_branch_after_it_reads_from_0():
    end = {VB: entry_at(90, ((V1, 0),), complete=((90, 90),), compared=1)}
    start = start_of(end[VB], facts(95, ((V2, 92), (V1, 0))))
    assert (start.position.seqno, start.compares) == (0, False)
    assert start.rollback is not None


def test_comparisons_do_not_count_against_limits():
    held = {7: NOTHING, 8: entry_at(10, ((V1, 0),))}
    survey = [facts(90)._replace(vb_id=8, purge_seqno=50), facts(40)]
    ends, _ = next_entries(held, survey, history=True, compares=True, rows_max=10)
    assert (ends[8].seqno, ends[8].compared, ends[7].seqno) == (90, 1, 10)


# -- the plan and the sinks with a server that changes ---------------------------------------------


class Server:
    """A partition as a list of changes, with branches, purges, and another server in its place."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.uuid, self.cas, self.purged = 1, 0, 0
        self.items: list[tuple[bytes, bytes | None, int]] = []
        """Key, value (None: deleted) and CAS of each seqno, from 1."""
        self.versions: tuple[tuple[int, int], ...] = ((1, 0),)

    def documents(self) -> dict[bytes, tuple[int, bytes, int]]:
        """Key -> seqno, value, CAS."""
        found: dict[bytes, tuple[int, bytes, int]] = {}
        for seqno, (key, value, cas) in enumerate(self.items, 1):
            found.pop(key, None)
            if value is not None:
                found[key] = (seqno, value, cas)
        return found

    def write(self) -> None:
        for _ in range(self.random.randint(0, 5)):
            self.cas += 1
            key = b"%d" % self.random.randint(0, 7)
            is_deleted = self.random.random() < 0.4 and key in self.documents()
            self.items.append((key, None if is_deleted else b"v%d" % self.cas, self.cas))

    def branch(self) -> None:
        at = self.random.randint(self.purged, len(self.items))
        self.uuid += 1
        del self.items[at:]
        self.versions = ((self.uuid, at), *(v for v in self.versions if v[1] <= at))

    def purge(self) -> None:
        self.purged = self.random.randint(self.purged, len(self.items))

    def replace(self) -> None:
        """The same documents on another server: other seqnos, and some were deleted there."""
        left = [(key, value, cas) for key, (_, value, cas) in self.documents().items()]
        self.random.shuffle(left)
        self.items = [*left[: self.random.randint(0, len(left))]]
        self.uuid += 1
        self.versions, self.purged = ((self.uuid, 0),), 0

    def change(self, *, is_planned: bool = False) -> None:
        """Change something; between a plan and its batch only what a stream can answer."""
        kinds = [self.write, self.write, self.write, self.branch]
        if not is_planned:
            kinds += [self.purge, self.purge, self.replace]
        self.random.choice(kinds)()

    def facts(self) -> PartitionFacts:
        return PartitionFacts(VB, len(self.items), self.purged, 0, self.versions)

    def streamed(self, start: int, end: int) -> list[Row]:
        documents = {place[0] for place in self.documents().values()}
        return [
            (VB, seqno, 1, "delete" if value is None else "set", key, value, cas)
            for seqno, (key, value, cas) in enumerate(self.items, 1)
            if start < seqno <= end
            # A purged deletion is gone, and with it what it deleted.
            and (seqno > self.purged or seqno in documents)
        ]


def read(server: Server, step: PlanStep, sink: Any, path: str) -> list[Row]:
    """Return what a task delivers for a step."""
    high = len(server.items)
    if step.compares and high:
        rows = sink.rows("current") if sink.is_there else []
        held = {row["key"]: row["cas"] for row in rows}
        theirs = server.documents()
        head: Row = (VB, step.end_seqno, 1, "compared", path.encode(), None, None)
        gone = [(VB, step.end_seqno, 1, "gone", key, None, None) for key in held.keys() - theirs]
        changed = {seqno for key, (seqno, _, cas) in theirs.items() if held.get(key) != cas}
        return [head, *gone, *(row for row in server.streamed(0, high) if row[1] in changed)]
    back: list[Row] = []
    if step.rollback_to is not None:
        back = [(VB, step.rollback_to, 1, "rollback", None, None, None)]
    held_seqno = agreed_seqno(step.start_versions, step.start_seqno, server.versions)
    if held_seqno < step.start_seqno:
        return back
    upto = agreed_seqno(step.end_versions, step.end_seqno, server.versions)
    return [*back, *server.streamed(step.start_seqno, upto)]


class ParquetSink(ParquetTable):
    @property
    def is_there(self) -> bool:
        return (self.path / "manifest.json").exists()


class DeltaSink(DeltaTables):
    @property
    def is_there(self) -> bool:
        return (Path(self.path) / "current").exists()


def play(sink: Any, path: str, seed: int, rounds: int) -> None:
    server = Server(seed)
    choose = server.random
    entries: dict[int, Entry] = {}
    for number in range(rounds + 4):
        is_quiet = number >= rounds
        if not is_quiet:
            server.change()
        if choose.random() < 0.1 and not is_quiet:
            entries = {}  # the checkpoint is lost
        start = offset_of(entries)
        rows_max = choose.choice([None, 2, 5]) if not is_quiet else None
        entries, _ = next_entries(
            entries, [server.facts()], history=choose.random() < 0.5, rows_max=rows_max,
            compares=True, is_lost=not entries and sink.is_there,
        )  # fmt: skip
        steps = steps_between(start, offset_of(entries))
        for attempt in range(choose.randint(1, 3)):
            for _ in range(choose.randint(0, 2) * (not is_quiet)):
                server.change(is_planned=True)
            rows = [row for step in steps for row in read(server, step, sink, path)]
            choose.shuffle(rows)
            is_last = attempt == 2 or is_quiet
            sink.apply(table(rows), interrupted=0 if is_last else choose.choice([0, 1, 2, 3]))
        rows = [row for step in steps for row in read(server, step, sink, path)]
        sink.apply(table(rows))
    current = sink.rows("current") if sink.is_there else []
    assert {row["key"]: (row["value"], row["cas"]) for row in current} == {
        key: place[1:] for key, place in server.documents().items()
    }
    assert len(current) == len(server.documents())


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_a_parquet_table_that_compares_is_the_server(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play(ParquetSink(Path(folder), merge_files=3), folder, seed, 12)


@pytest.mark.parametrize("seed", range(5))
def test_a_delta_table_that_compares_is_the_server(seed: int, tmp_path: Path) -> None:
    play(DeltaSink(tmp_path / "t"), str(tmp_path / "t"), seed, 8)


def test_a_comparison_with_another_table_is_refused(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    with pytest.raises(DcpdError, match=f"compares with /other, and this table is {tmp_path}"):
        sink.apply(table([(VB, 5, 1, "compared", b"/other", None, None)]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"table": "relative/path"}, "name it from / on"),
        ({"table": "/t", "xattrs": "true"}, "come without XATTRs"),
        ({"table": "/t", "startingOffsets": "latest"}, "leave out startingOffsets"),
    ],
)
def test_options_that_cannot_go_with_a_table_are_refused(options: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        parse_options({"servers": "x", **options})
    with pytest.raises(OptionError, match="streams only"):
        parse_options({"servers": "x", "table": "/t"}, is_batch=True)


# -- tasks against a server, without Spark ---------------------------------------------------------


def batch_of(server: DcpServer, path: Path, start: dict[str, str], later: Any = None) -> Any:
    """Return the rows and the end of the next batch; `later` happens between plan and read."""
    settings = parse_options(
        {"servers": server.address, "table": str(path), "consistent": "true", "partitions": "0-63"}
    )
    reader = DcpStreamReader(settings, SOURCE_SCHEMA)
    try:
        end = reader.latestOffset(start, ReadAllAvailable())
        tasks = reader.partitions(start, end)
        if later is not None:
            later()
        parts = [part for task in tasks for part in read_task(task, SOURCE_SCHEMA, is_batch=False)]
    finally:
        reader.stop()
    return pa.Table.from_batches(parts), end


def test_a_comparison_is_at_a_cut_unless_it_went_beyond(tmp_path: Path) -> None:
    """Then the batch is at no cut, and the next one, from the same end, is."""
    sink = CutSink(tmp_path / "table")
    with DcpServer(tmp_path / "data", "--partitions", "64") as server:
        write(server, range(300), b"1")
        rows, _ = batch_of(server, sink.path, {})
        assert sink.apply(rows)
        write(server, range(7), b"2")
        rows, _ = batch_of(server, sink.path, {})
        counts = {each["op"]: rows["op"].to_pylist().count(each["op"]) for each in rows.to_pylist()}
        assert (counts["compared"], counts["set"]) == (64, 7)
        assert sink.apply(rows), "nothing was written meanwhile"
        rows, end = batch_of(server, sink.path, {}, lambda: write(server, range(9), b"3"))
        assert sink.apply(rows) == 0
        rows, _ = batch_of(server, sink.path, end)
        assert "compared" not in rows["op"].to_pylist()
        assert sink.apply(rows)
        with server.connect() as kv:
            current = sink.rows("current")
            assert len(current) == 300
            assert all(kv.get(row["key"]).value == row["value"] for row in current)


# -- Spark -----------------------------------------------------------------------------------------


class Following:
    """A query with a table that it compares with."""

    def __init__(self, spark: Any, folder: Path, kind: str, **options: str) -> None:
        self.spark, self.kind, self.options = spark, kind, options
        self.path = str(folder / "table")
        self.folder = folder
        self.checkpoints = 0
        self.owner = ""
        self.before = lambda: None

    def lose_checkpoint(self) -> None:
        self.checkpoints += 1

    def run(self, server: DcpServer) -> int:
        """Read everything; return the rows that the source delivered."""
        apply = partial(
            apply_changes, path=self.path, format=self.kind, buckets=4, take_over_from=self.owner
        )

        def apply_batch(batch_df: Any, batch_id: int) -> None:
            before, self.before = self.before, lambda: None
            before()
            apply(batch_df, batch_id)

        query = (
            self.spark.readStream.format("dcp")
            .options(servers=server.address, table=self.path, **self.options)
            .load()
            .writeStream.foreachBatch(apply_batch)
            .option("checkpointLocation", str(self.folder / f"checkpoint{self.checkpoints}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        self.owner = query.id
        return sum(json.loads(p.json)["numInputRows"] for p in query.recentProgress)

    def differences(self, server: DcpServer) -> list[str]:
        return table_differences(self.spark, server, self.path, kind=self.kind, history=False)


def write(server: DcpServer, numbers: Any, value: bytes) -> None:
    with server.connect() as kv:
        for number in numbers:
            kv.set(b"key-%d" % number, value)


async def set_orders(server: DcpServer, key: str) -> None:
    async with KvClient.connect(server.address) as kv:
        await kv.collection("shop.orders").set(key, b"order")


def purge_all(server: DcpServer) -> None:
    with server.connect() as kv:
        used = [vb for vb, seqno in kv.get_all_vb_seqnos().items() if seqno]
    for vb in used:
        server.purge(vb)


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_table_that_was_purged_past_reads_what_differs(spark, dcpd, tmp_path, kind):
    query = Following(spark, tmp_path, kind)
    write(dcpd, range(400), b"1")
    assert query.run(dcpd) == 400
    write(dcpd, range(3), b"2")
    with dcpd.connect() as kv:
        for number in range(10, 16):
            kv.delete(b"key-%d" % number)
    write(dcpd, [500], b"new")
    purge_all(dcpd)
    assert query.run(dcpd) < 60, "six partitions, and what changed"
    assert query.differences(dcpd) == []
    write(dcpd, range(100, 110), b"3")
    query.run(dcpd)
    assert query.differences(dcpd) == []


def test_a_lost_checkpoint_compares_and_goes_on(spark, dcpd, tmp_path):
    query = Following(spark, tmp_path, "parquet")
    write(dcpd, range(300), b"1")
    query.run(dcpd)
    write(dcpd, range(5), b"2")
    with dcpd.connect() as kv:
        kv.delete(b"key-7")
        used = sum(seqno > 0 for seqno in kv.get_all_vb_seqnos().values())
    query.lose_checkpoint()

    def more() -> None:
        write(dcpd, range(200, 240), b"later")

    query.before = more
    rows = query.run(dcpd)
    assert rows - 1024 - used < 200, "one for each partition, and what differs"
    query.run(dcpd)
    assert query.differences(dcpd) == []
    vb = next(iter(server_history(dcpd)))[0]
    with dcpd.connect() as kv:
        high = kv.get_all_vb_seqnos()[vb]
    dcpd.branch(vb, at=high - 1)
    query.run(dcpd)
    assert query.differences(dcpd) == []


def test_another_server_with_collections_is_compared(spark, tmp_path):
    """Its documents have other seqnos: key, value, CAS and revision are what has to agree."""
    names = "shop.orders,_default._default"
    query = Following(spark, tmp_path, "parquet", collections=names, keyFormat="string")
    with (
        DcpServer(tmp_path / "one", "--partitions", "64") as one,
        DcpServer(tmp_path / "two", "--partitions", "64") as two,
    ):
        for server in (one, two):
            node = server.address.removeprefix("dcpd://")
            assert dcpctl(["--server", node, "collection", "add", "shop.orders"]) == 0
            write(server, range(100), b"1")
            asyncio.run(set_orders(server, "key-1"))
        asyncio.run(set_orders(one, "gone"))
        query.run(one)
        query.run(two)
        current = {
            (row["collection"], row["key"]): (bytes(row["value"]), row["cas"])
            for row in read_table(spark, query.path).collect()
        }
        fresh = Following(spark, tmp_path / "fresh", "parquet", **query.options)
        fresh.run(two)
        assert current == {
            (row["collection"], row["key"]): (bytes(row["value"]), row["cas"])
            for row in read_table(spark, fresh.path).collect()
        }


def test_an_equal_table_is_not_read_again(spark, dcpd, tmp_path):
    query = Following(spark, tmp_path, "parquet")
    write(dcpd, range(100), b"1")
    query.run(dcpd)
    with dcpd.connect() as kv:
        kv.delete(b"key-99")
    query.run(dcpd)
    before = rows_of(read_table(spark, query.path))
    query.lose_checkpoint()
    assert query.run(dcpd) <= 1026, "a row for each partition, and the stream of one that is empty"
    assert sorted(rows_of(read_table(spark, query.path))) == sorted(before)
    assert documents_of(server_history(dcpd)) == {row.key: row for row in before}
