"""Which masters sent the logs of partitions, and what of that they have on disk. Sans-IO.

A master sends a commit group while it writes it (`failover.replication.group_sending`), and begins
no other group before that one is synced. So what a replica has of a master is on that master's
disk, but for the newest whole group. That one is, too, when the replica hears that it is committed,
or gets the next one. Sections, and what is read from cursors, are synced before they are sent.

A node that is left alone by its master counts that master's disk (`failover.rules.isr.Sender`).

Who calls it: `failover.replication.following`; links note their newest group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from failover.rules.isr import Sender, has_sent, sender_seqno
from vbucket.log.record import split_entries
from vbucket.model.entry import seqno_of, vb_id_of
from vbucket.model.ids import SEQNO_MAX


class NewestGroup:
    """The newest whole group that came on a link, as long as its master may not have synced it."""

    def __init__(self, number: int, payload: bytes) -> None:
        self.number = number
        """Of its message."""
        self._payload = payload
        self._begins: dict[int, int] | None = None

    def begins(self) -> Mapping[int, int]:
        """Return partition -> its seqno before the group."""
        if self._begins is None:
            self._begins = {}
            for entry in split_entries(self._payload):
                self._begins.setdefault(vb_id_of(entry), seqno_of(entry) - 1)
        return self._begins


class _Welcome(NamedTuple):
    """The last time when a partition's log was reconciled."""

    epoch: int
    master: str
    seqno: int
    """The end of the log then. The master had all of it on disk."""
    told_seqno: int = SEQNO_MAX
    """What the master is known to have on disk, if the link is gone that brought the log."""


class Senders:
    """See the module."""

    def __init__(self) -> None:
        self._welcomes: dict[int, _Welcome] = {}

    def welcomed(self, vb_id: int, epoch: int, master: str, seqno: int) -> None:
        """A master lets this node follow a partition, whose log here ends at a seqno."""
        self._welcomes[vb_id] = _Welcome(epoch, master, seqno)

    def link_gone(self, master: str, newest: NewestGroup | None) -> None:
        """A link to a master's node is replaced by another one. What was reconciled on it keeps
        what is known, until it is reconciled again.
        """
        for vb_id, begin in ({} if newest is None else newest.begins()).items():
            welcome = self._welcomes.get(vb_id)
            if welcome is not None and welcome.master == master:
                told_seqno = min(welcome.told_seqno, max(welcome.seqno, begin))
                self._welcomes[vb_id] = welcome._replace(told_seqno=told_seqno)

    def take(
        self, vb_id: int, epoch: int, high_seqno: int, newest: Mapping[str, NewestGroup | None]
    ) -> Sender | None:
        """Return the master that sent this node a partition's log, and forget it: this node becomes
        the master in an epoch. None: it did not follow the master of the epoch before, so the end
        of its log may be on no other disk.

        `newest` has the newest groups of the links that there are.
        """
        welcome = self._welcomes.pop(vb_id, None)
        if welcome is None or not has_sent(welcome.epoch, epoch):
            return None
        told_seqno = welcome.told_seqno
        group = newest.get(welcome.master)
        begin = None if group is None else group.begins().get(vb_id)
        if begin is not None:
            told_seqno = min(told_seqno, max(welcome.seqno, begin))
        return Sender(welcome.master, sender_seqno(told_seqno, high_seqno))
