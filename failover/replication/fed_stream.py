"""One partition on the way to one replica: what of it was sent, and what must come next. Sans-IO.

Who calls it: `failover.replication.replica_feed`, which has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from dcp.session.replication_port import ReplicationError
from dcp.wire.message import StreamRequest
from failover.replication.messages import (
    EntriesSection,
    FloorsTold,
    ReplicaPosition,
    SnapshotDone,
    Told,
    pack_told,
)
from vbucket.engine.partition import Partition
from vbucket.engine.versions import Versions
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import seqno_of
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

WINDOW_BYTES: Final = 8 << 20
"""Entries on their way to one replica: at 100 MB/s, 80 ms of them."""
QUESTIONS_MAX: Final = 64
"""With so many unanswered questions no heartbeat is sent: the replica reads nothing."""
BEAT_NS: Final = 100_000_000
"""Time between heartbeats, unless the setting says another one."""
SILENCE_NS_MAX: Final = 3_000_000_000
"""A replica that was not heard for so long is disconnected: it answers 10 questions a second."""
SECTION_BYTES: Final = 256 << 10
"""Entries of a partition that is behind, in one message: a fair share of a turn."""
NEVER: Final = SEQNO_MAX
"""Above the number of every message."""


class FeedPace(Enum):
    """See `failover.replication.replica_feed`."""

    IN_STEP = auto()
    BEHIND = auto()


class Followed(NamedTuple):
    """What a replica has acknowledged of a partition, in one message."""

    vb_id: int
    epoch: int
    seqno: int


class FedStream:
    """One partition on the link."""

    __slots__ = (
        "confirmations",
        "epoch",
        "floors",
        "is_paced",
        "opaque",
        "opened_number",
        "pace",
        "safe_purge",
        "sent_seqno",
        "shown_seqno",
        "whole_number",
        "window",
    )

    def __init__(
        self,
        epoch: int,
        opaque: int,
        seqno: int,
        confirmations: int,
        opened_number: int,
        window: SnapshotWindow | None,
    ) -> None:
        self.confirmations = confirmations
        """How many confirmations the link had when the stream was opened."""
        self.epoch = epoch
        self.is_paced = False
        """Whether this is a copy that is filled for the first time, and was never level yet."""
        self.opaque = opaque
        self.opened_number = opened_number
        """The last message that was made before the stream was opened."""
        self.sent_seqno = seqno
        """The last seqno that was sent, while the stream is BEHIND."""
        self.pace = FeedPace.BEHIND
        self.shown_seqno = -1
        """The high watermark that the replica was told last."""
        self.floors = FloorsTold(0, 0)
        """The floors that the replica was told while it was behind. Floors never fall, so these are
        the present ones only if it knows them."""
        self.window = window
        """The snapshot of which the replica has a part; None: what it has is whole."""
        self.whole_number = 0 if window is None else NEVER
        """The message that ends the last snapshot; NEVER: it was not sent yet."""
        self.safe_purge = 0 if window is None else window.purge
        """Deletions up to this seqno were purged, or superseded what they delete, before anything
        of the snapshot was read."""

    def section(self, part: Partition, entries: Sequence[bytes]) -> EntriesSection:
        """Return a section, which tells the replica the high watermark."""
        self.shown_seqno = known_committed(part)
        return EntriesSection(part.vb_id, self.opaque, self.epoch, self.shown_seqno, entries)

    def is_overtaken(self, part: Partition) -> bool:
        """Whether deletions were purged that the replica has not got, of documents that it has."""
        return 0 < self.sent_seqno < part.purge_seqno and part.purge_seqno > self.safe_purge

    def news(self, part: Partition) -> list[bytes]:
        """Return the control entries that come before the next changes. A cursor meets none,
        because they are no changes.
        """
        floors = FloorsTold(part.history_floor, part.purge_seqno)
        window = self.window
        if window is None and self.sent_seqno < floors.floor:
            self.window = SnapshotWindow(self.sent_seqno, *floors)
            # Who holds nothing gets no document that a deletion below the floor has deleted.
            self.safe_purge = 0 if self.sent_seqno else floors.floor
        elif window is not None:
            end = max(window.end, floors.floor)
            self.window = window._replace(end=end, purge=floors.purge)
        told: list[Told] = []
        if self.window is not None:
            if self.window != window:
                told.append(self.window)
        elif self.floors != floors:
            self.floors = floors
            told.append(floors)
        return [pack_told(part.vb_id, each) for each in told]

    def next_entries(
        self, part: Partition, versions: Versions, bytes_max: int, member: str
    ) -> list[bytes]:
        """Return the next entries of a partition that is behind. Raises StoreDamagedError."""
        entries = self.news(part)
        window, first_seqno = self.window, self.sent_seqno + 1
        end_seqno = part.synced_seqno if window is None else window.end
        if first_seqno <= end_seqno:
            changes = versions.entries(part, first_seqno, end_seqno, bytes_max)
            last_seqno = seqno_of(changes[-1]) if changes else 0
            if not changes or (window is None and last_seqno - first_seqno + 1 != len(changes)):
                raise StoreDamagedError(
                    f"vb {part.vb_id}: versions between seqno {first_seqno} and {end_seqno} are "
                    f"missing (history floor {part.history_floor}), so member {member} cannot "
                    "continue; check the disk and restore a backup"
                )
            self.sent_seqno = last_seqno
            entries += changes
        return entries + self.end_snapshot(part)

    def end_snapshot(self, part: Partition) -> list[bytes]:
        """Return the control entry that ends the snapshot if all of it is sent."""
        window = self.window
        if window is None or self.sent_seqno < window.end:
            return []
        self.window = None
        self.floors = FloorsTold(part.history_floor, part.purge_seqno)
        return [pack_told(part.vb_id, SnapshotDone(window.end, part.purge_seqno, part.max_cas))]


def known_committed(part: Partition) -> int:
    """Return up to which seqno a master knows that changes are committed. A history floor is, also
    where a new master does not know so much of others yet.
    """
    return max(part.committed_seqno, part.history_floor)


def window_of(vb_id: int, asked: StreamRequest, told: ReplicaPosition) -> SnapshotWindow | None:
    """Return the snapshot of which a replica has a part; None: what it has is whole. Raises
    ReplicationError.
    """
    start, seqno, end = asked.snap_start_seqno, asked.start_seqno, asked.snap_end_seqno
    if not start <= seqno <= end or not 0 <= told.snapshot_purge <= end:
        raise ReplicationError(
            f"vb {vb_id}: a replica cannot be at seqno {seqno} of a snapshot from {start} to {end} "
            f"with purge seqno {told.snapshot_purge}"
        )
    return SnapshotWindow(start, end, told.snapshot_purge) if start < seqno else None
