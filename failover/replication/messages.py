"""The messages between a replica's node and a master's node. Pure.

One connection for each ordered pair of nodes carries all partitions. The replica opens it like a
DCP client (DCP_OPEN under a name that stays the same, DCP_CONTROL `x_replicate`). Then it sends

    DCP_STREAM_REQ      for each partition: position, all its versions, and the leader epoch (JSON)
    DCP_CLOSE_STREAM    it does not follow a partition here any more
    X_REPLICA_ACK       how many messages are synced here, and which question it confirms; from time
                        to time how far the streams are that the replica serves (format 5)

and the master sends

    the answers         OK with a `Welcome`, ROLLBACK (`pack_rollback`), or X_FENCED with both
                        epochs in words
    X_REPLICA_ENTRIES   a numbered message: sections, each with entries of one partition
    X_REPLICA_GROUP     a numbered message: a commit group of the master, or nothing; and
                        which earlier ones are committed
    DCP_STREAM_END      it is not this partition's master any more

A section has the partition, the opaque of the stream request, the leader epoch, the high watermark,
and entries as the log stores them, prefix included. A message without sections is a heartbeat.
Among the entries of a section are control entries (vbucket.model.control):

    floor      the master's history floor and purge seqno
    snapshot   with a window: what follows is a part of a de-duplicated snapshot, so its seqnos have
               gaps. Without one: the snapshot ends here; with floor, purge seqno and highest CAS

A commit group goes as one message to a replica that has caught up in all its partitions that it
follows. The
entries are as the log has them, the same bytes for every replica (`share`), without control
entries. They are for the streams whose requests were answered before: the message has the opaque of
the newest of these, and opaques rise. The high watermark comes back by number: the groups of the
messages from one number to another are committed.

Invariants
- numbers have no gaps; an acknowledgement covers all messages up to its number;
- a message is taken completely or not at all: `unpack_entries` and `unpack_group` check the
  checksum, `problem_of` and `checked_group` that the entries follow what the replica has. In a
  group that is checked in the order of the log, without a section for each partition, and two
  rules are narrower: no entry is a control entry, and all of a partition have the leader epoch in
  which it is followed;
- seqnos follow each other without gaps, except within a snapshot, where they rise up to its end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import google_crc32c
import msgspec
from cbor2 import CBORDecodeError

from dcp.session.replication_port import ReplicationError
from dcp.stream.remote_readers import Held
from dcp.wire.frame import HEADER, Frame, pack_request
from dcp.wire.message import U64
from dcp.wire.opcode import Magic, Opcode
from failover.rules.history import EPOCH_MAX, FailoverLog
from vbucket.engine.replicated import ReplicatedChange
from vbucket.engine.resync import (
    UNENDED,
    Remaining,
    Resync,
    pack_remaining,
    unpack_remaining,
)
from vbucket.log.record import LogDamagedError, split_entries
from vbucket.model.control import (
    SnapshotWindow,
    control_document,
    pack_control,
    seqno_in,
    snapshot_window,
)
from vbucket.model.entry import (
    CONTROL_ENTRY,
    DELETION_EXTRAS_BYTES,
    EXPIRATION_EXTRAS_BYTES,
    LENGTHS,
    LOG_CONTROL,
    META,
    MUTATION_EXTRAS_BYTES,
    OPCODE_AT,
    PREFIX_BYTES,
    SYSTEM_EVENT_EXTRAS_BYTES,
    vb_id_of,
)
from vbucket.model.ids import SEQNO_MAX

FORMAT: Final = 6
"""The newest version of these messages that this dcpd speaks."""
FORMAT_OLDEST: Final = 4
"""The oldest one: each dcpd also speaks the newest of the version before it, so that the nodes of a
cluster can be upgraded one after the other."""
_ENTRIES_EXTRAS: Final = Struct(">QQIQQ")
"""Number, question, CRC-32C of the value, and a `StoreSeen`."""
_GROUP_EXTRAS: Final = Struct(">QQIQQ?")
"""Number, question, opaque of the newest stream; the messages whose groups are committed: from, to
(0: none); whether the group is synced. The CRC-32C of the value and then of these follows."""
_GROUP_EXTRAS_BYTES: Final = _GROUP_EXTRAS.size + 4
_ACK_EXTRAS: Final = Struct(">QQQQ")
"""Number, question, and a `StoreSeen`."""
_HELD: Final = Struct(">HQQQ")
"""Partition, and a `Held`."""
HELD_FORMAT: Final = 5
"""From this format on acknowledgements say what a replica's streams hold."""
RESYNC_FORMAT: Final = 6
"""From this format on a replica need not go back to 0 where deletions are purged."""
_ROLLBACK: Final = Struct(">QQ")
"""The seqno to go back to, the last one of the history that both have."""
_SECTION: Final = Struct(">HIIQI")
"""Partition, opaque of the stream request, leader epoch, high watermark, bytes of entries."""
ANNOUNCED_GROUPS_MAX: Final = 128
"""Commits are announced by group number for at most this many later groups. A replica remembers
twice as many."""
MESSAGE_BYTES_MAX: Final = 24 << 20
"""A section holds at least one entry, and a value may have 20 MiB."""
GROUP_BYTES_MAX: Final = MESSAGE_BYTES_MAX - _GROUP_EXTRAS_BYTES
"""A longer commit group goes section by section."""
ENTRY_OVERHEAD_BYTES_MAX: Final = 1024
"""Key and extras of an entry: a key has at most 250 bytes and a collection id."""
CONTROL_BYTES_MAX: Final = 256
"""Body of a control entry: a few names and at most six seqnos."""
_EXTRAS_BYTES: Final[dict[int, int]] = {
    Opcode.DCP_MUTATION: MUTATION_EXTRAS_BYTES,
    Opcode.DCP_DELETION: DELETION_EXTRAS_BYTES,
    Opcode.DCP_EXPIRATION: EXPIRATION_EXTRAS_BYTES,
    Opcode.DCP_SYSTEM_EVENT: SYSTEM_EVENT_EXTRAS_BYTES,
}
"""The changes that an entry can be, and the length of their extras."""

