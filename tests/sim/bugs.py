"""Faults of the product that can be put in on purpose, to see that the checks find them.

A node looks them up by name. Each is one line that differs from the right way.
"""

from __future__ import annotations

BUGS: dict[str, str] = {
    "answers_before_sync": "a node answers before the sync of what it answers with",
    "streams_before_sync": "streams show changes before they are synced",
}
"""Name -> what is wrong."""
