"""Spark: `from dcpd.spark import DcpDataSource, apply_changes, read_table` (docs/spark.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import clients.spark as _spark

if TYPE_CHECKING:
    from clients.spark import *  # noqa: F403 - what checkers see; `__all__` has the names
else:

    def __getattr__(name: str) -> Any:
        """Return a public name. If the extra is not installed, the error says what to install."""
        return getattr(_spark, name)
