"""`apply_changes`: write a stream of changes to a table, for `foreachBatch`.

    changes.writeStream.foreachBatch(partial(apply_changes, path="/data/flights"))
    read_table(spark, "/data/flights").show()             # the current documents
    read_table(spark, "/data/flights", "changes").show()  # every change that was not undone

Invariant: after each batch, new or repeated, log and documents match the server's history as of the
time when the batch was read. docs/spark.md shows why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from clients.errors import DcpdError
from clients.install_hint import install_hint
from clients.spark.sink.rules import TableWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BUCKETS: Final = 16
"""Parts of a table, by ranges of vbuckets. A change rewrites its bucket; each task writes whole
buckets."""
BUCKETS_MAX: Final = 1024
CUTS_KEPT: Final = 8
"""Cuts that a Parquet table keeps. Each keeps the files of the buckets that later batches touch."""
CUTS_MAX: Final = 1000
FORMATS: Final = ("parquet", "delta")
TABLES: Final = ("current", "changes")
_LOG: Final = logging.getLogger("dcpd.spark")
_QUERY_ID: Final = "sql.streaming.queryId"
"""The local property with the query's id, which Spark sets while a batch runs."""
_NEEDED: Final = ("vb", "seqno", "vb_uuid", "op", "key", "value", "cas", "revision")


def apply_changes(
    batch_df: DataFrame,
    batch_id: int,
    *,
    path: str,
    format: str = "parquet",  # noqa: A002 - Spark's name for it
    buckets: int = BUCKETS,
    storage_options: Mapping[str, str] | None = None,
    query: str | None = None,
    take_over_from: str = "",
    consistent: bool = False,
    keep_cuts: int | None = None,
) -> None:
    """Apply a batch of the source `dcp` to the change log and the documents at `path`.

    A rollback row undoes changes exactly, with the help of the log. Repeated batches are
    idempotent. `format` is "parquet" (a folder shared by driver and executors; executors write) or
    "delta" (any storage that deltalake supports, with `storage_options`; the driver writes).
    `buckets` only matters when the table is created.

    A table belongs to the query that wrote it first. A batch from another query is refused unless
    `take_over_from` is the id of the owner. Set `query` to the query's id if Spark does not provide
    it (Spark Connect).

    If the source has the option `consistent`, the table keeps the cuts at which its batches end,
    for `read_table(as_of=...)`: the newest `keep_cuts` of them (8; Delta's own history decides).
    `consistent` refuses batches of a source without that option. Raises ValueError for bad
    arguments, DcpdError.
    """
    if format not in FORMATS:
        raise ValueError(f"format takes {' or '.join(FORMATS)}, not {format!r}")
    if not 1 <= buckets <= BUCKETS_MAX:
        raise ValueError(f"buckets takes 1 to {BUCKETS_MAX}, not {buckets}")
    missing = [name for name in _NEEDED if name not in batch_df.columns]
    if missing:
        raise ValueError(
            f"the batch has no columns {', '.join(missing)}: pass the rows of the source dcp to"
            " apply_changes with all their columns"
        )
    if keep_cuts is not None and (format == "delta" or not 1 <= keep_cuts <= CUTS_MAX):
        raise ValueError(
            f"keep_cuts takes 1 to {CUTS_MAX}, not {keep_cuts}, and only parquet has it: Delta"
            " keeps cuts as long as its history"
        )
    query = _query_of(batch_df) if query is None else query
    writer = TableWriter(query, take_over_from, consistent)
    if format == "parquet":
        from clients.spark.sink.parquet import apply_batch

        if storage_options:
            raise ValueError("storage_options need format='delta'; parquet writes to a folder")
        # Resolve a relative path here: executors have other working folders.
        keep = CUTS_KEPT if keep_cuts is None else keep_cuts
        at = apply_batch(batch_df, Path(path).absolute(), buckets, writer, keep)
    else:
        delta = _delta()
        at = delta.apply_batch(batch_df.toArrow(), path, buckets, storage_options or {}, writer)
    if at.is_told and not at.time:
        _LOG.warning(
            "batch %d of %s ends at no cut, because history branched or was compacted after it was"
            " planned: the next batch repairs that", batch_id, path,
        )  # fmt: skip


def _query_of(batch_df: DataFrame) -> str:
    """Return the id of the batch's streaming query; "" if there is none or Spark does not tell."""
    # A Spark Connect session has no sparkContext.
    context = getattr(batch_df.sparkSession, "sparkContext", None)
    return str(context.getLocalProperty(_QUERY_ID) or "") if context is not None else ""


def read_table(
    spark: SparkSession,
    path: str,
    table: str = "current",
    *,
    as_of: int | None = None,
    format: str | None = None,  # noqa: A002
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return `current` (the documents) or `changes` (the log) of the table at `path`.

    `as_of` is the closed time of a cut that the table has kept (`table_cuts`): the rows are those
    of one moment of the whole store. None: those of the last batch.

    `format` is "parquet" or "delta"; None: the one that the table has.
    With "delta" the driver reads the rows. Spark with delta-spark can also read `path/current`.
    Raises DcpdError if there is no table.
    """
    if table not in TABLES:
        raise ValueError(f"table takes {' or '.join(TABLES)}, not {table!r}")
    if format is None:
        format = _format_of(path, table)  # noqa: A001
    if format == "delta":
        return spark.createDataFrame(_delta().rows_of(path, table, storage_options or {}, as_of))
    if format != "parquet":
        raise ValueError(f"format takes {' or '.join(FORMATS)}, not {format!r}")
    from clients.spark.sink.parquet import files_of

    if _format_of(path, table) == "delta":
        raise DcpdError(f"the table at {path} is a Delta table: leave out format='parquet'")
    files = files_of(Path(path).absolute(), table, as_of)
    if not files:
        raise DcpdError(f"the table at {path} has no rows in {table} yet")
    return spark.read.parquet(*files)


def table_cuts(
    path: str,
    *,
    format: str | None = None,  # noqa: A002
    storage_options: Mapping[str, str] | None = None,
) -> list[int]:
    """Return the closed times of the cuts that the table at `path` has kept, ascending.

    Raises DcpdError if there is no table.
    """
    if (_format_of(path, "changes") if format is None else format) == "delta":
        return list(_delta().versions_of_cuts(path, storage_options or {}))
    from clients.spark.sink.parquet import cuts_of_table

    return cuts_of_table(Path(path).absolute())


def _format_of(path: str, table: str) -> str:
    """Return the format of a table. Parquet tables are folders, so a URL is a Delta table."""
    if "://" in path:
        return "delta"
    return "delta" if (Path(path) / table / "_delta_log").is_dir() else "parquet"


def _delta() -> ModuleType:
    try:
        return import_module("clients.spark.sink.delta")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"format='delta' needs the package {error.name}: {install_hint('spark')}",
            name=error.name,
        ) from error