_crc32c = google_crc32c.value
_crc32c_extend = google_crc32c.extend
_LENGTHS_OF: Final = LENGTHS.unpack_from
_META_OF: Final = META.unpack_from


class StoreSeen(NamedTuple):
    """Up to which revision of the metadata store something holds.

    A master says that it serves by the records up to there, a replica that it has them on disk.
    """

    link: int = 0
    """The sender's connection to that store (`AliveRecord.link`)."""
    revision: int = 0


NOT_SEEN: Final = StoreSeen()


class EntriesSection(NamedTuple):
    """Entries of one partition, and its high watermark at the master."""

    vb_id: int
    opaque: int
    """Opaque of the request for the stream that this belongs to. A partition that was left and
    followed again has another one.
    """
    epoch: int
    committed_seqno: int
    entries: Sequence[bytes]


class Message(NamedTuple):
    """A numbered message of a master."""

    number: int
    question: int
    """What an acknowledgement confirms: that the master was still the master when it asked."""
    sections: tuple[EntriesSection, ...]
    seen: StoreSeen = NOT_SEEN


class SharedGroup(NamedTuple):
    """The entries of a commit group, with their checksum, for all replicas."""

    entries: bytes
    checksum: int


class GroupMessage(NamedTuple):
    """A numbered message of a master with a commit group."""

    number: int
    question: int
    opened: int
    """Opaque of the newest stream request that was answered OK before."""
    committed: tuple[int, int]
    """The messages from the first number to the second: their groups are committed; 0: none."""
    entries: bytes
    """The group's; b"": the message only tells what is committed."""
    is_synced: bool = True
    """Whether the master had synced the group when it sent it."""


