"""One partition on the way to one replica: what of it was sent, and what must come next. And the
messages on the link that are not acknowledged. Sans-IO.

Who calls it: `failover.replication.feed`, which has the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from dcp.session.replication_port import ReplicationError
from failover.replication.group import Group
from failover.replication.messages import (
    ANNOUNCED_GROUPS_MAX,
    Control,
    EntriesSection,
    Floors,
    SnapshotDone,
    pack_control_entry,
)
from vbucket.engine.partition import Partition
from vbucket.engine.resync import UNENDED, Deletions
from vbucket.engine.versions import Versions
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import seqno_of
from vbucket.model.ids import SEQNO_MAX
from vbucket.store.environment import StoreDamagedError

QUESTIONS_MAX: Final = 64
"""With so many unanswered questions no heartbeat is sent: the replica reads nothing."""
BEAT_NS: Final = 100_000_000
"""Time between heartbeats, unless the setting says another one."""
SILENCE_NS_MAX: Final = 3_000_000_000
"""A replica that was not heard for so long is disconnected: it answers 10 questions a second."""
NEVER: Final = SEQNO_MAX
"""Above the number of every message."""


class ProgressState(Enum):
    """See `Progress`."""

    PROBE = auto()
    SNAPSHOT = auto()
    REPLICATE = auto()


class Match(NamedTuple):
    """Up to which seqno a replica has synced a partition, in a leader epoch."""

    vb_id: int
    epoch: int
    seqno: int


class Progress:
    """What a master has sent of one partition to one replica, while their stream is open.

    PROBE      it is read from its cursor, from memory or from blocks, until it has caught up
    SNAPSHOT   the same, and the replica has only a part of a de-duplicated snapshot
    REPLICATE  it is in every group message: all that is synced here was sent, and the group
               that is being written, if that was sent already
    """

    __slots__ = (
        "active_since", "announced_seqno", "deletions", "epoch", "floors", "is_filling", "next",
        "opaque", "opened_number", "safe_purge", "sent_window", "snapshot_number", "state",
        "superseded", "window",
    )  # fmt: skip

    def __init__(
        self,
        epoch: int,
        opaque: int,
        seqno: int,
        active_since: int,
        opened_number: int,
        window: SnapshotWindow | None,
        deletions: Deletions | None = None,
    ) -> None:
        self.active_since = active_since
        """How many confirmations the link had when the stream was opened."""
        self.epoch = epoch
        self.is_filling = False
        """Whether this is a copy that is filled for the first time, and never caught up yet."""
        self.opaque = opaque
        self.opened_number = opened_number
        """The last message that was made before the stream was opened."""
        self.next = seqno + 1
        """The seqno to send next, unless the state is REPLICATE."""
        self.state = ProgressState.PROBE
        self.announced_seqno = -1
        """The high watermark that was announced to the replica last."""
        self.floors = Floors(0, 0)
        """The floors that were sent between changes from the cursor. Floors never fall, so these
        are the present ones only if the replica knows them."""
        self.window = window
        """The snapshot of which the replica has a part; None: the state is not SNAPSHOT."""
        self.sent_window = window
        """`window` as the replica knows it."""
        self.deletions = deletions
        """Those that the snapshot brings in place of purged ones; None: it brings none, or no
        more."""
        self.snapshot_number = 0 if window is None else NEVER
        """The message that ends the last snapshot; NEVER: it was not sent yet."""
        self.safe_purge = 0 if window is None else window.purge
        """Deletions up to this seqno were purged, or superseded what they delete, before anything
        of the snapshot was read; or the replica gets what it lacks of them."""
        if deletions is not None:
            self.safe_purge = deletions.purge
        self.superseded: Collection[int] | None = None
        """Seqnos that are left out of the snapshot: those that the store had not dropped yet when
        the first part was read. It may drop them, and what superseded them, between two reads.
        None: nothing of a snapshot was read."""
        self.become_probe(self.next)

    def become_probe(self, next_seqno: int) -> None:
        """Read the partition from its cursor, from this seqno on."""
        self.next = next_seqno
        self.state = ProgressState.PROBE if self.window is None else ProgressState.SNAPSHOT

    def become_replicate(self) -> None:
        """Send the partition in group messages."""
        self.state = ProgressState.REPLICATE
        self.is_filling = False

    def caught_up(self, part: Partition) -> bool:
        """Whether all was sent that is synced here, and makes a consistent copy."""
        return self.next == part.synced_seqno + 1 and self.window is None

    def section(self, part: Partition, entries: Sequence[bytes]) -> EntriesSection:
        """Return a section, which tells the replica the high watermark."""
        self.announced_seqno = known_committed(part)
        return EntriesSection(part.vb_id, self.opaque, self.epoch, self.announced_seqno, entries)

    def is_overtaken(self, part: Partition) -> bool:
        """Whether deletions were purged that the replica has not got, of documents that it has."""
        return 1 < self.next <= part.purge_seqno and part.purge_seqno > self.safe_purge

    def _controls(self, part: Partition) -> list[bytes]:
        """Return the control entries that come before the next changes. A cursor meets none,
        because they are no changes.
        """
        floors = Floors(part.history_floor, part.purge_seqno)
        window = self.window
        if window is None and self.next <= floors.floor:
            self.window = SnapshotWindow(self.next - 1, *floors)
            self.state = ProgressState.SNAPSHOT
            if self.next == 1:
                # Who holds nothing gets no document that a deletion below the floor has deleted.
                self.safe_purge = floors.floor
        elif window is not None:
            end = max(window.end, floors.floor)
            self.window = window._replace(end=end, purge=floors.purge)
        controls: list[Control] = [*self._news_of_window()]
        if self.window is None and self.floors != floors:
            self.floors = floors
            controls.append(floors)
        return [pack_control_entry(part.vb_id, each) for each in controls]

    def _news_of_window(self) -> Iterator[SnapshotWindow]:
        """Yield the window as the replica has to know it, if it does not."""
        if self.deletions is not None and self.next > self.deletions.purge:
            assert not self.deletions, "there was room for them"
            self.deletions = None
        window = self.window
        if window is not None and self.deletions:
            window = window._replace(end=UNENDED)
        if window is not None and window != self.sent_window:
            yield window
        self.sent_window = window

    def next_entries(
        self, part: Partition, versions: Versions, bytes_max: int, member: str
    ) -> list[bytes]:
        """Return the next entries from the partition's cursor. Raises StoreDamagedError."""
        entries = self._controls(part)
        window, first_seqno = self.window, self.next
        end_seqno = part.synced_seqno if window is None else window.end
        if window is not None and self.superseded is None:
            self.superseded = versions.not_dropped_yet(part, first_seqno)
        left_out = self.superseded or ()
        changes: list[bytes] = []
        while first_seqno <= end_seqno and not changes:
            while first_seqno in left_out:
                first_seqno += 1
            found = versions.entries(part, first_seqno, end_seqno, bytes_max)
            last_seqno = seqno_of(found[-1]) if found else 0
            if not found or (window is None and last_seqno - first_seqno + 1 != len(found)):
                raise StoreDamagedError(
                    f"partition {part.vb_id}: versions between seqno {first_seqno} and {end_seqno} "
                    f"are missing (history floor {part.history_floor}), so member {member} cannot "
                    "continue; check the disk and restore a backup",
                    part.vb_id,
                )
            changes = found
            if self.deletions and window is not None:
                changes = list(self.deletions.among(first_seqno, found))
            if left_out:
                changes = [each for each in changes if seqno_of(each) not in left_out]
            self.next = first_seqno = last_seqno + 1
        return [*entries, *changes, *self._end_snapshot(part)]

    def _end_snapshot(self, part: Partition) -> list[bytes]:
        """Return the control entry that ends the snapshot if all of it is sent."""
        window = self.window
        if window is None or self.next <= window.end:
            return []
        ending: list[Control] = [*self._news_of_window()]
        self.window = self.sent_window = self.superseded = None
        self.state = ProgressState.PROBE
        self.floors = Floors(part.history_floor, part.purge_seqno)
        ending.append(SnapshotDone(window.end, part.purge_seqno, part.max_cas))
        return [pack_control_entry(part.vb_id, each) for each in ending]


