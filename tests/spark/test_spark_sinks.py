"""The sinks against a plain model: any sequence of batches, rollbacks, repeats and interruptions.

No Spark: the rules work on Arrow tables. The Parquet sink's writing of buckets and its commit are
those that executors and driver run; the Delta sink is the whole of it.
"""

from __future__ import annotations

import random
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.errors import DcpdError
from clients.spark.sink import delta, parquet
from clients.spark.sink.parquet import (
    MERGE_FILES,
    Outcome,
    TableFiles,
    TableManifest,
    commit,
    open_table,
    write_buckets,
)
from clients.spark.sink.rules import TableWriter

SCHEMA = pa.schema(
    [
        ("vb", pa.int32()), ("seqno", pa.int64()), ("vb_uuid", pa.int64()), ("op", pa.string()),
        ("key", pa.binary()), ("value", pa.binary()), ("cas", pa.int64()),
    ]
)  # fmt: skip
Change = tuple[int, int, int, str, bytes, bytes | None, int]


def table(rows) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


class Model:
    """A server's history of two partitions, and the batches that a query reads of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cas = 0
        self.logs: dict[int, list[Change]] = {1: [], 900: []}

    def write(self) -> None:
        for vb, log in self.logs.items():
            for _ in range(self.random.randint(0, 5)):
                self.cas += 1
                op = self.random.choice(["set", "set", "delete", "expire"])
                key = b"%d-%d" % (vb, self.random.randint(0, 5))
                value = b"%d" % self.cas if op == "set" else None
                log.append((vb, len(log) + 1, 7, op, key, value, self.cas))

    def branch(self, vb: int) -> int:
        at = self.random.randint(0, len(self.logs[vb]))
        del self.logs[vb][at:]
        return at

    def documents(self) -> dict[bytes, Change]:
        found: dict[bytes, Change] = {}
        for log in self.logs.values():
            for change in log:
                found.pop(change[4], None)
                if change[3] == "set":
                    found[change[4]] = change
        return found

    def changes(self) -> list[Change]:
        return sorted(change for log in self.logs.values() for change in log)


class ParquetTable:
    """The Parquet sink, as driver and executors use it."""

    def __init__(
        self, folder: Path, files: TableFiles | None = None, *, merge_files: int = MERGE_FILES
    ) -> None:
        self.path = folder
        self.merge_files = merge_files
        self.files = files or TableFiles(folder)
        self.writer = TableWriter()

    def manifest(self) -> TableManifest:
        found = parquet.load_manifest(self.files)
        assert found is not None
        return found

    def apply(self, batch: pa.Table, *, interrupted: int = 0) -> None:
        manifest = open_table(self.files, 4, self.writer)
        if not batch.num_rows:
            return
        outcomes = {}
        for told in write_buckets(batch, self.files, manifest, merge_files=self.merge_files):
            row = told.to_pylist()[0]
            outcomes[row["bucket"]] = parquet.msgspec.json.decode(row["outcome"], type=Outcome)
            if interrupted == 1:
                return
        if interrupted == 2:
            return
        commit(self.files, manifest, outcomes)

    def rows(self, name: str) -> list[dict]:
        files = parquet.files_of(self.path, name)
        return [row for file in files for row in parquet.pq.read_table(file).to_pylist()]


class DeltaTables:
    """The Delta sink."""

    def __init__(self, folder: Path, buckets: int = 4) -> None:
        self.path = str(folder)
        self.buckets = buckets
        self.writer = TableWriter()

    def apply(self, batch: pa.Table, *, interrupted: int = 0) -> None:
        steps = ("append", "merge", "remove")
        if not interrupted:
            delta.apply_batch(batch, self.path, self.buckets, {}, self.writer)
            return
        whole = getattr(delta._Tables, steps[interrupted - 1])

        def stop(*args) -> None:
            whole(*args)
            raise InterruptedError

        setattr(delta._Tables, steps[interrupted - 1], stop)
        try:
            delta.apply_batch(batch, self.path, self.buckets, {}, self.writer)
        except InterruptedError:
            pass
        finally:
            setattr(delta._Tables, steps[interrupted - 1], whole)

    def rows(self, name: str) -> list[dict]:
        return delta.rows_of(self.path, name, {}).to_pylist()


def check(sink, model: Model) -> None:
    log = sink.rows("changes")
    assert sorted((row["vb"], row["seqno"], row["cas"]) for row in log) == [
        (change[0], change[1], change[6]) for change in model.changes()
    ]
    current = sink.rows("current")
    assert {row["key"]: (row["vb"], row["seqno"], row["value"]) for row in current} == {
        key: (change[0], change[1], change[5]) for key, change in model.documents().items()
    }
    assert len(current) == len(model.documents())


def play(sink, seed: int, rounds: int) -> None:
    """Batches as a query reads them, some of them several times, some of them cut short.

    What a query may get for a batch: all of it; or, if history branched since, what both have in
    common. Then the next one begins with the rollback, wherever the table stands.
    """
    model = Model(seed)
    choose = model.random
    at = dict.fromkeys(model.logs, 0)
    """Up to where the query has planned."""
    back: dict[int, int] = {}
    applied = False
    for _ in range(rounds):
        model.write()
        start, rollbacks, back = {**at, **back}, back, {}
        ends = {vb: choose.randint(start[vb], len(log)) for vb, log in model.logs.items()}
        for _attempt in range(choose.randint(1, 3)):
            rows: list[Change] = [
                (vb, to, 7, "rollback", None, None, None)  # type: ignore[list-item]
                for vb, to in rollbacks.items()
            ]
            for vb, log in model.logs.items():
                # What is left of the planned part by now.
                rows += log[start[vb] : min(ends[vb], back.get(vb, ends[vb]))]
            choose.shuffle(rows)
            sink.apply(table(rows), interrupted=choose.choice([0, 0, 1, 2, 3]))
            if choose.random() < 0.4:
                vb = choose.choice(list(model.logs))
                to = model.branch(vb)
                if to < ends[vb]:
                    back[vb] = min(to, back.get(vb, to))
                model.write()
        rows = [(vb, to, 7, "rollback", None, None, None) for vb, to in rollbacks.items()]  # type: ignore[misc]
        for vb, log in model.logs.items():
            rows += log[start[vb] : min(ends[vb], back.get(vb, ends[vb]))]
        sink.apply(table(rows))
        applied = applied or bool(rows)
        at = ends
    rows = [(vb, to, 7, "rollback", None, None, None) for vb, to in back.items()]  # type: ignore[misc]
    for vb, log in model.logs.items():
        rows += log[{**at, **back}[vb] :]
    for _ in range(2):
        sink.apply(table(rows))
        if applied or rows:
            check(sink, model)


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_parquet_is_history_whatever_was_repeated_or_cut_short(seed):
    with tempfile.TemporaryDirectory() as folder:
        play(ParquetTable(Path(folder)), seed, rounds=8)


@settings(max_examples=6)
@given(st.integers(0, 2**32))
def test_delta_is_the_history_whatever_was_repeated_or_cut_short(seed):
    with tempfile.TemporaryDirectory() as folder:
        play(DeltaTables(Path(folder)), seed, rounds=4)


def sets(vb: int, first: int, count: int, keys: int = 1000) -> list[Change]:
    return [
        (vb, seqno, 7, "set", b"%d" % (seqno % keys), b"v%d" % seqno, seqno)
        for seqno in range(first, first + count)
    ]


def test_a_batch_touches_the_buckets_of_its_partitions_only(tmp_path):
    sink = ParquetTable(tmp_path / "table")
    sink.apply(table(sets(1, 1, 10) + sets(900, 1, 10)))
    before = sink.manifest()
    sink.apply(table(sets(900, 11, 1)))
    after = sink.manifest()
    assert after.files[0] == before.files[0]
    assert after.files[3].changes[0] == before.files[3].changes[0], "the log is added to"
    assert len(after.files[3].changes) == 2


def test_delta_leaves_the_files_of_other_buckets_alone(tmp_path):
    sink = DeltaTables(tmp_path / "table")
    rows = [row for vb in (1, 300, 600, 900) for row in sets(vb, 1, 10)]
    # A key is in one partition alone.
    sink.apply(table([(*row[:4], b"%d-" % row[0] + row[4], *row[5:]) for row in rows]))

    def files(name: str) -> set[str]:
        return set(delta.DeltaTable(f"{sink.path}/{name}").file_uris())

    before = {name: files(name) for name in ("current", "changes")}
    sink.apply(table([(900, 11, 7, "set", b"900-3", b"new", 11)]))
    sink.apply(table([(900, 9, 7, "rollback", None, None, None)]))
    for name, old in before.items():
        assert len(old) == 4
        assert {file for file in old if "bucket=3" not in file} < files(name)


def test_the_log_stays_in_few_files_and_replaced_files_go(tmp_path):
    sink = ParquetTable(tmp_path / "table")
    for number in range(70):
        sink.apply(table(sets(1, 1 + number, 1)))
    manifest = sink.manifest()
    assert len(manifest.files[0].changes) < 20
    assert len(sink.rows("changes")) == 70
    on_disk = {f"{file.parent.name}/{file.name}" for file in sink.path.glob("*/*.parquet")}
    assert on_disk == manifest.named() | set(manifest.replaced)


def test_two_writers_are_noticed(tmp_path):
    sink = ParquetTable(tmp_path / "table")
    manifest = TableManifest(4)
    sink.apply(table(sets(1, 1, 1)))
    with pytest.raises(DcpdError, match="another program wrote"):
        commit(sink.files, manifest, {})


def test_a_table_of_another_format_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"buckets": 4, "format": 99}')
    with pytest.raises(DcpdError, match="format 99"):
        parquet.load_manifest(TableFiles(tmp_path))
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(DcpdError, match="not the manifest"):
        parquet.load_manifest(TableFiles(tmp_path))


def test_delta_finds_how_far_the_log_goes_after_others_commit(tmp_path):
    sink = DeltaTables(tmp_path / "table")
    sink.apply(table(sets(1, 1, 10)))
    delta.DeltaTable(f"{sink.path}/changes").delete("seqno > 1000")
    delta.DeltaTable(f"{sink.path}/changes").optimize.compact()
    sink.apply(table([(1, 4, 7, "rollback", None, None, None), *sets(1, 5, 2)]))
    assert sorted(row["seqno"] for row in sink.rows("changes")) == [1, 2, 3, 4, 5, 6]
    assert len(sink.rows("current")) == 6


def test_documents_of_several_collections_are_told_apart(tmp_path):
    def rows(*changes) -> pa.Table:
        plain = table([change[:7] for change in changes])
        return plain.append_column("collection", pa.array([change[7] for change in changes]))

    a = (1, 1, 7, "set", b"k", b"in a", 1, "s.a")
    b = (1, 2, 7, "set", b"k", b"in b", 2, "s.b")
    gone = (1, 3, 7, "delete", b"k", None, 3, "s.a")
    for sink in (ParquetTable(tmp_path / "p"), DeltaTables(tmp_path / "d")):
        sink.apply(rows(a, b))
        assert len(sink.rows("current")) == 2
        sink.apply(rows(gone))
        assert [row["value"] for row in sink.rows("current")] == [b"in b"]


def test_table_keeps_number_of_buckets_that_it_was_made_with(tmp_path):
    """Another number would look for documents where they are not, and add them twice."""
    for buckets in (4, 7):
        DeltaTables(tmp_path / "d", buckets).apply(table(sets(900, 1, 10)))
    sink = DeltaTables(tmp_path / "d", 16)
    sink.apply(table([(900, 5, 7, "rollback", None, None, None), *sets(900, 6, 2)]))
    assert sorted(row["seqno"] for row in sink.rows("changes")) == list(range(1, 8))
    assert sorted(row["seqno"] for row in sink.rows("current")) == list(range(1, 8))


def test_values_null_and_columns_of_types_go_through_the_sinks(tmp_path):
    """A document whose value is no JSON is there, with null; a removal of it takes it away."""
    shape = pa.struct([("n", pa.int32()), ("tags", pa.list_(pa.string()))])
    moment = pa.timestamp("us", tz="UTC")
    at = datetime(2013, 1, 5, 10, tzinfo=UTC)

    def rows(*changes) -> pa.Table:
        plain = table([(1, seqno, 7, op, key, None, seqno) for seqno, op, key, _ in changes])
        values = pa.array([value for *_, value in changes], shape)
        plain = plain.set_column(plain.column_names.index("value"), "value", values)
        return plain.append_column("expiry", pa.array([None] * len(changes), moment)).append_column(
            "time", pa.array([at] * len(changes), moment)
        )

    for sink in (ParquetTable(tmp_path / "p"), DeltaTables(tmp_path / "d")):
        sink.apply(rows((1, "set", b"a", {"n": 1, "tags": ["x", None]}), (2, "set", b"b", None)))
        sink.apply(rows((3, "set", b"a", None), (4, "set", b"c", {"n": None, "tags": None})))
        found = {row["key"]: (row["value"], row["time"], row["expiry"]) for row in
                 sink.rows("current")}  # fmt: skip
        assert found == {
            b"a": (None, at, None), b"b": (None, at, None),
            b"c": ({"n": None, "tags": None}, at, None),
        }  # fmt: skip
        sink.apply(rows((5, "delete", b"b", None)))
        sink.apply(rows((3, "rollback", None, None)))
        assert {row["key"] for row in sink.rows("current")} == {b"a", b"b"}
        assert len(sink.rows("changes")) == 3
