"""The checks of servers. Importing this fills `check.CHECKS`."""

from __future__ import annotations

from importlib import import_module
from typing import Final

MODULES: Final = (
    "connection", "documents", "opening", "requests", "streams", "contents", "extras", "history",
    "collections",
)  # fmt: skip
"""In the order of the report."""

for _name in MODULES:
    import_module(f"{__name__}.{_name}")
