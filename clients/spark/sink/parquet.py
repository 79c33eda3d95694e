"""A change log and a current table in Parquet files. Executors write them, a manifest lists them.

    PATH/manifest.json                 lists the valid files; replaced atomically after a batch
    PATH/changes/B-....parquet         the log of bucket B: several files, merged over time
    PATH/current/B-....parquet         the current documents of bucket B: one file

A bucket is a range of vbuckets. Parquet files cannot be changed, so a batch adds a log file to each
bucket that it affects, and writes a new current file for it.

Invariants
- files are written once; names are not used again;
- only files in the manifest are valid. A failed batch leaves unused files and no other trace;
- files are durable before the manifest that names them, and a manifest is durable before the files
  of older manifests are removed. So a power cut leaves a complete table, with every batch that was
  reported to Spark as done;
- files that a batch replaced are removed after the next batch, so readers have time to finish;
- files that a kept cut names are valid: it is the table as of that cut, whatever came later;
- a table belongs to one query (`rules.owner_after`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clients.errors import DcpdError
from clients.spark.sink.rules import (
    AtCut,
    Cuts,
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

FORMAT: Final = 3
"""Format 1 has no owner; the next query that writes becomes the owner. Format 2 keeps no cuts."""
MANIFEST: Final = "manifest.json"
FOLDERS: Final = ("changes", "current")
MERGE_FILES: Final = 8
"""This many log files of one level in a bucket are merged into one file of the next level."""
SWEEP_BATCHES: Final = 64
"""Batches between two searches for unused files of failed attempts."""
SWEEP_AGE_S: Final = 3600.0
"""Minimum age of unused files before they are removed. No attempt should take that long."""
WRITTEN: Final = "bucket INT, outcome STRING"
"""Schema of the rows that a task returns to the driver, as Spark DDL."""
CUT_ROW: Final = -1
"""The bucket of a returned row that has the closed time of the batch's cut."""


class LogFile(msgspec.Struct, frozen=True):
    """A log file of a bucket. `level`: how often its rows were merged."""

    name: str
    level: int = 0


class Bucket(msgspec.Struct, frozen=True):
    """The files of a bucket. `current` is "" if the bucket has no documents."""

    changes: tuple[LogFile, ...] = ()
    current: str = ""


class KeptCut(msgspec.Struct, frozen=True):
    """The valid files of the table as of a cut."""

    time: int
    """Its closed time."""
    files: dict[int, Bucket]


class TableManifest(msgspec.Struct, frozen=True):
    """The state of a table."""

    buckets: int
    format: int = FORMAT
    generation: int = 0
    """Number of applied batches, repeated ones included."""
    files: dict[int, Bucket] = {}
    high: dict[int, int] = {}
    """By vbucket: an upper bound of the seqnos in the log."""
    replaced: tuple[str, ...] = ()
    """Files that the last batch replaced."""
    query: str = ""
    """The query that owns the table; "" for none."""
    cuts: tuple[KeptCut, ...] = ()
    """The cuts that are kept, in their order."""

    def named(self) -> set[str]:
        """Return the names of all valid files."""
        states = (self.files, *(cut.files for cut in self.cuts))
        buckets = [bucket for files in states for bucket in files.values()]
        logs = {file.name for bucket in buckets for file in bucket.changes}
        return logs | {bucket.current for bucket in buckets if bucket.current}


class Outcome(msgspec.Struct, frozen=True):
    """The result of a task for one bucket."""

    bucket: Bucket
    high: dict[int, int]
    unused: tuple[str, ...] = ()
    """Files that the task wrote, then merged into others."""


def load_manifest(files: TableFiles) -> TableManifest | None:
    """Return a table's manifest, None if there is no table. Raises DcpdError."""
    try:
        text = files.read(MANIFEST)
    except FileNotFoundError:
        return None
    try:
        manifest = msgspec.json.decode(text, type=TableManifest)
    except msgspec.DecodeError as error:
        raise DcpdError(
            f"{files.path / MANIFEST} is not the manifest of a table: {error}"
        ) from None
    if not 1 <= manifest.format <= FORMAT:
        raise DcpdError(
            f"{files.path} has format {manifest.format}; this version supports 1 to {FORMAT}",
            hint="Use the version that wrote it, or start a new table.",
        )
    return manifest


