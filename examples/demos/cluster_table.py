"""A Spark query that keeps a table equal to a cluster, until its standard input ends.

    python examples/demos/cluster_table.py 127.0.0.1:11210 FOLDER

Then the query reads what there is up to now, from its checkpoint, and the table's documents are
written to FOLDER/table.sqlite for others to compare. Needs PySpark, and Java 17 or newer.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import Any

from spark_ingest import spark_session

from dcpd.spark import JavaMissingError, apply_changes, read_table

TRIGGER = "5 seconds"
"""Each batch rewrites the files that it touches: a small machine has other things to do, too."""


def query(spark: Any, server: str, folder: Path, **trigger: Any) -> Any:
    """Start the query from its checkpoint, if there is one."""
    changes = spark.readStream.format("dcp").option("servers", server).load()
    return (
        changes.writeStream.foreachBatch(partial(apply_changes, path=str(folder / "table")))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(**trigger)
        .start()
    )


def export(spark: Any, folder: Path) -> None:
    """Write the table's documents to a SQLite file."""
    rows = read_table(spark, str(folder / "table")).select("key", "value").collect()
    with sqlite3.connect(folder / "table.sqlite") as db:
        db.execute("CREATE TABLE document (key BLOB PRIMARY KEY, value BLOB)")
        db.executemany("INSERT INTO document VALUES (?, ?)", map(tuple, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server", help="HOST:PORT, or several separated by commas")
    parser.add_argument("folder", type=Path, help="for the table and the query's checkpoint")
    options = parser.parse_args()
    try:
        spark = spark_session()
        following = query(spark, options.server, options.folder, processingTime=TRIGGER)
        sys.stdin.read()
        if following.exception() is None:
            following.stop()
            query(spark, options.server, options.folder, availableNow=True).awaitTermination()
            export(spark, options.folder)
        spark.stop()
    except JavaMissingError as error:
        print(f"table: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if following.exception() is not None:
        print(f"table: the query ended: {following.exception()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
