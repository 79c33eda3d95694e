"""The table equals the server, whatever happened: branches, crashes, failures, restarts, repeats.

Every round writes, perhaps branches history, and runs the query once with one thing going wrong;
then the next round's run goes on from the checkpoint. The last run is left alone. What can go
wrong is listed in `TROUBLES`; each is chosen in turn, so that all of them happen.
"""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from spark_truth import table_differences

from clients.errors import NotFoundError
from clients.spark import apply_changes
from clients.testing import ServerRefusedError

KEYS = [b"key-%d" % number for number in range(60)]


class BrokenError(Exception):
    """What the tests break on purpose."""


class Workload:
    """Random writes and branches; the server itself is the model."""

    def __init__(self, server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.branches = 0

    def write(self, count: int) -> None:
        with self.server.connect() as kv:
            for _ in range(count):
                key = self.random.choice(KEYS)
                if self.random.random() < 0.2:
                    try:
                        kv.delete(key)
                    except NotFoundError:
                        continue
                else:
                    kv.set(key, b"%x" % self.random.getrandbits(64))

    def branch(self, count: int) -> None:
        with self.server.connect() as kv:
            used = {vb: seqno for vb, seqno in kv.get_all_vb_seqnos().items() if seqno}
        for vb in self.random.sample(sorted(used), min(count, len(used))):
            try:
                self.server.branch(vb, at=self.random.randint(0, used[vb]))
            except ServerRefusedError:
                continue  # a purge took away the versions below
            self.branches += 1


class Query:
    """The query under test: its checkpoint, its table, and what shall go wrong in a run."""

    def __init__(self, spark, server, folder: Path, kind: str, options: dict[str, str]) -> None:
        self.spark, self.server, self.kind, self.options = spark, server, kind, options
        self.path, self.checkpoint = str(folder / "table"), folder / "checkpoint"
        if "table" in options:
            self.options = {**options, "table": self.path}
        self.folder = folder
        self.runs = 0
        self.failed = 0
        self.before = self.after = lambda: None
        self.task_fails = False

    def run(self) -> None:
        """Read everything that is there now; what goes wrong on purpose ends the run early."""
        self.runs += 1
        frame = self.spark.readStream.format("dcp").option("servers", self.server.address)
        query = (
            frame.options(**self.options)
            .load()
            .writeStream.foreachBatch(self.apply)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            self.failed += 1
            if "BrokenError" not in str(error):
                raise
        finally:
            self.before = self.after = lambda: None
            self.task_fails = False

    def apply(self, batch_df, batch_id: int) -> None:
        # Once per run: a branch in every batch would give a next batch for ever.
        before, self.before = self.before, lambda: None
        after, self.after = self.after, lambda: None
        before()
        if self.task_fails:
            marker = self.folder / f"failed-{self.runs}"
            batch_df = batch_df.mapInArrow(partial(fail_once, str(marker)), batch_df.schema)
        apply_changes(batch_df, batch_id, path=self.path, format=self.kind, buckets=4)
        after()

    def forget_commit(self) -> None:
        """What a crash after the batch and before Spark's commit leaves: the batch is repeated."""
        commits = list((self.checkpoint / "commits").glob("[0-9]*"))
        if commits:
            last = max(commits, key=lambda file: int(file.name))
            last.unlink()
            last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def fail_once(marker: str, batches):
    """A task that fails in its middle the first time that it runs."""
    for batch in batches:
        yield batch
        if not Path(marker).exists():
            Path(marker).touch()
            raise BrokenError("this task fails once")


def broken() -> None:
    raise BrokenError("broken on purpose")


def fail_before(query: Query, load: Workload) -> None:
    query.before = broken


def fail_after(query: Query, load: Workload) -> None:
    query.after = broken


def fail_after_and_branch(query: Query, load: Workload) -> None:
    """The table has the batch, Spark does not know, and history branches below its end."""

    def branch_and_fail() -> None:
        load.branch(8)
        broken()

    query.after = branch_and_fail


def branch_before_reading(query: Query, load: Workload) -> None:
    """The batch is planned, and by the time that it is read its end is on a dead branch."""

    def branch() -> None:
        load.branch(8)
        load.write(30)

    query.before = branch


def branch_twice_before_reading(query: Query, load: Workload) -> None:
    def branch() -> None:
        load.branch(20)
        load.write(40)
        load.branch(20)

    query.before = branch


def forget_commit(query: Query, load: Workload) -> None:
    query.run()
    query.forget_commit()


def forget_commit_and_branch(query: Query, load: Workload) -> None:
    query.run()
    query.forget_commit()
    load.branch(10)
    load.write(30)


def kill_server_while_reading(query: Query, load: Workload) -> None:
    def kill() -> None:
        load.server.kill()
        # Tasks find it gone; it is back while they try again.
        threading.Timer(0.3, load.server.start).start()

    query.before = kill


def cut_connections(query: Query, load: Workload) -> None:
    load.server.fault(opcode="DCP_STREAM_REQ", disconnect=True, count=3)


def refuse_for_now(query: Query, load: Workload) -> None:
    load.server.fault(opcode="DCP_STREAM_REQ", status="ETMPFAIL", count=10)


def task_fails(query: Query, load: Workload) -> None:
    query.task_fails = True


def purge(query: Query, load: Workload) -> None:
    """Deletions are gone between plan and read: partitions have to be read from the beginning."""

    def purge_some() -> None:
        with load.server.connect() as kv:
            used = [vb for vb, seqno in kv.get_all_vb_seqnos().items() if seqno]
        for vb in load.random.sample(used, 5):
            load.server.purge(vb)

    query.before = purge_some


def purge_and_compare(query: Query, load: Workload) -> None:
    """Deletions that the query has not seen are gone before it plans: it compares."""
    load.write(60)
    purge(query, load)
    query.before()
    purge(query, load)
    query.before()
    query.before = lambda: None


def compare_and_branch(query: Query, load: Workload) -> None:
    """History branches above the end of a batch that compares, and below what it reads."""
    purge_and_compare(query, load)

    def branch() -> None:
        load.write(60)
        load.branch(8)

    query.after = branch


def compact(query: Query, load: Workload) -> None:
    """What was replaced is gone between plan and read, and deletions too: floors are above ends."""

    def compact_all() -> None:
        load.write(60)
        load.server.ask("POST", "/api/v1/compact", {"history": "0s", "purge_age": "0s"})

    query.before = compact_all


TROUBLES = (
    fail_before, branch_before_reading, fail_after, forget_commit, kill_server_while_reading,
    forget_commit_and_branch, task_fails, cut_connections, purge, branch_twice_before_reading,
    refuse_for_now, fail_after_and_branch,
)  # fmt: skip


AT_THE_EDGES = (
    branch_before_reading, fail_after_and_branch, forget_commit_and_branch, purge,
    branch_twice_before_reading,
)  # fmt: skip
"""Where formats and de-duplicated streams differ from the first case: what is undone or repeated.
A server that is gone, or a batch that fails early, is the same for all."""


COMPARING = (
    purge_and_compare, forget_commit_and_branch, compare_and_branch, fail_after_and_branch,
    compare_and_branch, branch_before_reading, purge_and_compare, branch_twice_before_reading,
)  # fmt: skip


@pytest.mark.crash
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "options", "troubles"),
    [
        ("parquet", {}, TROUBLES),
        # Compaction takes the history away that a change log is compared with.
        (
            "parquet",
            {"history": "false", "maxRowsPerTrigger": "100"},
            (compact, *AT_THE_EDGES, compact),
        ),
        ("delta", {"numPartitions": "2"}, AT_THE_EDGES),
        ("parquet", {"table": "its own"}, COMPARING),
    ],
    ids=["parquet", "parquet-deduplicated", "delta", "parquet-compared"],
)
def test_the_table_equals_the_server_whatever_happens(
    spark, dcpd, tmp_path, kind, options, troubles
):
    load = Workload(dcpd, seed=len(str(options)))
    query = Query(spark, dcpd, tmp_path, kind, options)
    for number, trouble in enumerate(troubles):
        load.write(60)
        if number % 3 == 2:
            load.branch(6)
            load.write(20)
        trouble(query, load)
        query.run()
        dcpd.clear_faults()
    query.run()
    assert query.failed == sum("fail_" in trouble.__name__ for trouble in troubles)
    assert load.branches >= 20
    # The log of a partition that was compared begins anew.
    history = options.get("history") != "false" and "table" not in options
    assert table_differences(spark, dcpd, query.path, kind=kind, history=history) == []
    if "table" in options:
        offsets = [file.read_text() for file in (query.checkpoint / "offsets").glob("[0-9]*")]
        assert any("compared=" in text for text in offsets)