def apply_batch(
    batch_df: Any, path: Path, buckets: int, writer: TableWriter, keep_cuts: int
) -> AtCut:
    """Apply a batch (a DataFrame): one Spark job writes files, then the manifest lists them.

    Return where it ends. Raises DcpdError if the table has an unknown format, belongs to another
    query, or another program writes to it at the same time.
    """
    files = TableFiles(path)
    manifest = open_table(files, buckets, writer)
    schema = _arrow_schema(batch_df)
    spark = batch_df.sparkSession
    tasks = min(manifest.buckets, int(spark.conf.get("spark.sql.shuffle.partitions")))
    count = manifest.buckets

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arrived = list(batches)
        if arrived:  # in the session's time zone; the cast to UTC keeps the instants
            rows = pa.Table.from_batches(arrived).cast(schema)
            cut = at_cut(rows)
            if cut.is_told:
                yield _returned(CUT_ROW, str(cut.time))
            yield from write_buckets(without_cuts(rows), files, manifest)

    bucketed = batch_df.repartition(tasks, (batch_df["vb"] * count / 1024).cast("int"))
    rows = bucketed.mapInArrow(write, WRITTEN).collect()
    told = [int(row["outcome"]) for row in rows if row["bucket"] == CUT_ROW]
    at = AtCut(bool(told), told[0] if len(set(told)) == 1 else 0)
    writer.check(at)
    outcomes = {
        row["bucket"]: msgspec.json.decode(row["outcome"], type=Outcome)
        for row in rows
        if row["bucket"] != CUT_ROW
    }
    if outcomes or at.time:
        commit(files, manifest, outcomes, at.time, keep_cuts)
    return at


def open_table(files: TableFiles, buckets: int, writer: TableWriter) -> TableManifest:
    """Create the folders; return the table's manifest with its owner from now on.

    Raises DcpdError.
    """
    manifest = load_manifest(files) or TableManifest(buckets)
    query = owner_after(manifest.query, writer, str(files.path))
    for folder in FOLDERS:
        files.make_folder(folder)
    return msgspec.structs.replace(manifest, format=FORMAT, query=query)


def _arrow_schema(batch_df: Any) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(batch_df.schema, timezone="UTC")


def write_buckets(
    rows: pa.Table, files: TableFiles, manifest: TableManifest, *, merge_files: int = MERGE_FILES
) -> Iterator[pa.RecordBatch]:
    """Apply a task's rows, which are whole buckets; yield one row per bucket (`WRITTEN`)."""
    present = sorted({bucket_of(vb, manifest.buckets) for vb in pc.unique(rows["vb"]).to_pylist()})
    of_bucket = [bucket_of(vb_id, manifest.buckets) for vb_id in range(1024)]
    numbers = pa.array(of_bucket, pa.int32()).take(rows["vb"].combine_chunks())
    for number in present:
        batch = rows.filter(pc.equal(numbers, number))
        outcome = apply_to_bucket(batch, files, number, manifest, merge_files)
        yield _returned(number, msgspec.json.encode(outcome).decode())


def _returned(bucket: int, outcome: str) -> pa.RecordBatch:
    """Return a row for the driver (`WRITTEN`)."""
    return pa.RecordBatch.from_pydict(
        {"bucket": pa.array([bucket], pa.int32()), "outcome": pa.array([outcome])}
    )


def apply_to_bucket(
    batch: pa.Table, files: TableFiles, number: int, manifest: TableManifest, merge_files: int
) -> Outcome:
    """Write the bucket's files after a batch, durably; return their names."""
    before = manifest.files.get(number, Bucket())
    folder = _Folder(files, number)
    if is_compared(batch):
        batch = filled(batch, _documents(folder, before, batch.schema), str(files.path))
    cuts = cuts_of(batch)
    undone = cut_partitions(cuts, manifest.high)
    logs = before.changes
    changes = changes_in(batch)
    dead = kept = changes.slice(0, 0)
    if undone:
        logs, dead, kept = _cut_logs(folder, logs, undone, changes.schema)
    final = verdict(batch, dead, kept)
    if changes.num_rows:
        logs = (*logs, LogFile(folder.write("changes", changes)))
    current = before.current
    if final.num_rows:
        rows = as_current(final)
        if current:
            held = folder.read(current, rows.schema)
            untouched = held.filter(pc.invert(is_one_of(held, identities(final))))
            rows = pa.concat_tables([untouched, rows])
        current = folder.write("current", rows.sort_by("vb")) if rows.num_rows else ""
    bucket = Bucket(_merged(folder, logs, changes.schema, merge_files), current)
    kept_files = {current, *(file.name for file in bucket.changes)}
    folder.sync(kept_files)
    return Outcome(bucket, _high(cuts), tuple(sorted(folder.written - kept_files)))


