"""A table belongs to one query: another one is refused in words, unless it takes the table over."""

from __future__ import annotations

import json
from functools import partial

import pytest
from pyspark.errors import StreamingQueryException
from spark_truth import table_differences
from test_spark_sinks import DeltaTables, ParquetTable, sets, table

from clients.errors import DcpdError
from clients.spark import apply_changes
from clients.spark.sink import delta, parquet
from clients.spark.sink.rules import TableWriter, owner_after

SINKS = {"parquet": ParquetTable, "delta": DeltaTables}


@pytest.fixture(params=SINKS)
def sink(request, tmp_path):
    return SINKS[request.param](tmp_path / "table")


def seqnos(sink):
    return sorted(row["seqno"] for row in sink.rows("changes"))


def test_another_query_is_refused_and_changes_nothing(sink):
    sink.writer = TableWriter("first")
    sink.apply(table(sets(1, 1, 10)))
    sink.apply(table(sets(1, 11, 1)))
    sink.writer = TableWriter("second")
    for batch in (table(sets(1, 1, 1)), table([])):  # also where there is nothing new
        with pytest.raises(DcpdError) as info:
            sink.apply(batch)
        assert "belongs to query first, and this batch is from query second" in str(info.value)
        assert "take_over_from='first'" in str(info.value)
    assert seqnos(sink) == list(range(1, 12))
    sink.writer = TableWriter()
    with pytest.raises(DcpdError, match=r"from outside a streaming query\. .*query='first'"):
        sink.apply(table(sets(1, 1, 1)))
    sink.writer = TableWriter("first")
    sink.apply(table(sets(1, 12, 1)))
    assert seqnos(sink) == list(range(1, 13))


def test_query_takes_table_over_once_from_one_that_it_names(sink):
    sink.writer = TableWriter("first")
    sink.apply(table(sets(1, 1, 3)))
    sink.writer = TableWriter("third", take_over_from="second")
    with pytest.raises(DcpdError, match="belongs to query first"):
        sink.apply(table(sets(1, 1, 3)))
    sink.writer = TableWriter("second", take_over_from="first")
    for _ in range(2):  # the option may stay: it takes from that query only
        sink.apply(table(sets(1, 1, 2)))
        assert seqnos(sink) == [1, 2]
    sink.writer = TableWriter("first")
    with pytest.raises(DcpdError, match="belongs to query second, and this batch is from query f"):
        sink.apply(table(sets(1, 3, 1)))
    sink.writer = TableWriter("second")
    sink.apply(table(sets(1, 3, 1)))
    assert seqnos(sink) == [1, 2, 3]


def test_a_table_of_nobody_belongs_to_the_next_query(sink):
    """Older programs made it, or Spark did not tell the query."""
    sink.apply(table(sets(1, 1, 3)))
    sink.apply(table(sets(1, 4, 1)))
    sink.writer = TableWriter("first")
    sink.apply(table(sets(1, 5, 1)))
    sink.writer = TableWriter("second")
    with pytest.raises(DcpdError, match="belongs to query first"):
        sink.apply(table(sets(1, 6, 1)))


def test_nobody_takes_over_without_a_name():
    with pytest.raises(DcpdError, match="from outside a streaming query"):
        owner_after("first", TableWriter("", take_over_from="first"), "/table")


def test_a_manifest_of_format_1_is_read(tmp_path):
    sink = ParquetTable(tmp_path / "table")
    sink.apply(table(sets(1, 1, 3)))
    path = tmp_path / "table" / "manifest.json"
    document = json.loads(path.read_text())
    assert document.pop("format") == parquet.FORMAT == 3
    del document["query"], document["cuts"]
    path.write_text(json.dumps({**document, "format": 1}))
    sink.writer = TableWriter("first")
    sink.apply(table(sets(1, 4, 1)))
    assert (sink.manifest().format, sink.manifest().query) == (3, "first")
    assert seqnos(sink) == [1, 2, 3, 4]


def test_a_table_that_is_taken_over_while_a_batch_is_applied(sink, monkeypatch):
    """The batch of the query that it belonged to fails, and says why."""
    sink.writer = TableWriter("first")
    sink.apply(table(sets(1, 1, 3)))
    other = type(sink)(sink.path)
    other.writer = TableWriter("second", take_over_from="first")

    def take_over(*_) -> None:
        monkeypatch.undo()
        other.apply(table(sets(1, 1, 2)))

    if isinstance(sink, ParquetTable):
        write = parquet.apply_to_bucket
        monkeypatch.setattr(
            parquet, "apply_to_bucket",
            lambda *arguments: (write(*arguments), take_over())[0],
        )  # fmt: skip
        words = "another program wrote"
    else:
        write_deltalake = delta.write_deltalake
        opened = delta.DeltaTable(f"{sink.path}/changes")

        def write_late(path, *arguments, **options) -> None:
            take_over()
            write_deltalake(opened, *arguments, **options)  # as of before it was taken

        monkeypatch.setattr(delta, "write_deltalake", write_late)
        words = "belongs to query second, and this batch is from query first"
    with pytest.raises(DcpdError, match=words):
        sink.apply(table(sets(1, 4, 1)))
    assert seqnos(sink) == [1, 2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SINKS)
def test_a_query_with_another_checkpoint_is_refused(spark, dcpd, tmp_path, kind):
    """Its checkpoint is what makes a query; it tells who it is without being asked."""
    path = str(tmp_path / "table")

    def run(checkpoint: str, **more) -> str:
        query = (
            spark.readStream.format("dcp")
            .option("servers", dcpd.address)
            .load()
            .writeStream.foreachBatch(partial(apply_changes, path=path, format=kind, **more))
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return str(query.id)

    def write(first: int) -> None:
        with dcpd.connect() as kv:
            for number in range(first, first + 5):
                kv.set(b"key-%d" % number, b"v")

    write(0)
    first = run("a")
    write(5)
    assert run("a") == first, "the same checkpoint is the same query"
    write(10)
    with pytest.raises(StreamingQueryException, match=f"belongs to query {first}"):
        run("b")
    run("a")
    assert table_differences(spark, dcpd, path, kind=kind) == []
    write(15)
    second = run("b", take_over_from=first)
    assert second != first
    assert table_differences(spark, dcpd, path, kind=kind) == []
    write(20)
    with pytest.raises(StreamingQueryException, match=f"belongs to query {second}"):
        run("a")
