"""How a batch changes a change log and a current table: rules over Arrow tables. Pure.

For each vbucket a batch has changes, or a rollback row to R and the changes above R. Its *cut* is
R, or the seqno before its first change. One rule applies to every batch, new or repeated:

    log:      delete the rows above the cut, then append the changes of the batch
    current:  for each key that was deleted or appended, take its newest version in the log

The rule is idempotent, it undoes exactly, and it repairs what an interrupted attempt left.
docs/spark.md shows why, for every set of rows that a repeated batch can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from clients.errors import DcpdError
from vbucket.model.ids import NUM_VBUCKETS

_PLACE: Final = "__place"


class Cuts(NamedTuple):
    """By vbucket: the seqno down to which a batch cuts the log, and its highest seqno."""

    cut: dict[int, int]
    high: dict[int, int]


class AtCut(NamedTuple):
    """Which cut the source names at the end of a batch (docs/spark.md)."""

    is_told: bool
    """Whether the source was asked for cuts (option consistent)."""
    time: int
    """The closed time of the cut; 0: the batch ends at none."""


def at_cut(rows: pa.Table) -> AtCut:
    """Return where a batch ends, from its rows with op "cut": each task that read it has one."""
    times = set(rows.filter(pc.equal(rows["op"], "cut"))["cas"].to_pylist())
    (time,) = times if len(times) == 1 else (None,)
    return AtCut(bool(times), time or 0)


def without_cuts(rows: pa.Table) -> pa.Table:
    """Return a batch without the rows that name its cut."""
    return rows.filter(pc.not_equal(rows["op"], "cut"))


def is_compared(rows: pa.Table) -> bool:
    """Whether a batch has partitions that were compared with the table (option `table`)."""
    return bool(pc.any(pc.equal(rows["op"], "compared")).as_py())


def filled(batch: pa.Table, current: pa.Table, path: str) -> pa.Table:
    """Return a batch as if each compared partition had been read from 0: with the documents of
    `current` that are the server's. `current`: at least the documents of these partitions.

    A document keeps its seqno, unless that is of another history and above the batch's end: it must
    be below all that later batches cut off. Raises DcpdError for a comparison with another table.
    """
    compared = batch.filter(pc.equal(batch["op"], "compared"))
    tables = set(compared["key"].cast(pa.string()).to_pylist())
    if tables != {path}:
        raise DcpdError(
            f"the source compares with {', '.join(sorted(tables))}, and this table is {path}",
            hint="Use the same path in the source's option table and in apply_changes.",
        )
    ends = dict(zip(compared["vb"].to_pylist(), compared["seqno"].to_pylist(), strict=True))
    vb_ids = pa.array(list(ends), pa.int32())
    limits = pa.array(list(ends.values()), pa.int64())
    told = batch.filter(pc.not_equal(batch["op"], "compared"))
    others = told.filter(pc.is_in(told["vb"], value_set=vb_ids))
    kept = current.filter(pc.is_in(current["vb"], value_set=vb_ids))
    kept = kept.filter(pc.invert(is_one_of(kept, identities(others))))
    limit = limits.take(pc.index_in(kept["vb"], vb_ids).combine_chunks())
    at = kept.column_names.index("seqno")
    kept = kept.set_column(at, "seqno", pc.min_element_wise(kept["seqno"], limit))
    kept = kept.append_column("op", pa.array(["set"] * kept.num_rows, pa.string()))
    nothing = [None] * len(ends)
    backs = {"vb": vb_ids, "seqno": [0] * len(ends), "op": ["rollback"] * len(ends)}
    rollbacks = pa.table(
        [pa.array(backs.get(field.name, nothing), field.type) for field in batch.schema],
        schema=batch.schema,
    )
    left = told.filter(pc.not_equal(told["op"], "gone"))
    return pa.concat_tables([rollbacks, kept.select(batch.column_names).cast(batch.schema), left])


def check_kept(as_of: int, kept: Sequence[int], path: str, hint: str) -> None:
    """Raise DcpdError that names what is missing if a table has not kept a cut.

    `kept`: closed times, ascending. `hint`: how to keep more of them.
    """
    if as_of in kept:
        return
    table = f"the table at {path}"
    if not kept:
        what = f"{table} has kept no cut: its query needs the option consistent"
    elif as_of < kept[0]:
        what = f"{table} has not kept the cut {as_of}: its oldest is {kept[0]}. {hint}"
    elif as_of > kept[-1]:
        what = f"{table} is not at {as_of} yet: its newest cut is {kept[-1]}"
    else:
        next_one = next(time for time in kept if time > as_of)
        before = max(time for time in kept if time < as_of)
        what = f"{as_of} is no cut of {table}: those next to it are {before} and {next_one}"
    raise DcpdError(what, hint="table_cuts(path) lists the cuts that a table has kept.")


class TableWriter(NamedTuple):
    """The query that applies a batch."""

    query: str = ""
    """The query's id from its checkpoint; "" if unknown."""
    take_over_from: str = ""
    """Id of a query whose table this one may take over."""
    needs_cuts: bool = False
    """Refuse batches of a source without the option consistent."""

    def check(self, at: AtCut) -> None:
        """Raise DcpdError if a batch must name its cut and does not."""
        if self.needs_cuts and not at.is_told:
            raise DcpdError(
                "the batch names no cut: consistent=True needs a source with the option consistent",
                hint="Use .option('consistent', 'true'), and pass all of its rows.",
            )


