"""X_GROUP_BEAT: who the members of a group of consumers are. Sans-IO.

A group is a document, `_dcpd:group:NAME`, with its epoch, its members, and the member that each
partition belongs to. The master of the
document's partition coordinates the group, as Kafka's coordinator does. Each member beats; one that
has not for its lease is taken out with the next beat of another one. Each change of the members
begins an epoch. All members have equally many partitions, and keep those that they had as far as
that allows: what they know of a partition stays of use.

Invariants
- an epoch is told when its document is committed. So it survives crashes and failovers, and none is
  told twice with other members;
- leases are in memory: a master that has just begun grants each member a whole one, because it does
  not know when it was heard. So members are taken out too late then, and never too early;
- a wall clock that was set back gives each member a whole lease again, and no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from dcp.session.access.rights import split_key
from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
from dcp.stream.group_leases import Leases
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, WrongVbucketError
from vbucket.engine.engine import SET
from vbucket.engine.partition import Partition, VbState
from vbucket.model.consumer_documents import GROUP_PREFIX
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, vbucket_of
from vbucket.store.plain_value import plain_value

MEMBERS_MAX: Final = 1024
"""One for each partition."""
LEASE_MIN_MS: Final = 200
LEASE_MAX_MS: Final = 600_000


class GroupBeat(msgspec.Struct, forbid_unknown_fields=True):
    """What a member says."""

    member: Annotated[str, Meta(min_length=1, max_length=64)]
    lease_ms: Annotated[int, Meta(ge=LEASE_MIN_MS, le=LEASE_MAX_MS)]
    leaves: bool = False


class GroupRecord(NamedTuple):
    """What the document has. Members are in the order in which they joined."""

    epoch: int
    members: list[str]
    owners: list[str]
    """Partition -> the member that follows it; empty without members."""


def group_in(value: bytes) -> GroupRecord:
    """Return what a group's document has. Raises ValueError for one that is somebody else's."""
    try:
        found = msgspec.json.decode(value, type=dict)
        members = [str(name) for name in found["members"]]
        owners = [members[at] for at in found["owners"]]
        return GroupRecord(int(found["epoch"]), members, owners)
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise ValueError(f"the document of this name is no group: {error}") from error


def owners_after(before: list[str], members: list[str], count: int) -> list[str]:
    """Return who follows each of `count` partitions, by who did: no member has two more than
    another one, and no more partitions change hands than that needs. Pure.
    """
    if not members:
        return []
    had = Counter(before[:count])
    by_size = sorted(members, key=lambda name: -had[name])  # who has most keeps what is left over
    least, over = divmod(count, len(members))
    room = {name: least + (at < over) for at, name in enumerate(by_size)}
    owners = [""] * count
    for vb_id, name in enumerate(before[:count]):
        if room.get(name):
            owners[vb_id] = name
            room[name] -= 1
    free = iter([name for name in members for _ in range(room[name])])
    return [name or next(free) for name in owners]


def after_beat(
    record: GroupRecord,
    leases: Leases,
    beat: GroupBeat,
    now_ns: int,
    count: int,
) -> GroupRecord:
    """Return the group of `count` partitions after a beat, and set its `leases`. Pure."""
    lease_ns = beat.lease_ms * 1_000_000
    known = {name: leases.get(name, (now_ns, lease_ns)) for name in record.members}
    known[beat.member] = now_ns, 0 if beat.leaves else lease_ns
    # What was heard in the future was heard before the clock was set back.
    held = {name: (min(heard_ns, now_ns), long_ns) for name, (heard_ns, long_ns) in known.items()}
    members = [name for name, (heard_ns, long_ns) in held.items() if now_ns - heard_ns < long_ns]
    leases.clear()
    leases.update({name: held[name] for name in members})
    owners = owners_after(record.owners, members, count)
    if (members, owners) == record[1:]:
        return record
    return GroupRecord(record.epoch + 1, members, owners)


class GroupCommand:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Callable[[Frame], None]]:
        """Return opcode -> handler."""
        return {Opcode.X_GROUP_BEAT: self.beat}

    def beat(self, request: Frame) -> None:
        """Renew a member's lease; answer with the group."""
        state, engine = self._state, self._state.engine
        refuse_stray(request, "extras")
        _, key = split_key(request.key, has_collections=state.hello.has_collections)
        if not key.startswith(GROUP_PREFIX) or len(key) == len(GROUP_PREFIX):
            raise RefusedError(Status.EINVAL, "the key is _dcpd:group: and the group's name")
        try:
            told = msgspec.json.decode(request.value, type=GroupBeat)
        except msgspec.MsgspecError as error:
            raise RefusedError(Status.EINVAL, f"this is no beat of a member: {error}") from error
        if request.vb_id != vbucket_of(key, engine.num_vbuckets):
            raise RefusedError(Status.EINVAL, "the partition is that of the key")
        part = engine.partitions[request.vb_id]
        if part.state != VbState.ACTIVE:
            raise WrongVbucketError
        if part.holds or engine.write_refusal:
            raise RefusedError(Status.ETMPFAIL, "the partition takes no writes now; try again")
        stored = DEFAULT_COLLECTION_PREFIX + key
        record = self._record(part, stored)
        leases = state.shared.hub.group_leases.of(key, part)
        after = after_beat(record, leases, told, engine.now_ns, engine.num_vbuckets)
        if len(after.members) > MEMBERS_MAX:
            raise RefusedError(Status.E2BIG, f"a group has at most {MEMBERS_MAX} members")
        group = {"epoch": after.epoch, "members": after.members}
        if after != record:
            at = {name: number for number, name in enumerate(after.members)}
            value = msgspec.json.encode({**group, "owners": [at[name] for name in after.owners]})
            status, _, _ = engine.store(SET, part.vb_id, stored, stored + value, 0, 0, 0, 0)
            if status:
                raise RefusedError(status, "the group's document cannot be written; try again")
            state.notes.add(
                "group changed", group=key[len(GROUP_PREFIX) :].decode("utf-8", "replace"),
                epoch=after.epoch, members=len(after.members),
            )  # fmt: skip
        state.observes_history(part.vb_id)
        mine = [vb_id for vb_id, name in enumerate(after.owners) if name == told.member]
        value = msgspec.json.encode({**group, "vbuckets": mine})
        state.answer(request, value=value, is_json=True)

    def _record(self, part: Partition, stored: bytes) -> GroupRecord:
        entry = self._state.engine.document_entry(part, stored)
        if entry is None:
            return GroupRecord(0, [], [])
        try:
            return group_in(plain_value(entry))
        except ValueError as error:
            raise RefusedError(Status.EINVAL, str(error)) from error
