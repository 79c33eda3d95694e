"""How a master's commit groups go to its replicas, and are committed. Sans-IO.

    begun(group)                  it is about to be written: replicas where it can go at once get it
    synced(group)                 it is on disk: the others get it
    acknowledged(member, groups)  a member, or this node, has synced them: says what that commits

So all disks of a group sync it at the same time, and a small write takes one sync and not two, one
after the other. A replica may then have more than its master's disk
(`sendable_seqno` of the model checker says why that is safe). Nothing is committed before it is
synced here, too. Where the death of this node would leave too few members in sync, a group is sent
when it is synced (`failover.rules.isr.may_send_unsynced`).

The high watermark is `failover.rules.isr.high_watermark`, with the number of the group instead of
seqnos: it is asked once for each in-sync set, not for each partition. That is allowed because a
member that has synced a group has each of its partitions up to the group's seqno there.

Who calls it: `failover.replication.master`.

Invariants
- groups are begun and synced in turn: none is begun while another one is being written;
- a replica gets a group once, as one message or section by section;
- what goes section by section, and what is read from cursors, goes when it is synced;
- group numbers stand for seqnos only where every member of the in-sync set got all of the
  partitions' part of the group, on streams that are open since, and for partitions whose mastership
  has not changed since the group was sent. Others are excluded from the group, and go partition by
  partition (`Acknowledged.one_by_one`);
- a partition that has control entries in the group, whose mastership is not ready, or that is not
  in state REPLICATE for a member in sync is excluded from the beginning: `Group.sections` says so.
  It goes section by section, and the others stay together.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import chain
from typing import Final, NamedTuple

from dcp.core.groups import GroupCycle
from failover.replication.effects import ReplicationEffect
from failover.replication.feed import ReplicaFeed
from failover.replication.group import Group, Share, StreamChanges, entries_of
from failover.replication.handover import Handovers
from failover.replication.link import Announced
from failover.replication.mastership import InSyncSet, Mastership
from failover.rules.isr import Acknowledgement, high_watermark, may_send_unsynced
from vbucket.engine.engine import Engine
from vbucket.log.commit_group import CommitGroup
from vbucket.model.control import control_document
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, vb_id_of

_EPOCH: Final = 0
"""All acknowledgements of a group are of one epoch: the masterships have not changed since."""


class _Begun(NamedTuple):
    """A group that some replicas got before it is synced here."""

    group: Group
    feeds: list[ReplicaFeed]


class Acknowledged:
    """What acknowledgements of groups bring."""

    __slots__ = ("committed", "groups", "one_by_one")

    def __init__(self) -> None:
        self.committed: Mapping[int, int] = {}
        """Partition -> the seqno up to which it is committed now."""
        self.groups: list[Group] = []
        """Groups of which something is committed now."""
        self.one_by_one: set[int] = set()
        """Partitions whose high watermark must be asked for each."""


class OpenGroups:
    """See the module. `masterships` and `feeds` are the master's own tables."""

    def __init__(
        self,
        member: str,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
        num_vbuckets: int,
    ) -> None:
        self._member = member
        self._masterships = masterships
        self._feeds = feeds
        self._num_vbuckets = num_vbuckets
        self._begun: _Begun | None = None
        self._changes = StreamChanges()
        """Of masterships, as far as they matter here."""
        self._sets: dict[InSyncSet, set[int]] = {}
        """In-sync set -> the partitions of this master that have it, and are ready."""
        self._mastered: frozenset[int] = frozenset()
        self._only_set: InSyncSet | None = None
        """The one that all partitions of the node have; None: there are several."""
        self._is_stale = True

    @property
    def revision(self) -> int:
        """Rises with every change of a mastership that matters here."""
        return self._changes.revision

    def mastership_changed(self, vb_id: int) -> None:
        """A mastership is new or over, or its in-sync set is another one."""
        self._changes.note(vb_id)
        self._is_stale = True

    def in_sync_sets(self) -> Mapping[InSyncSet, set[int]]:
        """Return the in-sync sets that there are, each with its partitions."""
        if self._is_stale:
            self._sort_by_set()
        return self._sets

    # -- a group goes to replicas ------------------------------------------------------------------

    def begun(self, now_ns: int, written: CommitGroup) -> bool:
        """A group is about to be written; return whether any replica gets it already."""
        assert self._begun is None, "one group is written at a time"
        if written.has_control or not self._feeds or not self._has_own(written):
            return False
        group = self._open(now_ns, written)
        if group is not None and not group.sections and _outlives_this_node(group):
            feeds = [feed for feed in self._feeds.values() if feed.send_begun(group)]
            if feeds:
                self._begun = _Begun(group, feeds)
        return self._begun is not None

    def synced(self, now_ns: int, written: CommitGroup) -> Group | None:
        """A group is on disk: those that have not got it get it now. Return what of it goes to all
        replicas as one message; None: nothing.
        """
        begun, self._begun = self._begun, None
        if not written.has_control and not self._has_own(written):
            return None  # all of it came from other masters
        if begun is None:
            group, taken = self._open(now_ns, written), set()
        else:
            assert begun.group.number == written.number, "groups are synced as they were begun"
            group, taken = begun.group, self._begun_synced(now_ns, begun)
        if group is not None and (begun is None or not group.excluded):
            taken |= {
                member
                for member, feed in self._feeds.items()
                if member not in taken and feed.send_group(group)
            }
        sections = set() if group is None else group.sections
        if (sections or len(taken) < len(self._feeds)) and (
            changes := changes_for_replicas(written.changes, self._masterships)
        ):
            few = {vb_id: changes[vb_id] for vb_id in sections & changes.keys()}
            for member, feed in self._feeds.items():
                feed.group_synced(few if member in taken else changes)
        return group

    def _has_own(self, written: CommitGroup) -> bool:
        """Whether this node masters any partition of a group."""
        return not written.high_seqnos.keys().isdisjoint(self._masterships.keys())

    def _begun_synced(self, now_ns: int, begun: _Begun) -> set[str]:
        """A group that was sent before is synced; return who got it and still has the same link."""
        taken: set[str] = set()
        for feed in begun.feeds:
            if self._feeds.get(feed.member) is feed:
                feed.at(now_ns)
                feed.begun_synced()
                taken.add(feed.member)
        return taken

    def _open(self, now_ns: int, written: CommitGroup) -> Group | None:
        """Return what of a group all replicas can get as one message; None: nothing."""
        group = self._group_of(written) if self._feeds else None
        behind: set[int] = set()
        for feed in self._feeds.values():
            feed.at(now_ns)
            if group is not None:
                behind |= feed.not_replicated(group)
        if group is not None and behind:
            if behind >= group.seqnos.keys():
                return None
            group.send_in_sections(behind)
        return group

    def _group_of(self, written: CommitGroup) -> Group | None:
        """Return a group as replicas get it; None: it goes section by section, if any of it goes to
        replicas at all.
        """
        changes, payload = written.changes, written.payload
        seqnos: Mapping[int, int] = written.high_seqnos
        if written.has_watermarks:
            payload = payload[: -len(changes[-1])]
            changes = changes[:-1]
        shares = self._shares(seqnos)
        sections: set[int] = set()
        if written.has_control:
            sections = {vb_id_of(entry) for entry in changes if entry[OPCODE_AT] == LOG_CONTROL}
        if shares is None or sections:  # others are masters of a part, or these are not ready
            together = (seqnos.keys() & self._mastered) - sections
            sections = (seqnos.keys() & self._masterships.keys()) - together
            seqnos = {vb_id: seqnos[vb_id] for vb_id in together}
            shares = self._shares(seqnos)
            changes = entries_of(changes, together)
            payload = b"".join(changes)
        if not changes or shares is None:
            return None
        return Group(
            written.number, seqnos, changes, payload, self.revision, shares, self._mastered,
            sections,
        )  # fmt: skip

    def _shares(self, seqnos: Mapping[int, int]) -> tuple[Share, ...] | None:
        """Split the partitions of a group by in-sync set; None: some of them have none yet."""
        if self._is_stale:
            self._sort_by_set()
        if self._only_set is not None:
            return (Share(self._only_set, seqnos),)
        for in_sync, vb_ids in self._sets.items():
            if seqnos.keys() <= vb_ids:
                return (Share(in_sync, seqnos),)
        shares = []
        count = 0
        for in_sync, vb_ids in self._sets.items():
            found = {vb_id: seqnos[vb_id] for vb_id in seqnos.keys() & vb_ids}
            count += len(found)
            if found:
                shares.append(Share(in_sync, found))
        return tuple(shares) if count == len(seqnos) else None

    def _sort_by_set(self) -> None:
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

    # -- and is committed --------------------------------------------------------------------------

    def acknowledged(self, member: str, groups: Iterable[Group]) -> Acknowledged:
        """Take note that a member has synced all that it got of these groups, in their order."""
        found = Acknowledged()
        committed: list[Mapping[int, int]] = []
        for group in groups:
            group.acknowledged[member] = Acknowledgement(_EPOCH, group.number)
            if group.revision != self.revision:
                group.exclude(self._changes.since(group.revision))
                group.revision = self.revision
            if group.excluded:
                found.one_by_one.update(group.excluded & self._masterships.keys())
            if group.is_committed:
                continue
            commits = 0
            for share in group.shares:
                if not self._reached_all(group, share):
                    found.one_by_one.update(share.seqnos)
                elif self._is_committed(group, share.in_sync):
                    committed.append(share.seqnos)
                    commits += 1
            if commits:
                found.groups.append(group)
                group.is_committed = commits == len(group.shares)
        if len(committed) == 1:  # as it is most often: nothing is copied
            found.committed = committed[0]
        elif committed:
            found.committed = dict(chain.from_iterable(each.items() for each in committed))
        return found

    def _reached_all(self, group: Group, share: Share) -> bool:
        """Whether all replicas of the in-sync set got all of these partitions' part of a group."""
        for member in share.in_sync.members:
            if member != self._member:
                sent = group.sent_to.get(member)
                if sent is None or not (sent is share.seqnos or share.seqnos.keys() <= sent.keys()):
                    return False
        return True

    def _is_committed(self, group: Group, in_sync: InSyncSet) -> bool:
        number = group.number
        return number <= high_watermark(
            number - 1, _EPOCH, in_sync.members, group.acknowledged, in_sync.min_in_sync
        )


