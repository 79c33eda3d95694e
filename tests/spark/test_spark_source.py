"""The source in a real Spark: columns, options, limits, triggers, progress, errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

from clients.address import parse_address
from clients.errors import DcpdError
from clients.install_hint import install_hint
from clients.kv.client import KvClient
from clients.link.blocking_link import SyncLink
from clients.spark import check_java, rows_behind
from clients.spark.environment import JavaMissingError
from clients.spark.offset import entries_of
from clients.spark.options import parse_options
from clients.spark.source import LOOK_AGAIN_S, DcpReader, DcpStreamReader, ReadTask
from clients.spark.survey import PATIENCE_S
from support.waiting import until

DOCUMENTS = {
    b"k%d" % number: b'{"n": %d, "text": "t%d"}' % (number, number) for number in range(40)
}


async def store(server, documents, *, deletes=()) -> None:
    async with KvClient.connect(server.address) as kv:
        await kv.set_many(documents)
        for key in deletes:
            await kv.delete(key)


def read(spark, server, **options):
    return spark.read.format("dcp").option("servers", server.address).options(**options).load()


def stream(spark, server, folder, collect, **options):
    """Run a query over what is there now; `collect` gets each batch's rows."""

    def take(batch_df, batch_id):
        collect.append((batch_id, batch_df.collect()))

    query = (
        spark.readStream.format("dcp").option("servers", server.address).options(**options).load()
        .writeStream.foreachBatch(take).option("checkpointLocation", str(folder))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return query


@pytest.mark.timeout(300)
def test_a_batch_read_has_every_change_in_columns_and_json(spark, dcpd):
    before = datetime.now(UTC)
    asyncio.run(store(dcpd, DOCUMENTS, deletes=[b"k1"]))
    asyncio.run(store(dcpd, {b"k2": b"no json"}))
    rows = read(
        spark, dcpd, keyFormat="string", valueFormat="json", valueSchema="n INT, text STRING"
    ).collect()
    assert len(rows) == 42
    assert {row["key"] for row in rows} == {key.decode() for key in DOCUMENTS}
    by_op = {op: [row for row in rows if row["op"] == op] for op in ("set", "delete")}
    assert [row["key"] for row in by_op["delete"]] == ["k1"]
    assert by_op["delete"][0]["value"] is None
    for row in by_op["set"]:
        if row["value"] is not None:
            assert (row["value"]["n"], row["value"]["text"]) == (
                int(row["key"][1:]), "t" + row["key"][1:],
            )  # fmt: skip
        assert row["flags"] == 0
        assert row["expiry"] is None
        assert timedelta(0) <= row["time"].astimezone(UTC) - before < timedelta(minutes=2)
    assert [row["key"] for row in by_op["set"] if row["value"] is None] == ["k2"]
    newest = read(spark, dcpd, history="false").collect()
    assert len(newest) == 40
    some = read(spark, dcpd, partitions="0-300,302").collect()
    assert {row["vb"] for row in some} <= {*range(301), 302}
    assert sorted(row["cas"] for row in some) == sorted(
        row["cas"] for row in rows if row["vb"] <= 300 or row["vb"] == 302
    )


@pytest.mark.timeout(300)
def test_collections_are_a_column(spark, dcpd):
    async def fill() -> None:
        async with KvClient.connect(dcpd.address) as kv:
            await kv.set("k", b"default")
            await kv.collection("shop.orders").set("k", b"an order")
            await kv.collection("shop.items").set("k", b"an item")

    dcpd.ask("GET", "/api/v1/status")
    create_collections(dcpd, "shop.orders", "shop.items")
    asyncio.run(fill())
    rows = read(spark, dcpd, collections="shop.orders,shop.items", valueFormat="string").collect()
    assert sorted((row["collection"], bytes(row["key"]), row["value"]) for row in rows) == [
        ("shop.items", b"k", "an item"), ("shop.orders", b"k", "an order"),
    ]  # fmt: skip
    assert [row["value"] for row in read(spark, dcpd, valueFormat="string").collect()] == [
        "default"
    ]


def create_collections(dcpd, *names) -> None:
    for name in names:
        subprocess.run(
            [sys.executable, "-m", "clients.cli", "--server", dcpd.address, "collection", "create",
             name], check=True, capture_output=True,
        )  # fmt: skip


@pytest.mark.timeout(300)
def test_a_checkpoint_of_other_collections_is_refused(spark, dcpd, tmp_path):
    """What lies behind it would be missing, and nothing would tell."""
    create_collections(dcpd, "shop.orders", "shop.items")
    batches: list = []

    async def fill(value: bytes) -> None:
        async with KvClient.connect(dcpd.address) as kv:
            for name in ("shop.orders", "shop.items"):
                await kv.collection(name).set("k", value)

    asyncio.run(fill(b"1"))
    stream(spark, dcpd, tmp_path / "checkpoint", batches, collections="shop.orders")
    asyncio.run(fill(b"2"))
    with pytest.raises(StreamingQueryException) as caught:
        stream(spark, dcpd, tmp_path / "checkpoint", batches, collections="shop.items")
    text = str(caught.value)
    assert "belongs to a query on the collections shop.orders, but this query" in text
    assert "reads shop.items" in text
    assert "another checkpointLocation" in text
    stream(spark, dcpd, tmp_path / "checkpoint", batches, collections="shop.orders")
    assert [[row["collection"] for row in rows] for _, rows in batches] == [["shop.orders"]] * 2


@pytest.mark.timeout(300)
def test_stream_in_limited_batches_gives_all_once(spark, dcpd, tmp_path):
    asyncio.run(store(dcpd, DOCUMENTS))
    batches: list = []
    query = stream(spark, dcpd, tmp_path / "checkpoint", batches, maxRowsPerTrigger="15")
    sizes = [len(rows) for _, rows in batches]
    assert sizes == [15, 15, 10]
    assert sorted(bytes(row["key"]) for _, rows in batches for row in rows) == sorted(DOCUMENTS)
    behind = [rows_behind(progress).rows for progress in query.recentProgress]
    assert behind[:3] == [25, 10, 0]
    assert rows_behind(json.loads(query.recentProgress[0].json)).partitions > 0
    # Another run from the checkpoint has nothing to do; then only what is new.
    assert stream(spark, dcpd, tmp_path / "checkpoint", batches).lastProgress is not None
    assert len(batches) == 3
    asyncio.run(store(dcpd, {b"new": b"1"}))
    stream(spark, dcpd, tmp_path / "checkpoint", batches)
    assert [bytes(row["key"]) for row in batches[3][1]] == [b"new"]


@pytest.mark.timeout(300)
def test_a_rollback_is_a_row_or_an_error(spark, dcpd, tmp_path):
    with dcpd.connect() as kv:
        for number in range(4):
            stored = kv.set(b"key", b"%d" % number)
    vb = stored.vb_id
    batches: list = []
    for name in ("emits", "fails"):
        stream(spark, dcpd, tmp_path / name, batches)
    dcpd.branch(vb, at=2)
    with dcpd.connect() as kv:
        kv.set(b"key", b"new")
        (newer, _), (older, _) = kv.failover_log(vb)
    stream(spark, dcpd, tmp_path / "emits", batches, onRollback="emit")
    rows = batches[-1][1]
    assert sorted((row["op"], row["seqno"], row["vb_uuid"]) for row in rows) == [
        ("rollback", 2, newer), ("set", 3, newer),
    ]  # fmt: skip
    with pytest.raises(StreamingQueryException) as caught:
        stream(spark, dcpd, tmp_path / "fails", batches, onRollback="fail")
    text = str(caught.value)
    assert f"partition {vb}" in text
    assert f"{older:x} from seqno 0" in text
    assert f"{newer:x} from seqno 2" in text
    assert "onRollback=emit" in text


@pytest.mark.timeout(300)
def test_failed_first_batch_is_repeated_from_where_latest_was(spark, dcpd, tmp_path):
    """Spark asks anew where the query begins; what came meanwhile must not move the beginning."""

    def fail(batch_df, batch_id):
        raise KeyError("the sink fails")

    def query(take, **trigger):
        frame = spark.readStream.format("dcp").option("servers", dcpd.address)
        return (
            frame.option("startingOffsets", "latest").load()
            .writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "c"))
            .trigger(**trigger).start()
        )  # fmt: skip

    with dcpd.connect() as kv:
        vb = kv.set(b"key", b"before").vb_id
        failing = query(fail, processingTime="0 seconds")
        with pytest.raises(StreamingQueryException, match="the sink fails"):
            write_while_it_runs(failing, lambda number: kv.set(b"key", b"%d" % number))
        last = kv.set(b"key", b"after")
    planned = json.loads((tmp_path / "c" / "offsets" / "0").read_text().splitlines()[-1])
    begin = entries_of(planned)[vb].position.base_seqno
    assert 1 <= begin < last.seqno - 1
    seqnos: list[int] = []

    def take(batch_df, batch_id):
        seqnos.extend(sorted(row["seqno"] for row in batch_df.collect()))

    query(take, availableNow=True).awaitTermination()
    assert seqnos == list(range(begin + 1, last.seqno + 1))


