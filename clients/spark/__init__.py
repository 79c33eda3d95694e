"""Spark: a source that streams changes and survives rollbacks, and tables that follow it.

    spark.dataSource.register(DcpDataSource)
    changes = spark.readStream.format("dcp").option("servers", "127.0.0.1:11210").load()
    changes.writeStream.foreachBatch(partial(apply_changes, path="table")).start()

Needs the extra `spark` and Java 17 or newer: docs/spark.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clients.install_hint import install_hint

if TYPE_CHECKING:
    from clients.spark.environment import (
        JavaMissingError,
        WorkerPythonError,
        check_java,
        check_workers,
    )
    from clients.spark.fetch_core import StreamGoneError
    from clients.spark.offset import rows_behind, seqnos_read
    from clients.spark.options import OptionError
    from clients.spark.sink.apply import apply_changes, read_table, table_cuts
    from clients.spark.source import DcpDataSource

__all__ = [
    "DcpDataSource", "JavaMissingError", "OptionError", "StreamGoneError", "WorkerPythonError",
    "apply_changes", "check_java", "check_workers", "read_table", "rows_behind", "seqnos_read",
    "table_cuts",
]  # fmt: skip

_PLACES: Final = {
    "DcpDataSource": "source",
    "JavaMissingError": "environment",
    "OptionError": "options",
    "StreamGoneError": "fetch_core",
    "WorkerPythonError": "environment",
    "apply_changes": "sink.apply",
    "check_java": "environment",
    "check_workers": "environment",
    "read_table": "sink.apply",
    "rows_behind": "offset",
    "seqnos_read": "offset",
    "table_cuts": "sink.apply",
}
_PACKAGES: Final = frozenset({"pyspark", "pyarrow", "pandas", "numpy", "deltalake", "py4j"})


def __getattr__(name: str) -> Any:
    """Import a name on demand. If the extra is not installed, say what to install."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"{__name__}.{_PLACES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        raise ModuleNotFoundError(
            f"dcpd.spark needs the package {error.name}: {install_hint('spark')}"
            " (and Java 17 or newer)",
            name=error.name,
        ) from error
    return getattr(module, name)
