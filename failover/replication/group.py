"""A commit group of a master as its replicas get it: bytes, and the partitions in them. Pure.

A replica to which all of a group's partitions are replicated gets it as the log has it: one
message, the same bytes for all replicas. Partitions that cannot go so are excluded from it, and go
in sections of their own.

Who calls it: `failover.replication.commit` makes groups, and says what is committed of them. Feeds
send them, and note to whom (`sent_to`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

from failover.replication.mastership import InSyncSet
from failover.replication.messages import SharedGroup, share
from failover.rules.isr import Acknowledgement
from vbucket.model.entry import VB_ID


class Share(NamedTuple):
    """The partitions of a group that have the same in-sync set."""

    in_sync: InSyncSet
    seqnos: Mapping[int, int]


class Group:
    """See the module."""

    __slots__ = (
        "_changes",
        "acknowledged",
        "excluded",
        "is_committed",
        "mastered",
        "number",
        "revision",
        "sections",
        "sent_to",
        "seqnos",
        "shared",
        "shares",
    )

    def __init__(
        self,
        number: int,
        seqnos: Mapping[int, int],
        changes: Sequence[bytes],
        payload: bytes,
        revision: int,
        shares: tuple[Share, ...],
        mastered: frozenset[int],
        sections: set[int],
    ) -> None:
        self.number = number
        self.seqnos = seqnos
        """Partition -> its seqno at the end of the group."""
        self.shared: SharedGroup = share(payload)
        self.revision = revision
        self.shares = shares
        self.mastered = mastered
        """All partitions that this node masters, and that are ready; the same object as long as
        they are the same."""
        self.sent_to: dict[str, Mapping[int, int]] = {}
        """Member -> the partitions it got, all of them in state REPLICATE."""
        self.acknowledged: dict[str, Acknowledgement] = {}
        self.is_committed = False
        """Whether all of it was found to be committed, by number."""
        self.sections = sections
        """Partitions of the group that are sent section by section."""
        self.excluded: set[int] = set(sections)
        """Partitions acknowledged one by one: `sections`, plus any excluded after sending."""
        self._changes = changes

    def exclude(self, vb_ids: set[int]) -> None:
        """These partitions are acknowledged one by one from now on: something has changed for
        them.
        """
        excluded = vb_ids & self.seqnos.keys()
        if excluded:
            self.excluded |= excluded
            self.seqnos = _without(self.seqnos, excluded)
            self.shares = tuple(
                Share(share.in_sync, _without(share.seqnos, excluded)) for share in self.shares
            )

    def not_replicated_to(self, member: str, replicated: Set[int]) -> set[int]:
        """Return the partitions that must reach a member in sync, and are not in state REPLICATE
        there (`replicated`).
        """
        found: set[int] = set()
        for part in self.shares:
            if member in part.in_sync.members:
                found |= part.seqnos.keys() - replicated
        return found

    def send_in_sections(self, vb_ids: set[int]) -> None:
        """Send these section by section. The group must not be sent yet."""
        assert not self.sent_to
        self.exclude(vb_ids)
        self.sections |= vb_ids
        self._changes = entries_of(self._changes, self.seqnos)
        self.shared = share(b"".join(self._changes))

    def only(self, vb_ids: Iterable[int]) -> tuple[Mapping[int, int], SharedGroup]:
        """Return what the group has of these partitions: their seqnos, and the entries."""
        seqnos = self.seqnos
        return {vb_id: seqnos[vb_id] for vb_id in vb_ids}, share(
            b"".join(entries_of(self._changes, vb_ids))
        )


def _without(seqnos: Mapping[int, int], vb_ids: set[int]) -> Mapping[int, int]:
    return {vb_id: seqno for vb_id, seqno in seqnos.items() if vb_id not in vb_ids}


def entries_of(changes: Sequence[bytes], vb_ids: Iterable[int]) -> list[bytes]:
    """Return the entries of these partitions."""
    wanted = {vb_id.to_bytes(2, "big") for vb_id in vb_ids}
    return [entry for entry in changes if entry[VB_ID] in wanted]


class StreamChanges:
    """Which partitions have changed, and in which order."""

    def __init__(self) -> None:
        self.revision = 0
        """Rises with every change."""
        self._at: dict[int, int] = {}
        """Partition -> the revision of its last change, in this order."""
        self._taken = 0
        """The revision when `take` was called last."""

    def note(self, vb_id: int) -> int:
        """Note a change of a partition; return its revision."""
        self.revision += 1
        self._at.pop(vb_id, None)
        self._at[vb_id] = self.revision
        return self.revision

    def take(self) -> set[int]:
        """Return the partitions that have changed since the last call."""
        before, self._taken = self._taken, self.revision
        return self.since(before)

    def since(self, revision: int) -> set[int]:
        """Return the partitions that have changed after a revision."""
        return {
            vb_id
            for vb_id, _ in takewhile(lambda item: item[1] > revision, reversed(self._at.items()))
        }
