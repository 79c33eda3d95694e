"""Builds the records of a cluster anew from what its nodes have, after the metadata store was lost
or went back to an older copy. Pure.

Each node that is up testifies: the newest records that its folder has seen, and where its log of
each partition ends. Then for each partition

- the newest record that anybody has seen, or that the store has, is the base;
- if no newer one can have had an effect, because of any `min_in_sync` copies one has testified
  (`failover.rules.election`), the members in sync that testified stay in sync, and nothing is lost;
- otherwise a person has to accept what may be lost. Then the member with the longest log alone is
  in sync, and who did not testify has no copy any more: it is filled anew when it comes back, and
  writes what it cuts off to discard files first;
- the new record is above every epoch that was seen, and has no master: the coordinator elects one
  by the rule that there is.

The record of the cluster is written last, with a higher life of the map. Until then nodes whose
store was emptied wait. Whoever is killed halfway is asked again: what is written counts as seen.

Who calls it: `dcp.server.cluster.operators.meta_desk`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from failover.coordinator.map_life import life_from
from failover.coordinator.records import (
    ClusterKeys,
    ClusterRecord,
    KeyKind,
    ManifestRecord,
    MemberRecord,
    StoredPartition,
    decode_partition,
    decode_record,
    encode_partition,
    encode_record,
)
from failover.coordinator.seen_records import LASTING, SeenRecord
from failover.metadata.metastore import Delete, KeyValue, Operation, Put, Txn, if_unchanged
from failover.rules.isr import min_in_sync_of
from failover.rules.replication_record import Rank, ReplicationRecord, rebuild

TESTIMONY: Final = "testimony"
"""The kind of the keys below the root that nodes testify under. Views do not have it."""
TXN_PARTITIONS: Final = 100
"""Records in one transaction."""


class HeldLog(NamedTuple):
    """Where a node's log of a partition ends."""

    vb_id: int
    leader_epoch: int
    version_epoch: int
    end_seqno: int
    is_master: bool
    """Whether it is the partition's master now, and knows that nobody was elected since."""


class NodeTestimony(msgspec.Struct, frozen=True, kw_only=True):
    """What a node that is up has. It is compressed, because a store takes 1.5 MB at most."""

    member: str
    operation: str
    """Of the request that asked for it."""
    life: int
    """The highest life of a map that clients were told."""
    records: dict[str, tuple[str, int]]
    """Key without the root -> the newest record that was seen, and its mod revision."""
    ends: list[HeldLog]

    def pack(self) -> bytes:
        """Return the value of its key."""
        return zlib.compress(msgspec.json.encode(self))


def unpack_testimony(value: bytes) -> NodeTestimony:
    """Return a testimony. Raises ValueError."""
    try:
        return msgspec.json.decode(zlib.decompress(value), type=NodeTestimony)
    except (zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"a node's testimony cannot be read: {error}") from None


def testimony_key(keys: ClusterKeys, member: str) -> bytes:
    """Return the key of a member's testimony."""
    return keys.root + f"{TESTIMONY}/{member}".encode()


@dataclass
class MetaRestorePlan:
    """What is to be written, and what an operator has to know before."""

    txns: list[Txn] = field(default_factory=list)
    rebuilt: list[int] = field(default_factory=list)
    """Partitions whose record is built anew, and nothing is lost."""
    lossy: list[int] = field(default_factory=list)
    """Partitions of which answered changes may be lost."""
    silent: dict[str, list[int]] = field(default_factory=dict)
    """Member that did not testify -> the partitions of `lossy` of which it has a copy."""
    ends: dict[int, str] = field(default_factory=dict)
    """Of the partitions of `lossy`: who has the longest log, and where it ends."""
    notes: list[str] = field(default_factory=list)


