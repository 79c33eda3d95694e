"""Rates of the Spark source, compared with what limits it.

    .venv/bin/python -m benchmarks.spark --changes 1000000
    .venv/bin/python -m benchmarks.spark --changes 100000 --cuts

It measures rows a second from changes (128-byte values, each key once) into Parquet on local[2],
and compares them with
- the same rows read from one local Parquet file and written to another by the same Spark;
- the plain Python consumer that keeps the newest value of each key;
- the source alone (rows counted), on local[2] and on local[1];
and the cost of an empty micro-batch. With --cuts only a stream into a table is measured, with and
without the option consistent in turn, and the driver's plan of such a batch. Each Spark has its own
process; figures are medians of --runs.
Needs: pip install '.[spark]', Java 17 or newer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

VALUE_BYTES: Final = 128
WRITE_ROWS: Final = 100_000
EMPTY_POLLS: Final = 30


async def store(address: str, changes: int) -> None:
    """Write documents, each once."""
    from clients.kv.client import KvClient

    value = bytes(range(VALUE_BYTES))
    async with KvClient.connect(address) as kv:
        for start in range(0, changes, WRITE_ROWS):
            stop = min(start + WRITE_ROWS, changes)
            await kv.set_many([(b"key:%d" % number, value) for number in range(start, stop)])


def session(cores: int) -> Any:
    """Start Spark with this many cores, on loopback only."""
    from pyspark.sql import SparkSession

    from clients.spark import DcpDataSource

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{cores}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", str(cores))
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    spark.dataSource.register(DcpDataSource)
    return spark


def timed(work: Callable[[], Any], runs: int) -> float:
    """Return the median time of some runs, after one run that does not count."""
    work()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def in_turn(works: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Return the median time of each, one after the other; the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def in_spark(
    address: str, cores: int, changes: int, runs: int, folder: Path, *, only_cuts: bool
) -> dict[str, float]:
    """Measure in this process; return seconds by name."""
    spark = session(cores)

    def source(**options: str) -> Any:
        reader = spark.read.format("dcp").option("servers", address).options(**options)
        return reader.option("numPartitions", str(cores)).load()

    def write(frame: Any, name: str) -> None:
        frame.write.mode("overwrite").parquet(str(folder / name))

    def once(name: str, sink: Callable[[Any, int], None], **options: str) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        reader = spark.readStream.format("dcp").option("servers", address).options(**options)
        query = (
            reader.option("numPartitions", str(cores)).load()
            .writeStream.foreachBatch(sink).option("checkpointLocation", str(folder / name / "c"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()

    def apply(batch_df: Any, batch_id: int) -> None:
        from clients.spark import apply_changes

        apply_changes(batch_df, batch_id, path=str(folder / "table" / "t"), buckets=4)

    if only_cuts:
        works = {"without": {}, "consistent": {"consistent": "true"}}
        times = in_turn(
            {name: partial(once, "table", apply, **given) for name, given in works.items()}, runs
        )
        spark.stop()
        plans = in_turn(
            {name: partial(plan, address, **given) for name, given in works.items()}, EMPTY_POLLS
        )
        return {
            **{f"table, {name}": seconds for name, seconds in times.items()},
            **{f"its plan, {name}": seconds for name, seconds in plans.items()},
        }
    write(source(), "source")
    assert spark.read.parquet(str(folder / "source")).count() == changes
    results = {
        "counted": timed(lambda: source().count(), runs),
        "into Parquet": timed(lambda: write(source(), "copy"), runs),
    }
    if cores > 1:
        results["Parquet to Parquet"] = timed(
            lambda: write(spark.read.parquet(str(folder / "source")), "copy"), runs
        )
        results["stream into Parquet"] = timed(
            lambda: once("stream", lambda frame, _: write(frame, "copy")), runs
        )
        results["stream into a table (apply_changes)"] = timed(lambda: once("table", apply), runs)
        results["micro-batch with nothing to read"] = empty_batch(address)
    spark.stop()
    return results


def plan(address: str, **options: str) -> None:
    """Plan a batch as the driver does it."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from pyspark.sql.types import StructType

    from clients.spark.options import parse_options
    from clients.spark.source import DcpStreamReader

    reader = DcpStreamReader(parse_options({"servers": address, **options}), StructType([]))
    reader.latestOffset({}, ReadAllAvailable())
    reader.stop()


def empty_batch(address: str) -> float:
    """Return the time of the driver's half of the source when there is nothing new: a full survey,
    the comparison of all partitions, and both offsets as JSON.
    """
    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from pyspark.sql.types import StructType

    from clients.spark.options import parse_options
    from clients.spark.source import DcpStreamReader

    settings = parse_options({"servers": address})
    # Every poll is a full one.
    reader = DcpStreamReader(settings, StructType([]), look_again_s=0.0)
    end = reader.latestOffset({}, ReadAllAvailable())
    times = []
    for _ in range(EMPTY_POLLS):
        began = time.perf_counter()
        start = json.loads(json.dumps(end))
        assert reader.latestOffset(start, ReadAllAvailable()) is start
        json.dumps(start)
        json.dumps(reader.reportLatestOffset())
        times.append(time.perf_counter() - began)
    reader.stop()
    return statistics.median(times)


def consumer_s(port: int, changes: int, runs: int) -> float:
    """Return the seconds of the plain Python consumer."""
    command = [sys.executable, "-m", "benchmarks.catchup", "dcpd", "--port", str(port),
               "--changes", str(changes)]  # fmt: skip

    def run() -> float:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        seconds: float = json.loads(told)["seconds"]
        return seconds

    return statistics.median(run() for _ in range(runs))


def measure(changes: int, runs: int, *, only_cuts: bool) -> None:
    """Start a server, fill it, measure everything, print a table."""
    from clients.testing import DcpServer

    with DcpServer() as server, tempfile.TemporaryDirectory() as folder:
        asyncio.run(store(server.address, changes))
        rows = []
        if not only_cuts:
            rows.append(("Python consumer, newest value", consumer_s(server.port, changes, runs)))
        for cores in (2,) if only_cuts else (2, 1):
            told = subprocess.run(
                [sys.executable, "-m", "benchmarks.spark", "--address", server.address,
                 "--cores", str(cores), "--changes", str(changes), "--runs", str(runs),
                 "--folder", folder, *(["--cuts"] if only_cuts else [])],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            found = json.loads(told.splitlines()[-1])
            rows += [(f"local[{cores}]: {name}", seconds) for name, seconds in found.items()]
    print(f"{changes:,} changes, {VALUE_BYTES}-byte values, medians of {runs}")
    for name, seconds in rows:
        is_batch = "nothing to read" in name
        rate = "" if is_batch else f"{changes / seconds:12,.0f} rows/s"
        print(f"{name:<50} {seconds:9.3f} s {rate}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.spark")
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cuts", action="store_true", help="only the cost of consistent")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address is None:
        measure(options.changes, options.runs, only_cuts=options.cuts)
        return 0
    found = in_spark(
        options.address, options.cores, options.changes, options.runs, options.folder,
        only_cuts=options.cuts,
    )  # fmt: skip
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