def common_format(newest: int, oldest: int, own: int = FORMAT) -> int:
    """Return the newest format that this dcpd, which speaks up to `own`, and one that speaks from
    `oldest` to `newest` have in common: the two speak that. 0: there is none.
    """
    common = min(own, newest)
    return common if common >= max(FORMAT_OLDEST, oldest) else 0


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of the control `x_replicate`: who wants to replicate."""

    format: int
    """The newest that it speaks."""
    cluster: str
    member: str
    incarnation: int
    master: str
    """The member that it wants to reach: another folder may be served at the same address now."""
    oldest: int = FORMAT_OLDEST
    """The oldest format that it speaks."""


class ReplicaPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON value of a replica's stream request. Nodes of older formats know no `resync`."""

    epoch: int
    versions: list[tuple[str, str, int]]
    """vb_uuid, seqno (decimal text, because 64 bits are more than a JSON number holds), epoch."""
    snapshot_purge: int = 0
    """The purge seqno of the incomplete snapshot of which the replica has a part; 0: none."""
    history_floor: int = 0
    """The replica cannot go back below it, but to 0. A former master may have given it a floor that
    its present one has not heard of."""
    copy_number: int = 0
    """The number of the replica's copy, in the record that it knows."""
    resync: Resync | None = None
    """What it asks about, after the answer ROLLBACK told what the master still has."""

    def failover_log(self) -> FailoverLog:
        """Return the replica's versions. Raises ValueError."""
        return FailoverLog.from_document(
            [[int(vb_uuid), int(seqno), epoch] for vb_uuid, seqno, epoch in self.versions]
        )


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON value of the answer OK: what the replica takes over before anything else."""

    epoch: int
    versions: list[tuple[str, str, int]]
    history_floor: int
    purge_seqno: int
    committed_seqno: int

    def failover_log(self) -> FailoverLog:
        """Return the master's versions. Raises ValueError."""
        return ReplicaPosition(self.epoch, self.versions).failover_log()


class Floors(NamedTuple):
    """The master's history floor and purge seqno, in a control entry."""

    floor: int
    purge: int


class SnapshotDone(NamedTuple):
    """The end of a snapshot, in a control entry. It is the replica's history floor."""

    seqno: int
    purge: int
    cas: int


Control = Floors | SnapshotWindow | SnapshotDone
"""What a control entry tells."""


def pack_control_entry(vb_id: int, control: Control) -> bytes:
    """Return the control entry that tells it."""
    document: dict[str, object]
    if isinstance(control, SnapshotWindow):
        document = {"kind": "snapshot", "window": list(control)}
    elif isinstance(control, SnapshotDone):
        document = {"kind": "snapshot", "window": None, **control._asdict()}
    else:
        document = {"kind": "floor", "seqno": control.floor, "purge": control.purge}
    return pack_control(vb_id, document)


