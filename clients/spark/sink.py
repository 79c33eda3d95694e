"""`apply_changes`: a stream of changes as a table, for `foreachBatch`.

    changes.writeStream.foreachBatch(partial(apply_changes, path="/data/flights"))
    read_table(spark, "/data/flights").show()             # the documents as they are now
    read_table(spark, "/data/flights", "changes").show()  # every change that counts

Invariant: after every batch, repeated or not, log and documents are those of the history that the
server had when the batch was read; docs/spark.md shows why.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from clients.errors import DcpdError
from clients.spark.sink_rules import TableWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BUCKETS: Final = 16
"""Parts of a table by ranges of partitions: what is written anew, and how many tasks write."""
BUCKETS_MAX: Final = 1024
FORMATS: Final = ("parquet", "delta")
TABLES: Final = ("current", "changes")
_QUERY_ID: Final = "sql.streaming.queryId"
"""The local property in which Spark keeps the id while a query's batch runs."""
_NEEDED: Final = ("vb", "seqno", "vb_uuid", "op", "key", "value", "cas", "revision")


def apply_changes(
    batch_df: DataFrame,
    batch_id: int,  # noqa: ARG001 - Spark gives it; the rows themselves tell what is repeated
    *,
    path: str,
    format: str = "parquet",  # noqa: A002 - the word that Spark has for it
    buckets: int = BUCKETS,
    storage_options: Mapping[str, str] | None = None,
    query: str | None = None,
    take_over_from: str = "",
) -> None:
    """Apply a batch of the source `dcp` to the table at `path`: its change log, its documents.

    A rollback row undoes exactly, from the log. A batch that Spark repeats changes nothing twice.
    `format`: "parquet" (a folder that driver and executors share; written by executors) or "delta"
    (what deltalake can reach, with its `storage_options`; through the driver). `buckets` counts
    when the table is made.

    A table belongs to the query that wrote it first. A batch of another query is refused unless
    `take_over_from` is the first one's id. `query` is the id where Spark does not tell it (Spark
    Connect). Raises ValueError for arguments that it does not take, DcpdError.
    """
    if format not in FORMATS:
        raise ValueError(f"format takes {' or '.join(FORMATS)}, not {format!r}")
    if not 1 <= buckets <= BUCKETS_MAX:
        raise ValueError(f"buckets takes 1 to {BUCKETS_MAX}, not {buckets}")
    missing = [name for name in _NEEDED if name not in batch_df.columns]
    if missing:
        raise ValueError(
            f"a batch without the columns {', '.join(missing)}: give apply_changes the rows of the"
            " source dcp as they are"
        )
    writer = TableWriter(_query_of(batch_df) if query is None else query, take_over_from)
    if format == "parquet":
        from clients.spark.sink_parquet import apply_batch

        if storage_options:
            raise ValueError("storage_options are for format='delta'; parquet takes a folder")
        # A relative path is the driver's: executors have other working folders.
        apply_batch(batch_df, Path(path).absolute(), buckets, writer)
        return
    _delta().apply_batch(batch_df.toArrow(), path, buckets, storage_options or {}, writer)


def _query_of(batch_df: DataFrame) -> str:
    """Return the id of the batch's streaming query, which its checkpoint keeps; "" if there is no
    query or Spark does not tell it.
    """
    # A session of Spark Connect has no context.
    context = getattr(batch_df.sparkSession, "sparkContext", None)
    return str(context.getLocalProperty(_QUERY_ID) or "") if context is not None else ""


def read_table(
    spark: SparkSession,
    path: str,
    table: str = "current",
    *,
    format: str = "parquet",  # noqa: A002
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return `current` (the documents) or `changes` (the log) of the table at `path`.

    With "delta" the rows come through the driver; Spark with delta-spark reads `path/current` too.
    Raises DcpdError if there is no table.
    """
    if table not in TABLES:
        raise ValueError(f"table takes {' or '.join(TABLES)}, not {table!r}")
    if format == "delta":
        return spark.createDataFrame(_delta().rows_of(path, table, storage_options or {}))
    if format != "parquet":
        raise ValueError(f"format takes {' or '.join(FORMATS)}, not {format!r}")
    from clients.spark.sink_parquet import files_of

    files = files_of(Path(path).absolute(), table)
    if not files:
        raise DcpdError(f"the table at {path} has no rows in {table} yet")
    return spark.read.parquet(*files)


def _delta() -> ModuleType:
    try:
        return import_module("clients.spark.sink_delta")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"format='delta' needs the package {error.name}: pip install 'dcpd[spark]'",
            name=error.name,
        ) from error
