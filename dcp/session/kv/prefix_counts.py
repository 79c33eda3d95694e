"""Counts gets, hits, stores and deletes by key prefix: memcached's `stats detail`. Sans-IO.

The sessions of a node share one table. It is off until somebody turns it on (STAT "detail on"), and
costs nothing until then. A key's prefix ends before its first colon; other keys are not counted.

Limit: PREFIXES_MAX prefixes. Further ones are not counted.
"""

from __future__ import annotations

from typing import Final

PREFIXES_MAX: Final = 10_000
"""Clients choose prefixes, so their number needs a bound: some 2 MB, and 600 KB in a dump."""
DELIMITER: Final = b":"

_GETS, _HITS, _SETS, _DELETES = range(4)


class PrefixCounts:
    """See the module."""

    def __init__(self) -> None:
        self.is_on = False
        self._counts: dict[bytes, list[int]] = {}

    def got(self, key: bytes, *, is_hit: bool) -> None:
        """Count a get of a logical key."""
        row = self._row(key)
        if row is not None:
            row[_GETS] += 1
            row[_HITS] += is_hit

    def stored(self, key: bytes) -> None:
        """Count a store."""
        row = self._row(key)
        if row is not None:
            row[_SETS] += 1

    def deleted(self, key: bytes) -> None:
        """Count a delete."""
        row = self._row(key)
        if row is not None:
            row[_DELETES] += 1

    def clear(self) -> None:
        """Forget all counts."""
        self._counts.clear()

    def dump(self) -> bytes:
        """Return the counts in memcached's form."""
        return b"".join(
            b"PREFIX %b get %d hit %d set %d del %d\r\n" % (prefix, gets, hits, sets, deletes)
            for prefix, (gets, hits, sets, deletes) in self._counts.items()
        )

    def command(self, argument: bytes) -> bool:
        """Do what "on" and "off" ask for; return whether it was one of them."""
        if argument not in {b"on", b"off"}:
            return False
        self.is_on = argument == b"on"
        return True

    def _row(self, key: bytes) -> list[int] | None:
        prefix, colon, _ = key.partition(DELIMITER)
        if not colon or b"\n" in prefix:  # a line break would forge a line of the dump
            return None
        row = self._counts.get(prefix)
        if row is None and len(self._counts) < PREFIXES_MAX:
            row = self._counts[prefix] = [0, 0, 0, 0]
        return row
