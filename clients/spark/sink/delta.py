"""A change log and a current table in Delta Lake, written with `deltalake` (no JVM packages).

    PATH/changes     the log; its column `applied` names the attempt that wrote a row
    PATH/current     the documents

Both tables are partitioned by bucket (a range of vbuckets). The driver writes all rows.

The two tables cannot be committed together, so the order matters. A repeated batch repairs what an
interrupted attempt left (docs/spark.md):
1. append the batch to the log; undone rows stay, so no information is lost yet;
2. merge into current, computed only from the batch and the log below the cuts;
3. delete the undone rows from the log.
The commit of step 1 stores the highest seqno of each vbucket in its metadata. If another program
committed last (for example OPTIMIZE), the seqnos are read from the log's rows. A property of the
log names the query that owns both tables (QUERY_PROPERTY).

If the batch ends at a consistent cut, a fourth commit, of no rows, says so in its metadata: the
log's version of that commit and the version of current that it names are the table at the cut.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from clients.errors import DcpdError
from clients.spark.sink.rules import (
    AtCut,
    TableWriter,
    above,
    as_current,
    at_cut,
    bucket_of,
    changes_in,
    check_kept,
    cut_partitions,
    cuts_of,
    filled,
    identities,
    is_compared,
    is_one_of,
    owner_after,
    verdict,
    without_cuts,
)

HIGH: Final = "dcpHigh"
"""Key in the commit metadata: JSON text, vbucket -> highest seqno."""
CUT: Final = "dcpCut"
"""Key in the metadata of a commit to the log: JSON text, a cut's closed time and the version of
current at it."""
QUERY_PROPERTY: Final = "dcpd.query"
"""The query that owns the tables. Delta refuses commits that are based on older metadata, so after
a change of owner the old query cannot write."""
APPLIED: Final = "applied"
_DESCRIPTION: Final = "Change log of dcpd in {buckets} buckets"
_BUCKETS: Final = re.compile(r"Change log of dcpd in (\d+) buckets")
"""The log's description. It holds the number of buckets, which overrides the option `buckets`."""
_PREDICATE_PARTITIONS: Final = 128
"""Maximum vbuckets in one predicate: each adds a term, and the expression is evaluated recursively.
"""


def apply_batch(
    batch: pa.Table, path: str, buckets: int, options: Mapping[str, str], writer: TableWriter
) -> AtCut:
    """Apply a batch; return where it ends.

    Raises DcpdError if the tables belong to another query.
    """
    at = at_cut(batch)
    writer.check(at)
    batch = without_cuts(batch)
    tables = _Tables(path, dict(options), buckets, writer)
    tables.own()
    try:
        for part in tables.parts(batch, path):
            _apply(part, tables)
        if at.time:
            tables.name_cut(at.time)
        return at
    except CommitFailedError:
        tables.own()  # raises a clear error if another query took over meanwhile
        raise


def _apply(batch: pa.Table, tables: _Tables) -> None:
    cuts = cuts_of(batch)
    high = tables.high()
    undone = cut_partitions(cuts, high)
    changes = changes_in(batch)
    dead, kept = tables.rows_of(undone, changes.schema)
    final = verdict(batch, dead, kept)
    attempt = secrets.token_hex(8)
    for vb_id, seqno in cuts.high.items():
        # Undone rows stay in the log until step 3, so no seqno may go down before that.
        high[vb_id] = max(seqno, high.get(vb_id, 0))
    tables.append(changes, attempt, high)
    tables.merge(final)
    if undone:
        high.update({vb_id: max(cuts.high[vb_id], undone[vb_id]) for vb_id in undone})
        tables.remove(undone, attempt, high)