def _documents(folder: _Folder, bucket: Bucket, schema: pa.Schema) -> pa.Table:
    """Return the documents of a bucket, as `current` has them."""
    schema = schema.remove(schema.get_field_index("op"))
    return folder.read(bucket.current, schema) if bucket.current else schema.empty_table()


def _high(cuts: Cuts) -> dict[int, int]:
    return {vb_id: max(seqno, cuts.cut[vb_id]) for vb_id, seqno in cuts.high.items()}


def _cut_logs(
    folder: _Folder, logs: Iterable[LogFile], undone: Mapping[int, int], schema: pa.Schema
) -> tuple[tuple[LogFile, ...], pa.Table, pa.Table]:
    """Return the log files without rows above the cuts, those rows, and the older versions of their
    documents.
    """
    files: list[LogFile] = []
    dead: list[pa.Table] = []
    parts: list[pa.Table] = []
    for file in logs:
        rows = folder.read(file.name, schema)
        mask = above(rows, undone)
        lost = rows.filter(mask)
        if lost.num_rows:
            rows = rows.filter(pc.invert(mask))
            dead.append(lost)
            if rows.num_rows:
                files.append(LogFile(folder.write("changes", rows), file.level))
        else:
            files.append(file)
        parts.append(rows.filter(pc.is_in(rows["vb"], pa.array(list(undone), pa.int32()))))
    nothing = schema.empty_table()
    gone = pa.concat_tables([nothing, *dead])
    kept = pa.concat_tables([nothing, *parts])
    return tuple(files), gone, kept.filter(is_one_of(kept, identities(gone)))


def _merged(
    folder: _Folder, logs: tuple[LogFile, ...], schema: pa.Schema, merge_files: int
) -> tuple[LogFile, ...]:
    """Merge log files if there are many. A row is rewritten O(log n) times."""
    files = list(logs)
    level = 0
    while files and level <= max(file.level for file in files):
        same = [file for file in files if file.level == level]
        if len(same) >= merge_files:
            rows = pa.concat_tables([folder.read(file.name, schema) for file in same])
            rows = rows.sort_by([("vb", "ascending"), ("seqno", "ascending")])
            files = [file for file in files if file.level != level]
            files.append(LogFile(folder.write("changes", rows), level + 1))
        level += 1
    return tuple(files)


class _Folder:
    """The files of a bucket."""

    def __init__(self, files: TableFiles, number: int) -> None:
        self._files = files
        self._number = number
        self.written: set[str] = set()
        """Names of files written through this object."""

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """Return a file's rows."""
        table = pq.read_table(self._files.source(name), partitioning=None)
        return table.select(schema.names).cast(schema)

    def write(self, folder: str, rows: pa.Table) -> str:
        """Write rows to a new file; return its name."""
        name = f"{folder}/{self._number:04}-{secrets.token_hex(8)}.parquet"
        self._files.create(name, lambda file: pq.write_table(rows, file, compression="zstd"))
        self.written.add(name)
        return name

    def sync(self, names: Collection[str]) -> None:
        """Make these files durable, as far as this object wrote them."""
        written = sorted(self.written.intersection(names))
        for name in written:
            self._files.sync(name)
        for folder in sorted({name.partition("/")[0] for name in written}):
            self._files.sync_folder(folder)


