"""Flights into a Spark table, with a history branch in the middle, and a plot of the lag.

    python examples/demos/spark_ingest.py                       # 7,000 flights, into ./spark-ingest
    python examples/demos/spark_ingest.py --rows 5000 --format delta --folder /tmp/flights

What happens, with real processes only
1. `dcpd` starts on free ports. Spark starts with `local[2]` and runs a continuous query: every
   second it applies a batch of changes of all partitions to a table;
2. half of the flights are written, one document per aircraft, so later flights update earlier ones;
3. some partitions get a history branch, as after a failover to a copy that was behind: their last
   changes are undone. The query gets rollback rows, and the table goes back too;
4. the other half is written; in the middle of it the query is stopped and restarted from its
   checkpoint;
5. after the branch and at the end the table is compared with the server, key by key.

The folder then has the table, the checkpoint, `lag.png` and the server's data. The exit code is 0
only if all documents are equal. Needs: pip install '.[spark,examples]', and Java 17 or newer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flight_data import DataError, Flight, read_flights
from processes import ProcessFailedError, ServerProcess
from writer import WriteFailedError, Writer

from dcpd import DcpdError, KvClient, vbucket_of
from dcpd.spark import (
    DcpDataSource,
    JavaMissingError,
    apply_changes,
    check_java,
    read_table,
    seqnos_read,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

JANUARY = Path(__file__).resolve().parents[2] / "tests" / "data" / "flights-2013-01.csv.zip"
BRANCHES = 12
BATCH_ROWS = 500
PAUSE_S = 0.1
"""Pause between two writes, so that the lag becomes visible."""
SAMPLE_S = 0.25
PATIENCE_S = 120.0
FAILURES = (DataError, WriteFailedError, ProcessFailedError, DcpdError, JavaMissingError)


class Sample(NamedTuple):
    """The lag of the table at a moment."""

    at_s: float
    changes: int


class Ingest:
    """The query, and what is recorded about it."""

    def __init__(self, spark: SparkSession, address: str, folder: Path, format: str) -> None:  # noqa: A002
        self.spark = spark
        self.format = format
        self.table = str(folder / "table")
        self.samples: list[Sample] = []
        self.marks: list[tuple[float, str]] = []
        """Moments to mark in the plot, and what happened then."""
        self._address = address
        self._checkpoint = str(folder / "checkpoint")
        self._query: StreamingQuery | None = None
        self._began = time.monotonic()
        self._seqnos: dict[int, int] = {}

    def start(self) -> None:
        """Run the query, from its checkpoint if there is one."""
        changes = self.spark.readStream.format("dcp").option("servers", self._address).load()
        self._query = (
            changes.writeStream.foreachBatch(
                partial(apply_changes, path=self.table, format=self.format)
            )
            .option("checkpointLocation", self._checkpoint)
            .trigger(processingTime="1 second")
            .start()
        )

    def stop(self) -> None:
        """Stop the query."""
        if self._query is not None:
            self._query.stop()

    def mark(self, text: str) -> None:
        """Record and print an event."""
        self.marks.append((time.monotonic() - self._began, text))
        print(f"  {text}", flush=True)

    def look(self, high: Mapping[int, int]) -> int:
        """Return how many changes the table lacks, and record it."""
        assert self._query is not None
        failure = self._query.exception()
        if failure is not None:
            raise DcpdError(f"the query ended: {str(failure)[:2000]}")
        progress = self._query.lastProgress
        if progress is not None:
            self._seqnos = seqnos_read(progress) or self._seqnos
        missing = sum(abs(seqno - self._seqnos.get(vb_id, 0)) for vb_id, seqno in high.items())
        self.samples.append(Sample(time.monotonic() - self._began, missing))
        return missing

    def documents(self) -> dict[bytes, bytes]:
        """Return what the table holds."""
        rows = read_table(self.spark, self.table, format=self.format).collect()
        return {bytes(row["key"]): bytes(row["value"]) for row in rows}


async def watch(ingest: Ingest, kv: KvClient) -> None:
    """Record the lag repeatedly."""
    while True:
        await asyncio.to_thread(ingest.look, await kv.get_all_vb_seqnos())
        await asyncio.sleep(SAMPLE_S)


async def caught_up(ingest: Ingest, kv: KvClient) -> None:
    """Return when the table has everything."""
    deadline = time.monotonic() + PATIENCE_S
    while await asyncio.to_thread(ingest.look, await kv.get_all_vb_seqnos()):
        if time.monotonic() > deadline:
            raise DcpdError("the query did not catch up")
        await asyncio.sleep(SAMPLE_S)


async def write(writer: Writer, flights: list[Flight]) -> None:
    """Write flights slowly enough to watch."""
    for at in range(0, len(flights), BATCH_ROWS):
        await writer.write(flights[at : at + BATCH_ROWS])
        await asyncio.sleep(PAUSE_S)


async def branch(server: ServerProcess, writer: Writer, kv: KvClient) -> int:
    """Take the busiest partitions back to half of their changes. Return how many are undone."""
    now = await kv.get_all_vb_seqnos()
    busiest = sorted(now, key=lambda vb_id: now[vb_id])[-BRANCHES:]
    for vb_id in busiest:
        await asyncio.to_thread(server.branch, vb_id, now[vb_id] // 2)
    undone = [key for key in writer.expected if vbucket_of(key) in busiest]
    left = await kv.get_many(undone)
    for key in undone:
        del writer.expected[key]
    writer.expected.update((key, found.value) for key, found in left.items())
    return sum(now[vb_id] - now[vb_id] // 2 for vb_id in busiest)


async def differences(ingest: Ingest, writer: Writer, kv: KvClient) -> list[bytes]:
    """Return the keys on which table, server and writer disagree."""
    held = await asyncio.to_thread(ingest.documents)
    keys = held.keys() | writer.expected.keys()
    stored = {key: found.value for key, found in (await kv.get_many(keys)).items()}
    return sorted(
        key for key in keys if not held.get(key) == stored.get(key) == writer.expected.get(key)
    )


async def play(ingest: Ingest, server: ServerProcess, flights: list[Flight]) -> list[bytes]:
    """Run the steps of the module's docstring. Return the keys that differ."""
    half, part = len(flights) // 2, len(flights) * 3 // 4
    async with KvClient.connect(server.address) as kv:
        writer = Writer(kv, BATCH_ROWS)
        ingest.start()
        watching = asyncio.create_task(watch(ingest, kv))
        try:
            ingest.mark("writing begins")
            await write(writer, flights[:half])
            await caught_up(ingest, kv)
            undone = await branch(server, writer, kv)
            ingest.mark(f"history branch: {undone:,} changes undone in {BRANCHES} partitions")
            await caught_up(ingest, kv)
            problems = await differences(ingest, writer, kv)
            print(f"  the table after it: {len(problems)} differences", flush=True)
            await write(writer, flights[half:part])
            await asyncio.to_thread(ingest.stop)
            ingest.start()
            ingest.mark("query stopped, and started from its checkpoint")
            await write(writer, flights[part:])
            await caught_up(ingest, kv)
            ingest.mark("everything is in the table")
            return problems + await differences(ingest, writer, kv)
        finally:
            watching.cancel()
            await asyncio.to_thread(ingest.stop)