class _Tables:
    """The two tables at a path."""

    def __init__(
        self, path: str, options: dict[str, str], buckets: int, writer: TableWriter
    ) -> None:
        self._path = path
        self._writer = writer
        self._changes_path = f"{path.rstrip('/')}/changes"
        self._current_path = f"{path.rstrip('/')}/current"
        self._options = options or None
        self._buckets = self._buckets_of_table() or buckets

    def _buckets_of_table(self) -> int:
        """Return the number of buckets the table was created with, 0 if unknown or no table."""
        table = self._open(self._changes_path)
        found = _BUCKETS.fullmatch(table.metadata().description or "") if table else None
        return int(found[1]) if found else 0

    def own(self) -> None:
        """Make the writer's query the owner. Raises DcpdError if another query owns the tables."""
        table = self._open(self._changes_path)
        if table is None:
            return
        owner = table.metadata().configuration.get(QUERY_PROPERTY, "")
        query = owner_after(owner, self._writer, self._path)
        if query != owner:
            table.alter.set_table_properties({QUERY_PROPERTY: query}, raise_if_not_exists=False)

    def _open(self, path: str) -> DeltaTable | None:
        if not DeltaTable.is_deltatable(path, self._options):
            return None
        return DeltaTable(path, storage_options=self._options)

    def parts(self, batch: pa.Table, path: str) -> Iterator[pa.Table]:
        """Yield a batch as it is applied: whole, or bucket by bucket if partitions were compared.
        Then the documents of one bucket are in memory.
        """
        if not batch.num_rows:
            return
        if not is_compared(batch):
            yield batch
            return
        numbers = pc.unique(self._bucketed(batch)["bucket"]).to_pylist()
        schema = batch.schema.remove(batch.schema.get_field_index("op"))
        for number in sorted(numbers):
            part = batch.filter(pc.equal(self._bucketed(batch)["bucket"], number))
            if is_compared(part):
                table, held = self._open(self._current_path), schema.empty_table()
                if table is not None:
                    dataset = table.to_pyarrow_dataset()
                    in_reach = ds.field("bucket") == number
                    held = dataset.to_table(columns=schema.names, filter=in_reach).cast(schema)
                part = filled(part, held, name_of(path))
            yield part

    def high(self) -> dict[int, int]:
        """Return the highest seqno in the log by vbucket."""
        table = self._open(self._changes_path)
        if table is None:
            return {}
        for commit in table.history(1):
            if HIGH in commit:
                return {int(vb_id): seqno for vb_id, seqno in json.loads(commit[HIGH]).items()}
        rows = table.to_pyarrow_dataset().to_table(columns=["vb", "seqno"])
        ends = rows.group_by("vb").aggregate([("seqno", "max")])
        return {row["vb"]: row["seqno_max"] for row in ends.to_pylist()}

    def rows_of(self, undone: Mapping[int, int], schema: pa.Schema) -> tuple[pa.Table, pa.Table]:
        """Return the log's rows above the cuts, and the rows of the same documents below them."""
        table = self._open(self._changes_path) if undone else None
        nothing = schema.empty_table()
        if table is None:
            return nothing, nothing
        dataset = table.to_pyarrow_dataset()
        buckets = sorted({bucket_of(vb_id, self._buckets) for vb_id in undone})
        in_reach = ds.field("bucket").isin(buckets) & ds.field("vb").isin(list(undone))
        rows = dataset.to_table(columns=schema.names, filter=in_reach).cast(schema)
        mask = above(rows, undone)
        dead, kept = rows.filter(mask), rows.filter(pc.invert(mask))
        return dead, kept.filter(is_one_of(kept, identities(dead)))

    def append(self, changes: pa.Table, attempt: str, high: Mapping[int, int]) -> None:
        """Step 1: append the batch to the log."""
        is_there = DeltaTable.is_deltatable(self._changes_path, self._options)
        if is_there and not changes.num_rows:
            return
        attempts = pa.array([attempt] * changes.num_rows, pa.string())
        rows = self._bucketed(changes).append_column(APPLIED, attempts)
        if not is_there:
            query = self._writer.query
            DeltaTable.create(
                self._changes_path, rows.schema, partition_by=["bucket"],
                storage_options=self._options, raise_if_key_not_exists=False,
                description=_DESCRIPTION.format(buckets=self._buckets),
                configuration={QUERY_PROPERTY: query} if query else None,
            )  # fmt: skip
        write_deltalake(
            self._changes_path, rows, mode="append", partition_by=["bucket"],
            storage_options=self._options, commit_properties=_metadata(high),
        )  # fmt: skip

    def merge(self, final: pa.Table) -> None:
        """Step 2: merge into current. `final`: the newest version of each document or deletion."""
        table = self._open(self._current_path)
        if table is None:
            write_deltalake(
                self._current_path, self._bucketed(as_current(final)), mode="error",
                partition_by=["bucket"], storage_options=self._options,
            )  # fmt: skip
            return
        source = self._bucketed(final)
        parts = ("bucket", "key", "collection")
        identity = [name for name in parts if name in source.column_names]
        columns = {name: f"s.{name}" for name in source.column_names if name != "op"}
        (
            table.merge(
                source, " AND ".join(f"t.{name} = s.{name}" for name in identity),
                source_alias="s", target_alias="t",
            )
            .when_matched_delete("s.op <> 'set'")
            .when_matched_update(columns, "s.op = 'set'")
            .when_not_matched_insert(columns, "s.op = 'set'")
            .execute()
        )  # fmt: skip

    def remove(self, undone: Mapping[int, int], attempt: str, high: Mapping[int, int]) -> None:
        """Step 3: delete the undone rows of earlier attempts from the log."""
        table = self._open(self._changes_path)
        assert table is not None
        items = sorted(undone.items())
        for at in range(0, len(items), _PREDICATE_PARTITIONS):
            part = items[at : at + _PREDICATE_PARTITIONS]
            terms = [
                f"(bucket = {bucket_of(vb_id, self._buckets)} AND vb = {vb_id} AND seqno > {cut})"
                for vb_id, cut in part
            ]
            is_last = at + _PREDICATE_PARTITIONS >= len(items)
            table.delete(
                f"{APPLIED} <> '{attempt}' AND ({' OR '.join(terms)})",
                commit_properties=_metadata(high) if is_last else None,
            )

    def name_cut(self, time: int) -> None:
        """Say that both tables are at a cut now."""
        log, current = self._open(self._changes_path), self._open(self._current_path)
        if log is None or current is None:
            return  # nothing was ever written
        cut = json.dumps({"time": time, "current": current.version()})
        none = log.to_pyarrow_dataset().schema.empty_table()
        write_deltalake(
            log, none, mode="append", storage_options=self._options,
            commit_properties=_metadata(self.high(), {CUT: cut}),
        )  # fmt: skip

    def _bucketed(self, rows: pa.Table) -> pa.Table:
        of_bucket = [bucket_of(vb_id, self._buckets) for vb_id in range(1024)]
        numbers = pa.array(of_bucket, pa.int32()).take(rows["vb"].combine_chunks())
        return rows.append_column("bucket", numbers)


