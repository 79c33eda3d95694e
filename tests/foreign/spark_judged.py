"""This project's Spark source for `dcpctl conformance consumer`: a query and its table on disk.

    dcpctl conformance consumer -- python tests/foreign/spark_judged.py

After each batch it writes the table's documents to DOCUMENTS_FILE. It is killed with the query's
checkpoint and the table in STATE_DIR, and goes on from there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

from pyspark.sql import DataFrame, SparkSession

from clients.spark import DcpDataSource, apply_changes, read_table

STATE = Path(os.environ["STATE_DIR"])
TABLE = str(STATE / "table")


def take(batch: DataFrame, batch_id: int) -> None:
    apply_changes(batch, batch_id, path=TABLE, format="delta", buckets=4)
    rows = read_table(batch.sparkSession, TABLE).select("key", "value").collect()
    shown = Path(os.environ["DOCUMENTS_FILE"])
    new = shown.with_suffix(".new")
    new.write_text(json.dumps({row["key"]: row["value"] for row in rows}))
    new.replace(shown)


def main() -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    spark.dataSource.register(DcpDataSource)
    changes = (
        spark.readStream.format("dcp")
        .option("servers", f"{os.environ['HOST']}:{os.environ['PORT']}")
        .option("keyFormat", "string")
        .option("valueFormat", "string")
        .option("numPartitions", "2")
        .load()
    )
    query = (
        changes.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(STATE / "checkpoint"))
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
