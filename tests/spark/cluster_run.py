"""One query on real executors, processes of their own: run by test_spark_cluster.py.

    python cluster_run.py ADDRESS FOLDER

Prints what the executors were, and the rows of the table, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from clients.spark import DcpDataSource, apply_changes, read_table


def main() -> None:
    address, folder = sys.argv[1], Path(sys.argv[2])
    home = str(Path(pyspark.__file__).parent)
    os.environ.update(
        SPARK_HOME=home, SPARK_LOCAL_IP="127.0.0.1", SPARK_WORKER_DIR=str(folder / "workers"),
        PYSPARK_PYTHON=sys.executable,
    )  # fmt: skip
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    spark.dataSource.register(DcpDataSource)
    os.chdir(folder)
    path = "table"  # a relative one: the driver's, though executors work in folders of their own
    query = (
        spark.readStream.format("dcp")
        .option("servers", address)
        .option("numPartitions", "2")
        .load()
        .writeStream.foreachBatch(partial(apply_changes, path=path, buckets=4))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    current = read_table(spark, path)
    rows = {row["key"].decode(): row["value"].decode() for row in current.collect()}
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    print(json.dumps({"executors": executors, "rows": rows}))
    spark.stop()


main()
