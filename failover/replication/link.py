"""The replica's side of a replication link: one connection to one master's node. Sans-IO.

    OPENING ── DCP_OPEN and the control are answered ──> READY ── closed ──> CLOSED

and for each partition that this node follows there

    ASKED ── OK ───────> OPEN         its messages are applied
    ASKED ── ROLLBACK ─> ASKED        what the master does not have is cut off, then asked again
    ASKED ── X_FENCED ─> WAITING      until the replication record or the time has moved
    OPEN ── STREAM_END > WAITING      the same; longer if the master cannot read its history

Who calls it: the node core makes links and tells what to follow (`follow`, `leave`); the shell
moves bytes. The core of the node carries out what needs the engine (`ReplicaSide`).

Invariants
- a message is applied completely or not at all, and only for streams that are OPEN. What was sent
  for a stream that was left meanwhile has another opaque, and is skipped. A commit group has the
  newest opaque of its time: it is not for streams with a higher one;
- `_highs` has the last seqno that is here of each partition whose stream is OPEN, unless it has
  only a part of a snapshot. While a partition is followed, nothing else changes it;
- that a group is committed counts for streams that were OPEN when it came, and are since;
- a message is acknowledged after the commit group that holds its entries is synced here, and all
  messages before it;
- a question is confirmed for the streams that are open then. `confirmed_ns` is when that happened
  last: a member that becomes master waits until that has lapsed;
- the question of a group is confirmed with the group's acknowledgement, and that of a message that
  only announces commits with the next one. But no confirmation waits if none was sent for
  CONFIRM_NS, or if a stream was opened since: the master may wait for it to serve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from dcp.session.replication_port import ReplicationError
from dcp.stream.remote_readers import Held
from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError, pack_request
from dcp.wire.message import (
    OPEN_EXTRAS,
    EndReason,
    OpenFlag,
    StreamRequest,
    pack_stream_request,
    parse_stream_end,
)
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from failover.replication.messages import (
    ANNOUNCED_GROUPS_MAX,
    ENTRY_OVERHEAD_BYTES_MAX,
    HELD_FORMAT,
    MESSAGE_BYTES_MAX,
    NOT_SEEN,
    NOTHING_HELD,
    EntriesSection,
    Greeting,
    GroupMessage,
    Message,
    ReplicaPosition,
    StoreSeen,
    Welcome,
    checked_group,
    decode,
    encode,
    format_of,
    pack_ack,
    pack_held,
    problem_of,
    unpack_entries,
    unpack_group,
    unpack_rollback,
)
from vbucket.engine.replicated import ReplicatedChange
from vbucket.engine.resync import Remaining
from vbucket.log.record import split_entries
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import seqno_of, vb_id_of
from vbucket.model.ids import SEQNO_MAX

RETRY_NS: Final = 100_000_000
"""Pause before a request that was refused is repeated, unless the record has changed."""
DAMAGED_RETRY_NS: Final = 5_000_000_000
"""Pause after the master could not read its history: it will hardly be able to a moment later, and
each attempt is logged there."""
HEARD_NS_MAX: Final = 3_000_000_000
"""A link without a word for so long is closed; heartbeats come ten times a second."""
CONFIRM_NS: Final = 50_000_000
"""A tenth of the time for which a confirmation counts (`failover.rules.isr.CONFIRMATION_NS`)."""

_REMEMBERED_GROUPS: Final = 2 * ANNOUNCED_GROUPS_MAX
"""The master names none of the older ones."""


class NewestGroup:
    """The newest group that came on a link, as long as its master may not have synced it."""

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


class LinkState(Enum):
    """See the module."""

    OPENING = auto()
    READY = auto()
    CLOSED = auto()


class _FollowStep(Enum):
    ASKED = auto()
    OPEN = auto()
    WAITING = auto()


class _FollowedStream:
    """A partition that is followed on the link."""

    __slots__ = ("copy_number", "epoch", "opaque", "retry_ns", "step")

    def __init__(self, epoch: int, copy_number: int) -> None:
        self.epoch = epoch
        self.copy_number = copy_number
        self.opaque = 0
        self.step = _FollowStep.WAITING
        self.retry_ns = 0


class _AppliedGroup(NamedTuple):
    """A group that is applied."""

    ends: dict[int, int]
    """Partition -> its seqno at the end."""
    opened: int
    """Opaque of the newest stream that it was for."""
    left: int
    """How many streams had been left before."""


class Acks:
    """What a replica acknowledges on one link: messages that are synced here, and questions of the
    master that it confirms.

    Invariants
    - messages are applied in the order of their numbers, and acknowledged in it;
    - no confirmation waits if none was sent for CONFIRM_NS, or if a stream was opened since.
    """

    def __init__(self, side: ReplicaSide) -> None:
        self._side = side
        self.number = 0
        """The last message that was applied."""
        self.synced_number = 0
        self.unsynced: deque[tuple[int, int]] = deque()
        """Applied messages that are not synced here: commit group, number."""
        self.held = NOTHING_HELD
        """What the master knows of the streams that are served here."""
        self._question = 0
        self._sent: tuple[int, int, StoreSeen] = (0, 0, NOT_SEEN)
        self._at_once_ns = -CONFIRM_NS
        """When a confirmation was sent at once."""

    def check_number(self, number: int) -> None:
        """Raise ReplicationError if this is not the number of the next message."""
        if number != self.number + 1:
            raise ReplicationError(f"message {number} follows message {self.number}")

    def opened(self, now_ns: int) -> None:
        """A stream is open: the master may wait for its confirmation to serve."""
        self._at_once_ns = now_ns - CONFIRM_NS

    def applied(
        self, number: int, question: int, group: int, now_ns: int, *, can_wait: bool
    ) -> bool:
        """A message is applied, as a part of this commit group (0: it is synced); return whether it
        is acknowledged at once. `can_wait`: its question may be confirmed a little later.
        """
        self.number, self._question = number, question
        unsynced = self.unsynced
        if unsynced and group <= unsynced[-1][0]:
            unsynced[-1] = (unsynced[-1][0], number)  # one for each group, however long it takes
        elif group:
            unsynced.append((group, number))
        else:
            self.synced_number = number
        if can_wait and now_ns - self._at_once_ns < CONFIRM_NS:
            return False
        self._at_once_ns = now_ns
        return True

    def synced(self, group: int) -> None:
        """A commit group of this node is on disk."""
        unsynced = self.unsynced
        while unsynced and unsynced[0][0] <= group:
            self.synced_number = unsynced.popleft()[1]

    def take(self, *, may_send: bool) -> bytes | None:
        """Return the acknowledgement to send; None: the master knows all that it would say."""
        ack = self.synced_number, self._question, self._side.store_seen()
        if ack == self._sent or not may_send:
            return None
        self._sent = ack
        return pack_ack(*ack)

    def take_held(self, held: bytes) -> bytes:
        """Return an acknowledgement that says what the streams hold that are served here."""
        self.held = held
        self._sent = self.synced_number, self._question, self._side.store_seen()
        return pack_ack(*self._sent, held)


class ReplicaSide(Protocol):
    """What a link needs of its node's core."""

    def store_seen(self) -> StoreSeen:
        """Return what this node has on disk of the records of the metadata store."""

    def master_serves(self, master: str, seen: StoreSeen) -> None:
        """A master serves all that it masters by the records of the store that it has seen."""

    def position(self, vb_id: int, epoch: int) -> tuple[StreamRequest, ReplicaPosition]:
        """Return where this replica is, for a stream request."""

    def welcomed(self, vb_id: int, welcome: Welcome) -> None:
        """The master goes on from there: take over its versions. Raises ReplicationError."""

    def roll_back(
        self,
        vb_id: int,
        epoch: int,
        seqno: int,
        shared_seqno: int,
        remaining: Remaining | None = None,
    ) -> None:
        """The master asks for a cut back to a seqno. What lies above `shared_seqno`, it does not
        have. Nothing is cut while that has to go into a file first; the master is asked again. So
        it is if it tells what remains of it here (`vbucket.engine.resync`). Raises
        ReplicationError.
        """

    def high_seqno(self, vb_id: int) -> int:
        """Return the last seqno that was applied."""

    def incomplete_snapshot(self, vb_id: int) -> SnapshotWindow | None:
        """Return the window of the snapshot of which a part is here; None: there is none."""

    def apply(self, section: EntriesSection) -> None:
        """Apply a section that was checked. Raises ReplicationError."""

    def applied(self, vb_ids: Iterable[int]) -> None:
        """All sections of a message are applied; these are their partitions."""

    def apply_group(
        self, payload: bytes, highs: dict[int, int], epochs: dict[int, int], body_bytes_max: int
    ) -> tuple[int, dict[int, int]] | None:
        """Check and apply a group by the loop in C, and raise `highs`; return the commit
        group that has it here, and partition -> end seqno. None: nothing was changed; check it
        here. Raises ReplicationError.
        """

    def apply_changes(self, changes: Sequence[ReplicatedChange]) -> int:
        """Apply changes of a group that were checked, or none of them; return the commit
        group that has them here. Raises ReplicationError.
        """

    def committed(self, seqnos: Mapping[int, int], *, is_synced: bool) -> None:
        """The master has committed these partitions up to these seqnos. `is_synced`: all of that is
        on disk here.
        """

    def unsynced_group(self, vb_id: int) -> int:
        """Return the commit group that must be synced before all that a partition has is; 0: it is
        synced.
        """


