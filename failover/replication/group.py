"""Whole commit groups: how a master replicates and commits what is in step. Sans-IO.

A replica that is in step gets a commit group of its master as the log has it: one message, the same
bytes for all replicas. Nothing is done for each partition before the group is committed:

    begin(group)                  what of a group replicas get; None: section by section
    acknowledged(member, groups)  a member, or this node, has synced them: says what that commits

Who calls it: `failover.replication.group_sending`. Feeds send the groups, and note to whom
(`sent_to`).

The high watermark is `failover.rules.isr.high_watermark`, with the number of the group instead of
seqnos: it is asked once for each in-sync set, not for each partition. That is allowed because a
member that has synced a group wholly has each of its partitions up to the group's seqno there.

Invariants
- group numbers stand for seqnos only where every member of the in-sync set got the partitions'
  part of the group wholly, on streams that are open since, and for partitions whose mastership has
  not changed since the group was sent. Others are left out of the group (`WholeGroup.leave_out`),
  and go partition by partition (`Acknowledged.one_by_one`);
- a partition that has control entries in the group, whose mastership is not ready, or that is not
  in step for a member is left out of the group from the beginning: `sections` says so. It goes
  section by section, and the others stay together.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from itertools import chain, takewhile
from typing import Final, NamedTuple

from failover.replication.mastership import InSyncSet, Mastership
from failover.replication.messages import SharedGroup, share
from failover.rules.isr import Acknowledgement, high_watermark
from vbucket.log.commit_group import CommitGroup
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, VB_ID, control_document, vb_id_of
from vbucket.upkeep.merge import NODE_VB_ID

_EPOCH: Final = 0
"""All acknowledgements of a group are of one epoch: the masterships have not changed since."""


class _Share(NamedTuple):
    """The partitions of a group that have the same in-sync set."""

    in_sync: InSyncSet
    seqnos: Mapping[int, int]


class WholeGroup:
    """A group of a master, as its replicas get it."""

    __slots__ = (
        "_changes",
        "acknowledged",
        "is_committed",
        "left_out",
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
        shares: tuple[_Share, ...],
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
        """Member -> which partitions it got, all of them in step."""
        self.acknowledged: dict[str, Acknowledgement] = {}
        self.is_committed = False
        """Whether all of it was found to be committed, by number."""
        self.sections = sections
        """Partitions of the group that are sent section by section."""
        self.left_out: set[int] = set(sections)
        """Partitions of the group that go one by one: these, and those of which that is known since
        the group was sent."""
        self._changes = changes

    def leave_out(self, vb_ids: set[int]) -> None:
        """These partitions go one by one from now on: something has changed for them."""
        left_out = vb_ids & self.seqnos.keys()
        if left_out:
            self.left_out |= left_out
            self.seqnos = _without(self.seqnos, left_out)
            self.shares = tuple(
                _Share(share.in_sync, _without(share.seqnos, left_out)) for share in self.shares
            )

    def out_of_step(self, member: str, in_step: Set[int]) -> set[int]:
        """Return the partitions that must reach a member in sync, and are not in step there."""
        found: set[int] = set()
        for part in self.shares:
            if member in part.in_sync.members:
                found |= part.seqnos.keys() - in_step
        return found

    def put_apart(self, vb_ids: set[int]) -> None:
        """Send these section by section. The group must not be sent yet."""
        assert not self.sent_to
        self.leave_out(vb_ids)
        self.sections |= vb_ids
        self._changes = _entries_of(self._changes, self.seqnos)
        self.shared = share(b"".join(self._changes))

    def only(self, vb_ids: Iterable[int]) -> tuple[Mapping[int, int], SharedGroup]:
        """Return the part of the group that is about these partitions."""
        seqnos = self.seqnos
        return {vb_id: seqnos[vb_id] for vb_id in vb_ids}, share(
            b"".join(_entries_of(self._changes, vb_ids))
        )


def _without(seqnos: Mapping[int, int], vb_ids: set[int]) -> Mapping[int, int]:
    return {vb_id: seqno for vb_id, seqno in seqnos.items() if vb_id not in vb_ids}


def _entries_of(changes: Sequence[bytes], vb_ids: Iterable[int]) -> list[bytes]:
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

    def note(self, vb_id: int) -> int:
        """Note a change of a partition; return its revision."""
        self.revision += 1
        self._at.pop(vb_id, None)
        self._at[vb_id] = self.revision
        return self.revision

    def since(self, revision: int) -> set[int]:
        """Return the partitions that have changed after a revision."""
        return {
            vb_id
            for vb_id, _ in takewhile(lambda item: item[1] > revision, reversed(self._at.items()))
        }


class Acknowledged:
    """What acknowledgements of whole groups bring."""

    __slots__ = ("committed", "groups", "one_by_one")

    def __init__(self) -> None:
        self.committed: Mapping[int, int] = {}
        """Partition -> the seqno up to which it is committed now."""
        self.groups: list[WholeGroup] = []
        """Groups of which something is committed now."""
        self.one_by_one: set[int] = set()
        """Partitions whose high watermark must be asked for each."""


class WholeGroups:
    """See the module. `masterships` is the node core's own table."""

    def __init__(
        self, member: str, masterships: Mapping[int, Mastership], num_vbuckets: int
    ) -> None:
        self._member = member
        self._masterships = masterships
        self._num_vbuckets = num_vbuckets
        self.revision = 0
        """Rises with every change of a mastership that matters here."""
        self._changes = StreamChanges()
        self._sets: dict[InSyncSet, set[int]] = {}
        """In-sync set -> the partitions of this master that have it, and are ready."""
        self._mastered: frozenset[int] = frozenset()
        self._only_set: InSyncSet | None = None
        """The one that all partitions of the node have; None: there are several."""
        self._is_stale = True

    def mastership_changed(self, vb_id: int) -> None:
        """A mastership is new or over, or its in-sync set is another one."""
        self.revision = self._changes.note(vb_id)
        self._is_stale = True

    def in_sync_sets(self) -> Mapping[InSyncSet, set[int]]:
        """Return the in-sync sets that there are, each with its partitions."""
        if self._is_stale:
            self._group_by_set()
        return self._sets

    def begin(self, group: CommitGroup) -> WholeGroup | None:
        """Return a group as replicas get it; None: it goes section by section, if any of it goes to
        replicas at all.
        """
        changes, payload = group.changes, group.payload
        seqnos: Mapping[int, int] = group.high_seqnos
        if changes and vb_id_of(changes[-1]) == NODE_VB_ID:  # high watermarks, for the own log
            payload = payload[: -len(changes[-1])]
            changes = changes[:-1]
        shares = self._shares(seqnos)
        sections: set[int] = set()
        if group.has_control:
            sections = {vb_id_of(entry) for entry in changes if entry[OPCODE_AT] == LOG_CONTROL}
        if shares is None or sections:  # others are masters of a part, or these are not ready
            whole = (seqnos.keys() & self._mastered) - sections
            sections = (seqnos.keys() & self._masterships.keys()) - whole
            seqnos = {vb_id: seqnos[vb_id] for vb_id in whole}
            shares = self._shares(seqnos)
            changes = _entries_of(changes, whole)
            payload = b"".join(changes)
        if not changes or shares is None:
            return None
        return WholeGroup(
            group.number, seqnos, changes, payload, self.revision, shares, self._mastered,
            sections,
        )  # fmt: skip

    def _shares(self, seqnos: Mapping[int, int]) -> tuple[_Share, ...] | None:
        """Split the partitions of a group by in-sync set; None: some of them have none yet."""
        if self._is_stale:
            self._group_by_set()
        if self._only_set is not None:
            return (_Share(self._only_set, seqnos),)
        for in_sync, vb_ids in self._sets.items():
            if seqnos.keys() <= vb_ids:
                return (_Share(in_sync, seqnos),)
        shares = []
        count = 0
        for in_sync, vb_ids in self._sets.items():
            found = {vb_id: seqnos[vb_id] for vb_id in seqnos.keys() & vb_ids}
            count += len(found)
            if found:
                shares.append(_Share(in_sync, found))
        return tuple(shares) if count == len(seqnos) else None

    def _group_by_set(self) -> None:
        self._sets = {}
        for vb_id, mastership in self._masterships.items():
            if mastership.is_ready:
                self._sets.setdefault(mastership.in_sync_set, set()).add(vb_id)
        self._mastered = frozenset(chain.from_iterable(self._sets.values()))
        self._only_set = None
        for in_sync, vb_ids in self._sets.items():
            if len(vb_ids) == self._num_vbuckets:
                self._only_set = in_sync
        self._is_stale = False

    def acknowledged(self, member: str, groups: Iterable[WholeGroup]) -> Acknowledged:
        """Take note that a member has synced all that it got of these groups, in their order."""
        found = Acknowledged()
        committed: list[Mapping[int, int]] = []
        for whole in groups:
            whole.acknowledged[member] = Acknowledgement(_EPOCH, whole.number)
            if whole.revision != self.revision:
                whole.leave_out(self._changes.since(whole.revision))
                whole.revision = self.revision
            if whole.left_out:
                found.one_by_one.update(whole.left_out & self._masterships.keys())
            if whole.is_committed:
                continue
            commits = 0
            for each in whole.shares:
                if not self._is_whole(whole, each):
                    found.one_by_one.update(each.seqnos)
                elif self._is_committed(whole, each.in_sync):
                    committed.append(each.seqnos)
                    commits += 1
            if commits:
                found.groups.append(whole)
                whole.is_committed = commits == len(whole.shares)
        if len(committed) == 1:  # as it is most often: nothing is copied
            found.committed = committed[0]
        elif committed:
            found.committed = dict(chain.from_iterable(each.items() for each in committed))
        return found

    def _is_whole(self, whole: WholeGroup, part: _Share) -> bool:
        """Whether all replicas of the in-sync set got these partitions' part of a group wholly."""
        for member in part.in_sync.members:
            if member != self._member:
                sent = whole.sent_to.get(member)
                if sent is None or not (sent is part.seqnos or part.seqnos.keys() <= sent.keys()):
                    return False
        return True

    def _is_committed(self, whole: WholeGroup, in_sync: InSyncSet) -> bool:
        number = whole.number
        return number <= high_watermark(
            number - 1, _EPOCH, in_sync.members, whole.acknowledged, in_sync.min_in_sync
        )


def changes_for_replicas(
    entries: Iterable[bytes], mastered: Container[int]
) -> dict[int, list[bytes]]:
    """Return partition -> what its replicas get of a group that goes section by section: changes,
    and floors. Versions come with the welcome.
    """
    changes: dict[int, list[bytes]] = {}
    for entry in entries:
        vb_id = vb_id_of(entry)
        is_control = entry[OPCODE_AT] == LOG_CONTROL
        if vb_id in mastered and not (is_control and control_document(entry)["kind"] != "floor"):
            changes.setdefault(vb_id, []).append(entry)
    return changes