class MetaRestore:
    """See the module. `found` are all keys of the cluster in the store."""

    def __init__(
        self,
        keys: ClusterKeys,
        found: Iterable[KeyValue],
        testimonies: Iterable[NodeTestimony],
        *,
        operation: str,
        unix_s: float,
        accepts_loss: bool,
    ) -> None:
        self._keys = keys
        self._found = {item.key: item for item in found}
        self._told = tuple(testimonies)
        self._operation = operation
        self._unix_s = unix_s
        self._accepts_loss = accepts_loss
        self._plan = MetaRestorePlan()
        self._puts: list[Operation] = []
        self._names: dict[str, str] = {}
        self._ends: dict[int, dict[str, HeldLog]] = {}
        for told in self._told:
            for end in told.ends:
                self._ends.setdefault(end.vb_id, {})[told.member] = end

    # -- what is known -----------------------------------------------------------------------------

    def _candidates(self, name: str) -> list[KeyValue]:
        """Return what the store and the nodes have of a key, as items."""
        key = self._keys.root + name.encode()
        items = [
            KeyValue(key, seen.value, 1, seen.mod_revision, 1)
            for told in self._told
            if (seen := _seen(told, name)) is not None
        ]
        return [*items, self._found[key]] if key in self._found else items

    def _all_names(self) -> set[str]:
        root = self._keys.root
        names = {key[len(root) :].decode("utf-8", "replace") for key in self._found}
        names.update(name for told in self._told for name in told.records)
        return names

    # -- the plan ----------------------------------------------------------------------------------

    def plan(self) -> MetaRestorePlan:
        """Return what is to be done. Raises RecordUnreadableError."""
        parsed = {}
        for name in sorted(self._all_names()):
            key = self._keys.parse(self._keys.root + name.encode())
            if key is not None and key.kind in LASTING:
                parsed[name] = key
        self._members(name for name, key in parsed.items() if key.kind is KeyKind.MEMBER)
        cluster = self._cluster()
        self._newest(KeyKind.USERS, lambda item: item.mod_revision, "users")
        self._newest(
            KeyKind.MANIFEST, lambda item: decode_record(item, ManifestRecord).uid, "collections"
        )
        setting = None if cluster is None else cluster.min_in_sync
        for name, key in parsed.items():
            if key.kind is KeyKind.PARTITION:
                self._partition(key.vb_id, name, setting)
        self._finish(cluster)
        return self._plan

    def _members(self, names: Iterable[str]) -> None:
        for name in names:
            item = max(self._candidates(name), key=lambda each: each.mod_revision)
            member = decode_record(item, MemberRecord)
            self._names[member.member] = member.name or member.member
            key = self._keys.root + name.encode()
            if key not in self._found:
                self._plan.notes.append(f"node {self._names[member.member]} is recorded again")
                self._put(key, item.value)
                self._put(self._keys.of_name(member.name), member.member.encode())

    def _cluster(self) -> ClusterRecord | None:
        items = self._candidates(KeyKind.CLUSTER)
        if not items:
            return None
        records = [decode_record(item, ClusterRecord) for item in items]
        lives = [record.life for record in records] + [told.life for told in self._told]
        stored = self._found.get(self._keys.cluster)
        newest = max(items, key=lambda item: item.mod_revision)
        if stored is None:
            self._plan.notes.append("the cluster itself is recorded again")
        record = decode_record(newest, ClusterRecord)
        return msgspec.structs.replace(record, life=life_from(self._unix_s, *lives))

    def _newest(self, kind: KeyKind, rank: Callable[[KeyValue], int], what: str) -> None:
        """Write the newest users, or collections, of the cluster if the store has older ones."""
        items = self._candidates(kind)
        key = self._keys.root + kind.encode()
        stored = self._found.get(key)
        if not items:
            return
        newest = max(items, key=rank)
        if stored is None or rank(newest) > rank(stored):
            older = "the store has none" if stored is None else "the store has older ones"
            self._plan.notes.append(f"{what} are those that a node has seen; {older}")
            self._put(key, newest.value)

    def _partition(self, vb_id: int, name: str, setting: int | None) -> None:
        items = self._candidates(name)
        records = [decode_partition(item).record for item in items]
        base = max(records, key=lambda record: record.rank)
        ends = self._ends.get(vb_id, {})
        above = Rank(
            max(*(each.epoch for each in records), *(end.leader_epoch for end in ends.values()), 0),
            max(each.partition_epoch for each in records),
        )
        stored = self._found.get(self._keys.root + name.encode())
        present = None if stored is None else decode_partition(stored).record
        spoken = {told.member for told in self._told}
        silent = frozenset(base.copies) - spoken
        is_known = len(silent) < min_in_sync_of(setting, base.counted_copies)
        has_forked = any(each.rank == base.rank and each != base for each in records)
        # A log may know of an epoch whose record nobody has: then nobody knows who was in sync.
        is_known = is_known and above.epoch == base.epoch
        is_right = present == base and above.epoch <= base.epoch and not has_forked
        is_served = any(end.is_master and end.leader_epoch == base.epoch for end in ends.values())
        if is_right and (is_known or is_served):
            return
        in_sync = base.isr & spoken
        able = {  # a copy of which nothing was told is empty
            member: ends.get(member, HeldLog(vb_id, 0, 0, 0, is_master=False))
            for member in base.copies
            if member in spoken and member not in base.filling
        }
        if is_known and in_sync and not has_forked:
            longest = max(able.values(), key=_length, default=None)
            best = max((ends[each] for each in in_sync if each in ends), key=_length, default=None)
            is_longest = longest is None or best is None or _length(longest) <= _length(best)
            self._plan.rebuilt.append(vb_id)
            record = rebuild(base, base.copies, in_sync, above=above, is_clean=is_longest)
            self._put_record(vb_id, record)
            return
        self._plan.lossy.append(vb_id)
        for member in silent:
            self._plan.silent.setdefault(self._name(member), []).append(vb_id)
        if not able:
            self._plan.ends[vb_id] = "no node that is up has a copy"
            return
        best_member = max(able, key=lambda member: _length(able[member]))
        self._plan.ends[vb_id] = (
            f"{self._name(best_member)} has the longest log, up to seqno "
            f"{able[best_member].end_seqno}"
        )
        if self._accepts_loss:
            copies = [member for member in base.copies if member in spoken]
            record = rebuild(base, copies, {best_member}, above=above, is_clean=False)
            self._put_record(vb_id, record)

    def _name(self, member: str) -> str:
        return self._names.get(member, member)

    # -- what is written ---------------------------------------------------------------------------

    def _put_record(self, vb_id: int, record: ReplicationRecord) -> None:
        key = self._keys.of_partition(KeyKind.PARTITION, vb_id)
        self._put(key, encode_partition(StoredPartition(record, self._operation)))

    def _put(self, key: bytes, value: bytes) -> None:
        self._puts.append(Put(key, value))

    def _finish(self, cluster: ClusterRecord | None) -> None:
        """Make transactions of what is to be written: the cluster's own record last."""
        puts, plan = self._puts, self._plan
        if self._keys.plan in self._found and (plan.rebuilt or plan.lossy):
            puts.append(Delete(self._keys.plan))
            plan.notes.append("the plan that the store has is given up: it is as old as the store")
        if cluster is not None and (puts or self._keys.cluster not in self._found):
            puts.append(Put(self._keys.cluster, encode_record(cluster)))
        for at in range(0, len(puts), TXN_PARTITIONS):
            part = tuple(puts[at : at + TXN_PARTITIONS])
            compares = tuple(if_unchanged(each.key, self._revision(each.key)) for each in part)
            plan.txns.append(Txn(compares, part))

    def _revision(self, key: bytes) -> int:
        item = self._found.get(key)
        return 0 if item is None else item.mod_revision


def _seen(told: NodeTestimony, name: str) -> SeenRecord | None:
    found = told.records.get(name)
    return None if found is None else SeenRecord(found[0].encode(), found[1])


def _length(end: HeldLog) -> tuple[int, int]:
    """Return how long a log is: by version, then by seqno, as in an election."""
    return end.version_epoch, end.end_seqno


def records_of(records: Mapping[str, SeenRecord]) -> dict[str, tuple[str, int]]:
    """Return seen records as a testimony has them."""
    return {name: (seen.value.decode(), seen.mod_revision) for name, seen in records.items()}
