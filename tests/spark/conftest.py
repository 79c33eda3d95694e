"""One local Spark for all tests of the folder, and a server to read from.

`local[2,3]`: two tasks at a time, and a task that fails is tried again, as on a cluster. Python
workers import what this process imports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clients.spark.environment import JavaMissingError, check_java

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.log.level": "OFF",
}


def worker_environment() -> None:
    """What Python workers inherit: this interpreter, and where this process finds modules."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    paths = [str(ROOT), str(ROOT / "tests" / "spark"), *os.environ.get("PYTHONPATH", "").split(":")]
    os.environ["PYTHONPATH"] = ":".join(dict.fromkeys(filter(None, paths)))
    # Of a JVM that lives for seconds the second compiler and a parallel collector cost a quarter.
    os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def has_java() -> str:
    """Return why there is no Java that Spark can run on, "" if there is one."""
    try:
        check_java()
    except JavaMissingError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """A local Spark session with the source registered."""
    problem = has_java()
    if problem:
        pytest.skip(problem)
    worker_environment()
    from pyspark.sql import SparkSession

    from clients.spark import DcpDataSource

    builder = SparkSession.builder.master("local[2,3]").appName("tests")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    session = builder.getOrCreate()
    session.dataSource.register(DcpDataSource)
    yield session
    session.stop()


@pytest.fixture
def dcpd(tmp_path):
    """A server of its own for each test; what it logged is shown with a failure."""
    from clients.testing import DcpServer

    with DcpServer(tmp_path / "dcpd-data") as server:
        yield server
        sys.stderr.write(server.log_path.read_text())
