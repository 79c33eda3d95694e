"""The last rollback of each consumer, by the name of its connection. The web console shows it.

Sessions write here. A consumer that was rolled back usually rolls back many partitions at once, so
the rollbacks of a consumer are counted, too.

Invariant: at most NAMES_MAX names are kept; the one with the oldest rollback makes room.
"""

from __future__ import annotations

from typing import Final, NamedTuple

NAMES_MAX: Final = 200
"""Twice the consumers that the console lists: some of those that are gone are worth a look."""


class LastRollback(NamedTuple):
    """The newest rollback of a consumer, and how many it had."""

    time_s: float
    """Unix time."""
    vb_id: int
    to_seqno: int
    kind: str
    reason: str
    rollbacks: int


class LastRollbacks:
    """See the module."""

    def __init__(self) -> None:
        self._by_name: dict[str, LastRollback] = {}
        """The oldest rollback first."""

    def note(self, fields: dict[str, object], time_s: float) -> None:
        """Keep a rollback; `fields` are those of the session's note."""
        name, vb_id, to_seqno = fields["name"], fields["vb_id"], fields["to_seqno"]
        assert isinstance(name, str)
        assert isinstance(vb_id, int)
        assert isinstance(to_seqno, int)
        before = self._by_name.pop(name, None)
        count = 1 if before is None else before.rollbacks + 1
        self._by_name[name] = LastRollback(
            time_s, vb_id, to_seqno, str(fields["kind"]), str(fields["reason"]), count
        )
        while len(self._by_name) > NAMES_MAX:
            del self._by_name[next(iter(self._by_name))]

    def of(self, name: str) -> LastRollback | None:
        """Return a consumer's last rollback, None if there was none since the start."""
        return self._by_name.get(name)