def commit(
    files: TableFiles,
    before: TableManifest,
    outcomes: Mapping[int, Outcome],
    cut_time: int = 0,
    keep_cuts: int = 1,
) -> None:
    """Replace the manifest, which makes a batch valid; remove the files replaced before it.

    `cut_time`: the closed time of the cut that the table is at then; 0: it is at none.
    """
    now = load_manifest(files)
    if (now.generation if now else 0) != before.generation:
        raise DcpdError(
            f"another program wrote to {files.path} while this batch was applied",
            hint="Only one query may write to a table.",
        )
    named = {**before.files, **{number: item.bucket for number, item in outcomes.items()}}
    high = dict(before.high)
    for outcome in outcomes.values():
        high.update(outcome.high)
    cuts = before.cuts
    if cut_time:
        others = [cut for cut in cuts if cut.time < cut_time]
        cuts = (*others, KeptCut(cut_time, named))[-keep_cuts:]
    after = msgspec.structs.replace(
        before, generation=before.generation + 1, files=named, high=dict(sorted(high.items())),
        cuts=cuts,
    )  # fmt: skip
    unused = {name for outcome in outcomes.values() for name in outcome.unused}
    replaced = tuple(sorted((before.named() | unused) - after.named()))
    after = msgspec.structs.replace(after, replaced=replaced)
    temporary = f"{MANIFEST}.{secrets.token_hex(8)}"
    files.create(temporary, lambda file: file.write(msgspec.json.encode(after)))
    files.sync(temporary)
    files.replace(temporary, MANIFEST)
    files.sync_folder()
    for name in before.replaced:
        files.remove(name)
    if after.generation % SWEEP_BATCHES == 0:
        _sweep(files, after)


def _sweep(files: TableFiles, manifest: TableManifest) -> None:
    """Remove old files that the manifest does not name. Failed attempts left them."""
    known = manifest.named() | set(manifest.replaced)
    oldest_s = time.time() - SWEEP_AGE_S
    for pattern in ("*/*.parquet", f"{MANIFEST}.*"):
        for name in files.older_than(pattern, oldest_s):
            if name not in known:
                files.remove(name)


def cuts_of_table(path: Path) -> list[int]:
    """Return the closed times of the cuts that a table has kept, ascending."""
    return [cut.time for cut in _manifest_of(path).cuts]


def _manifest_of(path: Path) -> TableManifest:
    manifest = load_manifest(TableFiles(path))
    if manifest is None:
        raise DcpdError(f"there is no table at {path}: {MANIFEST} is missing")
    return manifest


def files_of(path: Path, table: str, as_of: int | None = None) -> list[str]:
    """Return the files of `current` or `changes`, ordered by bucket, now or as of a cut."""
    manifest = _manifest_of(path)
    valid = manifest.files
    if as_of is not None:
        kept = {cut.time: cut.files for cut in manifest.cuts}
        hint = f"It keeps {len(kept)} of them; apply_changes(..., keep_cuts=N) keeps N"
        check_kept(as_of, list(kept), str(path), hint)
        valid = kept[as_of]
    names: list[str] = []
    for _, bucket in sorted(valid.items()):
        if table == "changes":
            names += [file.name for file in bucket.changes]
        elif bucket.current:
            names.append(bucket.current)
    return [str(path / name) for name in names]


class TableFiles:
    """The file operations of a Parquet table. Each may raise OSError, and a power cut can happen
    between any two.

    Names are relative to the table: `manifest.json`, `changes/0003-....parquet`. As in POSIX, the
    content of a file is durable after `sync`, and its name after `sync_folder`. Tests replace this
    class with one that loses part of the unsynced data. Driver and executors share the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make_folder(self, name: str) -> None:
        """Create a folder of the table and its parents, durably."""
        path = self.path / name
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return (self.path / name).read_bytes()

    def source(self, name: str) -> Any:
        """Return the path of a file, for pyarrow to read."""
        return self.path / name

    def create(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Write a new file."""
        with (self.path / name).open("wb") as file:
            write(file)

    def sync(self, name: str) -> None:
        """Make a file's bytes durable."""
        _sync(self.path / name)

    def sync_folder(self, name: str = "") -> None:
        """Make the names in a folder durable."""
        _sync(self.path / name)

    def replace(self, old: str, new: str) -> None:
        """Rename a file over another one."""
        (self.path / old).replace(self.path / new)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def older_than(self, pattern: str, moment_s: float) -> list[str]:
        """Return the files that match a pattern and were last modified before a time."""
        found = self.path.glob(pattern)
        return [
            path.relative_to(self.path).as_posix()
            for path in found
            if path.stat().st_mtime < moment_s
        ]


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