def owner_after(owner: str, writer: TableWriter, path: str) -> str:
    """Return the query that owns a table from now on. `owner` is the current one, "" for none.

    Raises DcpdError if another query owns it. Otherwise each query would resume from its own
    checkpoint and undo the newer rows of the other.
    """
    if owner in {"", writer.query} or (writer.query and writer.take_over_from == owner):
        return writer.query
    who = f"from query {writer.query}" if writer.query else "from outside a streaming query"
    hint = (
        "Resume the query that owns the table from its checkpoint, or use another path. If that"
        f" query is stopped for good, use take_over_from={owner!r} with a new checkpoint and"
        " startingOffsets=earliest."
    )
    if not writer.query:
        hint = f"If the batch belongs to that query, pass query={owner!r}."
    raise DcpdError(f"the table {path} belongs to query {owner}, and this batch is {who}. {hint}")


def bucket_of(vb_id: int, buckets: int) -> int:
    """Return the bucket of a vbucket. Neighbours share a bucket."""
    return vb_id * buckets // NUM_VBUCKETS


def cuts_of(batch: pa.Table) -> Cuts:
    """Return the cut of each vbucket in a batch."""
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
        assert cut.get(vb_id, seqno) >= seqno, "the changes of a batch are above its rollback"
        cut[vb_id] = seqno
        high.setdefault(vb_id, seqno)
    return Cuts(cut, high)


def changes_in(batch: pa.Table) -> pa.Table:
    """Return a batch without rollback rows, sorted by vbucket and seqno."""
    changes = batch.filter(pc.not_equal(batch["op"], "rollback"))
    return changes.sort_by([("vb", "ascending"), ("seqno", "ascending")])


def cut_partitions(cuts: Cuts, high: Mapping[int, int]) -> dict[int, int]:
    """Return the cuts of vbuckets whose log may have rows above the cut."""
    return {vb_id: cut for vb_id, cut in cuts.cut.items() if cut < high.get(vb_id, 0)}


def above(log: pa.Table, cuts: Mapping[int, int]) -> pa.ChunkedArray:
    """Return a mask of the log's rows above the cuts."""
    if not cuts:
        return pa.chunked_array([pa.repeat(False, log.num_rows)])
    vb_ids = pa.array(list(cuts), pa.int32())
    limits = pa.array(list(cuts.values()), pa.int64())
    limit = limits.take(pc.index_in(log["vb"], vb_ids).combine_chunks())
    return pc.fill_null(pc.greater(log["seqno"], limit), fill_value=False)


def identities(table: pa.Table) -> pa.ChunkedArray:
    """Return the identity of each row's document: its key, with its collection if there is one."""
    key = table["key"].cast(pa.binary())
    if "collection" not in table.column_names:
        return key
    # Names of collections contain no zero byte, so it separates them from the key.
    return pc.binary_join_element_wise(table["collection"].cast(pa.binary()), key, b"\0")


def newest(changes: pa.Table) -> pa.Table:
    """Return the newest version of each document among changes, deletions included."""
    ordered = changes.sort_by("seqno")
    places = pa.table({"id": identities(ordered), _PLACE: pa.array(range(ordered.num_rows))})
    last = places.group_by("id").aggregate([(_PLACE, "max")])
    return ordered.take(last[f"{_PLACE}_max"])


def is_one_of(table: pa.Table, documents: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which rows are of these documents, as a mask."""
    return pc.is_in(identities(table), value_set=documents.combine_chunks())


def as_current(changes: pa.Table) -> pa.Table:
    """Return the rows of the current table: newest versions without deletions."""
    return changes.filter(pc.equal(changes["op"], "set")).drop_columns(["op"])


def verdict(batch: pa.Table, dead: pa.Table, kept: pa.Table) -> pa.Table:
    """Return the newest version of each document that a batch affects.

    `dead`: rows of the log above the cuts. `kept`: rows below the cuts, at least those of the
    documents in `dead`. A document without any version left becomes a delete.
    """
    changes = changes_in(batch)
    restored = kept.filter(is_one_of(kept, identities(dead)))
    left = newest(pa.concat_tables([restored, changes]))
    gone = newest(dead.filter(pc.invert(is_one_of(dead, identities(left)))))
    at = gone.column_names.index("op")
    deleted = pa.array(["delete"] * gone.num_rows, pa.string())
    return pa.concat_tables([left, gone.set_column(at, "op", deleted)])
