"""A worker's Python without the package is named before Spark fails with a missing module."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession
from test_spark_sinks import table

from clients import DcpdError
from clients.spark import WorkerPythonError, check_workers, environment, read_table
from clients.spark.sink import delta
from clients.spark.sink.rules import TableWriter
from clients.spark.source import DcpDataSource, DcpStreamReader

ROOT = Path(__file__).parents[2]


def interpreter(folder: Path, script: str, name: str = "python3") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_this_interpreter_is_fine(monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    check_workers()


def test_another_interpreter_with_the_package_is_fine(monkeypatch, tmp_path):
    python = interpreter(tmp_path, f'exec "{sys.executable}" "$@"', "python-of-workers")
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    check_workers()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f'exec "{sys.executable}" -S -I "$@"', "has no package clients, pyspark, pyarrow"),
        ("echo no such thing >&2; exit 3", "no such thing"),
    ],
)
def test_an_interpreter_without_the_package_is_named(monkeypatch, tmp_path, script, why):
    python = interpreter(tmp_path, script)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerPythonError) as caught:
        check_workers()
    assert str(python) in str(caught.value)
    assert why in str(caught.value)
    assert f"Set PYSPARK_PYTHON={sys.executable}" in str(caught.value)


def test_an_interpreter_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", "no-such-python")
    with pytest.raises(WorkerPythonError, match="'no-such-python', which is not here"):
        check_workers()


def test_registering_the_source_warns_once(monkeypatch, tmp_path):
    python = interpreter(tmp_path, f'exec "{sys.executable}" -S -I "$@"')
    monkeypatch.chdir(tmp_path)
    session = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec=str(python)))
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: session)
    environment.warn_about_workers.cache_clear()
    with pytest.warns(RuntimeWarning, match="Set PYSPARK_PYTHON=") as warned:
        assert DcpDataSource.name() == "dcp"
    assert len(warned) == 1
    assert DcpDataSource.name() == "dcp"


def test_in_a_worker_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(environment, "check_workers", lambda *_: pytest.fail("it checks"))
    environment.warn_about_workers.cache_clear()
    assert DcpDataSource.name() == "dcp"
    environment.warn_about_workers.cache_clear()


def test_spark_takes_no_metrics_from_a_python_source():
    """docs/spark.md says so. If a Spark does, `rows_behind` belongs into its UI."""
    hooks = {name for base in DcpStreamReader.__mro__ for name in vars(base)}
    assert not [name for name in hooks if "metric" in name.lower()]


# -- tables whose format is not named --------------------------------------------------------------


def test_read_table_finds_a_delta_table(spark, tmp_path):
    rows = [(1, 1, 7, "set", b"k", b"v", 5)]
    delta.apply_batch(table(rows), str(tmp_path), 4, {}, TableWriter("query"))
    (row,) = read_table(spark, str(tmp_path)).collect()
    assert (row.key, row.value) == (b"k", b"v")
    assert read_table(spark, str(tmp_path), "changes").count() == 1
    with pytest.raises(DcpdError, match="is a Delta table: leave out format='parquet'"):
        read_table(spark, str(tmp_path), format="parquet")
    with pytest.raises(DcpdError, match="there is no table at"):
        read_table(spark, str(tmp_path / "other"))
