"""Looks at a cluster while it runs, for what facts at the end would hardly show.

- what is committed is on the disk of every member of the in-sync set, at every moment. A change
  that is not may be lost by the next election, which needs two more failures to happen;
- a write that was answered as durable is on the disks of a majority of the copies;
- one node at a time answers for a partition;
- a master that was replaced does not keep streams open: who reaches only it would stand still.

What it sees goes into the facts; `sim.checkers.membership` has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from failover.rules.history import FailoverLog
from failover.rules.replication_record import ReplicationRecord, majority
from sim.facts import Facts, Kept, Lacking, Overlap
from sim.machine import Machine
from sim.world import MS, World
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition, VbState

LOOK_NS: Final = 20 * MS

Held = tuple[FailoverLog, int, int]
"""The versions that a member has of a partition, the last seqno on its disk, its leader epoch."""


class Watched(Protocol):
    """A node as it is looked at."""

    name: str
    member: str
    engine: Engine

    def mastered(self) -> Iterable[int]:
        """Return the partitions of which it may be master."""

    def note_tail(self, vb_id: int) -> None:
        """Record what is not committed."""

    def would_answer(self, vb_id: int) -> bool:
        """Whether the node would answer a request for a partition now. For a process that is
        stopped: if it went on now.
        """

    def may_commit(self, vb_id: int) -> bool:
        """Whether enough members are in sync for the high watermark of what it masters to rise."""

    def open_streams(self) -> list[tuple[int, str]]:
        """Return (partition, connection) of the streams of consumers."""


class Claim:
    """The highest seqno of a partition that any node has called committed."""

    __slots__ = ("at_ns", "log", "node", "seqno", "vb_uuid")

    def __init__(self, at_ns: int, node: str, log: FailoverLog, vb_uuid: int, seqno: int) -> None:
        self.at_ns = at_ns
        self.node = node
        self.log = log
        self.vb_uuid = vb_uuid
        self.seqno = seqno


class InSyncWatch:
    """See the module. `record_of` returns a partition's record in the metadata store."""

    def __init__(
        self,
        world: World,
        facts: Facts,
        partitions: int,
        record_of: Callable[[int], ReplicationRecord],
        node_of: Callable[[str], str],
        *,
        reads_copies: bool = False,
    ) -> None:
        self._world = world
        self._reads_copies = reads_copies
        self._facts = facts
        self._partitions = partitions
        self._record_of = record_of
        self._node_of = node_of
        self._machines: dict[str, tuple[Machine, Watched]] = {}
        """By member, the machine and the node that runs there, or ran last."""
        self._claims: dict[int, Claim] = {}
        self._told: set[tuple[int, str]] = set()
        self._masters: dict[int, tuple[int, str, int]] = {}
        """Partition -> highest epoch that was served, by whom, since when."""
        self._masterships_seen = 0
        self._copies: dict[int, tuple[str, ...]] = {}
        """By partition, the copies when it was looked at last."""

    def begin(self) -> None:
        """Look from now on."""
        self._world.after(LOOK_NS, self._look)

    def booted(self, machine: Machine, node: Watched) -> None:
        """A member's process has started."""
        self._machines[node.member] = machine, node

    def committed(self, node: str, part: Partition) -> None:
        """A node calls everything up to a seqno committed."""
        seqno, vb_id = part.committed_seqno, part.vb_id
        claim = self._claims.get(vb_id)
        if (
            claim is not None
            and claim.seqno >= seqno
            and not self._is_void(vb_id, claim.at_ns, claim.seqno)
        ):
            return
        if seqno == 0:
            return
        if part.state == VbState.REPLICA and part.leader_epoch < self._record_of(vb_id).epoch:
            return  # it hears late what a former master said, perhaps before a branch
        entries = part.failover.entries
        version = next((each for each in entries if each.seqno < seqno), entries[-1])
        self._claims[vb_id] = Claim(self._world.now_ns, node, part.failover, version.vb_uuid, seqno)
        self._look_at(vb_id)

    def shared_seqno(self, part: Partition) -> int:
        """Return up to which seqno a partition has the history that was committed."""
        claim = self._claims.get(part.vb_id)
        if claim is None:
            return part.high_seqno
        own_ends = part.failover.uppers(part.high_seqno)
        return max(
            (
                min(end, own_ends[vb_uuid], part.high_seqno)
                for vb_uuid, end in claim.log.uppers(claim.seqno).items()
                if vb_uuid in own_ends
            ),
            default=0,
        )

    def _is_void(self, vb_id: int, at_ns: int, seqno: int) -> bool:
        """Whether a branch or an unclean election may have cut off what was committed by then."""
        return any(
            excuse.vb_id == vb_id
            and excuse.kind != "purge"
            and excuse.to_seqno < seqno
            and (excuse.until_ns is None or at_ns <= excuse.until_ns)
            for excuse in self._facts.excuses
        )

    def _look(self) -> None:
        for vb_id in self._claims:
            self._look_at(vb_id)
        self._look_at_durable()
        self._look_at_masters()
        self._look_at_streams()
        self._world.after(LOOK_NS, self._look)

    def _look_at(self, vb_id: int) -> None:
        claim = self._claims[vb_id]
        record = self._record_of(vb_id)
        if all(self._has_all(member, vb_id, claim) for member in record.isr):
            return  # as nearly always
        for member in sorted(record.isr):
            held = self._held(member, vb_id)
            if held is None:
                continue
            log, synced_seqno, leader_epoch = held
            if leader_epoch < record.epoch == record.unclean_epoch:
                continue  # it has not seen yet that it was elected: what that excuses is not noted
            end = log.upper_of(claim.vb_uuid, synced_seqno)
            if end is not None:
                # A replica has its master's versions before it has the changes in them.
                end = min(end, synced_seqno)
            if (end is None or end < claim.seqno) and (vb_id, member) not in self._told:
                if self._is_void(vb_id, claim.at_ns, claim.seqno):
                    return
                self._told.add((vb_id, member))
                self._facts.lacking.append(
                    Lacking(
                        self._world.now_ns, self._node_of(member), vb_id, synced_seqno,
                        claim.node, claim.vb_uuid, claim.seqno,
                    )
                )  # fmt: skip

    def _has_all(self, member: str, vb_id: int, claim: Claim) -> bool:
        """Whether a member whose newest version is that of a claim has all of it."""
        found = self._machines.get(member)
        if found is None:
            return False
        part = found[1].engine.partitions[vb_id]
        return part.vb_uuid == claim.vb_uuid and part.synced_seqno >= claim.seqno

    def _held(self, member: str, vb_id: int) -> Held | None:
        """Return what a member has on its disk: what its process had synced, if that has ended."""
        found = self._machines.get(member)
        if found is None:
            return None
        part = found[1].engine.partitions[vb_id]
        return part.failover, part.synced_seqno, part.leader_epoch

    def _look_at_durable(self) -> None:
        """Count the disks that have the writes which were answered as durable since the last look.
        Those of partitions whose copies have changed are passed over.
        """
        facts, before = self._facts, self._copies
        self._copies = {vb_id: self._record_of(vb_id).copies for vb_id in self._claims}
        for write in facts.durable:
            vb_id, seqno = write.vb_id, write.seqno
            copies = self._copies.get(vb_id, ())
            if copies != before.get(vb_id) or self._is_void(vb_id, write.ended_ns or 0, seqno):
                continue
            have = sum(self._keeps(member, vb_id, write.vb_uuid, seqno) for member in copies)
            if have < (wanted := majority(self._record_of(vb_id).counted_copies)):
                facts.on_few_disks.append(
                    f"{write} was answered as durable, and is on {have} disks, not {wanted}"
                )
        facts.durable.clear()

    def _keeps(self, member: str, vb_id: int, vb_uuid: int, seqno: int) -> bool:
        """Whether a member has a change of a version on its disk."""
        held = self._held(member, vb_id)
        end = None if held is None else held[0].upper_of(vb_uuid, held[1])
        return end is not None and held is not None and min(end, held[1]) >= seqno

    # -- masters -----------------------------------------------------------------------------------

    def _look_at_masters(self) -> None:
        """Note who began to serve, what others have then, and who would answer as well."""
        facts = self._facts
        touched: dict[int, None] = {}
        for item in facts.masterships[self._masterships_seen :]:
            epoch, _, _ = self._masters.get(item.vb_id, (0, "", 0))
            if item.epoch > epoch:
                self._masters[item.vb_id] = item.epoch, item.node, item.at_ns
                touched[item.vb_id] = None
        self._masterships_seen = len(facts.masterships)
        nodes = [node for machine, node in self._machines.values() if machine.node is node]
        for vb_id in touched:
            for node in nodes:
                node.note_tail(vb_id)
        mastered = Counter(vb_id for node in nodes for vb_id in node.mastered())
        for vb_id in sorted(vb_id for vb_id, masters in mastered.items() if masters > 1):
            answering = [node for node in nodes if node.would_answer(vb_id)]
            # Masters of which none can commit answer reads of one state: after the store has gone
            # back, a master goes on if the others are too few to commit (isr.may_change_record).
            if len(answering) > 1 and any(node.may_commit(vb_id) for node in answering):
                names = tuple(node.name for node in answering)
                facts.overlaps.append(Overlap(self._world.now_ns, vb_id, names))

    def _look_at_streams(self) -> None:
        """Note the streams that a master keeps although another one serves in a later epoch."""
        facts = self._facts
        now_ns = self._world.now_ns
        for machine, node in self._machines.values():
            if machine.node is not node or machine.host.is_paused:
                continue
            partitions = node.engine.partitions
            replaced = {
                vb_id
                for vb_id, (epoch, master, _) in self._masters.items()
                if master != machine.name and epoch > partitions[vb_id].leader_epoch
            }
            for vb_id, connection in node.open_streams() if replaced else ():
                if self._reads_copies and partitions[vb_id].state == VbState.REPLICA:
                    continue  # whoever reads from copies may wait for one that is cut off
                if vb_id in replaced:
                    _, master, since_ns = self._masters[vb_id]
                    facts.kept.append(
                        Kept(now_ns, machine.name, vb_id, connection, master, since_ns)
                    )
