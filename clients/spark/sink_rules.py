"""What a batch does to a change log and a current table, as rules over Arrow tables. Pure.

A batch has of each partition either a rollback row to R and changes above it, or changes alone.
Its *cut* is R, or the seqno below its first change. The rule, for every batch, first or repeated:

    the log loses what is above the cut, and gets the batch's changes;
    current is, for every key of what was lost or came, its newest version in the log now.

That one rule is idempotent, undoes exactly, and repairs what an attempt left that was cut short:
docs/spark.md shows why, for every set of rows that a repeated batch can have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from clients.errors import DcpdError
from vbucket.model.ids import NUM_VBUCKETS

_PLACE: Final = "__place"


class Cuts(NamedTuple):
    """By partition: what a batch leaves of the log, and how far it goes."""

    cut: dict[int, int]
    high: dict[int, int]


class TableWriter(NamedTuple):
    """Who applies a batch."""

    query: str = ""
    """The query's id, which its checkpoint keeps; "" if it is not known."""
    take_over_from: str = ""
    """A query whose table this one may take over."""


def owner_after(owner: str, writer: TableWriter, path: str) -> str:
    """Return the query that owns a table from now on. `owner` is the present one, "" for none.

    Raises DcpdError if another query owns it: each would resume from its own checkpoint and undo
    the other's newer rows.
    """
    if owner in {"", writer.query} or (writer.query and writer.take_over_from == owner):
        return writer.query
    who = f"of query {writer.query}" if writer.query else "outside of a streaming query"
    hint = (
        "Resume the query that owns the table from its checkpoint, or use another path. If that"
        f" query is stopped for good, take_over_from={owner!r} gives the table to this one, which"
        " must start with a new checkpoint and startingOffsets=earliest."
    )
    if not writer.query:
        hint = f"If the batch belongs to that query, pass query={owner!r}."
    raise DcpdError(f"the table {path} belongs to query {owner}, and this batch is {who}. {hint}")


def bucket_of(vb_id: int, buckets: int) -> int:
    """Return the bucket of a partition: neighbours are together."""
    return vb_id * buckets // NUM_VBUCKETS


def cuts_of(batch: pa.Table) -> Cuts:
    """Return the cut of every partition that a batch has rows of."""
    cut: dict[int, int] = {}
    high: dict[int, int] = {}
    is_rollback = pc.equal(batch["op"], "rollback")
    changes = batch.select(["vb", "seqno"]).filter(pc.invert(is_rollback))
    ranges = changes.group_by("vb").aggregate([("seqno", "min"), ("seqno", "max")])
    for row in ranges.to_pylist():
        cut[row["vb"]] = row["seqno_min"] - 1
        high[row["vb"]] = row["seqno_max"]
    for row in batch.select(["vb", "seqno"]).filter(is_rollback).to_pylist():
        vb_id, seqno = row["vb"], row["seqno"]
        assert cut.get(vb_id, seqno) >= seqno, "changes of a batch lie above its rollback"
        cut[vb_id] = seqno
        high.setdefault(vb_id, seqno)
    return Cuts(cut, high)


def changes_in(batch: pa.Table) -> pa.Table:
    """Return a batch without its rollback rows, by partition and seqno."""
    changes = batch.filter(pc.not_equal(batch["op"], "rollback"))
    return changes.sort_by([("vb", "ascending"), ("seqno", "ascending")])


def cut_partitions(cuts: Cuts, high: Mapping[int, int]) -> dict[int, int]:
    """Return the cuts of partitions of which the log has something above them."""
    return {vb_id: cut for vb_id, cut in cuts.cut.items() if cut < high.get(vb_id, 0)}


def above(log: pa.Table, cuts: Mapping[int, int]) -> pa.ChunkedArray:
    """Return which rows of a log are above the cuts, as a mask."""
    if not cuts:
        return pa.chunked_array([pa.repeat(False, log.num_rows)])
    vb_ids = pa.array(list(cuts), pa.int32())
    limits = pa.array(list(cuts.values()), pa.int64())
    limit = limits.take(pc.index_in(log["vb"], vb_ids).combine_chunks())
    return pc.fill_null(pc.greater(log["seqno"], limit), fill_value=False)


def identities(table: pa.Table) -> pa.ChunkedArray:
    """Return what tells a document from others: its key, with collections its collection too."""
    key = table["key"].cast(pa.binary())
    if "collection" not in table.column_names:
        return key
    # A collection's name has no zero byte.
    return pc.binary_join_element_wise(table["collection"].cast(pa.binary()), key, b"\0")


def newest(changes: pa.Table) -> pa.Table:
    """Return the newest version of each document among changes, removals too."""
    ordered = changes.sort_by("seqno")
    places = pa.table({"id": identities(ordered), _PLACE: pa.array(range(ordered.num_rows))})
    last = places.group_by("id").aggregate([(_PLACE, "max")])
    return ordered.take(last[f"{_PLACE}_max"])


def is_one_of(table: pa.Table, documents: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which rows are of these documents, as a mask."""
    return pc.is_in(identities(table), value_set=documents.combine_chunks())


def as_current(changes: pa.Table) -> pa.Table:
    """Return newest versions as rows of the current table: those that are documents."""
    return changes.filter(pc.equal(changes["op"], "set")).drop_columns(["op"])


def verdict(batch: pa.Table, dead: pa.Table, kept: pa.Table) -> pa.Table:
    """Return one row for every document that a batch concerns: its newest version now.

    `dead`: rows of the log above the cuts. `kept`: rows below, of the documents of `dead` at
    least. A document of which nothing is left is told as a delete.
    """
    changes = changes_in(batch)
    restored = kept.filter(is_one_of(kept, identities(dead)))
    left = newest(pa.concat_tables([restored, changes]))
    gone = newest(dead.filter(pc.invert(is_one_of(dead, identities(left)))))
    at = gone.column_names.index("op")
    deleted = pa.array(["delete"] * gone.num_rows, pa.string())
    return pa.concat_tables([left, gone.set_column(at, "op", deleted)])