def known_committed(part: Partition) -> int:
    """Return up to which seqno a master knows that changes are committed. A history floor is, also
    where a new master does not know so much of others yet.
    """
    return max(part.committed_seqno, part.history_floor)


RECORD_BYTES: Final = 256
"""What this node remembers of a message, and of each of its sections, until it is acknowledged."""


class InflightGroup(NamedTuple):
    """A group on its way."""

    group: Group
    seqnos: Mapping[int, int]
    """What the replica got of it."""
    streams_revision: int
    """Of the link's streams when it was sent (`StreamChanges`)."""


class Inflight(NamedTuple):
    """A message that is not acknowledged."""

    number: int
    cost: int
    sent_ns: int
    """When it was made, to a tick."""
    matches: tuple[tuple[Progress, Match], ...] = ()
    group: InflightGroup | None = None
    filling: int = 0
    """Bytes of a copy that is filled for the first time; 0: the message brings what is new."""


class AckDelays:
    """How long one replica's acknowledgements of changes take."""

    def __init__(self, sent: Sequence[Inflight]) -> None:
        """`sent` are the messages that are not acknowledged, the oldest first."""
        self._sent = sent
        self._worst_ns: int | None = None
        self._worst_new_ns: int | None = None
        """The same of messages that bring what is new."""

    @property
    def has_news(self) -> bool:
        """Whether there is anything to judge the replica by."""
        return bool(self._sent) or self._worst_ns is not None

    def acknowledged(self, sent: Inflight, now_ns: int) -> None:
        """A message is acknowledged."""
        took_ns = now_ns - sent.sent_ns
        self._worst_ns = max(self._worst_ns or 0, took_ns)
        if not sent.filling:
            self._worst_new_ns = max(self._worst_new_ns or 0, took_ns)

    def oldest_new(self) -> Inflight | None:
        """Return the oldest message with what is new that is on its way; None: there is none."""
        return next((sent for sent in self._sent if not sent.filling), None)

    def take_new(self, now_ns: int) -> int | None:
        """Return how long messages with what is new took at most since the last call, those that
        are still on their way included; None: there was none.
        """
        worst_ns, self._worst_new_ns = self._worst_new_ns, None
        oldest = self.oldest_new()
        if oldest is not None:
            worst_ns = max(worst_ns or 0, now_ns - oldest.sent_ns)
        return worst_ns

    def take(self, now_ns: int) -> tuple[int | None, int]:
        """Return how long it took at most since the last call (None: nothing was acknowledged), and
        how long the oldest message waits now.
        """
        worst_ns, self._worst_ns = self._worst_ns, None
        return worst_ns, now_ns - self._sent[0].sent_ns if self._sent else 0