def unpack_control_entry(entry: bytes) -> Control:
    """Return what a control entry tells. Raises ReplicationError."""
    if not CONTROL_ENTRY.size <= len(entry) <= CONTROL_ENTRY.size + CONTROL_BYTES_MAX:
        raise ReplicationError(f"a control entry of {len(entry)} bytes is not for replicas")
    try:
        document: Any = control_document(entry)
        kind = document["kind"]
        if kind == "floor":
            return Floors(seqno_in(document["seqno"]), seqno_in(document["purge"]))
        if kind == "snapshot":
            names = SnapshotDone._fields
            return snapshot_window(document) or SnapshotDone(
                *(seqno_in(document[n]) for n in names)
            )
    except (CBORDecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReplicationError(f"a control entry cannot be read: {error!r}") from error
    raise ReplicationError(f"a control entry of kind {kind!r} is not for replicas")


def versions_of(log: FailoverLog) -> list[tuple[str, str, int]]:
    """Return a failover log as `ReplicaPosition` and `Welcome` carry it."""
    return [(str(entry.vb_uuid), str(entry.seqno), entry.epoch) for entry in log.entries]


def pack_entries(
    number: int, question: int, sections: Iterable[EntriesSection], seen: StoreSeen = NOT_SEEN
) -> bytes:
    """Return a message of a master."""
    pieces: list[bytes] = []
    for section in sections:
        entries = b"".join(section.entries)
        pieces += (
            _SECTION.pack(
                section.vb_id, section.opaque, section.epoch, section.committed_seqno, len(entries)
            ),
            entries,
        )
    value = b"".join(pieces)
    extras = _ENTRIES_EXTRAS.pack(number, question, _crc32c(value), *seen)
    return pack_request(Opcode.X_REPLICA_ENTRIES, extras=extras, value=value)


def unpack_entries(frame: Frame) -> Message:
    """Return a message of a master. Raises ReplicationError."""
    try:
        number, question, checksum, *seen = _ENTRIES_EXTRAS.unpack(frame.extras)
    except struct.error:
        raise ReplicationError(f"a message has {_ENTRIES_EXTRAS.size} bytes of extras") from None
    value = frame.value
    if _crc32c(value) != checksum:
        raise _bad_checksum(number, value)
    sections: list[EntriesSection] = []
    position, end = 0, len(value)
    while position < end:
        if end - position < _SECTION.size:
            raise ReplicationError(f"message {number}: its last section is cut")
        vb_id, opaque, epoch, committed_seqno, size = _SECTION.unpack_from(value, position)
        position += _SECTION.size
        if size > end - position:
            raise ReplicationError(
                f"message {number}, partition {vb_id}: {size} bytes of entries, fewer follow"
            )
        try:
            entries = split_entries(value[position : position + size])
        except LogDamagedError as error:
            raise ReplicationError(f"message {number}, partition {vb_id}: {error}") from None
        sections.append(EntriesSection(vb_id, opaque, epoch, committed_seqno, entries))
        position += size
    return Message(number, question, tuple(sections), StoreSeen(*seen))


def share(entries: bytes) -> SharedGroup:
    """Make the entries of a commit group ready to be sent to any number of replicas."""
    return SharedGroup(entries, _crc32c(entries))


NOTHING: Final = share(b"")
"""For a message that only tells what is committed."""


def pack_group(
    number: int,
    question: int,
    opened: int,
    committed: tuple[int, int],
    group: SharedGroup,
    *,
    is_synced: bool = True,
) -> list[bytes]:
    """Return the pieces of a message with a commit group; see `GroupMessage`."""
    extras = _GROUP_EXTRAS.pack(number, question, opened, *committed, is_synced)
    checksum: int = _crc32c_extend(group.checksum, extras)
    head = HEADER.pack(
        Magic.REQUEST, Opcode.X_REPLICA_GROUP, 0, _GROUP_EXTRAS_BYTES, 0, 0,
        _GROUP_EXTRAS_BYTES + len(group.entries), 0, 0,
    )  # fmt: skip
    head += extras + checksum.to_bytes(4, "big")
    return [head, group.entries] if group.entries else [head]


def unpack_group(frame: Frame) -> GroupMessage:
    """Return a message with a commit group; its entries are not checked. Raises
    ReplicationError.
    """
    extras, value = frame.extras, frame.value
    if len(extras) != _GROUP_EXTRAS_BYTES:
        raise ReplicationError(f"a message with a group has {_GROUP_EXTRAS_BYTES} bytes of extras")
    number, question, opened, first, last, is_synced = _GROUP_EXTRAS.unpack_from(extras)
    checksum = _crc32c_extend(_crc32c(value), extras[: _GROUP_EXTRAS.size])
    if checksum != int.from_bytes(extras[_GROUP_EXTRAS.size :], "big"):
        raise _bad_checksum(number, value)
    return GroupMessage(number, question, opened, (first, last), value, is_synced=is_synced)


def _bad_checksum(number: int, value: bytes) -> ReplicationError:
    return ReplicationError(
        f"message {number}: the checksum of its {len(value)} bytes is wrong; the network or a "
        "machine changes bytes"
    )


def problem_of(
    section: EntriesSection, high_seqno: int, window: SnapshotWindow | None, value_bytes_max: int
) -> str:
    """Return what is wrong with a section for a replica at `high_seqno`; "" if nothing is. `window`
    is that of its incomplete snapshot.
    """
    epoch_max, vb_id = section.epoch, section.vb_id
    if not 0 < epoch_max <= EPOCH_MAX or section.committed_seqno > SEQNO_MAX:
        return f"leader epoch {epoch_max} or seqno {section.committed_seqno} cannot be"
    body_bytes_max = value_bytes_max + ENTRY_OVERHEAD_BYTES_MAX
    epoch_before = 0
    for entry in section.entries:
        prev_seqno, epoch, opcode, key_bytes, extras_bytes, entry_vb_id, body_bytes = _LENGTHS_OF(
            entry
        )
        if entry_vb_id != vb_id:
            return f"an entry of partition {entry_vb_id} in the section of partition {vb_id}"
        if opcode == LOG_CONTROL:
            try:
                control = unpack_control_entry(entry)
            except ReplicationError as error:
                return str(error)
            if problem := _misplaced(control, high_seqno, window, section.committed_seqno):
                return problem
            window = control if isinstance(control, SnapshotWindow) else None
            continue
        if (
            _EXTRAS_BYTES.get(opcode) != extras_bytes
            or not key_bytes
            or extras_bytes + key_bytes > body_bytes
        ):
            return (
                f"the entry after seqno {high_seqno} has opcode 0x{opcode:02x}, {body_bytes} bytes,"
                f" of these {extras_bytes} of extras and {key_bytes} of key: that is no change"
            )
        _, _, _, _, cas, seqno, _ = _META_OF(entry)
        if not high_seqno < seqno <= (high_seqno + 1 if window is None else window.end):
            where = "" if window is None else f" in the snapshot that ends at {window.end}"
            return f"seqno {seqno} follows {high_seqno}{where}"
        if not epoch_before <= epoch <= epoch_max:
            return f"seqno {seqno} has leader epoch {epoch}, outside {epoch_before} to {epoch_max}"
        if body_bytes > body_bytes_max:
            return f"seqno {seqno} has {body_bytes} bytes; at most {body_bytes_max} are allowed"
        if prev_seqno >= seqno or (not cas and opcode != Opcode.DCP_SYSTEM_EVENT):
            return f"seqno {seqno} replaces seqno {prev_seqno} and has CAS {cas}: that cannot be"
        high_seqno, epoch_before = seqno, epoch
    if window is not None and window.start == high_seqno:
        return f"the snapshot from seqno {window.start} begins without a change"
    return ""


def _misplaced(
    control: Control, high_seqno: int, window: SnapshotWindow | None, committed_seqno: int
) -> str:
    """Return why a control entry cannot stand behind `high_seqno`, "" if it can."""
    if isinstance(control, Floors):
        if window is not None:
            return f"floors inside the snapshot that ends at {window.end}"
        if control.floor <= min(high_seqno, committed_seqno) and control.purge < max(
            control.floor, 1
        ):
            return ""
        return (
            f"history floor {control.floor} with purge seqno {control.purge}, behind seqno "
            f"{high_seqno} and committed seqno {committed_seqno}: a floor is committed, a purge "
            "seqno is below it"
        )
    if isinstance(control, SnapshotDone):
        if window is None or not window.end == control.seqno == high_seqno:
            return f"a snapshot ends at seqno {control.seqno}; this replica is at {high_seqno}"
        if control.purge >= control.seqno:
            return f"purge seqno {control.purge} of a snapshot that ends at {control.seqno}"
        return ""
    if window is None:
        return "" if control.start == high_seqno else _elsewhere(control, high_seqno)
    goes_on = control.start == window.start and (control.end >= window.end or window.end == UNENDED)
    return "" if goes_on else _elsewhere(control, high_seqno)


def _elsewhere(begun: SnapshotWindow, high_seqno: int) -> str:
    return (
        f"a snapshot begins at seqno {begun.start} and ends at {begun.end}; this replica is at "
        f"{high_seqno}"
    )


def pack_rollback(seqno: int, shared_seqno: int, remaining: Remaining | None = None) -> bytes:
    """Return the value of a ROLLBACK: where to go back to, and up to where both have the same
    history. A purge sends a replica further back than that, unless it asks about what remains.
    """
    packed = b"" if remaining is None else pack_remaining(remaining)
    return _ROLLBACK.pack(seqno, shared_seqno) + packed


def unpack_rollback(vb_id: int, value: bytes) -> tuple[int, int, Remaining | None]:
    """Return what `pack_rollback` packed; a master of 0.2.0 sends the first number only. Raises
    ReplicationError.
    """
    if len(value) < U64.size:
        raise ReplicationError(f"partition {vb_id}: ROLLBACK without a seqno")
    (seqno,) = U64.unpack_from(value)
    shared_seqno: int = seqno if len(value) < _ROLLBACK.size else _ROLLBACK.unpack_from(value)[1]
    packed = value[_ROLLBACK.size :]
    try:
        remaining = unpack_remaining(packed) if packed else None
    except ValueError as error:
        raise ReplicationError(f"partition {vb_id}: ROLLBACK: {error}") from error
    return seqno, max(seqno, shared_seqno), remaining


def pack_ack(number: int, question: int, seen: StoreSeen = NOT_SEEN, held: bytes = b"") -> bytes:
    """Return an acknowledgement; `held` is what `pack_held` packed, b"": as before."""
    extras = _ACK_EXTRAS.pack(number, question, *seen)
    return pack_request(Opcode.X_REPLICA_ACK, extras=extras, value=held)


NOTHING_HELD: Final = _HELD.pack(0xFFFF, 0, 0, 0)
"""There are no streams that hold anything."""


def pack_held(held: Mapping[int, Held]) -> bytes:
    """Return what a replica's streams hold: all of it, by partition."""
    return b"".join(_HELD.pack(vb_id, *each) for vb_id, each in held.items()) or NOTHING_HELD


def unpack_held(value: bytes, num_vbuckets: int) -> dict[int, Held]:
    """Return what `pack_held` packed. Raises ReplicationError."""
    if value == NOTHING_HELD:
        return {}
    try:
        found = {vb_id: Held(*rest) for vb_id, *rest in _HELD.iter_unpack(value)}
    except struct.error:
        raise ReplicationError(
            f"an acknowledgement has {len(value)} bytes of streams, {_HELD.size} for each partition"
        ) from None
    if max(found) >= num_vbuckets:
        raise ReplicationError(f"no stream can be of partition {max(found)} here")
    return found


def format_of(answer: bytes, newest: int = FORMAT) -> int:
    """Return the format in which a master's node answers a greeting that offers up to `newest`; one
    that speaks none but 4 says nothing. Raises ReplicationError.
    """
    try:
        chosen = int(answer or b"4")
    except ValueError:
        chosen = 0
    if not FORMAT_OLDEST <= chosen <= newest:
        raise ReplicationError(f"the master's node chose format {answer[:20]!r} of the messages")
    return chosen


def unpack_ack(extras: bytes) -> tuple[int, int, StoreSeen]:
    """Return number, question and what is seen of the store. Raises ReplicationError."""
    try:
        number, question, *seen = _ACK_EXTRAS.unpack(extras)
    except struct.error:
        raise ReplicationError(
            f"an acknowledgement has {_ACK_EXTRAS.size} bytes of extras"
        ) from None
    return number, question, StoreSeen(*seen)


def decode(value: bytes, kind: Any) -> Any:
    """Return a JSON value as a `kind`. Raises ReplicationError."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicationError(f"not a {kind.__name__}: {error}") from None


def encode(value: msgspec.Struct) -> bytes:
    """Return a Greeting, ReplicaPosition or Welcome as JSON."""
    return msgspec.json.encode(value)


_HEAD: Final = Struct(">QIxBHBxHI4xQQ")
"""prev seqno, epoch, opcode, key length, extras length, vbucket, body length, CAS, seqno."""
_unpack_head = _HEAD.unpack_from
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_OTHER_EXTRAS_BYTES: Final[dict[int, int]] = {
    int(Opcode.DCP_DELETION): DELETION_EXTRAS_BYTES,
    int(Opcode.DCP_EXPIRATION): EXPIRATION_EXTRAS_BYTES,
    _SYSTEM_EVENT: SYSTEM_EVENT_EXTRAS_BYTES,
}
_BODY_AT: Final = PREFIX_BYTES + 24


def checked_group(
    payload: bytes,
    highs: dict[int, int],
    epochs: Mapping[int, int],
    check_absent: Callable[[int], None],
    value_bytes_max: int,
) -> tuple[list[ReplicatedChange], dict[int, int]]:
    """Return the changes of a group that are to be applied, and partition -> end seqno.
    `payload` has its entries.

    `highs` has the high seqno of each partition that the group is for, and is raised; `epochs` has
    the leader epochs of these. `check_absent` raises ReplicationError if an entry of another
    partition cannot be; else it is skipped. Raises ReplicationError; `highs` is of no use then.
    """
    changes: list[ReplicatedChange] = []
    append = changes.append
    ends: dict[int, int] = {}
    body_bytes_max = value_bytes_max + ENTRY_OVERHEAD_BYTES_MAX
    start, total = 0, len(payload)
    try:
        while start < total:
            prev_seqno, epoch, opcode, key_bytes, extras_bytes, vb_id, body, cas, seqno = (
                _unpack_head(payload, start)
            )
            end = start + _BODY_AT + body
            if vb_id not in highs:
                check_absent(vb_id)
            elif (
                seqno == highs[vb_id] + 1
                and epoch == epochs[vb_id]
                and prev_seqno < seqno
                and (extras_bytes == MUTATION_EXTRAS_BYTES if opcode == _MUTATION
                     else extras_bytes == _OTHER_EXTRAS_BYTES.get(opcode))
                and 0 < key_bytes <= body - extras_bytes
                and body <= body_bytes_max
                and end <= total
                and (cas or opcode == _SYSTEM_EVENT)
            ):  # fmt: skip
                highs[vb_id] = ends[vb_id] = seqno
                key_at = start + _BODY_AT + extras_bytes
                append(
                    (
                        vb_id, payload[key_at : key_at + key_bytes], payload[start:end], seqno,
                        prev_seqno, cas, opcode == _MUTATION,
                    )
                )  # fmt: skip
            else:
                entry = payload[start:end]
                raise _refused(entry, end - start, epochs[vb_id], highs[vb_id], value_bytes_max)
            start = end
    except struct.error as error:
        raise ReplicationError(f"an entry is too short: {error}") from None
    if start > total:
        raise ReplicationError(f"an entry reaches {start - total} bytes beyond the end")
    return changes, ends


def _refused(
    entry: bytes, entry_bytes: int, epoch: int, high_seqno: int, value_bytes_max: int
) -> ReplicationError:
    vb_id = vb_id_of(entry)
    if entry[OPCODE_AT] == LOG_CONTROL:
        return ReplicationError(f"partition {vb_id}: a control entry after seqno {high_seqno}")
    section = EntriesSection(vb_id, 0, epoch, 0, [entry])
    problem = problem_of(section, high_seqno, None, value_bytes_max)
    if not problem and len(entry) < entry_bytes:
        problem = f"an entry of {entry_bytes} bytes after seqno {high_seqno}; {len(entry)} follow"
    return ReplicationError(
        f"partition {vb_id}: "
        + (problem or f"the entry after seqno {high_seqno} is no change of leader epoch {epoch}")
    )