class Announced:
    """The high watermarks that masters announced, above those of here.

    What was announced counts as soon as it is synced here, and for its history only.
    """

    def __init__(self) -> None:
        self._seqnos: dict[int, int] = {}
        self.vb_ids = self._seqnos.keys()
        """Partitions with such a high watermark; the same object for ever."""

    def seqno(self, vb_id: int) -> int:
        """Return what a partition's masters announced; 0: nothing above what is reached."""
        return self._seqnos.get(vb_id, 0)

    def note(self, vb_id: int, seqno: int) -> None:
        """A partition's master has announced a high watermark."""
        if seqno > self._seqnos.get(vb_id, 0):
            self._seqnos[vb_id] = seqno

    def reached(self, vb_id: int, seqno: int) -> None:
        """A partition is committed up to a seqno here."""
        if self._seqnos.get(vb_id, seqno + 1) <= seqno:
            del self._seqnos[vb_id]

    def cap(self, vb_id: int, seqno: int) -> None:
        """Forget what was announced above a seqno: it was said about another history."""
        if vb_id in self._seqnos:
            self._seqnos[vb_id] = min(self._seqnos[vb_id], seqno)

    def take(self, vb_id: int) -> int:
        """Return what a partition's masters announced, and forget it: this node is its master."""
        return self._seqnos.pop(vb_id, 0)


