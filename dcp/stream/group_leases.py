"""When the members of groups of consumers have beaten last: in memory of the node that is master of
a group's document. Sans-IO. `dcp.session.group_command` has the rules.

Invariant: leases are of one term of a master. A new master, and one of a new version, grants each
member a whole one, because it does not know when it was heard.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from vbucket.engine.partition import Partition

GROUPS_MAX: Final = 1_000
"""Groups with leases in memory; those that ended make room."""
Leases: TypeAlias = dict[str, tuple[int, int]]
"""Member -> when it has beaten last, and for how long that holds, in ns."""


class GroupLeases:
    """See the module. One for each node; all sessions use it."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int, int], Leases] = {}
        """Group's key, and version and leader epoch of its partition -> its leases."""

    def of(self, key: bytes, part: Partition) -> Leases:
        """Return the leases of a group, to be changed; its document is in `part`."""
        about = key, part.vb_uuid, part.leader_epoch
        if about not in self._known and len(self._known) >= GROUPS_MAX:
            del self._known[next(iter(self._known))]  # whole leases with their next beat
        return self._known.setdefault(about, {})