def _outlives_this_node(group: Group) -> bool:
    """Whether enough members are in sync without this node, in all partitions of a group."""
    return all(
        may_send_unsynced(len(share.in_sync.members), share.in_sync.min_in_sync)
        for share in group.shares
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


class HighWatermarks:
    """Raises high watermarks: a master's by its in-sync set, a replica's by what was announced."""

    def __init__(
        self,
        engine: Engine,
        cycle: GroupCycle,
        masterships: Mapping[int, Mastership],
        feeds: Mapping[str, ReplicaFeed],
        handovers: Handovers,
        effects: list[ReplicationEffect],
    ) -> None:
        self._engine = engine
        self._commits = engine.commits
        self._cycle = cycle
        self._masterships = masterships
        self._feeds = feeds
        self._handovers = handovers
        self._effects = effects
        self.announced = Announced()
        self.held: set[int] | None = None  # of this master: waits for a cut; None: nothing does

    def advance(self, vb_ids: Iterable[int]) -> None:
        """Commit what may be committed now in these partitions."""
        rose: list[int] = []
        masterships, lagging = self._masterships, self._commits.lagging
        for vb_id in vb_ids:
            part = self._engine.partitions[vb_id]
            if part.committed_seqno == part.synced_seqno and vb_id not in lagging:
                continue  # all that may be committed is
            mastership = masterships.get(vb_id)
            if mastership is None:
                seqno = self.announced.seqno(vb_id)
            elif self.held is not None:
                self.held.add(vb_id)
                continue
            else:
                self.note_acknowledged(mastership)
                seqno = mastership.hw_seqno()
            seqno = max(part.committed_seqno, min(seqno, part.synced_seqno))
            self.announced.reached(vb_id, seqno)
            if self._commits.commit(vb_id, seqno):
                rose.append(vb_id)
                self._engine.keyspace.watermarks[vb_id] = part.committed_seqno
        if rose:
            self._tell(rose)
            for feed in self._feeds.values():
                feed.hw_rose(rose)

    def commit_many(self, seqnos: Mapping[int, int]) -> None:
        """Commit these partitions up to these seqnos. The caller tells the replicas."""
        rose = self._commits.commit_many(seqnos)
        if rose:
            if rose is not seqnos:
                seqnos = {vb_id: self._engine.partitions[vb_id].committed_seqno for vb_id in rose}
            self._engine.keyspace.watermarks.update(seqnos)
            self._tell(rose)

    def _tell(self, rose: Iterable[int]) -> None:
        self._effects.append(self._cycle.committed(rose))
        if self._handovers.is_under_way and self._handovers.any_held(rose):
            self._handovers.hurry()

    def note_acknowledged(self, mastership: Mastership) -> None:
        """Let a mastership know what replicas have acknowledged in groups."""
        for feed in self._feeds.values():
            if given := feed.streams.group_match(mastership.part.vb_id):
                mastership.acknowledged(feed.member, *given)