def write_while_it_runs(query, write) -> None:
    for number in itertools.count():
        write(number)
        if query.awaitTermination(0.05):
            return


@pytest.mark.timeout(300)
def test_wrong_options_are_named_through_spark(spark, dcpd):
    with pytest.raises(PySparkException, match="option history takes true or false, not 'maybe'"):
        read(spark, dcpd, history="maybe").schema  # noqa: B018
    with pytest.raises(PySparkException, match="did you mean numPartitions"):
        spark.readStream.format("dcp").option("servers", "x").option("numPartition", "3").load()


@pytest.mark.timeout(300)
def test_what_goes_wrong_on_executor_reaches_user_in_words(spark, dcpd):
    with dcpd.connect() as kv:
        kv.set(b"fine", b"text")
        stored = kv.set(b"key", b"\xff\xfe")
    with pytest.raises(PySparkException) as caught:
        read(spark, dcpd, valueFormat="string").collect()
    text = str(caught.value)
    assert "the value of the change with seqno 1 is not UTF-8 text" in text
    assert f"partition {stored.vb_id}" in text
    assert "valueFormat=binary" in text


@pytest.mark.timeout(300)
def test_a_password_is_in_no_plan_and_no_error(spark, dcpd):
    frame = read(spark, dcpd, username="ada", password="sesame")
    plan = frame._jdf.queryExecution().toString()
    assert "dcp" in plan
    with pytest.raises(PySparkException, match="'ada' was refused") as caught:
        frame.collect()
    assert "sesame" not in plan + str(caught.value)