def draw(ingest: Ingest, path: Path) -> None:
    """Plot the lag over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    axes.plot(
        [sample.at_s for sample in ingest.samples],
        [sample.changes for sample in ingest.samples],
        drawstyle="steps-post",
    )
    for at_s, text in ingest.marks:
        axes.axvline(at_s, color="0.5", linestyle="--", linewidth=1)
        axes.annotate(
            text, (at_s, 0.97), xycoords=("data", "axes fraction"), xytext=(-3, 0),
            textcoords="offset points", fontsize=8, va="top", ha="right", rotation=90,
        )  # fmt: skip
    axes.set(xlabel="seconds", ylabel="changes that the table lacks", title="Lag of the table")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def spark_session() -> SparkSession:
    """Start Spark on this machine, listening on loopback only."""
    from pyspark.sql import SparkSession

    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("spark_ingest")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    spark.dataSource.register(DcpDataSource)
    return spark


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--csv", type=Path, default=JANUARY, help="flights, zipped or not")
    parser.add_argument("--rows", type=int, help="only the first flights")
    parser.add_argument("--format", choices=["parquet", "delta"], default="parquet")
    parser.add_argument(
        "--folder", type=Path, default=Path("spark-ingest"), help="recreated by each run"
    )
    options = parser.parse_args()
    server = ServerProcess(options.folder / "data")
    try:
        flights = read_flights(options.csv)[: options.rows]
        marker = options.folder / "table"
        if options.folder.exists() and any(options.folder.iterdir()) and not marker.exists():
            raise DataError(f"{options.folder} has other content: choose another --folder")
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        server.start()
        spark = spark_session()
        ingest = Ingest(spark, server.address, options.folder, options.format)
        problems = asyncio.run(play(ingest, server, flights))
        draw(ingest, options.folder / "lag.png")
        count = len(ingest.documents())
        spark.stop()
    except FAILURES as error:
        print(f"spark_ingest: {error}", file=sys.stderr)
        return 1
    finally:
        server.stop()
    for key in problems[:20]:
        print(f"  differs: {key!r}")
    equal = "all equal" if not problems else f"{len(problems)} differ"
    print(f"{len(flights):,} flights, {count:,} documents in {ingest.table}: {equal}")
    print(f"lag over time: {options.folder / 'lag.png'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