class ReplicaLink:
    """See the module. `bytes_to_send` holds what the shell has to send."""

    def __init__(
        self, side: ReplicaSide, greeting: Greeting, *, now_ns: int, value_bytes_max: int
    ) -> None:
        self.state = LinkState.OPENING
        self._side = side
        self._value_bytes_max = value_bytes_max
        self._decoder = FrameDecoder(MESSAGE_BYTES_MAX)
        self._streams: dict[int, _FollowedStream] = {}
        self._waiting: dict[int, None] = {}
        """Partitions whose stream is WAITING."""
        self._asked: dict[int, int] = {}
        """Opaque of a request that is not answered -> its partition."""
        self._next_opaque = 0
        self.acks = Acks(side)
        self._master = greeting.master
        self._format = greeting.format
        """The newest that it offers, and from the answer on the one that both speak."""
        self._highs: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        """Leader epochs of the same partitions."""
        self._newest_open = 0
        """The highest opaque of a stream that was OPEN."""
        self._left = 0
        """How many streams were left, or have ended."""
        self._groups: dict[int, _AppliedGroup] = {}
        """Groups that may not be committed, by message; the newest ones."""
        self.newest_group: NewestGroup | None = None
        """The last group if the master may not have synced it."""
        self.heard_ns = now_ns
        self.confirmed_ns = 0
        """When the last message of the member that is followed came, and its question was
        confirmed; 0: none has come."""
        self.problem = ""
        """Why the link was closed by this side."""
        self.is_refused = False
        """Whether nobody listens at the master's address: its process is dead, not silent."""
        self.is_barred = False
        """Whether the master's node runs, and one of the two does not accept the other."""
        self._out = [
            pack_request(
                Opcode.DCP_OPEN,
                extras=OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER),
                key=f"replica:{greeting.member}".encode(),
            ),
            pack_request(Opcode.DCP_CONTROL, key=b"x_replicate", value=encode(greeting)),
        ]

    # -- what the node core tells ------------------------------------------------------------------

    def follow(self, vb_id: int, epoch: int, now_ns: int, copy_number: int = 0) -> None:
        """Follow a partition whose master is there, in this epoch, with the copy of this number. A
        closed link takes no more.
        """
        if self.state is LinkState.CLOSED:
            return
        stream = self._streams.get(vb_id)
        if stream is None or (stream.epoch, stream.copy_number) != (epoch, copy_number):
            self.leave(vb_id)
            self._streams[vb_id] = _FollowedStream(epoch, copy_number)
            self._waiting[vb_id] = None
        if vb_id in self._waiting:
            self._ask_if_due(vb_id, now_ns)

    def leave(self, vb_id: int) -> None:
        """Do not follow a partition here any more. No later answer confirms its master."""
        stream = self._streams.pop(vb_id, None)
        self._waiting.pop(vb_id, None)
        self._forget(vb_id)
        is_closed = self.state is LinkState.CLOSED
        if stream is not None and stream.step is not _FollowStep.WAITING and not is_closed:
            self._out.append(pack_request(Opcode.DCP_CLOSE_STREAM, vb_id=vb_id))

    def _forget(self, vb_id: int) -> None:
        """The stream of a partition is not OPEN any more."""
        self._left += 1
        self._highs.pop(vb_id, None)
        self._epochs.pop(vb_id, None)

    def follows(self, vb_id: int) -> bool:
        """Whether a partition is followed here; on a closed link, whether it was. Until
        `confirmed_ns` this node may have confirmed the partition's master.
        """
        return vb_id in self._streams

    def is_open(self, vb_id: int) -> bool:
        """Whether the master feeds a partition here."""
        stream = self._streams.get(vb_id)
        return stream is not None and stream.step is _FollowStep.OPEN

    @property
    def follows_any(self) -> bool:
        """Whether any partition is followed here; on a closed link, whether one was."""
        return bool(self._streams)

    def followed(self) -> tuple[int, ...]:
        """Return the partitions that are followed here."""
        return tuple(self._streams)

    def store_seen(self) -> None:
        """More of the metadata store's records is on disk here: tell the master at once."""
        self._acknowledge()

    def synced(self, group: int) -> None:
        """A commit group of this node is on disk: acknowledge it."""
        self.acks.synced(group)
        self._acknowledge()

    def readers_are(self, held: Mapping[int, Held]) -> None:
        """Tell the master what the streams hold that are served here, if that is news to it."""
        if self.state is LinkState.READY and self._format >= HELD_FORMAT:
            packed = pack_held(held)
            if packed != self.acks.held:
                self._out.append(self.acks.take_held(packed))

    def tick(self, now_ns: int, silence_ns: int = HEARD_NS_MAX) -> None:
        """Let time pass; monotonic nanoseconds. `silence_ns`: how long the node may say nothing."""
        if self.state is not LinkState.CLOSED and now_ns - self.heard_ns >= silence_ns:
            self._close("nothing was heard of the master's node")
        self._ask_what_is_due(now_ns)

    # -- bytes -------------------------------------------------------------------------------------

    def bytes_to_send(self) -> bytes:
        """Return what the shell has to send now."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def receive(self, data: bytes, now_ns: int) -> None:
        """Take bytes from the master's node. A peer that breaks the rules closes the link."""
        self.heard_ns = now_ns
        try:
            for frame in self._decoder.feed(data):
                if self.state is not LinkState.CLOSED:
                    self._take(frame, now_ns)
        except (ReplicationError, RemoteProtocolError) as error:
            self._close(str(error))

    def refused(self, why: str) -> None:
        """The other node runs and does not let this one in, or is not let in, for this reason."""
        self.is_barred = True
        self._close(why)

    def unreachable(self, why: str, *, is_refused: bool, is_barred: bool = False) -> None:
        """No connection could be made, for this reason."""
        self.is_refused, self.is_barred = is_refused, is_barred
        self._close(why)

    def closed(self) -> None:
        """The connection is gone."""
        self._close("the connection was closed")

    def _close(self, problem: str) -> None:
        if self.state is not LinkState.CLOSED:
            self.state = LinkState.CLOSED
            self.problem = problem
        self._waiting.clear()
        self._asked.clear()
        self.acks.unsynced.clear()
        self._groups.clear()
        self._highs.clear()
        self._out.clear()

    # -- inside ------------------------------------------------------------------------------------

    def _take(self, frame: Frame, now_ns: int) -> None:
        if frame.magic == Magic.RESPONSE:
            self._answered(frame, now_ns)
        elif frame.opcode == Opcode.X_REPLICA_ENTRIES:
            self._message(frame, now_ns)
        elif frame.opcode == Opcode.X_REPLICA_GROUP:
            self._group(frame, now_ns)
        elif frame.opcode == Opcode.DCP_STREAM_END:
            stream = self._streams.get(frame.vb_id)
            if stream is not None and stream.opaque == frame.opaque:
                is_damaged = parse_stream_end(frame) == EndReason.BACKFILL_FAILED
                self._wait(frame.vb_id, now_ns + (DAMAGED_RETRY_NS if is_damaged else RETRY_NS))
        else:
            raise ReplicationError(f"opcode 0x{frame.opcode:02x} does not belong here")

    def _answered(self, frame: Frame, now_ns: int) -> None:
        if frame.opcode in {Opcode.DCP_OPEN, Opcode.DCP_CONTROL}:
            if frame.status:
                raise ReplicationError(
                    f"the master's node refuses the link (status 0x{frame.status:x}): "
                    f"{frame.value[:200].decode('utf-8', 'replace')}"
                )
            if frame.opcode == Opcode.DCP_CONTROL:
                self.state = LinkState.READY
                self._format = format_of(frame.value, self._format)
                self._ask_what_is_due(now_ns)
            return
        vb_id = self._asked.pop(frame.opaque, None)
        if frame.opcode != Opcode.DCP_STREAM_REQ or vb_id is None:
            raise ReplicationError(
                f"an answer to a request that was not made: opcode 0x{frame.opcode:02x}, "
                f"opaque {frame.opaque}, status 0x{frame.status:x}"
            )
        stream = self._streams.get(vb_id)
        if stream is not None and stream.opaque == frame.opaque:  # else it was left meanwhile
            self._stream_answered(vb_id, stream, frame, now_ns)

    def _stream_answered(
        self, vb_id: int, stream: _FollowedStream, frame: Frame, now_ns: int
    ) -> None:
        if frame.status == Status.OK:
            welcome = decode(frame.value, Welcome)
            if welcome.epoch != stream.epoch:
                raise ReplicationError(
                    f"partition {vb_id}: asked in leader epoch {stream.epoch}, answered in "
                    f"{welcome.epoch}"
                )
            self._side.welcomed(vb_id, welcome)
            stream.step = _FollowStep.OPEN
            self._newest_open = max(self._newest_open, stream.opaque)
            self.acks.opened(now_ns)
            self._epochs[vb_id] = stream.epoch
            self._note_high(vb_id)
        elif frame.status == Status.ROLLBACK:
            high_seqno = self._side.high_seqno(vb_id)
            self._side.roll_back(vb_id, stream.epoch, *unpack_rollback(vb_id, frame.value))
            has_cut = self._side.high_seqno(vb_id) < high_seqno
            self._wait(vb_id, now_ns if has_cut else now_ns + RETRY_NS)
            self._ask_if_due(vb_id, now_ns)
        else:
            self._wait(vb_id, now_ns + RETRY_NS)

    def _note_high(self, vb_id: int) -> None:
        if self._side.incomplete_snapshot(vb_id) is None:
            self._highs[vb_id] = self._side.high_seqno(vb_id)
        else:
            self._highs.pop(vb_id, None)

    def _wait(self, vb_id: int, until_ns: int) -> None:
        self._forget(vb_id)
        stream = self._streams[vb_id]
        stream.step, stream.retry_ns = _FollowStep.WAITING, until_ns
        self._waiting[vb_id] = None

    def _ask_what_is_due(self, now_ns: int) -> None:
        for vb_id in tuple(self._waiting):
            self._ask_if_due(vb_id, now_ns)

    def _ask_if_due(self, vb_id: int, now_ns: int) -> None:
        stream = self._streams[vb_id]
        if self.state is LinkState.READY and stream.retry_ns <= now_ns:
            asked, position = self._side.position(vb_id, stream.epoch)
            self._next_opaque += 1
            stream.opaque, stream.step = self._next_opaque, _FollowStep.ASKED
            del self._waiting[vb_id]
            self._asked[stream.opaque] = vb_id
            self._out.append(pack_stream_request(vb_id, asked, stream.opaque, encode(position)))

    def _message(self, frame: Frame, now_ns: int) -> None:
        message = unpack_entries(frame)
        self.acks.check_number(message.number)
        group = self._take_sections(message)
        if message.seen.revision:
            self._side.master_serves(self._master, message.seen)
        self._taken(message.number, message.question, group, now_ns, can_wait=False)

    def _taken(
        self, number: int, question: int, group: int, now_ns: int, *, can_wait: bool
    ) -> None:
        """A message is applied: see `Acks.applied`."""
        self.confirmed_ns = now_ns
        if self.acks.applied(number, question, group, now_ns, can_wait=can_wait):
            self._acknowledge()

    def _take_sections(self, message: Message) -> int:
        """Apply sections; return the commit group that must be synced before, 0: none."""
        taken: dict[int, EntriesSection] = {}
        for section in message.sections:
            stream = self._streams.get(section.vb_id)
            if stream is None or stream.opaque != section.opaque:
                continue  # it was left meanwhile
            if stream.step is not _FollowStep.OPEN:
                continue  # it has ended
            where = f"message {message.number}, partition {section.vb_id}"
            if stream.epoch != section.epoch:
                raise ReplicationError(
                    f"{where}: it has leader epoch {section.epoch}, the stream {stream.epoch}"
                )
            if section.vb_id in taken:
                raise ReplicationError(f"{where}: the partition has two sections")
            problem = problem_of(
                section, self._side.high_seqno(section.vb_id),
                self._side.incomplete_snapshot(section.vb_id), self._value_bytes_max,
            )  # fmt: skip
            if problem:
                raise ReplicationError(f"{where}: {problem}")
            taken[section.vb_id] = section
        for section in taken.values():
            self._side.apply(section)
            if section.entries:
                self._note_high(section.vb_id)
        self._side.applied(taken)
        return max(map(self._side.unsynced_group, taken), default=0)

    def _group(self, frame: Frame, now_ns: int) -> None:
        message = unpack_group(frame)
        self.acks.check_number(message.number)
        group = self._take_group(message) if message.entries else 0
        can_wait = group > 0 or not message.entries
        self._taken(message.number, message.question, group, now_ns, can_wait=can_wait)
        if message.committed[1]:
            self._take_committed(*message.committed)

    def _take_group(self, message: GroupMessage) -> int:
        """Apply a group; return the commit group that has it here, 0: none."""
        opened, highs = message.opened, self._highs
        if opened < self._newest_open:
            streams = self._streams
            highs = {vb: seqno for vb, seqno in highs.items() if streams[vb].opaque <= opened}
        applied = self._side.apply_group(
            message.entries, highs, self._epochs, self._value_bytes_max + ENTRY_OVERHEAD_BYTES_MAX
        )
        group, ends = applied or self._apply_checked(message, highs)
        if highs is not self._highs:
            self._highs.update(ends)
        self._groups[message.number] = _AppliedGroup(ends, opened, self._left)
        self.newest_group = None
        if not message.is_synced:
            self.newest_group = NewestGroup(message.number, message.entries)
        if len(self._groups) > _REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]
        return group

    def _apply_checked(
        self, message: GroupMessage, highs: dict[int, int]
    ) -> tuple[int, dict[int, int]]:
        """Check a group, then apply it; return the same as `ReplicaSide.apply_group`."""

        def check_absent(vb_id: int) -> None:
            stream = self._streams.get(vb_id)
            is_for_it = stream is not None and stream.opaque <= message.opened
            if is_for_it and stream is not None and stream.step is _FollowStep.OPEN:
                raise ReplicationError(f"partition {vb_id}: a whole group inside of a snapshot")

        try:
            changes, ends = checked_group(
                message.entries, highs, self._epochs, check_absent, self._value_bytes_max
            )
        except ReplicationError as error:
            raise ReplicationError(f"message {message.number}, {error}") from None
        return self._side.apply_changes(changes) if changes else 0, ends

    def _take_committed(self, first: int, last: int) -> None:
        """The groups of the messages from the first to the last are committed."""
        newest = self.newest_group
        if newest is not None and first <= newest.number <= last:
            self.newest_group = None
        seqnos: dict[int, int] = {}
        for number in [number for number in self._groups if first <= number <= last]:
            ends, opened, left = self._groups.pop(number)
            if left != self._left:
                ends = {
                    vb_id: seqno
                    for vb_id, seqno in ends.items()
                    if vb_id in self._epochs and self._streams[vb_id].opaque <= opened
                }
            seqnos = seqnos | ends if seqnos else ends  # it is one group most often
        if seqnos:
            self._side.committed(seqnos, is_synced=last <= self.acks.synced_number)

    def _acknowledge(self) -> None:
        ack = self.acks.take(may_send=self.state is LinkState.READY)
        if ack is not None:
            self._out.append(ack)


def from_here(seqno: int, vb_uuid: int, window: SnapshotWindow | None = None) -> StreamRequest:
    """Return the stream request of a replica that holds everything up to a seqno, or the part of a
    snapshot up to there.
    """
    start, end = (seqno, seqno) if window is None else (window.start, window.end)
    return StreamRequest(0, seqno, SEQNO_MAX, vb_uuid, start, end)