@pytest.mark.timeout(300)
def test_a_query_stopped_leaves_no_connection_process_or_thread(spark, dcpd, tmp_path):
    asyncio.run(store(dcpd, DOCUMENTS))
    seen = threading.Event()
    query = (
        spark.readStream.format("dcp").option("servers", dcpd.address).load()
        .writeStream.foreachBatch(lambda batch_df, batch_id: (batch_df.count(), seen.set()))
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    assert seen.wait(60)
    threads = threading.active_count()
    assert planners(), "the query's driver half"
    assert connections(dcpd) > 1
    query.stop()
    until(lambda: not planners())
    until(lambda: connections(dcpd) == 1)
    assert threading.active_count() <= threads


def connections(server) -> int:
    """Return how many connections the server has, this one among them."""
    with SyncLink(parse_address(server.address)) as link:
        told = {frame.key: frame.value for frame in link.request_stat(b"")}
    return int(told[b"curr_connections"])


def planners() -> list[str]:
    """Return the processes below this one that plan for a query."""
    parents, names = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = status.read_text().rpartition(")")[2].split()
            names[status.parent.name] = (status.parent / "cmdline").read_bytes()
            parents[status.parent.name] = rest[1]
        except OSError:
            continue  # it ended meanwhile
    found = []
    for pid, name in names.items():
        above = pid
        while above in parents and above != str(os.getpid()):
            above = parents[above]
        if above == str(os.getpid()) and b"python_streaming_source_runner" in name:
            found.append(pid)
    return found


# -- the driver's half, called as Spark calls it ---------------------------------------------------


@pytest.fixture
def driver(dcpd):
    """Make stream readers as Spark's driver has them; they are stopped at the end."""
    made: list[DcpStreamReader] = []

    def make(
        *, patience_s: float = PATIENCE_S, look_again_s: float = LOOK_AGAIN_S, **options
    ) -> DcpStreamReader:
        settings = parse_options({"servers": dcpd.address, **options})
        reader = DcpStreamReader(
            settings, StructType([]), patience_s=patience_s, look_again_s=look_again_s
        )
        made.append(reader)
        return reader

    yield make
    for reader in made:
        reader.stop()


def test_an_offset_is_the_same_object_while_nothing_changes(dcpd, driver):
    asyncio.run(store(dcpd, DOCUMENTS))
    reader = driver()
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    again = json.loads(json.dumps(end))
    for _ in range(3):
        assert reader.latestOffset(again, ReadAllAvailable()) is again
    assert reader.partitions(again, again) == []
    assert reader.reportLatestOffset() == end
    assert driver().latestOffset(again, ReadAllAvailable()) is again


def test_an_offset_tells_the_collections_that_it_is_of(dcpd, driver):
    create_collections(dcpd, "shop.orders", "shop.items")
    asyncio.run(store(dcpd, DOCUMENTS))
    end = driver().latestOffset({}, ReadAllAvailable())
    assert end["collections"] == "_default._default"
    both = driver(collections="shop.orders,shop.items").latestOffset({}, ReadAllAvailable())
    assert both["collections"] == "shop.items,shop.orders"
    again = driver(collections="shop.items,shop.orders")
    assert again.latestOffset(both, ReadAllAvailable()) is both, "in another order the same"
    other = driver(collections="shop.orders")
    for ask in (
        lambda: other.latestOffset(end, ReadAllAvailable()),
        lambda: other.partitions({}, end),
    ):
        with pytest.raises(DcpdError, match=r"_default\._default, but this query .* shop\.orders"):
            ask()
    # Older programs did not write it: it is believed, and the next batch has it.
    old = {name: text for name, text in end.items() if name != "collections"}
    assert other.latestOffset(old, ReadAllAvailable()) is old
    assert other.partitions(old, old) == []
    with dcpd.connect() as kv:
        kv.set(b"one more", b"1")
    reader = driver()
    assert reader.latestOffset(old, ReadAllAvailable())["collections"] == "_default._default"
    begun = driver(startingOffsets=json.dumps(both), collections="shop.orders")
    assert begun.initialOffset() == {k: v for k, v in both.items() if k != "collections"}


def test_a_branch_is_seen_although_the_seqnos_look_the_same(dcpd, driver):
    with dcpd.connect() as kv:
        for number in range(3):
            vb = kv.set(b"key", b"%d" % number).vb_id
    reader = driver(look_again_s=0.0)
    end = reader.latestOffset({}, ReadAllAvailable())
    dcpd.branch(vb, at=2)
    with dcpd.connect() as kv:
        kv.set(b"key", b"new")
    assert reader.latestOffset(end, ReadAllAvailable())[str(vb)].endswith("rollback=2")


def test_limits_of_rows_and_bytes(dcpd, driver):
    asyncio.run(store(dcpd, dict.fromkeys(DOCUMENTS, b"x" * 1000)))

    def rows(offset) -> int:
        return sum(entry.seqno for entry in entries_of(offset).values())

    both = driver(maxRowsPerTrigger="30", maxBytesPerTrigger="11000")
    assert both.getDefaultReadLimit() == ReadMaxRows(30)
    assert 8 <= rows(both.latestOffset({}, both.getDefaultReadLimit())) <= 10
    assert rows(both.latestOffset({}, ReadAllAvailable())) == 40, "Spark may ask for everything"
    assert driver(maxBytesPerTrigger="9").getDefaultReadLimit() == ReadMaxBytes(9)
    assert rows(driver(maxBytesPerTrigger="9").latestOffset({}, ReadMaxBytes(9))) == 1
    assert driver().getDefaultReadLimit() == ReadAllAvailable()


def test_where_a_query_begins(dcpd, driver):
    with dcpd.connect() as kv:
        vb = kv.set(b"key", b"old").vb_id
        second = kv.set(b"key", b"newer")
    start = driver(startingOffsets="latest").initialOffset()
    assert start[str(vb)].startswith("2 ")
    assert start[str(vb)].endswith("base=2")
    assert driver(startingOffsets="earliest").initialOffset() == {}
    assert driver(startingOffsets=f'{{"{vb}": 1}}').initialOffset()[str(vb)].endswith("base=1")
    moment = datetime.fromtimestamp(second.cas / 1e9 - 0.000_5, UTC).isoformat()
    assert driver(startingOffsets=moment).initialOffset().get(str(vb), "1 ").startswith("1 ")
    assert driver(startingOffsets="0").initialOffset() == {}
    again = driver(startingOffsets=json.dumps(start))
    assert again.initialOffset() == start
    with pytest.raises(ValueError, match=f"startingOffsets: partition {vb} is at seqno 2, .* 9"):
        driver(startingOffsets=f'{{"{vb}": 9}}').initialOffset()


def test_available_now_reads_nothing_newer(dcpd, driver):
    with dcpd.connect() as kv:
        vb = kv.set(b"key", b"1").vb_id
        reader = driver()
        reader.prepareForTriggerAvailableNow()
        kv.set(b"key", b"2")
    end = reader.latestOffset({}, ReadAllAvailable())
    assert end[str(vb)].startswith("1 ")
    assert reader.latestOffset(end, ReadAllAvailable()) is end


def test_partitions_active_nowhere_are_named_where_needed(dcpd, driver):
    """A start at `latest` must not become one at the beginning, "everything" not the rest of it."""
    with dcpd.connect() as kv:
        vb = kv.set(b"key", b"1").vb_id
    reader = driver()
    end = reader.latestOffset({}, ReadAllAvailable())
    dcpd.set_state(vb, "dead")
    settings = parse_options({"servers": dcpd.address})
    for ask in (
        driver(startingOffsets="latest", patience_s=0.2).initialOffset,
        driver(startingOffsets="0", patience_s=0.2).initialOffset,
        driver(patience_s=0.2).prepareForTriggerAvailableNow,
        DcpReader(settings, StructType([]), patience_s=0.2).partitions,
    ):
        with pytest.raises(DcpdError, match=rf"1 of 1024 partitions \({vb}\).*dcpctl status"):
            ask()
    assert driver().latestOffset(end, ReadAllAvailable()) is end, "a stream goes on with others"
    others = ",".join(part for part in (f"0-{vb - 1}", f"{vb + 1}-1023"))
    assert driver(startingOffsets="latest", partitions=others).initialOffset() == {}


def test_tasks_are_at_most_as_many_as_wanted(dcpd, driver):
    end = {str(vb): "100000 a@0" for vb in range(1024)}
    for count in (1, 3, 8):
        tasks = driver(numPartitions=str(count)).partitions({}, end)
        assert len(tasks) == count
        assert all(isinstance(task, ReadTask) for task in tasks)
        vb_ids = [step.vb_id for task in tasks for step in task.steps]
        assert vb_ids == list(range(1024)), "ranges of partitions"


def test_a_server_that_is_not_there_is_named_with_what_to_try():
    settings = parse_options({"servers": "127.0.0.1:1"})
    with pytest.raises(DcpdError, match=r"127\.0\.0\.1:1.*Check that the server is running"):
        DcpStreamReader(settings, StructType([]), patience_s=0.2).latestOffset(
            {}, ReadAllAvailable()
        )


# -- what is missing -------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_extra():
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "try:\n    from clients.spark import DcpDataSource\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pyspark" in told.stdout
    assert install_hint("spark") in told.stdout
    assert "Java 17" in told.stdout


def test_a_missing_or_old_java_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissingError, match="openjdk-17-jre-headless"):
        check_java()
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(JavaMissingError, match=r"Java 17 or newer: .*bin/java is version 11"):
        check_java()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.2\"' >&2\n")
    assert check_java() == 21