class Inflights:
    """The messages with changes or high watermarks that one replica has not acknowledged."""

    def __init__(self) -> None:
        self.sent: deque[Inflight] = deque()
        """The oldest first."""
        self.cost = 0
        """Of all of them, in bytes."""
        self.delays = AckDelays(self.sent)

    def add(self, message: Inflight) -> None:
        """A message goes out."""
        self.sent.append(message)
        self.cost += message.cost

    def acknowledged(self, number: int, now_ns: int) -> Iterator[Inflight]:
        """Yield the messages up to a number: they are acknowledged."""
        while self.sent and self.sent[0].number <= number:
            message = self.sent.popleft()
            self.cost -= message.cost
            self.delays.acknowledged(message, now_ns)
            yield message


class Questions:
    """What a master asks a replica: is it still the master?"""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, int]] = deque()
        """Questions that are not confirmed: question, when it was asked."""
        self.confirmations = 0
        self.confirmed_ns = 0
        """When the question was asked that was confirmed last; 0: none was."""

    def __len__(self) -> int:
        """How many are not confirmed."""
        return len(self._asked)

    def ask(self, question: int, now_ns: int) -> None:
        """A question leaves."""
        self._asked.append((question, now_ns))

    def confirmed(self, question: int) -> None:
        """The replica confirms a question, and all before it."""
        while self._asked and self._asked[0][0] <= question:
            self.confirmed_ns = self._asked.popleft()[1]
            self.confirmations += 1


def check_numbers(member: str, number: int, question: int, *, last: int) -> None:
    """Raise ReplicationError if a member cannot acknowledge these numbers. `last` is that of the
    last message that was made.
    """
    if number > last or question > last:
        raise ReplicationError(
            f"member {member} acknowledges message {number} and question {question}; "
            f"the last one sent is {last}"
        )
    if question < number:
        raise ReplicationError(
            f"member {member} has synced message {number} and confirms question {question}"
            " only: it confirms a message's question before it syncs the message"
        )


class Announcements:
    """Which groups are committed, until that is announced to a replica, by their messages."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        """Commit group -> its message, for groups of which the replica does not know whether
        they are committed; the newest ones, in their order."""
        self._given_up = 0
        """The last message that `_open` had and has not any more, because newer ones came."""
        self._committed: list[int] = []
        """Messages of groups that are committed, which is not announced yet."""

    def __bool__(self) -> bool:
        """Whether there is anything to announce."""
        return bool(self._committed)

    def sent(self, group: int, number: int) -> None:
        """A message with a group leaves."""
        self._open[group] = number
        if len(self._open) > ANNOUNCED_GROUPS_MAX:
            self._given_up = self._open.pop(next(iter(self._open)))

    def is_open(self, group: int) -> bool:
        """Whether it can be announced by its message that a group is committed."""
        return group in self._open

    def committed(self, group: int) -> None:
        """All that the replica got of a group is committed."""
        self._committed.append(self._open.pop(group))

    def take(self) -> tuple[int, int]:
        """Return the first committed messages that no other one separates: from, to. 0, 0: there
        are none.
        """
        if not self._committed:
            return 0, 0
        first, last = first_run(self._committed, self._open.values(), self._given_up)
        self._committed = [number for number in self._committed if number > last]
        return first, last

    def clear(self) -> None:
        """The link is gone: nothing is announced."""
        self._committed.clear()


def first_run(committed: Collection[int], others: Iterable[int], given_up: int) -> tuple[int, int]:
    """Return the first committed messages between which none of the others is: from, to. Up to
    `given_up` it is not known which others there were.
    """
    first, last = min(committed), max(committed)
    between = [number for number in others if first < number < last]
    if first < given_up:
        last = first
    elif between:
        last = max(number for number in committed if number < min(between))
    return first, last
