"""X_GROUP_BEAT: who the members of a group of consumers are. Sans-IO.

A group is a document, `_dcpd:group:NAME`, with its epoch and its members. The master of the
document's partition coordinates the group, as Kafka's coordinator does. Each member beats; one that
has not for its lease is taken out with the next beat of another one. Each change of the members
begins an epoch.

Invariants
- an epoch is told when its document is committed. So it survives crashes and failovers, and none is
  told twice with other members;
- leases are in memory: a master that has just begun grants each member a whole one, because it does
  not know when it was heard. So members are taken out too late then, and never too early;
- a wall clock that was set back gives each member a whole lease again, and no more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from dcp.session.access.rights import split_key
from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
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
GROUPS_MAX: Final = 1_000
"""Groups with leases in memory; those that ended make room."""


class GroupBeat(msgspec.Struct, forbid_unknown_fields=True):
    """What a member says."""

    member: Annotated[str, Meta(min_length=1, max_length=64)]
    lease_ms: Annotated[int, Meta(ge=LEASE_MIN_MS, le=LEASE_MAX_MS)]
    leaves: bool = False


class GroupRecord(NamedTuple):
    """What the document has. Members are in the order in which they joined."""

    epoch: int
    members: list[str]


def after_beat(
    record: GroupRecord, leases: dict[str, tuple[int, int]], beat: GroupBeat, now_ns: int
) -> GroupRecord:
    """Return the group after a beat, and set `leases`: member -> when it has beaten last, and for
    how long that holds. Pure.
    """
    lease_ns = beat.lease_ms * 1_000_000
    known = {name: leases.get(name, (now_ns, lease_ns)) for name in record.members}
    known[beat.member] = now_ns, 0 if beat.leaves else lease_ns
    # What was heard in the future was heard before the clock was set back.
    held = {name: (min(heard_ns, now_ns), long_ns) for name, (heard_ns, long_ns) in known.items()}
    members = [name for name, (heard_ns, long_ns) in held.items() if now_ns - heard_ns < long_ns]
    leases.clear()
    leases.update({name: held[name] for name in members})
    if members == record.members:
        return record
    return GroupRecord(record.epoch + 1, members)


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
        _, key = split_key(request.key, has_collections=state.has_collections)
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
        if part.is_backed_up or engine.write_refusal:
            raise RefusedError(Status.ETMPFAIL, "the partition takes no writes now; try again")
        stored = DEFAULT_COLLECTION_PREFIX + key
        record = self._record(part, stored)
        after = after_beat(record, self._leases(part, key), told, engine.now_ns)
        if len(after.members) > MEMBERS_MAX:
            raise RefusedError(Status.E2BIG, f"a group has at most {MEMBERS_MAX} members")
        value = msgspec.json.encode({"epoch": after.epoch, "members": after.members})
        if after != record:
            status, _, _ = engine.store(SET, part.vb_id, stored, stored + value, 0, 0, 0, 0)
            if status:
                raise RefusedError(status, "the group's document cannot be written; try again")
            state.note(
                "group changed", group=key[len(GROUP_PREFIX) :].decode("utf-8", "replace"),
                epoch=after.epoch, members=len(after.members),
            )  # fmt: skip
        state.observes_history(part.vb_id)
        state.answer(request, value=value, is_json=True)

    def _record(self, part: Partition, stored: bytes) -> GroupRecord:
        entry = self._state.engine.document_entry(part, stored)
        if entry is None:
            return GroupRecord(0, [])
        try:
            found = msgspec.json.decode(plain_value(entry), type=dict)
            return GroupRecord(int(found["epoch"]), [str(name) for name in found["members"]])
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise RefusedError(
                Status.EINVAL, f"the document of this name is no group: {error}"
            ) from error

    def _leases(self, part: Partition, key: bytes) -> dict[str, tuple[int, int]]:
        known = self._state.hub.group_leases
        about = key, part.vb_uuid, part.leader_epoch
        if about not in known and len(known) >= GROUPS_MAX:
            del known[next(iter(known))]  # its members get whole leases with their next beat
        return known.setdefault(about, {})