def name_of(path: str) -> str:
    """Return the path of a table as the source's option `table` has it."""
    return path.rstrip("/") if "://" in path else str(Path(path).absolute())


def _metadata(high: Mapping[int, int], more: Mapping[str, str] | None = None) -> CommitProperties:
    text = json.dumps({str(vb_id): high[vb_id] for vb_id in sorted(high)})
    return CommitProperties(custom_metadata={HIGH: text, **(more or {})})


def versions_of_cuts(path: str, options: Mapping[str, str]) -> dict[int, dict[str, int]]:
    """Return the versions of `changes` and `current` at each cut that the log's history has.

    The keys are closed times, ascending.
    """
    log = DeltaTable(f"{path.rstrip('/')}/changes", storage_options=dict(options) or None)
    found = {}
    for commit in reversed(log.history()):
        if CUT in commit:
            cut = json.loads(commit[CUT])
            found[cut["time"]] = {"changes": commit["version"], "current": cut["current"]}
    return dict(sorted(found.items()))


def has_table(path: str) -> bool:
    """Whether there is a table of documents at a path."""
    return DeltaTable.is_deltatable(f"{path.rstrip('/')}/current")


def rows_of(path: str, table: str, options: Mapping[str, str], as_of: int | None = None) -> Any:
    """Return the rows of `changes` or `current`, without the sink's internal columns.

    `as_of`: the closed time of a cut. Raises DcpdError if the table has not kept it.
    """
    version = None
    if as_of is not None:
        cuts = versions_of_cuts(path, options)
        check_kept(as_of, list(cuts), path, "Delta keeps its history for 30 days, unless told so")
        version = cuts[as_of][table]
    name = f"{path.rstrip('/')}/{table}"
    delta = DeltaTable(name, version=version, storage_options=dict(options) or None)
    try:
        rows = delta.to_pyarrow_table()
    except FileNotFoundError as error:
        raise DcpdError(
            f"the files of version {delta.version()} of {name} are gone: {error}",
            hint="VACUUM removes what is older than its retention: read a newer cut.",
        ) from error
    own = [name for name in ("bucket", APPLIED) if name in rows.column_names]
    return rows.drop_columns(own)
